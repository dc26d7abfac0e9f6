"""What O1 and O2 cost beside torch.autocast and GradScaler written by hand: CPU, bf16, one process and two.

A convolutional net, where all run the same operations in the same types, and an encoder block, where apex's lists (and
so O1) keep softmax, GELU and layer norm in fp32 and autocast on a CPU does not. By hand on two ranks: torch's DDP. Each
turn of O1 installs its casts before and takes them away after the clock, so the loop by hand meets plain torch.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from common import alternate, keep, machine, median, seconds
from torch import nn
from torch.nn.functional import cross_entropy

import lockstep
from lockstep import amp
from lockstep.amp.casting import CASTS

STEPS, ROUNDS = 4, 25


def conv_net():
    layers, width = [], 3
    for channels in (32, 64, 64):
        layers += [nn.Conv2d(width, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels), nn.ReLU()]
        layers += [nn.MaxPool2d(2)]
        width = channels
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(64 * 16, 10)), torch.randn(16, 3, 32, 32)


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.block = nn.TransformerEncoderLayer(128, 4, 512, dropout=0.0, activation="gelu", batch_first=True)
        self.head = nn.Linear(128, 10)

    def forward(self, x):
        return self.head(self.block(x).mean(1))


def encoder():
    return Encoder(), torch.randn(16, 64, 128)


def by_hand(model, x, target, wrap):
    model = wrap(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu")

    def step():
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = cross_entropy(model(x), target)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    return lambda: seconds(lambda: [step() for _ in range(STEPS)])


def at_level(level):
    def tool(model, x, target, wrap):
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
        model, optimizer = amp.initialize(model, optimizer, opt_level=level, loss_scale="dynamic", verbosity=0)
        scaler = amp._amp_state.loss_scalers[0]
        CASTS.deactivate()
        wrapped = wrap(model)

        def step():
            optimizer.zero_grad()
            loss = cross_entropy(wrapped(x), target)
            with amp.scale_loss(loss, optimizer) as scaled:
                scaled.backward()
            optimizer.step()

        def turn():
            amp._amp_state.loss_scalers = [scaler]
            if level == "O1":
                CASTS.activate(("cpu",), torch.bfloat16)
            try:
                return seconds(lambda: [step() for _ in range(STEPS)])
            finally:
                CASTS.deactivate()

        return turn

    return tool


TOOLS = {"by hand": by_hand, "O1": at_level("O1"), "O2": at_level("O2")}


def measure(wraps):
    torch.set_num_threads(1)
    rows = {}
    for make in (conv_net, encoder):
        turns = {}
        for name, tool in TOOLS.items():
            torch.manual_seed(0)
            model, x = make()
            turns[name] = tool(model, x, torch.arange(len(x)) % 10, wraps["by hand" if name == "by hand" else "amp"])
        rows[make.__name__] = alternate(turns, ROUNDS)
    return rows


def on_a_rank():
    lockstep.init(device="cpu")
    rows = measure({"by hand": nn.parallel.DistributedDataParallel, "amp": lockstep.DistributedDataParallel})
    if dist.get_rank() == 0:
        Path(os.environ["ROWS"]).write_text(json.dumps(rows))


def two_ranks():
    with tempfile.TemporaryDirectory() as folder:
        rows = Path(folder) / "rows.json"
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", __file__, "rank"]
        subprocess.run(command, check=True, env={**os.environ, "ROWS": str(rows), "OMP_NUM_THREADS": "1"})
        return json.loads(rows.read_text())


def main():
    print(machine())
    rows = {"one process": measure({"by hand": lambda m: m, "amp": lambda m: m}), "two ranks, shm": two_ranks()}
    for where, nets in rows.items():
        for net, tools in nets.items():
            print(f"\n{where}, {net}: milliseconds per step, median of {ROUNDS} rounds of {STEPS}")
            for name, values in tools.items():
                ratio = median([a / b for a, b in zip(values, tools["by hand"], strict=True)])
                print(f"  {name:8} {median(values) / STEPS * 1e3:8.2f}   x {ratio:.3f}")
    keep("amp", rows)


if __name__ == "__main__":
    on_a_rank() if "rank" in sys.argv else main()
