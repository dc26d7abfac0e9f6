import lockstep
import torch
from ranks import run_ranks
from torch import nn


def two_layers(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double()


def data(rank, size, rows=4):
    x = torch.randn(rows * size, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    return x[rank * rows : (rank + 1) * rows]


def plain(rank, size):
    model = lockstep.replicate(two_layers(rank))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(5):
        optimizer.zero_grad()
        model(data(rank, size)).square().mean().backward()
        optimizer.step()
    return [p.detach() for p in model.parameters()]


def test_plain():
    out = run_ranks(plain, 2, 2)
    ref = two_layers(0)
    optimizer = torch.optim.SGD(ref.parameters(), lr=0.1, momentum=0.9)
    for _ in range(5):
        optimizer.zero_grad()
        ref(data(0, 1, rows=8)).square().mean().backward()
        optimizer.step()
    for a, b, c in zip(out[0], out[1], ref.parameters()):
        assert torch.equal(a, b)
        torch.testing.assert_close(a, c.detach(), rtol=1e-12, atol=1e-12)
