"""How long it takes to start ranks and end them, beside torchrun and `accelerate launch`, with 2 and 4 ranks.

    python benchmarks/launch.py [ROUNDS]

"Exit": a script that imports torch, until the launcher has ended. "Collective": until one all_reduce over gloo is done on
rank 0, which prints the time then. On CPU accelerate starts several processes only by MPI or, as here, as if for GPUs.
"""

import subprocess
import sys
import tempfile
import time
from pathlib import Path

import common

IDLE = "import torch"
COLLECTIVE = """
import os, time, torch, torch.distributed as dist
dist.init_process_group("gloo")
x = torch.ones(1)
dist.all_reduce(x)
if dist.get_rank() == 0:
    print(f"done {time.time()} {x.item()}", flush=True)
dist.barrier()
dist.destroy_process_group()
"""
LAUNCHERS = {
    "lockstep": ["lockstep", "run", "-n"],
    "torchrun": ["torchrun", "--nproc-per-node"],
    "accelerate": [
        *("accelerate", "launch", "--multi_gpu", "--num_machines=1", "--mixed_precision=no", "--dynamo_backend=no"),
        *("--main_process_port=0", "--num_processes"),
    ],
}


def command(launcher: str, ranks: int, script: Path) -> list[str]:
    name, *options = LAUNCHERS[launcher]
    return [str(Path(sys.prefix) / "bin" / name), *options, str(ranks), str(script)]


def until_exit(line: list[str]) -> float:
    return common.seconds(lambda: subprocess.run(line, check=True, capture_output=True))


def until_collective(line: list[str], ranks: int) -> float:
    start = time.time()
    out = subprocess.run(line, check=True, capture_output=True, text=True).stdout
    *_, end, total = next(row for row in out.splitlines() if "done" in row).split()
    assert float(total) == ranks, out  # otherwise it has not launched what it should
    return float(end) - start


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 7
    rows = {}
    with tempfile.TemporaryDirectory() as folder:
        idle, collective = Path(folder, "idle.py"), Path(folder, "collective.py")
        idle.write_text(IDLE)
        collective.write_text(COLLECTIVE)
        for ranks in (2, 4):
            rows |= common.alternate(
                {
                    f"exit, {ranks} ranks, {name}": lambda n=name, r=ranks: until_exit(command(n, r, idle))
                    for name in LAUNCHERS
                }
                | {
                    f"collective, {ranks} ranks, {name}": lambda n=name, r=ranks: until_collective(
                        command(n, r, collective), r
                    )
                    for name in LAUNCHERS
                },
                rounds,
            )
    print(common.machine())
    for name, values in rows.items():
        ratio = common.median(values) / common.median(rows[f"{name.rpartition(', ')[0]}, torchrun"])
        print(f"{name:<34} {common.median(values):6.2f} s   {ratio:5.2f} x torchrun")
    common.keep("launch", rows)


if __name__ == "__main__":
    common.with_peers()
    main()
