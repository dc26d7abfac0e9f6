"""What passes between nodes: one rank of each, its leader, speaks for all of its node, by gloo.

Every call begins with a frame from each leader: what it was called with, and the data itself if they are few. So nodes
that do different things find out before any data are mixed, and a small call costs one exchange.
"""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch._C import _distributed_c10d as c10d

from lockstep.errors import LateRankError, LockstepError, LostRankError, MismatchError
from lockstep.shm.agreement import describe

Words = tuple[int, int, int, int, int, int]
"""Number, kind, operation, dtype, root and count of a call."""

_HEAD = 64  # bytes: six words, the trouble's kind, and what is spare
SMALL = 1024
"""Bytes of data that travel in the frame itself."""

TROUBLES: tuple[type[LockstepError], ...] = (MismatchError, LateRankError, LostRankError)
"""What a leader may have to tell, by number from 1 on."""


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

    def greet(self, words: Words, data: Tensor | None, trouble: LockstepError | None) -> list[Tensor]:
        """Show the others this call, and see theirs.

        Args:
            words: The call.
            data: Bytes of it, `SMALL` at most, or None.
            trouble: Why this node does not take part in what follows.

        Returns:
            Every node's ``data``.

        Raises:
            LockstepError: Another node has trouble or is away, or the calls differ.
        """
        mine = torch.zeros(_HEAD + SMALL, dtype=torch.uint8)
        mine[:48].view(torch.int64).copy_(torch.tensor(words))
        if trouble is not None:
            text = str(trouble).encode()[:SMALL]
            mine[48] = next((n for n, kind in enumerate(TROUBLES, 1) if isinstance(trouble, kind)), len(TROUBLES))
            mine[_HEAD : _HEAD + len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        elif data is not None:
            mine[_HEAD : _HEAD + data.numel()] = data
        frames = torch.empty(self.nodes, _HEAD + SMALL, dtype=torch.uint8)
        self._wait(words, lambda: self._gloo._allgather_base(frames.view(-1), mine))
        if trouble is not None:
            raise trouble
        for node, frame in enumerate(frames):
            if frame[48] and node != self.node:
                told = bytes(frame[_HEAD:].tolist()).rstrip(b"\0").decode(errors="replace")
                raise TROUBLES[int(frame[48]) - 1](f"{self._who}: node {node} gave up: {told}")
        self._compare([tuple(frame[:48].view(torch.int64).tolist()) for frame in frames])
        return [frame[_HEAD:] for frame in frames]

    def exchange(self, words: Words, data: Tensor, give: list[int], take: list[int]) -> Tensor:
        """Give every node its part of some bytes, and take this node's part of everybody's."""
        out = torch.empty(sum(take), dtype=torch.uint8)
        self._wait(words, lambda: self._gloo.alltoall_base(out, data, take, give))
        return out

    def collect(self, words: Words, part: Tensor) -> Tensor:
        """Everybody's part, one after another; all of one size."""
        out = torch.empty(part.numel() * self.nodes, dtype=torch.uint8)
        self._wait(words, lambda: self._gloo._allgather_base(out, part))
        return out

    def broadcast(self, words: Words, data: Tensor, node: int) -> None:
        """Give every node what one has."""
        self._wait(words, lambda: self._gloo.broadcast(data, node))

    def close(self) -> None:
        """Let go of the connections."""
        self._gloo = None

    @property
    def _who(self) -> str:
        return f"rank {self._members[self.node][0]} (node {self.node} of {self.nodes})"

    def _compare(self, calls: list[Any]) -> None:
        other = next((node for node, words in enumerate(calls) if words != calls[0]), None)
        if other is not None:
            raise MismatchError(
                f"{self._who}: the nodes brought different calls: rank {self._members[0][0]} called "
                f"{describe(calls[0])}, rank {self._members[other][0]} called {describe(calls[other])}, collectives "
                f"number {calls[0][0]} and {calls[other][0]}. Every rank must make the same calls in the same order, "
                f"with the same sizes and dtypes."
            )

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
