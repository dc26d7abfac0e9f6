"""What `lockstep run --watch` costs a training step, on two ranks of one machine.

    python benchmarks/watch.py [ROUNDS]

"Runs": whole runs with and without it, in turn; the median step of each, and the median of the ratios of neighbours.
With --stall 2 the launcher asks sixty times as often as by itself, so that each run is asked several times. Runs of
the same thing differ by more than what is looked for, so the two parts of the cost are measured alone as well: "count",
what a step pays, in one run, blocks of steps with and without it in turn; "answer", what a rank does each time that it
is asked, eight times in a stall time (120 s), in which it holds Python's lock for as long at most.

The step is a small one, a perceptron with two hidden layers on 64 samples, averaged over ranks: of larger ones it is
less. Writes results/watch.json.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import common

SCRIPT = """
import json, os, statistics, sys, time
import torch, lockstep
from torch import nn
from torch.optim import optimizer as hooks

world = lockstep.init()
torch.set_num_threads(1)
torch.manual_seed(0)
layers = [nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)]
model = lockstep.replicate(nn.Sequential(*layers))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
x, y = torch.randn(64, 64), torch.randint(10, (64,))


def block(steps=10):
    world.barrier()
    begin = time.perf_counter()
    for _ in range(steps):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    world.barrier()
    return (time.perf_counter() - begin) / steps


block(200)
if sys.argv[1] == "run":
    found = {"step": statistics.median(block() for _ in range(100))}
else:
    counting = dict(hooks._global_optimizer_post_hooks)
    assert counting, "nobody counts steps"
    rows = {"with": [], "without": []}
    for number in range(400):
        for name in sorted(rows, reverse=number % 2):
            hooks._global_optimizer_post_hooks.clear()
            if name == "with":
                hooks._global_optimizer_post_hooks.update(counting)
            rows[name].append(block())
    from lockstep.watch import record
    null, times = os.open(os.devnull, os.O_WRONLY), []
    for _ in range(300):
        begin = time.perf_counter()
        record._tell(null, pid=os.getpid(), steps=7)
        times.append(time.perf_counter() - begin)
    found = rows | {"answer": statistics.median(times)}
world.print(json.dumps(found))
"""


def launch(script: Path, what: str, *options: str) -> dict:
    line = [sys.executable, "-m", "lockstep_cli", "run", "-n", "2", *options, str(script), what]
    out = subprocess.run(line, check=True, capture_output=True, text=True).stdout
    return json.loads(next(row for row in out.splitlines() if row.startswith("{")))


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "train.py")
        script.write_text(SCRIPT)
        inside = launch(script, "inside", "--watch")
        options = {"with": ("--watch", "--stall", "2"), "without": ("--no-watch",)}
        runs = common.alternate(
            {name: lambda more=more: launch(script, "run", *more)["step"] for name, more in options.items()}, rounds
        )
    print(common.machine())
    ratios = [a / b for a, b in zip(runs["with"], runs["without"], strict=True)]
    for name, values in runs.items():
        print(
            f"runs, {name:<8} {common.median(values) * 1e6:8.1f} us a step  ({min(values) * 1e6:.1f} to {max(values) * 1e6:.1f})"
        )
    print(f"runs, ratio    {common.median(ratios):8.4f}  ({min(ratios):.4f} to {max(ratios):.4f})")
    pairs = [a / b for a, b in zip(inside["with"], inside["without"], strict=True)]
    step = common.median(inside["without"])
    print(f"count, ratio   {common.median(pairs):8.4f}  of {step * 1e6:.1f} us")
    print(f"answer         {inside['answer'] * 1e6:8.1f} us, 8 in 120 s: {inside['answer'] * 8 / 120:.1e} of the time")
    common.keep("watch", {"runs": runs, "inside": inside})


if __name__ == "__main__":
    main()
