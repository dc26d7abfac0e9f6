"""A rank that dies, stops, leaves or never comes: every other rank hears of it, at whatever moment it happened."""

import os
import random
import signal
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import _context
from shm import calls

import lockstep
from lockstep.shm.placed import place
from lockstep.shm.tensors import LATER, NOW

SIZES = (1, 1000, 200_000, 3_000_000)


def start_group(folder, rank, size, timeout):
    """Meet without haste; the timeout is for the calls."""
    dist.init_process_group("shm", store=dist.FileStore(f"{folder}/store", size), rank=rank, world_size=size)
    dist.group.WORLD.set_timeout(timedelta(seconds=timeout))


def bucket(parts, root, group, async_op):
    """A sum in memory that all ranks map for it; where they cannot any more, any sum says why."""
    group, x = dist.group.WORLD, parts[0]
    where = place(group, x.numel(), x.dtype)
    x = x if where is None else where.own
    return group.sum_again(x, group._tensors.prepare_sum(x, where), LATER if async_op else NOW), [x]


def work_for_ever(end, folder, rank, size, seed, timeout):
    """Random collectives, the same on every rank, until one fails; then say how."""
    torch.set_num_threads(1)
    start_group(folder, rank, size, timeout)
    draw, every = random.Random(seed), calls.REDUCE | calls.MOVE | {"bucket": bucket, "another bucket": bucket}
    end.send("ready")
    while True:
        name, count, later = draw.choice(list(every)), draw.choice(SIZES), draw.random() < 0.3
        parts = [torch.ones(count) for _ in range(size)]
        try:
            work, _ = every[name](parts, draw.randrange(size), None, async_op=later)
            if later:
                work.wait()
        except lockstep.LockstepError as error:
            end.send((type(error).__name__, str(error), time.monotonic()))
            break
    dist.destroy_process_group()
    end.send("over")


def strike(seed, size, kind, folder, timeout):
    """Start ranks, send one of them a signal at a random moment, and collect what the others say."""
    draw = random.Random(seed)
    victim = draw.randrange(size)
    pipes = [_context.Pipe() for _ in range(size)]
    ranks = [
        _context.Process(target=work_for_ever, args=(there, folder, rank, size, seed, timeout))
        for rank, (_, there) in enumerate(pipes)
    ]
    for rank in ranks:
        rank.start()
    try:
        for here, _ in pipes:
            assert here.poll(60)
            here.recv()
        time.sleep(draw.random() * 0.3)
        os.kill(ranks[victim].pid, kind)
        struck = time.monotonic()
        said = {}
        for rank, (here, _) in enumerate(pipes):
            if rank != victim:
                assert here.poll(timeout + 20), f"rank {rank} hangs"
                said[rank] = here.recv()
                assert here.poll(20), f"rank {rank} hangs in destroy_process_group"
                assert here.recv() == "over"
                ranks[rank].join(20)
                assert ranks[rank].exitcode == 0
        return victim, ranks[victim].pid, struck, said
    finally:
        for rank, (here, there) in zip(ranks, pipes, strict=True):
            rank.kill()
            rank.join()
            here.close()
            there.close()


rounds = pytest.mark.parametrize("seed", range(50 if os.environ.get("SOAK") else 4))


@rounds
def test_a_killed_rank_is_named_by_all_others(seed, tmp_path):
    victim, pid, struck, said = strike(
        seed, random.Random(seed).choice([2, 3, 4]), signal.SIGKILL, tmp_path, timeout=60
    )

    for name, text, _ in said.values():
        assert name == "LostRankError"
        # Who hears of the death first gives up, and may be waited for itself where the dead one had done its part.
        assert f"rank {victim} (pid {pid}) died" in text or "gave up" in text
        assert "collective number" in text
    assert any(f"rank {victim} (pid {pid}) died" in text for _, text, _ in said.values())
    if "SOAK" in os.environ:  # for people to read: nothing here is asserted of a clock
        sys.stderr.write(f"heard after {[round(heard - struck, 3) for _, _, heard in said.values()]} s\n")


@rounds
def test_a_stopped_rank_is_late(seed, tmp_path):
    victim, pid, _, said = strike(seed, random.Random(seed).choice([2, 3, 4]), signal.SIGSTOP, tmp_path, timeout=1)

    assert any(f"rank {victim} (pid {pid}) did not come within 1 s" in text for _, text, _ in said.values())
    assert {"LateRankError", "LostRankError"} >= {name for name, _, _ in said.values()}


def wait_for_a_late_one(rank):
    if rank == 1:
        time.sleep(4)
        return None
    wait = dist.barrier if rank == 0 else dist.barrier(async_op=True).wait
    with pytest.raises(lockstep.LateRankError) as caught:
        wait()
    return str(caught.value)


def in_ranks(function, size, tmp_path, timeout, *args):
    """Like run_ranks, with a timeout for the group."""
    pipes = [_context.Pipe(duplex=False) for _ in range(size)]
    job = [(function, there, str(tmp_path), rank, size, timeout, args) for rank, (_, there) in enumerate(pipes)]
    ranks = [_context.Process(target=_be_one_of, args=row) for row in job]
    try:
        for process in ranks:
            process.start()
        assert all(here.poll(60) for here, _ in pipes)
        return [here.recv() for here, _ in pipes]
    finally:
        for process, (here, there) in zip(ranks, pipes, strict=True):
            process.kill()
            process.join()
            here.close()
            there.close()


def _be_one_of(function, end, folder, rank, size, timeout, args):
    torch.set_num_threads(1)
    start_group(folder, rank, size, timeout)
    try:
        end.send(function(rank, *args))
    except BaseException as error:
        end.send(error)
    dist.destroy_process_group()


def test_a_late_rank_is_named_and_so_are_those_who_came(tmp_path):
    first, _, last = in_ranks(wait_for_a_late_one, 3, tmp_path, 1)

    assert first.startswith("rank 0 of 3: rank 1 (pid ")
    assert "did not come within 1 s to barrier, collective number 0; rank(s) 0, 2 did" in first
    assert last.startswith("rank 2 of 3: rank 1")


def wait_for_a_message(rank, sender):
    store = dist.distributed_c10d._get_default_store()
    if rank == 1:
        store.wait(["over"], timedelta(seconds=20))
        return None
    with pytest.raises(lockstep.LateRankError) as caught:
        dist.recv(torch.zeros(2), sender)
    store.set("over", "")
    return str(caught.value)


@pytest.mark.parametrize(
    ("sender", "words"),
    [
        (1, "rank 0 of 2: recv from rank 1 was not over within 1 s: it waited for rank 1 (pid "),
        (None, "rank 0 of 2: recv from any rank was not over within 1 s: no rank has sent anything. "),
    ],
    ids=["from-one", "from-any"],
)
def test_a_message_that_does_not_come_is_late_and_blames_nobody_else(tmp_path, sender, words):
    assert in_ranks(wait_for_a_message, 2, tmp_path, 1, sender)[0].startswith(words)


def leave_early(rank):
    if rank == 0:
        return None  # and destroys the group
    with pytest.raises(lockstep.LostRankError) as caught:
        dist.all_reduce(torch.ones(3))
    with pytest.raises(lockstep.LostRankError) as again:
        dist.barrier()
    return str(caught.value), str(again.value)


def test_a_rank_that_left_is_not_waited_for(tmp_path):
    _, (said, again) = in_ranks(leave_early, 2, tmp_path, 60)

    assert "left (destroy_process_group) while it was waited for in all_reduce (sum) of 3 float32" in said
    assert "this shm group ended earlier" in again


def interrupt_a_wait(rank):
    if rank == 1:
        time.sleep(1.5)
        dist.barrier()  # rank 0 had posted its part before it was interrupted
        with pytest.raises(lockstep.LostRankError) as caught:
            dist.barrier()
        return str(caught.value)
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        dist.barrier()
    return time.monotonic() - started


def test_ctrl_c_ends_a_wait_and_the_others_hear_of_it(tmp_path):
    waited, said = in_ranks(interrupt_a_wait, 2, tmp_path, 60)

    assert waited < 1.4  # while the other rank was still asleep
    assert "rank 0 (pid" in said
    assert "gave up after an error of its own" in said


def destroy_in_the_middle(rank):
    if rank == 1:
        time.sleep(1)
        return None
    work = dist.all_reduce(torch.ones(3), async_op=True)
    dist.destroy_process_group()
    with pytest.raises(lockstep.LostRankError, match="destroyed while it was in all_reduce"):
        work.wait()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # for the end of this rank
    return "over"


def test_destroying_a_group_ends_what_is_going_on_in_it(tmp_path):
    assert in_ranks(destroy_in_the_middle, 2, tmp_path, 60)[0] == "over"


def wait_with_a_limit(rank):
    if rank == 1:
        time.sleep(1)
        dist.barrier()
        return None
    work = dist.barrier(async_op=True)
    with pytest.raises(lockstep.LateRankError, match=r"not over after 0\.1 s"):
        work.wait(timedelta(seconds=0.1))
    work.wait()
    return work.is_success()


def test_a_wait_with_a_limit_can_be_repeated(tmp_path):
    assert in_ranks(wait_with_a_limit, 2, tmp_path, 60)[0] is True


def die_in_init(end, folder, rank, pid_file):
    store = dist.FileStore(f"{folder}/store", 2)
    if rank == 1:
        from lockstep.shm import segment

        segment._watch = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    try:
        dist.init_process_group("shm", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=30))
    except lockstep.LostRankError as error:
        end.send(str(error))


def test_a_rank_that_dies_while_the_group_is_made_is_noticed(tmp_path):
    here, there = _context.Pipe()
    ranks = [_context.Process(target=die_in_init, args=(there, str(tmp_path), rank, "")) for rank in (0, 1)]
    for process in ranks:
        process.start()
    ranks[1].join()  # or it would stay a zombie, which still has a number
    said = here.recv() if here.poll(20) else "nothing"
    for process in ranks:
        process.kill()
        process.join()
    here.close()
    there.close()

    assert f"rank 1 (pid {ranks[1].pid}) died while the ranks were making their shared segment" in said


def never_alone(rank):
    return None


def test_a_rank_that_never_comes_is_named_by_init(tmp_path):
    with pytest.raises(lockstep.LateRankError, match=r"rank 1 did not come to the shm group within 0\.5 s"):
        dist.init_process_group(
            "shm", store=dist.FileStore(f"{tmp_path}/store", 2), rank=0, world_size=2, timeout=timedelta(seconds=0.5)
        )


def mapped(rank):
    lines = Path("/proc/self/maps").read_text().splitlines()
    return [line for line in lines if "memfd:lockstep" in line or "/dev/shm" in line]


def test_a_segment_has_no_name(tmp_path):
    for maps in in_ranks(mapped, 2, tmp_path, 60):
        assert len(maps) == 1
        assert "memfd:lockstep (deleted)" in maps[0]
