"""The manifest: structure, plain values, and where each tensor lies, in one JSON file. Pure."""

import json
import re
import zlib
from dataclasses import dataclass, field, fields
from typing import Any

NAME = "manifest.json"
MOST = 1 << 28
"""Bytes of the largest manifest that is read."""
VERSION = 1
FORMAT = f"lockstep checkpoint {VERSION}"

_FORMAT = re.compile(r"lockstep checkpoint (\d{1,6})")
_FILE = re.compile(r"[a-z0-9][a-z0-9.-]{0,99}\.safetensors")
_HEAD = '{"crc32": "%08x", "content": '
_HEAD_LENGTH = len(_HEAD % 0)


class DamagedError(Exception):
    """A file is not what was written; says which and why."""


class LaterError(DamagedError):
    """A manifest is whole, and of a format that only later versions of lockstep read."""


@dataclass(frozen=True)
class View:
    """States and tensors.

    Attributes:
        trees: For each part its state, by `trees.encode`.
        tensors: For each tensor ``dtype``, ``shape``, ``order`` (how its dimensions lie in memory; None as usual),
            ``cuda`` and ``pieces``, which are pairs of a file and a key in it.
    """

    trees: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, dict[str, Any]] = field(default_factory=dict)


@dataclass(frozen=True)
class Manifest:
    """A checkpoint.

    Attributes:
        step: Steps made.
        epoch: The epoch that goes on.
        parted: Whether ranks drew random numbers of their own by then.
        notes: Numbers noted.
        common: What all ranks hold.
        own: What a rank holds beside or in place of that, by rank; as many as there were ranks.
        files: For each file its size in bytes and its CRC-32.
        made_with: Versions, for whoever reads it.
    """

    step: int
    epoch: int
    parted: bool
    notes: dict[str, float]
    common: View
    own: list[View]
    files: dict[str, tuple[int, int]]
    made_with: dict[str, str]

    def view(self, rank: int) -> View:
        """Everything that one of the ranks held."""
        mine = self.own[rank]
        return View(self.common.trees | mine.trees, self.common.tensors | mine.tensors)


def write(manifest: Manifest) -> bytes:
    """Give the file's bytes; its own checksum stands at the beginning.

    Raises:
        ValueError: It is larger than any that is read.
    """
    facts = vars(manifest) | {"common": vars(manifest.common), "own": [vars(view) for view in manifest.own]}
    content = json.dumps({"format": FORMAT, **facts}, separators=(",", ":")).encode()
    if len(content) + _HEAD_LENGTH + 2 > MOST:
        raise ValueError(
            f"the plain values take {len(content):,} bytes as JSON, and {MOST:,} is the most; put long lists of "
            f"numbers into tensors or numpy arrays"
        )
    return (_HEAD % zlib.crc32(content)).encode() + content + b"}\n"


def read(data: bytes) -> Manifest:
    """Read a manifest that may have been damaged, or made by somebody who means ill.

    Raises:
        DamagedError: It is not whole, or does not say what a manifest says.
        LaterError: It was written by a later version of lockstep.
    """
    content = memoryview(data)[_HEAD_LENGTH:-2]
    if data[:_HEAD_LENGTH] != (_HEAD % zlib.crc32(content)).encode() or data[-2:] != b"}\n":
        raise DamagedError(f"{NAME} is damaged: its checksum does not fit")
    try:
        found = json.loads(bytes(content))
    except (ValueError, RecursionError) as error:
        raise DamagedError(f"{NAME} is not JSON ({type(error).__name__})") from None
    kind = found.pop("format", None) if isinstance(found, dict) else None
    if (match := _FORMAT.fullmatch(str(kind))) and int(match[1]) > VERSION:
        raise LaterError(f"a later version of lockstep wrote it ({kind!r}, and this one reads up to {FORMAT!r})")
    if kind != FORMAT:
        raise DamagedError(f"{NAME} is of another format than {FORMAT!r}, which this version of lockstep reads")
    problem = _problem(found)
    if problem:
        raise DamagedError(f"{NAME}: {problem}")
    found["common"] = View(**found["common"])
    found["own"] = [View(**view) for view in found["own"]]
    found["files"] = {name: tuple(facts) for name, facts in found["files"].items()}
    return Manifest(**found)


_KINDS = {
    "step": int,
    "epoch": int,
    "parted": bool,
    "notes": dict,
    "common": dict,
    "own": list,
    "files": dict,
    "made_with": dict,
}
assert set(_KINDS) == {each.name for each in fields(Manifest)}


def _problem(found: dict[str, Any]) -> str:
    """What is wrong with a manifest's content; empty if nothing."""
    if set(found) != set(_KINDS):
        return f"has {sorted(map(str, found))}, and not {sorted(_KINDS)}"[:500]
    wrong = [name for name, kind in _KINDS.items() if type(found[name]) is not kind]
    if wrong:
        return f"{wrong[0]} is no {_KINDS[wrong[0]].__name__}"
    if not all(_is_count(found[name]) for name in ("step", "epoch")) or not found["own"]:
        return "step, epoch or the number of ranks make no sense"
    for name, facts in found["files"].items():
        if not _FILE.fullmatch(name):
            return f"names a file {name!r}"[:200]
        if not (isinstance(facts, list) and len(facts) == 2 and all(map(_is_count, facts))):
            return f"does not tell size and checksum of {name}"
    return next((problem for view in (found["common"], *found["own"]) if (problem := _view_problem(view, found))), "")


def _view_problem(view: Any, found: dict[str, Any]) -> str:
    if not isinstance(view, dict) or set(view) != {"trees", "tensors"}:
        return "has no trees and tensors"
    if not all(isinstance(value, dict) for value in view.values()):
        return "has no trees and tensors"
    for name, entry in view["tensors"].items():
        if not _is_entry(entry, found["files"]):
            return f"tensor {name!r} is not described as it should be"[:200]
    return ""


def _is_entry(entry: Any, files: dict[str, Any]) -> bool:
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "order", "cuda", "pieces"}:
        return False
    shape, order, pieces = entry["shape"], entry["order"], entry["pieces"]
    if not isinstance(shape, list) or not all(map(_is_count, shape)) or not isinstance(pieces, list):
        return False
    if order is not None and not (isinstance(order, list) and all(map(_is_count, order))):
        return False
    if order is not None and sorted(order) != [*range(len(shape))]:
        return False
    return all(_is_piece(piece, files) for piece in pieces)


def _is_piece(piece: Any, files: dict[str, Any]) -> bool:
    if not isinstance(piece, list) or len(piece) != 2 or not all(isinstance(word, str) for word in piece):
        return False
    return piece[0] in files


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 62
