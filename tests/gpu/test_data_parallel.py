"""DataParallel on GPUs, on one named twice where there is no second."""

import copy

import pytest
import torch
from torch import nn

import lockstep

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def devices():
    return [0, 1 % torch.cuda.device_count()]


def net(norm):
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3), norm(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 5)).double().cuda()


@pytest.mark.parametrize("kind", [lockstep.SyncBatchNorm, nn.Identity])
def test_training_equals_the_plain_module(kind):
    plain = net(nn.BatchNorm2d if kind is lockstep.SyncBatchNorm else kind)
    module = lockstep.convert_sync_batchnorm(copy.deepcopy(plain))
    model = lockstep.DataParallel(module, devices())
    optimizers = [torch.optim.SGD(x.parameters(), lr=0.1) for x in (plain, module)]
    for number in range(4):
        x = torch.randn(7 + number, 3, 8, 8, dtype=torch.float64)
        for run, optimizer in zip((plain, model), optimizers, strict=True):
            optimizer.zero_grad()
            run(x.cuda()).square().mean().backward()
            optimizer.step()

    torch.testing.assert_close(list(module.state_dict().values()), list(plain.state_dict().values()))


def test_the_loss_on_each_device_and_inputs_from_the_cpu():
    plain = net(nn.Identity)
    x, targets = torch.randn(7, 3, 8, 8, dtype=torch.float64), torch.randint(0, 5, (7,))
    model = lockstep.DataParallel(copy.deepcopy(plain), devices(), loss=nn.CrossEntropyLoss())

    torch.testing.assert_close(model(x, targets), nn.functional.cross_entropy(plain(x.cuda()), targets.cuda()))


def test_outputs_gathered_on_the_cpu_are_whole():
    plain, x = net(nn.Identity), torch.randn(64, 3, 8, 8, dtype=torch.float64)
    model = lockstep.DataParallel(copy.deepcopy(plain), devices(), output_device=-1)

    torch.testing.assert_close(model(x), plain(x.cuda()).cpu())


def test_the_callers_stream_is_the_replicas():
    seen = []

    class Streams(nn.Module):
        def forward(self, x):
            seen.append(torch.cuda.current_stream(x.device))
            return x

    stream = torch.cuda.Stream(0)
    with torch.cuda.stream(stream):
        lockstep.DataParallel(Streams(), [0, 0])(torch.ones(4, 2, device="cuda"))

    assert seen == [stream, stream]


def test_a_module_on_the_cpu_is_told_to_move():
    with pytest.raises(lockstep.UsageError, match=r"'weight' is on cpu.*model.to\('cuda:0'\)"):
        lockstep.DataParallel(nn.Linear(2, 2), [0, 0])(torch.ones(4, 2))
