"""Which ways to make a gradient does torch's DDP get wrong? The list is that of tests/parallel/cases.py.

    python benchmarks/ddp_cases.py

Runs every case on 2 ranks against one process on the whole batch, under torch's DDP (as it is, and with
find_unused_parameters=True) and under `lockstep.replicate`, and prints a table in Markdown. Each cell has processes of
its own and 20 seconds.
"""

import multiprocessing
import os
import sys
import tempfile
import warnings
from pathlib import Path
from typing import ClassVar

os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"  # torch's reducer warns line by line

import torch
from common import keep, machine

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from parallel.cases import CASES, Tool

import lockstep

RANKS, SECONDS = 2, 20


class Torch(Tool):
    options: ClassVar = {}

    def wrap(self, model):
        return torch.nn.parallel.DistributedDataParallel(model, **self.options)

    def inner(self, model):
        return model.module

    def no_sync(self, model):
        return model.no_sync()

    def sync(self, model):
        raise NotImplementedError("no such call")


class TorchUnused(Torch):
    options: ClassVar = {"find_unused_parameters": True}


class Lockstep(Tool):
    def wrap(self, model):
        return lockstep.replicate(model)

    def inner(self, model):
        return model

    def no_sync(self, model):
        return lockstep.no_sync(model)

    def sync(self, model):
        lockstep.sync_gradients(model)


TOOLS = {"torch's DDP": Torch, "with find_unused_parameters": TorchUnused, "lockstep": Lockstep}


def be_a_rank(rank, store, tool, name, end):
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, RANKS), rank=rank, world_size=RANKS)
    warnings.simplefilter("ignore")
    try:
        found = {
            key: None if value is None else value.to(torch.complex128).numpy()
            for key, value in CASES[name](TOOLS[tool]([rank])).items()
        }
        end.send(found)
    except Exception as error:
        end.send(f"{type(error).__name__}: {error}".splitlines()[0])


def cell(context, tool, name, expected):
    """What became of one case under one tool."""
    with tempfile.TemporaryDirectory() as folder:
        pipes = [context.Pipe(duplex=False) for _ in range(RANKS)]
        ranks = [
            context.Process(target=be_a_rank, args=(rank, f"{folder}/store", tool, name, pipes[rank][1]))
            for rank in range(RANKS)
        ]
        for rank in ranks:
            rank.start()
        # The errors that a rank's peers have because it raised are not of interest: the first answer decides.
        found = [here.recv() if here.poll(SECONDS) else "hangs" for here, _ in pipes]
        for rank in ranks:
            rank.kill()
            rank.join()
    return judge(found, expected)


def judge(found, expected):
    """One word or two on the ranks' results."""
    if "hangs" in found:
        return "**hangs**"
    errors = [text for text in found if isinstance(text, str)]
    if errors:
        # A rank whose peer has raised complains of the connection.
        text = min(errors, key=lambda error: "Connection" in error or "peer" in error)
        if "gloo" in text:
            return "**dies**: the ranks sent different things"
        return f"raises {text[:60]}".replace("|", "/")
    if found[0].keys() != expected.keys():
        return "**wrong**"
    right = all(difference(one[key], value) <= within(value) for one in found for key, value in expected.items())
    return "right" if right else "**wrong**"


def within(expected):
    """How far off is rounding."""
    return 0.0 if expected is None else {torch.bfloat16: 3e-2, torch.float32: 1e-5}.get(expected.dtype, 1e-6)


def difference(actual, expected):
    """The largest difference, relative to the largest value."""
    if actual is None or expected is None:
        return 0.0 if actual is expected is None else float("inf")
    expected = expected.to(torch.complex128)
    return float((torch.from_numpy(actual) - expected).abs().max() / expected.abs().max().clamp(min=1e-12))


def main():
    warnings.simplefilter("ignore")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch._dynamo", "torch.distributed", "lockstep"])
    print(f"{machine()}; {RANKS} ranks, gloo\n\n| case | {' | '.join(TOOLS)} |\n|{'---|' * (len(TOOLS) + 1)}")
    rows = {}
    for name, case in CASES.items():
        expected = case(Tool(range(RANKS)))
        rows[name] = {tool: cell(context, tool, name, expected) for tool in TOOLS}
        print(f"| {name.replace('_', ' ')} | {' | '.join(rows[name].values())} |", flush=True)
    right = {tool: sum(row[tool] == "right" for row in rows.values()) for tool in TOOLS}
    print(f"\nRight: {', '.join(f'{tool} {count} of {len(rows)}' for tool, count in right.items())}.")
    keep("ddp_cases", rows)


if __name__ == "__main__":
    main()
