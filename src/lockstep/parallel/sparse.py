"""Averages of sparse gradients: rows travel with their numbers."""

from collections.abc import Sequence

import torch
from torch import Tensor

from lockstep.parallel.peers import Peers
from lockstep.parallel.slots import Slot

_NONE, _SPARSE, _DENSE = 0, 1, 2


def average_sparse(slots: Sequence[Slot], peers: Peers, *, silent: bool) -> None:
    """Average the gradients of ``slots`` in place.

    A rank without one counts as zero; None stays None where no rank has one. All ranks first tell each other the kind
    and the number of rows of each gradient, then each gradient is gathered, filled up with empty rows to the largest
    number. A gradient that is dense on some rank (tied weights) becomes dense on all. A silent rank gives nothing, and
    keeps what it has.
    """
    if not slots:
        return
    grads = [None if silent else slot.param.grad for slot in slots]
    grads = [grad.coalesce() if grad is not None and grad.is_sparse else grad for grad in grads]
    mine = [_describe(grad) for grad in grads]
    device = slots[0].param.device
    everyone = peers.line_up(torch.tensor(mine, device=device)).tolist()
    for number, (slot, grad) in enumerate(zip(slots, grads, strict=True)):
        kinds = [row[number][0] for row in everyone]
        if _DENSE in kinds:
            average = _average_dense(grad, slot.param, peers)
        elif _SPARSE in kinds:
            counts = [row[number][1] for row in everyone]
            average = _average_rows(grad, slot.param, counts, peers)
        else:
            continue
        if not silent:
            slot.param.grad = average


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
    summed = torch.sparse_coo_tensor(
        torch.cat(all_numbers)[None], torch.cat(all_rows) / peers.size, param.shape, check_invariants=False
    )
    return summed.coalesce()
