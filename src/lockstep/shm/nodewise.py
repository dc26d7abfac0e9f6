"""Collectives over tensors of several nodes: what goes up, across and down for each."""

from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d as c10d

from lockstep.errors import LockstepError
from lockstep.shm import agreement as agreed
from lockstep.shm.agreement import NUMBERS, UNKNOWN
from lockstep.shm.combine import combine
from lockstep.shm.crossing import Crossing, Step
from lockstep.shm.tensors import plain
from lockstep.shm.wire import Words

_HALVES = (torch.float16, torch.bfloat16)


class Nodewise(Crossing):
    """Runs them, at once and in the caller's thread."""

    def reduce_all(self, x: Tensor, op: Any) -> None:
        """Reduce in place, on every rank."""
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
            self.below.reduce([flat], opts)

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

    def broadcast(self, x: Tensor, root: int) -> None:
        """Give every rank what the root has."""
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

    def gather_all(self, x: Tensor, outs: Sequence[Tensor]) -> None:
        """Give every rank what all have."""
        flat = plain(x).view(-1)
        most, here = max(map(len, self._nodes)), len(self._nodes[self._node])
        own = torch.empty(most, flat.numel(), dtype=x.dtype)
        whole = torch.empty(len(self._nodes), most, flat.numel(), dtype=x.dtype)
        words = (agreed.ALL_GATHER, 0, NUMBERS.get(x.dtype, UNKNOWN), 0, x.numel())
        opts = c10d.AllgatherOptions()
        opts.asyncOp = False

        def up() -> None:
            self.below.allgather([list(own[:here])], [flat], opts)

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

    def reduce_parts(self, out: Tensor, parts: Sequence[Tensor], op: Any) -> None:
        """Reduce every rank's list, and give each rank the entry of its number."""
        name = str(op.op.name)
        each, order = out.numel(), [one for ranks in self._nodes for one in ranks]
        flat = _work_copy(torch.cat([plain(parts[rank]).view(-1) for rank in order]), name)
        words = (agreed.REDUCE_SCATTER, *self._numbers(flat, name), 0, each)
        mine = [flat[number * each : (number + 1) * each] for number, rank in enumerate(order)]
        first = order.index(self._nodes[self._node][0])
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
            lambda: self.below.scatter([result], [mine] if self._local == 0 else [], opts),
        )
        _put_back(result, out, name, len(self._names))

    def _numbers(self, x: Tensor, name: str) -> tuple[int, int]:
        """An operation and a dtype, as numbers."""
        found = agreed.reduction(x.dtype, name) if name != "AVG" else agreed.reduction(x.dtype, "SUM")
        return (agreed.OPS.index("avg") if name == "AVG" else found[0] if found else 0), NUMBERS.get(x.dtype, UNKNOWN)

    def wait_for_all(self) -> None:
        """Wait until every rank is here."""
        self._call(
            (agreed.BARRIER, 0, 0, 0, 0), _nothing, lambda words, trouble: self._greet(words, None, trouble), _nothing
        )


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
