"""The arguments of `initialize`: what is taken, refused, printed and given back."""

import pytest
import torch
from amp.programs import dtype_name, half_is, load, printed
from torch import nn
from torch.nn.parallel import DataParallel

import lockstep
from lockstep import amp

CALLS = load("initialize-overrides")["trace"]["calls"]


def small():
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


def arguments(recorded):
    names = {"float16": torch.float16, "float32": torch.float32}
    return {k: names[v] if k.startswith("cast_") and v in names else v for k, v in recorded.items()}


@pytest.mark.parametrize("call", CALLS, ids=lambda call: "-".join(f"{k}={v!r}" for k, v in call["arguments"].items()))
def test_every_combination_of_arguments_does_what_it_did_in_apex(call):
    model = small()
    optimizer = sgd(model)
    with half_is("float16"):
        if "raises" in call:
            kinds = {"RuntimeError": RuntimeError, "ValueError": ValueError, "AssertionError": AssertionError}
            with printed() as lines, pytest.raises(kinds[call["raises"]]):
                amp.initialize(model, optimizer, **arguments(call["arguments"]))
            assert call["printed_lines_before"] == len(lines)
            return
        with printed() as lines:
            amp.initialize(model, optimizer, **arguments(call["arguments"]))
        state = amp._amp_state
        properties = {k: str(v) if isinstance(v, torch.dtype) else v for k, v in state.opt_properties.options.items()}
        got = {
            "arguments": call["arguments"],
            "properties": properties,
            "printed": lines,
            "param_dtypes": {n: dtype_name(p.dtype) for n, p in model.named_parameters()},
            "buffer_dtypes": {n: dtype_name(b.dtype) for n, b in model.named_buffers()},
            "output_dtype_for_float_input": dtype_name(model(torch.ones(3, 4)).dtype),
            "scalers": [[s.dynamic, s.loss_scale()] for s in state.loss_scalers]
            if hasattr(state, "loss_scalers")
            else None,
        }

    assert {key: got[key] for key in call} == call


def test_on_a_cpu_half_is_bf16_and_a_line_says_so(monkeypatch):
    monkeypatch.delenv("LOCKSTEP_HALF", raising=False)
    model = small()
    with printed() as lines:
        amp.initialize(model, opt_level="O2")

    assert model[0].weight.dtype == torch.bfloat16
    assert lines[-2:] == [
        "loss_scale             : dynamic",
        "Half precision is torch.bfloat16 here; LOCKSTEP_HALF=fp16 asks for torch.float16.",
    ]


@pytest.mark.parametrize("asked", [torch.float16, torch.bfloat16])
def test_a_half_type_that_is_asked_for_by_name_is_taken(asked):
    model = amp.initialize(small(), opt_level="O3", cast_model_type=asked, verbosity=0)

    assert model[0].weight.dtype == asked


def test_an_unknown_half_is_refused(monkeypatch):
    monkeypatch.setenv("LOCKSTEP_HALF", "fp8")

    with pytest.raises(lockstep.UsageError, match="LOCKSTEP_HALF='fp8' is not a half type: write fp16 or bf16"):
        amp.initialize(small(), verbosity=0)


@pytest.mark.parametrize("enabled", [True, False])
def test_what_comes_back_has_the_shape_of_what_went_in(enabled):
    a, b = small(), small()
    of_a, of_b = sgd(a), sgd(b)
    models, optimizers = [a, b], [of_a, of_b]
    options = {"enabled": enabled, "verbosity": 0}
    both = amp.initialize(models, optimizers, **options)

    assert both[0] is models
    assert both[1] is optimizers
    assert (models, optimizers) == ([a, b], [of_a, of_b])
    assert amp.initialize(a, of_a, **options) == (a, of_a)
    assert amp.initialize(a, **options) is a
    assert amp.initialize(a, [], **options) == (a, [])
    assert amp.initialize([a], **options) == [a]


def test_pain18_disabled_leaves_everything_untouched():
    model = small()
    optimizer = sgd(model)
    amp.initialize(model, optimizer, enabled=False, opt_level="O2")
    loss = model(torch.ones(3, 4)).sum().double()
    with amp.scale_loss(loss, optimizer) as scaled:
        assert scaled is loss

    assert vars(optimizer).keys().isdisjoint({"_amp_stash", "zero_grad"})
    assert model[0].weight.dtype == torch.float32


def test_the_letter_o_is_explained():
    with pytest.raises(RuntimeError, match="the prefix O is the letter O, not the number zero"):
        amp.initialize(small(), opt_level="01")


@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16])
def test_a_model_that_is_half_already_is_refused_by_the_name_of_the_parameter(level, half):
    with pytest.raises(RuntimeError, match=r"Found param 0.weight with type .*, expected torch.cuda.FloatTensor"):
        amp.initialize(small().to(half), opt_level=level, verbosity=0)


def test_a_half_model_can_be_allowed():
    amp._amp_state.allow_incoming_model_not_fp32 = True
    model = amp.initialize(small().bfloat16(), opt_level="O2", verbosity=0)

    assert model[0].weight.dtype == torch.bfloat16


def test_a_double_model_is_taken_without_masters():
    model = nn.Linear(4, 4).double()
    _, optimizer = amp.initialize(model, sgd(model), opt_level="O1", verbosity=0)
    with amp.scale_loss(model(torch.ones(2, 4, dtype=torch.float64)).sum(), optimizer) as scaled:
        scaled.backward()

    assert model.bias.grad.tolist() == [2.0] * 4


def test_tuples_are_refused():
    model = small()

    with pytest.raises(TypeError, match="optimizers must be either a single optimizer or a list of optimizers"):
        amp.initialize(model, (sgd(model),), verbosity=0)
    with pytest.raises(TypeError, match="models must be either a single model or a list of models"):
        amp.initialize((model,), verbosity=0)


def test_one_optimizer_twice_is_refused():
    model = small()
    optimizer = sgd(model)

    with pytest.raises(RuntimeError, match=r"A given optimizer should only be passed through amp\.initialize once"):
        amp.initialize(model, [optimizer, optimizer], verbosity=0)


def test_an_fp16_optimizer_is_refused():
    class FP16_Optimizer(torch.optim.SGD):  # noqa: N801
        pass

    model = small()

    with pytest.raises(RuntimeError, match=r"An incoming optimizer is an instance of .*FP16_Optimizer"):
        amp.initialize(model, FP16_Optimizer(model.parameters(), lr=0.1), verbosity=0)


def test_hard_override_prints_what_does_not_go_together():
    amp._amp_state.hard_override = True
    with printed() as lines:
        amp.initialize(small(), opt_level="O2", patch_torch_functions=True, verbosity=0)

    assert [line for line in lines if line.startswith("Warning:  Currently, patch_torch_functions=True")]


def train(model, optimizer, steps=2, x=None):
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(torch.linspace(-1, 1, 12).reshape(3, 4) if x is None else x).float().square().sum()
        with amp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        optimizer.step()


@pytest.mark.parametrize("first", ["O0", "O1", "O2", "O3"])
@pytest.mark.parametrize("second", ["O0", "O1", "O2", "O3"])
def test_pain10_a_second_initialize_starts_anew(first, second):
    """Cross validation and notebooks: the same model and optimizer again, no wrappers stacked, nothing left cast."""
    model = small()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    amp.initialize(model, optimizer, opt_level=first, verbosity=0)
    train(model, optimizer)
    hooks = [len(model._forward_pre_hooks), len(model._forward_hooks), len(model[0]._state_dict_hooks)]
    amp.initialize(model, optimizer, opt_level=second, verbosity=0)
    train(model, optimizer)
    state = optimizer.state_dict()["state"]

    assert (model[0].weight.dtype == torch.float32) == (second in ("O0", "O1"))
    assert amp._amp_state.opt_properties.opt_level == second
    assert first != second or hooks == [
        len(model._forward_pre_hooks), len(model._forward_hooks), len(model[0]._state_dict_hooks)
    ]  # fmt: skip
    assert [s["step"].item() for s in state.values()] == [4.0] * 4
    assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == (torch.bfloat16 if second == "O1" else torch.float32)


def test_pain10_an_optimizer_of_an_earlier_call_goes_on_working():
    a, b = small(), small()
    _, of_a = amp.initialize(a, sgd(a), opt_level="O2", verbosity=0)
    amp.initialize(b, sgd(b), opt_level="O0", verbosity=0)
    before = a[0].weight.detach().clone()
    train(a, of_a)

    assert not torch.equal(before, a[0].weight)
    assert {p.dtype for p in amp.master_params(of_a)} == {torch.float32}


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
def test_wrapping_in_data_parallel_may_come_before_or_after(level):
    outcomes = []
    for order in ("before", "after"):
        torch.manual_seed(0)
        model = small()
        optimizer = sgd(model)
        if order == "before":
            wrapped, optimizer = amp.initialize(DataParallel(model), optimizer, opt_level=level, verbosity=0)
        else:
            model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0)
            wrapped = DataParallel(model)
        train(wrapped, optimizer)
        outcomes.append([p.detach().clone() for p in model.parameters()])

    assert [torch.equal(a, b) for a, b in zip(*outcomes, strict=True)] == [True] * 4


@pytest.mark.parametrize("verbosity", [0, False])
def test_nothing_is_printed_without_verbosity(verbosity):
    with printed() as lines:
        amp.initialize(small(), opt_level="O2", verbosity=verbosity)

    assert lines == []
