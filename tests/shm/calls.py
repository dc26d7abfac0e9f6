"""Every collective as a function of the same arguments, so that one test can try them all."""

import torch
import torch.distributed as dist

FLOATING = (torch.float32, torch.float64)
HALVES = (torch.float16, torch.bfloat16)
WHOLE = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
WIDE = (torch.uint16, torch.uint32, torch.uint64)  # gloo has none of them
OTHER = (torch.bool, torch.complex64, torch.complex128)

OPS = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")


def parts_of(rank, size, shape, dtype, seed, layout="contiguous"):
    """One tensor for every rank, as `rank` has them: the same whoever makes them."""
    numbers = torch.Generator().manual_seed(1000 * seed + rank)
    return [_tensor(shape, dtype, numbers, layout) for _ in range(size)]


def _tensor(shape, dtype, numbers, layout):
    wide = (*shape[:-1], 2 * shape[-1]) if layout == "strided" and shape else shape
    if dtype.is_floating_point or dtype.is_complex:
        x = torch.randn(wide, generator=numbers, dtype=torch.complex128 if dtype.is_complex else torch.float64).to(
            dtype
        )
    else:
        x = torch.randint(0, 2 if dtype == torch.bool else 100, wide, generator=numbers).to(dtype)
    if layout == "strided" and shape:
        x = x[..., ::2]
    return x.transpose(0, -1).contiguous().transpose(0, -1) if layout == "transposed" and len(shape) > 1 else x


def all_reduce(parts, root, group, **how):
    work = dist.all_reduce(parts[0], group=group, **how)
    return work, [parts[0]]


def reduce(parts, root, group, **how):
    work = dist.reduce(parts[0], group_dst=root, group=group, **how)
    return work, [parts[0]] if dist.get_rank(group) == root else []


def reduce_scatter(parts, root, group, **how):
    out = torch.empty_like(parts[0])
    return dist.reduce_scatter(out, parts, group=group, **how), [out]


def reduce_scatter_tensor(parts, root, group, **how):
    out = torch.empty(parts[0].shape, dtype=parts[0].dtype)
    single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor  # its name before torch 2.12
    return single(out.view(-1), torch.cat([part.reshape(-1) for part in parts]), group=group, **how), [out]


def all_gather(parts, root, group, **how):
    outs = [torch.empty_like(part) for part in parts]
    return dist.all_gather(outs, parts[0], group=group, **how), outs


def all_gather_into_tensor(parts, root, group, **how):
    out = torch.empty((len(parts), *parts[0].shape), dtype=parts[0].dtype)
    single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return single(out, parts[0], group=group, **how), [out]


def broadcast(parts, root, group, **how):
    return dist.broadcast(parts[0], group_src=root, group=group, **how), [parts[0]]


def gather(parts, root, group, **how):
    outs = [torch.empty_like(part) for part in parts] if dist.get_rank(group) == root else None
    return dist.gather(parts[0], outs, group_dst=root, group=group, **how), outs or []


def scatter(parts, root, group, **how):
    out = torch.empty_like(parts[0])
    return dist.scatter(out, parts if dist.get_rank(group) == root else None, group_src=root, group=group, **how), [out]


def all_to_all(parts, root, group, **how):
    outs = [torch.empty_like(part) for part in parts]
    return dist.all_to_all(outs, parts, group=group, **how), outs


def all_to_all_single(parts, root, group, **how):
    """Rank i gives i + j rows to rank j."""
    me, rows = dist.get_rank(group), parts[0].flatten()[:1]
    give = [me + j for j in range(len(parts))]
    out = torch.empty(sum(give), len(rows), dtype=rows.dtype)
    x = rows[None].repeat(sum(give), 1)
    return dist.all_to_all_single(out, x, give, give, group=group, **how), [out]


REDUCE = {call.__name__: call for call in (all_reduce, reduce, reduce_scatter, reduce_scatter_tensor)}
MOVE = {
    call.__name__: call
    for call in (all_gather, all_gather_into_tensor, broadcast, gather, scatter, all_to_all, all_to_all_single)
}


def moved(name, rank, size, root, everyone):
    """What `rank` has after a move: `everyone[r]` are the parts of rank r."""
    if name == "all_to_all_single":
        rows = [everyone[j][0].flatten()[:1][None].repeat(rank + j, 1) for j in range(size)]
        return [torch.cat(rows)]
    firsts = [parts[0] for parts in everyone]
    return {
        "all_gather": firsts,
        "all_gather_into_tensor": [torch.stack(firsts)],
        "broadcast": [firsts[root]],
        "gather": firsts if rank == root else [],
        "scatter": [everyone[root][rank]],
        "all_to_all": [parts[rank] for parts in everyone],
    }[name]
