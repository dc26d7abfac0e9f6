"""What needs several ranks."""

import pytest
import torch
from ranks import run_ranks
from torch import nn

from lockstep.compat.rehearsal.install import install
from lockstep.compat.rehearsal.settings import Settings


def normalise(rank, without):
    """Torch's own layer on this rank's half of 8 values; the output, and the gradient of the input."""
    install(Settings(devices=2), leaving_out=without)
    torch.manual_seed(0)
    x = torch.randn(8, 3)[rank * 4 : rank * 4 + 4].cuda(rank).requires_grad_()
    y = nn.SyncBatchNorm(3).cuda(rank)(x)
    (y**3).sum().backward()
    return y.detach().cpu(), x.grad.cpu()


def test_torchs_synchronised_batch_norm_sees_the_global_batch():
    torch.manual_seed(0)
    x = torch.randn(8, 3, requires_grad=True)
    y = nn.BatchNorm1d(3)(x)
    (y**3).sum().backward()

    found = run_ranks(normalise, 2, ())

    torch.testing.assert_close(torch.cat([out for out, _ in found]), y.detach())
    torch.testing.assert_close(torch.cat([grad for _, grad in found]), x.grad)


def test_and_does_not_run_without_its_replacement():
    with pytest.raises(AssertionError, match="batch_norm_stats"):
        run_ranks(normalise, 2, ("torch.nn.SyncBatchNorm.forward",))
