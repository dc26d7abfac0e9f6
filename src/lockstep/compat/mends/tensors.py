"""Methods of tensors that no longer take what they took. Those on the path of every step are put in place by sign."""

import functools
from typing import Any

from lockstep.compat.mends.row import Mend, Note, Put, Undo, module, replacement


def _tensor() -> Any:
    return module("torch")().Tensor


def _getitem(original: Any, note: Note) -> Any:
    def getitem(self: Any, key: Any) -> Any:
        try:
            return original(self, key)
        except IndexError:
            if self.dim() or type(key) is not int or key not in (0, -1):
                raise
            note()
            return self if self.requires_grad else self.item()  # .data[0] was a number, loss[0] part of the graph

    return getitem


def _bool_minus(original: Any, note: Note) -> Any:
    import torch

    def minus(self: Any, other: Any, **named: Any) -> Any:
        try:
            return original(self, other, **named)
        except RuntimeError:
            both = isinstance(other, torch.Tensor) and other.dtype == torch.bool
            if self.dtype != torch.bool and not both:
                raise
            note()
            right = other.to(torch.uint8) if both else other
            return original(self.to(torch.uint8) if self.dtype == torch.bool else self, right, **named)

    return minus


def _from_one(original: Any, note: Note) -> Any:
    import torch

    @functools.wraps(original)
    def rsub(self: Any, other: Any) -> Any:
        if self.dtype != torch.bool:
            return original(self, other)
        note()
        # 1 - mask was a mask, which comparisons gave as uint8.
        return self.logical_not() if type(other) is int and other == 1 else original(self.to(torch.uint8), other)

    return rsub


def _bool_mask(original: Any, note: Note) -> Any:
    import torch

    def masked(self: Any, mask: Any, *args: Any, **named: Any) -> Any:
        if mask.dtype == torch.uint8:
            note()
            mask = mask.bool()
        return original(self, mask, *args, **named)

    return masked


def _put_masks(note: Note) -> Undo:
    names = ("masked_fill", "masked_fill_", "masked_select", "masked_scatter", "masked_scatter_")
    undo = [replacement(_tensor, name, _bool_mask)(note) for name in names]
    undo += [replacement(module("torch"), name, _bool_mask)(note) for name in ("masked_fill", "masked_select")]

    def undo_all() -> None:
        for one in undo:
            one()

    return undo_all


def _view(original: Any, note: Note) -> Any:
    def view(self: Any, *shape: Any, **named: Any) -> Any:
        try:
            return original(self, *shape, **named)
        except RuntimeError as error:
            if "view size is not compatible" not in str(error):
                raise
            note()
            return self.reshape(*shape, **named)

    return view


def _retain_variables(original: Any, note: Note) -> Any:
    @functools.wraps(original)
    def backward(self: Any, *args: Any, **named: Any) -> Any:
        if "retain_variables" in named:
            note()
            named["retain_graph"] = named.pop("retain_variables")
        return original(self, *args, **named)

    return backward


def _engine() -> Put:
    def make(_: object, note: Note) -> Any:
        def engine(self: object) -> Any:
            del self
            note()
            return module("torch.autograd")().Variable._execution_engine

        return property(engine)

    return replacement(_tensor, "_execution_engine", make)


MENDS = (
    Mend(
        old="loss.data[0]",
        gone="torch 1.0",
        today="loss.item()",
        example="import torch\nloss = torch.ones(2, requires_grad=True).sum()\n"
        "assert loss.data[0] == 2.0 and type(loss.data[0]) is float\nloss[0].backward()",
        put=replacement(_tensor, "__getitem__", _getitem),
        sign=r"\[0\]",
    ),
    Mend(
        old="1 - mask",
        gone="torch 1.2",
        today="~mask",
        example="import torch\nmask = torch.tensor([1, 2]) > 1\nassert (1 - mask).tolist() == [True, False]",
        put=replacement(_tensor, "__rsub__", _from_one),
    ),
    Mend(
        old="mask - mask",
        gone="torch 1.2",
        today="mask & ~other, or mask.long() - other.long()",
        example="import torch\nmask = torch.tensor([1, 2]) > 1\nassert (mask - (mask & False)).tolist() == [0, 1]",
        put=replacement(_tensor, "__sub__", _bool_minus),
        sign=r"mask\w*\s*-\s*\w|\w\s*-\s*\(?\w*mask",
    ),
    Mend(
        old="masked_fill and its like with a uint8 mask",
        gone="torch 2.0",
        today="mask.bool()",
        example="import torch\nmask = torch.tensor([0, 1]).byte()\n"
        "assert torch.zeros(2).masked_fill(mask, 5.0).tolist() == [0.0, 5.0]\n"
        "assert torch.masked_select(torch.arange(2), mask).tolist() == [1]",
        put=_put_masks,
        sign=r"\bmasked_",
    ),
    Mend(
        old="correct[:k].view(-1)",
        gone="torch 1.7",
        today="correct[:k].reshape(-1)",
        example="import torch\nassert torch.arange(4).view(2, 2).t()[:2].view(-1).tolist() == [0, 2, 1, 3]",
        put=replacement(_tensor, "view", _view),
        sign=r"[\])]\s*\.view\(",
    ),
    Mend(
        old="backward(retain_variables=True)",
        gone="torch 0.3",
        today="backward(retain_graph=True)",
        example="import torch\nx = torch.ones(1, requires_grad=True)\ny = (x * x).sum()\n"
        "y.backward(retain_variables=True)\ny.backward()\nassert x.grad.item() == 4",
        put=replacement(_tensor, "backward", _retain_variables),
        sign=r"retain_variables",
    ),
    Mend(
        old="param._execution_engine",
        gone="torch 0.4",
        today="torch.autograd.Variable._execution_engine",
        example="import torch\nassert torch.nn.Parameter(torch.ones(1))._execution_engine.queue_callback",
        put=_engine(),
    ),
)
