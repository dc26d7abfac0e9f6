"""One call over nodes: up to the leader of each node, across between the leaders, down to all ranks.

In front of down the leader says whether all went well, so that an error on another node is raised on every rank, in its
own class.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C import _distributed_c10d as c10d

from lockstep.errors import LockstepError, MismatchError
from lockstep.shm import agreement as agreed
from lockstep.shm.backend import SharedMemoryGroup
from lockstep.shm.member import Member
from lockstep.shm.wire import SMALL, TROUBLES, Wire, Words, grace

_TELL = 1024  # bytes of a leader's verdict

Step = Callable[[], None]
Across = Callable[[Words, LockstepError | None], object]
"""What leaders do: the call in words, and why this node cannot take part if it cannot."""


class Crossing:
    """This rank's part in calls over nodes.

    Args:
        store: Where the group met.
        member: This rank among those of its node.
        rank: This rank within the group.
        names: The group's ranks as numbers in the world.
        nodes: The group's ranks of each node.
        seconds: How long ranks wait for each other.
    """

    def __init__(
        self, store: c10d.Store, member: Member, rank: int, names: list[int], nodes: list[list[int]], seconds: float
    ) -> None:
        self._member, self._names, self._nodes, self.seconds = member, names, nodes, seconds
        self._node = next(node for node, ranks in enumerate(nodes) if rank in ranks)
        self._local = nodes[self._node].index(rank)
        self._alone = len(nodes[self._node]) == 1
        self.below = SharedMemoryGroup(store, member, self._local, len(nodes[self._node]))
        members = [[names[one] for one in ranks] for ranks in nodes]
        leads = self._local == 0 and len(nodes) > 1
        self._wire = Wire(c10d.PrefixStore("wire", store), self._node, members, seconds) if leads else None
        self._calls = 0
        self._failure: LockstepError | None = None

    def close(self) -> None:
        """Let go of the connections."""
        if self._wire is not None:
            self._wire.close()

    def _give(self, tensors: Sequence[Tensor], root: int = 0) -> None:
        """Broadcast within this node."""
        if self._alone:
            return
        opts = c10d.BroadcastOptions()
        opts.rootRank, opts.rootTensor, opts.asyncOp = root, 0, False
        for x in tensors:
            self.below.broadcast([x], opts)

    def _greet(self, words: Words, data: Tensor | None, trouble: LockstepError | None) -> list[Tensor] | None:
        """Meet the other leaders; give everybody's data if they were small enough to come along."""
        if self._wire is None:
            if trouble is not None:
                raise trouble
            return [data] if data is not None else None
        small = data is not None and 0 < data.numel() * data.element_size() <= SMALL
        found = self._wire.greet(words, data.view(torch.uint8) if small and data is not None else None, trouble)
        if not small or data is None:
            return None
        return [part[: data.numel() * data.element_size()].view(data.dtype) for part in found]

    def _call(
        self,
        brought: tuple[int, int, int, int, int],
        up: Step,
        across: Across,
        down: Callable[[], object],
    ) -> None:
        """Run one collective.

        Raises:
            MismatchError: Ranks brought different calls, on every rank; the group is as good as before.
            LockstepError: Of another class: after it the group is of no use any more.
        """
        if self._failure is not None:
            raise type(self._failure)(f"{self._member.who}: this group ended earlier: {self._failure}")
        words: Words = (self._calls, *brought)
        self._calls += 1
        try:
            self._three_steps(words, up, across, down)
        except MismatchError:
            raise
        except LockstepError as error:
            self._failure = error
            raise

    def _three_steps(
        self,
        words: Words,
        up: Step,
        across: Across,
        down: Callable[[], object],
    ) -> None:
        self._member.timeout = self.seconds
        trouble: LockstepError | None = None
        try:
            self._same_call(words)
            up()
        except LockstepError as error:
            if self._local:
                raise
            trouble = error
        # A leader may wait for others for some time, and says so in the end.
        self._member.timeout = 3 * (self.seconds + grace(self.seconds)) + 5
        if self._local == 0:
            self._lead(words, across, trouble)
        else:
            self._hear()
        down()

    def _lead(
        self,
        words: Words,
        across: Across,
        trouble: LockstepError | None,
    ) -> None:
        error = trouble
        try:
            across(words, trouble)
        except LockstepError as found:
            error = trouble or found
        if trouble is not None:  # the node knows already
            raise trouble
        self._tell(error)
        if error is not None:
            raise error

    def _same_call(self, words: Words) -> None:
        """See that all ranks of this node do the same; what differs elsewhere the leaders find."""
        if self._alone:
            return
        rows = torch.empty(len(self._nodes[self._node]), len(words), dtype=torch.int64)
        opts = c10d.AllgatherOptions()
        opts.asyncOp = False
        self.below.allgather([list(rows)], [torch.tensor(words)], opts)
        calls: list[Any] = [tuple(row) for row in rows.tolist()]
        other = next((place for place, call in enumerate(calls) if call != calls[0]), None)
        if other is not None:
            ranks = [self._names[one] for one in self._nodes[self._node]]
            raise MismatchError(
                f"{self._member.who}: the ranks brought different calls: rank {ranks[0]} called "
                f"{agreed.describe(calls[0])}, rank {ranks[other]} called {agreed.describe(calls[other])}, collective "
                f"number {words[0]}. Every rank must make the same calls in the same order, with the same sizes and "
                f"dtypes."
            )

    def _tell(self, error: LockstepError | None) -> None:
        """Say to this node how it went between the nodes."""
        if self._alone:
            return
        verdict = torch.zeros(_TELL, dtype=torch.uint8)
        if error is not None:
            text = str(error).encode()[: _TELL - 1]
            verdict[0] = next((n for n, kind in enumerate(TROUBLES, 1) if isinstance(error, kind)), len(TROUBLES))
            verdict[1 : 1 + len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self._give([verdict])

    def _hear(self) -> None:
        verdict = torch.zeros(_TELL, dtype=torch.uint8)
        self._give([verdict])
        if verdict[0]:
            text = bytes(verdict[1:].tolist()).rstrip(b"\0").decode(errors="replace")
            raise TROUBLES[int(verdict[0]) - 1](f"{self._member.who}: told by its node's first rank: {text}")
