"""apex.parallel.LARC against the recorded trace, and as an optimizer among others."""

import copy
import pickle

import pytest
import torch
from faces import apex
from torch import nn

from tests.compat.test_optimizers import build, gradient
from tests.compat.traces import cases, load, near

LARC = apex.parallel.LARC


@pytest.mark.parametrize("case", cases("larc-tensors"), ids=lambda case: case["case"])
def test_golden_larc(case):
    golden = load("larc-tensors")
    described = golden["program"]["parameters"]
    params, groups = build(described, case["SGD"], torch.float32)
    optimizer = LARC(torch.optim.SGD(groups, **case["SGD"]), **case["LARC"])
    recorded = {step["step"]: step for step in case["steps"]}
    wrong = []

    for t in range(1, golden["program"]["steps"] + 1):
        for d in described:
            params[d["name"]].grad = gradient(d, t).float()
        optimizer.step()
        for name in params if t in recorded else ():
            if not near(recorded[t]["params"][name], params[name].detach(), golden["tolerance"]):
                wrong.append((t, name, "params"))
            if not near(recorded[t]["grads_left_by_step"][name], params[name].grad, golden["tolerance"]):
                wrong.append((t, name, "grads"))

    assert [] == wrong
    assert case["weight_decay_of_the_groups_after_step"] == [group["weight_decay"] for group in optimizer.param_groups]


def simple(**arguments):
    param = nn.Parameter(torch.tensor([3.0, 4.0]))
    param.grad = torch.tensor([0.3, 0.4])
    return param, torch.optim.SGD([param], lr=0.1, weight_decay=0.5, **arguments)


def test_larc_is_an_optimizer_to_schedulers_and_shares_everything_with_the_one_inside():
    param, inner = simple(momentum=0.9)
    optimizer = LARC(inner)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.5**epoch)

    optimizer.step()
    scheduler.step()

    assert isinstance(optimizer, torch.optim.Optimizer)
    assert 0.05 == inner.param_groups[0]["lr"]
    assert optimizer.param_groups is inner.param_groups
    assert optimizer.state is inner.state
    assert optimizer.defaults is inner.defaults
    assert "momentum_buffer" in optimizer.state_dict()["state"][0]
    optimizer.zero_grad(set_to_none=True)
    assert param.grad is None


def test_larc_takes_a_closure_and_gives_its_loss():
    param, inner = simple()

    def closure():
        param.grad = torch.tensor([0.3, 0.4])
        return 7

    assert 7 == LARC(inner).step(closure)
    assert not torch.equal(torch.tensor([3.0, 4.0]), param.detach())


def test_a_step_that_raises_leaves_the_decay_where_it_was():
    _, inner = simple()
    optimizer = LARC(inner)
    inner.step = lambda: 1 / 0

    with pytest.raises(ZeroDivisionError):
        optimizer.step()

    assert 0.5 == inner.param_groups[0]["weight_decay"]


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["deepcopy", "pickle"])
def test_a_copy_steps_by_itself(copied):
    param, inner = simple()
    optimizer = LARC(inner, trust_coefficient=0.1)
    other = copied(optimizer)
    (twin,) = other.param_groups[0]["params"]
    twin.grad = torch.tensor([0.3, 0.4])

    other.step()

    assert torch.equal(torch.tensor([3.0, 4.0]), param.detach())
    assert not torch.equal(param, twin)
    assert 0.1 == other.trust_coefficient


def test_half_gradients_stay_half():
    param = nn.Parameter(torch.ones(3, dtype=torch.float16))
    param.grad = torch.ones_like(param)
    optimizer = LARC(torch.optim.SGD([param], lr=1.0, weight_decay=0.1))

    optimizer.step()

    assert torch.float16 == param.grad.dtype
    assert param.detach().isfinite().all()
