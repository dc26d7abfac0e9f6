"""Disks that fail, are full, or may not be written to; saves that are killed."""

import contextlib
import errno
import itertools
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from ranks import run_ranks

import lockstep
from lockstep.train.checkpoint import files

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


def test_any_write_that_fails_raises_and_loses_nothing(tmp_path, monkeypatch):
    """Each one in turn, until a save gets through."""
    for number in itertools.count(1):
        directory = tmp_path / str(number)
        state = {"x": torch.zeros(5000), "n": 0}
        checkpoint = lockstep.Checkpoint(directory, values=state, keep=2)
        for state["n"] in (1, 2):
            checkpoint.save(wait=True)
        failing = Failing(number)
        monkeypatch.setattr(files, "os", failing)
        state["n"] = 3
        with contextlib.suppress(lockstep.CheckpointError):
            checkpoint.save(wait=True)
            assert failing.left > 0
        monkeypatch.setattr(files, "os", os)
        if failing.left > 0:
            break
        found = {}
        assert lockstep.Checkpoint(directory, values=found).restore()
        # Behind the rename it is whole; an older one that could not be removed is no reason to lose it.
        assert found["n"] in (2, 3)
        assert hidden(directory) == []
        state["n"] = 4
        checkpoint.save(wait=True)
        lockstep.Checkpoint(directory, values=found).restore()
        assert found["n"] == 4

    assert number == 12  # a folder, two files (open, write, sync), two folders synced, a rename, one that goes


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


FULL = """
import os, sys, torch, lockstep
from pathlib import Path
disk = Path(sys.argv[1])
state = {"x": torch.zeros(200_000), "n": 1}
checkpoint = lockstep.Checkpoint(disk / "runs", values=state, keep=5)
checkpoint.save(wait=True)
(disk / "ballast").write_bytes(bytes(os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize - 300_000))
state["n"] = 2
try:
    checkpoint.save(wait=True)
except lockstep.CheckpointError as error:
    print(error)
print(sorted(os.listdir(disk / "runs")))
found = {}
print(lockstep.Checkpoint(disk / "runs", values=found).restore(), found["n"])
(disk / "ballast").unlink()
checkpoint.save(wait=True)
print(sorted(os.listdir(disk / "runs")))
"""


def mounted(tmp_path, options, script):
    """Run a script in a namespace of its own, where ``disk`` is a file system of its own."""
    (tmp_path / "disk").mkdir()
    (tmp_path / "script.py").write_text(script)
    words = ["unshare", "--mount", "sh", "-ec", 'mount -t tmpfs -o "$1" tmpfs "$2"; exec "$3" "$4" "$2"', "sh"]
    words += [options, str(tmp_path / "disk"), sys.executable, str(tmp_path / "script.py")]
    return subprocess.run(words, capture_output=True, text=True, check=False)


def may_mount():
    if not shutil.which("unshare"):
        return False
    words = ["unshare", "--mount", "sh", "-c", "mount -t tmpfs tmpfs /mnt"]
    return subprocess.run(words, capture_output=True, check=False).returncode == 0


needs_mounting = pytest.mark.skipif(not may_mount(), reason="only root may mount the small file system that this needs")


@needs_mounting
def test_a_full_disk_raises_leaves_nothing_and_saving_goes_on_once_there_is_room(tmp_path):
    end = mounted(tmp_path, "size=4m", FULL)
    said, listed, restored, later = end.stdout.splitlines()

    assert "rank 0: No space left on device" in said, end.stderr
    assert listed == "['000001-step-0']"
    assert restored == "True 1"
    assert later == "['000001-step-0', '000003-step-0']"


READ_ONLY = """
import os, subprocess, sys, torch, lockstep
state = {"n": 1}
checkpoint = lockstep.Checkpoint(sys.argv[1], values=state)
checkpoint.save(wait=True)
subprocess.run(["mount", "-o", "remount,ro", sys.argv[1]], check=True)
try:
    checkpoint.save()
except lockstep.CheckpointError as error:
    print(error)
print(lockstep.Checkpoint(sys.argv[1], values={}).restore())
"""


@needs_mounting
def test_a_read_only_disk_raises_at_once(tmp_path):
    said, restored = mounted(tmp_path, "size=4m", READ_ONLY).stdout.splitlines()

    assert "no checkpoint was begun: rank 0: Read-only file system" in said
    assert restored == "True"


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
