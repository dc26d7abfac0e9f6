"""Each way in which ranks come to wait for each other: the report's first sentence names rank, call and line.

What shm refuses by itself, H03 and H04, is in tests/shm/test_mismatch.py; what the reducer never lets happen, H01 and
H10, in tests/parallel/test_reducer.py; H08, a rank that raises, in tests/launcher/test_failures.py; ranks of several
nodes in test_nodes.py.
"""

import contextlib
import os
import re
import threading

from launching import PATIENCE, alive, run, started, until

HERE = """\
import os, re, sys, threading, time, pathlib
import torch, torch.distributed as dist
dist.init_process_group("gloo")
rank = dist.get_rank()
x = torch.ones(4)
"""  # 5 lines
SAID = r"lockstep: no rank has finished a step for \d+ s: "


def reported(folder, source, ranks, *words):
    """Run a script until the launcher has said a sentence with these words; the sentence, and everything after it.

    Others may come before: on a busy machine a rank is still importing when the first is due.
    """
    start, found = re.compile(SAID + ".*" + ".*".join(map(re.escape, words))), None
    lines = []
    with started(folder, source, "-n", str(ranks), "--watch", "--stall", "0.5") as process, killed_in_the_end(process):
        for line in process.stderr:
            lines.append(line.rstrip("\n"))
            if found is None and start.match(line):
                found = len(lines)
            if found is not None and line.startswith(f"lockstep: rank {ranks - 1}: "):
                process.terminate()
    assert found is not None, lines
    return re.sub(SAID, "", lines[found - 1]), "\n".join(lines[found:])


@contextlib.contextmanager
def killed_in_the_end(process):
    """What is never said must not be waited for for ever."""
    timer = threading.Timer(PATIENCE, process.kill)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()


def test_h02_a_barrier_under_a_condition(tmp_path):
    """Barrier under if rank == 0: all ranks wait, in different calls."""
    cause, rest = reported(
        tmp_path,
        HERE + "if rank == 0:\n    dist.barrier()\ndist.all_reduce(x)\n",
        3,
        "rank 0 is in barrier",
        "ranks 1, 2",
    )

    assert cause == (
        "rank 0 is in barrier #1, train.py:7, under `if rank == 0`; "
        "ranks 1, 2 are in all_reduce #1 of 4 float32, train.py:8"
    )
    assert "lockstep: rank 2: 0 steps, waits in all_reduce #1 of 4 float32, train.py:8" in rest


def test_h05_another_order_of_the_same_calls(tmp_path):
    """Same collectives in different order."""
    source = HERE + "a = lambda: dist.all_reduce(x)\nb = lambda: dist.barrier()\n(a(), b()) if rank else (b(), a())\n"

    cause, _ = reported(tmp_path, source, 2, "rank 0 is in", "rank 1 is in")

    assert cause == "rank 0 is in barrier #1, train.py:7; rank 1 is in all_reduce #1 of 4 float32, train.py:6"


def test_h06_torchs_detail_mode_passes_barriers_and_is_no_hindrance(tmp_path):
    """DETAIL mode itself broken for barrier, on three ranks."""
    source = HERE.replace("gloo", "shm").replace("torch,", "torch, lockstep,", 1) + (
        "for group in (None, dist.new_group(backend='gloo')):\n"
        "    for _ in range(3): dist.barrier(group)\n"
        "    x = torch.ones(4); dist.all_reduce(x, group=group)\n    assert x.tolist() == [3.0] * 4\n"
        "assert dist.get_debug_level().name == 'DETAIL'\n"
    )

    done = run(tmp_path, source, "-n", "3", "--watch", env=os.environ | {"TORCH_DISTRIBUTED_DEBUG": "DETAIL"})

    assert done.returncode == 0, done.stderr


def test_h07_the_rank_that_does_not_come_is_named_with_its_line(tmp_path):
    """Cannot tell which rank is missing, or where it is."""
    source = HERE + "def load():\n    time.sleep(1000)\nif rank == 1:\n    load()\ndist.all_reduce(x)\n"

    cause, rest = reported(tmp_path, source, 4, "ranks 0, 2, 3 wait", "sleep")

    assert cause == (
        "rank 1 never entered all_reduce #1 of 4 float32, in which ranks 0, 2, 3 wait, train.py:10; "
        "rank 1 is in `time.sleep(1000)`, train.py:7, under `if rank == 1`"
    )
    assert re.search(r'rank 1: .*\n +File ".*train.py", line 9, in <module>\n +load\(\)\n +File .* in load\n', rest)
    assert "lockstep/launcher" not in rest


def test_h07_in_shared_memory_too(tmp_path):
    source = (
        HERE.replace("gloo", "shm").replace("torch,", "torch, lockstep,", 1)
        + "if rank == 1:\n    time.sleep(1000)\ndist.all_reduce(x)\n"
    )

    cause, _ = reported(tmp_path, source, 2, "never entered", "sleep")

    assert cause == (
        "rank 1 never entered all_reduce #0 (sum) of 4 float32, in which rank 0 waits, train.py:8; "
        "rank 1 is in `time.sleep(1000)`, train.py:7, under `if rank == 1`"
    )


TRAINING = """\
net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
if rank == 1: threading.Thread(target=time.sleep, args=(1000,)).start()
for batch in range(2 if rank == 1 else 5):
    net(torch.ones(1, 2)).sum().backward()
    optimizer.step()
"""


def test_h09_a_rank_with_fewer_batches_has_ended(tmp_path):
    """Loop ends differ per rank. The process lives on, so gloo's sockets stay open and nobody notices."""
    cause, rest = reported(tmp_path, HERE + TRAINING, 2, "rank 1 has ended", "waits")

    assert re.fullmatch(
        r"rank 1 has ended and never entered all_reduce #\d+ of 3 float32, in which rank 0 waits, train.py:10", cause
    )
    assert "rank 0: 2 steps, waits in all_reduce" in rest


def test_h09_a_rank_with_fewer_batches_goes_on_to_something_else(tmp_path):
    cause, _ = reported(
        tmp_path,
        HERE + "other = dist.new_group()\n" + TRAINING + "dist.barrier(other)\n",
        2,
        "rank 0 is in",
        "rank 1 is in",
    )

    assert "rank 0 is in all_reduce #" in cause
    assert "of 3 float32, train.py:11" in cause
    assert "rank 1 is in barrier #1 of another group, train.py:13" in cause


LOOP = """\
model = lockstep.replicate(torch.nn.Linear(2, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for batch in range(5):
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    if rank == 1 and batch == 2: break
dist.barrier()
"""


def test_h09_a_loop_without_update_that_one_rank_leaves_early(tmp_path):
    """The reducer's group counts by itself: its calls and the world's are not compared."""
    source = HERE.replace("torch,", "torch, lockstep,", 1).replace('dist.init_process_group("gloo")', "lockstep.init()")

    cause, _ = reported(tmp_path, source + LOOP, 2, "rank 1 is in barrier")

    assert re.fullmatch(
        r"rank 0 is in all_reduce #\d+ \(sum\) of \d+ float32, train.py:9; "
        r"rank 1 is in barrier #\d+ of another group, train.py:12",
        cause,
    )


def test_a_rank_whose_loader_workers_give_nothing(tmp_path):
    source = HERE + (
        "class Data(torch.utils.data.Dataset):\n    def __len__(self): return 4\n"
        "    def __getitem__(self, i):\n        if rank == 1: time.sleep(1000)\n        return x\n"
        "for batch in torch.utils.data.DataLoader(Data(), num_workers=1):\n    dist.all_reduce(x)\n"
    )

    cause, _ = reported(tmp_path, source, 2, "rank 1 never entered")

    assert cause == (
        "rank 1 never entered all_reduce #1 of 4 float32, in which rank 0 waits, train.py:12; "
        "rank 1 is in a wait for the next batch, which no worker of its DataLoader gives, train.py:11"
    )


def test_a_rank_that_holds_pythons_lock_shows_its_stack_all_the_same(tmp_path):
    source = HERE + "if rank == 1:\n    re.match('(a+)+$', 'a' * 60 + 'b')\ndist.all_reduce(x)\n"

    cause, rest = reported(tmp_path, source, 2, "rank 1 never entered", "does not answer")

    assert cause.endswith("rank 1 does not answer: native code holds Python's lock, train.py:7")
    assert re.search(r"rank 1: did not answer.*\n(.*\n)*? +File .*train.py\", line 7 in <module>", rest)


def test_a_rank_in_the_debugger(tmp_path):
    source = HERE + (
        "sys.stdin = open(os.pipe()[0])\nif rank == 1:\n    import pdb; pdb.Pdb(stdin=sys.stdin).set_trace()\n"
        "dist.all_reduce(x)\n"
    )

    cause, _ = reported(tmp_path, source, 2, "rank 1 never entered", "debugger")

    assert cause.endswith("rank 1 is in the debugger, which waits for a command, train.py:9")


def test_a_rank_that_is_stopped_is_told_with_what_lets_it_go_on(tmp_path):
    source = HERE + "if rank == 1:\n    os.kill(os.getpid(), 19)\ndist.all_reduce(x)\n"

    cause, _ = reported(tmp_path, source, 2, "rank 1 never entered", "does not answer: it")

    assert re.search(r"rank 1 does not answer: it is stopped, kill -CONT \d+ on \S+ lets it go on$", cause)


def test_ranks_that_go_on_are_not_reported(tmp_path):
    source = HERE + (
        "w = torch.nn.Parameter(torch.ones(1))\noptimizer = torch.optim.SGD([w], lr=0.1)\n"
        "end = time.monotonic() + 4.0\nwhile True:\n    optimizer.step()\n"
        "    x = torch.tensor(float(time.monotonic() < end)); dist.all_reduce(x, dist.ReduceOp.MIN)\n"
        "    if not x: break\n"
    )

    done = run(tmp_path, source, "-n", "2", "--watch", "--stall", "1.5")

    assert done.returncode == 0
    assert "lockstep:" not in done.stderr


def test_no_watch_leaves_no_pipe_and_no_signal(tmp_path):
    source = "import faulthandler, signal\nassert not faulthandler.unregister(signal.SIGRTMIN + 7)\n"

    assert run(tmp_path, source, "-n", "2", "--no-watch").returncode == 0
    assert run(tmp_path, source, "-n", "2", "--watch").returncode == 1


def test_nobody_is_left_after_a_hang_was_told_and_ended(tmp_path):
    source = (
        HERE
        + "pathlib.Path(__file__).with_name(f'{os.getpid()}.pid').touch()\nif rank: dist.barrier()\n"
        + ("time.sleep(1000)\n")
    )

    reported(tmp_path, source, 2, "rank 0 never entered barrier #1", "sleep")

    pids = [int(path.stem) for path in tmp_path.glob("*.pid")]
    assert len(pids) == 2
    until(lambda: not any(map(alive, pids)), "all ranks have ended")
