"""What a step costs around the arithmetic: lockstep.Update beside Accelerate, Fabric, Ignite and a loop by hand.

A linear layer of 8 on one thread, so that the frame and not the arithmetic is measured: microseconds per step over the
loop by hand, in a world of one. Then two ranks on gloo: over the loop by hand around torch's DDP.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

from common import keep, machine, median, with_peers

STEPS, ROUNDS = 300, 40


def by_hand(model, optimizer):
    def step(x):
        optimizer.zero_grad()
        loss = model(x).square().mean(1).mean()
        loss.backward()
        optimizer.step()

    return step


def with_lockstep(model, optimizer):
    import lockstep

    model = lockstep.replicate(model)
    update = lockstep.Update(model, optimizer)

    def step(x):
        with update:
            update.backward(model(x).square().mean(1))

    return step


def with_accelerate(model, optimizer):
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(model, optimizer)

    def step(x):
        optimizer.zero_grad()
        accelerator.backward(model(x).square().mean(1).mean())
        optimizer.step()

    return step


def with_fabric(model, optimizer):
    from lightning_fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=1)
    model, optimizer = fabric.setup(model, optimizer)

    def step(x):
        optimizer.zero_grad()
        fabric.backward(model(x).square().mean(1).mean())
        optimizer.step()

    return step


def with_ignite(model, optimizer):
    from ignite.engine import Engine

    def update(_, x):
        optimizer.zero_grad()
        loss = model(x).square().mean(1).mean()
        loss.backward()
        optimizer.step()
        return loss

    engine = Engine(update)
    return lambda x: engine.run([x] * STEPS, max_epochs=1)


def measure(tools, x, make_model):
    """Microseconds per step: every tool once a round, in turn, after a round that does not count."""
    import torch

    steps = {}
    for name, tool in tools.items():
        torch.manual_seed(0)
        model = make_model()
        steps[name] = tool(model, torch.optim.SGD(model.parameters(), lr=1e-3))
    rows = {name: [] for name in tools}
    for number in range(ROUNDS + 1):
        for name, step in steps.items():
            start = time.perf_counter()
            if name == "Ignite":
                step(x)
            else:
                for _ in range(STEPS):
                    step(x)
            if number:
                rows[name].append((time.perf_counter() - start) / STEPS * 1e6)
    return rows


def alone():
    """A world of one."""
    import torch

    torch.set_num_threads(1)
    tools = {"by hand": by_hand, "lockstep": with_lockstep, "Ignite": with_ignite}
    tools |= {"Fabric": with_fabric, "Accelerate": with_accelerate}
    return measure(tools, torch.randn(16, 8), lambda: torch.nn.Linear(8, 8))


def on_a_rank():
    """Two ranks: torch's DDP and a loop by hand, beside lockstep."""
    import torch
    import torch.distributed as dist

    import lockstep

    torch.set_num_threads(1)
    lockstep.init(backend="gloo", device="cpu")

    def ddp_by_hand(model, optimizer):
        return by_hand(torch.nn.parallel.DistributedDataParallel(model), optimizer)

    rows = measure(
        {"torch DDP": ddp_by_hand, "lockstep": with_lockstep}, torch.randn(16, 8), lambda: torch.nn.Linear(8, 8)
    )
    if dist.get_rank() == 0:
        Path(os.environ["ROWS"]).write_text(json.dumps(rows))


def two_ranks(folder):
    """Start this file on two ranks."""
    rows = Path(folder) / "rows.json"
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", __file__, "rank"]
    subprocess.run(command, check=True, env={**os.environ, "ROWS": str(rows), "OMP_NUM_THREADS": "1"})
    return json.loads(rows.read_text())


def main():
    import tempfile

    print(machine())
    rows = {"alone": alone()}
    with tempfile.TemporaryDirectory() as folder:
        rows["two ranks, gloo"] = two_ranks(folder)
    for title, tools in rows.items():
        base = next(iter(tools))
        print(f"\n{title}: microseconds per step, median of {ROUNDS} rounds of {STEPS}")
        for name, values in tools.items():
            over = median([a - b for a, b in zip(values, tools[base], strict=True)])
            ratio = median(values) / median(tools[base])
            print(f"  {name:12} {median(values):8.1f}   over {base}: {over:+7.1f}   x {ratio:.2f}")
    keep("update", rows)


if __name__ == "__main__":
    with_peers()
    on_a_rank() if "rank" in sys.argv else main()
