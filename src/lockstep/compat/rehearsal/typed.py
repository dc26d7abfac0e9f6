"""``torch.cuda.FloatTensor`` and its kin: to make tensors, to convert to, and to compare with."""

from typing import Any

import torch
from torch import Tensor

from lockstep.compat.rehearsal.devices import CPU, Devices, mark, marked
from lockstep.compat.rehearsal.entry import Entry

TYPES = {
    "BFloat16Tensor": torch.bfloat16,
    "BoolTensor": torch.bool,
    "ByteTensor": torch.uint8,
    "CharTensor": torch.int8,
    "DoubleTensor": torch.float64,
    "FloatTensor": torch.float32,
    "HalfTensor": torch.float16,
    "IntTensor": torch.int32,
    "LongTensor": torch.int64,
    "ShortTensor": torch.int16,
}


class _TensorType(type):
    dtype: torch.dtype

    def __instancecheck__(cls, thing: Any) -> bool:
        return isinstance(thing, Tensor) and thing.dtype == cls.dtype and marked(thing) not in (None, CPU)


def entries(devices: Devices) -> list[Entry]:
    """One class for each type of element."""
    return [Entry("torch.cuda", name, _make(name, dtype, devices)) for name, dtype in TYPES.items()]


def _make(name: str, dtype: torch.dtype, devices: Devices) -> type:
    plain = getattr(torch, name)

    def new(_: type, *args: Any, **__: Any) -> Tensor:
        return mark(plain(*args), devices.current)

    return _TensorType(name, (), {"__new__": new, "dtype": dtype, "is_cuda": True, "__module__": "torch.cuda"})
