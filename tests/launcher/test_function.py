"""`lockstep.launch`: a function on several ranks."""

import importlib.util
import io
import os
import signal
import subprocess
import sys

import pytest
import torch
from launching import alive, until

import lockstep
from lockstep.errors import LostRankError, UsageError


def total_of_ranks(value):
    """At the top of a module that a new process may not find by name."""
    return int(lockstep.total(torch.tensor(value + lockstep.init(device="cpu").rank)))


def test_l14_closures_and_lambdas_run_and_their_results_come_back_by_rank():
    """Notebook/spawn: 'cannot pickle local object'."""
    base = torch.arange(3)

    results = lockstep.launch(lambda step: (base * step, lockstep.init(device="cpu").rank), 2, ranks=2)

    assert [(x.tolist(), rank) for x, rank in results] == [([0, 2, 4], 0), ([0, 2, 4], 1)]


def test_l14_a_session_without_a_file_that_has_computed_with_threads_can_launch():
    """A fork of such a process hangs; so it must be another one that forks."""
    session = (
        "import torch, lockstep\ntorch.set_num_threads(4)\nx = torch.rand(2000, 2000); (x @ x).exp().sum()\n"
        "class Kept:\n    def __init__(self, value): self.value = value\n"
        "def job(n):\n    y = torch.rand(500, 500); y @ y\n    return Kept(n + lockstep.init().rank)\n"
        "kept = lockstep.launch(job, 5, ranks=2)\nprint([k.value for k in kept], isinstance(kept[0], Kept))\n"
    )

    done = subprocess.run([sys.executable, "-"], input=session, capture_output=True, text=True, timeout=90, check=False)

    assert done.stdout == "[5, 6] True\n", done.stderr


def test_a_function_of_a_test_module_is_sent():
    assert lockstep.launch(total_of_ranks, 10, ranks=2) == [21, 21]


def test_a_function_of_a_module_that_no_other_process_can_find_is_sent(tmp_path, monkeypatch):
    """As pytest and notebooks load them: under a name that leads nowhere."""
    (tmp_path / "cell.py").write_text("def double(x):\n    return 2 * x\n")
    spec = importlib.util.spec_from_file_location("no.such.name", tmp_path / "cell.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "no.such.name", module)
    spec.loader.exec_module(module)

    assert lockstep.launch(module.double, 21, ranks=1) == [42]


def test_an_exception_in_a_rank_is_raised_here_with_that_ranks_traceback():
    def train():
        if lockstep.init(device="cpu").rank == 1:
            raise KeyError("label 7")
        lockstep.total(1.0)

    with pytest.raises(LostRankError, match=r"(?s)rank 1 of 2 .*KeyError: 'label 7'.*Traceback.*in train") as caught:
        lockstep.launch(train, ranks=2)

    assert isinstance(caught.value.__cause__, KeyError)


def test_a_usage_error_of_the_function_itself_is_a_lost_rank_too():
    def train():
        raise UsageError("write something else")

    with pytest.raises(LostRankError, match="write something else"):
        lockstep.launch(train, ranks=1)


def test_a_killed_rank_raises_here():
    def train():
        if os.environ["RANK"] == "0":
            os.kill(os.getpid(), signal.SIGKILL)
        while True:
            pass

    with pytest.raises(LostRankError, match=r"rank 0 of 2 .* failed first: SIGKILL"):
        lockstep.launch(train, ranks=2)


def test_no_ranks_at_all_say_so_in_the_words_of_the_call():
    with pytest.raises(UsageError, match=r"lockstep\.launch\(ranks=0\): write a number from 1 on"):
        lockstep.launch(print, ranks=0)


def test_what_cannot_be_sent_says_so():
    with pytest.raises(UsageError, match="arguments cannot be sent"):
        lockstep.launch(print, (x for x in "ab"), ranks=1)
    with pytest.raises(UsageError, match=r"rank 0: the result, a generator, cannot be sent back"):
        lockstep.launch(lambda: (x for x in "ab"), ranks=1)


def test_output_appears_where_the_caller_prints(monkeypatch):
    """In a notebook sys.stdout is no file."""
    notebook = io.StringIO()
    monkeypatch.setattr(sys, "stdout", notebook)

    lockstep.launch(lambda: print("hello from", os.environ["RANK"]), ranks=2)  # noqa: T201

    assert sorted(notebook.getvalue().splitlines()) == ["[rank 1] hello from 1", "hello from 0"]


def test_ranks_end_with_the_process_that_launched_them(tmp_path):
    session = (
        "import lockstep, os, pathlib, time\n"
        f"def job():\n    pathlib.Path({str(tmp_path)!r}, str(os.getpid())).touch(); time.sleep(1000)\n"
        "lockstep.launch(job, ranks=2)\n"
    )
    with subprocess.Popen([sys.executable, "-c", session]) as process:
        pids = until(lambda: ids if len(ids := [int(p.name) for p in tmp_path.iterdir()]) == 2 else [], "two ranks run")
        process.kill()

        until(lambda: not any(map(alive, pids)), "the ranks have ended")


def test_a_function_that_launches_can_be_sent():
    def outer():
        return lockstep.launch(lambda: lockstep.init(device="cpu").size, ranks=2)

    assert lockstep.launch(outer, ranks=1) == [[2, 2]]


def test_launch_is_the_same_thing_however_it_is_imported():
    import lockstep.launch as module
    from lockstep import launch

    assert launch is module is lockstep.launch
    assert callable(launch)
