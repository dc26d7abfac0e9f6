"""`srun lockstep run`: the plan from Slurm's variables, as its documentation has them."""

import os
import shlex
import subprocess
import sys

import pytest
from click.testing import CliRunner
from launching import LOCKSTEP, run

from lockstep.errors import UsageError
from lockstep.launcher.plan import Machine, Rehearsal, Wish, in_full, make_plan
from lockstep.launcher.slurm import follow
from lockstep_cli.slurm import slurm

CPUS = Machine(gpus=0, groups=((0, 1), (2, 3)))
GPUS = Machine(gpus=8, groups=(tuple(range(64)),))
STEP = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "1",
    "SLURM_NODEID": "1",
    "SLURM_LOCALID": "0",
    "SLURM_NTASKS": "2",
    "SLURM_NNODES": "2",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
    "SLURM_JOB_NODELIST": "login,gpu[007-008]",
    "SLURM_STEP_NODELIST": "gpu[007-008]",
    "SLURM_CPUS_ON_NODE": "64",
}
BATCH = {key: value for key, value in STEP.items() if "STEP" not in key} | {"SLURM_JOB_NUM_NODES": "2"}
ONE = STEP | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_NUM_NODES": "1", "SLURM_NODEID": "0"}


def nodes(wish):
    return wish.nnodes, wish.node_rank, wish.master_addr, wish.master_port


@pytest.mark.parametrize(
    ("environ", "wish", "expected"),
    [
        ({}, Wish(), ("1", 0, "", None)),
        (STEP, Wish(), ("2", 1, "gpu007", 19711)),
        ({**STEP, "SLURM_STEP_ID": "3"}, Wish(), ("2", 1, "gpu007", 22702)),
        ({**STEP, "MASTER_ADDR": "gpu7-ib", "MASTER_PORT": "4000"}, Wish(), ("2", 1, "gpu7-ib", 4000)),
        (STEP, Wish(master_port=5000), ("2", 1, "gpu007", 5000)),
        (STEP, Wish(nnodes="3", master_addr="a"), ("3", 0, "a", None)),
        (STEP, Wish(rdzv_backend="c10d", rdzv_endpoint="a:1"), ("1", 0, "", None)),
        (ONE, Wish(), ("1", 0, "", None)),
        (BATCH, Wish(), ("1", 0, "", None)),
        ({**ONE, "SLURM_STEP_ID": "4294967290", "SLURM_JOB_NUM_NODES": "2"}, Wish(), ("1", 0, "", None)),
        ({**ONE, "SLURM_PTY_PORT": "9"}, Wish(), ("1", 0, "", None)),
    ],
    ids=[
        *("no-slurm", "step", "second-step", "master-set", "port-option", "nodes-said", "rdzv-said"),
        *("one-task", "batch", "salloc", "pty"),
    ],
)
def test_l12_nodes_and_meeting_place_come_from_slurm_unless_said(environ, wish, expected):
    assert nodes(follow(wish, GPUS, environ).wish) == expected


def test_standalone_is_this_node_alone():
    assert nodes(follow(Wish(), GPUS, STEP, alone=True).wish) == ("1", 0, "", None)


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        (
            {**STEP, "SLURM_STEP_NUM_TASKS": "16"},
            ["16 tasks on 2 nodes", "--ntasks=2 --ntasks-per-node=1"],
        ),
        ({**STEP, "SLURM_PTY_PORT": "9"}, ["--pty", "--standalone"]),
        ({k: v for k, v in STEP.items() if k != "SLURM_NODEID"}, ["SLURM_NODEID is not"]),
        ({**STEP, "SLURM_STEP_NODELIST": "gpu[1"}, ["'gpu[1'", "MASTER_ADDR"]),
        ({**STEP, "SLURM_STEP_NUM_NODES": "two"}, ["SLURM_STEP_NUM_NODES='two'"]),
        ({**STEP, "MASTER_PORT": "http"}, ["MASTER_PORT='http'"]),
    ],
    ids=["tasks", "pty", "half", "list", "number", "port"],
)
def test_what_does_not_fit_is_said_with_what_to_write(environ, words):
    with pytest.raises(UsageError) as error:
        follow(Wish(), GPUS, environ)

    assert [word for word in words if word not in str(error.value)] == []


CPU_WANTED = {
    "cpu": Wish(nproc_per_node="cpu"),
    "number": Wish(nproc_per_node="2"),
    "rehearsal": Wish(rehearsal=Rehearsal()),
}


@pytest.mark.parametrize("wish", CPU_WANTED.values(), ids=CPU_WANTED.keys())
def test_gpus_that_slurm_gave_and_torch_does_not_see_stop_the_run_unless_cpus_were_wanted(wish):
    environ = {**ONE, "SLURM_GPUS_ON_NODE": "8", "CUDA_VISIBLE_DEVICES": "0,1"}

    assert follow(wish, CPUS, environ).wish.nnodes == "1"
    with pytest.raises(UsageError, match=r"gives 8 GPU.*torch sees none \(CUDA_VISIBLE_DEVICES=0,1\).*-n cpu"):
        follow(Wish(), CPUS, environ)


@pytest.mark.parametrize(
    ("given", "ranks", "threads", "pinned"),
    [("4", 2, 2, True), ("64", 2, 2, True), ("2", 2, 1, False), ("1", 1, 1, False)],
)
def test_ranks_and_threads_keep_to_the_processors_that_slurm_counts(given, ranks, threads, pinned):
    told = follow(Wish(), CPUS, {**ONE, "SLURM_CPUS_ON_NODE": given})
    plan = make_plan(told.wish, told.machine, {})

    assert (len(plan.seats), plan.threads, bool(plan.seats[0].cores)) == (ranks, threads, pinned)


def test_a_batch_script_of_several_nodes_is_told_that_it_uses_one():
    assert "one of 2 nodes of Slurm's job 4711" in follow(Wish(), GPUS, BATCH).note
    assert follow(Wish(), GPUS, BATCH, alone=True).note == ""
    assert follow(Wish(), GPUS, {**BATCH, "SLURM_JOB_NUM_NODES": "1"}).note == ""


def test_the_note_is_shown_before_the_run_and_in_the_plan(tmp_path):
    environ = {key: value for key, value in os.environ.items() if not key.startswith("SLURM_")} | BATCH
    ended = run(tmp_path, "print('ran')", "-n", "1", env=environ)
    plan = make_plan(Wish(), CPUS, BATCH)

    assert (ended.stdout, "one of 2 nodes of Slurm's job 4711" in ended.stderr) == ("ran\n", True), ended
    assert follow(Wish(), CPUS, BATCH).put_in(plan).choices["meeting"].rule == "this node of Slurm's job alone"


def test_dry_run_says_that_slurm_said_so():
    told = follow(Wish(), CPUS, STEP)
    shown = in_full(told.put_in(make_plan(told.wish, told.machine, STEP)), "train.py")

    line = "meeting static at gpu007:19711 (Slurm: node 1 of 2 in gpu[007-008], job 4711)"
    assert line in " ".join(shown.split()), shown


def printed(*words):
    result = CliRunner().invoke(slurm, words)
    assert result.exit_code == 0, result.output
    return result.output


def test_the_job_script_asks_for_what_was_said():
    text = printed(
        "train.py", "--nodes", "2", "--gpus", "8", "--cpus", "32", "--time", "1-0:00:00", "--", "--lr", "1 2"
    )
    lines = text.splitlines()

    wanted = "--job-name=train --time=1-0:00:00 --nodes=2 --ntasks-per-node=1 --gpus-per-node=8 --cpus-per-task=32"
    assert [f"#SBATCH {word}" for word in wanted.split() if f"#SBATCH {word}" not in lines] == []
    assert "# 2 nodes with 8 GPUs each. Submit it with: sbatch FILE" in lines
    assert "--exclusive" not in text
    task = shlex.split(next(line for line in lines if line.startswith("srun")))
    assert task[-4:] == ["100", "train.py", "--lr", "1 2"]


def test_an_unknown_option_may_be_the_scripts():
    result = CliRunner().invoke(slurm, ["train.py", "--lr", "0.1"])

    assert (result.exit_code, "No such option" in result.output, "behind --" in result.output) == (2, True, True)


def test_without_a_number_of_processors_the_job_asks_for_whole_nodes():
    assert "#SBATCH --exclusive\n" in printed("train.py")


@pytest.mark.parametrize(("code", "requeued"), [(0, False), (1, False), (75, True)])
def test_the_job_script_requeues_itself_after_75_and_keeps_the_code(tmp_path, code, requeued):
    """Bash runs the script as printed; only srun and scontrol are stand-ins that answer and take notes."""
    for name, source in {"srun": f"exit {code}", "scontrol": f'echo "$@" > {tmp_path}/asked'}.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{source}\n")
        (tmp_path / name).chmod(0o700)
    environ = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "7"}
    ended = subprocess.run(["bash"], input=printed("train.py"), text=True, env=environ, check=False)

    asked = tmp_path / "asked"
    assert (ended.returncode, asked.read_text() if asked.exists() else "") == (code, "requeue 7\n" if requeued else "")


@pytest.mark.parametrize("name", ["a b", "x\n#SBATCH --uid=0", "#", "'", ""])
def test_a_name_cannot_leave_its_line(name):
    result = CliRunner().invoke(slurm, ["train.py", "--name", name])

    assert (result.exit_code, "#SBATCH --job-name=train" in result.output) == ((0, True) if not name else (2, False))


def test_the_command_starts_without_torch():
    call = "slurm.main(['a.py'], standalone_mode=False)"
    code = f"import sys; from lockstep_cli.slurm import slurm; {call}; print(*sys.modules)"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout

    assert {"torch", "numpy"} & set(shown.split()) == set()


def test_it_is_a_command_of_lockstep():
    shown = subprocess.run([*LOCKSTEP, "slurm", "--help"], capture_output=True, text=True, check=True).stdout

    assert "job script" in shown


def test_the_options_of_the_command_are_these():
    """Growing this list is a decision."""
    names = sorted(name for option in slurm.params for name in option.opts if name.startswith("--"))

    assert names == [
        *("--account", "--cpus", "--gpus", "--gpus-per-node", "--module", "--name", "--nodes", "--notice"),
        *("--partition", "--ranks", "--time"),
    ]
