"""Averages of sparse gradients: rows travel with their numbers."""

from collections.abc import Sequence

import torch
from torch import Tensor

from lockstep.parallel.peers import Peers
from lockstep.parallel.slots import Slot

_NONE, _SPARSE, _DENSE = 0, 1, 2


def average_sparse(slots: Sequence[Slot], peers: Peers) -> None:
    """Average the gradients of ``slots`` in place.

    A rank without one counts as zero; None stays None where no rank has one. All ranks first tell each other the kind
    and the number of rows of each gradient, then each gradient is gathered, filled up with empty rows to the largest
    number. A gradient that is dense on some rank (tied weights) becomes dense on all.
    """
    if not slots:
        return
    for slot in slots:
        if slot.param.grad is not None and slot.param.grad.is_sparse:
            slot.param.grad = slot.param.grad.coalesce()
    mine = [_describe(slot.param.grad) for slot in slots]
    device = slots[0].param.device
    everyone = peers.line_up(torch.tensor(mine, device=device)).tolist()
    for number, slot in enumerate(slots):
        kinds = [row[number][0] for row in everyone]
        if _DENSE in kinds:
            slot.param.grad = _average_dense(slot.param.grad, slot.param, peers)
        elif _SPARSE in kinds:
            counts = [row[number][1] for row in everyone]
            slot.param.grad = _average_rows(slot.param.grad, slot.param, counts, peers)


def _describe(grad: Tensor | None) -> list[int]:
    if grad is None:
        return [_NONE, 0]
    return [_SPARSE, grad._nnz()] if grad.is_sparse else [_DENSE, 0]


def _average_dense(grad: Tensor | None, param: Tensor, peers: Peers) -> Tensor:
    whole = torch.zeros_like(param) if grad is None else grad.to_dense() if grad.is_sparse else grad.clone()
    whole.div_(peers.size)
    peers.wait(peers.sum_soon(whole))
    return whole


def _average_rows(grad: Tensor | None, param: Tensor, counts: list[int], peers: Peers) -> Tensor:
    """Gather ``counts[rank]`` rows from each rank and add up those with the same number."""
    most = max(counts)
    numbers = torch.zeros(most, dtype=torch.int64, device=param.device)
    rows = param.new_zeros((most, *param.shape[1:]))
    if grad is not None:
        numbers[: grad._nnz()], rows[: grad._nnz()] = grad.indices()[0], grad.values()
    all_numbers = [n[:count] for n, count in zip(peers.line_up(numbers), counts, strict=True)]
    all_rows = [r[:count] for r, count in zip(peers.line_up(rows), counts, strict=True)]
    summed = torch.sparse_coo_tensor(torch.cat(all_numbers)[None], torch.cat(all_rows) / peers.size, param.shape)
    return summed.coalesce()
