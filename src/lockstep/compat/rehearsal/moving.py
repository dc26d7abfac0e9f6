"""Tensors that move, and what they say of where they are."""

import functools
from typing import Any

import torch
from torch import Tensor

from lockstep.compat.rehearsal.devices import CPU, Devices, mark, marked, without_mark
from lockstep.compat.rehearsal.entry import Entry


def entries(devices: Devices) -> list[Entry]:
    """Methods and attributes of tensors and storages."""
    return [*_moves(devices), *_answers(), *_types(devices), *_memory(devices)]


def move(x: Tensor, index: int, *args: Any, **kwargs: Any) -> Tensor:
    """Give a tensor on a device: itself if it is there, else a copy, as a move is one between real devices.

    Args:
        x: The tensor.
        index: The device.
        args: What else torch's ``to`` takes, without a device.
        kwargs: The same by name.
    """
    there = marked(x)
    copy = kwargs.pop("copy", False) or (CPU if there is None else there) != index
    kwargs.pop("non_blocking", None)
    return mark(_to(x, *args, copy=True, **kwargs) if copy else _to(x, *args, **kwargs), index)


_to = Tensor.to


def _moves(devices: Devices) -> list[Entry]:
    @functools.wraps(Tensor.to)
    def to(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        given = [*args]
        wanted: Any = kwargs.pop("device", None)
        if given and (
            given[0] is None or isinstance(given[0], (str, torch.device, int)) and not isinstance(given[0], bool)
        ):
            wanted = given.pop(0)
            given = given[:1] if not given or isinstance(given[0], torch.dtype) else []  # then non_blocking and copy
            kwargs.setdefault("copy", bool(len(args) > 3 and args[3]))
        elif given and isinstance(given[0], Tensor):
            like = given.pop(0)
            given = [like.dtype]
            there = marked(like)
            return move(
                self, CPU if there is None else there, *given, **{k: v for k, v in kwargs.items() if k != "other"}
            )
        if wanted is None:
            there = marked(self)
            moved = _to(self, *given, **kwargs)
            return moved if there is None else mark(moved, there)
        index = devices.index(wanted)
        if index is None:
            return _to(self, wanted, *given, **kwargs)
        return move(self, index, *given, **kwargs)

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

    def stays(self: Any, *_: Any, **__: Any) -> Any:
        return self

    return [
        Entry("torch:Tensor", "to", to),
        Entry("torch:Tensor", "cuda", cuda),
        Entry("torch:Tensor", "cpu", cpu),
        Entry("torch._C._nn", "_parse_to", parse_to),
        Entry("torch:UntypedStorage", "cuda", stays),
    ]


def _answers() -> list[Entry]:
    real = Tensor.device  # a descriptor of the base class

    def device(self: Tensor) -> torch.device:
        index = marked(self)
        return real.__get__(self) if index in (None, CPU) else torch.device("cuda", index)  # type: ignore[no-any-return, attr-defined]

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
            there = marked(self) not in (None, CPU) and ".cuda." not in name
            return name.replace("torch.", "torch.cuda.", 1) if there else name
        if isinstance(dtype, torch.dtype):
            return self.to(dtype)
        name = dtype if isinstance(dtype, str) else f"{dtype.__module__}.{dtype.__name__}"
        index, there = CPU, marked(self)
        if ".cuda." in name:  # a tensor that is on some GPU stays on it
            index = there if there not in (None, CPU) else devices.current  # type: ignore[assignment]
        return mark(plain(move(self, index), name.replace(".cuda.", ".")), index)

    return [Entry("torch:Tensor", "type", kind)]


def _memory(devices: Devices) -> list[Entry]:  # noqa: ARG001
    state = torch._utils._get_obj_state

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
