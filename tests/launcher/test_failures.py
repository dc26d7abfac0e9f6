"""What a failing rank does to the others, to the output and to the exit code."""

import json
import os
import re
import signal

import pytest
from launching import alive, children, run, started, until, written

HERE = "import os, sys, signal, time, pathlib\nrank = int(os.environ['RANK'])\n"
BEGIN = HERE + "pathlib.Path(__file__).with_name(str(os.getpid())).touch()\n"
WAIT = "while True: time.sleep(0.05)\n"


def test_l05_the_traceback_of_the_first_failing_rank_is_the_last_thing_printed_and_printed_once(tmp_path):
    """Real traceback buried; summary says error_file N/A."""
    source = HERE + "def load():\n    raise ValueError('no label 7')\nif rank == 1: load()\n" + WAIT

    done = run(tmp_path, source, "-n", "3")

    lines = done.stderr.splitlines()
    assert done.returncode == 1
    assert lines[-1] == "ValueError: no label 7"
    assert [line.strip() for line in lines].count("ValueError: no label 7") == 1
    head = next(i for i, line in enumerate(lines) if line.startswith("Traceback"))
    assert re.fullmatch(
        r"lockstep: rank 1 of 3 \(local rank 1 on \S+\) failed first: ValueError: no label 7", lines[head - 1]
    )
    assert not any("torch" in line or "lockstep/launcher" in line for line in lines), done.stderr
    assert "line 4, in load" in done.stderr


@pytest.mark.parametrize(
    ("end", "code"),
    [
        ("sys.exit(3)", 3),
        ("sys.exit('no data')", 1),
        ("raise KeyError('x')", 1),
        ("os.kill(os.getpid(), signal.SIGKILL)", 137),
        ("import ctypes; ctypes.string_at(0)", 139),
        ("os._exit(7)", 7),
        ("os.abort()", 134),
    ],
)
def test_l16_the_exit_code_is_the_failing_ranks(tmp_path, end, code):
    """Exit code not propagated."""
    done = run(tmp_path, f"{HERE}if rank == 1:\n    {end}\n{WAIT}", "-n", "2")

    assert done.returncode == code, done.stderr


def test_a_crash_in_native_code_shows_where_python_was(tmp_path):
    done = run(
        tmp_path,
        HERE + "def crash():\n    import ctypes; ctypes.string_at(0)\ncrash() if rank else None\n" + WAIT,
        "-n",
        "2",
    )

    assert "failed first: SIGSEGV" in done.stderr
    assert "line 4 in crash" in done.stderr


def test_l04_a_rank_that_ignores_sigterm_is_killed_soon_after_another_has_failed(tmp_path):
    """Unkillable or SIGTERM-ignoring worker blocks shutdown. torch waits 30 s; here the deadline is in the output."""
    ready = tmp_path / "ignores"
    source = HERE + (
        f"ready = pathlib.Path({str(ready)!r})\n"
        "if rank == 0:\n    signal.signal(signal.SIGTERM, signal.SIG_IGN); ready.touch()\n"
        "else:\n    while not ready.exists(): time.sleep(0.01)\n    sys.exit(1)\n"
    )

    done = run(tmp_path, source + WAIT, "-n", "2")

    assert done.returncode == 1
    assert "rank 0 was ended (SIGKILL)" in done.stderr


def test_l18_who_died_first_is_said_and_when_the_others_did(tmp_path):
    """Signal-killed peers leave no record of who died first."""
    done = run(tmp_path, HERE + "if rank == 2: os.kill(os.getpid(), signal.SIGKILL)\n" + WAIT, "-n", "3")

    *others, first = done.stderr.splitlines()
    assert first.startswith("lockstep: rank 2 of 3")
    assert first.endswith("failed first: SIGKILL")
    ended = r"\+\d+\.\d\d s: rank [01] was ended \(SIG(TERM|KILL)\)"
    assert len([line for line in others if re.search(ended, line)]) == 2


def test_a_killed_rank_is_named_even_where_its_peers_felt_it_in_a_collective(tmp_path):
    source = HERE + (
        "import torch, torch.distributed as dist\ndist.init_process_group('gloo')\ndist.barrier()\n"
        "if rank == 1: os.kill(os.getpid(), signal.SIGKILL)\ndist.all_reduce(torch.ones(9))\n"
    )

    done = run(tmp_path, source, "-n", "2")

    assert done.returncode == 137
    assert "rank 1 of 2" in done.stderr.splitlines()[-1]


def test_h08_others_do_not_wait_for_a_rank_that_has_raised_although_it_lives_on(tmp_path):
    """Exception on one rank, others wait for ten or thirty minutes: gloo notices only sockets that are closed."""
    source = HERE + (
        "import threading, torch, torch.distributed as dist\ndist.init_process_group('gloo')\ndist.barrier()\n"
        "if rank == 1:\n    threading.Thread(target=time.sleep, args=(999,)).start()\n"
        "    raise ValueError('no label 7')\ndist.all_reduce(torch.ones(9))\n"
    )

    done = run(tmp_path, source, "-n", "3")

    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "ValueError: no label 7"
    assert "lockstep: rank 1 of 3 " in done.stderr


@pytest.mark.parametrize("victim", ["front", "agent"])
def test_l02_nobody_outlives_the_launcher_however_it_dies(tmp_path, victim):
    """Workers survive launcher's death; neither do their own children, in a session of their own or not."""
    source = BEGIN + (
        "import subprocess\nfor session in (False, True):\n"
        "    child = subprocess.Popen(['sleep', '1000'], start_new_session=session)\n"
        "    pathlib.Path(__file__).with_name(str(child.pid)).touch()\n"
    )
    with started(tmp_path, source + WAIT, "-n", "2") as process:
        pids = written(tmp_path, 6)
        (agent,) = children(process.pid)
        assert all(map(alive, pids))
        if victim == "front":
            process.kill()
        else:
            os.kill(agent, signal.SIGKILL)

        until(lambda: not any(map(alive, [*pids, agent])), "all processes have ended")
        assert process.wait() in (-9, 137)


def test_l03_children_of_ranks_end_with_them_when_another_rank_fails(tmp_path):
    """Grandchildren (wrapper script, loader workers) not killed."""
    source = BEGIN + (
        "import subprocess\n"
        "child = subprocess.Popen(['sh', '-c', 'sleep 1000 & wait'], start_new_session=True)\n"
        "pathlib.Path(__file__).with_name(str(child.pid)).touch()\n"
        "while len([p for p in pathlib.Path(__file__).parent.iterdir() if p.name.isdecimal()]) < 4: time.sleep(0.02)\n"
        "if rank == 1: sys.exit(5)\n"
    )

    done = run(tmp_path, source + WAIT, "-n", "2")

    assert done.returncode == 5
    assert not [pid for pid in written(tmp_path, 4) if alive(pid)]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2])
def test_signals_reach_every_rank(tmp_path, number):
    source = HERE + (
        "def note(number, frame):\n"
        "    pathlib.Path(__file__).with_name(f'got{rank}').write_text(str(number))\n    sys.exit(0)\n"
        f"signal.signal({int(number)}, note)\npathlib.Path(__file__).with_name(str(os.getpid())).touch()\n"
    )
    with started(tmp_path, source + WAIT, "-n", "2") as process:
        written(tmp_path, 2)
        process.send_signal(number)

        assert process.wait(60) == 0, process.stderr.read()

    assert [(tmp_path / f"got{rank}").read_text() for rank in range(2)] == [str(int(number))] * 2


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGINT])
def test_what_nohup_or_a_shell_had_ignored_stays_ignored(tmp_path, number):
    def ignore():
        signal.signal(number, signal.SIG_IGN)

    source = HERE + f"assert signal.getsignal({int(number)}) == signal.SIG_IGN\n" + BEGIN
    with started(tmp_path, source + WAIT, "-n", "2", preexec_fn=ignore) as process:
        written(tmp_path, 2)
        process.send_signal(number)
        process.terminate()

        assert process.wait(60) == 143


def test_a_signal_that_ends_the_ranks_gives_128_and_its_number(tmp_path):
    with started(tmp_path, BEGIN + WAIT, "-n", "2") as process:
        written(tmp_path, 2)
        process.terminate()

        assert process.wait(60) == 143
        assert process.stderr.read().splitlines()[-1] == "lockstep: told to end by SIGTERM, and so were its ranks"


def test_a_rank_that_ignores_sigterm_holds_the_launcher_no_longer_than_grace(tmp_path):
    with started(
        tmp_path, HERE + "signal.signal(15, signal.SIG_IGN)\n" + BEGIN + WAIT, "-n", "2", "--grace", "0.2"
    ) as process:
        written(tmp_path, 2)
        process.terminate()

        assert process.wait(60) == 137
        said = process.stderr.read().splitlines()[-1]
        assert said == "lockstep: told to end by SIGTERM, and so were its ranks; SIGKILL at last for 0, 1"


def test_a_second_ctrl_c_ends_ranks_that_do_not_listen_to_the_first(tmp_path):
    source = HERE + (
        "def note(number, frame):\n    pathlib.Path(__file__).with_name(f'got{rank}').touch()\n"
        "signal.signal(signal.SIGINT, note)\npathlib.Path(__file__).with_name(str(os.getpid())).touch()\n"
    )
    with started(tmp_path, source + WAIT, "-n", "2", "--grace", "1000") as process:
        written(tmp_path, 2)
        process.send_signal(signal.SIGINT)
        until(lambda: all((tmp_path / f"got{rank}").exists() for rank in range(2)), "both ranks have had the first")
        process.send_signal(signal.SIGINT)

        assert process.wait(60) == 137


def test_every_restart_names_the_killed_rank_and_not_a_peer_that_felt_it(tmp_path):
    """Its status may be gone before the watching thread looks: torch's agent has it then."""
    source = HERE + (
        "import torch, torch.distributed as dist\ndist.init_process_group('gloo')\n"
        "for step in range(9):\n"
        "    dist.all_reduce(torch.ones(4))\n"
        "    if step == 5 and rank == 2 and int(os.environ['TORCHELASTIC_RESTART_COUNT']) < 5:\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
    )

    done = run(tmp_path, source, "-n", "3", "--max-restarts", "5")

    lines = [line for line in done.stderr.splitlines() if line.startswith("lockstep: restart")]
    assert done.returncode == 0, done.stderr
    assert len(lines) == 5
    assert all("rank 2" in line and line.endswith("died of SIGKILL") for line in lines), lines


def test_restarts_say_who_died_of_what_and_how_often_and_find_a_fresh_store(tmp_path):
    source = HERE + (
        "import torch, torch.distributed as dist\ndist.init_process_group('gloo')\n"
        "x = torch.ones(1)\ndist.all_reduce(x)\nattempt = int(os.environ['TORCHELASTIC_RESTART_COUNT'])\n"
        "if attempt == 0 and rank == 1: raise ValueError('unlucky')\n"
        "if attempt == 1 and rank == 0: os.kill(os.getpid(), signal.SIGKILL)\n"
        "dist.barrier()\nprint('sum', int(x)) if rank == 0 else None\n"
    )

    done = run(tmp_path, source, "-n", "2", "--max-restarts", "3")

    assert done.returncode == 0, done.stderr
    assert done.stdout == "sum 2\n"
    lines = [line for line in done.stderr.splitlines() if line.startswith("lockstep: restart")]
    assert re.match(r"lockstep: restart 1 of 3: rank 1 \(local rank 1 on \S+\) died of ValueError: unlucky$", lines[0])
    assert re.match(r"lockstep: restart 2 of 3: rank 0 \(local rank 0 on \S+\) died of SIGKILL$", lines[1])
    assert len(lines) == 2


def test_a_stopped_job_does_not_start_again(tmp_path):
    with started(tmp_path, BEGIN + WAIT, "-n", "2", "--max-restarts", "3") as process:
        written(tmp_path, 2)
        process.terminate()

        assert process.wait(60) == 143
        assert "lockstep: restart" not in process.stderr.read()
    assert len(written(tmp_path, 2)) == 2


def test_the_scripts_own_hook_writes_the_traceback(tmp_path):
    source = (
        HERE + "sys.excepthook = lambda kind, error, trace: print('my own', kind.__name__, file=sys.stderr)\n1 / 0\n"
    )

    done = run(tmp_path, source, "-n", "2")

    assert done.stderr.splitlines()[-1] == "my own ZeroDivisionError"


def test_a_long_traceback_does_not_stop_the_rank_from_ending(tmp_path):
    done = run(tmp_path, HERE + "raise ValueError('x' * 300_000) if rank else SystemExit\n", "-n", "2")

    assert done.returncode == 1
    assert "characters left out" in done.stderr


def test_a_clean_end_is_silent(tmp_path):
    done = run(tmp_path, "import json, os; print(json.dumps(os.environ['RANK']))", "-n", "2")

    assert (done.returncode, done.stderr) == (0, "")
    assert sorted(json.loads(line.removeprefix("[rank 1] ")) for line in done.stdout.splitlines()) == ["0", "1"]
