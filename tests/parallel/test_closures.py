"""An optimizer that decides by its loss decides alike on all ranks."""

import pytest
import torch
from ranks import run_ranks
from torch.nn.functional import cross_entropy

import lockstep


def lbfgs(rank, world_size, named):
    torch.manual_seed(0)
    samples, labels = torch.randn(101, 5, dtype=torch.float64), torch.randint(3, (101,))
    net = torch.nn.Sequential(torch.nn.Linear(5, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3)).double()
    model = lockstep.replicate(net)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=10, line_search_fn="strong_wolfe")
    mine = slice(rank * 101 // world_size, (rank + 1) * 101 // world_size)

    def closure():
        optimizer.zero_grad()
        loss = cross_entropy(model(samples[mine]), labels[mine], reduction="sum") * world_size / 101
        loss.backward()
        return loss

    losses = [optimizer.step(closure=closure) if named else optimizer.step(closure) for _ in range(3)]
    return [loss.item() for loss in losses], [p.detach() for p in model.parameters()]


@pytest.mark.parametrize("named", [False, True])
def test_lbfgs_searches_along_the_mean_loss_of_all_ranks(named):
    losses, parameters = lbfgs(0, 1, named)
    for found, there in run_ranks(lbfgs, 3, 3, named):
        assert found == pytest.approx(losses, rel=1e-6)
        for mine, theirs in zip(there, parameters, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)
