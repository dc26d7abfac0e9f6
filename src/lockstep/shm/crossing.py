"""One call over nodes: up to the leader of each node, across between the leaders, down to all ranks.

A small one is a frame up, a frame across and a frame down. What is large goes block by block, and while one block is
between the nodes the next one is on its way up, so that the network need not wait for the node. In front of down the
leader says whether all went well, so that an error on another node is raised on every rank, in its own class.
"""

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor
from torch._C import _distributed_c10d as c10d

from lockstep.errors import LockstepError, MismatchError
from lockstep.shm.backend import SharedMemoryGroup
from lockstep.shm.frames import FRAME, Words, find_difference, pack, read_data, read_trouble, read_words
from lockstep.shm.member import Member, count_group
from lockstep.shm.wire import Wire, grace
from lockstep.shm.work import Lane, Pending

Call = tuple[int, int, int, int, int]
"""Kind, operation, dtype, root and count."""

Fold = Callable[[Sequence[Tensor]], Tensor]
Across = Callable[[Wire, Words, Tensor], object]
Step = Callable[[Tensor], object]
Result = TypeVar("Result")


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
        self.nth = count_group("hierarchy", names)
        self._node = next(node for node, ranks in enumerate(nodes) if rank in ranks)
        self._local = nodes[self._node].index(rank)
        self._alone = len(nodes[self._node]) == 1
        self.below = SharedMemoryGroup(store, member, self._local, len(nodes[self._node]))
        members = [[names[one] for one in ranks] for ranks in nodes]
        leads = self._local == 0 and len(nodes) > 1
        self._wire = Wire(c10d.PrefixStore("wire", store), self._node, members, seconds) if leads else None
        self._lane = Lane("between nodes")
        self._calls = 0
        self._failure: LockstepError | None = None

    def close(self) -> None:
        """Let go of the connections."""
        if self._wire is not None:
            self._lane.close(10.0)
            self._wire.close()

    def _small(self, call: Call, data: Tensor, fold: Fold, merge: Fold, count: int) -> Tensor:
        """Run one collective whose data fit into a frame at every stage.

        Args:
            call: What it is.
            data: This rank's, flat and contiguous.
            fold: Makes of what the ranks of this node brought, each like `data`, what the node brings.
            merge: Makes of what the nodes brought the result.
            count: Elements of the result.

        Returns:
            The result, flat, on every rank.

        Raises:
            MismatchError: Ranks brought different calls, on every rank; the group is as good as before.
            LockstepError: Of another class: after it the group is of no use any more.
        """
        return self._guard(call, lambda words: self._small_steps(words, data, fold, merge, count))

    def _large(self, call: Call, blocks: Sequence[Tensor], up: Step, across: Across, down: Step) -> None:
        """Run one collective block by block; raises what `_small` does.

        Args:
            call: What it is.
            blocks: Each goes through the three steps; there is at least one.
            up: Brings a block to this node's leader.
            across: Exchanges it between the leaders.
            down: Takes it from this node's leader.
        """
        self._guard(call, lambda words: self._large_steps(words, blocks, up, across, down))

    def _give(self, x: Tensor, root: int = 0) -> None:
        """Broadcast within this node."""
        if not self._alone:
            opts = c10d.BroadcastOptions()
            opts.rootRank, opts.rootTensor, opts.asyncOp = root, 0, False
            self.below.broadcast([x], opts)

    def _guard(self, call: Call, steps: Callable[[Words], Result]) -> Result:
        if self._failure is not None:
            raise type(self._failure)(f"{self._member.who}: this group ended earlier: {self._failure}")
        words: Words = (self._calls, *call)
        self._calls += 1
        try:
            return steps(words)
        except MismatchError:
            raise
        except LockstepError as error:
            self._failure = error
            raise

    def _small_steps(self, words: Words, data: Tensor, fold: Fold, merge: Fold, count: int) -> Tensor:
        frames = self._line_up(words, data)
        self._member.timeout = self._patience
        if self._local:
            return read_data(self._hear(), data.dtype, count)
        mine = fold([read_data(frame, data.dtype, data.numel()) for frame in frames])
        try:
            met = self._wire.greet(words, mine) if self._wire is not None else [pack(words, mine)]
        except LockstepError as error:
            self._tell(words, None, error)
            raise
        result = merge([read_data(frame, mine.dtype, mine.numel()) for frame in met])
        self._tell(words, result)
        return result

    def _large_steps(self, words: Words, blocks: Sequence[Tensor], up: Step, across: Across, down: Step) -> None:
        self._line_up(words)
        between = _Between(self._wire, self._lane, words, beside=len(blocks) > 1) if self._wire is not None else None
        ahead: tuple[Tensor, Pending | None] | None = None
        for block in blocks:
            up(block)
            self._member.timeout = self._patience
            sent = between.send(across, block) if between is not None else None
            if ahead is not None:
                self._finish(words, between, *ahead, down)
            ahead = block, sent
        if ahead is not None:
            self._finish(words, between, *ahead, down)

    def _finish(
        self, words: Words, between: "_Between | None", block: Tensor, sent: Pending | None, down: Step
    ) -> None:
        """See that a block has come across, and take it down."""
        if self._local:
            self._hear()
        else:
            if sent is not None:
                sent.wait()
            error = between.failure if between is not None else None
            self._tell(words, None, error)
            if error is not None:
                raise error
        down(block)

    @property
    def _patience(self) -> float:
        """Seconds that ranks wait for their leader, which may wait for others for some time and says so in the end."""
        return 3 * (self.seconds + grace(self.seconds)) + 5

    def _line_up(self, words: Words, data: Tensor | None = None) -> list[Tensor]:
        """See that all ranks of this node do the same, and give their frames; what differs elsewhere the leaders find.

        Other nodes hear from the leader what is wrong with this one.
        """
        self._member.timeout = self.seconds
        try:
            frames = self._frames_of_node(pack(words, data))
            ranks = [self._names[one] for one in self._nodes[self._node]]
            text = find_difference([read_words(frame) for frame in frames], ranks)
            if text:
                raise MismatchError(f"{self._member.who}: the ranks brought different calls: {text}")
        except LockstepError as trouble:
            if self._wire is not None:
                self._wire.warn(words, trouble)
            raise
        return frames

    def _frames_of_node(self, mine: Tensor) -> list[Tensor]:
        if self._alone:
            return [mine]
        frames = torch.empty(len(self._nodes[self._node]), FRAME, dtype=torch.uint8)
        opts = c10d.AllgatherOptions()
        opts.asyncOp = False
        self.below.all_gather_single(frames, mine, opts)
        return list(frames)

    def _tell(self, words: Words, data: Tensor | None, error: LockstepError | None = None) -> None:
        """Say to this node how it went between the nodes."""
        if not self._alone:
            self._give(pack(words, data, error))

    def _hear(self) -> Tensor:
        frame = torch.empty(FRAME, dtype=torch.uint8)
        self._give(frame)
        trouble = read_trouble(frame, f"{self._member.who}: told by its node's first rank: ")
        if trouble is not None:
            raise trouble
        return frame


class _Between:
    """What a leader does with the others in one call.

    Args:
        wire: The leaders.
        lane: For what is done here, and nothing else.
        words: The call.
        beside: In the lane's own thread, while the caller's works within the node.
    """

    def __init__(self, wire: Wire, lane: Lane, words: Words, *, beside: bool) -> None:
        self._wire, self._lane, self._words, self._beside = wire, lane, words, beside
        self.failure: LockstepError | None = None
        self._send(lambda: wire.greet(words))

    def send(self, across: Across, block: Tensor) -> Pending | None:
        """Exchange a block, after what is ahead of it and if that went well."""
        return self._send(lambda: across(self._wire, self._words, block))

    def _send(self, step: Callable[[], object]) -> Pending | None:
        def job(_: int) -> None:
            try:
                if self.failure is None:
                    step()
            except LockstepError as error:
                self.failure = error

        if self._beside:
            return self._lane.later(job, [])
        self._lane.now(job)
        return None
