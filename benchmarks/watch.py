"""What `lockstep run --watch` costs a training step, on two ranks of one machine.

    python benchmarks/watch.py [ROUNDS]

Runs of the same thing differ by more than what is looked for, so each part of the cost is measured alone, inside of a
run with --watch, and set against the median step of it:

- "count": what a step pays, `optimizer.step()` of one number with and without it, in turn;
- "answer": from the launcher's question to a rank's answer, all of which the rank may lose; a rank is asked eight times
  in a stall time (120 s).

"Runs" are whole runs with and without it, in turn: the median step of each, and the median ratio of neighbours. With
--stall 2 the launcher asks sixty times as often as by itself, so that each run is asked several times.

The step is a small one, a perceptron with two hidden layers on 64 samples a rank, averaged over ranks: of larger ones
it is less. Writes results/watch.json.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import common

EVERY = 120 / 8  # seconds between questions

SCRIPT = """
import _thread, json, os, statistics, sys, time
import torch, lockstep
from torch import nn
from torch.optim import optimizer as hooks

world = lockstep.init()
torch.set_num_threads(1)
layers = [nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)]
model = lockstep.replicate(nn.Sequential(*layers))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
x, y = torch.randn(64, 64), torch.randint(10, (64,))


def step():
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()


def each(call, times):
    begin = time.perf_counter()
    for _ in range(times):
        call()
    return (time.perf_counter() - begin) / times


def count():
    counting, one = dict(hooks._global_optimizer_post_hooks), torch.nn.Parameter(torch.ones(1))
    assert counting, "nobody counts steps"
    one.grad, small = torch.ones(1), torch.optim.SGD([one], lr=0.1)
    rows = {"with": [], "without": []}
    for number in range(201):
        for name in sorted(rows, reverse=number % 2):
            hooks._global_optimizer_post_hooks.clear()
            hooks._global_optimizer_post_hooks.update(counting if name == "with" else {})
            rows[name].append(each(small.step, 200))
    hooks._global_optimizer_post_hooks.update(counting)
    return rows


def answer():
    from lockstep.watch import record

    (ask, question), (heard, told) = os.pipe(), os.pipe()
    _thread.start_new_thread(record._answer, (ask, told, record._Steps(), os.getpid()))
    os.read(heard, 65536)

    def turn():
        os.write(question, record.STEPS)
        os.read(heard, 65536)

    return [each(turn, 1) for _ in range(500)]


each(step, 200)
found = {"step": statistics.median(each(step, 10) for _ in range(150))}
if sys.argv[1] == "inside":
    found |= {"count": count(), "answer": answer()}
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
    step, answer = inside["step"], common.median(inside["answer"])
    count = common.median(inside["count"]["with"]) - common.median(inside["count"]["without"])
    print(common.machine())
    print(f"count   {count * 1e6:8.2f} us a step, {count / step:.3%} of one of {step * 1e6:.0f} us")
    print(f"answer  {answer * 1e6:8.2f} us every {EVERY:g} s, {answer / EVERY:.5%} of the time")
    for name, values in runs.items():
        spread = f"({min(values) * 1e6:.0f} to {max(values) * 1e6:.0f})"
        print(f"runs    {common.median(values) * 1e6:8.0f} us a step {name} {spread}")
    ratios = [a / b for a, b in zip(runs["with"], runs["without"], strict=True)]
    print(f"runs    {common.median(ratios):8.3f} of it ({min(ratios):.3f} to {max(ratios):.3f})")
    common.keep("watch", {"runs": runs, "inside": inside})


if __name__ == "__main__":
    main()
