"""What one update tells of its step does not change by another one's."""

import pytest
import torch
from ranks import run_ranks

import lockstep


def norm_before_and_after_the_other(rank, size):
    torch.manual_seed(0)
    maker, judge = (lockstep.replicate(torch.nn.Linear(3, 3).double()) for _ in range(2))
    make, decide = (lockstep.Update(model, torch.optim.SGD(model.parameters(), lr=0.1)) for model in (maker, judge))
    x = torch.randn(6, 3).double()[rank * 6 // size : (rank + 1) * 6 // size]
    with decide:
        decide.backward(judge(x).square())
    before = torch.stack([p.grad.norm() for p in judge.parameters()]).norm().item()
    with make:
        make.backward(judge(maker(x)).square())
    return before, decide.grad_norm


@pytest.mark.parametrize("size", [1, 2])
def test_the_norm_of_a_gan_s_judge_is_that_of_its_own_step(size):
    for before, told in run_ranks(norm_before_and_after_the_other, size, size):
        assert told == pytest.approx(before, rel=1e-12)
