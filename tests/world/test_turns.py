"""Case D18 of the pains: all ranks download the same files and corrupt them."""

import os

import pytest
import torch.distributed as dist
from meeting import run_launched
from ranks import run_ranks

import lockstep
from lockstep.world import group
from lockstep.world.place import find_place
from lockstep.world.world import DEFAULT_TIMEOUT


def download(rank, folder, before_init):
    if not before_init:
        lockstep.init(device="cpu")
    seen = []
    for name in ("a", "b"):
        with lockstep.first():
            file = folder / name
            seen.append(file.exists())
            if not file.exists():
                with file.open("x") as out:  # "x": a second writer would raise
                    out.write("whole")
            assert file.read_text() == "whole"
    lockstep.init(device="cpu").barrier()
    return seen


@pytest.mark.parametrize("before_init", [True, False])
def test_d18_one_rank_downloads_and_the_others_find_it(tmp_path, before_init):
    results = run_launched(download, 3, tmp_path, before_init)

    assert results == [[False, False], [True, True], [True, True]]


def test_d18_in_a_process_group_that_the_script_made(tmp_path):
    assert run_ranks(download, 2, tmp_path, False) == [[False, False], [True, True]]


def test_d18_alone_the_block_just_runs(tmp_path):
    assert run_ranks(download, 1, tmp_path, True, backend=None) == [[False, False]]


def fail_in_the_block(rank, adopted):
    try:
        with lockstep.first(timeout=30):
            raise OSError("disk full")
    except (OSError, lockstep.LostRankError) as error:
        return type(error).__name__, "disk full" in str(error), "local rank 0" in str(error) or "rank 0" in str(error)


def test_d18_a_failed_download_raises_on_every_rank_and_the_others_do_not_run_the_block():
    results = run_launched(fail_in_the_block, 3, False)

    assert results == [("OSError", True, False), *[("LostRankError", True, True)] * 2]


def test_d18_a_failed_download_in_an_adopted_group_raises_on_every_rank():
    results = run_ranks(fail_in_the_block, 2, True)

    assert results == [("OSError", True, False), ("LostRankError", False, True)]


def wait_for_a_slow_first(rank):
    if rank == 0:
        lockstep.init(device="cpu", timeout=30)
        return None
    try:
        with lockstep.first(timeout=1):
            return "ran"
    except lockstep.LateRankError as error:
        message = str(error)
    lockstep.init(device="cpu", timeout=30)
    return message


def test_d18_waiting_for_the_first_rank_ends():
    assert "local rank 0 of node 0 was not through its block within 1 s" in run_launched(wait_for_a_slow_first, 2)[1]


@pytest.fixture
def lost(monkeypatch):
    """This process as rank 1, after whoever kept the store has ended: its place, and its end of the connection."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    launched = {"RANK": 1, "WORLD_SIZE": 2, "LOCAL_RANK": 1, "LOCAL_WORLD_SIZE": 2, "MASTER_PORT": server.port}
    for name, value in {**launched, "MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_USE_AGENT_STORE": True}.items():
        monkeypatch.setenv(name, str(value))
    place = find_place(os.environ)
    store = group.connect(place, group.find_address(place, os.environ), DEFAULT_TIMEOUT)
    del server
    yield place, store
    group.connect.cache_clear()


def test_a_rank_0_that_has_ended_is_lost_and_not_late(lost):
    with pytest.raises(lockstep.LostRankError, match=r"rank 1 of 2: the store .* is gone while the ranks were meeting"):
        group.roll_call(lost[1], lost[0], 30.0)
    with pytest.raises(lockstep.LostRankError, match=r"gone while local rank 0 of node 0 was inside"), lockstep.first():
        pass
