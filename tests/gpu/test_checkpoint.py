"""A run on a GPU is saved and goes on."""

import pytest
import torch
from torch import nn

import lockstep

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def test_c08_a_run_on_a_gpu_goes_on_to_the_bit_there_and_on_cpu(tmp_path):
    """Loading on every rank puts tensors on the device they were saved from (GPU 0 memory)."""

    def build(device):
        lockstep.init(device=device, seed=0)
        model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)).to(device)
        return model, torch.optim.Adam(model.parameters())

    def train(model, optimizer):
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(4, 8, device=next(model.parameters()).device)).square().sum().backward()
            optimizer.step()

    model, optimizer = build("cuda")
    values = {"x": torch.arange(5.0, device="cuda")}
    train(model, optimizer)
    lockstep.Checkpoint(tmp_path, model=model, optimizer=optimizer, values=values).save(wait=True)
    train(model, optimizer)
    again, other = build("cuda")
    found = {}
    assert lockstep.Checkpoint(tmp_path, model=again, optimizer=other, values=found).restore()
    train(again, other)

    assert torch.equal(model[0].weight, again[0].weight)
    assert found["x"].device == torch.device("cuda", torch.cuda.current_device())
