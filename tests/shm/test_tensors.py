"""What gloo takes, shm takes: parameters, tensors of inference mode, uneven parts, parts in each other's way."""

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from shm import calls
from shm.test_hierarchy import run_nodes
from torch import nn

LAYOUTS = {
    "contiguous": lambda x: x,
    "transposed": lambda x: x.transpose(0, 1),
    "channels_last": lambda x: x.to(memory_format=torch.channels_last),
}
SHAPE = (3, 2, 5, 4)


def to_parameters(rank):
    """What a rank has after a sum and a broadcast of parameters as they are."""
    found = []
    for make in LAYOUTS.values():
        summed, given = (nn.Parameter(make(torch.full(SHAPE, 1.0 + rank))) for _ in range(2))
        dist.all_reduce(summed)
        dist.broadcast(given, 1)
        found += [x.unique().tolist() for x in (summed, given)]
        assert summed.grad_fn is None
        assert summed.requires_grad
    return found


def test_parameters_are_filled_whatever_their_strides():
    assert run_ranks(to_parameters, 2, backend="shm") == [[[3.0], [2.0]] * 3] * 2


def test_parameters_are_filled_over_nodes(tmp_path):
    assert run_nodes(tmp_path, (2, 1), to_parameters) == [[[6.0], [2.0]] * 3] * 3


def in_inference_mode(rank):
    with torch.inference_mode():
        x = torch.full((600, 400), 1.0 + rank).t()
        dist.all_reduce(x, async_op=True).wait()  # in the group's thread, which is in no such mode
        outs = [torch.empty(600, 400).t() for _ in range(2)]
        dist.all_gather(outs, x, async_op=True).wait()
        late, early = torch.zeros(2), torch.zeros(2)
        if rank == 0:
            dist.send(torch.ones(2), 1, tag=1)
            dist.send(torch.ones(2), 1, tag=2)
        else:
            dist.recv(late, 0, tag=2)  # the other one is put aside
            dist.recv(early, 0, tag=1)
    return x.unique().tolist(), [out.unique().tolist() for out in outs], early.tolist()


def test_tensors_of_inference_mode_are_filled():
    for rank, found in enumerate(run_ranks(in_inference_mode, 2, backend="shm")):
        assert found == ([3.0], [[3.0], [3.0]], [float(rank)] * 2)


def reduce_scatter_of(rank, sizes, dtype, op):
    size, group = dist.get_world_size(), dist.group.WORLD
    everyone = [
        [part[:n] for part, n in zip(calls.parts_of(r, size, (70_000,), dtype, 5), sizes, strict=True)]
        for r in range(size)
    ]
    out = torch.empty(sizes[rank], dtype=dtype)
    dist.reduce_scatter(out, everyone[rank], op=getattr(dist.ReduceOp, op), group=group)
    expected = everyone[0][rank].clone()
    for parts in everyone[1:]:
        expected = expected + parts[rank] if op == "SUM" else torch.maximum(expected, parts[rank])
    return torch.equal(out, expected)


@pytest.mark.parametrize("sizes", [(3, 70_000, 0), (1, 2, 1), (70_000, 1, 5)], ids=str)
@pytest.mark.parametrize(("dtype", "op"), [(torch.float32, "SUM"), (torch.int16, "MAX")], ids=str)
def test_reduce_scatter_takes_parts_that_differ_in_size(sizes, dtype, op):
    assert run_ranks(reduce_scatter_of, 3, sizes, dtype, op, backend="shm") == [True] * 3


def test_reduce_scatter_takes_them_over_nodes(tmp_path):
    assert run_nodes(tmp_path, (2, 1), reduce_scatter_of, (3, 5, 0), torch.int32, "SUM") == [True] * 3


def from_anothers_place(rank):
    """What each gives lies where another rank's will be."""
    size, each = dist.get_world_size(), 200_000
    whole = torch.arange(float(size * each)) + 7 * rank
    place = (rank + 1) % size
    mine = whole[place * each : (place + 1) * each]
    expected = [torch.arange(float(each)) + (r + 1) % size * each + 7 * r for r in range(size)]
    dist.all_gather_into_tensor(whole, mine)
    return torch.equal(whole, torch.cat(expected))


@pytest.mark.parametrize("size", [2, 3])
def test_all_gather_takes_what_lies_in_its_own_output(size):
    assert run_ranks(from_anothers_place, size, backend="shm") == [True] * size
