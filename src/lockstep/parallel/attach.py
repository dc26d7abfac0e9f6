"""`replicate` and what goes with it: the reducer on a model, in place."""

import sys
import weakref
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from lockstep.errors import UsageError
from lockstep.parallel.batchnorm import convert_sync_batchnorm
from lockstep.parallel.batchnorm.convert import count_synchronised
from lockstep.parallel.peers import Peers
from lockstep.parallel.reducer import Reducer
from lockstep.parallel.same_model import compare_structure, describe, equalise
from lockstep.parallel.stepping import follow_optimizers
from lockstep.parallel.transport import Summed, Transport, travelling_dtype
from lockstep.world import World, current

M = TypeVar("M", bound=nn.Module)

_reducers: "weakref.WeakKeyDictionary[nn.Module, Reducer]" = weakref.WeakKeyDictionary()
# Models of a process group that has this rank only, in a larger world: there is nothing to average.
alone: "weakref.WeakSet[nn.Module]" = weakref.WeakSet()


def replicate(
    model: M,
    *,
    sync_batchnorm: bool = True,
    communicate: str | None = None,
    first_bucket_mb: float = 1.0,
    bucket_mb: float = 25.0,
) -> M:
    """Make a model train as one on all ranks: same values everywhere, gradients averaged at the end of every backward.

    Works in place: the model goes to this rank's device and keeps its class, its attributes and its ``state_dict``
    keys. Its parameters are watched, not its ``forward``, so that it does not matter how a gradient comes about. In a
    world of one nothing is attached.

    Args:
        model: The model, built alike on every rank. Where values differ, rank 0's win.
        sync_batchnorm: Normalise over the whole global batch where the model has batch norm; rank 0 says on stderr in
            how many layers.
        communicate: ``"bf16"`` or ``"fp16"``: send gradients in half as many bytes.
        first_bucket_mb: MiB of gradients after which the first bucket of a backward leaves.
        bucket_mb: The same for all others.

    Returns:
        The model itself.

    Raises:
        MismatchError: Ranks have different models; names the first parameter that differs and the ranks.
        UsageError: A parameter lies on another device than this rank's, or has no values yet, or the model, or a part
            of it, is replicated already.

    Example:
        >>> import lockstep, torch
        >>> model = lockstep.replicate(torch.nn.Linear(2, 1))
        >>> type(model).__name__, list(model.state_dict())
        ('Linear', ['weight', 'bias'])
    """
    world = current()
    travels_as = travelling_dtype(communicate, world.rank)
    refuse_unfit(model, world)
    model.to(world.device)
    if world.size == 1:
        return model
    if sync_batchnorm:
        _synchronise_batchnorm(model, world)
    world.ranks.barrier()
    peers = Peers()
    attach(model, peers, Summed(peers, travels_as), world.device, caps=(first_bucket_mb, bucket_mb))
    model.register_forward_pre_hook(before_first_forward)
    return model


def _synchronise_batchnorm(model: nn.Module, world: World) -> None:
    """Convert, and say so on rank 0: the model trains differently from then on."""
    convert_sync_batchnorm(model)
    layers = count_synchronised(model)
    if layers and world.rank == 0:
        sys.stderr.write(
            f"lockstep.replicate: {layers} batch norm layer(s) normalise over the batches of all {world.size} ranks; "
            f"sync_batchnorm=False leaves them as they are.\n"
        )


def attach(
    model: nn.Module,
    peers: Peers,
    transport: Transport,
    device: torch.device,
    *,
    caps: Sequence[float],
    ignored: Collection[str] = (),
    ends: Collection[Tensor] = (),
    equal: bool = True,
) -> Reducer:
    """Make all ranks' models equal, but for what is ``ignored``, and put a reducer on this one's."""
    named = [(name, t) for name, t in (*model.named_parameters(), *model.named_buffers()) if name not in ignored]
    compare_structure(describe(named), peers, device)
    if equal:
        equalise([tensor for _, tensor in named], peers, device)
    reducer = _reducers[model] = Reducer(model, peers, transport, device, caps=caps, ignored=ignored, ends=ends)
    follow_optimizers(_reducers)
    return reducer


def refuse_unfit(model: nn.Module, world: World, ignored: Collection[str] = ()) -> None:
    """Raise if a model cannot be replicated on this rank."""
    for name, param in model.named_parameters():
        if name in ignored:
            continue
        where = f"rank {world.rank} of {world.size}: parameter {name!r}"
        if isinstance(param, nn.parameter.UninitializedParameter) or param.is_meta:
            raise UsageError(
                f"{where} has no values yet. Run one forward, or model.to_empty(device=...), before replicate()."
            )
        if param.device.type == "cuda" and param.device != world.device:
            raise UsageError(
                f"{where} lies on {param.device}, but this rank's device is {world.device}. Leave the model on the "
                f"CPU, or move it with model.to(world.device); replicate() does it too."
            )
        if any(reducer.members.owns(param) for reducer in _reducers.values()):
            raise UsageError(f"{where} belongs to a model that is replicated already. Replicate the whole model, once.")
    _refuse_max_norm(model, world)


def _refuse_max_norm(model: nn.Module, world: World) -> None:
    """Raise if a forward would change the parameters by what one rank's batch looks up."""
    for name, child in model.named_modules() if world.size > 1 else ():
        if isinstance(child, nn.Embedding | nn.EmbeddingBag) and child.max_norm is not None:
            raise UsageError(
                f"rank {world.rank} of {world.size}: {name or type(child).__name__!r} has max_norm={child.max_norm}: "
                f"each forward shortens the rows that this rank looks up, so the replicas would part. Leave max_norm "
                f"out, and shorten all rows behind optimizer.step(): with torch.no_grad(): "
                f"weight.copy_(torch.renorm(weight, 2, 0, {child.max_norm}))."
            )


def unwrap(model: nn.Module) -> nn.Module:
    """Give the plain module.

    Args:
        model: A replicated model (which is plain already), a `DistributedDataParallel` or ``DataParallel`` of lockstep
            or torch, a compiled module, or any of them within each other.

    Example:
        >>> import lockstep, torch
        >>> model = torch.nn.Linear(2, 1)
        >>> lockstep.unwrap(torch.nn.DataParallel(model)) is model
        True
    """
    while (inner := _inside(model)) is not None:
        model = inner
    return model


def _inside(model: nn.Module) -> nn.Module | None:
    compiled = model.__dict__.get("_modules", {}).get("_orig_mod")
    if isinstance(compiled, nn.Module):
        return compiled
    if type(model).__name__ in _WRAPPERS and isinstance(getattr(model, "module", None), nn.Module):
        return model.module  # type: ignore[return-value]
    return None


_WRAPPERS = ("DistributedDataParallel", "DataParallel")


def reducer_of(model: nn.Module) -> Reducer | None:
    """The reducer of a model, replicated or wrapped; None if it has none."""
    return _reducers.get(unwrap(model))


def sync_gradients(model: nn.Module) -> None:
    """Average the gradients that have not been averaged yet, without another forward or backward.

    After micro-batches under `no_sync`, and on a rank that had nothing to do in a step: it takes part with zeros. Every
    rank of the world comes here or to a backward. Does nothing where this step's gradients are averaged already, and in
    a world of one. An optimizer's step does the same by itself.

    Raises:
        UsageError: The model is not replicated; or called within backward.
        MismatchError: Ranks are in different steps.
        LostRankError: A rank left.

    Example:
        >>> import lockstep, torch
        >>> model = lockstep.replicate(torch.nn.Linear(2, 1))
        >>> with lockstep.no_sync(model):
        ...     model(torch.ones(1, 2)).sum().backward()
        >>> lockstep.sync_gradients(model)
    """
    reducer = needed_reducer(model, "sync_gradients")
    if reducer is not None:
        reducer.sync()


@contextmanager
def no_sync(model: nn.Module) -> Iterator[None]:
    """Keep the gradients of backwards that begin within the block on this rank.

    They are averaged with those of the next backward outside, or by `sync_gradients`. Where the forward was does not
    matter.

    Raises:
        UsageError: The model is not replicated.

    Example:
        >>> import lockstep, torch
        >>> model = lockstep.replicate(torch.nn.Linear(2, 1))
        >>> loss = model(torch.ones(1, 2)).sum()
        >>> with lockstep.no_sync(model):
        ...     loss.backward()
    """
    reducer = needed_reducer(model, "no_sync")
    if reducer is None:
        yield
        return
    before, reducer.syncing = reducer.syncing, False
    try:
        yield
    finally:
        reducer.syncing = before


def needed_reducer(model: nn.Module, call: str) -> Reducer | None:
    """The reducer that ``call`` works on; None in a world, or a process group, of one."""
    reducer = reducer_of(model)
    world = current()
    if reducer is None and world.size > 1 and unwrap(model) not in alone:
        raise UsageError(
            f"rank {world.rank} of {world.size}: lockstep.{call}(model) needs a model that was given to "
            f"lockstep.replicate or lockstep.DistributedDataParallel before."
        )
    return reducer


def before_first_forward(module: nn.Module, _: Any) -> None:
    """Training begins: from here on ranks draw their own random numbers. Takes itself away."""
    if module.training:
        for key, hook in list(module._forward_pre_hooks.items()):
            if hook is before_first_forward:
                del module._forward_pre_hooks[key]
        if module in _reducers:
            current().part_ways()
