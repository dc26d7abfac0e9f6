"""A training step on 2 ranks: lockstep's reducer beside torch's DistributedDataParallel, in one run, in turn.

    python benchmarks/reducer.py [--backend gloo] [--rounds 15] [--steps 10]

Prints, for an MLP, a CNN, a 6-layer transformer and a model of 500 small parameters: the median time of a step
(forward, backward, AdamW) and the ratio; the same for the process's first step, counted from the end of `import torch`;
and the peak of memory.
"""

import argparse
import json
import multiprocessing
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from common import keep, machine


def build(name):
    import torch
    from torch import nn

    torch.manual_seed(0)
    if name == "MLP":
        return nn.Sequential(
            nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10)
        ), torch.randn(64, 256)
    if name == "CNN":
        layers = [
            layer
            for i, o in ((3, 32), (32, 64), (64, 64))
            for layer in (nn.Conv2d(i, o, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2))
        ]
        return nn.Sequential(*layers, nn.Flatten(), nn.Linear(64 * 16, 10)), torch.randn(16, 3, 32, 32)
    if name == "transformer":
        layer = nn.TransformerEncoderLayer(128, 4, 512, dropout=0.0, batch_first=True)
        return nn.TransformerEncoder(layer, 6, enable_nested_tensor=False), torch.randn(8, 64, 128)
    return nn.Sequential(*(nn.Linear(16, 16) for _ in range(250))), torch.randn(8, 16)


MODELS = ("MLP", "CNN", "transformer", "500 small")
TOOLS = ("torch", "replicate", "DistributedDataParallel")


def attach(tool, model):
    import torch

    import lockstep

    if tool == "torch":
        return torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    return (
        lockstep.replicate(model, sync_batchnorm=False)
        if tool == "replicate"
        else lockstep.DistributedDataParallel(model)
    )


def be_a_rank(rank, store, backend, name, rounds, steps, queue):
    import torch
    import torch.distributed as dist

    import lockstep  # noqa: F401  (registers shm)

    torch.set_num_threads(1)
    dist.init_process_group(backend, store=dist.FileStore(store, 2), rank=rank, world_size=2)
    runs = {}
    for tool in TOOLS:
        model, x = build(name)
        model = attach(tool, model)
        runs[tool] = model, torch.optim.AdamW(model.parameters(), lr=1e-4), x + rank

    def step(tool):
        model, optimizer, x = runs[tool]
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    times = {tool: [] for tool in TOOLS}
    for number in range(rounds + 2):
        for tool in TOOLS:
            dist.barrier()
            start, busy = time.perf_counter(), time.process_time()
            for _ in range(steps):
                step(tool)
            if number >= 2:
                times[tool].append(((time.perf_counter() - start) / steps, (time.process_time() - busy) / steps))
    if rank == 0:
        queue.put(times)
    dist.barrier()
    dist.destroy_process_group()


FIRST = """
import json, resource, sys, time
import torch, torch.distributed as dist
sys.path.insert(0, {here!r})
from reducer import attach, build
torch.set_num_threads(1)
if {backend!r} == "shm":
    import lockstep  # which registers it, for torch too
dist.init_process_group({backend!r}, store=dist.FileStore({store!r}, 2), rank=int(sys.argv[1]), world_size=2)
start = time.perf_counter()
model, x = build({name!r})
model = attach({tool!r}, model)
attached = time.perf_counter() - start
if {optimizer!r}:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
for step in range({steps}):
    model.zero_grad()
    model(x).square().mean().backward()
    if {optimizer!r}:
        optimizer.step()
    if step == 0:
        first = time.perf_counter() - start
if sys.argv[1] == "0":
    print(json.dumps([attached, first, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024]))
dist.destroy_process_group()
"""


def fresh(tool, name, backend, *, optimizer, steps):
    """Seconds to attach, seconds until the first step is done, peak memory in MB; of two new processes, rank 0's."""
    with tempfile.TemporaryDirectory() as folder:
        code = FIRST.format(
            here=str(Path(__file__).parent),
            backend=backend,
            store=f"{folder}/store",
            name=name,
            tool=tool,
            optimizer=optimizer,
            steps=steps,
        )
        ranks = [
            subprocess.Popen([sys.executable, "-c", code, str(rank)], stdout=subprocess.PIPE, text=True)
            for rank in range(2)
        ]
        first, _ = [rank.communicate()[0] for rank in ranks]
        return json.loads(first)


def steps_of(name, options):
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            context.Process(
                target=be_a_rank,
                args=(rank, f"{folder}/store", options.backend, name, options.rounds, options.steps, queue),
            )
            for rank in range(2)
        ]
        for rank in ranks:
            rank.start()
        times = queue.get(timeout=600)
        for rank in ranks:
            rank.join()
    return times


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", default="gloo")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--models", nargs="*", default=MODELS)
    options = parser.parse_args()
    print(f"{machine()}; 2 ranks, {options.backend}, one thread each")
    rows = {}
    print("\n| model | " + " | ".join(TOOLS) + " | time: torch's (median over rounds) | processor time: torch's |")
    print("|---|---|---|---|---|---|")
    for name in options.models:
        times = rows[name] = steps_of(name, options)
        medians = (f"{statistics.median(wall for wall, _ in times[tool]) * 1e3:.2f} ms" for tool in TOOLS)
        pairs = list(zip(times["replicate"], times["torch"], strict=True))
        ratios = (f"{statistics.median(ours[i] / theirs[i] for ours, theirs in pairs):.3f}" for i in (0, 1))
        print(f"| {name} | {' | '.join(medians)} | {' | '.join(ratios)} |", flush=True)
    print(
        "\n| fresh process, MLP | attached after, s | first backward done, s | first step of AdamW done, s | peak, "
        "MB |\n|---|---|---|---|---|"
    )
    for tool in TOOLS:
        bare = [fresh(tool, "MLP", options.backend, optimizer=False, steps=5) for _ in range(3)]
        whole = [fresh(tool, "MLP", options.backend, optimizer=True, steps=5) for _ in range(3)]
        rows[f"fresh {tool}"] = {"without optimizer": bare, "with": whole}
        attached, first, peak = (statistics.median(column) for column in zip(*bare, strict=True))
        stepped = statistics.median(row[1] for row in whole)
        print(f"| {tool} | {attached:.3f} | {first:.2f} | {stepped:.2f} | {peak:.0f} |", flush=True)
    keep(f"reducer-{options.backend}", rows)


if __name__ == "__main__":
    main()
