"""Collectives over tensors: what this rank brings is checked here, what the ranks bring together in the core."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.errors import UsageError
from lockstep.shm import agreement as agreed
from lockstep.shm.agreement import NUMBERS, REDUCTIONS, UNKNOWN
from lockstep.shm.member import Member
from lockstep.shm.placed import Placed
from lockstep.shm.segment import CHUNK
from lockstep.shm.work import Job

Operation = tuple[agreed.Reduction, Any]
"""The core's numbers, and a factor for every input if there is one."""

NOW, LATER = dist.AllreduceOptions(), dist.AllreduceOptions()
NOW.asyncOp, LATER.asyncOp = False, True


def is_plain(x: Tensor) -> bool:
    """Whether a tensor lies in memory as it is counted."""
    return x.is_contiguous() and not x.is_neg() and not x.is_conj()


def plain(x: Tensor) -> Tensor:
    """The tensor itself if it lies in memory as it is counted, else a copy that does."""
    if is_plain(x):
        return x
    if x.layout is not torch.strided:
        raise UsageError(f"shm cannot move a tensor of layout {x.layout}; pass x.to_dense().")
    return x.contiguous().resolve_conj().resolve_neg()


def put(into: Tensor, x: Tensor) -> None:
    """Overwrite a tensor as a backend in C++ does, which knows neither of gradients nor of inference mode."""
    with torch.inference_mode():
        into.copy_(x)


def small(tensors: Sequence[Tensor]) -> bool:
    """Whether a collective may be a single message that goes out at once; the core knows whether it is."""
    return len(tensors) == 1 and tensors[0].numel() * tensors[0].element_size() <= CHUNK


class Tensors:
    """Runs collectives over tensors on this rank's segment, at once and in the caller's thread."""

    def __init__(self, member: Member, rank: int, size: int) -> None:
        self.member, self.rank, self.size = member, rank, size

    def operation(self, x: Tensor, op: Any) -> Operation:
        """The core's numbers, and a factor for every input if there is one."""
        if x.layout is not torch.strided:
            raise UsageError(
                f"{self.member.who}: shm cannot reduce a {x.layout} tensor; pass x.to_dense(), or use gloo."
            )
        name = op.op
        found = REDUCTIONS.get((x.dtype, name))
        if found is None:
            raise agreed.refuse_reduction(x.dtype, name, self.member.who)
        return found, op.__getstate__()[1] if name == dist.ReduceOp.PREMUL_SUM else None

    def reduce(self, pace: int, kind: int, x: Tensor, op: Operation, root: int) -> None:
        (number, type_, each), factor = op
        flat = plain(x)
        source = flat if factor is None else flat * factor
        self.member.call(
            pace,
            kind,
            number,
            type_,
            root,
            flat.numel() * each,
            x.element_size() // each,
            source.data_ptr(),
            flat.data_ptr(),
        )
        if flat is not x and (kind == agreed.ALL_REDUCE or root == self.rank):
            put(x, flat)

    def prepare_sum(self, x: Tensor, placed: Placed | None = None) -> Job:
        """Settle once all that a sum in place of the same memory needs: who sums in every step saves half of the call.

        Args:
            x: Contiguous; it lies where it is as long as the job is used.
            placed: Where it lies, if it is one that all ranks see. Other ranks may bring one that they do not.
        """
        number, type_, each = REDUCTIONS[x.dtype, dist.ReduceOp.SUM]
        call, address, count, width = self.member.call, x.data_ptr(), x.numel() * each, x.element_size() // each

        homes, place = (placed.homes, placed.number) if placed is not None else (None, 0)

        # The memory stays as long as the job does: what are only addresses in a call would be unmapped under it.
        def job(pace: int, _: object = (x, placed)) -> None:
            call(pace, agreed.ALL_REDUCE, number, type_, 0, count, width, address, address, homes=homes, place=place)

        return job

    def reduce_parts(self, pace: int, out: Tensor, parts: Sequence[Tensor], op: Operation) -> None:
        (number, type_, each), factor = op
        sources = [plain(part) if factor is None else plain(part) * factor for part in parts]
        flat = plain(out)
        count = flat.numel() * each
        self.member.call(
            pace,
            agreed.REDUCE_SCATTER,
            number,
            type_,
            0,
            count,
            out.element_size() // each,
            tuple(source.data_ptr() for source in sources),
            self.addresses({self.rank: flat}),
            count,
            count,
        )
        if flat is not out:
            put(out, flat)

    def reduce_uneven(self, pace: int, out: Tensor, parts: Sequence[Tensor], op: Operation) -> None:
        """The same of parts that are not all of one size, one after another."""
        for root, part in enumerate(parts):
            if root == self.rank:
                put(out, part)
            self.reduce(pace, agreed.REDUCE, out if root == self.rank else part, op, root)

    def move(
        self,
        pace: int,
        kind: int,
        root: int,
        like: Tensor,
        parts: Sequence[Tensor] | None,
        outs: dict[int, Tensor] | None,
    ) -> None:
        """Move one size: `parts` to send (one, or one per rank), `outs` to fill by the rank that they come from."""
        sources = [plain(part) for part in parts or ()]
        targets = {rank: plain(out) for rank, out in (outs or {}).items()}
        count = like.numel()
        alone = kind != agreed.SCATTER and sources
        self.member.call(
            pace,
            kind,
            0,
            NUMBERS.get(like.dtype, UNKNOWN),
            root,
            count,
            like.element_size(),
            self.addresses({self.rank: sources[0]} if alone else dict(enumerate(sources))),
            self.addresses(targets),
            count,
            count,
        )
        for rank, target in targets.items():
            if outs and target is not outs[rank]:
                put(outs[rank], target)

    def line_up(self, pace: int, x: Tensor) -> list[Tensor]:
        """Every rank's ``x``, by rank."""
        out = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(self.size)]
        self.move(pace, agreed.ALL_GATHER, 0, x, [x], dict(enumerate(out)))
        return out

    def exchange(self, pace: int, outs: Sequence[Tensor], parts: Sequence[Tensor]) -> None:
        sources, targets = [plain(part) for part in parts], [plain(out) for out in outs]
        self.member.call(
            pace,
            agreed.ALL_TO_ALL,
            0,
            NUMBERS.get(outs[0].dtype, UNKNOWN),
            0,
            0,
            outs[0].element_size(),
            tuple(source.data_ptr() for source in sources),
            tuple(target.data_ptr() for target in targets),
            tuple(source.numel() for source in sources),
            tuple(target.numel() for target in targets),
        )
        for out, target in zip(outs, targets, strict=True):
            if target is not out:
                put(out, target)

    def addresses(self, tensors: dict[int, Tensor]) -> tuple[int, ...]:
        return tuple(tensors[rank].data_ptr() if rank in tensors else 0 for rank in range(self.size))

    def same_dtypes(self, tensors: Sequence[Tensor], call: str) -> None:
        other = next((x.dtype for x in tensors if x.dtype != tensors[0].dtype), None)
        if other is not None:
            raise UsageError(f"{self.member.who}: {call} of {tensors[0].dtype} and {other}: give all the same dtype.")

    def one_for_each(self, parts: Sequence[Tensor], call: str) -> None:
        if len(parts) != self.size:
            raise UsageError(
                f"{self.member.who}: {call} takes a list of {self.size} tensors, one for each rank, not {len(parts)}."
            )

    def root(self, rank: int, call: str) -> int:
        if not 0 <= rank < self.size:
            raise UsageError(f"{self.member.who}: {call}: there is no rank {rank} in a group of {self.size}.")
        return rank

    def uneven(self, out: Tensor, parts: Sequence[Tensor], call: str) -> bool:
        """Whether the parts differ in size, which they may: this rank's is as large as ``out``."""
        self.one_for_each(parts, call)
        uneven = len({part.numel() for part in parts}) > 1
        own = [part if i == self.rank or part.dtype != out.dtype else out for i, part in enumerate(parts)]
        self.same_sizes(out, own if uneven else parts, call)
        return uneven

    def same_sizes(self, x: Tensor, parts: Sequence[Tensor], call: str) -> None:
        self.one_for_each(parts, call)
        for rank, part in enumerate(parts):
            if part.numel() != x.numel() or part.dtype != x.dtype:
                raise UsageError(
                    f"{self.member.who}: {call}: tensor {rank} of the list has {part.numel()} elements of "
                    f"{part.dtype}, the other tensor {x.numel()} of {x.dtype}. Give all the same size and dtype."
                )

    def whole_multiple(self, small: Tensor, large: Tensor, call: str) -> None:
        if large.numel() != small.numel() * self.size or large.dtype != small.dtype:
            raise UsageError(
                f"{self.member.who}: {call}: the tensor for all ranks must be {self.size} times {tuple(small.shape)} "
                f"of {small.dtype}, not {tuple(large.shape)} of {large.dtype}."
            )

    def splits(self, x: Tensor, sizes: list[int]) -> None:
        good = sum(sizes) == len(x) and len(sizes) == self.size if sizes else len(x) % self.size == 0
        if not good:
            raise UsageError(
                f"{self.member.who}: all_to_all: {len(x)} rows cannot be split into "
                f"{sizes or f'{self.size} equal parts'}; give one size for each rank, that add up to the rows."
            )

    def equal_parts(self, x: Tensor) -> Sequence[Tensor]:
        """One part of a contiguous tensor for each rank."""
        return torch.chunk(x.view(-1), self.size) if x.numel() else [x] * self.size

    def split(self, x: Tensor, sizes: list[int]) -> Sequence[Tensor]:
        return torch.split(x, sizes or [len(x) // self.size] * self.size)
