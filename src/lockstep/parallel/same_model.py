"""Do all ranks have the same model? Which parameter differs, and on which ranks?"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from lockstep.collectives.fingerprint import fingerprint
from lockstep.errors import MismatchError
from lockstep.parallel.peers import Peers
from lockstep.parallel.slots import Slot


def describe(named: Iterable[tuple[str, Tensor]]) -> list[str]:
    """One line for each tensor: all that has to be the same on every rank, but for the values.

    Example:
        >>> describe(nn.Linear(2, 1).named_parameters())
        ['weight (1, 2) float32', 'bias (1,) float32']
    """
    return [_line(name, tensor) for name, tensor in named]


def _line(name: str, tensor: Tensor) -> str:
    notes = []
    if tensor.layout is not torch.strided:
        notes.append(str(tensor.layout).removeprefix("torch."))
    elif not tensor.is_contiguous():
        notes.append(f"strides {tensor.stride()}")
    if isinstance(tensor, nn.Parameter) and not tensor.requires_grad:
        notes.append("frozen")
    return " ".join([name, str(tuple(tensor.shape)), str(tensor.dtype).removeprefix("torch."), *notes])


def first_difference(lines: Sequence[Sequence[str]]) -> tuple[int, list[int]] | None:
    """Where the ranks' descriptions part.

    Args:
        lines: Each rank's description.

    Returns:
        The first line that differs from rank 0's on some rank, and those ranks' positions; None if nothing differs.

    Example:
        >>> first_difference([["a", "b"], ["a", "b"], ["a", "c"], ["a"]])
        (1, [2, 3])
    """
    for number in range(max(map(len, lines))):
        here = [line[number] if number < len(line) else "nothing" for line in lines]
        differing = [position for position, line in enumerate(here) if line != here[0]]
        if differing:
            return number, differing
    return None


def compare_structure(lines: list[str], peers: Peers, device: torch.device) -> None:
    """Raise on every rank if descriptions differ.

    Raises:
        MismatchError: Names the first parameter that differs, and the ranks.
    """
    text = torch.tensor(list("\n".join(lines).encode()), dtype=torch.uint8, device=device)
    if text.numel() == 0:
        text = torch.zeros(1, dtype=torch.uint8, device=device)
    sums = peers.line_up(torch.stack((torch.tensor(text.numel(), device=device), fingerprint(text)))).tolist()
    if all(row == sums[0] for row in sums):
        return
    padded = torch.zeros(max(row[0] for row in sums), dtype=torch.uint8, device=device)
    padded[: text.numel()] = text
    everyone = [bytes(row.tolist()).rstrip(b"\0").decode().split("\n") for row in peers.line_up(padded)]
    found = first_difference(everyone)
    assert found is not None
    number, differing = found
    there = everyone[differing[0]]
    first, other = (found[number] if number < len(found) else "nothing" for found in (everyone[0], there))
    raise MismatchError(
        f"rank {peers.rank}: the ranks have different models. Entry {number} is {first!r} on rank {peers.ranks[0]}, "
        f"but {other!r} on rank {peers.ranks[differing[0]]} (different from rank {peers.ranks[0]}'s: rank(s) "
        f"{', '.join(str(peers.ranks[position]) for position in differing)}). Every rank must build the same model, "
        f"from the same arguments and in the same order, and change it in the same way."
    )


def compare_values(slots: Sequence[Slot], peers: Peers, device: torch.device) -> None:
    """Raise on every rank if parameters that were not compared before have other values on some.

    Raises:
        MismatchError: Names the first one that differs, and the ranks.
    """
    marks = torch.zeros(len(slots), dtype=torch.int64, device=device)
    for place, slot in enumerate(slots):
        if not slot.compared:
            marks[place] = fingerprint(slot.param) + 1  # zeros are values too
            slot.compared = True
    rows = peers.line_up(marks)
    differing = rows != rows[0]
    if not differing.any():
        return
    place = int(differing.any(0).int().argmax())
    others = [rank for rank, differs in zip(peers.ranks, differing[:, place].tolist(), strict=True) if differs]
    raise MismatchError(
        f"rank {peers.rank}: parameter {slots[place].name!r} has other values on rank(s) {', '.join(map(str, others))} "
        f"than on rank {peers.ranks[0]}. What is loaded or replaced after replicate() must be the same on every rank; "
        f"new layers are if each rank calls torch.manual_seed with the same number before it makes them."
    )


def equalise(tensors: Sequence[Tensor], peers: Peers, device: torch.device) -> None:
    """Give every rank the first rank's values; nothing but a checksum travels where they are equal already.

    Raises:
        MismatchError: Sparse tensors differ.
    """
    if not tensors:
        return
    sums = peers.line_up(torch.stack([fingerprint(tensor).to(device) for tensor in tensors]))
    differing = (sums != sums[0]).any(0).tolist()
    for number, (tensor, differs) in enumerate(zip(tensors, differing, strict=True)):
        if differs:
            if tensor.layout is not torch.strided:
                rank = peers.ranks[int((sums[:, number] != sums[0, number]).nonzero()[0])]
                raise MismatchError(
                    f"rank {peers.rank}: a {tensor.layout} buffer of shape {tuple(tensor.shape)} has other entries on "
                    f"rank {rank} than on rank {peers.ranks[0]}. Build it from the same entries on every rank: only "
                    f"dense tensors are sent."
                )
            whole = tensor.detach().contiguous()
            peers.broadcast(whole)
            tensor.detach().copy_(whole)
