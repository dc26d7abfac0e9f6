"""From a module's parameters to those of its replicas, and gradients back: one node of autograd."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import Function

from lockstep.parallel.one_process.shipping import ship


def spread(masters: Sequence[Tensor], rows: Sequence[Sequence[Tensor]]) -> list[list[Tensor]]:
    """Give what the replicas compute with, so that gradients come back to ``masters``.

    Args:
        masters: Tensors of the module, all on one device.
        rows: Their copies on each further device, in the same order.

    Returns:
        One row for each replica, aliases of ``masters`` first. Aliases and originals share memory and version counter:
        what a replica writes is seen, and autograd notices what was written too early.
    """
    whole = (masters, *rows)
    tracked = [i for i, tensor in enumerate(masters) if torch.is_grad_enabled() and tensor.requires_grad]
    given = [[tensor.detach() for tensor in row] for row in whole]
    if tracked:
        some = [masters[i] for i in tracked]
        outputs = _Spread.apply([[row[i] for i in tracked] for row in rows], *some)  # type: ignore[no-untyped-call]
        for place, row in enumerate(given):
            for i, output in zip(tracked, outputs[place * len(tracked) :][: len(tracked)], strict=True):
                row[i] = output
    return given


class _Spread(Function):
    @staticmethod
    def forward(ctx: Any, rows: list[list[Tensor]], *masters: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)  # None says that a replica had no use for a parameter
        ctx.home, ctx.count = masters[0].device, len(masters)
        return tuple(tensor.detach() for row in (masters, *rows) for tensor in row)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        rows = [list(gradients[place:][: ctx.count]) for place in range(0, len(gradients), ctx.count)]
        # A graph of the gradients wants every step recorded; shipped in packs they would not be.
        home = [row if torch.is_grad_enabled() else _shipped(row, ctx.home) for row in rows]
        return None, *[_sum([row[i] for row in home], ctx.home) for i in range(ctx.count)]


def _shipped(row: list[Tensor | None], home: torch.device) -> list[Tensor | None]:
    away = [(i, gradient) for i, gradient in enumerate(row) if gradient is not None and gradient.device != home]
    for (i, _), gradient in zip(away, ship([gradient for _, gradient in away], home), strict=True):
        row[i] = gradient
    return row


def _sum(parts: list[Tensor | None], home: torch.device) -> Tensor | None:
    """The sum, always in the order of replicas: floats added in another order give other bits."""
    total = None
    for part in parts:
        if part is not None:
            total = part.to(home) if total is None else total + part.to(home)
    return total
