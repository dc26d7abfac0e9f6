"""Steps of one CPU process: plain torch beside the same after lockstep.init, which has freed memory kept.

    python benchmarks/allocator.py

Each run is a process of its own, in turn: whether glibc hands memory back in the middle of a step depends on accidents
of its start. Medians over runs of the median step, of pages given anew in a step, and of the most memory used.
"""

import json
import resource
import subprocess
import sys
import time
from pathlib import Path

from common import keep, machine, median
from step import build

RUNS = 9
MODELS = {"cnn": (32, 40), "cnn, batch of 128": (128, 15), "transformer": (16, 6)}  # samples and steps


def measure(name, start):
    """In a process: some steps to warm up, then those that count."""
    import torch

    torch.set_num_threads(1)
    if start == "lockstep.init":
        import lockstep

        lockstep.init(device="cpu")
    samples, steps = MODELS[name]
    model, draw = build(name.split(",")[0])
    x, y = draw(samples), torch.randint(10, (samples,))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    times, pages = [], []
    for _ in range(steps + 5):
        before, began = resource.getrusage(resource.RUSAGE_SELF).ru_minflt, time.perf_counter()
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        times.append(time.perf_counter() - began)
        pages.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(json.dumps({"ms": median(times[5:]) * 1e3, "pages": sum(pages[5:]) / steps, "peak MiB": peak}))


def main():
    kept = {}
    print(f"{machine()}\n\n{'':20}{'':16}{'ms a step':>12}{'of plain':>10}{'pages a step':>14}{'peak MiB':>10}")
    for name in MODELS:
        runs = {"plain torch": [], "lockstep.init": []}
        for _ in range(RUNS):
            for start, rows in runs.items():
                command = [sys.executable, __file__, "--in-run", name, start]
                done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(__file__).parent)
                rows.append(json.loads(done.stdout))
        middle = {s: {key: median([row[key] for row in rows]) for key in rows[0]} for s, rows in runs.items()}
        kept[name] = middle
        for start, row in middle.items():
            ratio = row["ms"] / middle["plain torch"]["ms"]
            print(f"{name:20}{start:16}{row['ms']:>12.1f}{ratio:>10.2f}{row['pages']:>14.0f}{row['peak MiB']:>10.0f}")
    keep("allocator", kept)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--in-run"]:
        measure(*sys.argv[2:])
    else:
        main()
