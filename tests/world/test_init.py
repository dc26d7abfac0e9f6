import os
import random
import socket
import subprocess
import sys

import numpy as np
import pytest
import torch
import torch.distributed as dist
from meeting import agent_store, run_launched
from ranks import run_ranks

import lockstep
from lockstep.world import current
from lockstep.world.world import seat


def facts(world):
    return (world.rank, world.size, world.local_rank, world.local_size, world.node, world.nodes, str(world.device))


def init_and_tell(rank):
    world = lockstep.init(device="cpu")
    world.barrier()
    return facts(world), dist.get_backend(), current() is world


def test_ranks_find_their_world_and_each_other_from_the_environment():
    results = run_launched(init_and_tell, 3)

    assert [place for place, _, _ in results] == [(r, 3, r, 3, 0, 1, "cpu") for r in range(3)]
    assert {same for _, _, same in results} == {True}


def init_alone(rank):
    world = lockstep.init(device="cpu", seed=1)
    world.barrier()
    return facts(world), dist.is_initialized(), lockstep.total(2), lockstep.gather(torch.arange(2)).tolist()


def test_alone_nothing_needs_a_process_group():
    assert run_ranks(init_alone, 1, backend=None) == [((0, 1, 0, 1, 0, 1, "cpu"), False, 2, [0, 1])]


def init_in_a_group(rank):
    world = lockstep.init(device="cpu")
    return facts(world), lockstep.total(1)


def test_a_process_group_that_the_script_made_is_adopted():
    assert run_ranks(init_in_a_group, 2) == [((r, 2, r, 2, 0, 1, "cpu"), 2) for r in range(2)]


def test_ranks_of_an_adopted_group_are_seated_by_their_hosts():
    places = [seat(rank, hosts=[5, 8, 5, 5, 8]) for rank in range(5)]

    assert [(p.node, p.local_rank, p.local_size, p.nodes) for p in places] == [
        (0, 0, 3, 2),
        (1, 0, 2, 2),
        (0, 1, 3, 2),
        (0, 2, 3, 2),
        (1, 1, 2, 2),
    ]


def init_late(rank):
    try:
        lockstep.init(device="cpu", timeout=2)
    except lockstep.LateRankError as error:
        return str(error)


def test_a_rank_that_never_comes_is_named():
    results = run_launched(init_late, 4, missing=(1, 3))

    assert "rank 0 of 4: rank(s) 1, 3 did not come within 2 s" in results[0]
    assert "rank 2 of 4: rank(s) 1, 3 did not come within 2 s" in results[2]


def keep_the_store(rank):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    os.environ.update(RANK="0", WORLD_SIZE="3", LOCAL_RANK="0", LOCAL_WORLD_SIZE="3", MASTER_ADDR="127.0.0.1")
    os.environ.update(MASTER_PORT=str(port))
    return init_late(rank)


def test_rank_0_that_keeps_the_store_itself_names_who_is_missing_too():
    """Under Slurm or MPI there is no launcher that keeps it; torch's store says how many came."""
    (said,) = run_ranks(keep_the_store, 1, backend=None)

    assert said.startswith("rank 0 of 3: rank(s) 1, 2 did not come within 2 s")


def init_nowhere(rank):
    os.environ.update(RANK="1", WORLD_SIZE="2", LOCAL_RANK="1", LOCAL_WORLD_SIZE="2", MASTER_ADDR="127.0.0.1")
    os.environ.update(MASTER_PORT="9")  # discard: nobody answers there
    try:
        lockstep.init(device="cpu", timeout=2)
    except lockstep.LateRankError as error:
        return str(error)


def test_a_master_that_does_not_answer_is_named_with_its_address():
    (message,) = run_ranks(init_nowhere, 1, backend=None)

    assert "rank 1 of 2: no answer from rank 0 within 2 s at 127.0.0.1:9" in message


def draw():
    return random.random(), float(np.random.rand()), float(torch.rand(()))


def draw_before_and_after_parting(rank, seed):
    world = lockstep.init(device="cpu", seed=seed)
    together = draw()
    world.part_ways()
    apart = draw()
    world.part_ways()
    return together, apart, draw()


def test_r02_ranks_draw_alike_until_training_begins_and_differently_from_then_on():
    """torch.manual_seed(0) on every rank gives every rank the same dropout masks."""
    first, second, third = run_launched(draw_before_and_after_parting, 3, 7)

    assert first[0] == second[0] == third[0]
    assert len({x for result in (first, second, third) for x in result[1]}) == 9


def test_rank_0_draws_what_it_would_draw_alone():
    launched = run_launched(draw_before_and_after_parting, 2, 7)

    assert launched[0] == run_ranks(draw_before_and_after_parting, 1, 7, backend=None)[0]


def test_parting_twice_does_not_rewind_the_random_numbers():
    result = run_launched(draw_before_and_after_parting, 2, 7)[1]

    assert result[1] != result[2]


def init_without_a_seed(rank, own_seed):
    if own_seed is not None:
        torch.manual_seed(own_seed)
    world = lockstep.init(device="cpu")
    return world.seed, float(torch.rand(()))


def test_without_a_seed_all_ranks_take_rank_0s():
    results = run_launched(init_without_a_seed, 3, None)

    assert len(set(results)) == 1


def test_without_a_seed_the_scripts_own_one_stays():
    torch_alone = float(torch.rand((), generator=torch.Generator().manual_seed(11)))

    assert run_launched(init_without_a_seed, 2, 11) == [(11, torch_alone)] * 2


def init_without_a_seed_for_numpy(rank, python_seeded):
    torch.manual_seed(11)
    torch.rand(3)
    random.seed(5 if python_seeded else rank)
    np.random.seed(rank)
    lockstep.init(device="cpu")
    return random.random(), float(np.random.rand()), float(torch.rand(()))


@pytest.mark.parametrize("python_seeded", [False, True])
def test_without_a_seed_splits_by_python_and_numpy_are_alike_too(python_seeded):
    """A split by numpy that differs between ranks trains each on what the others validate with, without a word."""
    first, second = run_launched(init_without_a_seed_for_numpy, 2, python_seeded)
    torchs = torch.rand(4, generator=torch.Generator().manual_seed(11))[3]

    assert first == second
    assert first[2] == float(torchs)
    assert (first[0] == random.Random(5).random()) == python_seeded


def init_with_seed_of_rank(rank):
    try:
        lockstep.init(device="cpu", seed=rank)
    except lockstep.MismatchError as error:
        return str(error)


def test_different_seeds_raise_on_every_rank():
    results = run_launched(init_with_seed_of_rank, 2)

    assert [f"rank {r} of 2: lockstep.init(seed={r})" in results[r] for r in range(2)] == [True, True]


def total_without_init(rank):
    try:
        lockstep.total(1)
    except lockstep.UsageError as error:
        return str(error)


def test_a_collective_before_init_says_what_to_call():
    assert ["lockstep.init()" in message for message in run_launched(total_without_init, 2)] == [True, True]


SCRIPT = """
import lockstep
world = lockstep.init(device="cpu")
world.print("printed by", world.rank)
{end}
"""


@pytest.mark.parametrize(("end", "code"), [("", 0), ("raise SystemExit(3)", 3), ("1 / 0", 1)])
def test_a_process_leaves_cleanly_after_the_end_and_after_an_exception(end, code, tmp_path):
    with agent_store() as environ:
        script = tmp_path / "script.py"
        script.write_text(SCRIPT.format(end=end))
        ranks = [
            subprocess.Popen(
                [sys.executable, script],
                env={**os.environ, **environ, "RANK": str(r), "WORLD_SIZE": "2", "LOCAL_RANK": str(r)},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for r in range(2)
        ]
        outputs = [process.communicate(timeout=60) for process in ranks]

    assert [process.returncode for process in ranks] == [code] * 2
    assert [out for out, _ in outputs] == ["printed by 0\n", ""]
    assert [line for _, err in outputs for line in err.splitlines() if "terminate" in line or "Warning" in line] == []


def test_world_print_is_rank_0s_alone():
    world = lockstep.world.World(lockstep.world.place.Place(1, 2, 1, 2, 0, 1, ""), torch.device("cpu"), 0, None)

    assert world.is_main is False
    assert repr(world) == "<World: rank 1 of 2, node 0 of 1, cpu>"
