"""amp_C, apex_C, mlp, fused_dense, multi_tensor_apply and apex.contrib against plain torch."""

import copy

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from faces import amp_C, apex, apex_C
from torch import nn

from tests.compat.test_optimizers import small_model

APPLY = apex.multi_tensor_apply.multi_tensor_applier
INF = float("inf")


def flag():
    return torch.zeros(1, dtype=torch.int32)


def some(dtype=torch.float32):
    return [torch.sin(torch.arange(6.0)).reshape(2, 3).to(dtype), torch.cos(torch.arange(4.0)).to(dtype)]


def test_the_applier_says_that_it_is_there_and_passes_its_chunk():
    assert APPLY.available is True
    assert (2048 * 32, "flag", [[1]], 2) == APPLY(lambda *args: args, "flag", [[1]], 2)


@pytest.mark.parametrize("dtypes", [(torch.float16, torch.float32), (torch.float32, torch.float16)], ids=str)
def test_scale_writes_in_the_targets_dtype(dtypes):
    source, target = some(dtypes[0]), [torch.zeros_like(x, dtype=dtypes[1]) for x in some()]

    APPLY(amp_C.multi_tensor_scale, mark := flag(), [source, target], 0.5)

    assert all(torch.equal((s.float() * 0.5).to(dtypes[1]), t) for s, t in zip(source, target, strict=True))
    assert 0 == mark


@pytest.mark.parametrize("value", [INF, -INF, float("nan")])
def test_scale_marks_what_is_not_finite(value):
    source = some()
    source[1][2] = value

    APPLY(amp_C.multi_tensor_scale, mark := flag(), [source, some()], 1.0)

    assert 1 == mark


@pytest.mark.parametrize(("check", "marked"), [(-1, [1, 1]), (0, [1, 0]), (1, [0, 1])])
def test_axpby_looks_where_it_is_told(check, marked):
    found = []
    for bad in (0, 1):
        x, y, out = some(), some(), some()
        (x, y)[bad][0][0, 0] = INF
        APPLY(amp_C.multi_tensor_axpby, mark := flag(), [x, y, out], 2.0, 3.0, check)
        found.append(int(mark))
    x, y, out = some(), some(torch.float16), some()
    APPLY(amp_C.multi_tensor_axpby, flag(), [x, y, out], 2.0, 3.0, check)

    assert marked == found
    assert torch.allclose(2 * x[0] + 3 * y[0].float(), out[0])


def test_l2norm_is_that_of_everything_and_of_each():
    tensors = some(torch.float16)
    flat = torch.cat([x.float().reshape(-1) for x in tensors])

    norm, each = APPLY(amp_C.multi_tensor_l2norm, flag(), [tensors], True)

    assert torch.allclose(flat.norm().reshape(1), norm)
    assert torch.allclose(torch.stack([x.float().norm() for x in tensors]), each)
    assert 0 == APPLY(amp_C.multi_tensor_l2norm, flag(), [tensors], False)[1].numel()


def test_l2norm_scale_writes_and_measures_what_it_wrote():
    out = some()

    norm, _ = APPLY(amp_C.multi_tensor_l2norm_scale, flag(), [some(), out], 3.0, False)

    assert torch.allclose(out[0], 3 * some()[0])
    assert torch.allclose(torch.cat([x.reshape(-1) for x in out]).norm().reshape(1), norm)


def optimizer_calls():
    """The kernel's call beside the optimizer that makes it."""
    adam = (0.1, 0.9, 0.999, 1e-8, 1, 1, 1, 0.01)
    lamb = (0.1, 0.9, 0.999, 1e-6, 1, 1, 0.01, 1, 1)
    return {
        "multi_tensor_adam": (apex.optimizers.FusedAdam, {"lr": 0.1, "weight_decay": 0.01}, 2, lambda norm: adam),
        "multi_tensor_sgd": (
            apex.optimizers.FusedSGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}, 1,
            lambda norm: (0.01, 0.9, 0.0, 0.1, False, True, False, 1.0),
        ),
        "multi_tensor_lamb": (apex.optimizers.FusedLAMB, {"lr": 0.1}, 2, lambda norm: (*lamb, norm, 1.0, False)),
    }  # fmt: skip


@pytest.mark.parametrize("name", ["multi_tensor_adam", "multi_tensor_sgd", "multi_tensor_lamb"])
@pytest.mark.filterwarnings("ignore:apex.optimizers.FusedAdam decays")
def test_a_kernel_does_what_its_optimizer_does(name):
    kind, arguments, states, options = optimizer_calls()[name]
    models = [small_model(), small_model()]
    for model in models:
        model(torch.ones(2, 5)).square().sum().backward()
    kind(models[0].parameters(), **arguments).step()
    params = [param.detach() for param in models[1].parameters()]
    grads = [param.grad for param in models[1].parameters()]
    norm = torch.cat([grad.reshape(-1) for grad in grads]).norm()
    kept = [[torch.zeros_like(param) for param in params] for _ in range(states)]

    APPLY(getattr(amp_C, name), flag(), [grads, params, *kept], *options(norm))

    assert all(torch.equal(p, q) for p, q in zip(models[0].parameters(), params, strict=True))


def test_sgd_does_nothing_after_an_overflow_and_fills_rounded_copies():
    params, copies = some(), some(torch.float16)
    options = (0.0, 0.0, 0.0, 1.0, False, True, False, 0.5)

    APPLY(amp_C.multi_tensor_sgd, torch.ones(1, dtype=torch.int32), [some(), params, some(), copies], *options)
    untouched = copy.deepcopy(params)
    APPLY(amp_C.multi_tensor_sgd, flag(), [some(), params, some(), copies], *options)

    assert torch.equal(some()[0], untouched[0])
    assert torch.allclose(0.5 * some()[0], params[0])
    assert torch.equal(params[0].half(), copies[0])


@pytest.mark.parametrize("name", ["multi_tensor_novograd", "multi_tensor_adagrad", "update_scale_hysteresis"])
def test_a_kernel_that_is_not_there_is_an_attribute_error(name):
    with pytest.raises(AttributeError):
        getattr(amp_C, name)


def test_flatten_and_back():
    tensors = some()
    flat = apex_C.flatten(tensors)

    assert (10,) == flat.shape
    assert all(torch.equal(a, b) for a, b in zip(tensors, apex_C.unflatten(flat, tensors), strict=True))


@pytest.mark.parametrize(
    ("activation", "act"), [("none", lambda x: x), ("relu", torch.relu), ("sigmoid", torch.sigmoid)]
)
@pytest.mark.parametrize("bias", [True, False])
def test_mlp_is_linear_layers_each_with_the_activation(activation, act, bias):
    mlp = apex.mlp.MLP([4, 5, 3], bias=bias, activation=activation)
    x = torch.randn(2, 4)
    y = x
    for i in range(2):
        y = act(F.linear(y, mlp.get_parameter(f"weight_{i}"), mlp.get_parameter(f"bias_{i}") if bias else None))

    assert torch.equal(y, mlp(x))
    assert (["weight_0", "bias_0", "weight_1", "bias_1"] if bias else ["weight_0", "weight_1"]) == list(
        mlp.state_dict()
    )


def test_mlp_begins_with_apexs_spread():
    torch.manual_seed(0)
    mlp = apex.mlp.MLP([400, 600])

    assert 0.02**0.5 * 0.3162 == pytest.approx(float(mlp.weight_0.detach().std()), rel=0.02)  # sqrt(2 / 1000)
    assert 600**-0.5 == pytest.approx(float(mlp.bias_0.detach().std()), rel=0.1)


def test_mlp_refuses_other_activations():
    with pytest.raises(TypeError, match="gelu"):
        apex.mlp.MLP([1, 2], activation="gelu")


def test_fused_dense_is_linear_and_gelu():
    one, two = apex.fused_dense.FusedDense(4, 3), apex.fused_dense.FusedDenseGeluDense(4, 6, 3)
    x = torch.randn(2, 4)

    assert torch.equal(F.linear(x, one.weight, one.bias), one(x))
    assert torch.equal(F.linear(F.gelu(F.linear(x, two.weight1, two.bias1)), two.weight2, two.bias2), two(x))
    assert ["weight1", "bias1", "weight2", "bias2"] == list(two.state_dict())
    assert all(param.isfinite().all() for param in two.parameters())


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_xentropy_is_cross_entropy_for_each_sample_and_nothing_for_padding(smoothing):
    logits = torch.randn(5, 7, requires_grad=True)
    labels = torch.tensor([1, 0, 3, 6, 0])
    loss = apex.contrib.xentropy.SoftmaxCrossEntropyLoss.apply(logits, labels, smoothing, 0)
    expected = F.cross_entropy(logits, labels, reduction="none", label_smoothing=smoothing) * (labels != 0)

    assert torch.allclose(expected, loss)
    assert torch.allclose(*(torch.autograd.grad(x.sum(), logits, retain_graph=True)[0] for x in (expected, loss)))


@pytest.mark.parametrize(("wide", "dtype"), [(False, torch.float16), (True, torch.float32)])
def test_xentropy_of_half_logits(wide, dtype):
    logits, labels = torch.randn(5, 7).half(), torch.tensor([1, 2, 3, 4, -1])
    loss = apex.contrib.xentropy.SoftmaxCrossEntropyLoss.apply(logits, labels, 0.0, -1, wide)

    assert dtype == loss.dtype
    assert 0 == loss[4]


def test_contrib_layer_norm_and_clip_are_torchs():
    x = torch.randn(3, 8)

    assert torch.equal(F.layer_norm(x, [8]), apex.contrib.layer_norm.FastLayerNorm(8)(x))
    assert apex.contrib.clip_grad.clip_grad_norm_ is nn.utils.clip_grad_norm_
