import dataclasses
from collections import namedtuple

import numpy as np
import pytest
import torch
from torch.utils.data import default_collate

import lockstep
from lockstep.data.empty import empty_batch

Pair = namedtuple("Pair", ["x", "y"])


@dataclasses.dataclass
class Both:
    x: torch.Tensor
    names: list


def describe(x):
    """A batch as plain values that can be compared."""
    if isinstance(x, torch.Tensor | np.ndarray):
        return str(x.dtype), tuple(x.shape)
    if isinstance(x, dict):
        return {key: describe(value) for key, value in x.items()}
    if isinstance(x, list | tuple):
        return type(x).__name__, [describe(each) for each in x]
    if dataclasses.is_dataclass(x):
        return type(x).__name__, describe(vars(x))
    return x


CASES = {
    "a tensor": (torch.ones(3), default_collate, ("torch.float32", (0, 3))),
    "a number": (3, default_collate, ("torch.int64", (0,))),
    "a tuple": (
        (torch.ones(2, dtype=torch.half), 1),
        default_collate,
        ("list", [("torch.float16", (0, 2)), ("torch.int64", (0,))]),
    ),
    "one thing in a tuple": ((torch.ones(2),), default_collate, ("list", [("torch.float32", (0, 2))])),
    "words": ("cat", default_collate, ("list", [])),
    "a named tuple": (Pair(1.0, "a"), default_collate, ("Pair", [("torch.float64", (0,)), ("tuple", [])])),
    "a dictionary": (
        {"a": 1, "b": torch.ones(1)},
        default_collate,
        {"a": ("torch.int64", (0,)), "b": ("torch.float32", (0, 1))},
    ),
    "a list of samples": (torch.ones(3), list, ("list", [])),
    "an array": (np.ones(2), np.stack, ("float64", (0, 2))),
    "time first": (torch.ones(5, 2), lambda batch: torch.stack(batch, 1), ("torch.float32", (5, 0, 2))),
    "end to end": (torch.ones(5), torch.cat, ("torch.float32", (0,))),
    "a count": (
        torch.ones(5),
        lambda batch: {"x": torch.stack(batch), "n": len(batch)},
        {"x": ("torch.float32", (0, 5)), "n": 0},
    ),
    "offsets": (torch.ones(5), lambda batch: torch.arange(len(batch) + 1), ("torch.int64", (1,))),
    "a dataclass": (
        "cat",
        lambda batch: Both(torch.ones(len(batch), 2), batch),
        ("Both", {"x": ("torch.float32", (0, 2)), "names": ("list", [])}),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_an_empty_batch_has_the_structure_of_a_full_one(name):
    sample, collate, expected = CASES[name]

    assert expected == describe(empty_batch(sample, collate))


def test_what_a_collate_function_takes_out_of_a_sample_is_there_again():
    def collate(samples):
        return torch.tensor([sample.pop("x") for sample in samples])

    assert empty_batch({"x": 1}, collate).shape == (0,)


class Opaque:
    def __init__(self, samples):
        self.x = torch.stack(samples)


def test_a_kind_that_nobody_knows_is_asked_for_by_name():
    with pytest.raises(lockstep.UsageError, match=r"Opaque in the result of collate_fn"):
        empty_batch(torch.ones(1), Opaque)


def test_a_collate_function_may_make_it_by_itself():
    class Known:
        def __init__(self, samples):
            self.samples = samples

    assert empty_batch(1, Known).samples == []
