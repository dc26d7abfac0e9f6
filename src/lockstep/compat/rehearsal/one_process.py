"""One process that drives several devices: what ``torch.nn.DataParallel`` is built from, and torch's SyncBatchNorm."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel._functions import Gather

from lockstep.compat.rehearsal.devices import CPU, Devices, mark, marked
from lockstep.compat.rehearsal.entry import Entry


def entries(devices: Devices) -> list[Entry]:
    """``torch.nn.parallel.comm``, which would copy between GPUs, and the layer that would call their kernels."""

    def copies(tensor: Tensor, wanted: Sequence[Any] | None = None, *, out: Any = None) -> tuple[Tensor, ...]:
        if out is not None:
            return tuple(x.copy_(tensor) for x in out)
        return tuple(
            tensor if devices.cuda(d) == marked(tensor) else mark(tensor.clone(), devices.cuda(d)) for d in wanted or ()
        )

    def copies_of_all(
        tensors: Sequence[Tensor], wanted: Sequence[Any], buffer_size: int = 0
    ) -> list[tuple[Tensor, ...]]:  # noqa: ARG001
        return [copies_to(tensors, devices.cuda(d)) for d in wanted]

    def copies_to(tensors: Sequence[Tensor], index: int) -> tuple[Tensor, ...]:
        return tuple(x if index == marked(x) else mark(x.clone(), index) for x in tensors)

    def add(inputs: Sequence[Tensor], destination: Any = None) -> Tensor:
        total = inputs[0].clone()
        for x in inputs[1:]:
            total += x
        return mark(total, devices.cuda(destination))

    def apart(
        tensor: Tensor,
        wanted: Sequence[Any] | None = None,
        chunk_sizes: Sequence[int] | None = None,
        dim: int = 0,
        streams: Any = None,  # noqa: ARG001
        *,
        out: Sequence[Tensor] | None = None,
    ) -> tuple[Tensor, ...]:
        where = [marked(x) for x in out] if out is not None else [devices.cuda(d) for d in wanted or ()]
        sizes = chunk_sizes or ([x.size(dim) for x in out] if out is not None else None)
        parts = tensor.split(list(sizes), dim) if sizes else tensor.chunk(len(where), dim)
        if out is not None:
            return tuple(x.copy_(part) for x, part in zip(out, parts, strict=True))
        return tuple(mark(part.clone(), index or 0) for part, index in zip(parts, where, strict=False))

    def together(
        tensors: Sequence[Tensor], dim: int = 0, destination: Any = None, *, out: Tensor | None = None
    ) -> Tensor:
        if out is not None:
            return out.copy_(torch.cat(list(tensors), dim))
        index = CPU if destination in ("cpu", torch.device("cpu"), -1) else devices.cuda(destination)
        return mark(torch.cat(list(tensors), dim), index)

    calls = {
        "broadcast": copies,
        "broadcast_coalesced": copies_of_all,
        "reduce_add": add,
        "scatter": apart,
        "gather": together,
    }
    forward = Gather.forward

    def gather_forward(ctx: Any, target: Any, dim: int, *inputs: Tensor) -> Any:
        """In backward nobody has followed the gradients; they come from devices all the same."""
        return forward(ctx, target, dim, *(mark(x, devices.current) if marked(x) is None else x for x in inputs))

    return [
        *(Entry("torch.nn.parallel.comm", name, _across(call)) for name, call in calls.items()),
        Entry("torch.nn.parallel._functions:Gather", "forward", staticmethod(gather_forward)),
        Entry("torch.nn:SyncBatchNorm", "forward", _normalise),
    ]


def _across(call: Callable[..., Any]) -> Callable[..., Any]:
    """Take tensors from several devices, as these functions are for."""

    @functools.wraps(call)
    def unfollowed(*args: Any, **kwargs: Any) -> Any:
        with torch._C.DisableTorchFunction():
            return call(*args, **kwargs)

    return unfollowed


def _normalise(layer: torch.nn.SyncBatchNorm, input: Tensor) -> Tensor:  # noqa: A002
    """Torch's layer, computed by lockstep's: the same formula over the same ranks."""
    from lockstep.parallel.batchnorm import SyncBatchNorm

    layer._check_non_zero_input_channels(input)
    ours = SyncBatchNorm.__new__(SyncBatchNorm)
    ours.__dict__ = {**layer.__dict__, "_group": None}  # the same parameters and buffers
    if layer.process_group is not None:
        ours.process_group = layer.process_group
    normalised: Tensor = ours.forward(input)
    return normalised
