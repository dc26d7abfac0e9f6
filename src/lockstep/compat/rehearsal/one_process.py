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
    forward: Any = Gather.forward

    def gather_forward(ctx: Any, target: Any, dim: int, *inputs: Tensor) -> Any:
        """In backward nobody has followed the gradients; they come from devices all the same."""
        return forward(ctx, target, dim, *(mark(x, devices.current) if marked(x) is None else x for x in inputs))

    calls: dict[str, Callable[..., Any]] = {**_copies(devices), **_parts(devices)}
    return [
        *(Entry("torch.nn.parallel.comm", name, _across(call)) for name, call in calls.items()),
        Entry("torch.nn.parallel._functions:Gather", "forward", staticmethod(gather_forward)),
        Entry("torch.nn:SyncBatchNorm", "forward", _normalise),
    ]


def _copies(devices: Devices) -> dict[str, Callable[..., Any]]:
    def copy(x: Tensor, wanted: Any) -> Tensor:
        index = devices.cuda(wanted)
        return x if index == marked(x) else mark(x.clone(), index)

    def copies(tensor: Tensor, wanted: Sequence[Any] = (), *, out: Any = None) -> tuple[Tensor, ...]:
        if out is not None:
            return tuple(x.copy_(tensor) for x in out)
        return tuple(copy(tensor, device) for device in wanted)

    def copies_of_all(tensors: Sequence[Tensor], wanted: Sequence[Any], *_: Any) -> list[tuple[Tensor, ...]]:
        return [tuple(copy(x, device) for x in tensors) for device in wanted]

    def add(inputs: Sequence[Tensor], destination: Any = None) -> Tensor:
        total = inputs[0].clone()
        for x in inputs[1:]:
            total += x
        return mark(total, devices.cuda(destination))

    def add_all(inputs: Sequence[Sequence[Tensor]], destination: Any = None, *_: Any) -> tuple[Tensor, ...]:
        return tuple(add(parts, destination) for parts in zip(*inputs, strict=True))

    return {
        "reduce_add_coalesced": add_all,
        "broadcast": copies,
        "broadcast_coalesced": copies_of_all,
        "reduce_add": add,
    }


def _parts(devices: Devices) -> dict[str, Callable[..., Any]]:
    def apart(
        tensor: Tensor,
        wanted: Sequence[Any] = (),
        chunk_sizes: Sequence[int] | None = None,
        dim: int = 0,
        streams: Any = None,  # noqa: ARG001
        *,
        out: Sequence[Tensor] | None = None,
    ) -> tuple[Tensor, ...]:
        if out is not None:
            parts = torch.split(tensor, [x.size(dim) for x in out], dim)
            return tuple(x.copy_(part) for x, part in zip(out, parts, strict=True))
        where = [devices.current if device == CPU else devices.cuda(device) for device in wanted]
        parts = torch.split(tensor, list(chunk_sizes), dim) if chunk_sizes else tensor.chunk(len(where), dim)
        return tuple(mark(part.clone(), index) for part, index in zip(parts, where, strict=False))

    def together(
        tensors: Sequence[Tensor], dim: int = 0, destination: Any = None, *, out: Tensor | None = None
    ) -> Tensor:
        if out is not None:
            return out.copy_(torch.cat(list(tensors), dim))
        index = CPU if destination in ("cpu", torch.device("cpu"), CPU) else devices.cuda(destination)
        return mark(torch.cat(list(tensors), dim), index)

    return {"scatter": apart, "gather": together}


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
