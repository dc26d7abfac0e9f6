"""Buffers, such as batch norm's running statistics, made equal on all ranks."""

from collections.abc import Callable, Collection, Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.nn.modules.instancenorm import _InstanceNorm

from lockstep.errors import UsageError
from lockstep.parallel.attach import needed_reducer, unwrap
from lockstep.parallel.peers import Peers
from lockstep.parallel.same_model import compare_structure, describe


def sync_buffers(model: nn.Module, how: str = "mean") -> None:
    """Make a model's buffers the same on all ranks, now.

    Synchronised batch norm keeps its statistics equal by itself; this is for ordinary batch norm and for buffers of
    your own, before evaluating or saving. Every rank calls it. Does nothing in a world of one, and leaves sparse
    buffers as they are.

    Args:
        model: A replicated model, or a `DistributedDataParallel`.
        how: ``"first"``: rank 0's. ``"mean"``: each floating-point buffer's mean over ranks (others are rank 0's); a
            batch norm's running variance becomes that of all ranks' samples together, the mean of the variances plus
            the variance of the means.

    Raises:
        UsageError: Another ``how``, or the model is not replicated.
        MismatchError: Ranks have different buffers.

    Example:
        >>> import lockstep, torch
        >>> model = lockstep.replicate(torch.nn.BatchNorm1d(3), sync_batchnorm=False)
        >>> lockstep.sync_buffers(model, how="mean")
    """
    if how not in _WAYS:
        raise UsageError(f"lockstep.sync_buffers(how={how!r}): write 'mean' or 'first'.")
    reducer = needed_reducer(model, "sync_buffers")
    if reducer is None:
        return
    module = unwrap(model)
    named = list(module.named_buffers())
    if named:
        compare_structure(describe(named), reducer.peers, named[0][1].device)
        with torch.no_grad():
            _WAYS[how](module, reducer.peers)


def take_first(module: nn.Module, peers: Peers, ignored: Collection[str] = ()) -> None:
    """Give every rank the first rank's buffers, but for those with ``ignored`` names, in one message for each dtype.

    Buffers that are equal already are not written: a graph that was built with them stays valid.
    """
    for members in by_kind(buffer for name, buffer in module.named_buffers() if name not in ignored):
        packed = torch.cat([member.reshape(-1) for member in members])
        peers.broadcast(packed)
        write_back(members, packed)


def take_mean(module: nn.Module, peers: Peers) -> None:
    """Average floating-point buffers over ranks; the others are the first rank's."""
    statistics = [pair for child in module.modules() if (pair := running(child)) is not None]
    between = [peers.line_up(mean).var(0, correction=0) for mean, _ in statistics]
    for members in by_kind(module.buffers()):
        packed = torch.cat([member.reshape(-1) for member in members])
        if packed.is_floating_point() or packed.is_complex():
            wide = packed.to(torch.promote_types(packed.dtype, torch.float32))
            wide /= peers.size
            peers.wait(peers.sum_soon(torch.view_as_real(wide) if wide.is_complex() else wide))
            packed = wide.to(packed.dtype)
        else:
            peers.broadcast(packed)
        write_back(members, packed)
    for (_, variance), spread in zip(statistics, between, strict=True):
        variance.add_(spread)


def running(module: nn.Module) -> tuple[Tensor, Tensor] | None:
    """A module's running mean and variance, if it has both and they are of all samples together.

    Instance norm's are means over samples of what each one has, so they are averaged like any other buffer.
    """
    if isinstance(module, _InstanceNorm):
        return None
    mean, variance = getattr(module, "running_mean", None), getattr(module, "running_var", None)
    return (mean, variance) if isinstance(mean, Tensor) and isinstance(variance, Tensor) else None


def by_kind(buffers: Iterable[Tensor]) -> list[list[Tensor]]:
    """Group dense tensors by dtype and device, in a fixed order; sparse ones are left out."""
    kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for buffer in buffers:
        if buffer.layout is torch.strided:
            kinds.setdefault((buffer.dtype, buffer.device), []).append(buffer)
    return list(kinds.values())


def write_back(members: Sequence[Tensor], packed: Tensor) -> None:
    """Copy from one flat tensor what has changed."""
    pieces = packed.split_with_sizes([member.numel() for member in members])
    for member, piece in zip(members, pieces, strict=True):
        new = piece.view(member.shape)
        if not torch.equal(member, new):
            member.copy_(new)


_WAYS: dict[str, Callable[[nn.Module, Peers], None]] = {"mean": take_mean, "first": take_first}
