"""The sum, product and so on of what nodes bring, in the order of the nodes. Pure."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lockstep.shm.agreement import HALVES, OF_BOOLS

_SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}
_DO: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "SUM": torch.add,
    "PREMUL_SUM": torch.add,  # multiplied within each node
    "PRODUCT": torch.mul,
    "MIN": torch.minimum,
    "MAX": torch.maximum,
    "BAND": torch.bitwise_and,
    "BOR": torch.bitwise_or,
    "BXOR": torch.bitwise_xor,
}


def combine(parts: Sequence[Tensor], name: str) -> Tensor:
    """Combine parts in their order; half precision in float32, rounded once.

    Example:
        >>> big = torch.tensor([60000.0], dtype=torch.float16)
        >>> combine([big, big, -big], "SUM")
        tensor([60000.], dtype=torch.float16)
        >>> combine([torch.tensor([1], dtype=torch.uint64), torch.tensor([2**63], dtype=torch.uint64)], "MIN")
        tensor([1], dtype=torch.uint64)
    """
    dtype = parts[0].dtype
    if dtype is torch.bool:
        name = OF_BOOLS.get(name, name)
    if dtype in _SIGNED:
        return _unsigned(parts, name)
    wide = torch.float32 if dtype in HALVES else dtype
    total = parts[0].to(wide, copy=True)
    for part in parts[1:]:
        total = _DO[name](total, part.to(wide))
    return total.to(dtype)


def _unsigned(parts: Sequence[Tensor], name: str) -> Tensor:
    """Torch computes little with these: sums and bits are as with signs; the order is, with one bit turned."""
    signed = _SIGNED[parts[0].dtype]
    turn = torch.iinfo(signed).min if name in ("MIN", "MAX") else 0
    total = combine([part.view(signed) ^ turn for part in parts], name) ^ turn
    return total.view(parts[0].dtype)
