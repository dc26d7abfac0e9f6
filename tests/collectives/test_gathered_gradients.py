"""A loss over the gathered batch teaches every rank what it teaches one process."""

import pytest
import torch
from ranks import run_ranks
from torch.nn.functional import cross_entropy, normalize

import lockstep


def train_contrastive(rank, per_rank):
    """Pairs against all others of the global batch; each rank takes the losses of its own rows, or everybody of all."""
    world = lockstep.init(seed=0)
    gather = lockstep.gather if world.size > 1 else lambda rows: rows
    torch.manual_seed(0)
    pairs = torch.utils.data.TensorDataset(torch.randn(22, 5).double(), torch.randn(22, 5).double())
    model = lockstep.replicate(
        torch.nn.Sequential(torch.nn.Linear(5, 8), torch.nn.Tanh(), torch.nn.Linear(8, 4)).double()
    )
    update = lockstep.Update(model, torch.optim.SGD(model.parameters(), lr=0.5))
    losses = []
    for left, right in lockstep.DataLoader(pairs, batch_size=10, shuffle=True):  # the last one has 2
        with update:
            mine, others = normalize(model(left), dim=1), gather(normalize(model(right), dim=1))
            rows = mine if per_rank else gather(mine)
            number = torch.arange(len(others))
            labels = gather(torch.full((len(left),), rank)) == rank if per_rank else slice(None)
            update.backward(cross_entropy(rows @ others.T / 0.1, number[labels], reduction="none"))
        losses.append(update.loss)
    return losses, [p.detach() for p in model.parameters()]


@pytest.mark.parametrize("per_rank", [True, False])
def test_a_loss_over_the_whole_batch_is_that_of_one_process(per_rank):
    ((losses, parameters),) = run_ranks(train_contrastive, 1, True, backend=None)
    for found, there in run_ranks(train_contrastive, 3, per_rank):
        assert found == pytest.approx(losses, abs=1e-12)
        for mine, theirs in zip(there, parameters, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-12)


def gradients_of_some(rank):
    """Rank 0 has nothing, of another dtype even; rank 1 only shows its rows; rank 2 learns, in half precision."""
    if rank == 0:
        rows = torch.empty(0, dtype=torch.int64)
    else:
        rows = torch.full((2,), float(rank), dtype=torch.bfloat16, requires_grad=rank == 2)
    whole = lockstep.gather({"x": rows})["x"]
    (whole * torch.arange(4)).sum().backward()
    return whole.tolist(), None if rows.grad is None else rows.grad.tolist()


def test_gradients_reach_the_rank_that_wants_them():
    assert run_ranks(gradients_of_some, 3) == [
        ([1.0, 1.0, 2.0, 2.0], None),
        ([1.0, 1.0, 2.0, 2.0], None),
        ([1.0, 1.0, 2.0, 2.0], [6.0, 9.0]),
    ]


def test_without_gradients_nothing_is_recorded():
    x = torch.ones(2, requires_grad=True)
    with torch.no_grad():
        assert not lockstep.gather(x).requires_grad
    loader = lockstep.DataLoader(torch.arange(2), batch_size=2, shuffle=True)
    list(loader)
    lockstep.gather(x, loader)[1].backward()
    assert sorted(x.grad.tolist()) == [0.0, 1.0]
