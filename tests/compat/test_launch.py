"""Scripts as people wrote them, started as people started them: real processes."""

import os
import socket
import subprocess
import sys

import pytest
from click.testing import CliRunner
from launching import LOCKSTEP, PATIENCE, without_gloo
from torch.distributed.run import get_args_parser

from lockstep.launcher import drop_in
from lockstep_cli.run import run as run_command

LAUNCH = [sys.executable, "-m", "lockstep.launch"]


def run(command, folder, **files):
    for name, text in files.items():
        path = folder / name.replace("__", ".")
        path.write_text(text)
    return subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=PATIENCE, check=False, stdin=subprocess.DEVNULL
    )


def lines(done):
    """What ranks have printed, without the launcher's mark of the rank, in the order of ranks."""
    assert done.returncode == 0, done.stderr
    shown = without_gloo(done.stdout).splitlines()
    return sorted(line.partition("] ")[2] if line.startswith("[rank") else line for line in shown)


OF_2019 = """
import argparse, sys, os, torch
import torch.distributed as dist
parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, default=-1)
parser.add_argument("--lr", type=float)
args = parser.parse_args()
dist.init_process_group("gloo", init_method="env://")
x = torch.ones(1) * args.local_rank
dist.all_reduce(x)
print(args.local_rank, args.lr, int(x), sys.argv[1])
"""


def test_a_script_of_2019_runs_as_it_was_started(tmp_path):
    done = run(
        [*LAUNCH, "--nproc_per_node=2", "--master_port", "0", "train.py", "--lr", "0.5"], tmp_path, train__py=OF_2019
    )

    assert ["0 0.5 1 --local_rank=0", "1 0.5 1 --local_rank=1"] == lines(done)


def test_lockstep_run_understands_it_without_being_told(tmp_path):
    done = run([*LOCKSTEP, "run", "-n", "2", "train.py", "--lr", "0.5"], tmp_path, train__py=OF_2019)

    assert ["0 0.5 1 --local_rank=0", "1 0.5 1 --local_rank=1"] == lines(done)


def test_a_dry_run_says_that_it_takes_the_script_for_an_old_one(tmp_path):
    done = run([*LOCKSTEP, "run", "-n", "2", "--dry-run", "train.py"], tmp_path, train__py=OF_2019)

    assert "an old one; gets --local_rank, and what is gone is mended" in done.stdout


def test_with_use_env_nothing_is_passed_and_the_parser_has_it_all_the_same(tmp_path):
    script = OF_2019.replace("sys.argv[1]", "sys.argv[1:]")
    done = run([*LAUNCH, "--use_env", "--nproc-per-node", "2", "train.py"], tmp_path, train__py=script)

    assert ["0 None 1 []", "1 None 1 []"] == lines(done)


def test_a_script_that_knows_no_such_argument_is_passed_none(tmp_path):
    script = "import os, sys\nprint(os.environ['LOCAL_RANK'], sys.argv[1:])"
    done = run([*LAUNCH, "--nproc_per_node=2", "train.py", "--lr", "1"], tmp_path, train__py=script)

    assert ["0 ['--lr', '1']", "1 ['--lr', '1']"] == lines(done)


def test_a_program_is_started_and_its_exit_code_kept(tmp_path):
    program = run(
        [*LAUNCH, "--nproc_per_node=2", "--no_python", "--use_env", "sh", "-c", 'echo "$RANK of $WORLD_SIZE"'], tmp_path
    )
    failed = run([*LAUNCH, "--no_python", "--use_env", "sh", "-c", "exit 7"], tmp_path)

    assert ["0 of 2", "1 of 2"] == lines(program)
    assert failed.returncode == 7


@pytest.mark.parametrize("more", [[], ["--use_env", "-m"]], ids=["without --use_env", "with -m"])
def test_a_program_is_passed_nothing(more):
    done = CliRunner().invoke(drop_in.main, ["--no_python", *more, "sh", "-c", "exit 7"])

    assert done.exit_code == 2
    assert "--no_python" in done.output


def test_every_option_of_torchs_launcher_is_taken_in_both_spellings(tmp_path):
    values = {"nnodes": "1:1", "rdzv_backend": "", "rdzv_endpoint": "", "log_dir": str(tmp_path / "logs")}
    values |= dict.fromkeys(("max_restarts", "node_rank", "master_port"), "0")
    given = []
    for action in get_args_parser()._actions:
        if action.dest in ("help", "print_completion", "no_python", "module", "start_method"):  # they change what runs
            continue
        for name in action.option_strings:
            given += [name] if action.nargs == 0 else [name, values.get(action.dest, "1")]
    done = run([*LAUNCH, *given, "--start_method=spawn", "--use-env", "train.py"], tmp_path, train__py="print('ran')")

    assert ["ran"] == lines(done)
    assert "--role has no effect here" in done.stderr


def test_a_taken_port_stops_nobody_and_a_module_is_run_as_such(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = run([*LAUNCH, f"--master_port={port}", "-m", "train"], tmp_path, train__py=OF_2019)

    assert ["0 None 0 --local_rank=0"] == lines(done)
    assert f"port {port} is taken; the ranks meet at a free one" in done.stderr


MADE_UP = """
import argparse, torch
import torch.distributed as dist
parser = argparse.ArgumentParser()
parser.add_argument("--dist-url", default="tcp://224.66.41.62:23456")
parser.add_argument("--rank", type=int)
parser.add_argument("--world-size", type=int)
args = parser.parse_args()
dist.init_process_group("gloo", init_method=args.dist_url, rank=args.rank, world_size=args.world_size)
x = torch.ones(1) * (1 + args.rank)
dist.all_reduce(x)
print(args.rank, args.world_size, int(x))
"""


def test_apexs_launcher_passes_rank_and_world_size_and_the_address_does_not_matter(tmp_path):
    command = [*LOCKSTEP, "run", "--compat", "-n", "2", "-m", "apex.parallel.multiproc", "main.py"]
    done = run(command, tmp_path, main__py=MADE_UP)

    assert ["0 2 3", "1 2 3"] == lines(done)


def test_torchs_launcher_as_a_module_is_taken_over(tmp_path):
    command = [*LOCKSTEP, "run", "-m", "torch.distributed.launch", "--nproc_per_node=2", "train.py", "--lr", "1"]
    done = run(command, tmp_path, train__py=OF_2019)

    assert ["0 1.0 1 --local_rank=0", "1 1.0 1 --local_rank=1"] == lines(done)


SLURM = """
import os, subprocess, torch
import torch.distributed as dist
rank, size = int(os.environ["SLURM_PROCID"]), int(os.environ["SLURM_NTASKS"])
nodes = os.environ["SLURM_NODELIST"]
os.environ["MASTER_ADDR"] = subprocess.getoutput(f"scontrol show hostname {nodes} | head -n1")
os.environ["MASTER_PORT"] = "29500"
os.environ["WORLD_SIZE"], os.environ["RANK"] = str(size), str(rank)
dist.init_process_group("gloo")
x = torch.ones(1)
dist.all_reduce(x)
print(rank, size, int(x), os.environ["MASTER_ADDR"])
"""


@pytest.mark.skipif(any(name.startswith("SLURM_") for name in os.environ), reason="this is Slurm")
def test_a_script_for_slurm_finds_its_variables(tmp_path):
    done = run([*LOCKSTEP, "run", "-n", "2", "train.py"], tmp_path, train__py=SLURM)

    assert ["0 2 2 localhost", "1 2 2 localhost"] == lines(done)


SPAWNS = """
import torch, os
from torch._six import inf
import torch.multiprocessing as mp
import torch.distributed as dist

def work(rank, size):
    dist.init_process_group("gloo", init_method="file://STORE", rank=rank, world_size=size)
    x = torch.ones(1).to("cpu", async=True)
    dist.all_reduce(x)
    os.write(1, f"{rank} {int(x)}\\n".encode())  # in one piece, beside another process's

if __name__ == "__main__":
    mp.spawn(work, args=(COUNT,), nprocs=COUNT)
"""


def test_a_script_that_spawns_is_started_once(tmp_path):
    script = SPAWNS.replace("STORE", str(tmp_path / "store")).replace("COUNT", "2")
    done = run([*LOCKSTEP, "run", "--compat", "-n", "4", "train.py"], tmp_path, train__py=script)

    assert ["0 2", "1 2"] == lines(done)
    assert 4 == done.stderr.count("train.py:")  # two mends in the script's process, and in the first that it started


def test_a_script_that_would_spawn_nothing_says_so(tmp_path):
    script = SPAWNS.replace("COUNT", "torch.cuda.device_count()")
    done = run([*LOCKSTEP, "run", "--compat", "train.py"], tmp_path, train__py=script)

    assert done.returncode == 1
    assert "mp.spawn(nprocs=0) starts nothing: torch sees no GPU here" in done.stderr


MENDED = """
import torch
from module import move
import collections

loss = move(torch.ones(1)).sum()
print(loss.data[0], isinstance([], collections.Sequence))
"""
MODULE = "def move(x):\n    return x.to('cpu', async=True)\n"


def test_what_was_mended_is_told_once_by_rank_0(tmp_path):
    done = run([*LAUNCH, "--nproc_per_node=2", "train.py"], tmp_path, train__py=MENDED, module__py=MODULE)

    assert ["1.0 True", "1.0 True"] == lines(done)
    assert done.stderr.splitlines() == [
        "lockstep: mended 3 things that this script uses and that are gone:",
        "  module.py:2  async=True (gone since Python 3.7); write: non_blocking=True",
        "  train.py:7  loss.data[0] (gone since torch 1.0); write: loss.item()",
        "  train.py:7  collections.Sequence (gone since Python 3.10); write: collections.abc.Sequence",
    ]
    assert not (tmp_path / "__pycache__").exists()


@pytest.mark.parametrize(
    "command", [[*LAUNCH, "--no-compat"], [*LOCKSTEP, "run", "-n", "1"]], ids=["told", "not asked"]
)
def test_without_compat_nothing_is_mended(tmp_path, command):
    done = run([*command, "train.py"], tmp_path, train__py="import collections\ncollections.Sequence")

    assert done.returncode == 1
    assert "has no attribute 'Sequence'" in done.stderr
    assert "lockstep/compat" not in done.stderr


def test_a_syntax_error_of_another_kind_is_the_scripts_own(tmp_path):
    done = run([*LAUNCH, "train.py"], tmp_path, train__py="x = 1\nprint 'hello'\n")

    assert done.returncode == 1
    assert done.stderr.rstrip().splitlines()[1:3] == [
        f'  File "{tmp_path}/train.py", line 2',
        "    print 'hello'",
    ]


TRUSTS = """
import torch
class Odd: pass
torch.save(Odd(), "odd.pt")
print(type(torch.load("odd.pt")).__name__)
"""


def test_a_checkpoint_with_other_classes_is_read_where_it_is_trusted(tmp_path):
    command = [*LOCKSTEP, "run", "-n", "1", "--trust-checkpoints", "train.py"]

    assert ["Odd"] == lines(run(command, tmp_path, train__py=TRUSTS))


SAME = (
    "nnodes node_rank master_addr master_port standalone rdzv_backend rdzv_endpoint rdzv_id rdzv_conf local_addr "
    "max_restarts module trust_checkpoints"
)


@pytest.mark.parametrize("name", SAME.split())
def test_options_of_both_launchers_that_have_one_name_are_the_same(name):
    """They stand in two places, because `lockstep --help` must not wait for torch."""
    here, there = (
        next(option for option in command.params if option.name == name) for command in (run_command, drop_in.main)
    )
    for fact in ("opts", "type", "default", "metavar", "is_flag", "help", "show_default"):
        assert repr(getattr(here, fact)) == repr(getattr(there, fact)), fact
