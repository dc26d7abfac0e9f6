"""A loss that is a mean already: how many samples it stands for, or a warning that it matters."""

import warnings

import pytest
import torch
from ranks import run_ranks
from torch.nn.functional import cross_entropy

import lockstep


def train_on_means(rank, samples, batch_size, counted):
    """The usual criterion, over an epoch whose last batch may leave ranks without a sample."""
    lockstep.init(seed=0)
    torch.manual_seed(0)
    data = torch.utils.data.TensorDataset(torch.randn(samples, 4).double(), torch.arange(samples) % 3)
    model = lockstep.replicate(torch.nn.Linear(4, 3).double())
    update = lockstep.Update(model, torch.optim.SGD(model.parameters(), lr=0.5))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for x, y in lockstep.DataLoader(data, batch_size=batch_size, shuffle=True):
            with update:
                update.backward(cross_entropy(model(x), y), count=len(x) if counted else None)
    return update.loss, model.weight.detach(), [str(warning.message) for warning in caught]


def test_counted_means_are_exact_where_a_rank_has_no_sample():
    ((loss, weight, _),) = run_ranks(train_on_means, 1, 13, 6, True, backend=None)
    for found, theirs, caught in run_ranks(train_on_means, 3, 13, 6, True):
        assert found == pytest.approx(loss, abs=1e-12)
        torch.testing.assert_close(theirs, weight, rtol=0, atol=1e-12)
        assert caught == []


@pytest.mark.parametrize(("samples", "batch_size", "uneven"), [(12, 6, False), (14, 7, True), (15, 6, True)])
def test_rank_0_warns_once_of_means_that_differ_in_size(samples, batch_size, uneven):
    first, second = (caught for _, _, caught in run_ranks(train_on_means, 2, samples, batch_size, False))
    assert [("count=len(batch)" in text) for text in first] == [True] * uneven
    assert second == []
