"""The golden files: their formulas and numbers, see tests/golden/README.md."""

import functools
import json
import math
from pathlib import Path

import torch
from torch import nn

FOLDER = Path(__file__).parents[1] / "golden"
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64}
INFINITE = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}


@functools.cache
def load(name):
    """A file's content."""
    return json.loads((FOLDER / f"{name}.json").read_text())


def cases(name):
    """The cases in a file, as parameters with their names."""
    return load(name)["trace"]["cases"]


def index(*shape):
    return torch.arange(math.prod(shape), dtype=torch.float64).reshape(shape)


def fill(model, k_offset=0):
    """Give every parameter its value by the formula for its module."""
    owners = [module for module in model.modules() if list(module.parameters(recurse=False))]
    with torch.no_grad():
        for k, module in enumerate(owners, start=k_offset):
            for name, param in module.named_parameters(recurse=False):
                param.copy_(value_of(module, name, param, k).float())
    return model


def value_of(module, name, param, k):
    n = index(*param.shape)
    if isinstance(module, nn.modules.batchnorm._BatchNorm):
        return 1 + torch.sin(0.7 * n + 0.1 * k) / 10 if name == "weight" else torch.cos(0.7 * n + 0.1 * k) / 10
    if name == "weight":
        scale = math.sqrt(param.numel() / param.shape[0])
        return 1.5 * torch.sin(0.37 * n + 0.013 * n * n + 0.1 * k) / scale
    return torch.cos(0.5 * n + 0.1 * k) / 10


def inputs(shape, s):
    n = index(*shape)
    return torch.sin(0.23 * n + 0.017 * n * n + 0.9 * s + 0.05 * n * s).float()


def classes(count, number, s):
    return (3 * torch.arange(count) + s) % number


def sequential(layers):
    """``torch.nn.Sequential`` of the layers that a program lists."""
    made = []
    for kind, arguments, *keywords in layers:
        made.append(getattr(nn, kind)(*arguments, **(keywords[0] if keywords else {})))
    return nn.Sequential(*made)


def numbers(values):
    return torch.tensor([INFINITE.get(v, v) if isinstance(v, str) else v for v in values], dtype=torch.float64)


def near(recorded, got, tolerance):
    """Whether numbers are as recorded: ``abs(got - recorded) <= atol + rtol * abs(recorded)``."""
    recorded = recorded if isinstance(recorded, list) else [recorded]
    got = torch.as_tensor(got, dtype=torch.float64).reshape(-1)[: len(recorded)]
    return torch.allclose(got, numbers(recorded), rtol=tolerance["rtol"], atol=tolerance["atol"], equal_nan=True)


def departures(recorded, got, tolerance, sums=None):
    """What of a tensor is not as recorded: its dtype, its first eight elements, its sum; empty if all is."""
    found = []
    if recorded.get("dtype", "").replace("torch.", "") not in ("", str(got.dtype).removeprefix("torch.")):
        found.append(f"dtype {got.dtype}")
    got = got.detach().double()
    if not near(recorded["first8"], got, tolerance):
        found.append(f"first8 {got.reshape(-1)[:8].tolist()} for {recorded['first8']}")
    if sums is not None and not near(recorded["sum"], got.sum(), sums):
        found.append(f"sum {got.sum()} for {recorded['sum']}")
    return found
