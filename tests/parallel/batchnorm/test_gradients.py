"""Derivatives of the whole thing, over ranks, against finite differences in float64."""

import torch
from ranks import run_ranks
from torch.autograd import Function, gradcheck, gradgradcheck

from lockstep.parallel.batchnorm.exchange import LayerPeers, add_up
from lockstep.parallel.batchnorm.function import batch_norm_over_ranks

PEERS = LayerPeers(None, 1, "test")


class Enter(Function):
    """What every rank has alike; its gradient is the sum over ranks."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return Leave.apply(gradient)


class Leave(Function):
    """The sum over ranks, which every rank then has alike."""

    @staticmethod
    def forward(ctx, x):
        return add_up(x.clone(), PEERS)

    @staticmethod
    def backward(ctx, gradient):
        return Enter.apply(gradient)


def joined(sizes, rank):
    """The layer over ranks as a function of the global batch, the same on every rank."""

    def function(x, weight, bias):
        x, weight, bias = Enter.apply(x), Enter.apply(weight), Enter.apply(bias)
        before, mine = sum(sizes[:rank]), sizes[rank]
        y = batch_norm_over_ranks(x[before : before + mine], weight, bias, None, eps=1e-2, group=None)
        rest = y.shape[1:]
        return Leave.apply(torch.cat((y.new_zeros(before, *rest), y, y.new_zeros(sum(sizes) - before - mine, *rest))))

    return function


def check(rank, sizes, rest):
    torch.manual_seed(0)
    x = torch.randn(sum(sizes), 2, *rest, dtype=torch.float64, requires_grad=True)
    weight, bias = (torch.randn(2, dtype=torch.float64, requires_grad=True) for _ in range(2))
    function = joined(sizes, rank)
    return gradcheck(function, (x, weight, bias)), gradgradcheck(function, (x, weight, bias), atol=1e-4)


def test_first_and_second_derivatives_over_three_ranks_one_of_them_empty():
    assert run_ranks(check, 3, (2, 0, 1), (2,)) == [(True, True)] * 3


def test_first_and_second_derivatives_of_two_values_on_two_ranks():
    assert run_ranks(check, 2, (1, 2), ()) == [(True, True)] * 2


def penalty(rank, layer_name):
    """A gradient penalty, as in WGAN-GP, with its gradients."""
    import lockstep

    torch.manual_seed(0)
    x = torch.randn(6, 3, 4, dtype=torch.float64)
    layer = {"ours": lockstep.SyncBatchNorm, "torch": torch.nn.BatchNorm1d}[layer_name](3, dtype=torch.float64)
    mine = (
        (x if layer_name == "torch" else x[: 2 if rank == 0 else None][0 if rank == 0 else 2 :])
        .clone()
        .requires_grad_()
    )
    (gradient,) = torch.autograd.grad(layer(mine).tanh().pow(2).sum(), mine, create_graph=True)
    gradient.pow(2).sum().backward()
    return mine.grad, layer.weight.grad


def test_a_gradient_penalty_gives_the_gradients_of_one_process():
    expected_x, expected_weight = penalty(0, "torch")
    (x0, w0), (x1, w1) = run_ranks(penalty, 2, "ours")

    torch.testing.assert_close(torch.cat((x0, x1)), expected_x)
    torch.testing.assert_close(w0 + w1, expected_weight)
