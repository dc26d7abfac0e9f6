"""Sums of sparse tensors: every rank shows which entries it has, and adds up everyone's.

It costs as much as all ranks' entries together, which is why torch's DDP takes this way for embeddings only.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.errors import MismatchError, UsageError
from lockstep.shm.agreement import HALVES
from lockstep.shm.tensors import Tensors, put
from lockstep.shm.work import Job


def sparse_sum(how: Tensors, tensors: list[Tensor], op: object) -> Job:
    """What overwrites each tensor with the sum of all ranks', added in the order of ranks; the results are coalesced.

    Args:
        how: How ranks see each other's tensors.
        tensors: Sparse COO, of the same shape on every rank; the number of entries may differ.
        op: What is to be done with them.

    Raises:
        UsageError: A tensor has another layout than COO, or is not to be summed.
        MismatchError: From the job, on every rank: they brought different shapes.
    """
    for x in tensors:
        if x.layout is not torch.sparse_coo or op != dist.ReduceOp.SUM:
            raise UsageError(
                f"{how.member.who}: shm can only all_reduce the SUM of sparse tensors in COO layout, not {op} of "
                f"layout {x.layout}. Pass x.to_dense(), or use gloo."
            )

    def job(pace: int) -> None:
        for x in tensors:
            _sum(how, pace, x)

    return job


def _sum(how: Tensors, pace: int, x: Tensor) -> None:
    mine = x.coalesce()
    rows = [row.tolist() for row in how.line_up(pace, torch.tensor([mine._nnz(), x.sparse_dim(), *x.shape]))]
    for rank, row in enumerate(rows):
        if row[1:] != rows[0][1:]:
            raise MismatchError(
                f"{how.member.who}: all_reduce of a sparse tensor: rank 0 of the group brought shape "
                f"{tuple(rows[0][2:])} with {rows[0][1]} sparse dimensions, rank {rank} {tuple(row[2:])} with "
                f"{row[1]}. Give the same shape, with the same sparse dimensions, on every rank."
            )
    entries = [row[0] for row in rows]
    most = max(entries)
    if not most:
        return
    indices = how.line_up(pace, _padded(mine.indices().t(), most))
    values = how.line_up(pace, _padded(mine.values(), most))
    wide = torch.float32 if x.dtype in HALVES else x.dtype
    parts = [
        torch.sparse_coo_tensor(index[:n].t(), value[:n].to(wide), x.shape, is_coalesced=True, check_invariants=False)
        for index, value, n in zip(indices, values, entries, strict=True)
    ]
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    put(x, total.coalesce().to(x.dtype))


def _padded(rows: Tensor, count: int) -> Tensor:
    """The rows, and zeros up to ``count`` of them."""
    out = rows.new_zeros((count, *rows.shape[1:]))
    out[: len(rows)] = rows
    return out
