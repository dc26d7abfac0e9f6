"""bf16 and fp16: autocast, loss scaling, and one decision for the world when a step overflows."""

import pytest
import torch
from ranks import run_ranks
from torch import nn
from torch.utils.checkpoint import checkpoint

import lockstep


def network(dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).to(dtype)


def batch(n=8):
    generator = torch.Generator().manual_seed(n)
    return torch.randn(n, 4, generator=generator), torch.randint(3, (n,), generator=generator)


def overflow_on_one_rank(rank):
    model = lockstep.replicate(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    update = lockstep.Update(model, optimizer, precision="fp16", scheduler=scheduler)
    x, y = batch()
    story = []
    for number in range(4):
        with update:
            losses = nn.functional.cross_entropy(model(x), y, reduction="none")
            update.backward(losses * (1e36 if rank == 1 and number == 2 else 1.0))
        story.append((update.stepped, update.step_count, update.scale, scheduler.last_epoch))
    return story, [p.detach() for p in model.parameters()]


def test_a01_an_overflow_on_one_rank_is_skipped_by_all_alike():
    (story, first), (other_story, second) = run_ranks(overflow_on_one_rank, 2)

    assert story == other_story
    assert story == [(True, 1, 65536.0, 1), (True, 2, 65536.0, 2), (False, 2, 32768.0, 2), (True, 3, 32768.0, 3)]
    assert [torch.equal(a, b) for a, b in zip(first, second, strict=True)] == [True] * 4


def clip(rank, precision, size):
    model = lockstep.replicate(network())
    update = lockstep.Update(
        model, torch.optim.SGD(model.parameters(), lr=0.0), precision=precision, clip_norm=0.01, accumulate=2
    )
    x, y = batch()
    for part in (slice(0, 3), slice(3, 8)):
        mine = slice(part.start + rank, part.stop, size)
        with update:
            update.backward(nn.functional.cross_entropy(model(x[mine]), y[mine], reduction="none"))
    clipped = nn.utils.get_total_norm([p.grad for p in model.parameters()])
    return update.grad_norm, clipped.item()


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("size", [1, 2])
def test_a02_clipping_sees_the_unscaled_gradient_of_the_whole_step(precision, size):
    model = network()
    x, y = batch()
    nn.functional.cross_entropy(model(x), y).backward()
    norm = nn.utils.get_total_norm([p.grad for p in model.parameters()]).item()

    for measured, clipped in run_ranks(clip, size, precision, size, backend="gloo" if size > 1 else None):
        assert measured == pytest.approx(norm, rel=1e-5 if precision == "fp32" else 2e-2)
        assert clipped == pytest.approx(0.01, rel=1e-3)


def test_a03_accumulation_with_clipping_goes_over_the_ends_of_epochs():
    """GradScaler raises "unscale_() has already been called" when each micro-batch clips; 3 batches, groups of 2."""
    model = network()
    update = lockstep.Update(
        model, torch.optim.SGD(model.parameters(), lr=0.1), precision="fp16", accumulate=2, clip_norm=1.0
    )
    loader = lockstep.DataLoader(torch.utils.data.TensorDataset(*batch(12)), batch_size=4)
    for _ in range(3):
        for x, y in loader:
            with update:
                update.backward(nn.functional.cross_entropy(model(x), y, reduction="none"))

    assert update.step_count == 6


def test_a08_bf16_needs_no_loss_scale_and_trains_bf16_parameters():
    model = network(torch.bfloat16)
    before = [p.detach().clone() for p in model.parameters()]
    update = lockstep.Update(model, torch.optim.SGD(model.parameters(), lr=1.0), precision="bf16", clip_norm=1.0)
    x, y = batch()
    with update:
        update.backward(nn.functional.cross_entropy(model(x.bfloat16()), y, reduction="none"))

    assert update.scale == 1.0
    assert [bool((a != b).any()) for a, b in zip(before, model.parameters(), strict=True)] == [True] * 4


def tiny_gradient(scaled):
    """A gradient of 1e-8 through a half-precision linear layer, whose smallest number is 6e-8."""
    layer = nn.Linear(1, 1, bias=False)
    x = torch.full((1, 1), 1e-4)
    if scaled:
        update = lockstep.Update(layer, torch.optim.SGD(layer.parameters(), lr=0.0), precision="fp16")
        while not update.stepped:  # the first scale is too large for a single sample
            with update:
                update.backward((layer(x) * 1e-4).flatten())
    else:
        with torch.autocast("cpu", dtype=torch.float16):
            loss = (layer(x) * 1e-4).mean()
        loss.backward()
    return layer.weight.grad.item()


def test_a09_fp16_scales_losses_so_that_small_gradients_survive():
    assert tiny_gradient(scaled=False) == 0.0
    assert tiny_gradient(scaled=True) == pytest.approx(1e-8, rel=0.01)


@pytest.mark.parametrize(("precision", "dtype"), [("fp32", "float32"), ("bf16", "bfloat16"), ("fp16", "float16")])
def test_the_forward_runs_in_the_precision_asked_for(precision, dtype):
    model = network()
    update = lockstep.Update(model, torch.optim.SGD(model.parameters(), lr=0.1), precision=precision)
    with update:
        output = model(batch()[0])
        update.backward(output)

    assert str(output.dtype) == f"torch.{dtype}"
    assert not torch.is_autocast_enabled("cpu")


def gradients(forward):
    model = lockstep.replicate(network())
    update = lockstep.Update(model, torch.optim.SGD(model.parameters(), lr=0.0), precision="bf16")
    x, y = batch()
    with update:
        update.backward(nn.functional.cross_entropy(forward(model, x.requires_grad_()), y, reduction="none"))
    return [p.grad for p in model.parameters()]


def looks_first(model, x):
    with torch.no_grad():
        model(x)
    return model(x)


def checkpointed(model, x):
    return checkpoint(model, x, use_reentrant=True)


@pytest.mark.parametrize("forward", [looks_first, checkpointed])
def test_weights_whose_first_use_is_without_gradients_get_them_all_the_same(forward):
    """Up to torch 2.10, autocast by itself leaves them without."""
    expected = gradients(lambda model, x: model(x))

    found = gradients(forward)
    assert [True] * 4 == [a is not None and torch.equal(a, b) for a, b in zip(found, expected, strict=True)]


def test_an_unknown_precision_names_the_known_ones():
    model = network()

    with pytest.raises(lockstep.UsageError, match="write 'fp32', 'bf16' or 'fp16'"):
        lockstep.Update(model, torch.optim.SGD(model.parameters(), lr=0.1), precision="half")


def uneven_in_fp16(rank, sizes):
    model = lockstep.replicate(network())
    update = lockstep.Update(model, torch.optim.SGD(model.parameters(), lr=0.1), precision="fp16")
    for n in sizes:
        x, y = (part[rank::2] for part in batch(n))
        with update:
            update.backward(nn.functional.cross_entropy(model(x), y, reduction="none"))
    return [p.detach() for p in model.parameters()]


def test_steps_of_different_weight_are_corrected_while_unscaling():
    """Steps of 8, 2 and 13 samples: the mean is taken in the pass that unscales."""
    alone = network()
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
    for n in (8, 2, 13):
        x, y = batch(n)
        optimizer.zero_grad()
        nn.functional.cross_entropy(alone(x), y).backward()
        optimizer.step()

    for result in run_ranks(uneven_in_fp16, 2, [8, 2, 13]):
        for mine, expected in zip(result, alone.parameters(), strict=True):
            torch.testing.assert_close(mine, expected.detach(), rtol=0, atol=2e-3)
