"""Streams, in the main process: whether all ranks read the same one, and when all are through."""

from collections.abc import Iterator
from itertools import chain
from typing import Any

import torch

from lockstep.collectives.agreement import agree
from lockstep.collectives.nested import map_leaves
from lockstep.data.orders import moment
from lockstep.data.shares import Indices, count_batches, own_positions
from lockstep.data.streams import Piece
from lockstep.data.tasks import Run, Task
from lockstep.errors import LostRankError, MismatchError, UsageError
from lockstep.world import World

_CALL = "an iteration over lockstep.DataLoader"
_NOTHING, _BATCH, _FAILED = range(3)


class Rounds:
    """The order of an iterable data set.

    Args:
        dataset: The data set; its length, if it has one, is that of the whole stream.
        batch_size: Samples in a global batch.
        drop_last: Whether a last short batch is left out.
        workers: Workers of each rank; 0 for none.
    """

    name = "stream"

    def __init__(self, dataset: Any, batch_size: int, drop_last: bool, workers: int) -> None:
        self._dataset = dataset
        self._batch_size = batch_size
        self._drop_last = drop_last
        self._workers = workers
        # Without workers there is no worker info to divide by.
        self._divided: bool | None = None if workers else False
        self._samples: int | None = None

    def __len__(self) -> int:
        length = len(self._dataset)  # raises what torch raises if there is none
        if self._divided is None:
            raise TypeError(
                "the number of batches is not known before the first one is there: with workers, this data set may "
                "divide itself between them. Use num_workers=0, or count without len()."
            )
        if self._divided:
            raise TypeError(
                "the number of batches is not known: this data set divides itself between workers, which end where "
                "they please."
            )
        return count_batches(length, self._batch_size, self._drop_last)

    def begin(self, world: World, run: Run) -> Iterator[Task]:
        """See `Order`: tasks without end; the stream says when it is through."""
        agree(world, _CALL, f"a stream in batches of {self._batch_size}, drop_last={self._drop_last}, {moment(run)}")
        self._samples = None
        return self._tasks(run)

    def batches(self, world: World, run: Run, made: Iterator[Piece]) -> Iterator[Any]:
        """See `Order`."""
        first = next(made)
        self._divided = first.divided
        self._refuse_other_streams(world, first)
        pieces = chain([first], made)
        yield from self._together(world, run, pieces) if first.divided else self._slices(run, pieces)

    def position(self, run: Run, batches: int) -> int:
        """See `Order`."""
        position = run.start + batches * self._batch_size
        return position if self._samples is None else min(position, self._samples)

    def given(self, run: Run, batches: int) -> Indices:
        """See `Order`; positions in the stream."""
        if self._divided:
            raise UsageError(
                f"rank {run.rank}: this data set divides itself between workers, so nobody knows the order of the "
                f"whole. Gather without the loader."
            )
        return own_positions(run.start, self.position(run, batches), self._batch_size, run.rank, run.size)

    def facts(self, world: World) -> dict[str, Any]:
        """See `Order`; a data set that divides itself goes on only if it divides itself equally."""
        return {"order": self.name, **({"parts": world.size * self._workers} if self._divided else {})}

    def _tasks(self, run: Run) -> Iterator[Task]:
        at = run.start
        while True:
            yield Task(run, at, [])
            at += self._batch_size

    def _slices(self, run: Run, pieces: Iterator[Piece]) -> Iterator[Any]:
        at = run.start
        for piece in pieces:
            if piece.ended:
                return
            if piece.samples < self._batch_size:
                self._samples = at + piece.samples
            at += self._batch_size
            yield piece.batch

    def _together(self, world: World, run: Run, pieces: Iterator[Piece]) -> Iterator[Any]:
        """Give empty batches after the own part until every rank is through; one small exchange a batch."""
        ended: dict[int, Any] = {}
        skipped = run.start // self._batch_size
        while True:
            piece = self._next_piece(world, pieces, ended)
            states = world.ranks.line_up(torch.tensor(_NOTHING if piece is None else _BATCH)).tolist()
            if _FAILED in states:
                raise LostRankError(
                    f"rank {world.rank}: the data set failed on rank {states.index(_FAILED)}; see its own error."
                )
            if _BATCH not in states:
                return
            if skipped:
                skipped -= 1
            elif piece is not None:
                yield piece.batch
            else:
                yield self._empty(world, ended)

    def _next_piece(self, world: World, pieces: Iterator[Piece], ended: dict[int, Any]) -> Piece | None:
        """Give the next batch of this rank; None once all its workers are through. A failure reaches all ranks."""
        try:
            while len(ended) < self._workers:
                piece = next(pieces)
                if not piece.ended:
                    return piece
                ended[piece.worker] = piece.batch
        except Exception:
            world.ranks.line_up(torch.tensor(_FAILED))
            raise
        return None

    def _empty(self, world: World, ended: dict[int, Any]) -> Any:
        template = next((batch for batch in ended.values() if batch is not None), None)
        if template is None:
            raise UsageError(
                f"rank {world.rank}: other ranks still have batches, but not one sample could be read here to tell "
                f"what an empty batch looks like. Let the data set give the whole stream where get_worker_info() says "
                f"num_workers=1."
            )
        return map_leaves(lambda leaf: leaf, template)

    def _refuse_other_streams(self, world: World, first: Piece) -> None:
        rows = agree(world, _CALL, "its first batch", [first.divided, first.mark])
        other = next((rank for rank, row in enumerate(rows) if row != rows[0]), None)
        if other is not None:
            raise MismatchError(
                f"rank {world.rank} of {world.size}: rank 0 and rank {other} read different streams, so samples would "
                f"be lost or come twice. Give every rank the same stream in the same order, with random numbers from "
                f"python's, numpy's or torch's global generators or from a seed of your own; lockstep.DataLoader "
                f"divides it. A data set that divides itself does so by torch.utils.data.get_worker_info(), which "
                f"counts the workers of all ranks here."
            )
