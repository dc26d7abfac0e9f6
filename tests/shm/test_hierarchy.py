"""Shared memory within nodes, gloo between them: each collective against one process, and what goes wrong on some node.

Nodes here are ranks that were told so: what differs on real ones is tested in tests/nodes.
"""

import os
import signal
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from ranks import _context, run_ranks

import lockstep
from lockstep.shm.combine import combine
from lockstep.shm.nodewise import BLOCK

SHAPES = [(2, 2), (2, 1, 2), (3,)]
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool, torch.complex64, torch.uint32]


def on_nodes(rank, store, counts, function, args, timeout):
    """A rank of a world with so many ranks on each node."""
    node = next(n for n in range(len(counts)) if rank < sum(counts[: n + 1]))
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(sum(counts)), LOCAL_RANK=str(rank - sum(counts[:node])))
    os.environ.update(LOCAL_WORLD_SIZE=str(counts[node]), GROUP_RANK=str(node), GROUP_WORLD_SIZE=str(len(counts)))
    dist.init_process_group(
        "hierarchy",
        store=dist.FileStore(str(store), sum(counts)),
        rank=rank,
        world_size=sum(counts),
        timeout=timedelta(seconds=timeout),
    )
    return function(rank, *args)


def run_nodes(tmp_path, counts, function, *args, timeout=60.0):
    store = tmp_path / f"store{time.monotonic_ns()}"
    return run_ranks(on_nodes, sum(counts), store, counts, function, args, timeout, backend=None)


def data(rank, dtype, count):
    """What a rank brings: whole numbers, so that sums are exact in any order and dtype."""
    made = torch.Generator().manual_seed(rank)
    return torch.randint(0, 3, (count,), generator=made).to(dtype)


def every_collective(rank, dtypes, counts):
    size = dist.get_world_size()
    wrong = []
    for dtype in dtypes:
        for count in counts:
            everyone = [data(other, dtype, count) for other in range(size)]
            whole = [data(other, dtype, count * size) for other in range(size)]
            named = (str(dtype), count)

            x = everyone[rank].clone()
            dist.all_reduce(x)
            wrong += [("all_reduce", named)] * (not torch.equal(x, combine(everyone, "SUM")))
            for root in (0, size - 1):
                x = everyone[rank].clone()
                dist.broadcast(x, root)
                wrong += [("broadcast", root, named)] * (not torch.equal(x, everyone[root]))
            outs = [torch.empty(count, dtype=dtype) for _ in range(size)]
            dist.all_gather(outs, everyone[rank])
            wrong += [("all_gather", named)] * (not all(map(torch.equal, outs, everyone)))
            out = torch.empty(count, dtype=dtype)
            dist.reduce_scatter(out, list(whole[rank].chunk(size)) if count else [out] * size)
            expected = combine(whole, "SUM")[rank * count : (rank + 1) * count]
            wrong += [("reduce_scatter", named)] * (not torch.equal(out, expected))
            if count:
                out = torch.empty(count * size, dtype=dtype)
                dist.all_gather_into_tensor(out, everyone[rank])
                wrong += [("all_gather_into_tensor", named)] * (not torch.equal(out, torch.cat(everyone)))
                out = torch.empty(count, dtype=dtype)
                dist.reduce_scatter_tensor(out, whole[rank])
                wrong += [("reduce_scatter_tensor", named)] * (not torch.equal(out, expected))
            dist.barrier()
    return wrong


@pytest.mark.parametrize("counts", SHAPES, ids=str)
def test_every_collective_gives_what_one_process_computes(tmp_path, counts):
    # 64 float32 of each of four ranks fill a frame, 256 of one do.
    assert run_nodes(tmp_path, counts, every_collective, DTYPES, [0, 1, 5, 64, 65, 256, 257, 3001]) == [[]] * sum(
        counts
    )


@pytest.mark.parametrize("counts", [(2, 2), (2, 1, 2)], ids=str)
def test_what_goes_in_several_blocks_gives_the_same(tmp_path, counts):
    count = 2 * BLOCK // 4 + 7
    found = run_nodes(tmp_path, counts, every_collective, [torch.float32, torch.bfloat16], [count])

    assert found == [[]] * sum(counts)


def other_operations(rank):
    found = {}
    for name in ("PRODUCT", "MIN", "MAX", "AVG"):
        x = torch.tensor([rank + 1.0, -rank, 2.0])
        dist.all_reduce(x, getattr(dist.ReduceOp, name))
        found[name] = x.tolist()
    x = torch.full((700,), 60000.0, dtype=torch.float16)
    dist.all_reduce(x, dist.ReduceOp.AVG)
    bits = torch.tensor([1 << rank])
    dist.all_reduce(bits, dist.ReduceOp.BXOR)
    strided = torch.arange(6.0).view(2, 3).t()
    dist.all_reduce(strided)
    work = dist.all_reduce(later := torch.full((5000,), float(rank)), async_op=True)
    work.wait()
    return found, x.unique().tolist(), bits.item(), strided.tolist(), later.unique().tolist()


def test_other_operations_strides_and_asynchronous_calls(tmp_path):
    found = run_nodes(tmp_path, (2, 2), other_operations)

    assert found == [found[0]] * 4
    assert found[0] == (
        {"PRODUCT": [24.0, 0.0, 16.0], "MIN": [1.0, -3.0, 2.0], "MAX": [4.0, 0.0, 2.0], "AVG": [2.5, -1.5, 2.0]},
        [60000.0],
        15,
        [[0.0, 12.0], [4.0, 16.0], [8.0, 20.0]],
        [6.0],
    )


def by_gloo(rank):
    size = dist.get_world_size()
    x = torch.tensor([float(rank)])
    dist.reduce(x, 1)
    rows = [torch.empty(1) for _ in range(size)] if rank == 2 else None
    dist.gather(torch.tensor([float(rank)]), rows, dst=2)
    part = torch.empty(1)
    dist.scatter(part, [torch.tensor([10.0 * one]) for one in range(size)] if rank == 3 else None, src=3)
    got = torch.empty(1)
    work = dist.isend(torch.tensor([float(rank)]), (rank + 1) % size)
    dist.recv(got, (rank - 1) % size)
    work.wait()
    crossed = torch.empty(size)
    dist.all_to_all_single(crossed, torch.arange(size) + 10.0 * rank)
    group = dist.new_group([1, 2])
    y = torch.tensor([float(rank)])
    if rank in (1, 2):
        dist.all_reduce(y, group=group)
    return (
        x.item() if rank == 1 else None,
        rows and torch.cat(rows).tolist(),
        part.item(),
        got.item(),
        y.item(),
        crossed[0].item(),
    )


def test_messages_and_the_other_collectives_go_by_gloo_and_groups_of_some_ranks_work(tmp_path):
    found = run_nodes(tmp_path, (2, 2), by_gloo)

    assert found == [
        (None, None, 0.0, 3.0, 0.0, 0.0),
        (6.0, None, 10.0, 0.0, 3.0, 1.0),
        (None, [0.0, 1.0, 2.0, 3.0], 20.0, 1.0, 3.0, 2.0),
        (None, None, 30.0, 2.0, 3.0, 3.0),
    ]


def sums(rank, count):
    x = torch.randn(count, generator=torch.Generator().manual_seed(rank))
    results = []
    for _ in range(3):
        y = x.clone()
        dist.all_reduce(y)
        results.append(y)
    return [torch.equal(results[0], one) for one in results[1:]], results[0]


def test_the_order_of_summation_is_fixed_and_that_of_ranks_then_nodes(tmp_path):
    for count in (100, 5001):
        found = run_nodes(tmp_path, (2, 2, 1), sums, count)
        parts = [torch.randn(count, generator=torch.Generator().manual_seed(rank)) for rank in range(5)]
        expected = ((parts[0] + parts[1]) + (parts[2] + parts[3])) + parts[4]

        assert [same for same, _ in found] == [[True, True]] * 5
        assert all(torch.equal(row, expected) for _, row in found)


@given(st.lists(st.floats(-4, 4, width=16), min_size=1, max_size=9), st.sampled_from([torch.float16, torch.bfloat16]))
def test_half_precision_is_rounded_once(values, dtype):
    parts = [torch.tensor([value]).to(dtype) for value in values]

    assert torch.equal(combine(parts, "SUM"), torch.stack(parts).float().cumsum(0)[-1].to(dtype))


def scaled(rank):
    found = []
    for count in (3, 300):
        x = torch.full((count,), rank + 1.0)
        dist.all_reduce(x, dist._make_nccl_premul_sum(0.5))
        found.append(x.unique().tolist())
    return found


def test_a_sum_with_a_factor_has_it_once_for_each_rank(tmp_path):
    assert run_nodes(tmp_path, (2, 2), scaled) == [[[5.0], [5.0]]] * 4


def mismatch(rank, odd, many):
    said = ""
    try:
        if rank == odd:
            dist.all_reduce(torch.ones(9))
        else:
            dist.all_reduce(torch.ones(many))
    except lockstep.MismatchError as error:
        said = str(error)
    x = torch.ones(3)
    dist.all_reduce(x)
    return said, x.tolist()


@pytest.mark.parametrize(("odd", "many"), [(0, 8), (3, 3 * BLOCK)])
def test_one_rank_that_differs_is_named_on_every_rank_of_every_node(tmp_path, odd, many):
    found = run_nodes(tmp_path, (2, 2), mismatch, odd, many)

    calls = [f"rank {r} called all_reduce (sum) of {9 if r == odd else many} float32" for r in (odd, odd ^ 1)]
    for said, after in found:
        assert all(call in said for call in calls), said
        assert after == [4.0] * 3


def nodes_differ(rank, many):
    try:
        if rank < 2:
            dist.all_reduce(torch.ones(many))
        else:
            dist.broadcast(torch.ones(4), 2)
    except lockstep.MismatchError as error:
        x = torch.ones(3 * many)
        dist.all_reduce(x)
        return str(error), x.unique().tolist()
    return "", []


@pytest.mark.parametrize("many", [5, BLOCK])
def test_nodes_that_differ_are_named(tmp_path, many):
    for said, after in run_nodes(tmp_path, (2, 2), nodes_differ, many):
        assert f"rank 0 called all_reduce (sum) of {many} float32, rank 2 called broadcast of 4 float32 from 2" in said
        assert after == [4.0]


def one_stays_away(rank, absent, folder):
    done = folder / f"done{rank}"
    if rank == absent:
        while len(list(folder.glob("done*"))) < 3:
            time.sleep(0.02)
        return "", ""
    try:
        dist.all_reduce(torch.ones(4))
    except lockstep.LockstepError as error:
        first = (type(error).__name__, str(error))
    try:
        dist.barrier()
    except lockstep.LockstepError as error:
        second = str(error)
    done.touch()
    return (*first, "ended earlier" in second)


def test_a_rank_that_does_not_come_is_named_on_every_node(tmp_path):
    found = run_nodes(tmp_path, (2, 2), one_stays_away, 3, tmp_path, timeout=2.0)

    for kind, said, again in found[:3]:
        assert kind == "LateRankError"
        assert "rank 3 (pid " in said
        assert again


def survivors(rank):
    dist.barrier()  # all have connected
    if rank == 3:
        dist.destroy_process_group()
        return ""
    try:
        dist.all_reduce(torch.ones(4))
    except lockstep.LostRankError as error:
        return str(error)
    return ""


def one_is_killed(rank, folder):
    x = torch.ones(8 * BLOCK)
    try:
        for turn in range(1000):
            if rank == 3 and turn == 2:
                threading.Timer(0.01, os.kill, (os.getpid(), signal.SIGKILL)).start()
            dist.all_reduce(x, dist.ReduceOp.MAX)
    except lockstep.LostRankError as error:
        (folder / str(rank)).write_text(str(error))
    dist.destroy_process_group()


def test_a_rank_that_is_killed_while_blocks_are_on_their_way_is_noticed_on_every_node(tmp_path):
    ranks = [
        _context.Process(target=on_nodes, args=(rank, tmp_path / "store", (2, 2), one_is_killed, (tmp_path,), 60.0))
        for rank in range(4)
    ]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(60)
        rank.kill()

    assert [rank.exitcode for rank in ranks] == [0, 0, 0, -signal.SIGKILL]
    said = [(tmp_path / str(rank)).read_text() for rank in range(3)]
    assert [text.partition(": ")[0] for text in said] == [f"rank {rank} (node {rank // 2} of 2)" for rank in range(3)]
    assert f"rank 3 (pid {ranks[3].pid}) died" in said[2]
    assert all(f"rank 3 (pid {ranks[3].pid}) died" in text or "(ranks 2, 3) was lost" in text for text in said), said


def test_a_rank_that_left_is_named_on_every_node(tmp_path):
    found = run_nodes(tmp_path, (2, 2), survivors)

    assert all("rank 3 " in said and "left (destroy_process_group)" in said for said in found[:3]), found
