"""Tensors that move, and what they say of where they are."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lockstep.compat.rehearsal.devices import CPU, Devices, mark, marked, without_mark
from lockstep.compat.rehearsal.entry import Entry


def entries(devices: Devices) -> list[Entry]:
    """Methods and attributes of tensors and storages."""
    return [*_moves(devices), *_answers(), *_types(devices), *_memory(devices)]


def move(x: Tensor, index: int, dtype: torch.dtype | None = None, copy: bool = False, **memory_format: Any) -> Tensor:
    """Give a tensor on a device: itself if it is there, else a copy, as a move is one between real devices.

    Args:
        x: The tensor.
        index: The device.
        dtype: Its type then; None for the one that it has.
        copy: Whether it is a copy in any case.
        memory_format: What else torch's ``to`` takes.
    """
    there = marked(x)
    copy = copy or (CPU if there is None else there) != index
    return mark(_to(x, x.dtype if dtype is None else dtype, copy=copy, **memory_format), index)


_to: Any = Tensor.to


class Wanted(NamedTuple):
    """What a call of ``Tensor.to`` asks for; the device is None where it stays."""

    device: Any
    dtype: torch.dtype | None
    copy: bool


def read_to(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Wanted:
    """Read the arguments of ``Tensor.to``: device, dtype or another tensor, then dtype, non_blocking, copy.

    Example:
        >>> read_to(("cuda:1", torch.half, True), {})
        Wanted(device='cuda:1', dtype=torch.float16, copy=False)
        >>> read_to((torch.half,), {"copy": True})
        Wanted(device=None, dtype=torch.float16, copy=True)
    """
    rest = list(args)
    device, dtype = kwargs.get("device"), kwargs.get("dtype")
    other = rest.pop(0) if rest and isinstance(rest[0], Tensor) else kwargs.get("other")
    if other is not None:
        device, dtype = other.device, other.dtype
    elif rest and not isinstance(rest[0], (torch.dtype, bool)):
        device = rest.pop(0)
    if rest and (rest[0] is None or isinstance(rest[0], torch.dtype)):
        dtype = rest.pop(0)
    return Wanted(device, dtype, bool(kwargs.get("copy", rest[1] if len(rest) > 1 else False)))


def _moves(devices: Devices) -> list[Entry]:
    @functools.wraps(Tensor.to)
    def to(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        wanted = read_to(args, kwargs)
        there = marked(self)
        index = there if wanted.device is None else devices.index(wanted.device)
        if index is None and wanted.device is not None:  # meta and the like
            return _to(self, *args, **kwargs)  # type: ignore[no-any-return]
        more = {"copy": wanted.copy, **{name: kwargs[name] for name in ("memory_format",) if name in kwargs}}
        if index is None:
            return _to(self, self.dtype if wanted.dtype is None else wanted.dtype, **more)  # type: ignore[no-any-return]
        return move(self, index, wanted.dtype, **more)

    def cuda(self: Tensor, device: Any = None, non_blocking: Any = False, **kwargs: Any) -> Tensor:  # noqa: ARG001
        return move(self, devices.cuda(device), **kwargs)

    def cpu(self: Tensor, **kwargs: Any) -> Tensor:
        return move(self, CPU, **kwargs)

    parse = torch._C._nn._parse_to

    def parse_to(*args: Any, **kwargs: Any) -> Any:
        """For ``torch.nn.Module.to``, which may be given a number."""
        if args and type(args[0]) is int:
            args = (torch.device("cuda", args[0]), *args[1:])
        return parse(*args, **kwargs)

    apart = Tensor.detach

    def detach(self: Tensor) -> Tensor:
        """Hooks of saved tensors call it where nothing is followed, and compare devices then."""
        there, detached = marked(self), apart(self)
        return detached if there is None else mark(detached, there)

    def stays(self: Any, *_: Any, **__: Any) -> Any:
        return self

    # Parameters of lazy modules allow these functions, by identity.
    lazy = "torch.nn.parameter:UninitializedTensorMixin"
    parameter: Any = torch.nn.parameter
    allowed = [*parameter.UninitializedTensorMixin._allowed_methods, to, cuda, cpu, detach]
    return [
        Entry(lazy, "_allowed_methods", allowed),
        Entry("torch:Tensor", "to", to),
        Entry("torch:Tensor", "cuda", cuda),
        Entry("torch:Tensor", "cpu", cpu),
        Entry("torch:Tensor", "detach", detach),
        Entry("torch._C._nn", "_parse_to", parse_to),
        Entry("torch:UntypedStorage", "cuda", stays),
    ]


def _answers() -> list[Entry]:
    real: Any = Tensor.device  # a descriptor of the base class

    def device(self: Tensor) -> torch.device:
        index = marked(self)
        return real.__get__(self) if index is None or index == CPU else torch.device("cuda", index)

    def is_cuda(self: Tensor) -> bool:
        return marked(self) not in (None, CPU)

    def get_device(self: Tensor) -> int:
        index = marked(self)
        return CPU if index is None else index

    def of(x: Tensor) -> int:
        return get_device(x)

    return [
        Entry("torch:Tensor", "device", property(device)),
        Entry("torch:Tensor", "is_cuda", property(is_cuda)),
        Entry("torch:Tensor", "get_device", get_device),
        Entry("torch", "get_device", of),
    ]


def _types(devices: Devices) -> list[Entry]:
    plain = Tensor.type

    def kind(self: Tensor, dtype: Any = None, non_blocking: bool = False, **kwargs: Any) -> Any:  # noqa: ARG001
        if dtype is None:
            name = plain(self)
            # While a mode is on, torch's C++ comes back here by name: it may have been written already.
            on_cuda = marked(self) not in (None, CPU) and ".cuda." not in name
            return name.replace("torch.", "torch.cuda.", 1) if on_cuda else name
        if isinstance(dtype, torch.dtype):
            return self.to(dtype)
        name = dtype if isinstance(dtype, str) else f"{dtype.__module__}.{dtype.__name__}"
        there = marked(self)
        index = CPU
        if ".cuda." in name:  # a tensor that is on some GPU stays on it
            index = devices.current if there is None or there == CPU else there
        return mark(plain(move(self, index), name.replace(".cuda.", ".")), index)

    return [Entry("torch:Tensor", "type", kind)]


def _memory(devices: Devices) -> list[Entry]:  # noqa: ARG001
    state: Any = torch._utils._get_obj_state

    def pin_memory(self: Tensor, device: Any = None) -> Tensor:  # noqa: ARG001
        pinned = mark(self.clone(), CPU)
        pinned.__dict__["_rehearsed_pinned"] = True
        return pinned

    def is_pinned(self: Tensor, device: Any = None) -> bool:  # noqa: ARG001
        return "_rehearsed_pinned" in self.__dict__

    def record_stream(self: Tensor, stream: Any) -> None:
        pass

    def saved(x: Any) -> Any:
        return without_mark(state(x))

    return [
        Entry("torch:Tensor", "pin_memory", pin_memory),
        Entry("torch:Tensor", "is_pinned", is_pinned),
        Entry("torch:Tensor", "record_stream", record_stream),
        Entry("torch._utils", "_get_obj_state", saved),
    ]
