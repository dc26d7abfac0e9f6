"""What is copied to the other devices, and when: what changed, however it changed, and nothing else."""

import copy

import pytest
import torch
from torch import nn

import lockstep
from lockstep.parallel.one_process.copies import Copies
from lockstep.parallel.one_process.shipping import _TINY, differing, sums

SIZES = [1, 7, _TINY // 8 + 1, _TINY + 1, 1 << 18]  # values; around what is tiny in some dtype


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.BatchNorm1d(6), nn.Linear(6, 3)).double()


def moved(model):
    return [copies.moved for copies in model._keeper._copies]


def step(model, x):
    model(x).square().sum().backward()


def clamp(module):
    for parameter in module.parameters():
        parameter.data.clamp_(-0.01, 0.01)


def old_sgd(module):
    for parameter in module.parameters():
        parameter.data.add_(parameter.data, alpha=-0.1)


def new_sgd(module):
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(0.9)


def load(module):
    module.load_state_dict({key: value + 1 for key, value in module.state_dict().items()})


def replace(module):
    module[0].weight = nn.Parameter(module[0].weight.detach() * 2)


def swap_data(module):
    module[0].weight.data = module[0].weight.data * 2


def grow(module):
    torch.manual_seed(1)
    module.add_module("more", nn.Linear(3, 3).double())


def lower(module):
    module.float()


def one_value(module):
    module[3].weight.data[1, 2] += 1e-12


def write_buffer(module):
    module[2].running_mean.numpy()[:] += 1


@pytest.mark.parametrize(
    "change", [clamp, old_sgd, new_sgd, load, replace, swap_data, grow, lower, one_value, write_buffer]
)
def test_whatever_changes_the_module_reaches_the_replicas(change):
    plain = net().eval()
    module = copy.deepcopy(plain)
    model = lockstep.DataParallel(module, ["cpu"] * 3)
    x = torch.randn(7, 4, dtype=torch.float64)
    model(x)
    for changed in (module, plain):
        change(changed)
    x = x.to(next(plain.parameters()).dtype)

    torch.testing.assert_close(model(x), plain(x))
    assert all(moved(model))


def test_nothing_is_copied_while_nothing_changes():
    model = lockstep.DataParallel(net().eval(), ["cpu", "cpu"])
    x = torch.randn(6, 4, dtype=torch.float64)
    model(x)
    first = moved(model)
    step(model, x)  # gradients are no change
    step(model, x)

    assert (first, moved(model)) == ([9], [0])


def test_a_step_copies_what_it_changed():
    module = net().eval()
    module[0].requires_grad_(False)
    model = lockstep.DataParallel(module, ["cpu", "cpu"])
    optimizer = torch.optim.SGD([x for x in module.parameters() if x.requires_grad], lr=0.1)
    x = torch.randn(6, 4, dtype=torch.float64)
    for _ in range(2):
        step(model, x)
        optimizer.step()

    assert moved(model) == [4]


def test_fewer_devices_and_then_all_again():
    module = net().eval()
    model = lockstep.DataParallel(module, ["cpu"] * 3)
    x = torch.randn(6, 4, dtype=torch.float64)
    model(x)
    new_sgd(module)
    model(x[:1])

    torch.testing.assert_close(model(x), module(x))


def test_what_a_replica_writes_to_its_parameters_is_made_good():
    class Writes(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))
            self.register_buffer("count", torch.zeros(3))

        def forward(self, x):
            with torch.no_grad():
                self.count += 1
                if x[0, 0] == 1:  # in the second replica
                    self.weight += 1
            return x * self.weight + self.count

    module = Writes()
    model = lockstep.DataParallel(module, ["cpu", "cpu"])
    x = torch.tensor([[0.0] * 3, [1.0] * 3])
    found = [model(x).tolist() for _ in range(2)]

    assert found == [[[1.0] * 3, [3.0] * 3], [[2.0] * 3, [4.0] * 3]]
    assert (module.weight.tolist(), module.count.tolist()) == ([1.0] * 3, [2.0] * 3)


def test_two_forwards_with_batch_norm_and_then_the_backward():
    plain = net()
    module = copy.deepcopy(plain)
    model = lockstep.DataParallel(module, ["cpu"])
    both = lockstep.DataParallel(copy.deepcopy(plain), ["cpu", "cpu"])
    x = torch.randn(6, 4, dtype=torch.float64)
    for run in (plain, model, both):
        (run(x).square().sum() + run(x + 1).square().sum()).backward()

    torch.testing.assert_close(module[0].weight.grad, plain[0].weight.grad)
    assert both.module[0].weight.grad is not None


def test_a_graph_from_before_a_change_keeps_its_own_copies_or_is_refused_as_by_the_module():
    module = net().eval()
    model = lockstep.DataParallel(module, ["cpu", "cpu"])
    x = torch.randn(6, 4, dtype=torch.float64)
    early = model(x).sum()
    new_sgd(module)
    model(x)

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        early.backward()


def test_a_first_forward_in_inference_mode_does_not_spoil_training():
    plain = net().eval()
    module = copy.deepcopy(plain)
    model = lockstep.DataParallel(module, ["cpu", "cpu"])
    x = torch.randn(6, 4, dtype=torch.float64)
    with torch.inference_mode():
        assert model(x).is_inference()
    for run in (plain, model):
        step(run, x)

    torch.testing.assert_close(module[0].weight.grad, plain[0].weight.grad)


def test_a_module_made_in_inference_mode():
    with torch.inference_mode():
        module = net().eval()
        model = lockstep.DataParallel(module, ["cpu", "cpu"])
        x = torch.randn(6, 4, dtype=torch.float64)
        model(x)
        module[0].weight.add_(1)

        torch.testing.assert_close(model(x), module(x))


def test_sparse_buffers_and_sparse_gradients():
    class Graph(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("adjacency", torch.eye(4).to_sparse())
            self.embedding = nn.Embedding(5, 4, sparse=True)

        def forward(self, x):
            return torch.sparse.mm(self.adjacency, self.embedding(x).T).T

    torch.manual_seed(0)
    plain = Graph()
    module, x = copy.deepcopy(plain), torch.tensor([1, 2, 2, 4])
    model = lockstep.DataParallel(module, ["cpu", "cpu"])
    for run in (plain, model):
        for _ in range(2):
            run(x).square().sum().backward()

    assert module.embedding.weight.grad.is_sparse
    torch.testing.assert_close(module.embedding.weight.grad.to_dense(), plain.embedding.weight.grad.to_dense())


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.bool, torch.complex64])
def test_a_change_of_one_value_anywhere_is_seen(size, dtype):
    these = [torch.ones(3, dtype=dtype), torch.ones(size, dtype=dtype)]
    for place in {0, size // 2, size - 1}:
        those = [x.clone() for x in these]
        those[1].view(torch.uint8)[place * dtype.itemsize] ^= 1

        assert differing(these, sums([x.clone() for x in these])) == [False, False]
        assert differing(these, sums(those))[1]
        assert differing(these[1:], sums(those[1:])) == [True]


def test_small_values_that_change_places_are_seen():
    x = torch.arange(100.0)

    assert differing([x], sums([x.flip(0)])) == [True]


def test_what_is_gone_from_the_module_is_not_kept():
    copies, tensors = Copies(torch.device("cpu")), [torch.ones(2), torch.ones(3)]
    copies.refresh(tensors, [])

    assert list(copies.refresh(tensors[:1], [])) == [id(tensors[0])]


def test_strides_are_kept():
    module = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    copies = Copies(torch.device("cpu")).refresh(list(module.parameters()), [])

    assert copies[id(module.weight)].is_contiguous(memory_format=torch.channels_last)
