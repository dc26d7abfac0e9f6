"""CPU ranks on several nodes: shared memory within a node, gloo between one rank of each, its leader.

What the ranks of a node have to say crosses the network once, not once for each rank. all_reduce, broadcast,
all_gather, reduce_scatter and barrier go this way; messages and the other collectives take plain gloo between all.

A call has three parts: up (the node's ranks bring together what they have, at the leader), across (the leaders), down
(the leader gives its node what came out). In front of down the leader says whether all went well, so that an error on
another node is raised on every rank, in its own class.
"""

import json
import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d as c10d

from lockstep.errors import LockstepError, MismatchError, UsageError
from lockstep.shm import agreement as agreed
from lockstep.shm.agreement import NUMBERS, UNKNOWN
from lockstep.shm.backend import SharedMemoryGroup
from lockstep.shm.combine import combine
from lockstep.shm.member import Member
from lockstep.shm.segment import create
from lockstep.shm.tensors import plain
from lockstep.shm.wire import SMALL, TROUBLES, Wire, Words, grace
from lockstep.world.place import find_place

_TELL = 1024  # bytes of a leader's verdict
_HALVES = (torch.float16, torch.bfloat16)

Step = Callable[[], None]


def start_group(options: Any, _: object = None) -> "Hierarchy":
    """Make a group; torch calls this with what it knows about it.

    Raises:
        UsageError: On some node the ranks cannot share memory; raised on all.
    """
    timeout = options.timeout.total_seconds()
    rank, size = options.group_rank, options.group_size
    names = list(options.global_ranks_in_group) or list(range(size))
    store = options.store
    nodes = _find_nodes(store, rank, size, options.timeout)
    mine = next(node for node, ranks in enumerate(nodes) if rank in ranks)
    local = nodes[mine].index(rank)
    member, trouble = None, ""
    try:
        below = c10d.PrefixStore(f"node/{mine}", store)
        meeting = create(below, local, len(nodes[mine]), timeout)
        member = Member(meeting, local, [names[one] for one in nodes[mine]], timeout)
    except UsageError as error:
        trouble = str(error)
    store.set(f"trouble/{rank}", trouble)
    found = [text for text in (store.get(f"trouble/{one}").decode() for one in range(size)) if text]
    if found or member is None:
        if member is not None:
            member.stop()
            member.close()
        raise UsageError(found[0])
    return Hierarchy(store, member, rank, names, nodes, options.timeout)


def _find_nodes(store: c10d.Store, rank: int, size: int, timeout: timedelta) -> list[list[int]]:
    """The group's ranks of each node, nodes by their first rank."""
    place = find_place(os.environ)
    where = str(place.node) if place.nodes > 1 else os.uname().nodename
    store.set(f"where/{rank}", json.dumps(where))
    names = [f"where/{one}" for one in range(size)]
    store.wait(names, timeout)
    nodes: dict[bytes, list[int]] = {}
    for one, name in enumerate(names):
        nodes.setdefault(store.get(name), []).append(one)
    return list(nodes.values())


class Hierarchy(SharedMemoryGroup):
    """A process group over nodes; ``init_process_group("hierarchy")`` makes one.

    Args:
        store: Where the group met.
        member: This rank among those of its node.
        rank: This rank within the group.
        names: The group's ranks as numbers in the world.
        nodes: The group's ranks of each node.
        timeout: How long ranks wait for each other.
    """

    def __init__(
        self,
        store: c10d.Store,
        member: Member,
        rank: int,
        names: list[int],
        nodes: list[list[int]],
        timeout: timedelta,
    ) -> None:
        super().__init__(store, member, rank, len(names))
        self._names, self._nodes = names, nodes
        self._node = next(node for node, ranks in enumerate(nodes) if rank in ranks)
        self._local = nodes[self._node].index(rank)
        self._alone = len(nodes[self._node]) == 1
        self._seconds = timeout.total_seconds()
        self._below = SharedMemoryGroup(store, member, self._local, len(nodes[self._node]))
        self._order = [one for ranks in nodes for one in ranks]
        members = [[names[one] for one in ranks] for ranks in nodes]
        leads = self._local == 0 and len(nodes) > 1
        self._wire = Wire(c10d.PrefixStore("wire", store), self._node, members, self._seconds) if leads else None
        self._plain: Any = c10d.ProcessGroupGloo(c10d.PrefixStore("plain", store), rank, len(names), timeout)
        self._calls = 0
        self._failure: LockstepError | None = None

    # What goes by nodes

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> Any:  # type: ignore[override]
        """Reduce in place, on every rank, in the order of the ranks and then of the nodes."""
        opts = c10d.AllreduceOptions() if opts is None else opts
        if not tensors[0].is_cpu or any(x.layout is not torch.strided for x in tensors):
            return self._gloo(tensors[0], "allreduce", tensors, opts)
        for x in tensors:
            self._below._tensors.operation(x, opts.reduceOp)  # raises where there is none

        def job(_: object) -> None:
            for x in tensors:
                self._reduce_all(x, opts.reduceOp)

        return self._do(job, opts, tensors)

    allreduce_coalesced = allreduce

    def broadcast(self, tensors: list[Tensor], opts: Any) -> Any:  # type: ignore[override]
        """Give every rank what the root has."""
        if not tensors[0].is_cpu:
            return self._gloo(tensors[0], "broadcast", tensors, opts)

        def job(_: object) -> None:
            for x in tensors:
                self._broadcast(x, opts.rootRank)

        return self._do(job, opts, tensors)

    def allgather_coalesced(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> Any:
        """Give every rank lists of what all have."""
        opts = c10d.AllgatherOptions() if opts is None else opts
        if not inputs[0].is_cpu:
            return self._gloo(inputs[0], "allgather_coalesced", outputs, inputs, opts)
        for out, x in zip(outputs, inputs, strict=True):
            self._tensors.same_sizes(x, out, "all_gather")

        def job(_: object) -> None:
            for out, x in zip(outputs, inputs, strict=True):
                self._gather_all(x, out)

        return self._do(job, opts, outputs[0])

    def all_gather_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Any:
        """Give every rank tensors of what all have."""
        opts = c10d.AllgatherOptions() if opts is None else opts
        if not inputs[0].is_cpu:
            return self._gloo(inputs[0], "allgather_into_tensor_coalesced", outputs, inputs, opts)
        for out, x in zip(outputs, inputs, strict=True):
            self._tensors.whole_multiple(x, out, "all_gather")

        def job(_: object) -> None:
            for out, x in zip(outputs, inputs, strict=True):
                whole = plain(out)
                self._gather_all(x, self._tensors.equal_parts(whole))
                if whole is not out:
                    out.copy_(whole)

        return self._do(job, opts, outputs)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def reduce_scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None) -> Any:  # type: ignore[override]
        """Reduce every rank's list, and give each rank the entry of its number."""
        opts = c10d.ReduceScatterOptions() if opts is None else opts
        if not outputs[0].is_cpu:
            return self._gloo(outputs[0], "reduce_scatter", outputs, inputs, opts)
        self._tensors.same_sizes(outputs[0], inputs[0], "reduce_scatter")
        self._below._tensors.operation(outputs[0], opts.reduceOp)
        return self._do(lambda _: self._reduce_parts(outputs[0], inputs[0], opts.reduceOp), opts, outputs)

    def reduce_scatter_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Any:
        """Reduce, and give each rank its part along the first dimension."""
        opts = c10d.ReduceScatterOptions() if opts is None else opts
        if not outputs[0].is_cpu:
            return self._gloo(outputs[0], "reduce_scatter_tensor_coalesced", outputs, inputs, opts)
        for out, x in zip(outputs, inputs, strict=True):
            self._tensors.whole_multiple(out, x, "reduce_scatter")
            self._below._tensors.operation(out, opts.reduceOp)

        def job(_: object) -> None:
            for out, x in zip(outputs, inputs, strict=True):
                self._reduce_parts(out, self._tensors.equal_parts(plain(x)), opts.reduceOp)

        return self._do(job, opts, outputs)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def barrier(self, opts: Any = None) -> Any:
        """Wait until every rank is here."""
        opts = c10d.BarrierOptions() if opts is None else opts

        def job(_: object) -> None:
            self._call(
                (agreed.BARRIER, 0, 0, 0, 0),
                _nothing,
                lambda words, trouble: self._greet(words, None, trouble),
                _nothing,
            )

        return self._do(job, opts, [])

    # What does not

    def reduce(self, tensors: list[Tensor], opts: Any) -> Any:  # type: ignore[override]
        """By gloo."""
        return self._gloo(tensors[0], "reduce", tensors, opts)

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any) -> Any:  # type: ignore[override]
        """By gloo."""
        return self._gloo(inputs[0], "gather", outputs, inputs, opts)

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any) -> Any:  # type: ignore[override]
        """By gloo."""
        return self._gloo(outputs[0], "scatter", outputs, inputs, opts)

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Any:
        """By gloo."""
        return self._gloo(outputs[0], "alltoall", outputs, inputs, c10d.AllToAllOptions() if opts is None else opts)

    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,  # noqa: A002
        take: list[int],
        give: list[int],
        opts: Any = None,
    ) -> Any:
        """By gloo."""
        opts = c10d.AllToAllOptions() if opts is None else opts
        return self._gloo(output, "alltoall_base", output, input, take, give, opts)

    alltoall_base = all_to_all_single

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> Any:
        """By gloo."""
        return self._gloo(tensors[0], "send", tensors, peer, tag)

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> Any:
        """By gloo."""
        return self._gloo(tensors[0], "recv", tensors, peer, tag)

    def recv_anysource(self, tensors: list[Tensor], tag: int) -> Any:
        """By gloo."""
        return self._gloo(tensors[0], "recv_anysource", tensors, tag)

    # What torch asks of a group

    def getBackendName(self) -> str:  # noqa: N802
        """Give the name under which it is registered."""
        return "hierarchy"

    def name(self) -> str:
        """Give the backend's name."""
        return "hierarchy"

    @property
    def options(self) -> Any:
        """What the group was started with, as other backends have it."""
        return c10d.Backend.Options("hierarchy", timeout=timedelta(seconds=self._seconds))

    def set_timeout(self, timeout: timedelta) -> None:
        """Wait so long from now on, within a node; between nodes it stays as it was."""
        self._seconds = timeout.total_seconds()

    def shutdown(self) -> None:
        """Leave."""
        super().shutdown()
        if self._wire is not None:
            self._wire.close()
        self._plain = None

    abort = shutdown

    # How it is done

    def _gloo(self, x: Tensor, method: str, *args: Any) -> Any:
        if not x.is_cpu:
            return self._elsewhere(x, method, *args)
        if not self._open:
            raise UsageError(f"{self._member.who}: this process group has been destroyed.")
        return self._collect(getattr(self._plain, method)(*args))

    def _reduce_all(self, x: Tensor, op: Any) -> None:
        name = str(op.op.name)
        flat = _work_copy(plain(x).view(-1), name)
        words = (agreed.ALL_REDUCE, *self._numbers(flat, name), 0, flat.numel())

        def across(words: Words, trouble: LockstepError | None) -> None:
            parts = self._greet(words, flat, trouble)
            if parts is not None:
                flat.copy_(combine(parts, _sum(name)))
            elif flat.numel():
                self._sum_large(words, flat, _sum(name))

        self._call(words, lambda: self._bring(flat, op, name), across, lambda: self._give([flat]))
        _put_back(flat, x, name, len(self._names))

    def _bring(self, flat: Tensor, op: Any, name: str) -> None:
        """Reduce this node's tensors at its leader."""
        opts = c10d.ReduceOptions()
        opts.reduceOp = cast("Any", dist.ReduceOp.SUM) if name == "AVG" else op
        opts.rootRank, opts.rootTensor, opts.asyncOp = 0, 0, False
        if flat.numel():
            self._below.reduce([flat], opts)

    def _give(self, tensors: Sequence[Tensor], root: int = 0) -> None:
        """Broadcast within this node."""
        if self._alone:
            return
        opts = c10d.BroadcastOptions()
        opts.rootRank, opts.rootTensor, opts.asyncOp = root, 0, False
        for x in tensors:
            self._below.broadcast([x], opts)

    def _sum_large(self, words: Words, flat: Tensor, name: str) -> None:
        """Each leader combines one part of the tensor, then all get all parts: every byte crosses once each way."""
        wire = self._wire
        assert wire is not None
        if wire.sums(flat.dtype, name):
            wire.sum(words, flat)
            return
        each = -(-flat.numel() // wire.nodes)
        padded = flat if each * wire.nodes == flat.numel() else _pad(flat, each * wire.nodes)
        sizes = [each * flat.element_size()] * wire.nodes
        parts = wire.exchange(words, padded.view(torch.uint8), sizes, sizes).view(flat.dtype).chunk(wire.nodes)
        whole = wire.collect(words, combine(parts, name).view(torch.uint8)).view(flat.dtype)
        flat.copy_(whole[: flat.numel()])

    def _broadcast(self, x: Tensor, root: int) -> None:
        flat = plain(x).view(-1)
        node = next(node for node, ranks in enumerate(self._nodes) if root in ranks)
        words = (agreed.BROADCAST, 0, NUMBERS.get(x.dtype, UNKNOWN), self._names[root], flat.numel())
        up: Step = _nothing
        if node == self._node:
            up = lambda: self._give([flat], self._nodes[node].index(root))  # noqa: E731

        def across(words: Words, trouble: LockstepError | None) -> None:
            self._greet(words, None, trouble)
            if self._wire is not None and flat.numel():
                self._wire.broadcast(words, flat.view(torch.uint8), node)

        self._call(words, up, across, _nothing if node == self._node else lambda: self._give([flat]))
        if x.data_ptr() != flat.data_ptr():
            x.copy_(flat.view(x.shape))

    def _gather_all(self, x: Tensor, outs: Sequence[Tensor]) -> None:
        flat = plain(x).view(-1)
        most, here = max(map(len, self._nodes)), len(self._nodes[self._node])
        own = torch.empty(most, flat.numel(), dtype=x.dtype)
        whole = torch.empty(len(self._nodes), most, flat.numel(), dtype=x.dtype)
        words = (agreed.ALL_GATHER, 0, NUMBERS.get(x.dtype, UNKNOWN), 0, x.numel())
        opts = c10d.AllgatherOptions()
        opts.asyncOp = False

        def up() -> None:
            self._below.allgather([list(own[:here])], [flat], opts)

        def across(words: Words, trouble: LockstepError | None) -> None:
            self._greet(words, None, trouble)
            if self._wire is None:
                whole[0].copy_(own)
            elif flat.numel():
                whole.view(-1).copy_(self._wire.collect(words, own.view(-1).view(torch.uint8)).view(x.dtype))

        self._call(words, up, across, lambda: self._give([whole]))
        for node, ranks in enumerate(self._nodes):
            for place, rank in enumerate(ranks):
                outs[rank].copy_(whole[node, place].view(outs[rank].shape))

    def _reduce_parts(self, out: Tensor, parts: Sequence[Tensor], op: Any) -> None:
        name = str(op.op.name)
        each = out.numel()
        flat = _work_copy(torch.cat([plain(parts[rank]).view(-1) for rank in self._order]), name)
        words = (agreed.REDUCE_SCATTER, *self._numbers(flat, name), 0, each)
        mine = [flat[number * each : (number + 1) * each] for number, rank in enumerate(self._order)]
        first = self._order.index(self._nodes[self._node][0])
        mine = mine[first : first + len(self._nodes[self._node])]
        result = torch.empty(each, dtype=flat.dtype)

        def across(words: Words, trouble: LockstepError | None) -> None:
            self._greet(words, None, trouble)
            if self._wire is not None and each:
                width = each * flat.element_size()
                give = [len(ranks) * width for ranks in self._nodes]
                take = [len(mine) * width] * len(self._nodes)
                rows = self._wire.exchange(words, flat.view(torch.uint8), give, take).view(flat.dtype)
                total = combine(rows.chunk(len(self._nodes)), _sum(name))
                for part, row in zip(mine, total.chunk(len(mine)), strict=True):
                    part.copy_(row)

        opts = c10d.ScatterOptions()
        opts.rootRank, opts.asyncOp = 0, False
        self._call(
            words,
            lambda: self._bring(flat, op, name),
            across,
            lambda: self._below.scatter([result], [mine] if self._local == 0 else [], opts),
        )
        _put_back(result, out, name, len(self._names))

    def _numbers(self, x: Tensor, name: str) -> tuple[int, int]:
        """An operation and a dtype, as numbers."""
        found = agreed.reduction(x.dtype, name) if name != "AVG" else agreed.reduction(x.dtype, "SUM")
        return (agreed.OPS.index("avg") if name == "AVG" else found[0] if found else 0), NUMBERS.get(x.dtype, UNKNOWN)

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
        across: Callable[[Words, LockstepError | None], object],
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
        across: Callable[[Words, LockstepError | None], object],
        down: Callable[[], object],
    ) -> None:
        self._member.timeout = self._seconds
        trouble: LockstepError | None = None
        try:
            self._same_call(words)
            up()
        except LockstepError as error:
            if self._local:
                raise
            trouble = error
        # A leader may wait for others for some time, and says so in the end.
        self._member.timeout = 3 * (self._seconds + grace(self._seconds)) + 5
        if self._local == 0:
            self._lead(words, across, trouble)
        else:
            self._hear()
        down()

    def _lead(
        self,
        words: Words,
        across: Callable[[Words, LockstepError | None], object],
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
        self._below.allgather([list(rows)], [torch.tensor(words)], opts)
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


def _nothing() -> None:
    pass


def _sum(name: str) -> str:
    return "SUM" if name == "AVG" else name


def _work_copy(flat: Tensor, name: str) -> Tensor:
    """A mean of half-precision numbers is summed in float32, where the sum fits."""
    return flat.float() if name == "AVG" and flat.dtype in _HALVES else flat


def _put_back(flat: Tensor, x: Tensor, name: str, size: int) -> None:
    if name == "AVG":
        flat = flat / size
    if flat.data_ptr() != x.data_ptr():
        x.copy_(flat.view(x.shape))


def _pad(flat: Tensor, count: int) -> Tensor:
    padded = flat.new_zeros(count)
    padded[: flat.numel()] = flat
    return padded
