"""apex.optimizers against float64 references, torch's own and each other's checkpoints."""

import copy

import pytest
import torch
from faces import apex
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from tests.compat.traces import DTYPES, cases, index, load, near

FILES = {
    "fused-adam": "FusedAdam",
    "fused-sgd": "FusedSGD",
    "fused-lamb": "FusedLAMB",
    "fused-novograd": "FusedNovoGrad",
    "fused-adagrad": "FusedAdagrad",
}
CASES = [pytest.param(name, case, id=f"{name}: {case['case']}") for name in FILES for case in cases(name)]


def start(described):
    n, k = index(*described["shape"]), described["k"]
    value = 0.8 * torch.sin(0.37 * n + 0.013 * n * n + 0.6 * k + 0.2)
    return value * 0 if described["name"] == "zero" else value


def gradient(described, t):
    n, k = index(*described["shape"]), described["k"]
    value = 0.4 * (k + 1) * torch.sin(0.7 * n + 0.4 * k + 0.9 * t) + 0.05 * torch.cos(1.3 * n * t)
    return value * 0 if described["name"] == "still" else value


def build(described, arguments, dtype):
    """Parameters by name, and the groups they are in: the second with twice the lr and no decay."""
    params = {d["name"]: nn.Parameter(start(d).to(dtype)) for d in described}
    groups = [{"params": [params[d["name"]] for d in described if d["group"] == 0]}]
    groups.append({"params": [params[d["name"]] for d in described if d["group"] == 1]})
    groups[1] |= {"lr": 2 * arguments["lr"], "weight_decay": 0.0}
    return params, groups


@pytest.mark.parametrize(("name", "case"), CASES)
@pytest.mark.filterwarnings("ignore:apex.optimizers.FusedAdam decays")
def test_golden_fused_optimizers_give_the_recorded_parameters(name, case):
    described = load(name)["program"]["parameters"]
    dtype, tolerance = DTYPES[case["parameters_stored_as"]], case["tolerance"]
    params, groups = build(described, case["arguments"], dtype)
    optimizer = getattr(apex.optimizers, FILES[name])(groups, **case["arguments"])
    far = []
    recorded = {step["step"]: step["params"] for step in case["steps"]}

    for t in range(1, load(name)["program"]["steps"] + 1):
        for d in described:
            params[d["name"]].grad = gradient(d, t).to(dtype)
        optimizer.step()
        for key, values in recorded.get(t, {}).items():
            if not near(values, params[key].detach(), tolerance):
                far.append((t, key, values, params[key]))

    sums = {key: params[key].detach().double().sum() for key in params}
    assert [] == far
    assert all(
        near(case["sums_after_last_step"][key], sums[key], {"rtol": 1e-5, "atol": 1e-3 if dtype.itemsize < 4 else 5e-6})
        for key in sums
    )
    assert [] == wrong_state(case, params, optimizer, tolerance)


def wrong_state(case, params, optimizer, tolerance):
    wrong = []
    for key, recorded in case["state_after_last_step_first8"].items():
        for entry, values in recorded.items():
            if entry == "norm":
                group = next(g for g in optimizer.param_groups if any(p is params[key] for p in g["params"]))
                kept = group["exp_avg_sq"][0 if params[key].dtype.itemsize < 4 else 1]
                got = kept[next(i for i, p in enumerate(group["params"]) if p is params[key])]
            else:
                got = optimizer.state[params[key]][entry]
            if not near(values, got, {"rtol": max(1e-5, tolerance["rtol"]), "atol": max(2e-6, tolerance["atol"])}):
                wrong.append((key, entry, values, got))
    return wrong


def small_model(dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)).to(dtype)


def train(model, optimizer, steps, first=0):
    for t in range(first, first + steps):
        x = torch.sin(torch.arange(10.0) + t).reshape(2, 5)
        optimizer.zero_grad()
        model(x.to(next(model.parameters()).dtype)).float().square().sum().backward()
        optimizer.step()


def values(model):
    return torch.cat([param.detach().float().reshape(-1) for param in model.parameters()])


PAIRS = [
    (apex.optimizers.FusedAdam, {"weight_decay": 0.1}, torch.optim.AdamW, {"weight_decay": 0.1}),
    (apex.optimizers.FusedAdam, {"weight_decay": 0.1, "adam_w_mode": False}, torch.optim.Adam, {"weight_decay": 0.1}),
    (apex.optimizers.FusedSGD, {"lr": 0.1, "momentum": 0.9}, torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    (apex.optimizers.FusedAdagrad, {}, torch.optim.Adagrad, {}),
]
IDS = ["AdamW", "Adam", "SGD", "Adagrad"]


@pytest.mark.parametrize("pair", PAIRS, ids=IDS)
@pytest.mark.filterwarnings("ignore:apex.optimizers.FusedAdam decays")
def test_fused_optimizers_are_torchs_where_torch_has_the_same(pair):
    ours, arguments, theirs, more = pair
    models = [small_model(torch.float64) for _ in range(2)]

    train(models[0], ours(models[0].parameters(), **arguments), 6)
    train(models[1], theirs(models[1].parameters(), **more), 6)

    assert torch.allclose(values(models[0]), values(models[1]), rtol=1e-6)


@pytest.mark.parametrize("pair", PAIRS[:3], ids=IDS[:3])
@pytest.mark.filterwarnings("ignore:apex.optimizers.FusedAdam decays")
def test_a_checkpoint_of_torchs_optimizer_goes_on_in_the_fused_one(pair):
    ours, arguments, theirs, more = pair
    whole, half = small_model(), small_model()
    reference = theirs(whole.parameters(), **more)
    train(whole, reference, 3)
    half.load_state_dict(whole.state_dict())
    optimizer = ours(half.parameters(), **arguments)
    optimizer.load_state_dict(copy.deepcopy(reference.state_dict()))

    train(whole, reference, 3, first=3)
    train(half, optimizer, 3, first=3)

    assert torch.allclose(values(whole), values(half), rtol=1e-5, atol=1e-6)
    assert not any("step" in state for state in optimizer.state.values())


@pytest.mark.parametrize(
    "name", ["FusedAdam", "FusedSGD", "FusedLAMB", "FusedNovoGrad", "FusedAdagrad", "FusedMixedPrecisionLamb"]
)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_saving_and_going_on_changes_no_bit(name, dtype):
    arguments = {"lr": 0.1, "momentum": 0.9} if name == "FusedSGD" else {}
    whole, half = small_model(dtype), small_model(dtype)
    reference = getattr(apex.optimizers, name)(whole.parameters(), **arguments)
    train(whole, reference, 3)
    half.load_state_dict(whole.state_dict())
    optimizer = getattr(apex.optimizers, name)(half.parameters(), **arguments)
    optimizer.load_state_dict(copy.deepcopy(reference.state_dict()))

    train(whole, reference, 3, first=3)
    train(half, optimizer, 3, first=3)

    assert torch.equal(values(whole), values(half))


def test_state_of_half_parameters_is_float32_and_the_step_stands_in_the_group():
    model = small_model(torch.float16)
    optimizer = apex.optimizers.FusedAdam(model.parameters())

    train(model, optimizer, 2)

    state = next(iter(optimizer.state.values()))
    assert {"exp_avg": torch.float32, "exp_avg_sq": torch.float32} == {key: x.dtype for key, x in state.items()}
    assert 2 == optimizer.param_groups[0]["step"]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_half_step_is_the_float32_step_rounded_once(dtype):
    """Over one step, from the same values and gradients."""
    half, single = small_model(dtype), small_model(dtype).float()
    for p, q in zip(half.parameters(), single.parameters(), strict=True):
        p.grad = torch.sin(torch.arange(float(p.numel()))).reshape(p.shape).to(dtype)
        q.grad = p.grad.float()
    apex.optimizers.FusedAdam(half.parameters(), lr=0.01).step()
    torch.optim.AdamW(single.parameters(), lr=0.01, weight_decay=0.0).step()

    assert torch.equal(values(half), values(single.to(dtype)))


def test_master_weights_collect_what_half_rounds_away():
    halves = [nn.Parameter(torch.ones(3, dtype=torch.float16)) for _ in range(2)]
    plain = apex.optimizers.FusedAdam([halves[0]], lr=1e-4)
    masters = apex.optimizers.FusedAdam([halves[1]], lr=1e-4, capturable=True, master_weights=True)
    for _ in range(20):
        for param, optimizer in zip(halves, (plain, masters), strict=True):
            param.grad = torch.ones_like(param)
            optimizer.step()

    assert [1.0, 0.998] == [round(float(param.detach()[0]), 3) for param in halves]


def test_lamb_leaves_gradients_alone_and_reads_its_limit_from_the_defaults():
    param = nn.Parameter(torch.ones(4))
    optimizer = apex.optimizers.FusedLAMB([param], max_grad_norm=0.5)
    optimizer.param_groups[0]["max_grad_norm"] = 100.0
    param.grad = torch.tensor([3.0, 0.0, 4.0, 0.0])
    before = param.grad.clone()

    optimizer.step()

    moments = optimizer.state[param]["exp_avg"]
    assert torch.equal(before, param.grad)
    assert torch.allclose(moments, 0.1 * before / 10)  # 5 / 0.5


@pytest.mark.parametrize("bias_correction", [True, False])
@pytest.mark.parametrize("inside", [True, False])
def test_the_adam_of_before_august_2019_by_its_formula(bias_correction, inside):
    """m, v plain; p -= s * (m / denom + wd * p), eps not corrected, the norm clipped per group after unscaling."""
    n = torch.arange(6.0, dtype=torch.float64)
    p, g = torch.cos(n), 40 * torch.sin(n + 1)
    param = nn.Parameter(p.clone())
    optimizer = apex.contrib.optimizers.FusedAdam(
        [param],
        lr=0.1,
        bias_correction=bias_correction,
        eps=0.01,
        eps_inside_sqrt=inside,
        weight_decay=0.2,
        max_grad_norm=1.0,
    )
    m = v = torch.zeros(6, dtype=torch.float64)
    for t in range(1, 4):
        optimizer.step(grads=[g], scale=8.0)
        u = g / 8
        u = u / max(1.0, float((u.norm() + 1e-6) / 1.0))
        m, v = 0.9 * m + 0.1 * u, 0.999 * v + 0.001 * u * u
        denom = (v + 0.01).sqrt() if inside else v.sqrt() + 0.01
        s = 0.1 * ((1 - 0.999**t) ** 0.5 / (1 - 0.9**t) if bias_correction else 1)
        p = p - s * (m / denom + 0.2 * p)

    assert torch.allclose(p, param.detach(), rtol=1e-9)


def test_the_present_adam_takes_the_old_arguments_and_then_the_old_step():
    old = nn.Parameter(torch.ones(3))
    contrib = nn.Parameter(torch.ones(3))
    first = apex.optimizers.FusedAdam([old], lr=0.1, bias_correction=False, max_grad_norm=1.0)
    second = apex.contrib.optimizers.FusedAdam([contrib], lr=0.1, bias_correction=False, max_grad_norm=1.0)
    for param, optimizer in ((old, first), (contrib, second)):
        param.grad = torch.tensor([1.0, 2.0, 3.0])
        optimizer.step()

    assert torch.equal(old, contrib)


@pytest.mark.parametrize("more", [{"grads": []}, {"output_params": []}, {"scale": 1.0}, {"grad_norms": []}], ids=str)
def test_the_present_adam_refuses_the_arguments_of_the_old_step(more):
    optimizer = apex.optimizers.FusedAdam([nn.Parameter(torch.ones(1))])

    with pytest.raises(RuntimeError, match="FusedAdam has been updated"):
        optimizer.step(**more)


def test_adam_says_once_that_it_is_adamw():
    with pytest.warns(UserWarning, match="AdamW"):
        apex.optimizers.FusedAdam([nn.Parameter(torch.ones(1))], weight_decay=0.1)


@pytest.mark.parametrize("name", ["FusedAdam", "FusedLAMB", "FusedNovoGrad", "FusedMixedPrecisionLamb"])
def test_amsgrad_is_refused(name):
    with pytest.raises(RuntimeError, match="AMSGrad"):
        getattr(apex.optimizers, name)([nn.Parameter(torch.ones(1))], amsgrad=True)


@pytest.mark.parametrize("name", ["FusedAdam", "FusedSGD", "FusedLAMB", "FusedNovoGrad", "FusedAdagrad"])
def test_zero_grad_takes_its_argument_or_what_the_constructor_said(name):
    make = getattr(apex.optimizers, name)
    param = nn.Parameter(torch.ones(1))
    found = []
    for set_none in (True, False):
        optimizer = make([param], lr=0.1, set_grad_none=set_none)
        for to_none in (None, True, False):
            param.grad = torch.ones(1)
            optimizer.zero_grad() if to_none is None else optimizer.zero_grad(set_to_none=to_none)
            found.append(param.grad is None)

    assert [True, True, False, False, True, False] == found


@pytest.mark.parametrize("name", ["FusedAdam", "FusedSGD", "FusedLAMB", "FusedNovoGrad", "FusedAdagrad"])
def test_sparse_gradients_are_refused(name):
    embedding = nn.Embedding(4, 2, sparse=True)
    optimizer = getattr(apex.optimizers, name)(embedding.parameters(), lr=0.1)
    embedding(torch.tensor([1])).sum().backward()

    with pytest.raises(RuntimeError, match="sparse"):
        optimizer.step()


@given(
    st.lists(st.lists(st.integers(0, 3), max_size=3), min_size=1, max_size=5), st.sampled_from(sorted(FILES.values()))
)
def test_any_shapes_step_as_each_alone(shapes, name):
    """But for LAMB's common limit, switched off here: no parameter's step depends on the others."""
    arguments = {"lr": 0.1} | ({"max_grad_norm": 0.0} if name == "FusedLAMB" else {})
    together = [nn.Parameter(torch.ones(shape) + i) for i, shape in enumerate(shapes)]
    apart = [nn.Parameter(param.detach().clone()) for param in together]
    optimizers = [getattr(apex.optimizers, name)(together, **arguments)]
    optimizers += [getattr(apex.optimizers, name)([param], **arguments) for param in apart]
    for t in range(2):
        for param in (*together, *apart):
            param.grad = torch.cos(torch.arange(float(param.numel())) + t).reshape(param.shape)
        for optimizer in optimizers:
            optimizer.step()

    assert all(torch.allclose(p, q) for p, q in zip(together, apart, strict=True))
