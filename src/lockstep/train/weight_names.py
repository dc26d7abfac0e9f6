"""Which of a file's entries are the model's weights, and under which of its names. Pure."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from torch import Tensor, nn

from lockstep.errors import UsageError
from lockstep.parallel.attach import unwrap

_SEGMENTS = ("module", "_orig_mod")
_USUAL = ("", "state_dict", "model", "model_state_dict", "model_state", "net", "network", "weights", "params", "module")
_DEPTH = 3


def plain_names(model: nn.Module, names: Iterable[str]) -> dict[str, str]:
    """Give each of a model's own names without what wrappers (DDP, DataParallel, compiled modules) put into it.

    Only segments that a wrapper has added go: a model's own attribute called ``module`` stays.

    Example:
        >>> model = nn.DataParallel(nn.Sequential(nn.Linear(2, 1)))
        >>> plain_names(model, ["module.0.weight"])
        {'module.0.weight': '0.weight'}
    """
    added = set()
    for path, module in model.named_modules(remove_duplicate=False):
        if unwrap(module) is not module:
            segment = "_orig_mod" if "_orig_mod" in module._modules else "module"
            added.add(f"{path}.{segment}" if path else segment)

    def plain(name: str) -> str:
        parts = name.split(".")
        return ".".join(part for end, part in enumerate(parts, 1) if ".".join(parts[:end]) not in added)

    return {name: plain(name) for name in names}


def find_weights(loaded: object, wanted: Collection[str]) -> Mapping[str, Any]:
    """Find the state dict in what a file holds: the whole of it, or an entry such as ``"state_dict"`` or ``"model"``.

    Args:
        loaded: What the file holds.
        wanted: The model's names; of several state dicts the one that has most of them is taken.

    Raises:
        UsageError: There is none, or several that fit equally well under names that do not say which is meant.

    Example:
        >>> import torch
        >>> one = {"weight": torch.ones(1)}
        >>> find_weights({"epoch": 3, "best": torch.tensor(0.5), "state_dict": one}, {"weight"}) is one
        True
    """
    found = dict(_state_dicts(loaded, ""))
    if not found:
        held = f"the keys {sorted(map(str, loaded))[:10]}" if isinstance(loaded, Mapping) else type(loaded).__name__
        raise UsageError(f"there are no weights in it, but {held}.")
    fits = {path: len(match_names(found[path], wanted).taken) for path in found}
    best = [path for path in found if fits[path] == max(fits.values())]
    usual = sorted((path for path in best if path in _USUAL), key=_USUAL.index)
    if len(best) > 1 and not usual:
        raise UsageError(
            f"there are several sets of weights in it that fit equally well: {sorted(best)}. Say which: "
            f"model.load_state_dict(torch.load(path)[...])."
        )
    return found[(usual or best)[0]]


def _state_dicts(thing: object, path: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Every mapping with tensors in it, by its path from the top; those within before those around."""
    if not isinstance(thing, Mapping) or not all(isinstance(key, str) for key in thing):
        return
    for key, value in thing.items():
        if path.count(".") < _DEPTH:
            yield from _state_dicts(value, f"{path}.{key}" if path else key)
    if any(isinstance(value, Tensor) for value in thing.values()):
        yield path, thing


class Match(NamedTuple):
    """How a file's names and a model's go together.

    Attributes:
        taken: The model's name for each of the file's names that it has.
        missing: The model's names that the file has not.
        unexpected: The file's names that the model has not.
        shorten: The rule by which the file's names were read.
    """

    taken: dict[str, str]
    missing: list[str]
    unexpected: list[str]
    shorten: Callable[[str], str]


def match_names(there: Iterable[str], wanted: Collection[str]) -> Match:
    """Match names with or without ``module.`` and ``_orig_mod.``.

    One rule is taken for the whole file, the one by which most names fit: a model may have an attribute ``module`` of
    its own.

    Example:
        >>> match = match_names(["module.0.weight", "module.0.bias"], ["0.weight", "1.weight"])
        >>> match.taken, match.missing, match.unexpected
        ({'module.0.weight': '0.weight'}, ['1.weight'], ['module.0.bias'])
    """
    there = list(there)
    best: dict[str, str] = {}
    rule: Callable[[str], str] = _same
    for theirs, ours in _RULES:
        shortened = {name: theirs(name) for name in there}
        own = {ours(name): name for name in wanted}
        if len(set(shortened.values())) < len(there) or len(own) < len(wanted):
            continue  # two names would become one
        taken = {name: own[short] for name, short in shortened.items() if short in own}
        if len(taken) > len(best):
            best, rule = taken, theirs
    reached = set(best.values())
    missing = [name for name in wanted if name not in reached]
    return Match(best, missing, [name for name in there if name not in best], rule)


def _same(name: str) -> str:
    return name


def _without_first(count: int) -> Callable[[str], str]:
    """Take away up to so many added segments at the front."""

    def shorten(name: str) -> str:
        for _ in range(count):
            first, dot, rest = name.partition(".")
            if dot and first in _SEGMENTS:
                name = rest
        return name

    return shorten


def _bare(name: str) -> str:
    """Take away all of them, wherever they stand."""
    return ".".join(part for part in name.split(".") if part not in _SEGMENTS)


_RULES = (
    (_same, _same),
    (_without_first(1), _same),
    (_without_first(2), _same),
    (_without_first(3), _same),
    (_bare, _same),
    (_bare, _bare),
)
