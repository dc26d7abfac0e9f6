"""Training with synchronised layers ends where one process ends."""

import pytest
import torch
from ranks import run_ranks
from torch import nn
from torch.nn.functional import cross_entropy

import lockstep


def digits_net():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(),
        nn.Conv2d(8, 16, 3, stride=2), nn.BatchNorm2d(16), nn.ReLU(),
        nn.Flatten(), nn.Linear(144, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 10),
    )  # fmt: skip


def train(rank, world_size, images, labels, with_ddp):
    """30 steps on 62 images each: 62 is 16 + 15 + 16 + 15 on four ranks."""
    model = digits_net()
    if world_size > 1:
        model = lockstep.convert_sync_batchnorm(model)
    run = nn.parallel.DistributedDataParallel(model) if with_ddp else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.5)
    for step in range(30):
        x, y = (whole[62 * (step % 28) :][:62] for whole in (images, labels))
        mine = slice(rank * 62 // world_size, (rank + 1) * 62 // world_size)
        optimizer.zero_grad()
        loss = cross_entropy(run(x[mine]), y[mine], reduction="sum") / 62
        (loss * world_size if with_ddp else loss).backward()  # DDP averages where the sum is wanted
        if world_size > 1 and not with_ddp:
            for parameter in model.parameters():
                torch.distributed.all_reduce(parameter.grad)
        optimizer.step()
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


@pytest.fixture(scope="module")
def digits():
    from sklearn.datasets import load_digits

    data = load_digits()
    return torch.tensor(data.images / 16, dtype=torch.float32).unsqueeze(1), torch.tensor(data.target)


@pytest.mark.parametrize("world_size", [2, 4])
def test_30_steps_on_digits_end_with_the_same_parameters_and_statistics(digits, world_size):
    expected = train(0, 1, *digits, False)
    for found in run_ranks(train, world_size, world_size, *digits, False):
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-5)


def test_b01_torchs_ddp_takes_the_converted_model_on_cpu(digits):
    """B01: torch's DDP refuses torch's layer there; with ours it ends where one process ends."""
    expected = train(0, 1, *digits, False)
    for found in run_ranks(train, 2, 2, *digits, True):
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-5)
