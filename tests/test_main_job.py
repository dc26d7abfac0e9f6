"""The promise: the same script on 1, 2, 3 and 4 ranks prints the same numbers."""

import pytest
import torch
from ranks import run_ranks
from torch import nn
from torch.utils.data import TensorDataset

import lockstep


def data():
    """61 samples: divides by none of 2, 3 and 4."""
    generator = torch.Generator().manual_seed(5)
    return TensorDataset(torch.randn(61, 6, generator=generator), torch.randint(4, (61,), generator=generator))


def network():
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 4))


def train_20_steps(rank):
    """A plain loop: torch's optimizer and a mean loss; global batches of 12, which 1 to 4 divide."""
    lockstep.init(device="cpu", seed=3)
    model = lockstep.replicate(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loader = lockstep.DataLoader(data(), batch_size=12, shuffle=True, drop_last=True)
    losses = []
    for _ in range(4):
        for x, y in loader:
            loss = nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(lockstep.mean(loss.detach() * len(x), len(x)))
    return torch.stack(losses), [p.detach() for p in model.parameters()]


@pytest.fixture(scope="module")
def alone():
    return run_ranks(train_20_steps, 1, backend=None)[0]


@pytest.mark.parametrize("size", [2, 3, 4])
def test_r01_ranks_give_the_losses_and_parameters_of_one_process(alone, size):
    """20 steps of SGD with momentum in float32."""
    losses, parameters = alone
    assert len(losses) == 20
    assert losses[-1] < losses[0]

    for result in run_ranks(train_20_steps, size):
        torch.testing.assert_close(result[0], losses, rtol=0, atol=1e-5)
        for mine, expected in zip(result[1], parameters, strict=True):
            torch.testing.assert_close(mine, expected, rtol=0, atol=1e-5)


def whole_epochs(rank):
    """The exact update over whole epochs: the last batch has one sample, so that most ranks' is empty."""
    lockstep.init(device="cpu", seed=3)
    model = lockstep.replicate(network())
    update = lockstep.Update(model, torch.optim.AdamW(model.parameters(), lr=0.01))
    train = lockstep.DataLoader(data(), batch_size=12, shuffle=True)
    test = lockstep.DataLoader(data(), batch_size=20)
    for _ in range(3):
        for x, y in train:
            with update:
                update.backward(nn.functional.cross_entropy(model(x), y, reduction="none"))
    guesses = [model(x).argmax(1) for x, _ in test]
    return [p.detach() for p in model.parameters()], lockstep.gather(torch.cat(guesses), test)


def test_whole_epochs_with_a_tail_smaller_than_the_world_agree_too():
    parameters, guesses = run_ranks(whole_epochs, 1, backend=None)[0]

    for result in run_ranks(whole_epochs, 4):
        assert torch.equal(result[1], guesses)
        for mine, expected in zip(result[0], parameters, strict=True):
            torch.testing.assert_close(mine, expected, rtol=0, atol=1e-5)


def draw_with_dropout(rank):
    lockstep.init(device="cpu", seed=0)
    model = lockstep.replicate(nn.Sequential(nn.Linear(4, 64), nn.Dropout(0.5)))
    weights = model[0].weight.detach().clone()
    return weights, model(torch.ones(1, 4)) == 0, torch.rand(3)


def test_r02_models_are_alike_and_dropout_masks_are_not():
    (first, mask, after), (second, other_mask, other_after) = run_ranks(draw_with_dropout, 2)

    assert torch.equal(first, second)
    assert not torch.equal(mask, other_mask)
    assert not torch.equal(after, other_after)


def evaluate(rank, n, batch_size):
    """What people get wrong: a mean for each batch and rank, and padding that counts."""
    lockstep.init(device="cpu")
    numbers = torch.arange(float(n))
    loader = lockstep.DataLoader(TensorDataset(numbers), batch_size=batch_size)
    total = count = 0
    seen = []
    for (x,) in loader:
        total, count = total + x.sum(), count + len(x)
        seen.append(x)
    return float(lockstep.mean(total, count)), lockstep.gather(torch.cat(seen), loader).tolist(), lockstep.total(count)


@pytest.mark.parametrize(("n", "batch_size", "size"), [(7, 4, 2), (9, 4, 2), (10, 5, 4), (33, 5, 3), (2, 3, 3)])
def test_m01_m02_d01_every_sample_counts_once_whatever_the_number_of_ranks(n, batch_size, size):
    """7 samples in batches of 2 on 2 ranks: Accelerate gathers a mean of 3.0 for a last batch of one sample, 6."""
    for mean, gathered, count in run_ranks(evaluate, size, n, batch_size):
        assert mean == pytest.approx((n - 1) / 2)
        assert gathered == [float(i) for i in range(n)]
        assert count == n
