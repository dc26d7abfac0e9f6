"""What people run on a process group, unchanged: DDP, FSDP2, checkpoints, object and functional collectives."""

import copy

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.checkpoint as checkpoint
import torchmetrics
from ranks import run_ranks
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import lockstep


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1)).double()


def data():
    numbers = torch.Generator().manual_seed(1)
    return torch.randn(12, 8, generator=numbers).double(), torch.randn(12, 1, generator=numbers).double()


def train(model, x, y, steps=3):
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(steps):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
    return model


def weights(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def alone():
    return weights(train(network(), *data()))


def share(rank):
    size = dist.get_world_size()
    return [part[rank * 12 // size : (rank + 1) * 12 // size] for part in data()]


def ddp(rank, bucket_mb, hook):
    model = DistributedDataParallel(network(), bucket_cap_mb=bucket_mb)
    if hook:
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

        model.register_comm_hook(None, allreduce_hook)
    return weights(train(model, *share(rank)))


@pytest.mark.parametrize(("bucket_mb", "hook"), [(0.001, False), (25, True)], ids=["many buckets", "python hook"])
def test_ddp_trains_as_one_process(bucket_mb, hook):
    for mine in run_ranks(ddp, 2, bucket_mb, hook, backend="shm"):
        torch.testing.assert_close(mine, alone())


def words():
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(20, 6, sparse=True), nn.Flatten(), nn.Linear(18, 1)).double()


def train_words(model, mine):
    numbers = torch.Generator().manual_seed(1)
    x, y = torch.randint(20, (12, 3), generator=numbers)[mine], torch.randn(12, 1, generator=numbers).double()[mine]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
    return weights(model)


def ddp_on_words(rank):
    return train_words(DistributedDataParallel(words()), slice(rank * 6, rank * 6 + 6))


def test_ddp_sums_sparse_gradients():
    for mine in run_ranks(ddp_on_words, 2, backend="shm"):
        torch.testing.assert_close(mine, train_words(words(), slice(12)))


def ddp_that_fails(rank):
    model = DistributedDataParallel(network())
    x, y = share(rank)
    loss = nn.functional.mse_loss(model(x), y)
    if rank == 1:
        dist.all_reduce(torch.ones(3))
        return None
    with pytest.raises(RuntimeError) as caught:
        loss.backward()
    return str(caught.value)


def test_an_error_in_ddp_keeps_its_words():
    def texts():
        try:
            return run_ranks(ddp_that_fails, 2, backend="shm")
        except AssertionError as error:  # rank 1 raises
            return [str(error)]

    assert any("the ranks brought different calls" in text for text in texts() if text)


def fsdp(rank, folder):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = network()
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    train(model, *share(rank))
    optimizer = torch.optim.Adam(model.parameters())
    state, _ = get_state_dict(model, optimizer)
    checkpoint.save(state, checkpoint_id=folder)
    saved = copy.deepcopy(state)
    for value in state.values():
        value.to_local().zero_() if hasattr(value, "to_local") else value.zero_()
    checkpoint.load(state, checkpoint_id=folder)
    same = all(torch.equal(state[name].full_tensor(), saved[name].full_tensor()) for name in saved)
    whole = torch.cat([p.full_tensor().detach().flatten() for p in model.parameters()])
    return same, whole


def test_fsdp2_and_checkpoints(tmp_path):
    for same, whole in run_ranks(fsdp, 2, str(tmp_path), backend="shm"):
        assert same
        torch.testing.assert_close(whole, alone())


def objects(rank):
    size = dist.get_world_size()
    everyone, some, one = [None] * size, ["words", {"k": torch.ones(2)}] if rank == 0 else [None, None], [None]
    dist.all_gather_object(everyone, {"rank": rank, "pad": "x" * 1000 * rank})
    dist.broadcast_object_list(some, 0)
    dist.scatter_object_list(one, [f"for {r}" for r in range(size)] if rank == 0 else None, 0)
    gathered = [None] * size if rank == 1 else None
    dist.gather_object(rank, gathered, dst=1)
    if rank == 0:
        dist.send_object_list(["by post"], 1)
    elif rank == 1:
        got = [None]
        dist.recv_object_list(got, 0)
        assert got == ["by post"]
    return [row["rank"] for row in everyone], some[0], one[0], gathered


def test_object_collectives():
    assert [([0, 1, 2], "words", f"for {rank}", [0, 1, 2] if rank == 1 else None) for rank in range(3)] == run_ranks(
        objects, 3, backend="shm"
    )


def functionals(rank):
    group, x = dist.group.WORLD, torch.arange(4.0) + rank
    return (
        functional.all_reduce(x, "sum", group).tolist(),
        functional.all_gather_tensor(x, 0, group).tolist(),
        functional.reduce_scatter_tensor(x, "avg", 0, group).tolist(),
        functional.all_to_all_single(x, [2, 2], [2, 2], group).tolist(),
        functional.broadcast(x, 1, group).tolist(),
        [y.tolist() for y in functional.all_reduce_coalesced([x, x], "max", group)],
    )


def test_functional_collectives():
    first, second = run_ranks(functionals, 2, backend="shm")

    total, gathered = [1.0, 3.0, 5.0, 7.0], [0.0, 1.0, 2.0, 3.0, 1.0, 2.0, 3.0, 4.0]
    last = [1.0, 2.0, 3.0, 4.0]
    assert (total, gathered, [0.5, 1.5], [0.0, 1.0, 1.0, 2.0], last, [last, last]) == first
    assert (total, gathered, [2.5, 3.5], [2.0, 3.0, 3.0, 4.0], last, [last, last]) == second


def metric(rank):
    accuracy = torchmetrics.classification.MulticlassAccuracy(3, average="micro")
    spearman = torchmetrics.SpearmanCorrCoef()
    targets, guesses = torch.tensor([0, 1, 2, 0, 1]), torch.tensor([0, 1, 1, 0, 2])
    mine = slice(0, 2) if rank == 0 else slice(2, 5)
    accuracy.update(guesses[mine], targets[mine])
    spearman.update(guesses[mine].float(), targets[mine].float())
    return accuracy.compute().item(), spearman.compute().item()


def test_torchmetrics_counts_every_sample_once():
    targets, guesses = torch.tensor([0, 1, 2, 0, 1]), torch.tensor([0, 1, 1, 0, 2])
    expected = torchmetrics.functional.spearman_corrcoef(guesses.float(), targets.float()).item()

    for accuracy, correlation in run_ranks(metric, 2, backend="shm"):
        assert pytest.approx(3 / 5) == accuracy
        assert pytest.approx(expected) == correlation


def sub_groups(rank):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rows", "columns"))
    sums = []
    for name in ("rows", "columns"):
        x = torch.tensor([float(rank)])
        dist.all_reduce(x, group=mesh.get_group(name))
        sums.append(x.item())
    pair = dist.new_group([3, 1], backend="shm")
    if rank in (1, 3):
        x = torch.tensor([float(rank)])
        dist.broadcast(x, 3, group=pair)
        sums.append(x.item())
        dist.destroy_process_group(pair)
    return sums


def test_sub_groups_and_meshes():
    assert run_ranks(sub_groups, 4, backend="shm") == [[2.0, 1.0], [4.0, 1.0, 3.0], [2.0, 5.0], [4.0, 5.0, 3.0]]


def two_backends(rank):
    x = torch.ones(2)
    dist.all_reduce(x)
    kind = type(dist.group.WORLD._get_backend(torch.device("cuda"))).__name__
    return x.tolist(), kind, sorted(device.type for device in dist.group.WORLD._device_types)


def test_another_device_keeps_its_own_backend():
    """Of CUDA only what can be had without: the group makes the backend that was named for it."""
    assert (
        run_ranks(two_backends, 2, backend="cpu:shm,cuda:gloo")
        == [([2.0, 2.0], "ProcessGroupGloo", ["cpu", "cuda"])] * 2
    )


def coalesced(rank):
    a, b = torch.ones(3), torch.ones(2)
    with dist._coalescing_manager(async_ops=True) as manager:
        dist.all_reduce(a)
        dist.all_reduce(b)
    manager.wait()
    ops = [
        dist.P2POp(dist.isend, torch.full((100_000,), float(rank)), 1 - rank),
        dist.P2POp(dist.irecv, big := torch.empty(100_000), 1 - rank),
    ]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    return a.tolist(), b.tolist(), big.unique().item()


def test_coalesced_calls_and_batches():
    assert [([2.0] * 3, [2.0] * 2, 1.0 - rank) for rank in (0, 1)] == run_ranks(coalesced, 2, backend="shm")


def of_several_dtypes(rank):
    dtypes = (torch.float32, torch.int64, torch.bfloat16, torch.float64)
    sums, parts = ([torch.full((n,), 1 + rank, dtype=dtype) for dtype in dtypes] for n in (3, 1))
    with dist._coalescing_manager():
        for x in sums:
            dist.all_reduce(x)
    with dist._coalescing_manager():
        for out, dtype in zip(parts, dtypes, strict=True):
            dist.reduce_scatter_tensor(out, torch.full((2,), 1 + rank, dtype=dtype))
    return [x.tolist() for x in sums], [x.tolist() for x in parts]


def test_coalesced_calls_may_have_several_dtypes():
    assert run_ranks(of_several_dtypes, 2, backend="shm") == [([[3.0] * 3] * 4, [[3.0]] * 4)] * 2


def started_by_init(rank):
    world = lockstep.init(device="cpu")
    return world.size, dist.get_backend()


def test_the_group_of_a_script_is_adopted():
    assert run_ranks(started_by_init, 2, backend="shm") == [(2, "shm")] * 2
