"""lockstep.init takes shm where it can, and gloo, with the reason, where it cannot; importing lockstep costs little."""

import os
import resource
import signal
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

import lockstep
from lockstep.shm import segment


def init(rank, folder, most_bytes):
    """As torchrun would start it, with a file to meet at."""
    from lockstep.world import group

    os.environ.update({"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2"})
    os.environ.update({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"})
    group.connect = lambda *_: dist.FileStore(f"{folder}/meet", 2)
    if most_bytes:  # no room: what a rank may write to any file, memory's included
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, most_bytes))
    said = []
    sys.stderr.write = said.append
    world = lockstep.init(device="cpu")
    x = torch.ones(2)
    dist.all_reduce(x)
    return dist.get_backend(), x.tolist(), world.size, "".join(said)


def test_init_takes_shm_on_one_machine(tmp_path):
    (backend, total, size, said), _ = run_ranks(init, 2, str(tmp_path), 0, backend=None)

    assert (backend, total, size) == ("shm", [2.0, 2.0], 2)
    assert "lockstep: 2 ranks, cpu, shm\n" in said


def test_init_takes_gloo_where_there_is_no_room_and_says_so(tmp_path):
    (backend, total, _, said), _ = run_ranks(init, 2, str(tmp_path), 100_000, backend=None)

    assert (backend, total) == ("gloo", [2.0, 2.0])
    assert "lockstep: 2 ranks, cpu, gloo (the shm backend cannot be used here: File too large" in said


def refused(rank, folder):
    store = dist.FileStore(f"{folder}/store", 2)
    with pytest.raises(lockstep.UsageError) as caught:
        dist.init_process_group("shm", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=30))
    return str(caught.value)


def unmapped(rank, folder):
    if rank == 1:  # it can open the segment, and has no addresses to map it at
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + 1_000_000, resource.RLIM_INFINITY))
    return refused(rank, folder)


def test_a_rank_that_cannot_map_the_segment_is_named_on_all(tmp_path):
    for said in run_ranks(unmapped, 2, str(tmp_path), backend=None):
        assert "rank 1: Cannot allocate memory (no room to map the segment)" in said


def test_a_process_whose_status_nobody_has_asked_for_has_ended():
    child = subprocess.Popen(["true"])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    try:
        assert segment._has_ended(child.pid)
        assert not segment._has_ended(os.getpid())
    finally:
        child.wait()
    assert segment._has_ended(child.pid)


def elsewhere(rank, folder):
    if rank == 1:
        segment._place = lambda: "another machine"
    return refused(rank, folder)


def test_ranks_on_two_machines_cannot_have_it(tmp_path):
    for said in run_ranks(elsewhere, 2, str(tmp_path), backend=None):
        assert "ranks 0 and 1 run on different machines or in different containers" in said


def descriptors(rank):
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(5):
        group = dist.new_group(backend="shm")
        dist.barrier(group)
        dist.destroy_process_group(group)
    return len(list(Path("/proc/self/fd").iterdir())) - before


def test_groups_that_come_and_go_leave_no_descriptor_open():
    assert run_ranks(descriptors, 2, backend="shm") == [0, 0]


def test_importing_lockstep_loads_nothing_of_it():
    code = "import sys, lockstep; print([m for m in sys.modules if m.startswith('lockstep.')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert done.stdout == "[]\n"
