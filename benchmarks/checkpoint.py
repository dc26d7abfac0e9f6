"""What a save costs: lockstep.Checkpoint beside torch.save by rank 0 and torch.distributed.checkpoint, on two ranks.

100 million parameters with Adam state, 1.2 GB. For each: how long the loop is held up (until every rank may go on), how
long until all is on the disk (synced), and how much more memory both ranks together take meanwhile. torch.save is
followed by the fsync that it leaves out, which counts as durable only. `python benchmarks/checkpoint.py [folder]` says
on which disk.
"""

import gc
import os
import shutil
import sys
import tempfile
import threading
import time
from pathlib import Path

from common import keep, machine, median

ROUNDS, LAYERS, WIDTH = 3, 25, 2000


class Peak:
    """The most anonymous memory that this process has meanwhile, in bytes beyond what it had."""

    def __enter__(self):
        self.before = self.most = self.now()
        self.over = threading.Event()
        self.thread = threading.Thread(target=self.watch)
        self.thread.start()
        return self

    def __exit__(self, *error):
        self.over.set()
        self.thread.join()

    def watch(self):
        while not self.over.wait(0.005):
            self.most = max(self.most, self.now())

    @property
    def more(self):
        return self.most - self.before

    @staticmethod
    def now():
        lines = Path("/proc/self/status").read_text().splitlines()
        return 1024 * int(next(line for line in lines if line.startswith("RssAnon")).split()[1])


def sync_all(folder):
    for path in [folder, *folder.rglob("*")]:
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)


def by_torch_save(folder, world, model, optimizer):
    import torch

    if world.is_main:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, folder / "all.pt")
    world.barrier()

    def wait():
        if world.is_main:
            sync_all(folder)
        world.barrier()

    return wait


def state_of(model, optimizer):
    from torch.distributed.checkpoint.state_dict import get_state_dict

    names = ("model", "optimizer")
    return dict(zip(names, get_state_dict(model, optimizer), strict=True))


def by_dcp_save(folder, world, model, optimizer):
    import torch.distributed.checkpoint as dcp

    dcp.save(state_of(model, optimizer), checkpoint_id=folder)
    return world.barrier


def by_dcp_async_save(folder, world, model, optimizer):
    import torch.distributed.checkpoint as dcp

    future = dcp.async_save(state_of(model, optimizer), checkpoint_id=folder)

    def wait():
        future.result()
        world.barrier()

    return wait


def job(disk):
    import warnings

    import torch
    import torch.distributed as dist

    import lockstep

    warnings.simplefilter("ignore")
    world = lockstep.init(backend="gloo", device="cpu", seed=0)
    torch.set_num_threads(1)
    model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
    optimizer = torch.optim.Adam(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    checkpoint = lockstep.Checkpoint(disk / "lockstep", model=model, optimizer=optimizer)

    def by_lockstep(*_):
        checkpoint.save()
        return checkpoint.wait

    cases = {
        "torch.save by rank 0": by_torch_save,
        "DCP save": by_dcp_save,
        "DCP async_save": by_dcp_async_save,
        "lockstep": by_lockstep,
    }
    rows = {name: [] for name in cases}
    for number in range(ROUNDS + 1):
        for name, case in cases.items():
            folder = disk / f"{number}-{name.replace(' ', '-')}"
            if world.is_main:
                folder.mkdir()
                os.sync()  # what the case before has left to write
            wait = None  # it may hold the memory of the case before
            gc.collect()
            world.barrier()
            with Peak() as peak:
                start = time.perf_counter()
                wait = case(folder, world, model, optimizer)
                held = time.perf_counter() - start
                wait()
                durable = time.perf_counter() - start
            facts = world.ranks.line_up(torch.tensor([held, durable, peak.more], dtype=torch.float64))
            rows[name].append([float(facts[:, 0].max()), float(facts[:, 1].max()), float(facts[:, 2].sum())])
            world.barrier()
            if world.is_main:
                shutil.rmtree(folder)
                for saved in (disk / "lockstep").glob("*"):
                    shutil.rmtree(saved)
    dist.barrier()
    return rows


def steps():
    """Microseconds that `Checkpoint.step` takes when there is nothing to do."""
    import lockstep

    lockstep.init(device="cpu", seed=0)
    checkpoint = lockstep.Checkpoint("/nowhere", values={})
    for _ in range(1000):
        checkpoint.step()
    start = time.perf_counter()
    for _ in range(5000):
        checkpoint.step()
    return (time.perf_counter() - start) / 5000 * 1e6


def main():
    import lockstep

    base = sys.argv[1] if len(sys.argv) > 1 else None
    with tempfile.TemporaryDirectory(dir=base) as disk:
        rows = lockstep.launch(job, Path(disk), ranks=2)[0]
    size = 3 * 4 * LAYERS * WIDTH**2 / 1e9
    print(machine())
    print(f"{size:.1f} GB of state, 2 ranks; median of {ROUNDS} rounds, the first save of each in brackets")
    reference = median([row[0] for row in rows["torch.save by rank 0"][1:]])
    for name, found in rows.items():
        held, durable = (median([row[place] for row in found[1:]]) for place in (0, 1))
        most = max(row[2] for row in found) / 1e9
        print(
            f"{name:22} held up {held:6.2f} s ({found[0][0]:.2f}), {held / reference:4.0%} of torch.save; "
            f"durable {durable:6.2f} s ({found[0][1]:.2f}); {most:.2f} GB more"
        )
    costs = {ranks: max(lockstep.launch(steps, ranks=ranks)) for ranks in (1, 2)}
    print(f"checkpoint.step() with nothing to do: {costs[1]:.1f} us alone, {costs[2]:.1f} us on 2 ranks")
    keep("checkpoint", {"saves": rows, "step": costs})


if __name__ == "__main__":
    main()
