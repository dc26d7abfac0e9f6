"""`lockstep.DistributedDataParallel` behind torch's interface."""

import inspect
import pickle
import warnings

import pytest
import torch
import torch.distributed as dist
from parallel.cases import Net, Tool, share
from ranks import run_ranks
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import debugging_hooks, default_hooks, powerSGD_hook
from torch.distributed.algorithms.join import Join

import lockstep
from lockstep import DistributedDataParallel, UsageError


def mean(x):
    return x.square().mean()


def test_the_arguments_are_torchs():
    ours, torchs = (
        {name: parameter.default for name, parameter in inspect.signature(kind).parameters.items()}
        for kind in (DistributedDataParallel, nn.parallel.DistributedDataParallel)
    )
    if "forward_sync_buffers" not in torchs:  # torch 2.9 has not the last three, and writes True where None means it
        torchs |= {"broadcast_buffers": None, "bucket_cap_mb_list": None}
        torchs |= {"batched_grad_copy": False, "forward_sync_buffers": None}

    assert list(ours.items()) == list(torchs.items())


def what_a_wrapper_has(rank):
    module = nn.Linear(2, 1)
    model = DistributedDataParallel(
        module,
        find_unused_parameters=True,
        static_graph=True,
        gradient_as_bucket_view=True,
        broadcast_buffers=False,
        skip_all_reduce_unused_params=True,
        batched_grad_copy=True,
        check_reduction=True,
        bucket_cap_mb=3,
    )
    first = model.require_backward_grad_sync
    with model.no_sync():
        second = model.require_backward_grad_sync
    model.require_backward_grad_sync = False
    model(torch.full((1, 2), float(rank))).sum().backward()
    local = module.weight.grad.tolist()
    twin = pickle.loads(pickle.dumps(model))
    twin(torch.full((1, 2), float(rank))).sum().backward()
    return (
        model.module is module,
        list(model.state_dict()),
        (first, second, local),
        (model.device.type, model.device_ids, model.process_group is dist.group.WORLD),
        (model.find_unused_parameters, model.static_graph, model.broadcast_buffers),
        twin.module.weight.grad.tolist(),
    )


def test_a_wrapper_has_torchs_attributes_and_survives_pickling():
    for rank, found in enumerate(run_ranks(what_a_wrapper_has, 2)):
        assert found == (
            True,
            ["module.weight", "module.bias"],
            (True, False, [[float(rank)] * 2]),
            ("cpu", None, True),
            (True, True, False),
            [[0.5, 0.5]],
        )


def part_of_the_world(rank):
    pair = dist.new_group([1, 2])
    if rank == 0:
        return None
    model = DistributedDataParallel(nn.Linear(1, 1, bias=False), process_group=pair)
    model(torch.full((1, 1), float(rank))).sum().backward()
    return model.module.weight.grad.item()


def test_a_process_group_of_some_ranks():
    assert run_ranks(part_of_the_world, 3) == [None, 1.5, 1.5]


def group_of_one(rank):
    own = [dist.new_group([other]) for other in range(2)][rank]
    model = DistributedDataParallel(nn.Linear(1, 1, bias=False), process_group=own)
    x = torch.full((1, 1), float(rank))
    with model.no_sync(), lockstep.no_sync(model):
        model(x).sum().backward()
    lockstep.sync_gradients(model)
    lockstep.sync_buffers(model)
    return model.module.weight.grad.item()


def test_a_process_group_of_one_rank_has_nothing_to_average():
    assert run_ranks(group_of_one, 2) == [0.0, 1.0]


def ignored(rank):
    model = Net()
    model._ddp_params_and_buffers_to_ignore = ["b.weight"]
    model = DistributedDataParallel(model)
    mean(model(share(rank))).backward()
    return model.module.a.weight.grad, model.module.b.weight.grad


def test_parameters_that_the_module_says_to_ignore_stay_local():
    (a, b), (other_a, other_b) = run_ranks(ignored, 2)

    assert torch.equal(a, other_a)
    assert not torch.equal(b, other_b)


class Remembering(nn.Module):
    """Has a buffer of its own on each rank."""

    _ddp_params_and_buffers_to_ignore = ("mine",)

    def __init__(self, rank):
        super().__init__()
        self.layer = nn.Linear(2, 1)
        self.register_buffer("ours", torch.full((2,), float(rank)))
        self.register_buffer("mine", torch.full((rank + 1,), float(rank)))

    def forward(self, x):
        return self.layer(x)


def ignored_buffers(rank):
    model = DistributedDataParallel(Remembering(rank))
    with model.join():
        for _ in range(2 - rank):
            mean(model(torch.ones(1, 2))).backward()
    return model.module.ours.tolist(), model.module.mine.tolist()


def test_buffers_that_the_module_says_to_ignore_stay_local():
    assert run_ranks(ignored_buffers, 2) == [([0.0, 0.0], [0.0]), ([0.0, 0.0], [1.0, 1.0])]


class Graph(nn.Module):
    """Has a sparse buffer, as networks over graphs have."""

    def __init__(self, edge):
        super().__init__()
        self.layer = nn.Linear(2, 2)
        edges = torch.sparse_coo_tensor([[0, 1], [1, 0]], [1.0, edge], (2, 2), check_invariants=True)
        self.register_buffer("edges", edges)
        self.register_buffer("rows", edges.to_sparse_csr())

    def forward(self, x):
        return torch.sparse.mm(self.edges, self.layer(x))


def with_a_sparse_buffer(rank, edges):
    try:
        model = DistributedDataParallel(Graph(edges[rank]))
    except lockstep.MismatchError as error:
        return str(error)
    check = lockstep.check_in_step(model.module, every=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with model.join():
        for _ in range(2 - rank):
            mean(model(torch.ones(2, 2))).backward()
    optimizer.step()
    lockstep.sync_buffers(model)
    check.remove()
    return model.module.edges.to_dense().tolist()


@pytest.mark.filterwarnings("ignore:Sparse")
def test_sparse_buffers_stay_as_they_are_and_must_be_built_alike():
    alike, others = (run_ranks(with_a_sparse_buffer, 2, edges) for edges in ([2.0, 2.0], [2.0, 3.0]))

    assert alike == [[[0.0, 1.0], [2.0, 0.0]]] * 2
    assert others[1].startswith("rank 1: a torch.sparse_coo buffer of shape (2, 2) has other entries on rank 1 than on")


def flagged(rank, flag):
    torch.manual_seed(0)
    model = DistributedDataParallel(Net(), find_unused_parameters=flag)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(3):
            model.zero_grad()
            mean(model(share(rank, step), "ac" if step == rank else "abc")).backward()
    return [p.grad for p in model.parameters()], [str(w.message) for w in caught]


def test_g06_unused_parameters_need_no_flag_and_with_it_nothing_is_searched_or_warned_of():
    without, with_flag = (run_ranks(flagged, 2, flag)[0] for flag in (False, True))

    assert all(torch.equal(a, b) for a, b in zip(without[0], with_flag[0], strict=True))
    assert without[1] == with_flag[1] == []


def hooked(rank, name, steps):
    torch.manual_seed(0)
    model = DistributedDataParallel(Net().float(), bucket_cap_mb_list=[1e-4])
    state, hook = {
        "allreduce": lambda: (None, default_hooks.allreduce_hook),
        "fp16": lambda: (None, default_hooks.fp16_compress_hook),
        "bf16": lambda: (None, default_hooks.bf16_compress_hook),
        "fp16 around": lambda: (None, default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook)),
        "noop": lambda: (None, debugging_hooks.noop_hook),
        "power": lambda: (
            powerSGD_hook.PowerSGDState(None, 5, start_powerSGD_iter=2, min_compression_rate=0.1),
            powerSGD_hook.powerSGD_hook,
        ),
    }[name]()
    model.register_comm_hook(state, hook)
    for step in range(steps):
        model.zero_grad()
        mean(model(share(rank, step).float(), "ac" if rank else "abc")).backward()
    return [p.grad for p in model.parameters()]


@pytest.mark.parametrize(
    ("name", "within"), [("allreduce", 1e-6), ("fp16", 1e-3), ("bf16", 1e-2), ("fp16 around", 1e-3), ("power", 1e-5)]
)
def test_torchs_communication_hooks_run_unchanged(name, within):
    exact = Net().float()
    Tool(range(2)).loss(lambda number, x: mean(exact(x.float(), "ac" if number else "abc")), 3).backward()
    first, second = run_ranks(hooked, 2, name, 4)

    for a, b, p in zip(first, second, exact.parameters(), strict=True):
        assert torch.equal(a, b)
        torch.testing.assert_close(a, p.grad, rtol=within, atol=within)


def test_the_hook_that_sends_nothing_leaves_gradients_local():
    first, second = run_ranks(hooked, 2, "noop", 1)

    assert not torch.equal(first[0], second[0])


def two_hooks(rank):
    model = DistributedDataParallel(nn.Linear(1, 1))
    model.register_comm_hook(None, default_hooks.allreduce_hook)
    found = []
    for hook in (default_hooks.allreduce_hook, "hook"):
        try:
            model.register_comm_hook(None, hook)
        except UsageError as error:
            found.append(str(error))
    return found


def test_a_second_hook_and_one_that_cannot_be_called_are_refused():
    for second, no_function in run_ranks(two_hooks, 2):
        assert "already" in second
        assert "function" in no_function


def uneven(rank, divide):
    model = DistributedDataParallel(nn.Sequential(nn.Linear(1, 1, bias=False), nn.BatchNorm1d(1, affine=False)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    found = []
    with model.join() if divide is None else model.join(divide_by_initial_world_size=divide):
        for step in range(2 + 2 * (rank == 0)):
            optimizer.zero_grad()
            (model.module[0](torch.ones(1, 1)) * 2).sum().backward() if step < 0 else None
            loss = model.module[0](torch.full((1, 1), 2.0)).sum() + 0 * model(torch.randn(3, 1)).sum()
            loss.backward()
            optimizer.step()
            found.append(model.module[0].weight.grad.item())
    return found, model.module[1].num_batches_tracked.item()


def test_g17_gradients_keep_their_size_when_ranks_run_out_of_data():
    (long, tracked), (short, also) = run_ranks(uneven, 2, None)

    assert long == pytest.approx([2.0] * 4)
    assert short == pytest.approx([2.0] * 2)
    assert tracked == also


def test_g17_or_are_divided_by_all_ranks_as_torch_does_if_wanted():
    (long, _), _ = run_ranks(uneven, 2, True)

    assert long == pytest.approx([2.0, 2.0, 1.0, 1.0])


def trained_unevenly(rank):
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        with Join([model]):
            for step in range(1 + rank):
                optimizer.zero_grad()
                model(torch.full((1, 2), float(rank + step))).sum().backward()
                optimizer.step()
    return [p.detach() for p in model.parameters()]


def test_all_ranks_have_the_same_model_after_an_uneven_epoch_and_go_on():
    first, *others = run_ranks(trained_unevenly, 3)

    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


def statistics(rank, how):
    model = nn.BatchNorm1d(1).double()
    lockstep.replicate(model, sync_batchnorm=False)
    model.momentum = None  # the running statistics are plain averages over batches
    model((rank * 10 + torch.arange(4.0, dtype=torch.float64)).reshape(4, 1))
    lockstep.sync_buffers(model, how=how)
    return model.running_mean.item(), model.running_var.item(), model.num_batches_tracked.item()


def test_b07_running_statistics_of_all_ranks_together():
    samples = torch.cat([10.0 * rank + torch.arange(4.0) for rank in range(2)])
    found = run_ranks(statistics, 2, "mean")

    # Each rank's variance is that of a sample (divided by 3), the one of the means that of a population.
    assert found == [(samples.mean().item(), 5 / 3 + 25.0, 1)] * 2


def test_b07_or_those_of_rank_0():
    assert run_ranks(statistics, 2, "first") == [(1.5, 5 / 3, 1)] * 2


def statistics_of_samples(rank):
    model = lockstep.replicate(nn.InstanceNorm1d(1, track_running_stats=True, momentum=1.0).double())
    model((1 + rank) * torch.arange(4.0, dtype=torch.float64).reshape(1, 1, 4))
    lockstep.sync_buffers(model)
    return model.running_mean.item(), model.running_var.item()


def test_b07_instance_norms_statistics_are_means_over_samples():
    """It takes each sample's own variance: what lies between samples is no part of it."""
    assert run_ranks(statistics_of_samples, 2) == [(1.5 * 1.5, 5 / 3 * (1 + 4) / 2)] * 2


def buffers_before_forward(rank, flag):
    model = nn.BatchNorm1d(1)
    model = DistributedDataParallel(model, forward_sync_buffers=flag)
    for _ in range(2):
        model(torch.tensor([[0.0 + rank], [2.0 + rank]]))
    return model.module.running_mean.item()


def test_buffers_are_rank_0s_before_each_forward_as_with_torch():
    on, off = run_ranks(buffers_before_forward, 2, None), run_ranks(buffers_before_forward, 2, False)

    assert on == pytest.approx([0.19, 0.09 + 0.2])
    assert off == pytest.approx([0.19, 0.38])
