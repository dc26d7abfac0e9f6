"""What synchronised batch norm costs over plain batch norm: per layer and step, 2 ranks, on shm and on gloo.

The 20 layers are those of a ResNet-18 for images of 112 x 112, 16 on each rank. Only the layers run, forward and
backward; "network" is the same step with the convolutions. A step takes as long as it takes on the slower rank: with or
without synchronised batch norm the ranks meet at its end, for the gradients.
"""

import multiprocessing
import sys
import tempfile
import time

import torch
import torch.distributed as dist
from common import alternate, keep, machine, median
from torch import nn

import lockstep

LAYERS = [(64, 56), *[(64, 28)] * 4, *[(128, 14)] * 5, *[(256, 7)] * 5, *[(512, 4)] * 5]  # channels, side
BATCH, ROUNDS = 16, 9


class ResNetLike(nn.Module):
    """Convolutions of ResNet-18's shapes, each with batch norm and ReLU, without the short cuts."""

    def __init__(self):
        super().__init__()
        before, side, parts = 3, 112, []
        for channels, now in LAYERS:
            parts += [nn.Conv2d(before, channels, 3, 1 if now == side else 2, 1), nn.BatchNorm2d(channels), nn.ReLU()]
            before, side = channels, now
        self.parts = nn.Sequential(*parts)

    def forward(self, x):
        return self.parts(x)


def step_seconds(model, x):
    """One forward and backward, all ranks starting together, on the slower rank."""
    dist.barrier()
    start = time.perf_counter()
    y = model(x)
    y.backward(y.detach())  # dense, as gradients from a layer above are
    took = torch.tensor([time.perf_counter() - start], dtype=torch.float64)
    dist.all_reduce(took, dist.ReduceOp.MAX)
    return took.item()


def measure(rank, backend, store, layout, queue):
    """Every distinct layer, then the network, plain and synchronised in turn."""
    torch.set_num_threads(1)
    dist.init_process_group(backend, store=dist.FileStore(store, 2), rank=rank, world_size=2)
    rows = {}
    for channels, side in sorted(set(LAYERS)):
        x = torch.randn(BATCH, channels, side, side).contiguous(memory_format=layout).requires_grad_()
        rows[f"{channels} x {side} x {side}"] = compare(nn.BatchNorm2d(channels), lockstep.SyncBatchNorm(channels), x)
    torch.manual_seed(0)
    images = torch.randn(BATCH, 3, 112, 112).contiguous(memory_format=layout)
    plain, synced = ResNetLike(), lockstep.convert_sync_batchnorm(ResNetLike())
    rows["network"] = compare(plain.to(memory_format=layout), synced.to(memory_format=layout), images)
    if rank == 0:
        queue.put(rows)
    dist.destroy_process_group()


def compare(plain, synced, x):
    """Median seconds of both."""
    rows = alternate({"plain": lambda: step_seconds(plain, x), "synced": lambda: step_seconds(synced, x)}, ROUNDS)
    return {name: median(values) for name, values in rows.items()}


def on_two_ranks(backend, layout):
    """What rank 0 measured."""
    context = multiprocessing.get_context("spawn")
    queue = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        jobs = [context.Process(target=measure, args=(r, backend, f"{folder}/store", layout, queue)) for r in range(2)]
        for job in jobs:
            job.start()
        for job in jobs:
            job.join()
        if any(job.exitcode for job in jobs):
            sys.exit(f"{backend}: a rank failed")
    return queue.get()


def report(backend, layout, rows):
    """One table: each kind of layer, the 20 together, the network."""
    counts = {f"{c} x {s} x {s}": LAYERS.count((c, s)) for c, s in LAYERS}
    rows["20 layers"] = {
        kind: sum(rows[name][kind] * count for name, count in counts.items()) for kind in ("plain", "synced")
    }
    print(f"\n{backend}, {layout}: ms per step\n{'':16}{'layers':>7}{'plain':>9}{'synced':>9}{'over':>8}")
    for name, row in rows.items():
        over = row["synced"] / row["plain"] - 1
        print(f"{name:16}{counts.get(name, 20):>7}{row['plain'] * 1e3:>9.2f}{row['synced'] * 1e3:>9.2f}{over:>8.0%}")


def main():
    """All backends there are, both memory formats."""
    print(machine())
    found = {}
    for backend in ("shm", "gloo"):
        if not dist.is_backend_available(backend):
            print(f"{backend}: not available here")
            continue
        for layout in (torch.contiguous_format, torch.channels_last):
            name = str(layout).removeprefix("torch.")
            found[f"{backend} {name}"] = rows = on_two_ranks(backend, layout)
            report(backend, name, rows)
    keep("syncbn", found)


if __name__ == "__main__":
    main()
