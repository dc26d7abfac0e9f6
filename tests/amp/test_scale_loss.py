"""`scale_loss` and the step after it."""

import contextlib
import math
import threading

import pytest
import torch
from amp.programs import half_is, printed
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from lockstep import amp

LEVELS = ["O0", "O1", "O2", "O3"]


def prepared(level, *, optimizer=torch.optim.SGD, lr=0.1, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    options = {"loss_scale": "dynamic", "verbosity": 1} | options
    with printed():
        return amp.initialize(model, optimizer(model.parameters(), lr=lr), opt_level=level, **options)


def backward(model, optimizer, factor=1.0, **options):
    loss = model(torch.linspace(-1, 1, 12).reshape(3, 4)).float().square().sum()
    with amp.scale_loss(loss * factor, optimizer, **options) as scaled:
        scaled.backward()


def values(model):
    return [p.detach().float().clone() for p in model.parameters()]


def grads(optimizer):
    return [None if p.grad is None else p.grad.detach().float().clone() for p in amp.master_params(optimizer)]


def same(left, right):
    return all((a is None and b is None) or torch.equal(a, b) for a, b in zip(left, right, strict=True))


def test_without_initialize_the_message_says_what_is_missing():
    with (
        pytest.raises(RuntimeError, match="internal Amp state has not been initialized"),
        amp.scale_loss(torch.ones(()), None),
    ):
        pass


def test_pain17_an_optimizer_that_amp_does_not_know_is_named():
    model, _ = prepared("O1")
    other = torch.optim.SGD(model.parameters(), lr=0.1)

    with (
        pytest.raises(RuntimeError, match=r"amp does not know this SGD: pass every optimizer through amp\.initialize"),
        amp.scale_loss(torch.ones(()), other),
    ):
        pass


@pytest.mark.parametrize("level", LEVELS)
def test_an_overflow_skips_one_step_halves_the_scale_and_says_so(level):
    model, optimizer = prepared(level)
    before = values(model)
    backward(model, optimizer, math.inf)
    assert optimizer._amp_stash.already_patched
    with printed() as lines:
        result = optimizer.step()

    assert lines == ["Gradient overflow.  Skipping step, loss scaler 0 reducing loss scale to 32768.0"]
    assert result is None
    assert same(before, values(model))
    optimizer.zero_grad()
    backward(model, optimizer)
    optimizer.step()
    assert not same(before, values(model))
    assert amp.state_dict()["loss_scaler0"] == {"loss_scale": 32768.0, "unskipped": 1}


@pytest.mark.parametrize("level", LEVELS)
def test_pain6_an_exception_in_the_block_leaves_gradients_and_scale_as_they_were(level):
    model, optimizer = prepared(level)
    backward(model, optimizer)
    before, state = grads(optimizer), amp.state_dict()
    with contextlib.suppress(ZeroDivisionError), amp.scale_loss(torch.ones((), requires_grad=True), optimizer):
        model(torch.ones(3, 4)).sum().backward()
        _ = 1 / 0

    assert same(before, grads(optimizer))
    assert state == amp.state_dict()
    assert level != "O1" or (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.bfloat16
    optimizer.step()


@pytest.mark.parametrize("level", LEVELS)
def test_a_block_without_a_backward_counts_and_keeps_gradients(level):
    model, optimizer = prepared(level)
    backward(model, optimizer)
    before = grads(optimizer)
    with amp.scale_loss(torch.ones(()), optimizer):
        pass

    assert same(before, grads(optimizer))
    assert amp.state_dict()["loss_scaler0"]["unskipped"] == 2


@pytest.mark.parametrize("level", LEVELS)
def test_a_tuple_of_optimizers_is_taken_as_a_list(level):
    model, optimizer = prepared(level)
    loss = model(torch.ones(3, 4)).float().sum()
    for _ in range(2):
        with amp.scale_loss(loss, (optimizer,)) as scaled:
            scaled.backward(retain_graph=True)
    first = grads(optimizer)
    model, optimizer = prepared(level)
    loss = model(torch.ones(3, 4)).float().sum()
    for _ in range(2):
        with amp.scale_loss(loss, [optimizer]) as scaled:
            scaled.backward(retain_graph=True)

    assert same(first, grads(optimizer))


def test_a_loss_that_is_not_a_tensor_is_an_attribute_error():
    _, optimizer = prepared("O1")

    with pytest.raises(AttributeError), amp.scale_loss(3.0, optimizer):
        pass


@pytest.mark.parametrize("level", LEVELS)
def test_clipping_between_block_and_step_acts_on_what_the_optimizer_uses(level):
    model, optimizer = prepared(level, lr=1.0)
    before = [p.detach().clone() for p in amp.master_params(optimizer)]
    backward(model, optimizer, 100.0)
    nn.utils.clip_grad_norm_(amp.master_params(optimizer), 0.01)
    optimizer.step()
    moved = torch.cat([(a - b).float().flatten() for a, b in zip(before, amp.master_params(optimizer), strict=True)])

    # In O3 the weights themselves are half and cannot move by so little.
    assert moved.norm().item() == pytest.approx(0.01, rel=0.02 if level != "O3" else 1.0)


def test_a_scale_that_a_script_writes_is_used():
    model, optimizer = prepared("O1")
    amp._amp_state.loss_scalers[0]._loss_scale = 2**20
    seen = []
    with amp.scale_loss(model(torch.ones(3, 4)).float().sum(), optimizer) as scaled:
        seen.append(scaled.item())
        scaled.backward()

    assert seen[0] / model(torch.ones(3, 4)).float().sum().item() == pytest.approx(2**20, rel=1e-6)
    assert amp._amp_state.loss_scalers[0].loss_scale() == 2**20


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_the_third_shrink_in_a_row_names_the_first_parameter_that_is_not_finite(level):
    model, optimizer = prepared(level)
    hook = model[2].weight.register_hook(lambda grad: torch.full_like(grad, math.nan))
    for _ in range(2):
        backward(model, optimizer)
        optimizer.step()
    with pytest.warns(
        UserWarning,
        match=r"loss scaler 0 has shrunk three times in a row, to 8192.0. The first parameter whose gradient is not "
        r"finite is '2.weight', shape \(2, 4\)",
    ):
        backward(model, optimizer)
    hook.remove()
    optimizer.step()
    optimizer.zero_grad()
    backward(model, optimizer)
    optimizer.step()

    assert amp.state_dict()["loss_scaler0"] == {"loss_scale": 8192.0, "unskipped": 1}


def test_delay_overflow_check_leaves_scale_and_step_alone():
    model, optimizer = prepared("O1")
    backward(model, optimizer, math.inf, delay_overflow_check=True)

    assert amp.state_dict()["loss_scaler0"] == {"loss_scale": 65536.0, "unskipped": 0}
    assert not optimizer._amp_stash.already_patched


@settings(max_examples=20)
@given(st.lists(st.booleans(), min_size=1, max_size=4), st.sampled_from(["O1", "O2"]), st.sampled_from([1.0, 0.5]))
def test_accumulation_with_any_delays_gives_the_sum_of_the_gradients(delays, level, factor):
    """The last block is never delayed; in bf16 with one batch each contribution is the same."""
    model, optimizer = prepared(level)
    x = torch.linspace(-1, 1, 12).reshape(3, 4)
    model.eval()

    def block(**options):
        with amp.scale_loss(model(x).float().square().sum() * factor, optimizer, **options) as scaled:
            scaled.backward()

    block()
    single = grads(optimizer)
    optimizer.zero_grad()
    for delay in [*delays[:-1], False]:
        block(delay_unscale=delay)

    for one, many in zip(single, grads(optimizer), strict=True):
        torch.testing.assert_close(many, one * len(delays), rtol=2e-2, atol=1e-4)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("set_to_none", [True, False])
def test_pain8_zero_grad_takes_todays_argument(level, set_to_none):
    model, optimizer = prepared(level)
    backward(model, optimizer)
    optimizer.zero_grad(set_to_none=set_to_none)
    left = [p.grad for p in (*model.parameters(), *amp.master_params(optimizer)) if p.grad is not None]

    assert (left == []) if set_to_none else all(not grad.any() for grad in left)
    before = values(model)
    backward(model, optimizer)
    optimizer.step()
    assert not same(before, values(model))


@pytest.mark.parametrize("level", LEVELS)
def test_model_zero_grad_alone_is_enough(level):
    outcomes = []
    for clear in ("model", "optimizer"):
        model, optimizer = prepared(level)
        for _ in range(3):
            (model if clear == "model" else optimizer).zero_grad()
            backward(model, optimizer)
            optimizer.step()
        outcomes.append(values(model))

    assert same(*outcomes)


@pytest.mark.parametrize("level", ["O0", "O1", "O3"])
def test_pain8_closures_are_taken_without_masters_and_run_with_casts(level):
    model, optimizer = prepared(level)
    types = []

    def closure():
        types.append(nn.functional.linear(torch.ones(2, 2), torch.ones(2, 2)).dtype)
        optimizer.zero_grad()
        backward(model, optimizer)
        return torch.tensor(7.0)

    before = values(model)
    result = optimizer.step(closure)

    assert result.item() == 7.0
    assert not same(before, values(model))
    assert types == [torch.bfloat16 if level == "O1" else torch.float32]


def test_closures_are_refused_with_masters():
    _, optimizer = prepared("O2")

    with pytest.raises(RuntimeError, match="Currently, Amp does not support closure use with optimizers"):
        optimizer.step(lambda: None)


@pytest.mark.parametrize("level", LEVELS)
def test_a_step_before_any_backward_is_no_error(level):
    model, optimizer = prepared(level)
    before = values(model)
    optimizer.step()

    assert same(before, values(model))


schedulers = torch.optim.lr_scheduler
SCHEDULERS = {
    "StepLR": lambda o: schedulers.StepLR(o, 1),
    "LambdaLR": lambda o: schedulers.LambdaLR(o, lambda n: 0.5**n),
    "MultiplicativeLR": lambda o: schedulers.MultiplicativeLR(o, lambda n: 0.5),
    "OneCycleLR": lambda o: schedulers.OneCycleLR(o, 0.1, total_steps=10),
    "ConstantLR": schedulers.ConstantLR,
    "PolynomialLR": schedulers.PolynomialLR,
    "CosineAnnealingLR": lambda o: schedulers.CosineAnnealingLR(o, 5),
    "CosineAnnealingWarmRestarts": lambda o: schedulers.CosineAnnealingWarmRestarts(o, 5),
    "CyclicLR": lambda o: schedulers.CyclicLR(o, 0.01, 0.1, cycle_momentum=False),
    "ExponentialLR": lambda o: schedulers.ExponentialLR(o, 0.9),
    "MultiStepLR": lambda o: schedulers.MultiStepLR(o, [1]),
    "LinearLR": schedulers.LinearLR,
    "ReduceLROnPlateau": schedulers.ReduceLROnPlateau,
    "SequentialLR": lambda o: schedulers.SequentialLR(
        o, [schedulers.LinearLR(o), schedulers.ExponentialLR(o, 0.9)], [1]
    ),
    "ChainedScheduler": lambda o: schedulers.ChainedScheduler([schedulers.LinearLR(o), schedulers.StepLR(o, 1)]),
    "SWALR": lambda o: torch.optim.swa_utils.SWALR(o, 0.01),
}


def test_every_scheduler_of_torch_is_among_them():
    everyone = {name for name in schedulers.__all__ if name != "LRScheduler"} | {"SWALR"}

    assert everyone == set(SCHEDULERS)


@pytest.mark.parametrize("make", SCHEDULERS.values(), ids=SCHEDULERS)
@pytest.mark.parametrize("when", ["before", "after", "armed"])
def test_pain7_schedulers_made_at_any_time_neither_warn_nor_fail(make, when):
    """Warnings are errors in these tests."""
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = make(optimizer) if when == "before" else None
    with printed():
        amp.initialize(model, optimizer, opt_level="O2")
        scheduler = make(optimizer) if when == "after" else scheduler
        for number in range(3):
            backward(model, optimizer, math.inf if number == 0 else 1.0)
            if scheduler is None:
                scheduler = make(optimizer)
            optimizer.step()
            scheduler.step(*([1.0] if "Plateau" in type(scheduler).__name__ else []))

    assert amp.state_dict()["loss_scaler0"]["unskipped"] == 2


@pytest.mark.parametrize("level", LEVELS)
def test_frozen_parameters_stay_and_mixed_groups_train(level):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    model[0].requires_grad_(False)
    groups = [{"params": list(model[:2].parameters())}, {"params": list(model[2].parameters()), "lr": 0.5}]
    _, optimizer = amp.initialize(
        model, torch.optim.SGD(groups, lr=0.1, weight_decay=0.1), opt_level=level, loss_scale="dynamic", verbosity=0
    )
    before = values(model)
    for _ in range(2):
        optimizer.zero_grad()
        backward(model, optimizer)
        optimizer.step()
    moved = [not torch.equal(a, b) for a, b in zip(before, values(model), strict=True)]

    assert moved == [False, False, True, True, True, True]
    assert len(list(amp.master_params(optimizer))) == 6


def test_a_set_of_parameters_is_refused_by_add_param_group():
    _, optimizer = prepared("O2")

    with pytest.raises(TypeError, match="ordered collections"):
        optimizer.add_param_group({"params": {nn.Parameter(torch.ones(1))}})


def test_a_static_scale_never_skips_and_says_once_that_gradients_are_not_finite():
    model, optimizer = prepared("O1", loss_scale=8.0)
    with pytest.warns(UserWarning, match=r"static loss scale of 8\.0"):
        backward(model, optimizer, math.inf)
    optimizer.step()
    backward(model, optimizer, math.inf)

    assert not optimizer._amp_stash.already_patched
    assert amp.state_dict()["loss_scaler0"] == {"loss_scale": 8.0, "unskipped": 2}


def test_fused_sgds_marks_are_reset_by_a_skipped_step():
    model, optimizer = prepared("O2")
    optimizer.most_recent_scale, optimizer.scale_set_by_backward = 4.0, True
    backward(model, optimizer, math.inf)
    with printed():
        optimizer.step()

    assert (optimizer.most_recent_scale, optimizer.scale_set_by_backward) == (1.0, False)


def test_gradients_of_autograd_grad_in_the_block_are_scaled_and_twice_differentiable():
    model, optimizer = prepared("O1")
    x = torch.ones(3, 4, requires_grad=True)
    loss = model(x).float().square().sum()
    with amp.scale_loss(loss, optimizer) as scaled:
        (gradient,) = torch.autograd.grad(scaled, x, create_graph=True)
        ((gradient / amp._amp_state.loss_scalers[0].loss_scale()).square().sum() + scaled).backward()

    assert gradient.dtype == torch.float32
    assert all(grad.isfinite().all() for grad in grads(optimizer))


@pytest.mark.parametrize("half", ["bfloat16", "float16"])
def test_a_custom_backward_that_calls_listed_functions_is_cast(half):
    """Half gradients meet fp32 weights in it, as in apex's time."""

    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight):
            ctx.save_for_backward(x, weight)
            return torch.matmul(x, weight)

        @staticmethod
        def backward(ctx, grad):
            x, weight = ctx.saved_tensors
            return torch.matmul(grad, weight.t()), x.t() @ grad

    with half_is(half):
        model = nn.Linear(4, 4)
        weight = nn.Parameter(torch.eye(4))
        optimizer = torch.optim.SGD([*model.parameters(), weight], lr=0.1)
        amp.initialize(model, optimizer, opt_level="O1", loss_scale=8.0, verbosity=0)
        out = Product.apply(model(torch.ones(2, 4)), weight)
        with amp.scale_loss(out.float().sum(), optimizer) as scaled:
            scaled.backward()

    assert model.bias.grad.tolist() == [2.0] * 4


def test_backward_of_what_ran_in_fp32_stays_in_fp32():
    """Autocast is off in the block, else torch's own formula for the gradient would run in half."""
    _, optimizer = prepared("O1")
    weight = nn.Parameter(torch.full((4, 4), 1 / 3))
    x = torch.full((2, 4), 1 / 3)
    optimizer.add_param_group({"params": [weight]})
    with amp.disable_casts():
        loss = (x @ weight).square().sum()
    with amp.scale_loss(loss, optimizer) as scaled:
        scaled.backward()
    reference = weight.detach().double().requires_grad_()
    (x.double() @ reference).square().sum().backward()

    torch.testing.assert_close(weight.grad.double(), reference.grad, rtol=1e-6, atol=0)


def fp32_gradient(backward):
    """The relative error of a gradient through operations that ran in fp32."""
    weight = nn.Parameter(torch.full((4, 4), 1 / 3))
    x = torch.full((2, 4), 1 / 3)
    with amp.disable_casts():
        loss = (x @ weight).square().sum()
    grad = backward(loss, weight)
    reference = weight.detach().double().requires_grad_()
    (x.double() @ reference).square().sum().backward()
    return ((grad.double() - reference.grad).abs().max() / reference.grad.abs().max()).item()


def by_backward(loss, weight):
    loss.backward()
    return weight.grad


BACKWARDS = {
    "loss.backward": by_backward,
    "torch.autograd.grad": lambda loss, weight: torch.autograd.grad(loss, weight)[0],
    "a name taken before": lambda loss, weight, grad=torch.autograd.grad: grad(loss, weight)[0],
}


@pytest.mark.parametrize("name", BACKWARDS)
def test_pain11_a_backward_outside_the_block_runs_in_the_types_of_its_forward(name):
    """Other models of the process, whose forward is in fp32: theirs is too."""
    prepared("O1")

    assert fp32_gradient(BACKWARDS[name]) < 1e-6


def test_what_is_computed_in_the_block_is_cast():
    model, optimizer = prepared("O1")
    x = torch.ones(1, 1, 2, 4)
    with amp.scale_loss(torch.zeros(()), optimizer) as scaled:
        types = [model(x[0, 0]).dtype, nn.functional.scaled_dot_product_attention(x, x, x).dtype]
        (scaled + model(x[0, 0]).float().sum()).backward()

    assert types == [torch.bfloat16] * 2
    assert model[0].weight.grad is not None


def test_another_thread_is_not_cast_while_a_backward_runs():
    model, optimizer = prepared("O1")
    seen = []

    def look(grad):
        thread = threading.Thread(target=lambda: seen.append(nn.functional.linear(grad, grad).dtype))
        thread.start()
        thread.join()

    model[2].weight.register_hook(look)
    backward(model, optimizer)

    assert seen == [torch.float32]


@pytest.mark.parametrize("level", LEVELS)
def test_a_script_whose_default_type_is_double_trains(level):
    torch.set_default_dtype(torch.float64)
    try:
        model = nn.Linear(4, 2, dtype=torch.float32)
        with printed():
            amp.initialize(
                model, optimizer := torch.optim.SGD(model.parameters(), lr=0.1), opt_level=level, loss_scale="dynamic"
            )
            with amp.scale_loss(model(torch.ones(3, 4, dtype=torch.float32)).float().sum() * math.inf, optimizer) as s:
                s.backward()
            optimizer.step()
    finally:
        torch.set_default_dtype(torch.float32)

    assert amp.state_dict()["loss_scaler0"] == {"loss_scale": 32768.0, "unskipped": 0}


@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
def test_complex_parameters_train_and_overflow(level):
    weight = nn.Parameter(torch.tensor([1 + 2j, 3 - 1j]))
    with printed():
        _, optimizer = amp.initialize(
            nn.Identity(), torch.optim.SGD([weight], lr=0.25), opt_level=level, loss_scale="dynamic"
        )
        for factor in (1.0, math.inf):
            optimizer.zero_grad()
            with amp.scale_loss((weight * weight.conj()).real.sum() * factor, optimizer) as scaled:
                scaled.backward()
            optimizer.step()

    assert weight.tolist() == [0.5 + 1j, 1.5 - 0.5j]
    assert amp.state_dict()["loss_scaler0"] == {"loss_scale": 32768.0, "unskipped": 0}


class Plainest:
    """No optimizer of torch's: it has what amp needs, and nothing else."""

    def __init__(self, params, lr):
        self.inner = torch.optim.SGD(params, lr=lr)
        self.param_groups = self.inner.param_groups

    def step(self):
        self.inner.step()

    def zero_grad(self):
        self.inner.zero_grad()


@pytest.mark.parametrize("level", LEVELS)
def test_anything_that_steps_is_an_optimizer(level):
    model, optimizer = prepared(level, optimizer=Plainest)
    before = values(model)
    optimizer.zero_grad()
    backward(model, optimizer)
    optimizer.step()

    assert not same(before, values(model))


@pytest.mark.parametrize("level", LEVELS)
def test_groups_of_named_parameters_can_be_added(level):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model[0].named_parameters(), lr=0.1)
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    optimizer.add_param_group({"params": list(model[1].named_parameters())})
    before = values(model)
    backward(model, optimizer)
    optimizer.step()

    assert not any(torch.equal(a, b) for a, b in zip(before, values(model), strict=True))
    assert level != "O2" or {p.dtype for p in amp.master_params(optimizer)} == {torch.float32}


def test_a_group_that_is_refused_leaves_the_optimizer_as_it_was():
    model, optimizer = prepared("O2")
    with pytest.raises(TypeError, match="optimizer can only optimize Tensors"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1).bfloat16()), "no tensor"]})

    assert len(optimizer.param_groups) == len(optimizer._amp_stash.fp16_groups) == 1
    backward(model, optimizer)
    optimizer.step()
