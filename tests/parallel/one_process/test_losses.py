"""DataParallel with loss=: the mean over the whole batch, whatever the devices' shares."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.functional import cross_entropy

import lockstep

WEIGHTS = torch.tensor([1.0, 2.0, 0.5], dtype=torch.float64)


def net():
    torch.manual_seed(0)
    return nn.Linear(4, 3).double()


def batch(samples):
    torch.manual_seed(1)
    targets = torch.randint(0, 3, (samples,))
    return torch.randn(samples, 4, dtype=torch.float64), targets


def each(output, targets):
    return cross_entropy(output, targets, reduction="none")


def ignoring(output, targets):
    """The mean over targets that are not 0, and their number."""
    count = (targets != 0).sum()
    return cross_entropy(output, targets, ignore_index=0, reduction="sum") / count.clamp(min=1), count


def weighted_by_class(output, targets):
    total = cross_entropy(output, targets, weight=WEIGHTS, reduction="sum")
    return total / WEIGHTS[targets].sum(), WEIGHTS[targets].sum()


@settings(max_examples=15)
@given(samples=st.integers(1, 17), devices=st.integers(1, 4))
@pytest.mark.parametrize(
    ("loss", "whole"),
    [
        (nn.CrossEntropyLoss(), cross_entropy),
        (cross_entropy, cross_entropy),
        (each, cross_entropy),
        (ignoring, lambda *pair: ignoring(*pair)[0]),
        (weighted_by_class, lambda *pair: weighted_by_class(*pair)[0]),
    ],
    ids=["module", "mean", "each", "ignoring some", "weighted"],
)
def test_it_is_the_mean_over_the_whole_batch(loss, whole, samples, devices):
    plain, (x, targets) = net(), batch(samples)
    module = copy.deepcopy(plain)
    found = lockstep.DataParallel(module, ["cpu"] * devices, loss=loss)(x, targets)
    expected = whole(plain(x), targets)
    found.backward()
    expected.backward()

    assert found.shape == ()
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(module.weight.grad, plain.weight.grad, rtol=1e-9, atol=1e-12)


def test_outputs_stay_where_they_are(monkeypatch):
    model = lockstep.DataParallel(net(), ["cpu", "cpu"], loss=cross_entropy)
    gathered = []
    model.gather = lambda outputs, device: gathered.append(outputs)
    model(*batch(6))

    assert gathered == []


def test_a_loss_that_is_a_module_is_copied_to_each_device_and_learns():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))

        def forward(self, output, targets):
            return cross_entropy(output, targets) * self.scale

    loss, (x, targets) = Scaled(), batch(7)
    model = lockstep.DataParallel(net(), ["cpu", "cpu"], loss=loss)
    model(x, targets).backward()

    torch.testing.assert_close(loss.scale.grad, cross_entropy(model.module(x), targets).detach())
    assert list(model.state_dict()) == ["module.weight", "module.bias"]


def test_several_inputs_keywords_and_targets_in_a_dict():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = net()

        def forward(self, x, y, *, mask):
            return self.layer(x + y) * mask[:, None]

    def loss(output, targets):
        return cross_entropy(output, targets["labels"])

    module, (x, labels) = Two(), batch(5)
    mask = torch.arange(5.0)
    found = lockstep.DataParallel(module, ["cpu"] * 3, loss=loss)(x, x, {"labels": labels}, mask=mask)

    torch.testing.assert_close(found, cross_entropy(module(x, x, mask=mask), labels))


def test_without_devices_it_is_the_same_loss(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    module, (x, targets) = net(), batch(5)

    torch.testing.assert_close(lockstep.DataParallel(module, loss=each)(x, targets), cross_entropy(module(x), targets))


@pytest.mark.parametrize(
    ("inputs", "loss", "message"),
    [((), cross_entropy, "targets as its last positional argument"), (batch(4), lambda y, t: 3.0, "the loss is float")],
)
def test_what_is_no_loss_is_said(inputs, loss, message):
    with pytest.raises(lockstep.UsageError, match=message):
        lockstep.DataParallel(net(), ["cpu", "cpu"], loss=loss)(*inputs)
