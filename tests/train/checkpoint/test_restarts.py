"""Ranks that are killed at any moment, under `lockstep run --max-restarts`: a few here, fifty in ``make soak``."""

import json
import os
import random
from pathlib import Path

import pytest
from launching import run

KILLS, EPOCHS, STEPS = 4, 4, 20
RUNS = 13 if "LOCKSTEP_SOAK" in os.environ else 2
# Five starts in a row, half a minute on a machine with nothing else to do.
PATIENCE = 400.0
pytestmark = pytest.mark.timeout(2 * PATIENCE)

# Kills are drawn before the run: at which step, which ranks, and whether at the step itself or a few writes later,
# which is in the middle of a save. A file for each that has happened keeps it from happening again.
SCRIPT = """
import json, os, signal, sys, threading
from pathlib import Path
sys.path[:0] = [ROOT]
import lockstep
from lockstep.train.checkpoint import files
from tests.train.checkpoint.job import Run

directory, kills = Path(DIRECTORY), KILLS
rank = int(os.environ["RANK"])

class Deadly:
    left = 0
    def __getattr__(self, name):
        if name in ("write", "fsync", "rename", "mkdir", "open") and self.left:
            self.left -= 1
            if not self.left:
                os.kill(os.getpid(), signal.SIGKILL)
        return getattr(os, name)

deadly = files.os = Deadly()
run = Run(directory / "runs", noise=0.1, dropout=0.3, every_steps=2, keep=2)
step = run.checkpoint.step

def step_and_die():
    for number, (at, ranks, calls) in enumerate(kills):
        done = directory / f"killed-{number}-{rank}"
        if at == run.checkpoint.step_count and rank in ranks and not done.exists():
            done.touch()
            if not calls:
                os.kill(os.getpid(), signal.SIGKILL)
            deadly.left = calls if rank == 0 else 1 + calls % 3  # rank 1 only writes its share
    step()

run.checkpoint.step = step_and_die
run.go(EPOCHS)
if rank == 0:
    weights = {name: value.hex() for name, value in run.weights().items()}
    (directory / "weights.json").write_text(json.dumps(weights))
"""


def trained(folder, kills, epochs):
    folder.mkdir()
    names = {"ROOT": str(Path(__file__).parents[3]), "DIRECTORY": str(folder), "KILLS": kills, "EPOCHS": epochs}
    source = "\n".join(f"{name} = {value!r}" for name, value in names.items()) + SCRIPT
    end = run(folder, source, "-n", "2", "--max-restarts", str(2 * len(kills)), timeout=PATIENCE)
    assert end.returncode == 0, end.stderr
    return json.loads((folder / "weights.json").read_text()), end.stderr


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    return trained(tmp_path_factory.mktemp("runs") / "whole", [], EPOCHS)[0]


def draw_kills(seed):
    draw = random.Random(seed)
    moments = sorted(draw.sample(range(STEPS - 2), KILLS))
    return [(at, draw.choice([(0,), (1,), (0, 1)]), draw.choice([0, *range(1, 12)])) for at in moments]


@pytest.mark.parametrize("number", range(RUNS))
def test_runs_that_are_killed_end_with_the_same_weights_to_the_bit(tmp_path, uninterrupted, number):
    found, said = trained(tmp_path / "killed", draw_kills(number), EPOCHS)
    restarts = said.count("lockstep: restart ")

    assert uninterrupted == found
    assert KILLS - 1 <= restarts <= KILLS * 2  # two that are to die may do so at once
    assert "SIGKILL" in said
    assert [path for path in (tmp_path / "killed" / "runs").iterdir() if path.name.startswith(".")] == []
