"""CPU ranks on several nodes: shared memory within a node, gloo between one rank of each, its leader.

What the ranks of a node have to say crosses the network once, not once for each rank. all_reduce, broadcast,
all_gather, reduce_scatter and barrier go this way; messages and the other collectives take plain gloo between all.
"""

import json
import os
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch._C import _distributed_c10d as c10d

from lockstep.errors import UsageError
from lockstep.shm.backend import SharedMemoryGroup
from lockstep.shm.member import Member
from lockstep.shm.nodewise import Nodewise
from lockstep.shm.segment import create
from lockstep.shm.tensors import plain, put
from lockstep.world.place import find_place


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
        where = f"(node {mine} of {len(nodes)})"
        member = Member(meeting, local, [names[one] for one in nodes[mine]], timeout, where)
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
        self._nodewise = Nodewise(store, member, rank, names, nodes, timeout.total_seconds())
        self._plain: Any = c10d.ProcessGroupGloo(c10d.PrefixStore("plain", store), rank, len(names), timeout)

    # What goes by nodes

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> Any:  # type: ignore[override]
        """Reduce in place, on every rank, in the order of the ranks and then of the nodes."""
        opts = c10d.AllreduceOptions() if opts is None else opts
        if not tensors[0].is_cpu or any(x.layout is not torch.strided for x in tensors):
            return self._gloo(tensors[0], "allreduce", tensors, opts)
        for x in tensors:
            self._nodewise.below._tensors.operation(x, opts.reduceOp)  # raises where there is none

        def job(_: object) -> None:
            for x in tensors:
                self._nodewise.reduce_all(x, opts.reduceOp)

        return self._do(job, opts, tensors)

    allreduce_coalesced = allreduce

    def broadcast(self, tensors: list[Tensor], opts: Any) -> Any:  # type: ignore[override]
        """Give every rank what the root has."""
        if not tensors[0].is_cpu:
            return self._gloo(tensors[0], "broadcast", tensors, opts)

        root = self._tensors.root(opts.rootRank, "broadcast")

        def job(_: object) -> None:
            for x in tensors:
                self._nodewise.broadcast(x, root)

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
                self._nodewise.gather_all(x, out)

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
                self._nodewise.gather_all(x, self._tensors.equal_parts(whole))
                if whole is not out:
                    put(out, whole)

        return self._do(job, opts, outputs)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def reduce_scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None) -> Any:  # type: ignore[override]
        """Reduce every rank's list, and give each rank the entry of its number."""
        opts = c10d.ReduceScatterOptions() if opts is None else opts
        if not outputs[0].is_cpu:
            return self._gloo(outputs[0], "reduce_scatter", outputs, inputs, opts)
        self._nodewise.below._tensors.operation(outputs[0], opts.reduceOp)
        if self._tensors.uneven(outputs[0], inputs[0], "reduce_scatter"):
            return self._gloo(outputs[0], "reduce_scatter", outputs, inputs, opts)
        return self._do(lambda _: self._nodewise.reduce_parts(outputs[0], inputs[0], opts.reduceOp), opts, outputs)

    def reduce_scatter_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Any:
        """Reduce, and give each rank its part along the first dimension."""
        opts = c10d.ReduceScatterOptions() if opts is None else opts
        if not outputs[0].is_cpu:
            return self._gloo(outputs[0], "reduce_scatter_tensor_coalesced", outputs, inputs, opts)
        for out, x in zip(outputs, inputs, strict=True):
            self._tensors.whole_multiple(out, x, "reduce_scatter")
            self._nodewise.below._tensors.operation(out, opts.reduceOp)

        def job(_: object) -> None:
            for out, x in zip(outputs, inputs, strict=True):
                self._nodewise.reduce_parts(out, self._tensors.equal_parts(plain(x)), opts.reduceOp)

        return self._do(job, opts, outputs)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def barrier(self, opts: Any = None) -> Any:
        """Wait until every rank is here."""
        opts = c10d.BarrierOptions() if opts is None else opts

        return self._do(lambda _: self._nodewise.wait_for_all(), opts, [])

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
        return c10d.Backend.Options("hierarchy", timeout=timedelta(seconds=self._nodewise.seconds))

    def set_timeout(self, timeout: timedelta) -> None:
        """Wait so long from now on, within a node; between nodes it stays as it was."""
        self._nodewise.seconds = timeout.total_seconds()

    def shutdown(self) -> None:
        """Leave."""
        super().shutdown()
        self._nodewise.close()
        self._plain = None

    abort = shutdown

    # How it is done

    def _gloo(self, x: Tensor, method: str, *args: Any) -> Any:
        if not x.is_cpu:
            return self._elsewhere(x, method, *args)
        self._member.refuse_if_over()
        return self._collect(getattr(self._plain, method)(*args))
