"""U01: bars and lines are printed once per process; here on rank 0, once."""

import io
import os
import pty
import re
import subprocess
import sys

import pytest
import torch
from ranks import run_ranks

import lockstep
from lockstep.train.bar import Count


def watch(rank, batches):
    written = sys.stderr = io.StringIO()
    lockstep.init(device="cpu")
    bar = lockstep.progress([torch.zeros(3, 2)] * batches, "epoch 3")
    for batch in bar:
        bar.set(loss=torch.tensor(0.25), lr=1e-3)
        assert batch.shape == (3, 2)
    return written.getvalue(), len(bar)


def test_u01_without_a_terminal_rank_0_prints_a_line_and_the_others_nothing():
    (first, length), (second, _) = run_ranks(watch, 2, 4)

    line = re.sub(r"[\d,]+ samples/s", "N samples/s", first)
    assert line.splitlines()[-1] == "epoch 3  4/4  N samples/s  loss 0.25  lr 0.001"
    assert (second, length) == ("", 4)


def test_samples_are_counted_over_the_world():
    count = Count()
    count.add({"names": ["a"], "x": torch.zeros(5, 2)}, size=4)
    count.add([torch.tensor(1.0)], size=4)

    assert (count.batches, count.samples) == (2, 24)


SCRIPT = """
import torch, lockstep
bar = lockstep.progress([torch.zeros(2)] * 7, "epoch 1")
for _ in bar:
    bar.set(loss=0.5)
print("after")
"""


def test_in_a_terminal_there_is_a_bar_that_ends_full():
    leader, follower = pty.openpty()
    with subprocess.Popen(
        [sys.executable, "-c", SCRIPT], stdout=follower, stderr=follower, env={**os.environ, "COLUMNS": "120"}
    ) as process:
        os.close(follower)
        shown = b""
        while True:
            try:
                chunk = os.read(leader, 4096)
            except OSError:
                break
            if not chunk:
                break
            shown += chunk
        process.wait(timeout=60)
    os.close(leader)

    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown.decode())
    assert "7/7" in text
    assert "loss 0.5" in text
    assert text.rstrip().endswith("after")


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_breaking_off_leaves_the_terminal_as_it_was(error, capsys):
    bar = iter(lockstep.progress([1, 2, 3], "epoch"))
    next(bar)
    with pytest.raises(error):
        bar.throw(error)

    assert "0/3" in capsys.readouterr().err


def test_a_loss_with_a_graph_is_shown_without_a_warning(capsys):
    bar = lockstep.progress([1])
    for _ in bar:
        bar.set(loss=torch.ones(2, requires_grad=True).sum())

    assert "loss 2" in capsys.readouterr().err
