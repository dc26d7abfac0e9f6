import pytest
import torch
from torch import nn

from lockstep.errors import UsageError
from lockstep.testing import assert_same_step
from lockstep.testing.causes import Trace, first_difference, likely_cause

BATCH = torch.randn(13, 6, generator=torch.Generator().manual_seed(0)), torch.arange(13) % 3


def cross_entropy(model, batch):
    x, y = batch
    return nn.functional.cross_entropy(model(x), y, reduction="none")


def network():
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


def test_a_network_with_batch_norm_takes_the_same_steps_on_1_to_4_ranks():
    """13 samples: every division is uneven."""
    assert_same_step(network, cross_entropy, BATCH, steps=2)


def test_masks_and_optimizers_are_the_users_own():
    def masked(model, batch):
        losses = cross_entropy(model, batch[:2])
        return losses, batch[2]

    mask = torch.arange(13) % 4 > 0
    assert_same_step(
        lambda: nn.Linear(6, 3), masked, (*BATCH, mask), (3,), make_optimizer=lambda p: torch.optim.AdamW(p, lr=0.1)
    )


def fails(make_model, make_loss, **options):
    with pytest.raises(AssertionError) as error:
        assert_same_step(make_model, make_loss, BATCH, ranks=(2,), **options)
    return str(error.value)


def test_a_loss_that_was_averaged_is_found():
    message = fails(lambda: nn.Linear(6, 3), lambda model, batch: cross_entropy(model, batch).mean())

    assert "2 ranks do not do what one does: the gradient of 'weight' differs on rank 0: by" in message
    assert "averaged before it was summed" in message


def test_batch_norm_that_is_not_synchronised_is_found():
    assert "batch norm that is not synchronised: '1'" in fails(network, cross_entropy, sync_batchnorm=False)


def test_randomness_is_found():
    message = fails(lambda: nn.Sequential(nn.Dropout(0.5), nn.Linear(6, 3)), cross_entropy)

    assert "draws random numbers" in message


def test_a_parameter_that_depends_on_the_number_of_samples_is_found():
    class Fickle(nn.Module):
        def __init__(self):
            super().__init__()
            self.always, self.sometimes = nn.Linear(6, 3), nn.Linear(6, 3)

        def forward(self, x):
            return self.always(x) + (self.sometimes(x) if len(x) % 2 else 0.0)

    message = fails(Fickle, cross_entropy)

    assert "used on some ranks only" in message
    assert "'sometimes.weight'" in message


def test_arguments_that_make_no_sense_raise():
    with pytest.raises(UsageError, match="ranks="):
        assert_same_step(network, cross_entropy, BATCH, ranks=(0,))


def test_another_model_each_time_is_told_from_other_steps():
    alone = Trace(before={"w": torch.zeros(1)}, gradients={"w": None}, after={"w": torch.zeros(1)})
    other = Trace(before={"w": torch.ones(1)}, gradients={"w": None}, after={"w": torch.ones(1)})

    assert first_difference(alone, [alone], 0, 0) == ""
    assert first_difference(alone, [other], 0, 0).startswith("before the first step, 'w' differs on rank 0")
    assert "make_model()" in likely_cause(alone, [other])
