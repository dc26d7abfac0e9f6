"""Hands on which device a tensor says it is on, from what goes into a function to what comes out."""

import os
import sys
import sysconfig
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lockstep.compat.rehearsal.devices import CPU, follow, mark, marked, name_of
from lockstep.compat.rehearsal.entry import Entry

# Functions that may be given tensors on several devices, by their names; the rest must not.
_MAY_MIX = frozenset(
    (
        "copy_", "to", "cuda", "cpu", "type", "type_as", "set_", "is_same_size", "view_as", "expand_as",
        "reshape_as", "new", "new_tensor", "__getitem__", "__setitem__",
        "index_put", "index_put_", "__get__", "__set__", "__array__", "numpy",
    )
)  # fmt: skip
# These take lengths on the CPU beside values on a device; the first one also gives them back, second.
_TAKE_LENGTHS = ("_pack_padded_sequence", "_pad_packed_sequence", "lstm", "gru", "rnn_tanh", "rnn_relu", "ctc_loss")
_TO_NUMPY = frozenset(("numpy", "__array__"))
# Frames that are not the script's: torch and what else is installed, python's own library, and this package.
_NOT_THE_SCRIPT = tuple(
    os.path.join(folder, "")  # noqa: PTH118  (as code objects name their files)
    for folder in (sysconfig.get_paths()["purelib"], sysconfig.get_paths()["stdlib"], os.path.dirname(__file__), "<")  # noqa: PTH120
)


class Misplaced(NamedTuple):
    """Tensors that a GPU would not have taken.

    Attributes:
        place: File and line in the script.
        what: What was called, with tensors on which devices.
    """

    place: str
    what: str


class Follow(TorchFunctionMode):
    """Marks results as their arguments are marked, and notes calls whose tensors are on different devices."""

    def __init__(self, tell: Callable[[Misplaced], None]) -> None:
        super().__init__()
        self.misplaced: Counter[Misplaced] = Counter()
        self._tell = tell

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **kwargs) if kwargs else func(*args)
        if type(out) is Tensor:
            index = self._where(func, args, kwargs)
            if index is not None:
                follow(out, index)
        elif isinstance(out, (Tensor, tuple, list)):
            index = self._where(func, args, kwargs)
            if index is not None:
                if getattr(func, "__name__", "") == _TAKE_LENGTHS[0]:
                    mark(out[1], CPU)
                _mark_results(out, index)
        else:
            name = getattr(func, "__name__", "")
            if name == "__set__" and len(args) == 2 and isinstance(args[1], Tensor):
                _take_over(func, *args)
            elif name in _TO_NUMPY and marked(args[0]) not in (None, CPU):
                self._note(Misplaced(place_in_script(), f"{name}() of a tensor on {name_of(args[0].get_device())}"))
        return out

    def _where(self, func: Any, args: Any, kwargs: Any) -> int | None:
        """The device of the results; None where that of some argument is not known."""
        tensors = tensors_in(args, kwargs)
        every = dict.fromkeys(map(marked, tensors))
        if len(every) <= 1:  # nearly always
            return next(iter(every), None)
        name = getattr(func, "__name__", str(func))
        found = [(marked(x), x) for x in tensors]
        if name in _TAKE_LENGTHS:
            found = [(index, x) for index, x in found if index != CPU or x.is_floating_point()]
            every = dict.fromkeys(index for index, _ in found)
        real = [index for index in every if index is not None and index != CPU]
        if not real:
            return CPU if list(every) == [CPU] else None
        # A single number may come from the CPU.
        if name not in _MAY_MIX and (len(real) > 1 or any(index == CPU and x.dim() > 0 for index, x in found)):
            where = " and ".join(name_of(index) for index in sorted(i for i in every if i is not None)[::-1])
            self._note(Misplaced(place_in_script(), f"{name} of tensors on {where}"))
        return real[0]

    def _note(self, what: Misplaced) -> None:
        self.misplaced[what] += 1
        if self.misplaced[what] == 1:
            self._tell(what)


def entries(mode: Follow) -> list[Entry]:
    """Follow in backward, too: activations are computed again there, and must be where they were."""
    autograd: Any = torch.autograd
    run = autograd._engine_run_backward

    def run_backward(*args: Any, **kwargs: Any) -> Any:
        stack = [torch._C._get_function_stack_at(i) for i in range(torch._C._len_torch_function_stack())]
        if mode in stack:
            return run(*args, **kwargs)
        with mode:
            return run(*args, **kwargs)

    return [Entry("torch.autograd", "_engine_run_backward", run_backward)]


def tensors_in(args: Iterable[Any], kwargs: dict[str, Any] | None) -> list[Tensor]:
    """The tensors among a call's arguments, and in lists and tuples among them."""
    found = []
    for x in (*args, *kwargs.values()) if kwargs else args:
        if isinstance(x, Tensor):
            found.append(x)
        elif isinstance(x, (list, tuple)):
            found.extend(y for y in x if isinstance(y, Tensor))
    return found


def _mark_results(out: Any, index: int) -> None:
    for x in (out,) if isinstance(out, Tensor) else out:
        if isinstance(x, Tensor):
            follow(x, index)


def _take_over(func: Any, x: Any, value: Tensor) -> None:
    """``parameter.data = moved``, as torch.nn.Module.to does it."""
    index = marked(value)
    if index is not None and isinstance(x, Tensor) and getattr(func.__self__, "__name__", "") == "data":
        mark(x, index)


def place_in_script() -> str:
    """File and line of the innermost call that the script itself made."""
    frame = sys._getframe(1)
    while frame is not None:
        path = frame.f_code.co_filename
        if not path.startswith(_NOT_THE_SCRIPT):
            return f"{os.path.basename(path)}:{frame.f_lineno}"  # noqa: PTH119
        if frame.f_back is None:
            break
        frame = frame.f_back
    return "?"
