"""A model's weights in one file: `save_weights` and `load_weights`."""

import os
import zlib
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lockstep.collectives.agreement import exchange_texts
from lockstep.collectives.fingerprint import fingerprint
from lockstep.errors import LostRankError, MismatchError, UsageError
from lockstep.parallel.attach import reducer_of, unwrap
from lockstep.train.weight_formats import read_whole, write_whole, writer_for
from lockstep.train.weight_names import find_weights, match_names, plain_names
from lockstep.world import World, current

_WORDS = 2000  # bytes of rank 0's error that the others are told
_SHOWN = 20


def save_weights(model: nn.Module, path: str | os.PathLike[str]) -> None:
    """Write a model's weights to one file, on rank 0; every rank calls it, and comes back once the file is there.

    The names are those of the plain model, without ``module.``. Tied tensors are written once. The file appears
    whole or not at all, and what was at ``path`` before stays until then.

    Args:
        model: The model, replicated, wrapped, compiled or plain.
        path: Ends in ``.safetensors``, or in ``.pt``, ``.pth``, ``.bin`` or ``.ckpt`` for torch's own format.

    Raises:
        UsageError: The ending says no format, or the model has what safetensors cannot hold (sparse and quantised
            tensors, extra state).
        OSError: Rank 0 could not write the file. All of these are raised on every rank.

    Example:
        >>> import lockstep, torch, tempfile
        >>> model = torch.nn.Linear(2, 1)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     lockstep.save_weights(model, f"{folder}/linear.safetensors")
        ...     lockstep.load_weights(torch.nn.DataParallel(model), f"{folder}/linear.safetensors")
        Loaded(missing=[], unexpected=[])
    """
    world = current()
    world.barrier()  # raises where ranks are not connected yet, and nothing is written by some
    weights = _plain_state(unwrap(model))
    failure: BaseException | None = None
    where = os.fspath(path)
    if world.is_main:
        try:
            write_whole(where, writer_for(where, weights))
        except BaseException as error:
            failure = error  # KeyboardInterrupt too: the others wait
    _tell(world, failure, where)


def _plain_state(model: nn.Module) -> Mapping[str, Any]:
    """The model's state under plain names, with what torch notes of its modules' versions."""
    state = model.state_dict()
    names = plain_names(model, state)
    plain = type(state)((names[name], value) for name, value in state.items())
    versions = getattr(state, "_metadata", None)
    if versions is not None:
        modules = plain_names(model, versions)
        plain._metadata = type(versions)((modules[name], versions[name]) for name in versions)  # type: ignore[attr-defined]
    return plain


def _tell(world: World, failure: BaseException | None, path: str) -> None:
    """Raise rank 0's failure on every rank, as nearly the same as it can travel."""
    kind, code, said = 0, 0, ""
    if failure is not None:
        kind = 1 if isinstance(failure, UsageError) else 2 if isinstance(failure, OSError) else 3
        code = failure.errno or 0 if isinstance(failure, OSError) else 0
        said = str(failure) if isinstance(failure, UsageError) else f"{type(failure).__name__}: {failure}"
    kind, code = world.ranks.line_up(torch.tensor([kind, code])).tolist()[0]
    text = exchange_texts(world, said, _WORDS)[0] if kind else ""
    if failure is not None:
        raise failure
    if kind:
        here = f"rank {world.rank} of {world.size}: rank 0 could not write {path}: {text}"
        raise {1: UsageError(text), 2: OSError(code, here), 3: LostRankError(here)}[kind]


class Loaded(NamedTuple):
    """What `load_weights` did not find.

    Attributes:
        missing: The model's names that the file has not.
        unexpected: The file's names that the model has not.
    """

    missing: list[str]
    unexpected: list[str]


def load_weights(model: nn.Module, path: str | os.PathLike[str], strict: bool = True) -> Loaded:
    """Read a model's weights from one file, straight to where the model lies.

    Reads safetensors files and what torch.save wrote, told apart by their content: a state dict, or a checkpoint with
    one in it (``"state_dict"``, ``"model"`` and so on; of several the one that fits). Names may have ``module.`` or
    ``_orig_mod.`` or not, in the file and in the model. Nothing in a file is run.

    Each rank reads for itself. If the model is replicated or wrapped already, every rank calls it, and nothing is
    changed unless all of them have read the same.

    Args:
        model: The model, replicated, wrapped, compiled or plain, with values on any devices.
        path: The file.
        strict: Raise if the file has names that the model has not, or the other way round.

    Returns:
        The names that were missing and unexpected; both empty if ``strict``.

    Raises:
        UsageError: Names are missing or unexpected (if ``strict``), or tensors have other shapes: all of them in one
            message, and the model is as it was. Or the file is damaged, or holds what would need code from it to run.
        OSError: The file is not there or may not be read.
        MismatchError: Another rank could not read its file, or has read other values.

    Example:
        >>> import lockstep, torch, tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     torch.save({"epoch": 3, "state_dict": {"module.weight": torch.ones(1, 2)}}, f"{folder}/of_2019.pth")
        ...     lockstep.load_weights(torch.nn.Linear(2, 1), f"{folder}/of_2019.pth", strict=False)
        Loaded(missing=['bias'], unexpected=[])
    """
    where = os.fspath(path)
    world = current()
    inner = unwrap(model)
    failure: Exception | None = None
    found = _NOTHING
    try:
        found = _find(inner, where, strict)
    except (UsageError, OSError) as error:
        failure = error
    if world.size > 1 and _has_replicas(model):
        _compare(world, found, failure, where)
    if failure is not None:
        raise failure
    return _put(inner, found, where, strict)


def _has_replicas(model: nn.Module) -> bool:
    return reducer_of(model) is not None or any(
        isinstance(module, nn.parallel.DistributedDataParallel) for module in model.modules()
    )


class _Found(NamedTuple):
    weights: dict[str, Any]  # by the model's own names
    others: dict[str, Any]  # what the model has no name for; its modules may know these from older versions
    missing: list[str]
    unexpected: list[str]
    versions: dict[str, Any] | None


_NOTHING = _Found({}, {}, [], [], None)


def _find(model: nn.Module, path: str, strict: bool) -> _Found:
    """Read the file and say what goes where; nothing is changed yet."""
    state = model.state_dict(keep_vars=True)
    names = plain_names(model, state)
    own = {plain: name for name, plain in names.items()}
    loaded = read_whole(path)
    try:
        there = find_weights(loaded, own)
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from None
    match = match_names(there, own)
    weights = {own[name]: there[key] for key, name in match.taken.items()}
    missing = [own[name] for name in match.missing]
    weights |= _tied(state, weights, missing)
    missing = [names[name] for name in missing if name not in weights]
    shapes = [
        f"{names[name]}: {tuple(value.shape)} in the file, {tuple(state[name].shape)} in the model"
        for name, value in weights.items()
        if _differ(value, state[name])
    ]
    if shapes:
        raise _refusal(path, missing if strict else [], match.unexpected if strict else [], shapes)
    empty = [names[name] for name, value in state.items() if isinstance(value, Tensor) and value.is_meta]
    if empty:
        raise UsageError(f"{empty[0]!r} lies on the meta device. Write model.to_empty(device=...) before.")
    others = {match.shorten(name): there[name] for name in match.unexpected}
    versions = getattr(there, "_metadata", None)
    if versions is not None:
        versions = {match.shorten(f"{module}.").rstrip("."): noted for module, noted in versions.items()}
    return _Found(weights, others, missing, match.unexpected, versions)


def _tied(state: Mapping[str, Any], weights: Mapping[str, Any], missing: Sequence[str]) -> dict[str, Any]:
    """Values for missing names whose tensor is one with another that the file has."""
    by_tensor = {id(state[name]): value for name, value in weights.items()}
    return {name: by_tensor[id(state[name])] for name in missing if id(state[name]) in by_tensor}


def _differ(value: object, own: object) -> bool:
    if not isinstance(value, Tensor) or not isinstance(own, Tensor) or nn.parameter.is_lazy(own):
        return False
    # Before torch 0.4 there were no tensors without dimensions; torch reads these.
    return value.shape != own.shape and not (own.ndim == 0 and value.shape == (1,))


def _refusal(path: str, missing: Sequence[str], unexpected: Sequence[str], shapes: Sequence[str]) -> UsageError:
    lines = [f"{path} does not fit the model."]
    for what, names in (("missing in the file", missing), ("not in the model", unexpected), ("other shapes", shapes)):
        if names:
            more = f", and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
            lines.append(f"  {what} ({len(names)}): {', '.join(names[:_SHOWN])}{more}")
    if not shapes:
        lines.append("  load_weights(..., strict=False) takes what fits.")
    return UsageError("\n".join(lines))


def _compare(world: World, found: _Found, failure: Exception | None, path: str) -> None:
    """Raise on every rank if one could not read its file, or has read something else than rank 0."""
    sums = [
        fingerprint(value)
        for value in found.weights.values()
        if isinstance(value, Tensor) and value.layout == torch.strided and not value.is_quantized
    ]
    names = zlib.crc32("\n".join((*found.weights, *found.others)).encode())
    total = int(fingerprint(torch.stack(sums))) if sums else 0
    rows = world.ranks.line_up(torch.tensor([failure is not None, names, total])).tolist()
    failed = [rank for rank, row in enumerate(rows) if row[0]]
    here = f"rank {world.rank} of {world.size}"
    if failed and failure is None:
        raise MismatchError(f"{here}: rank {failed[0]} could not load {path}; see its own error. Nothing was changed.")
    other = next((rank for rank, row in enumerate(rows) if row != rows[0]), None)
    if other is not None and not failed:
        raise MismatchError(
            f"{here}: {path} holds other weights on rank {other} than on rank 0. Nothing was changed. Give every rank "
            f"the same file."
        )


def _put(model: nn.Module, found: _Found, path: str, strict: bool) -> Loaded:
    """Load, and in doubt be able to go back."""
    doubtful = strict and bool(found.missing or found.unexpected)
    before = {k: v.clone() for k, v in model.state_dict().items() if isinstance(v, Tensor)} if doubtful else {}
    state = OrderedDict({**found.weights, **found.others})
    if found.versions is not None:
        state._metadata = found.versions  # type: ignore[attr-defined]
    try:
        left = model.load_state_dict(state, strict=False)
    except RuntimeError as error:
        model.load_state_dict(before, strict=False)
        raise UsageError(f"{path} does not fit the model: {error}") from error
    # Modules can rename what older versions of them have written, and add what these had not.
    names = plain_names(model, left.missing_keys)
    missing = [name for name in found.missing if name in names.values()]
    unexpected = [
        name for name, other in zip(found.unexpected, found.others, strict=True) if other in left.unexpected_keys
    ]
    if strict and (missing or unexpected):
        model.load_state_dict(before, strict=False)
        raise _refusal(path, missing, unexpected, [])
    return Loaded(missing, unexpected)
