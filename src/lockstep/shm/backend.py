"""The process group: every collective of torch.distributed, checked and handed to the core.

torch (2.9 to 2.14 were read) lets Python subclass ProcessGroup but not Backend, so one object stands for the whole
group: it does CPU tensors itself and leaves others to the backend that "cpu:shm,cuda:nccl" names for them. torch calls
these methods by name, from Python and from C++ (DDP, functional collectives); the names before and after torch 2.12's
renaming are both there.
"""

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d as c10d

from lockstep.shm import agreement as agreed
from lockstep.shm import devices
from lockstep.shm.member import Member
from lockstep.shm.messages import Messages
from lockstep.shm.segment import create
from lockstep.shm.sparse import sparse_sum
from lockstep.shm.tensors import Tensors, plain, put, small
from lockstep.shm.work import Finished, Job, Lane, Pending

NOTHING = Finished([])
"""What a synchronous call returns: torch only asks whether it is over."""


def start_group(options: Any, _: object = None) -> "SharedMemoryGroup":
    """Make a group; torch calls this with what it knows about it (`Backend.register_backend`, extended interface)."""
    timeout = options.timeout.total_seconds()
    names = list(options.global_ranks_in_group) or list(range(options.group_size))
    meeting = create(options.store, options.group_rank, options.group_size, timeout)
    return SharedMemoryGroup(
        options.store, Member(meeting, options.group_rank, names, timeout), options.group_rank, len(names)
    )


class SharedMemoryGroup(dist.ProcessGroup):
    """A process group whose CPU tensors travel through shared memory; ``init_process_group("shm")`` makes one."""

    def __init__(self, store: c10d.Store, member: Member, rank: int, size: int) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]  # the stub leaves this one out
        self._store, self._member, self._rank, self._size = store, member, rank, size
        self._tensors = Tensors(member, rank, size)
        self._lane = Lane("shm collectives")
        self._messages = Messages(member, size)
        self._name, self._desc = "", ""
        self._coalescing: list[dist.Work] | None = None

    # Reductions

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> Any:  # type: ignore[override]
        """Reduce in place, on every rank."""
        opts = c10d.AllreduceOptions() if opts is None else opts
        if not tensors[0].is_cpu:
            return self._elsewhere(tensors[0], "allreduce", tensors, opts)
        if any(x.layout is not torch.strided for x in tensors):
            return self._do(sparse_sum(self._tensors, tensors, opts.reduceOp.op), opts, tensors)
        ops = [self._tensors.operation(x, opts.reduceOp) for x in tensors]

        def job(pace: int) -> None:
            for x, op in zip(tensors, ops, strict=True):
                self._tensors.reduce(pace, agreed.ALL_REDUCE, x, op, 0)

        return self._do(job, opts, tensors, small=small(tensors))

    allreduce_coalesced = allreduce

    def sum_again(self, x: Tensor, job: Job, opts: Any) -> Any:
        """Do what `Tensors.prepare_sum` has settled for a CPU tensor, `NOW` or `LATER`."""
        return self._do(job, opts, [x], small=small([x]))

    def reduce(self, tensors: list[Tensor], opts: Any) -> Any:  # type: ignore[override]
        """Reduce in place, on one rank; the others keep what they have."""
        if not tensors[0].is_cpu:
            return self._elsewhere(tensors[0], "reduce", tensors, opts)
        op, root = self._tensors.operation(tensors[0], opts.reduceOp), self._tensors.root(opts.rootRank, "reduce")

        def job(pace: int) -> None:
            self._tensors.reduce(pace, agreed.REDUCE, tensors[0], op, root)

        return self._do(job, opts, tensors, small=small(tensors))

    def reduce_scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None) -> Any:  # type: ignore[override]
        """Reduce every rank's list, and give each rank the entry of its number."""
        opts = c10d.ReduceScatterOptions() if opts is None else opts
        if not outputs[0].is_cpu:
            return self._elsewhere(outputs[0], "reduce_scatter", outputs, inputs, opts)
        op = self._tensors.operation(outputs[0], opts.reduceOp)
        uneven = self._tensors.uneven(outputs[0], inputs[0], "reduce_scatter")
        reduce = self._tensors.reduce_uneven if uneven else self._tensors.reduce_parts
        return self._do(lambda pace: reduce(pace, outputs[0], inputs[0], op), opts, outputs)

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Any:  # noqa: A002
        """Reduce, and give each rank its part along the first dimension."""
        return self.reduce_scatter_single_coalesced([output], [input], opts)

    _reduce_scatter_base = reduce_scatter_single  # type: ignore[assignment]

    def reduce_scatter_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Any:
        """The same for several tensors."""
        opts = c10d.ReduceScatterOptions() if opts is None else opts
        if not outputs[0].is_cpu:
            return self._elsewhere(outputs[0], "reduce_scatter_tensor_coalesced", outputs, inputs, opts)
        ops = [self._tensors.operation(out, opts.reduceOp) for out in outputs]
        for out, x in zip(outputs, inputs, strict=True):
            self._tensors.whole_multiple(out, x, "reduce_scatter")

        def job(pace: int) -> None:
            for out, x, op in zip(outputs, inputs, ops, strict=True):
                self._tensors.reduce_parts(pace, out, self._tensors.equal_parts(plain(x)), op)

        return self._do(job, opts, outputs)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced  # type: ignore[assignment]

    # Moves

    def broadcast(self, tensors: list[Tensor], opts: Any) -> Any:  # type: ignore[override]
        """Give every rank what the root has."""
        if not tensors[0].is_cpu:
            return self._elsewhere(tensors[0], "broadcast", tensors, opts)
        root = self._tensors.root(opts.rootRank, "broadcast")

        def job(pace: int) -> None:
            for x in tensors:
                mine = self._rank == root
                self._tensors.move(pace, agreed.BROADCAST, root, x, [x] if mine else None, None if mine else {root: x})

        return self._do(job, opts, tensors, small=small(tensors))

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> Any:  # type: ignore[override]
        """Give every rank a list of what all have."""
        return self.allgather_coalesced(outputs, inputs, opts)

    def allgather_coalesced(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> Any:
        """The same for several tensors."""
        opts = c10d.AllgatherOptions() if opts is None else opts
        if not inputs[0].is_cpu:
            return self._elsewhere(inputs[0], "allgather_coalesced", outputs, inputs, opts)
        for out, x in zip(outputs, inputs, strict=True):
            self._tensors.same_sizes(x, out, "all_gather")

        def job(pace: int) -> None:
            for out, x in zip(outputs, inputs, strict=True):
                self._tensors.move(pace, agreed.ALL_GATHER, 0, x, [x], dict(enumerate(out)))

        return self._do(job, opts, outputs[0], small=small(inputs))

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Any:  # noqa: A002
        """Give every rank one tensor of what all have."""
        return self.all_gather_single_coalesced([output], [input], opts)

    _allgather_base = all_gather_single

    def all_gather_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Any:
        """The same for several tensors."""
        opts = c10d.AllgatherOptions() if opts is None else opts
        if not inputs[0].is_cpu:
            return self._elsewhere(inputs[0], "allgather_into_tensor_coalesced", outputs, inputs, opts)
        for out, x in zip(outputs, inputs, strict=True):
            self._tensors.whole_multiple(x, out, "all_gather")

        def job(pace: int) -> None:
            for out, x in zip(outputs, inputs, strict=True):
                whole = plain(out)
                parts = dict(enumerate(self._tensors.equal_parts(whole)))
                self._tensors.move(pace, agreed.ALL_GATHER, 0, x, [x], parts)
                if whole is not out:
                    put(out, whole)

        return self._do(job, opts, outputs, small=small(inputs))

    allgather_into_tensor_coalesced = all_gather_single_coalesced  # type: ignore[assignment]

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any) -> Any:  # type: ignore[override]
        """Give the root a list of what all have."""
        if not inputs[0].is_cpu:
            return self._elsewhere(inputs[0], "gather", outputs, inputs, opts)
        root, x = self._tensors.root(opts.rootRank, "gather"), inputs[0]
        out = outputs[0] if self._rank == root else []
        if self._rank == root:
            self._tensors.same_sizes(x, out, "gather")
        return self._do(
            lambda pace: self._tensors.move(pace, agreed.GATHER, root, x, [x], dict(enumerate(out))),
            opts,
            out,
            small=small(inputs),
        )

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any) -> Any:  # type: ignore[override]
        """Give every rank the entry of its number in the root's list."""
        if not outputs[0].is_cpu:
            return self._elsewhere(outputs[0], "scatter", outputs, inputs, opts)
        root, out = self._tensors.root(opts.rootRank, "scatter"), outputs[0]
        parts = inputs[0] if self._rank == root else None
        if parts is not None:
            self._tensors.same_sizes(out, parts, "scatter")
        return self._do(
            lambda pace: self._tensors.move(pace, agreed.SCATTER, root, out, parts, {root: out}),
            opts,
            outputs,
        )

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Any:
        """Give every rank the entry of its number in everybody's list; sizes may differ."""
        opts = c10d.AllToAllOptions() if opts is None else opts
        if not outputs[0].is_cpu:
            return self._elsewhere(outputs[0], "alltoall", outputs, inputs, opts)
        self._tensors.one_for_each(outputs, "all_to_all")
        self._tensors.one_for_each(inputs, "all_to_all")
        self._tensors.same_dtypes([*outputs, *inputs], "all_to_all")
        return self._do(lambda pace: self._tensors.exchange(pace, outputs, inputs), opts, outputs)

    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,  # noqa: A002
        take: list[int],
        give: list[int],
        opts: Any = None,
    ) -> Any:
        """The same with one tensor, split along the first dimension."""
        opts = c10d.AllToAllOptions() if opts is None else opts
        if not output.is_cpu:
            return self._elsewhere(output, "alltoall_base", output, input, take, give, opts)
        self._tensors.same_dtypes([output, input], "all_to_all")
        self._tensors.splits(output, take)
        self._tensors.splits(input, give)

        def job(pace: int) -> None:
            whole = plain(output)
            self._tensors.exchange(pace, self._tensors.split(whole, take), self._tensors.split(plain(input), give))
            if whole is not output:
                put(output, whole)

        return self._do(job, opts, [output])

    alltoall_base = all_to_all_single  # type: ignore[assignment]

    def barrier(self, opts: Any = None) -> Any:
        """Wait until every rank is here."""
        opts = c10d.BarrierOptions() if opts is None else opts
        limit = opts.timeout.total_seconds()
        timeout = limit if limit > 0 else None

        def job(pace: int) -> None:
            self._member.call(pace, agreed.BARRIER, 0, 0, 0, 0, 1, 0, 0, timeout=timeout)

        return self._do(job, opts, [], small=True)

    # Messages

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> Any:
        """Send to one rank."""
        if not tensors[0].is_cpu:
            return self._elsewhere(tensors[0], "send", tensors, peer, tag)
        return self._collect(self._messages.send(tensors[0], peer, tag))

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> Any:
        """Receive from one rank."""
        if not tensors[0].is_cpu:
            return self._elsewhere(tensors[0], "recv", tensors, peer, tag)
        return self._collect(self._messages.receive(tensors[0], peer, tag))

    def recv_anysource(self, tensors: list[Tensor], tag: int) -> Any:
        """Receive from whoever sends first."""
        if not tensors[0].is_cpu:
            return self._elsewhere(tensors[0], "recv_anysource", tensors, tag)
        return self._collect(self._messages.receive_any(tensors[0], tag))

    # What torch asks of a group

    def getBackendName(self) -> str:  # noqa: N802
        """Give the name under which it is registered."""
        return "shm"

    def setGroupName(self, name: str) -> None:  # noqa: N802
        """Remember torch's name for the group."""
        self._name = name

    _set_group_name = setGroupName

    def getGroupName(self) -> str:  # noqa: N802
        """Give torch's name for the group."""
        return self._name

    @property
    def group_name(self) -> Any:
        """Torch's name for the group."""
        return self._name

    def setGroupDesc(self, desc: str) -> None:  # noqa: N802
        """Remember what the group is for."""
        self._desc = desc

    _set_group_desc = setGroupDesc

    def getGroupDesc(self) -> str:  # noqa: N802
        """Say what the group is for."""
        return self._desc

    @property
    def group_desc(self) -> str:
        """What the group is for."""
        return self._desc

    def rank(self) -> int:
        """This rank within the group."""
        return self._rank

    def size(self) -> int:
        """How many ranks the group has."""
        return self._size

    def get_group_store(self) -> c10d.Store:
        """Give the store in which the ranks met."""
        return self._store

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device(device) for device in devices.backends_of(self)]

    def _get_backend(self, device: torch.device) -> Any:
        if device.type == "cpu":
            return self
        self._prepare(device.type)
        return super()._get_backend(device)

    # Asked of whatever _get_backend gives.
    supports_splitting = supports_coalescing = supports_time_estimate = False

    def supports_tensor_alloc(self, device: torch.device) -> bool:  # noqa: ARG002
        """Whether it has memory of its own to give to tensors."""
        return False

    def name(self) -> str:
        """Give the backend's name."""
        return "shm"

    @property
    def options(self) -> Any:
        """What the group was started with, as other backends have it."""
        return c10d.Backend.Options("shm", timeout=timedelta(seconds=self._member.timeout))

    def set_timeout(self, timeout: timedelta) -> None:
        """Wait so long from now on."""
        self._member.timeout = timeout.total_seconds()

    def _start_coalescing(self, device: torch.device) -> None:  # noqa: ARG002
        self._coalescing = []

    def _end_coalescing(self, device: torch.device) -> Any:  # noqa: ARG002
        works, self._coalescing = self._coalescing or [], None
        return self._do(lambda _: [work.wait() for work in works], c10d.AllreduceOptions(), [])

    def shutdown(self) -> None:
        """Leave: what is still going on here ends, and who waits for this rank hears of it."""
        if not self._member.over:
            self._member.over = "this process group has been destroyed; make a new one."
            self._member.stop()
            self._lane.close(10.0)
            self._messages.close(10.0)
            self._member.close()

    abort = shutdown

    # How it is done

    def _do(self, job: Job, opts: Any, result: list[Tensor], *, small: bool = False) -> Any:
        """Do it now or later, as the caller wants it; a small one that is wanted later is begun at once."""
        if self._member.over:
            self._member.refuse_if_over()
        if self._coalescing is not None:
            return self._collect(self._lane.later(job, result))
        if opts.asyncOp:
            return self._lane.soon(job, result) if small else self._lane.later(job, result)
        self._lane.now(job)
        return NOTHING

    def _collect(self, work: Finished | Pending) -> Finished | Pending:
        if self._coalescing is not None:
            self._coalescing.append(work)
        return work

    # Other devices

    def _prepare(self, device: str) -> None:
        """Make the backend for another kind of device, when its first tensor comes."""
        kind = torch.device(device)
        if kind not in super()._device_types:
            type_, backend = devices.start_backend(self, device, self._store, self._member.timeout, self._member.who)
            super()._register_backend(kind, type_, backend)

    def _elsewhere(self, x: Tensor, method: str, *args: Any) -> Any:
        self._prepare(x.device.type)
        return getattr(super(), method)(*args)
