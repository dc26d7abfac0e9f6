"""Which devices there are, which one is current, and which one a tensor says it is on."""

import threading
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from lockstep.errors import UsageError

CPU = -1
"""The index that stands for the CPU, beside 0, 1, ... for CUDA devices."""

# An attribute of the tensor: it lives as long as the tensor does, in C++ too, and copy.deepcopy takes it along.
_MARK = "_rehearsed_on"


class Devices:
    """The devices that a script sees. The current one belongs to a thread, as with CUDA."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.usual = CPU  # where factories put what is given no device; torch.set_default_device
        self._here = threading.local()

    @property
    def current(self) -> int:
        """What ``"cuda"`` without a number means."""
        return getattr(self._here, "index", 0)

    @current.setter
    def current(self, index: int) -> None:
        self._here.index = index

    def index(self, wanted: Any) -> int | None:
        """Read a device as torch's functions take it.

        Returns:
            `CPU`, a CUDA device's index, or None for another kind of device, such as meta.

        Raises:
            UsageError: There is no such CUDA device.

        Example:
            >>> devices = Devices(2)
            >>> [devices.index(wanted) for wanted in ("cpu", "cuda", "cuda:1", 1, torch.device("cuda", 0), "meta")]
            [-1, 0, 1, 1, 0, None]
        """
        if isinstance(wanted, int):
            return self.check(wanted)
        device = torch.device(wanted)
        if device.type == "cuda":
            return self.current if device.index is None else self.check(device.index)
        return CPU if device.type == "cpu" else None

    def cuda(self, wanted: Any) -> int:
        """The same where only a CUDA device makes sense; None and negative numbers are the current one."""
        if wanted is None or (isinstance(wanted, int) and wanted < 0):
            return self.current
        index = self.index(wanted)
        if index is None or index == CPU:
            raise UsageError(f"expected a CUDA device, but got {wanted}.")
        return index

    def check(self, index: int) -> int:
        """Refuse a device that is not there, as CUDA does."""
        if not 0 <= index < self.count:
            last = f"cuda:0 to cuda:{self.count - 1}" if self.count > 1 else "cuda:0"
            raise UsageError(
                f"cuda:{index}: invalid device ordinal. This rehearsal has {last}, one for each rank; "
                f"for more, start it with -n {index + 1}."
            )
        return index


def mark(x: Tensor, index: int) -> Tensor:
    """Let a tensor say that it is on a device."""
    x.__dict__[_MARK] = index
    return x


def marked(x: Tensor) -> int | None:
    """What a tensor says; None if nobody has followed it. A parameter begins on the CPU."""
    found: int | None = x.__dict__.get(_MARK)
    # issubclass: Parameter's own isinstance is python code, and slow.
    return CPU if found is None and issubclass(type(x), Parameter) else found


def follow(x: Tensor, index: int) -> None:
    """Mark a result, unless what made it (a move, a factory) has, and knows better."""
    x.__dict__.setdefault(_MARK, index)


def without_mark(state: Any) -> Any:
    """A tensor's attributes as they are saved: the mark stays here."""
    if isinstance(state, dict) and _MARK in state:
        return {name: value for name, value in state.items() if name != _MARK} or None
    return state


def name_of(index: int) -> str:
    """Write a device.

    Example:
        >>> name_of(CPU), name_of(1)
        ('cpu', 'cuda:1')
    """
    return "cpu" if index == CPU else f"cuda:{index}"
