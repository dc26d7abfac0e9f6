"""Disks that fail, are full, or may not be written to; saves that are killed."""

import errno
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from launching import LOCKSTEP
from ranks import run_ranks

import lockstep
from lockstep.train.checkpoint import files, manifest

CALLS = ("open", "write", "fsync", "rename", "mkdir")


class Failing:
    """The module `os`, but one call of those that write fails."""

    def __init__(self, number):
        self.left, self.number = number, number

    def __getattr__(self, name):
        real = getattr(os, name)
        if name not in CALLS:
            return real

        def call(*args, **kwargs):
            if name == "open" and not args[1] & os.O_CREAT:
                return real(*args, **kwargs)
            self.left -= 1
            if self.left == 0:
                raise OSError(errno.EIO, f"{name} was made to fail")
            return real(*args, **kwargs)

        return call


def values(directory, **more):
    return lockstep.Checkpoint(directory, values={"x": torch.zeros(5000), **more}, keep=2)


def hidden(directory):
    return [path.name for path in Path(directory).iterdir() if path.name.startswith(".")]


def restored(directory):
    found = {}
    assert lockstep.Checkpoint(directory, values=found).restore()
    return found["n"]


def fails_in_turn(rank, directory, failing):
    """One call of a save fails after the other, on one rank, until a save gets through; what this rank has seen."""
    state = {"x": torch.zeros(50_000), "n": 0}
    checkpoint = lockstep.Checkpoint(directory, values=state, keep=2)
    checkpoint.save(wait=True)
    checkpoint.save(wait=True)
    seen = []
    for number in itertools.count(1):
        before, state["n"], said = state["n"], state["n"] + 1, ""
        faulty = Failing(number if rank == failing else 0)
        files.os = faulty
        try:
            checkpoint.save(wait=True)
        except lockstep.CheckpointError as error:
            said = str(error)
        files.os = os
        if not lockstep.total(int(faulty.left <= 0 and rank == failing)):
            break
        found, left = restored(directory), hidden(directory)
        lockstep.total(0)  # every rank has looked before there is a new folder
        checkpoint.step()
        checkpoint.save(wait=True)
        seen.append((said.partition(": ")[2], found - before, left, restored(directory) - before))
    return seen


ON_RANK_0 = ["mkdir", *["open", "write", "fsync"] * 2, "fsync", "rename", "fsync", "rename"]


@pytest.mark.parametrize(
    ("size", "failing", "calls"), [(1, 0, ON_RANK_0), (2, 0, ON_RANK_0), (2, 1, ["open", "write", "fsync"])]
)
def test_whichever_call_fails_all_ranks_say_so_and_nothing_is_lost(tmp_path, size, failing, calls):
    """A folder, a share, the manifest, the folder's names, its own name, the directory's, an older one that goes."""
    seen, *others = run_ranks(fails_in_turn, size, tmp_path, failing)

    assert others == [seen] * (size - 1)
    assert len(seen) == len(calls)
    for number, (call, (said, found, left, later)) in enumerate(zip(calls, seen, strict=True)):
        assert f"rank {failing}: {call} was made to fail" in said
        # Behind the second rename it is whole; an older one that could not be removed is no reason to lose it.
        assert found == (number == len(ON_RANK_0) - 1)
        assert left == []
        assert later == 1


def fails_on_one(rank, directory, failing):
    state = {"x": torch.zeros(50_000)}
    checkpoint = lockstep.Checkpoint(directory, values=state)
    checkpoint.save(wait=True)
    if rank == failing:
        files.os = Failing(2 - rank)  # opening its file; rank 0 makes a folder before
    checkpoint.save()
    raised = 0
    for _ in range(2000):
        try:
            checkpoint.step()
        except lockstep.CheckpointError as error:
            raised = checkpoint.step_count * (f"rank {failing}: open was made to fail" in str(error))
            break
    files.os = os
    checkpoint.step()
    checkpoint.save(wait=True)
    return raised, len(list(Path(directory).glob("[0-9]*"))), hidden(directory)


@pytest.mark.parametrize("failing", [0, 1])
def test_a_failure_in_the_background_is_raised_on_all_ranks_at_the_same_step(tmp_path, failing):
    found = run_ranks(fails_on_one, 2, tmp_path, failing)

    assert found[0] == found[1]
    assert found[0][0] > 0
    assert found[0][1:] == (2, [])


def test_the_next_save_raises_what_the_one_before_could_not_say(tmp_path, monkeypatch):
    checkpoint = values(tmp_path)
    monkeypatch.setattr(files, "os", Failing(3))
    checkpoint.save()

    with pytest.raises(lockstep.CheckpointError, match="was made to fail"):
        checkpoint.save()


def test_without_a_next_call_the_failure_is_said_at_the_end(tmp_path):
    code = (
        f"import errno, lockstep\nfrom lockstep.train.checkpoint import files\n"
        f"def full(*args): raise OSError(errno.ENOSPC, 'No space left on device')\n"
        f"files.write = full\nlockstep.Checkpoint({str(tmp_path)!r}, values={{'a': 1}}).save()"
    )
    end = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)

    assert "the last checkpoint could not be written: rank 0: No space left on device" in end.stderr
    assert list(tmp_path.iterdir()) == []


ON_A_SMALL_DISK = """
import json, os, subprocess, sys, torch, lockstep
from pathlib import Path

disk, world = Path(sys.argv[1]), lockstep.init(device="cpu", seed=0)
runs, ballast = disk / "runs", disk / "ballast"

def on_rank_0(act):
    world.barrier()
    if world.is_main:
        act()
    world.barrier()

def fill():
    ballast.write_bytes(bytes(os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize - 300_000))

def save(checkpoint):
    try:
        checkpoint.save(wait=True)
    except lockstep.CheckpointError as error:
        return str(error)
    return ""

def restored():
    found = {}
    return lockstep.Checkpoint(runs, values=found).restore() and found["n"]

seen = {}
for large in ("0", "1", "01"):
    state = {"x": torch.zeros(200_000 if str(world.rank) in large else 10), "n": 1}
    checkpoint = lockstep.Checkpoint(runs, values=state, keep=1)
    checkpoint.save(wait=True)
    on_rank_0(fill)
    state["n"] = 2
    said = save(checkpoint)
    facts = [said, len(list(runs.iterdir())), restored()]
    on_rank_0(ballast.unlink)
    checkpoint.step()
    seen[large] = [*facts, save(checkpoint), restored()]
on_rank_0(lambda: subprocess.run(["mount", "-o", "remount,ro", disk], check=True))
seen["read-only"] = [save(checkpoint), len(list(runs.iterdir())), restored()]
Path(sys.argv[2], f"{world.rank}.json").write_text(json.dumps(seen))
"""


def mounted(tmp_path, options, script):
    """Run a script on two ranks in a namespace of its own, where its argument is a file system of its own."""
    (tmp_path / "disk").mkdir()
    (tmp_path / "script.py").write_text(script)
    words = ["unshare", "--mount", "sh", "-ec", 'mount -t tmpfs -o "$1" tmpfs "$2"; shift; shift; exec "$@"', "sh"]
    words += [options, str(tmp_path / "disk"), *LOCKSTEP, "run", "-n", "2", str(tmp_path / "script.py")]
    end = subprocess.run([*words, str(tmp_path / "disk"), str(tmp_path)], capture_output=True, text=True, check=False)
    assert end.returncode == 0, end.stderr
    return [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1)]


def may_mount():
    if not shutil.which("unshare"):
        return False
    words = ["unshare", "--mount", "sh", "-c", "mount -t tmpfs tmpfs /mnt"]
    return subprocess.run(words, capture_output=True, check=False).returncode == 0


needs_mounting = pytest.mark.skipif(not may_mount(), reason="only root may mount the small file system that this needs")


@needs_mounting
def test_a_full_and_a_read_only_disk_raise_on_all_ranks_and_saving_goes_on_once_there_is_room(tmp_path):
    for rank, seen in enumerate(mounted(tmp_path, "size=6m", ON_A_SMALL_DISK)):
        for large, (said, count, found, later, found_later) in zip(("0", "1", "01"), [*seen.values()][:3], strict=True):
            assert said.startswith(f"rank {rank} of 2")
            named = "[01]" if large == "1" else "0"  # what rank 1 writes until it fails may leave no room for rank 0
            assert re.search(f"a checkpoint could not be written: rank {named}: No space left on device", said)
            assert (count, found, later, found_later) == (1, 1, "", 2)
        said, count, found = seen["read-only"]
        assert "no checkpoint was begun: rank 0: Read-only file system" in said
        assert (count, found) == (1, 2)


def cannot_write(rank, directory):
    checkpoint = lockstep.Checkpoint(directory, values={"x": 1})
    try:
        checkpoint.save()
    except lockstep.CheckpointError as error:
        return str(error)


def test_a_directory_that_cannot_be_made_raises_on_every_rank(tmp_path):
    (tmp_path / "file").write_text("")

    for rank, said in enumerate(run_ranks(cannot_write, 2, tmp_path / "file" / "runs")):
        assert said.startswith(f"rank {rank} of 2, step 0: no checkpoint was begun: rank 0: Not a directory")


def test_what_a_killed_save_has_left_goes_with_the_next_one(tmp_path):
    checkpoint = values(tmp_path)
    for name in (".000001-step-0.partial", ".000007-step-9.gone"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "share-0000-of-0001.safetensors").write_bytes(b"half")
    (tmp_path / ".mine").mkdir()
    checkpoint.save(wait=True)

    assert sorted(path.name for path in tmp_path.iterdir()) == [".mine", "000001-step-0"]


def removed_while_it_is_written(rank, directory):
    checkpoint = lockstep.Checkpoint(directory, values={"x": torch.zeros(10)})
    checkpoint.save(wait=True)
    shares_written, removed, said, real = threading.Event(), threading.Event(), "", files.write

    def write(path, *data):
        if path.name == "manifest.json":
            shares_written.set()
            removed.wait()
        return real(path, *data)

    files.write = write
    checkpoint.save()
    if rank == 0:
        shares_written.wait()
        shutil.rmtree(directory)
        removed.set()
    try:
        checkpoint.wait()
    except lockstep.CheckpointError as error:
        said = str(error)
    checkpoint.save(wait=True)
    return said, len(list(Path(directory).iterdir()))


def test_a_directory_that_goes_while_a_save_is_written_is_said_and_made_anew(tmp_path):
    for rank, (said, count) in enumerate(run_ranks(removed_while_it_is_written, 2, tmp_path / "runs")):
        assert said.startswith(f"rank {rank} of 2")
        assert "No such file or directory" in said
        assert "the folder was removed, or another Checkpoint saves in the same directory" in said
        assert count == 1


def test_plain_values_too_large_to_be_read_again_are_not_written(tmp_path, monkeypatch):
    state = {"n": 1}
    checkpoint = lockstep.Checkpoint(tmp_path, values=state)
    checkpoint.save(wait=True)
    monkeypatch.setattr(manifest, "MOST", 5000)
    state["list"] = [*range(3000)]
    with pytest.raises(
        lockstep.CheckpointError, match=r"rank 0: the plain values take .* put long lists of numbers into"
    ):
        checkpoint.save(wait=True)

    assert restored(tmp_path) == 1
    assert hidden(tmp_path) == []
