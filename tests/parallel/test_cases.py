"""Every way of `cases.py`, on 1 to 4 ranks, against one process on the whole batch, to 1e-6 or better in float64."""

import functools
import traceback

import pytest
import torch
from parallel.cases import CASES, Tool
from ranks import run_ranks

import lockstep


class Replicated(Tool):
    def wrap(self, model):
        return lockstep.replicate(model)

    def inner(self, model):
        return lockstep.unwrap(model)

    def no_sync(self, model):
        return lockstep.no_sync(model)

    def sync(self, model):
        lockstep.sync_gradients(model)


class Wrapped(Replicated):
    def wrap(self, model):
        return lockstep.DistributedDataParallel(model)

    def no_sync(self, model):
        return model.no_sync()

    def sync(self, model):
        model.sync_gradients()


# float64 in all cases but those that are about other dtypes.
CLOSE = {dtype: {"rtol": 1e-9, "atol": 1e-9} for dtype in (torch.float64, torch.complex128)}
CLOSE[torch.float32], CLOSE[torch.bfloat16] = {"rtol": 1e-5, "atol": 1e-6}, {"rtol": 2e-2, "atol": 4e-3}

TOOLS = {"replicate": Replicated, "DistributedDataParallel": Wrapped, "replicate over shm": Replicated}


def everything(rank, tool, names):
    found = {}
    for name in names:
        try:
            found[name] = CASES[name](TOOLS[tool]([rank]))
        except Exception:
            found[name] = traceback.format_exc()
    return found


@functools.cache
def on_ranks(tool, size):
    backend = "shm" if "shm" in tool else "gloo"
    return run_ranks(everything, size, tool, list(CASES), backend=backend, timeout=100)


@functools.cache
def alone(name, size):
    return CASES[name](Tool(range(size)))


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(
    ("tool", "size"),
    [(tool, size) for tool in TOOLS for size in (1, 2, 3, 4) if "shm" not in tool or size in (2, 3)],
)
def test_ranks_do_as_one_process(tool, size, name):
    expected = alone(name, size)
    first, *others = (found[name] for found in on_ranks(tool, size))

    for actual in (first, *others):
        assert isinstance(actual, dict), actual
        assert expected.keys() == actual.keys()
        for key, value in expected.items():
            assert (value is None) == (actual[key] is None), key
            if value is not None:
                torch.testing.assert_close(actual[key], value, **CLOSE[value.dtype])
                assert torch.equal(actual[key], first[key]), f"ranks differ in {key}"
