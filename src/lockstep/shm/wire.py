"""What passes between nodes: one rank of each, its leader, speaks for all of its node, by gloo.

Every call begins with a frame from each leader, which is all of a small one.
"""

from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch._C import _distributed_c10d as c10d

from lockstep.errors import LateRankError, LockstepError, LostRankError, MismatchError
from lockstep.shm.agreement import describe
from lockstep.shm.frames import FRAME, Words, find_difference, pack, read_trouble, read_words

_AT_ONCE = 128 * 1024
"""Bytes for each node in one exchange: gloo sends and receives larger ones one after the other, not at once."""

_SUMMED_BY_GLOO = (torch.float32, torch.float64, torch.int32, torch.int64)


def grace(timeout: float) -> float:
    """How much longer a leader waits for others than ranks of one node for each other, so that a name can come.

    Example:
        >>> grace(600.0), grace(3.0)
        (2.0, 0.5)
    """
    return min(2.0, max(0.5, timeout / 10))


class Wire:
    """The leaders of all nodes.

    Args:
        store: For this group alone.
        node: This node's number.
        members: The ranks of every node, as numbers in the world; the first is the leader.
        timeout: Seconds to wait for other nodes.
    """

    def __init__(self, store: c10d.Store, node: int, members: Sequence[Sequence[int]], timeout: float) -> None:
        self.node, self.nodes = node, len(members)
        self._members, self._timeout = members, timeout
        wait = timedelta(seconds=timeout + grace(timeout))
        self._gloo: Any = c10d.ProcessGroupGloo(store, node, len(members), wait)

    def greet(self, words: Words, data: Tensor | None = None) -> list[Tensor]:
        """Show the others this call, and see theirs.

        Args:
            words: The call.
            data: What of it goes along, if it is small.

        Returns:
            Every node's frame.

        Raises:
            LockstepError: Another node has trouble or is away, or the calls differ.
        """
        frames = self._show(words, pack(words, data))
        for node, frame in enumerate(frames):
            told = read_trouble(frame, f"{self._who}: node {node} gave up: ") if node != self.node else None
            if told is not None:
                raise told
        text = find_difference([read_words(frame) for frame in frames], [ranks[0] for ranks in self._members])
        if text:
            raise MismatchError(f"{self._who}: the nodes brought different calls: {text}")
        return frames

    def warn(self, words: Words, trouble: LockstepError) -> None:
        """Say to the others, in place of a greeting, why this node does not take part in what follows."""
        with suppress(LockstepError):
            self._show(words, pack(words, None, trouble))

    def _show(self, words: Words, mine: Tensor) -> list[Tensor]:
        frames = torch.empty(self.nodes, FRAME, dtype=torch.uint8)
        self._wait(words, lambda: self._gloo._allgather_base(frames.view(-1), mine))
        return list(frames)

    def sums(self, dtype: torch.dtype, name: str) -> bool:
        """Whether gloo's own sum is the same to the bit as one in the order of the nodes: of two, it is."""
        return self.nodes == 2 and name in ("SUM", "PREMUL_SUM") and dtype in _SUMMED_BY_GLOO

    def sum(self, words: Words, data: Tensor) -> None:
        """Sum in place, where `sums` says so."""
        self._wait(words, lambda: self._gloo.allreduce([data]))

    def exchange(self, words: Words, data: Tensor, give: list[int], take: list[int]) -> Tensor:
        """Give every node its part of some bytes, and take this node's part of everybody's."""
        out = torch.empty(sum(take), dtype=torch.uint8)
        if len({*give, *take}) > 1 or not give[0]:
            self._wait(words, lambda: self._gloo.alltoall_base(out, data, take, give))
            return out
        ours, theirs = data.view(self.nodes, -1), out.view(self.nodes, -1)
        for begin in range(0, give[0], _AT_ONCE):
            part = ours[:, begin : begin + _AT_ONCE].contiguous()
            got = torch.empty_like(part)
            self._wait(words, lambda part=part, got=got: self._gloo.alltoall_base(got.view(-1), part.view(-1), [], []))
            theirs[:, begin : begin + _AT_ONCE] = got
        return out

    def collect(self, words: Words, part: Tensor) -> Tensor:
        """Everybody's part, one after another; all of one size."""
        out = torch.empty(self.nodes, part.numel(), dtype=torch.uint8)
        for begin in range(0, part.numel(), _AT_ONCE):
            piece = part[begin : begin + _AT_ONCE]
            got = torch.empty(self.nodes * piece.numel(), dtype=torch.uint8)
            self._wait(words, lambda piece=piece, got=got: self._gloo._allgather_base(got, piece))
            out[:, begin : begin + _AT_ONCE] = got.view(self.nodes, -1)
        return out.view(-1)

    def broadcast(self, words: Words, data: Tensor, node: int) -> None:
        """Give every node what one has."""
        self._wait(words, lambda: self._gloo.broadcast(data, node))

    def close(self) -> None:
        """Let go of the connections."""
        self._gloo = None

    @property
    def _who(self) -> str:
        return f"rank {self._members[self.node][0]} (node {self.node} of {self.nodes})"

    def _wait(self, words: Words, start: Any) -> None:
        try:
            start().wait()
        except RuntimeError as error:  # gloo has no other
            raise self._explain(words, str(error)) from None

    def _explain(self, words: Words, text: str) -> LockstepError:
        others = [node for node in range(self.nodes) if node != self.node]
        away = f"node {others[0]} (ranks {_list(self._members[others[0]])})" if len(others) == 1 else "another node"
        what = f"{describe(words)}, collective number {words[0]}"
        if "imed out" in text:
            return LateRankError(
                f"{self._who}: {away} did not come within {self._timeout:g} s to {what}. Its ranks do something else, "
                f"or the network between the nodes is down; a step that takes longer needs a larger timeout."
            )
        return LostRankError(
            f"{self._who}: {away} was lost in {what}: it ended, or the network between the nodes is down. Look for its "
            f"own error first. (gloo: {text.splitlines()[0][:200]})"
        )


def _list(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))
