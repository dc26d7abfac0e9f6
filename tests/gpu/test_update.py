"""Update on one CUDA device, where weights and losses stay on the device."""

import pytest
import torch
from torch import nn

import lockstep

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_masked_steps_equal_a_loop_by_hand(precision):
    device = lockstep.init(seed=0).device
    x = torch.randn(16, 8, device=device)
    y = torch.randint(4, (16,), device=device)
    mask = torch.arange(16, device=device) % 3 > 0
    model, other = nn.Linear(8, 4).to(device), nn.Linear(8, 4).to(device)
    other.load_state_dict(model.state_dict())
    update = lockstep.Update(model, torch.optim.SGD(model.parameters(), lr=0.1), precision=precision, clip_norm=1.0)
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    for _ in range(3):
        with update:
            update.backward(nn.functional.cross_entropy(model(x), y, reduction="none"), mask)
        optimizer.zero_grad()
        nn.functional.cross_entropy(other(x[mask]), y[mask]).backward()
        nn.utils.clip_grad_norm_(other.parameters(), 1.0)
        optimizer.step()

    tolerance = 1e-5 if precision == "fp32" else 2e-2
    torch.testing.assert_close(model.weight, other.weight, rtol=0, atol=tolerance)
    assert update.step_count == 3


def test_a_nan_is_reported_from_the_device():
    device = lockstep.init(seed=0).device
    model = nn.Linear(2, 1).to(device)
    update = lockstep.Update(model, torch.optim.SGD(model.parameters(), lr=0.1))

    with pytest.raises(lockstep.NotFiniteError, match="rank\\(s\\) 0 are NaN"), update:
        update.backward(model(torch.full((2, 2), float("nan"), device=device)))
