"""What ranks get when they start: addresses, ports, threads, cores; and the command line that asks for it."""

import ast
import os
import resource
import shlex
import shutil
import subprocess
import sys

import pytest
from click.testing import CliRunner
from launching import (
    LOCKSTEP,
    PATIENCE,
    alive,
    children,
    command,
    listeners,
    run,
    started,
    until,
    without_gloo,
    written,
)

from lockstep.errors import UsageError
from lockstep.launcher.plan import Machine, Wish, make_plan
from lockstep_cli import main

GROUP = (
    "import os, sys, torch, time, pathlib, torch.distributed as dist\nrank = int(os.environ['RANK'])\n"
    "dist.init_process_group('gloo')\nx = torch.ones(1)\ndist.all_reduce(x)\n"
)
BEGIN = "pathlib.Path(__file__).with_name(str(os.getpid())).touch()\n"


def test_l01_launches_at_once_do_not_collide(tmp_path):
    """Port 29500 in use with two jobs on one node."""
    jobs = []
    for number in range(3):
        (tmp_path / str(number)).mkdir()
        line = command(tmp_path / str(number), GROUP + f"print({number}, int(x)) if rank == 0 else None", "-n", "2")
        jobs.append(
            subprocess.Popen(line, stdout=subprocess.PIPE, text=True, env=os.environ | {"MASTER_PORT": "29500"})
        )

    assert [without_gloo(job.communicate(timeout=90)[0]) for job in jobs] == [f"{number} 2\n" for number in range(3)]


def test_l01_a_port_that_was_asked_for_and_is_taken_is_said_in_one_line_with_its_owner(tmp_path):
    """Explicit port busy gave a traceback."""
    import socket

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = run(tmp_path, GROUP, "-n", "2", "--master-port", str(port))

    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"lockstep: --master-port {port} is taken by process {os.getpid()} ")


def test_a_port_that_was_asked_for_serves_restarts_too(tmp_path):
    import socket

    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    source = (
        GROUP
        + "assert os.environ['MASTER_PORT'] == sys.argv[1]\nsys.exit(os.environ['TORCHELASTIC_RESTART_COUNT'] == '0')"
    )

    done = run(tmp_path, source, "-n", "2", "--master-port", str(port), "--max-restarts", "1", arguments=(str(port),))

    assert done.returncode == 0, done.stderr


def test_on_one_machine_nothing_listens_beyond_loopback(tmp_path):
    with started(tmp_path, GROUP + BEGIN + "while True: time.sleep(0.1)", "-n", "2") as process:
        ranks = written(tmp_path, 2)
        (agent,) = children(process.pid)
        found = listeners([process.pid, agent, *ranks])
        process.terminate()
        process.wait(60)

    assert found
    assert found <= {"0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F"}
    assert not any(map(alive, [agent, *ranks]))


@pytest.mark.parametrize(("ranks", "own", "threads"), [(1, "", 2), (2, "", 1), (1, "1", 1)])
def test_l08_threads_are_cores_by_ranks_and_the_users_own_number_wins(tmp_path, ranks, own, threads):
    """OMP_NUM_THREADS forced to 1, and a banner."""
    source = (
        "import os, torch, threadpoolctl, numpy\nnumpy.ones((300, 300)) @ numpy.ones((300, 300))\n"
        "torch.ones(300, 300) @ torch.ones(300, 300); torch.ones(10_000_000).exp()\n"
        "pools = {p['internal_api']: p['num_threads'] for p in threadpoolctl.threadpool_info()}\n"
        "print([torch.get_num_threads(), int(os.environ['OMP_NUM_THREADS']), *pools.values()])\n"
    )
    cores = sorted(os.sched_getaffinity(0))[:2]
    if len(cores) < 2:
        pytest.skip("one core")
    more = {
        "env": {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"}
        | ({"OMP_NUM_THREADS": own} if own else {})
    }

    done = run(tmp_path, source, "-n", str(ranks), preexec_fn=lambda: os.sched_setaffinity(0, cores), **more)

    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    for line in done.stdout.splitlines():
        counts = ast.literal_eval(line.removeprefix("[rank 1] "))
        assert len(counts) > 2
        assert set(counts) == {threads}


def test_each_rank_keeps_to_its_own_cores(tmp_path):
    cores = sorted(os.sched_getaffinity(0))[:2]
    if len(cores) < 2:
        pytest.skip("one core")

    done = run(
        tmp_path, "import os; print(sorted(os.sched_getaffinity(0)))", "-n", "2",
        preexec_fn=lambda: os.sched_setaffinity(0, cores),
    )  # fmt: skip

    assert sorted(done.stdout.splitlines()) == sorted([f"[{cores[0]}]", f"[rank 1] [{cores[1]}]"])


def test_cores_are_left_alone_where_they_say_nothing():
    wide = Machine(gpus=0, groups=(tuple(range(8)),))

    def pinned(machine=wide, environ=None):
        seats = make_plan(Wish(nproc_per_node="2"), machine, environ or {}).seats
        return [seat.cores for seat in seats] != [()] * 2

    assert pinned()
    assert not pinned(environ={"OMP_PROC_BIND": "false"})
    assert not pinned(machine=wide._replace(quota=4.0))
    assert not pinned(machine=wide._replace(gpus=2))
    assert not pinned(machine=wide._replace(groups=((0,),)))


@pytest.mark.parametrize(
    ("machine", "ranks", "threads"),
    [
        (Machine(gpus=4, groups=((0, 1, 2, 3),)), 4, 1),
        (Machine(gpus=0, groups=((0, 1), (2, 3))), 2, 2),
        (Machine(gpus=0, groups=((0, 1, 2, 3),), quota=2.0), 1, 2),
        (Machine(gpus=8, groups=((0, 1),)), 8, 1),
    ],
)
def test_by_default_there_is_a_rank_for_each_gpu_or_core_group(machine, ranks, threads):
    plan = make_plan(Wish(), machine, {})

    assert (len(plan.seats), plan.threads) == (ranks, threads)


@pytest.mark.parametrize(
    ("wish", "words"),
    [
        (Wish(nproc_per_node="gpu"), "no GPU"),
        (Wish(nproc_per_node="0"), "from 1 on"),
        (Wish(nnodes="2"), "--master-addr"),
        (Wish(nnodes="3:2"), "least and the most"),
        (Wish(nnodes="2", master_addr="a", node_rank=2), "from 0 to 1"),
        (Wish(nnodes="1:2", master_addr="a"), "c10d"),
        (Wish(rdzv_backend="c10d"), "--rdzv-endpoint"),
        (Wish(rdzv_endpoint="a:1", rdzv_backend="c10d", rdzv_conf="x"), "key=value"),
        (Wish(debug=1), "--debug"),
    ],
)
def test_a_wish_that_cannot_be_met_says_what_to_write(wish, words):
    with pytest.raises(UsageError, match=words):
        make_plan(wish, Machine(gpus=0, groups=((0, 1),)), {})


@pytest.mark.parametrize("backend", ["static", "c10d"])
def test_two_nodes_meet_as_with_torchrun(tmp_path, backend):
    import socket

    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    where = {
        "static": ["--master-addr", "127.0.0.1", "--master-port", str(port)],
        "c10d": [
            "--rdzv-backend",
            "c10d",
            "--rdzv-endpoint",
            f"127.0.0.1:{port}",
            "--rdzv-id",
            "j",
            "--local-addr",
            "127.0.0.1",
        ],
    }[backend]
    source = GROUP + "print(rank, os.environ['LOCAL_RANK'], int(x), os.environ['GROUP_WORLD_SIZE'], flush=True)"
    nodes = []
    for node in range(2):
        (tmp_path / str(node)).mkdir()
        first = ["--node-rank", str(node)] if backend == "static" else []
        line = command(tmp_path / str(node), source, "-n", "2", "--nnodes", "2", *first, *where)
        env = os.environ | {"GLOO_SOCKET_IFNAME": "lo"}
        nodes.append(subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env))
    shown = [node.communicate(timeout=110) for node in nodes]

    assert [node.returncode for node in nodes] == [0, 0], shown
    host = socket.gethostname()
    lines = sorted(line for out, _ in shown for line in without_gloo(out).splitlines())
    assert sorted(line.rpartition("] ")[2] for line in lines) == [f"{r} {r % 2} 4 2" for r in range(4)]
    assert {line.partition("] ")[0] for line in lines if "] " in line} <= {f"[{host} rank {r}" for r in range(1, 4)}


def test_the_options_are_these():
    """Growing the list is a decision that someone sees here."""
    run_command = main.get_command(None, "run")

    assert sorted(option for p in run_command.params for option in p.opts if option.startswith("-")) == [
        *(
            "--compat",
            "--debug",
            "--device",
            "--dry-run",
            "--grace",
            "--hide-cuda",
            "--local-addr",
            "--log-dir",
            "--master-addr",
            "--master-port",
            "--max-restarts",
        ),
        *(
            "--module",
            "--nnodes",
            "--node-rank",
            "--nproc-per-node",
            "--ranks",
            "--rdzv-backend",
            "--rdzv-conf",
            "--rdzv-endpoint",
        ),
        *("--rdzv-id", "--stall", "--standalone", "--start", "--steps", "--trust-checkpoints", "--watch", "-m", "-n"),
    ]


def test_both_spellings_of_an_option_are_one(tmp_path):
    (tmp_path / "x.py").write_text("")
    outputs = {
        CliRunner().invoke(main, ["run", option, "2", "--dry-run", str(tmp_path / "x.py")]).output
        for option in ("--nproc-per-node", "--nproc_per_node", "-n")
    }

    assert len(outputs) == 1
    assert "ranks    2  (--nproc-per-node)" in outputs.pop()


def test_a_misspelt_option_is_not_taken_for_the_script(tmp_path):
    result = CliRunner().invoke(main, ["run", "--nproc-per-nod", "2", "x.py"])

    assert result.exit_code == 2
    assert "Did you mean" in result.output
    assert "--nproc-per-node" in result.output


def test_a_script_in_place_of_a_command_is_told_what_was_meant():
    result = CliRunner().invoke(main, ["train.py", "--lr", "0.1"])

    assert result.exit_code == 2
    assert "Did you mean 'lockstep run train.py'?" in result.output


@pytest.mark.parametrize("arguments", [["nothere.py"], ["-m", "nothere"]])
def test_a_script_that_is_not_there_is_said_before_anything_starts(arguments):
    result = CliRunner().invoke(main, ["run", "-n", "2", *arguments])

    assert result.exit_code == 2
    assert "nothere" in result.output


def test_the_choice_of_ranks_is_said_in_one_line_and_only_if_it_was_made_here(tmp_path):
    done = run(tmp_path, "")
    told = run(tmp_path, "", "-n", "1")

    assert done.stderr.count("\n") == 1
    assert "one for each" in done.stderr
    assert told.stderr == ""


def test_a_dry_run_prints_the_plan_and_runs_nothing(tmp_path):
    (tmp_path / "x.py").write_text("raise SystemExit(9)")
    result = CliRunner().invoke(main, ["run", "-n", "2", "--dry-run", str(tmp_path / "x.py"), "--lr", "1"])

    assert result.exit_code == 0
    for words in (
        "x.py --lr 1",
        "(--nproc-per-node)",
        "local rank 1: ",
        "GLOO_SOCKET_IFNAME=lo",
        "127.0.0.1, a free port",
    ):
        assert words in result.output


@pytest.mark.parametrize("arguments", [["--help"], ["run", "--help"], ["--version"]])
def test_the_command_line_starts_without_torch(arguments):
    probe = (
        "import sys\nsys.argv[0] = 'lockstep'\nfrom lockstep_cli import main\n"
        "try: main()\nexcept SystemExit: pass\nprint('torch' in sys.modules or 'lockstep.launcher' in sys.modules)"
    )

    done = subprocess.run([sys.executable, "-c", probe, *arguments], capture_output=True, text=True, check=True)

    assert done.stdout.splitlines()[-1] == "False"


def test_l06_l07_no_argument_is_given_to_the_script_that_it_did_not_ask_for(tmp_path):
    """--local-rank was injected, in one spelling; `lockstep run` sets LOCAL_RANK and adds no argument at all."""
    source = "import argparse, os\nargparse.ArgumentParser().parse_args()\nprint(os.environ['LOCAL_RANK'])"

    done = run(tmp_path, source, "-n", "2")

    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["0", "[rank 1] 1"]


def test_loader_workers_and_backward_work_in_forked_ranks_after_the_parent_imported_torch(tmp_path):
    """Nothing that is unsafe after a fork has happened in the parent: threads, autograd, numpy, a second fork."""
    source = GROUP + (
        "import numpy as np\nmodel = torch.nn.Conv2d(3, 8, 3)\n"
        "loader = torch.utils.data.DataLoader(torch.ones(8, 3, 32, 32), batch_size=4, num_workers=2)\n"
        "for batch in loader: model(batch).sum().backward()\n"
        "a = np.ones((500, 500)) @ np.ones((500, 500))\nb = torch.ones(500, 500) @ torch.ones(500, 500)\n"
        "print(float(a[0, 0]), float(b[0, 0]), model.weight.grad is not None)\n"
    )

    done = run(tmp_path, source, "-n", "2", env=os.environ | {"OMP_NUM_THREADS": "2"})

    assert done.returncode == 0, done.stderr
    assert {line.removeprefix("[rank 1] ") for line in done.stdout.splitlines()} == {"500.0 500.0 True"}


def test_a_script_that_is_stopped_before_its_ranks_begin_ends(tmp_path):
    """A node that waits for others is told to end."""
    arguments = [
        "-n",
        "1",
        "--nnodes",
        "2",
        "--rdzv-backend",
        "c10d",
        "--rdzv-endpoint",
        "127.0.0.1:0",
        "--local-addr",
        "127.0.0.1",
    ]
    with started(tmp_path, "", *arguments) as process:
        (agent,) = until(lambda: children(process.pid), "the agent has begun")
        until(lambda: listeners([agent]), "the agent waits for the other node")
        process.terminate()

        assert process.wait(60) == 143


def test_module_main_is_the_command():
    done = subprocess.run([*LOCKSTEP, "--help"], capture_output=True, text=True, check=True)

    assert "lockstep" in done.stdout


def test_closed_streams_are_streams_of_nothing(tmp_path):
    source = (
        "import os, sys\nassert not sys.stdin.read()\nprint('a')\nprint('b', file=sys.stderr)\n"
        "open(os.environ['RANK'], 'w').close()\n"
    )
    line = " ".join(map(shlex.quote, command(tmp_path, source, "-n", "2")))

    done = subprocess.run(["sh", "-c", f"{line} <&- >&- 2>&-"], cwd=tmp_path, timeout=PATIENCE, check=False)

    assert done.returncode == 0
    assert {"0", "1"} <= {path.name for path in tmp_path.iterdir()}


@pytest.mark.parametrize(("limits", "code"), [((32, 200), 0), ((48, 48), 2)])
def test_open_files_are_as_many_as_ranks_need_or_it_is_said(tmp_path, limits, code):
    done = run(tmp_path, "pass", "-n", "3", preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, limits))

    assert done.returncode == code, done.stderr
    assert ("3 ranks need" in done.stderr and "ulimit -n" in done.stderr) == (code == 2)


def test_without_room_for_semaphores_it_is_said_what_is_needed(tmp_path):
    """Python's multiprocessing cannot start ranks then; torchrun's can, and its loaders' workers raise."""
    mounted = 'mount -t tmpfs -o ro tmpfs /dev/shm && exec "$@"'
    within = ["unshare", "--map-root-user", "--mount", "sh", "-c", mounted, "sh"]
    if shutil.which("unshare") is None or subprocess.run([*within, "true"], check=False).returncode:
        pytest.skip("no file system can be mounted here")
    words = [*within, *command(tmp_path, "pass", "-n", "2")]

    done = subprocess.run(words, capture_output=True, text=True, check=False)

    assert done.returncode == 2
    assert done.stderr.startswith("lockstep: no semaphore can be made (Read-only file system)")
    assert "mount -t tmpfs tmpfs /dev/shm" in done.stderr
    assert done.stderr.count("\n") == 1
