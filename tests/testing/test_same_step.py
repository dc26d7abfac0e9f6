import pytest
import torch
from ranks import run_ranks
from torch import nn

from lockstep.errors import UsageError
from lockstep.testing import assert_same_step
from lockstep.testing.causes import Trace, first_difference, likely_cause
from lockstep.testing.same_step import run_steps

BATCH = torch.randn(13, 6, generator=torch.Generator().manual_seed(0)), torch.arange(13) % 3


def cross_entropy(model, batch):
    x, y = batch
    return nn.functional.cross_entropy(model(x), y, reduction="none")


def masked(model, batch):
    return cross_entropy(model, batch), torch.arange(len(batch[0])) % 4 > 0


def averaged(model, batch):
    return cross_entropy(model, batch).mean()


def linear():
    return nn.Linear(6, 3)


def network():
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


def dropout():
    return nn.Sequential(nn.Dropout(0.5), nn.Linear(6, 3))


class Fickle(nn.Module):
    def __init__(self):
        super().__init__()
        self.always, self.sometimes = nn.Linear(6, 3), nn.Linear(6, 3)

    def forward(self, x):
        return self.always(x) + (self.sometimes(x) if len(x) % 2 else 0.0)


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def on_a_rank(rank, make_model, make_loss, sync_batchnorm):
    return run_steps(make_model, make_loss, BATCH, sgd, 2, sync_batchnorm, 0)


def traces(size, make_model, make_loss, sync_batchnorm=True):
    backend = "gloo" if size > 1 else None
    return run_ranks(on_a_rank, size, make_model, make_loss, sync_batchnorm, backend=backend)


@pytest.mark.timeout(300)  # nine processes, each imports torch
def test_the_whole_of_it_passes_for_a_network_with_batch_norm_and_fails_for_an_averaged_loss():
    """A lambda and a closure, as in users' tests; 13 samples, so every division is uneven."""
    assert_same_step(lambda: nn.Sequential(*network()), cross_entropy, BATCH, ranks=(1, 3))

    with pytest.raises(AssertionError) as error:
        assert_same_step(linear, averaged, BATCH, ranks=(2,))

    assert "2 ranks do not do what one does: the gradient of 'weight' differs on rank 0: by" in str(error.value)
    assert "averaged before it was summed" in str(error.value)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_a_network_with_batch_norm_takes_the_same_steps(size):
    alone = traces(1, network, cross_entropy)[0]

    assert first_difference(alone, traces(size, network, cross_entropy), 1e-5, 1e-4) == ""


@pytest.mark.parametrize(
    ("make_model", "make_loss", "sync_batchnorm", "cause"),
    [
        (linear, averaged, True, "the loss was averaged before it was summed"),
        (network, cross_entropy, False, "batch norm that is not synchronised: '1'"),
        (dropout, cross_entropy, True, "draws random numbers"),
        (Fickle, cross_entropy, True, "parameter 'sometimes.weight' was used on some ranks only"),
        (linear, masked, True, "not plain"),
    ],
    ids=["averaged", "batch-norm", "dropout", "some-ranks", "by-position"],
)
def test_what_differs_is_found_with_its_likely_cause(make_model, make_loss, sync_batchnorm, cause):
    alone, ranks = traces(1, make_model, make_loss, sync_batchnorm)[0], traces(2, make_model, make_loss, sync_batchnorm)

    assert first_difference(alone, ranks, 1e-5, 1e-4)
    assert cause in likely_cause(alone, ranks)


def test_arguments_that_make_no_sense_raise():
    with pytest.raises(UsageError, match="ranks="):
        assert_same_step(network, cross_entropy, BATCH, ranks=(0,))


def test_another_model_each_time_is_told_from_other_steps():
    alone = Trace(before={"w": torch.zeros(1)}, gradients={"w": None}, after={"w": torch.zeros(1)})
    other = Trace(before={"w": torch.ones(1)}, gradients={"w": None}, after={"w": torch.ones(1)})

    assert first_difference(alone, [alone], 0, 0) == ""
    assert first_difference(alone, [other], 0, 0).startswith("before the first step, 'w' differs on rank 0")
    assert "make_model()" in likely_cause(alone, [other])
