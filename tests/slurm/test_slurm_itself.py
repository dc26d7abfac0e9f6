"""Slurm's own daemons on this machine: two nodes, real srun and sbatch. `make slurm`."""

from pathlib import Path

import pytest
import slurm_cluster

from lockstep.world.slurm import first_host

DIGITS = str(Path(__file__).parents[2] / "examples" / "digits.py")
pytestmark = [
    pytest.mark.skipif(bool(slurm_cluster.missing()), reason=slurm_cluster.missing() or "it can run"),
    pytest.mark.timeout(300),
]


@pytest.fixture(scope="module")
def cluster():
    with slurm_cluster.started() as made:
        yield made


def test_srun_lockstep_run_trains_on_two_nodes(cluster):
    shown = cluster.ask("srun", "--nodes=2", "--ntasks-per-node=1", "lockstep", "run", "-n", "1", DIGITS, timeout=240)

    assert [line for line in shown.splitlines() if line.startswith("accuracy")] == ["accuracy 0.99"]


def test_srun_python_trains_with_one_task_for_each_rank(cluster):
    shown = cluster.ask("srun", "--nodes=2", "--ntasks=2", "python", DIGITS, timeout=240)

    assert [line for line in shown.splitlines() if line.startswith("accuracy")] == ["accuracy 0.99"]


def test_each_node_gets_its_rank_its_master_and_its_processors(cluster):
    """One task gets one processor, unless more are asked for: --cpus-per-task."""
    words = ["srun", "--nodes=2", "--ntasks-per-node=1", "--label", "lockstep", "run", "--dry-run", DIGITS]
    lines = cluster.ask(*words).splitlines()
    meeting = sorted(line for line in lines if "meeting" in line)
    ranks = sorted(" ".join(line.split()[:3]) for line in lines if line.split()[1] == "ranks")

    assert [f"node {node} of 2 in 127.0.0.[2-3]" in line for node, line in enumerate(meeting)] == [True, True], lines
    assert {line.partition("static at ")[2].partition(":")[0] for line in meeting} == {"127.0.0.2"}
    assert ranks == ["0: ranks 1", "1: ranks 1"], lines


def test_two_launchers_on_one_node_are_refused(cluster):
    ended = cluster.run("srun", "--nodes=1", "--ntasks=2", "lockstep", "run", DIGITS)

    assert (ended.returncode, ended.stderr.count("srun starts 2 tasks on 1 node,")) == (2, 2), ended


@pytest.mark.parametrize(
    "nodelist",
    [
        "n1",
        "a,b",
        "gpu[01-04]",
        "gpu[3,5-6]",
        "gpu[007-009,12],login1",
        "rack[1-2]n[001-016]",
        "h-1.example.org,x[1-2]",
    ],
)
def test_the_first_host_is_the_one_that_scontrol_shows(cluster, nodelist):
    assert first_host(nodelist) == cluster.ask("scontrol", "show", "hostnames", nodelist).splitlines()[0]


TRAINING = """
import os, pathlib
import lockstep, torch

world = lockstep.init(seed=0)
model = lockstep.replicate(torch.nn.Linear(4, 1))
update = lockstep.Update(model, torch.optim.SGD(model.parameters(), lr=0.01))
data = lockstep.DataLoader(torch.rand(64, 4), batch_size=8)
checkpoint = lockstep.Checkpoint("saved", model=model, update=update, data=data, every_steps=10**9)
again = "SLURM_RESTART_COUNT" in os.environ
print(f"rank {world.rank} begins at step {update.step_count}", flush=True)
for epoch in checkpoint.epochs(10**9):
    for x in data:
        if again:
            print(f"rank {world.rank} goes on after step {update.step_count}", flush=True)
            raise SystemExit(0)
        with update:
            update.backward(model(x).square().squeeze(1))
        if update.step_count == 3:
            pathlib.Path(f"trained-{world.rank}").touch()
        checkpoint.step()
"""


@pytest.mark.parametrize("signal", ["USR1", "TERM"])
def test_the_printed_job_is_requeued_after_a_signal_and_goes_on(cluster, tmp_path, signal):
    (tmp_path / "train.py").write_text(TRAINING)
    words = ["lockstep", "slurm", "train.py", "--nodes", "2", "--cpus", "1", "-n", "1", "--time", "10:00"]
    (tmp_path / "job.sh").write_text(cluster.ask(*words, cwd=tmp_path))
    job = cluster.ask("sbatch", "--parsable", "job.sh", cwd=tmp_path).strip()
    output = tmp_path / f"train-{job}.out"

    def shown():
        return f"{output.read_text() if output.exists() else ''}\n{cluster.run('scontrol', 'show', 'job', job).stdout}"

    cluster.until(lambda: len(list(tmp_path.glob("trained-*"))) == 2, shown)
    cluster.ask("scancel", f"--signal={signal}", job)
    cluster.until(lambda: output.read_text().count("goes on after") == 2, shown)
    cluster.until(lambda: "JobState=COMPLETED" in shown(), shown)

    assert "Restarts=1" in shown()
    assert {int(line.split()[-1]) >= 3 for line in shown().splitlines() if "goes on after" in line} == {True}, shown()
