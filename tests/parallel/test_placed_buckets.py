"""Buckets in memory that all ranks see: the same numbers as in memory of their own, and one that is kept stays kept."""

import pytest
import torch
from ranks import run_ranks
from torch import nn

import lockstep
from lockstep.parallel.attach import reducer_of

WIDTH = 280  # 280 * 280 float32 are more than what is sent as a single message


class Wide(nn.Module):
    """Gradients come in another order than that of registration, so that buckets are divided anew after one step."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.last, self.first, self.middle = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x):
        return self.last(self.middle(self.first(x).relu()).relu())


def batch(rank, step):
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))


def trained(rank, keeps, wrapped):
    """Gradients of each step, which buckets are placed after it, and a gradient that rank 0 kept, before and after."""
    attach = lockstep.DistributedDataParallel if wrapped else lockstep.replicate
    model = attach(Wide(), **({"bucket_cap_mb": 0.3} if wrapped else {"first_bucket_mb": 0.3, "bucket_mb": 0.3}))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    steps, places, kept = [], [], []
    for step in range(5):
        optimizer.zero_grad()
        model(batch(rank, step)).square().mean().backward()
        steps.append([p.grad.clone() for p in model.parameters()])
        if step == 2 and rank == 0 and keeps:
            kept = [p.grad for p in model.parameters()][:1]
        places.append([bucket.placed is not None for bucket in reducer_of(model)._layout.buckets])
        optimizer.step()
    return steps, places, [torch.equal(kept[0], steps[2][0])] if kept else []


@pytest.mark.parametrize(("keeps", "wrapped"), [(False, False), (True, False), (False, True)])
def test_two_ranks_have_the_same_bits_as_over_gloo(keeps, wrapped):
    (ours, ours_placed, kept), (other, other_placed, _) = run_ranks(trained, 2, keeps, wrapped, backend="shm")
    (gloo, nowhere, _), _ = run_ranks(trained, 2, keeps, wrapped, backend="gloo")

    for mine, yours, theirs in zip(ours, other, gloo, strict=True):
        assert all(map(torch.equal, mine, yours))
        assert all(map(torch.equal, mine, theirs))
    assert not any(map(any, nowhere))
    assert all(map(all, other_placed))
    assert all(map(all, ours_placed[:3]))
    assert [all(row) for row in ours_placed[3:]] == [not keeps] * 2  # from there on in memory of rank 0 alone
    assert kept == [True] * keeps


def test_three_ranks_agree_to_the_bit_with_each_other_and_are_as_one():
    ranks = [steps for steps, *_ in run_ranks(trained, 3, True, False, backend="shm")]
    model = Wide()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    for step, rows in enumerate(zip(*ranks, strict=True)):
        optimizer.zero_grad()
        model(torch.cat([batch(rank, step) for rank in range(3)])).square().mean().backward()
        for *grads, parameter in zip(*rows, model.parameters(), strict=True):
            assert all(torch.equal(grad, grads[0]) for grad in grads)
            torch.testing.assert_close(grads[0], parameter.grad)
        optimizer.step()
