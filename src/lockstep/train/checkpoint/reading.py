"""Finding a checkpoint that is whole, on all ranks, and reading it."""

import contextlib
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lockstep.errors import CheckpointError
from lockstep.train.checkpoint import files, manifest, tensors, together, trees
from lockstep.train.checkpoint.manifest import DamagedError, Manifest, View
from lockstep.world import World


def read_manifest(folder: Path) -> Manifest:
    """Read a checkpoint's manifest.

    Raises:
        DamagedError: There is none, or it is not whole.
    """
    return manifest.read(files.read(folder / manifest.NAME, manifest.MOST))


def verify(world: World, folder: Path) -> tuple[str, Manifest | None]:
    """Look at a checkpoint together: each rank at the manifest, and at its part of the files.

    Returns:
        What is wrong, the same on every rank, or an empty string; and the manifest if nothing is wrong.

    Raises:
        CheckpointError: A later version of lockstep wrote it, so that nothing is wrong with it.
    """
    problem, found, crc, later = "", None, 0, False
    try:
        found = read_manifest(folder)
        crc = sum(crc for _, crc in found.files.values())
        for name, facts in sorted(found.files.items())[world.rank :: world.size]:
            files.check(folder / name, *facts)
    except DamagedError as error:
        problem, later = str(error), isinstance(error, manifest.LaterError)
    said, rows = together.first_problem(world, problem, crc & 0xFFFFFFFF, found.step if found else 0, later)
    if any(row[2] for row in rows):
        raise CheckpointError(
            f"rank {world.rank} of {world.size}: {folder} cannot be used: {said}. Go on with that version; to go on "
            f"from the checkpoint before it, move this one away."
        )
    if not said and any(row != rows[0] for row in rows):
        said = "ranks see different files: the directory must be one that all nodes share"
    return said, found if not said else None


def refuse_repeated(view: View) -> None:
    """Raise DamagedError if bytes are used twice: what is read may then be larger than the files."""
    pieces = [tuple(piece) for entry in view.tensors.values() for piece in entry["pieces"]]
    if len(set(pieces)) < len(pieces):
        raise DamagedError("tensors of the manifest lie in the same place")


@contextlib.contextmanager
def opened(folder: Path, found: Manifest) -> Iterator[dict[str, Any]]:
    """Open the files of a checkpoint that was verified.

    Raises:
        DamagedError: One of them is no safetensors file.
    """
    from safetensors import SafetensorError, safe_open

    with ExitStack() as stack:
        handles = {}
        for name in found.files:
            try:
                handles[name] = stack.enter_context(safe_open(folder / name, "pt"))
            except (SafetensorError, OSError) as error:
                raise DamagedError(f"{name} is no safetensors file: {error}"[:300]) from None
        yield handles


def read_part(tree: Any, view: View, handles: dict[str, Any], device: torch.device) -> Any:
    """Give the state of one part; tensors that shared their memory do so again.

    Raises:
        DamagedError: It does not say what it should.
    """
    read: dict[str, Tensor] = {}

    def take(name: str) -> Tensor:
        if name not in view.tensors:
            raise DamagedError(f"there is no tensor {name!r}"[:200])
        if name not in read:
            read[name] = tensors.read(name, view.tensors[name], handles, device)
        return read[name]

    try:
        return trees.decode(tree, take)
    except trees.MalformedError as error:
        raise DamagedError(f"a state is not as it should be: {error}") from None
