"""Collectives on shm beside gloo, from Python, in one run: both groups live in the same ranks and are called in turn.

python benchmarks/collectives.py            2 and 4 ranks, 4 B to 100 MB
"""

import multiprocessing
import sys
import tempfile
import time

from common import keep, machine, median, seconds

SIZES = (4, 64, 1024, 16 * 1024, 256 * 1024, 1 << 20, 4 << 20, 25 << 20, 100 * 10**6)
ROUNDS = 7


def calls(size, bytes_, shm):
    """Each collective on float32 messages of so many bytes (all_gather: from each rank).

    "a bucket" is how lockstep's reducer sums gradients on shm, where they lie; beside it the all_reduce of gloo.
    """
    import torch
    import torch.distributed as dist

    from lockstep.shm.placed import place
    from lockstep.shm.tensors import LATER

    x = torch.ones(bytes_ // 4)
    bucket = place(shm, bytes_ // 4, torch.float32)
    again = shm._tensors.prepare_sum(bucket.own, bucket)
    parts = [torch.empty_like(x) for _ in range(size)]
    return {
        "all_reduce": lambda group: dist.all_reduce(x, group=group),
        "a bucket": lambda group: (
            group.sum_again(bucket.own, again, LATER).wait() if group is shm else dist.all_reduce(x, group=group)
        ),
        "all_gather": lambda group: dist.all_gather(parts, x, group=group),
        "broadcast": lambda group: dist.broadcast(x, 0, group=group),
        "barrier": lambda group: dist.barrier(group=group),
    }


def measure(rank, size, store, results):
    import torch
    import torch.distributed as dist

    import lockstep  # noqa: F401  (registers shm)

    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, size), rank=rank, world_size=size)
    groups = {"gloo": dist.group.WORLD, "shm": dist.new_group(backend="shm")}
    for bytes_ in SIZES:
        for name, call in calls(size, bytes_, groups["shm"]).items():
            if name == "barrier" and bytes_ != SIZES[0]:
                continue
            times = in_turn(call, groups, repeats=max(1, min(200, (4 << 20) // bytes_)))
            if rank == 0:
                results.put((name, bytes_, times))
    dist.barrier()
    if rank == 0:
        x = torch.ones(SIZES[-1] // 4)
        copy = torch.empty_like(x).copy_(x)
        results.put(
            ("plain copy", SIZES[-1], {"copy": median([seconds(lambda: copy.copy_(x)) for _ in range(ROUNDS)])})
        )
        results.put(None)
    dist.barrier()
    dist.destroy_process_group()


def in_turn(call, groups, repeats):
    """The median time of a call on each group, over rounds of calls on one and then the other."""
    times = {backend: [] for backend in groups}
    for number in range(ROUNDS + 1):
        for backend, group in groups.items():
            call(group)  # together
            start = time.perf_counter()
            for _ in range(repeats):
                call(group)
            if number:
                times[backend].append((time.perf_counter() - start) / repeats)
    return {backend: median(rows) for backend, rows in times.items()}


def run(size):
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        results = context.SimpleQueue()
        ranks = [context.Process(target=measure, args=(rank, size, f"{folder}/store", results)) for rank in range(size)]
        for rank in ranks:
            rank.start()
        rows = list(iter(results.get, None))
        for rank in ranks:
            rank.join()
    return rows


def show(seconds):
    return f"{seconds * 1e6:.1f} us" if seconds < 1e-3 else f"{seconds * 1e3:.2f} ms"


def main():
    kept = {}
    print(machine())
    for size in map(int, sys.argv[1:] or ("2", "4")):
        print(f"\n{size} ranks\n{'':12}{'bytes':>12}{'gloo':>12}{'shm':>12}{'ratio':>8}")
        kept[size] = run(size)
        for name, bytes_, times in kept[size]:
            if "copy" in times:
                print(f"{name:12}{bytes_:>12,}{show(times['copy']):>24}")
            else:
                gloo, shm = times["gloo"], times["shm"]
                print(f"{name:12}{bytes_:>12,}{show(gloo):>12}{show(shm):>12}{gloo / shm:>8.1f}")
    keep("collectives", kept)


if __name__ == "__main__":
    main()
