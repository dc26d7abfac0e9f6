"""A save: what all ranks do together before the loop goes on, and what each does behind its back."""

import contextlib
import json
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from lockstep.errors import CheckpointError, MismatchError, UsageError
from lockstep.train.checkpoint import files, keeping, manifest, reading, shares, together
from lockstep.train.checkpoint.keeping import Best, Name
from lockstep.train.checkpoint.manifest import Manifest, View
from lockstep.train.checkpoint.states import Told
from lockstep.train.checkpoint.tensors import Buffer, Held, digest
from lockstep.train.checkpoint.words import Words
from lockstep.world import World


class Moment(NamedTuple):
    """When a checkpoint is taken."""

    step: int
    epoch: int
    notes: dict[str, float]


class Split(NamedTuple):
    """What all ranks hold, and what this one holds beside it.

    Attributes:
        common: Trees of the parts that are alike on all ranks.
        own: Trees of the others, of this rank.
        shared: Tensors that are alike.
        mine: The others.
    """

    common: dict[str, Any]
    own: dict[str, Any]
    shared: dict[str, Held]
    mine: dict[str, Held]


def split(world: World, told: dict[str, Told]) -> Split:
    """Find out together what differs between ranks.

    A part whose plain values or whose tensors' names, shapes and dtypes differ is each rank's own as a whole; in the
    others those tensors are whose values differ, among the ones that are compared.
    """
    structures = [
        zlib.crc32(
            json.dumps([part.tree, [(h.extent, h.order, h.cuda, h.compared) for h in part.held.values()]]).encode()
        )
        for part in told.values()
    ]
    alike = _alike(world, structures)
    common = {name: part for (name, part), same in zip(told.items(), alike, strict=True) if same}
    own = {name: part for name, part in told.items() if name not in common}
    held = {name: each for part in common.values() for name, each in part.held.items()}
    compared = [name for name, each in held.items() if each.compared]
    differ = set()
    if world.size > 1 and compared:
        same = _alike(world, [digest(held[name]) for name in compared])
        differ = {name for name, yes in zip(compared, same, strict=True) if not yes}
    mine = {name: each for part in own.values() for name, each in part.held.items()}
    return Split(
        {name: part.tree for name, part in common.items()},
        {name: part.tree for name, part in own.items()},
        {name: each for name, each in held.items() if name not in differ},
        {name: held[name] for name in differ} | mine,
    )


def _alike(world: World, mine: list[int]) -> list[bool]:
    rows = world.ranks.line_up(torch.tensor(mine))
    found: list[bool] = (rows == rows[0]).all(0).tolist()
    return found


class Save:
    """One checkpoint on its way to the disk, as one rank sees it.

    `copy` is done by the loop; `write` may be done by another thread. It makes no collective call: ranks talk by
    `Words`.
    """

    def __init__(self, world: World, directory: Path, name: Name, moment: Moment, words: Words) -> None:
        self._rank, self._size, self._parted = world.rank, world.size, world.parted
        self._directory, self._name, self._moment, self._words = directory, name, moment, words
        self._problem = ""
        self._file = f"share-{world.rank:04d}-of-{world.size:04d}.safetensors"

    def copy(self, parts: Split, buffer: Buffer) -> None:
        """Copy what this rank writes; from here on training may change it. A failure is told when it is written."""
        self._parts = parts
        try:
            extents = [held.extent for held in parts.shared.values()]
            self._shares = shares.divide(extents, self._size)
            mine = [shares.Piece(h.extent, 0, h.extent.items) for h in parts.mine.values() if h.extent.items]
            pieces = sorted(
                self._shares[self._rank] + mine, key=lambda piece: shares.place(piece.size, piece.extent.itemsize)
            )
            head = shares.header(pieces)
            filled = buffer.fill(pieces, parts.shared | parts.mine, head)
            self._bytes, self._crc = memoryview(filled.data.numpy()), filled.crc  # type: ignore[arg-type]
        except (MemoryError, RuntimeError, OSError) as error:
            self._problem = f"{type(error).__name__}: {error}"

    def write(self, keep: int, best: Best | None) -> str:
        """Write this rank's share; give what went wrong on any rank, in words that are the same on all."""
        report = self._write_share()
        if self._rank:
            return self._words.hear(report)
        reports = self._words.collect(report)
        verdict = self._finish(reports, keep, best)
        self._words.tell(verdict)
        return verdict

    def _write_share(self) -> str:
        if self._problem:
            return json.dumps({"problem": self._problem})
        try:
            path = self._directory / self._name.partial / self._file
            facts = files.write(path, self._bytes, self._crc)
        except OSError as error:
            return json.dumps({"problem": describe(error)})
        finally:
            del self._bytes
        tensors = {
            name: held.entry([[self._file, name]] if held.extent.items else [])
            for name, held in self._parts.mine.items()
        }
        return json.dumps({"file": self._file, "facts": facts, "view": [self._parts.own, tensors]})

    def _finish(self, texts: list[str], keep: int, best: Best | None) -> str:
        """On rank 0, once every rank has written: make it a checkpoint, or leave nothing of it."""
        reports = [json.loads(text) for text in texts]
        problem = next(
            (f"rank {r}: {report['problem']}" for r, report in enumerate(reports) if "problem" in report), ""
        )
        if not problem:
            try:
                self._publish(reports)
            except OSError as error:
                problem = f"rank 0: {describe(error)}"
            except ValueError as error:
                problem = f"rank 0: {error}"
        if problem:
            files.discard(self._directory / self._name.partial)
            return f"{problem}. The checkpoints before it are as they were, and training may go on."
        try:
            prune(self._directory, self._name, keep, best)
        except OSError as error:
            return f"rank 0: {describe(error)}. It is written, but older ones that should go could not be removed."
        return ""

    def _publish(self, reports: list[dict[str, Any]]) -> None:
        places: dict[str, list[list[str]]] = {name: [] for name in self._parts.shared}
        for report, pieces in zip(reports, self._shares, strict=True):
            for piece in pieces:
                places[piece.extent.name].append([report["file"], piece.key])
        tensors = {name: held.entry(places[name]) for name, held in self._parts.shared.items()}
        made = Manifest(
            step=self._moment.step,
            epoch=self._moment.epoch,
            parted=self._parted,
            notes=self._moment.notes,
            common=View(self._parts.common, tensors),
            own=[View(*report["view"]) for report in reports],
            files={report["file"]: report["facts"] for report in reports},
            made_with={"torch": torch.__version__, "numpy": np.__version__},
        )
        files.write(self._directory / self._name.partial / manifest.NAME, memoryview(manifest.write(made)))
        files.publish(self._directory, self._name)


def prune(directory: Path, newest: Name, keep: int, best: Best | None) -> None:
    """Remove the checkpoints that nobody wants any more."""
    whole = []
    for name in files.list_directory(directory):
        with contextlib.suppress(manifest.DamagedError):  # it does not count, and is not ours to remove
            whole.append((name, reading.read_manifest(directory / str(name)).notes))
    for name in keeping.to_prune(whole, newest, keep, best):
        files.remove(directory, name)


def describe(error: OSError) -> str:
    """An error in words, with its file."""
    where = f" ({error.filename})" if error.filename else ""
    gone = isinstance(error, FileNotFoundError)
    hint = "; the folder was removed, or another Checkpoint saves in the same directory" if gone else ""
    return f"{error.strerror or error}{where}{hint}"


def begin(
    world: World, directory: Path, serial: int, moment: Moment, tell: Callable[[], dict[str, Told]]
) -> tuple[Name, dict[str, Told]]:
    """Collect this rank's state and make the folder; agree on whether that went well, and on the name.

    Returns:
        The folder's name; the state.

    Raises:
        UsageError: Something in a part cannot be saved, on any rank.
        CheckpointError: The folder cannot be made.
        MismatchError: Ranks save different things.
    """
    problem, told, name, usage = "", {}, Name(0, 0), False
    try:
        told = tell()
        if world.is_main:
            name = files.begin(directory, serial, moment.step)
    except OSError as error:
        problem = describe(error)
    except (UsageError, RuntimeError) as error:
        problem, usage = str(error) or type(error).__name__, True
    mine = [*told], moment.step, moment.epoch, moment.notes
    found, rows = together.first_problem(world, problem, name.serial, usage, zlib.crc32(json.dumps(mine).encode()))
    who = f"rank {world.rank} of {world.size}, step {moment.step}: no checkpoint was begun"
    differ = any(row[2] != rows[0][2] for row in rows)
    if (found or differ) and name.serial:
        files.discard(directory / name.partial)
    if any(row[1] for row in rows):
        raise UsageError(f"{who}: {found}")
    if found:
        raise CheckpointError(f"{who}: {found}. Those before it are as they were, and training may go on.")
    if differ:
        raise MismatchError(
            f"{who}: ranks save different things. Here they are the parts {[*told]}, step {moment.step}, epoch "
            f"{moment.epoch}, notes {moment.notes}. Every rank makes the same Checkpoint and calls step(), save() and "
            f"note() alike."
        )
    return Name(rows[0][0], moment.step), told
