"""How long an epoch takes to start, and to go on in its middle, and how much memory that needs.

lockstep's sampler and loader beside torch's, Accelerate's and torchdata's. Rank 1 of 4, shuffled, batches of 256 local
samples. Every measurement is a fresh process; rounds alternate. Run it as ``python benchmarks/sampler.py``; ``--full``
lifts the limits on those that take gigabytes or minutes.
"""

import json
import resource
import subprocess
import sys
import time
from functools import partial
from itertools import islice

from common import alternate, keep, machine, median, with_peers

RANKS, RANK, BATCH, ROUNDS = 4, 1, 256, 3
SIZES = (10**6, 10**7, 10**8)


def torch_sampler(n):
    from torch.utils.data import DistributedSampler

    return DistributedSampler(range(n), RANKS, RANK)


def lockstep_sampler(n):
    import lockstep

    return lockstep.DistributedSampler(range(n), RANKS, RANK)


def start_sampler(make):
    def measure(n):
        sampler = make(n)
        return lambda: next(iter(sampler))

    return measure


def resume_torch_sampler(n):
    sampler = torch_sampler(n)
    return lambda: next(islice(sampler, n // 2 // RANKS, None))


def resume_lockstep_sampler(n):
    sampler = lockstep_sampler(n)
    state = {"epoch": 0, "position": n // 2, "seed": 0, "samples": n}

    def resume():
        sampler.load_state_dict(state)
        next(iter(sampler))

    return resume


def start_torch_loader(n):
    from torch.utils.data import DataLoader

    loader = DataLoader(range(n), BATCH, sampler=torch_sampler(n))
    return lambda: next(iter(loader))


def resume_torch_loader(n):
    from torch.utils.data import DataLoader

    loader = DataLoader(range(n), BATCH, sampler=torch_sampler(n))
    return lambda: next(islice(loader, n // 2 // RANKS // BATCH, None))


def start_lockstep_loader(n):
    import lockstep

    loader = lockstep.DataLoader(range(n), BATCH, shuffle=True)
    return lambda: next(iter(loader))


def resume_lockstep_loader(n):
    import lockstep

    loader = lockstep.DataLoader(range(n), BATCH, shuffle=True)
    state = {**loader.state_dict(), "position": n // 2 // BATCH * BATCH}

    def resume():
        loader.load_state_dict(state)
        next(iter(loader))

    return resume


def start_accelerate(n):
    from accelerate import Accelerator
    from torch.utils.data import DataLoader

    loader = Accelerator(cpu=True).prepare(DataLoader(range(n), BATCH, shuffle=True))
    return lambda: next(iter(loader))


def resume_accelerate(n):
    from accelerate import Accelerator, skip_first_batches
    from torch.utils.data import DataLoader

    loader = Accelerator(cpu=True).prepare(DataLoader(range(n), BATCH, shuffle=True))
    return lambda: next(iter(skip_first_batches(loader, n // 2 // BATCH)))


def start_torchdata(n):
    from torchdata.stateful_dataloader import StatefulDataLoader

    loader = StatefulDataLoader(range(n), BATCH, shuffle=True)
    return lambda: next(iter(loader))


def resume_torchdata(n):
    from torchdata.stateful_dataloader import StatefulDataLoader

    loader = StatefulDataLoader(range(n), BATCH, shuffle=True)
    for _ in islice(loader, n // 2 // BATCH):
        pass
    state = loader.state_dict()

    def resume():
        again = StatefulDataLoader(range(n), BATCH, shuffle=True)
        again.load_state_dict(state)
        next(iter(again))

    return resume


# The measurement, and the largest size it is taken at without --full: beyond, a process needs gigabytes
# or a minute.
CASES = {
    "sampler, start": {
        "lockstep": (start_sampler(lockstep_sampler), 10**8),
        "torch": (start_sampler(torch_sampler), 10**7),
    },
    "sampler, resume": {"lockstep": (resume_lockstep_sampler, 10**8), "torch": (resume_torch_sampler, 10**7)},
    "loader, start": {
        "lockstep": (start_lockstep_loader, 10**8),
        "torch": (start_torch_loader, 10**7),
        "accelerate": (start_accelerate, 10**7),
        "torchdata": (start_torchdata, 10**7),
    },
    "loader, resume": {
        "lockstep": (resume_lockstep_loader, 10**8),
        "torch": (resume_torch_loader, 10**7),
        "accelerate": (resume_accelerate, 10**7),
        "torchdata": (resume_torchdata, 10**6),
    },
}


def measure(case: str, who: str, n: int) -> None:
    """Print seconds and growth of the process in MB, in a process of its own."""
    make = CASES[case][who][0]
    make(1000)()  # imports, and what is made once
    act = make(n)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.perf_counter()
    act()
    seconds = time.perf_counter() - start
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    print(json.dumps({"seconds": seconds, "grown_mb": grown}))


def seconds_and_memory(case: str, who: str, n: int):
    command = [sys.executable, __file__, "--measure", case, who, str(n)]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1])


def main() -> None:
    full = "--full" in sys.argv
    print(machine())
    print(f"medians of {ROUNDS} fresh processes; memory: growth of the process's peak while it starts or resumes\n")
    print(f"{'':16} {'samples':>11} {'':11} {'time':>12} {'memory':>10}   ratio to lockstep")
    rows = []
    for case, whos in CASES.items():
        for n in SIZES:
            taken = {
                who: partial(seconds_and_memory, case, who, n) for who, (_, most) in whos.items() if full or n <= most
            }
            found = alternate(taken, ROUNDS)
            ours = median([each["seconds"] for each in found["lockstep"]])
            for who in whos:
                if who not in found:
                    print(f"{case:16} {n:11,} {who:11} {'-':>12} {'-':>10}   not measured at this size (see --full)")
                    continue
                seconds = median([each["seconds"] for each in found[who]])
                grown = median([each["grown_mb"] for each in found[who]])
                print(f"{case:16} {n:11,} {who:11} {seconds * 1e3:9.2f} ms {grown:7.1f} MB   {seconds / ours:,.1f}")
                rows.append({"case": case, "samples": n, "who": who, "runs": found[who]})
    keep("sampler", rows)


if __name__ == "__main__":
    if "--measure" in sys.argv:
        measure(sys.argv[2], sys.argv[3], int(sys.argv[4]))
    else:
        with_peers()
        main()
