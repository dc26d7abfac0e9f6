"""`make run`: the example as a user starts it."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LINE = re.compile(r"epoch (\d): loss ([\d.]+), accuracy ([\d.]+) on 360 images")


@pytest.mark.timeout(300)
def test_two_ranks_print_what_one_process_prints():
    """The losses of the first epochs agree to rounding; later ones as far as training lets rounding grow."""
    commands = [
        [sys.executable, "examples/digits.py"],
        [sys.executable, "-m", "lockstep_cli", "run", "-n", "2", "examples/digits.py"],
    ]
    alone, ranks = (
        subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT, timeout=280).stdout
        for command in commands
    )

    first, second = ([tuple(map(float, found)) for found in LINE.findall(text)] for text in (alone, ranks))
    assert [len(first), len(second)] == [6, 6]
    assert [abs(a[1] - b[1]) < 2e-3 for a, b in zip(first, second, strict=True)] == [True] * 6
    assert min(first[-1][2], second[-1][2]) >= 0.97
    assert re.fullmatch(r"accuracy 0\.9[789]", ranks.splitlines()[-1])
