"""Collectives over tensors of several nodes: what goes up, across and down for each."""

from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d as c10d

from lockstep.shm import agreement as agreed
from lockstep.shm.agreement import HALVES, NUMBERS, UNKNOWN
from lockstep.shm.combine import combine
from lockstep.shm.crossing import Call, Crossing
from lockstep.shm.frames import SMALL, Words
from lockstep.shm.tensors import plain, put
from lockstep.shm.wire import Wire

BLOCK = 1 << 20
"""Bytes of a large tensor that are on their way together: long for the network, and short for the first to wait."""


class Nodewise(Crossing):
    """Runs them, at once and in the caller's thread."""

    def reduce_all(self, x: Tensor, op: Any) -> None:
        """Reduce in place, on every rank."""
        name = str(op.op.name)
        flat = _work_copy(plain(x).view(-1), name)
        call = (agreed.ALL_REDUCE, *self._numbers(flat, name), 0, flat.numel())
        if flat.nbytes <= SMALL:
            _, factor = self.below._tensors.operation(flat, op)

            def fold(parts: Sequence[Tensor]) -> Tensor:
                return combine(parts, _sum(name))

            flat = self._small(call, flat if factor is None else flat * factor, fold, fold, flat.numel())
        else:
            self._large(
                call,
                _blocks(flat),
                lambda block: self._bring(block, op, name),
                lambda wire, words, block: _sum_between(wire, words, block, _sum(name)),
                self._give,
            )
        _put_back(flat, x, name, len(self._names))

    def _bring(self, flat: Tensor, op: Any, name: str) -> None:
        """Reduce this node's tensors at its leader."""
        opts = c10d.ReduceOptions()
        opts.reduceOp = cast("Any", dist.ReduceOp.SUM) if name == "AVG" else op
        opts.rootRank, opts.rootTensor, opts.asyncOp = 0, 0, False
        self.below.reduce([flat], opts)

    def broadcast(self, x: Tensor, root: int) -> None:
        """Give every rank what the root has."""
        flat = plain(x).view(-1)
        node = next(node for node, ranks in enumerate(self._nodes) if root in ranks)
        place, here = self._nodes[node].index(root), node == self._node
        call = (agreed.BROADCAST, 0, NUMBERS.get(x.dtype, UNKNOWN), self._names[root], flat.numel())
        if flat.nbytes <= SMALL:
            found = self._small(
                call, flat, lambda rows: rows[place if here else 0], lambda rows: rows[node], flat.numel()
            )
            put(x, found.view(x.shape))
            return

        self._large(
            call,
            _blocks(flat),
            (lambda block: self._give(block, place)) if here else _nothing,
            lambda wire, words, block: wire.broadcast(words, block.view(torch.uint8), node),
            _nothing if here else self._give,
        )
        if x.data_ptr() != flat.data_ptr():
            put(x, flat.view(x.shape))

    def gather_all(self, x: Tensor, outs: Sequence[Tensor]) -> None:
        """Give every rank what all have."""
        flat = plain(x).view(-1)
        most, here = max(map(len, self._nodes)), len(self._nodes[self._node])
        call = (agreed.ALL_GATHER, 0, NUMBERS.get(x.dtype, UNKNOWN), 0, x.numel())
        shape = (len(self._nodes), most, flat.numel())
        if len(self._nodes) * most * flat.nbytes <= SMALL:
            spare = [flat] * (most - here)
            count = len(self._nodes) * most * flat.numel()
            whole = self._small(call, flat, lambda rows: torch.cat([*rows, *spare]), _chain, count).view(shape)
        else:
            whole = self._gather_large(call, flat, torch.empty(shape, dtype=x.dtype))
        for node, ranks in enumerate(self._nodes):
            for place, rank in enumerate(ranks):
                put(outs[rank], whole[node, place].view(outs[rank].shape))

    def _gather_large(self, call: Call, flat: Tensor, whole: Tensor) -> Tensor:
        own = whole[self._node]
        opts = c10d.AllgatherOptions()
        opts.asyncOp = False

        def across(wire: Wire, words: Words, block: Tensor) -> None:
            put(block.view(-1), wire.collect(words, own.view(-1).view(torch.uint8)).view(block.dtype))

        self._large(
            call,
            [whole],
            lambda _: self.below.allgather([list(own[: len(self._nodes[self._node])])], [flat], opts),
            across,
            self._give,
        )
        return whole

    def reduce_parts(self, out: Tensor, parts: Sequence[Tensor], op: Any) -> None:
        """Reduce every rank's list, and give each rank the entry of its number."""
        name = str(op.op.name)
        each, order = out.numel(), [one for ranks in self._nodes for one in ranks]
        flat = _work_copy(torch.cat([plain(parts[rank]).view(-1) for rank in order]), name)
        call = (agreed.REDUCE_SCATTER, *self._numbers(flat, name), 0, each)
        here = len(self._nodes[self._node])
        first = order.index(self._nodes[self._node][0])
        mine = flat[first * each : (first + here) * each]
        result = torch.empty(each, dtype=flat.dtype)

        def across(wire: Wire, words: Words, block: Tensor) -> None:
            width = each * block.element_size()
            give, take = [len(ranks) * width for ranks in self._nodes], [here * width] * wire.nodes
            rows = wire.exchange(words, block.view(torch.uint8), give, take).view(block.dtype)
            put(mine, combine(rows.chunk(wire.nodes), _sum(name)))

        opts = c10d.ScatterOptions()
        opts.rootRank, opts.asyncOp = 0, False

        def down(_: Tensor) -> None:
            self.below.scatter([result], [list(mine.chunk(here))] if self._local == 0 else [], opts)

        if each:
            self._large(call, [flat], lambda block: self._bring(block, op, name), across, down)
        else:
            self._meet(call)
        _put_back(result, out, name, len(self._names))

    def _numbers(self, x: Tensor, name: str) -> tuple[int, int]:
        """An operation and a dtype, as numbers."""
        found = agreed.reduction(x.dtype, name) if name != "AVG" else agreed.reduction(x.dtype, "SUM")
        return (agreed.OPS.index("avg") if name == "AVG" else found[0] if found else 0), NUMBERS.get(x.dtype, UNKNOWN)

    def wait_for_all(self) -> None:
        """Wait until every rank is here."""
        self._meet((agreed.BARRIER, 0, 0, 0, 0))

    def _meet(self, call: Call) -> None:
        """A call in which nothing is moved."""
        self._small(call, torch.empty(0), lambda rows: rows[0], lambda rows: rows[0], 0)


def _nothing(_: Tensor) -> None:
    pass


def _chain(parts: Sequence[Tensor]) -> Tensor:
    return torch.cat(list(parts))


def _blocks(flat: Tensor) -> Sequence[Tensor]:
    return torch.split(flat, max(1, BLOCK // flat.element_size()))


def _sum_between(wire: Wire, words: Words, flat: Tensor, name: str) -> None:
    """Each leader combines one part of the tensor, then all get all parts: every byte crosses once each way."""
    if wire.sums(flat.dtype, name):
        wire.sum(words, flat)
        return
    each = -(-flat.numel() // wire.nodes)
    padded = flat if each * wire.nodes == flat.numel() else _pad(flat, each * wire.nodes)
    sizes = [each * flat.element_size()] * wire.nodes
    parts = wire.exchange(words, padded.view(torch.uint8), sizes, sizes).view(flat.dtype).chunk(wire.nodes)
    whole = wire.collect(words, combine(parts, name).view(torch.uint8)).view(flat.dtype)
    put(flat, whole[: flat.numel()])


def _sum(name: str) -> str:
    return "SUM" if name == "AVG" else name


def _work_copy(flat: Tensor, name: str) -> Tensor:
    """A mean of half-precision numbers is summed in float32, where the sum fits."""
    return flat.float() if name == "AVG" and flat.dtype in HALVES else flat


def _put_back(flat: Tensor, x: Tensor, name: str, size: int) -> None:
    if name == "AVG":
        flat = flat / size
    if flat.data_ptr() != x.data_ptr():
        put(x, flat.view(x.shape))


def _pad(flat: Tensor, count: int) -> Tensor:
    padded = flat.new_zeros(count)
    padded[: flat.numel()] = flat
    return padded
