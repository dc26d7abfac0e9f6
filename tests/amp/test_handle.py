"""The interface of 2018: ``amp.init()`` and its handle, and the hacks around it."""

import contextlib
import math

import pytest
import torch
from amp.programs import printed
from torch import nn

from lockstep import amp


def net():
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def is_cast():
    return (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.bfloat16


def test_a_maskrcnn_style_loop_trains_and_skips_an_overflow():
    handle = amp.init(enabled=True, verbose=False)
    model, optimizer = net()
    before = model.weight.detach().clone()
    types = []
    for factor in (1.0, math.inf, 1.0):
        optimizer.zero_grad()
        out = model(torch.ones(3, 4))
        types.append(out.dtype)
        with handle.scale_loss(out.float().square().mean() * factor, optimizer) as scaled:
            scaled.backward()
        at = model.weight.detach().clone()
        with printed() as lines:
            optimizer.step()
        assert lines == (["Gradient overflow, skipping update"] if factor == math.inf else [])
        assert torch.equal(at, model.weight) == (factor == math.inf)

    assert types == [torch.bfloat16] * 3
    assert not torch.equal(before, model.weight)


def test_gradients_are_unscaled_after_the_block():
    handle = amp.init()
    model, optimizer = net()
    with handle.scale_loss(model(torch.ones(3, 4)).float().sum(), optimizer) as scaled:
        scaled.backward()

    assert model.bias.grad.tolist() == [3.0, 3.0]


def test_a_wrapped_optimizer_sums_several_losses_and_skips_if_one_overflowed():
    handle = amp.init()
    model, inner = net()
    optimizer = handle.wrap_optimizer(inner, num_loss=2)
    x = torch.ones(3, 4)

    def both(second=1.0):
        optimizer.zero_grad()
        for factor in (1.0, second):
            with optimizer.scale_loss(model(x).float().sum() * factor) as scaled:
                scaled.backward()

    both()
    assert model.bias.grad.tolist() == [6.0, 6.0]
    optimizer.step()
    at = model.weight.detach().clone()
    both(math.inf)
    with printed() as lines:
        optimizer.step()
    assert lines == ["Gradient overflow, skipping update"]
    assert torch.equal(at, model.weight)
    both()
    optimizer.step()
    assert not torch.equal(at, model.weight)
    assert optimizer.param_groups is inner.param_groups


def test_after_wrapping_the_handle_refuses_to_scale_and_closures_are_refused():
    handle = amp.init()
    model, inner = net()
    optimizer = handle.wrap_optimizer(inner)

    with (
        pytest.raises(RuntimeError, match="you must explicitly use"),
        handle.scale_loss(model(torch.ones(1, 4)).sum(), inner),
    ):
        pass
    with pytest.raises(NotImplementedError):
        optimizer.step(lambda: None)


def test_a_disabled_handle_does_nothing():
    handle = amp.init(enabled=False)
    model, optimizer = net()
    loss = model(torch.ones(1, 4)).sum()
    with handle.scale_loss(loss, optimizer) as scaled:
        assert scaled is loss
    wrapped = handle.wrap_optimizer(optimizer)
    with wrapped.scale_loss(loss) as scaled:
        assert scaled is loss
        scaled.backward()
    wrapped.step()

    assert not handle.is_active()
    assert not is_cast()


def test_the_handle_of_o1_turns_casts_off_and_on():
    amp.initialize(nn.Linear(2, 2), verbosity=0)
    handle = amp._amp_state.handle
    story = [handle.is_active(), is_cast()]
    handle._is_active = False
    story += [handle.is_active(), is_cast()]
    handle._is_active = True
    story += [handle.is_active(), is_cast()]
    with handle._disable_casts():
        story.append(is_cast())
    handle._clear_cache()
    handle._deactivate()
    story += [handle.is_active(), is_cast()]

    assert story == [True, True, False, False, True, True, False, False, False]


@pytest.mark.parametrize("level", ["O0", "O2", "O3", None])
def test_disable_casts_does_nothing_where_nothing_is_cast(level):
    if level:
        amp.initialize(nn.Linear(2, 2), opt_level=level, verbosity=0)
    with contextlib.suppress(ZeroDivisionError), amp.disable_casts():
        assert not is_cast()
        _ = 1 / 0

    assert not is_cast()
