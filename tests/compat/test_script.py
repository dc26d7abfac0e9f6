"""examples/apex_script.py as a user starts it: from the beginning, and from its checkpoint."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LINE = re.compile(r"epoch (\d): loss ([\d.]+), accuracy ([\d.]+), loss scale ([\d.]+)")


def run(folder, *arguments, ranks=2):
    command = [sys.executable, "-m", "lockstep_cli", "run", "-n", str(ranks), "examples/apex_script.py"]
    command += ["--checkpoint", str(folder / "checkpoint.pt"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, timeout=200)


@pytest.mark.timeout(300)
def test_a_script_of_2019_runs_and_goes_on_from_its_checkpoint(tmp_path):
    first = run(tmp_path, "--epochs", "2")
    assert 0 == first.returncode, first.stdout + first.stderr
    rest = run(tmp_path, "--epochs", "4", "--resume")

    assert 0 == rest.returncode, rest.stdout + rest.stderr
    assert 1 == first.stdout.count("Selected optimization level O1")
    epochs = LINE.findall(first.stdout) + LINE.findall(rest.stdout)
    assert ["0", "1", "2", "3"] == [epoch for epoch, *_ in epochs]
    assert float(epochs[-1][2]) > 0.9


def test_outside_of_lockstep_run_no_apex_is_there(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", "import apex"], capture_output=True, text=True, check=False, cwd=tmp_path,
        env={key: value for key, value in os.environ.items() if key != "PYTHONPATH"},
    )  # fmt: skip

    assert "No module named 'apex'" in done.stderr
