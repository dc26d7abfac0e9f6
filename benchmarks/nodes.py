"""all_reduce over two machines of two ranks each, with a link of 1 Gbit/s: by nodes ("hierarchy") beside plain gloo.

The machines are network namespaces on a bridge, the link is tc's token bucket on each machine's side of it. Each has
its share of the cores here for itself, as machines have: where all ranks run on all cores, the scheduler is what is
measured. Needs root and iproute2. Writes results/nodes.json.

    python benchmarks/nodes.py
"""

import json
import os
import statistics
import sys
from pathlib import Path

from common import machine

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "tests"))

SIZES = (16, 4_096, 65_536, 1_048_576, 4_194_304)  # float32
LIMIT = ("rate", "1gbit", "burst", "256kb", "latency", "100ms")
SECONDS = 1.2  # of each measurement

INSIDE = f"""
import json, sys, time
import torch, lockstep
import torch.distributed as dist

world = lockstep.init(backend=sys.argv[1], timeout=60)
torch.set_num_threads(1)
for count in {SIZES}:
    x = torch.ones(count)
    for _ in range(3):
        dist.all_reduce(x)
        x.fill_(1)
    times = []
    # A number of turns, so that all ranks make as many; from the time that rank 0 needs for one.
    begin = time.perf_counter()
    dist.all_reduce(x)
    turns = torch.tensor([max(5, min(300, int({SECONDS} / (time.perf_counter() - begin))))])
    dist.broadcast(turns, 0)
    for _ in range(int(turns)):
        begin = time.perf_counter()
        dist.all_reduce(x)
        times.append(time.perf_counter() - begin)
        x.fill_(1)
    if world.rank == 0:
        print(json.dumps([count, sorted(times)[len(times) // 2] * 1e3, len(times)]), flush=True)
"""


def measure(backend):
    """Milliseconds by number of floats."""
    from launching import LOCKSTEP
    from namespaces import nodes, results

    cores = sorted(os.sched_getaffinity(0))
    with nodes(2) as made:
        started = []
        for number, node in enumerate(made):
            node.command("tc", "qdisc", "add", "dev", "eth0", "root", "tbf", *LIMIT)
            own = ["taskset", "-c", ",".join(map(str, cores[number::2])), *LOCKSTEP]
            where = ("--nnodes", 2, "--node-rank", number, "--master-addr", made[0].address, "-n", 2)
            started.append(node.lockstep(INSIDE, *where, arguments=(backend,), launcher=own))
        found = results(started)
    assert [code for code, _, _ in found] == [0, 0], found
    return {int(c): ms for c, ms, _ in map(json.loads, found[0][1].splitlines())}


def main():
    """Measure both, in turn, and print a table."""
    runs = {name: [measure(name) for _ in range(2)] for name in ("gloo", "hierarchy")}
    table = []
    for count in SIZES:
        gloo, ours = (statistics.median(run[count] for run in runs[name]) for name in ("gloo", "hierarchy"))
        table.append(
            {"floats": count, "gloo ms": round(gloo, 3), "hierarchy ms": round(ours, 3), "ratio": round(ours / gloo, 2)}
        )
        print(f"{count:>9} floats: gloo {gloo:8.3f} ms, hierarchy {ours:8.3f} ms, {ours / gloo:.2f} of it")
    found = {"machine": machine(), "all_reduce": table}
    (HERE / "results" / "nodes.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
