"""SIGTERM and SIGUSR1: finish the step, save, and end with a code that says "again, later"."""

import os
import signal

import pytest
from launching import PATIENCE, started, until
from ranks import run_ranks

import lockstep

TRAINING = """
import pathlib, time, torch, lockstep
lockstep.init(device="cpu", seed=0)
model = lockstep.replicate(torch.nn.Linear(4, 1))
update = lockstep.Update(model, torch.optim.SGD(model.parameters(), lr=0.1))
train = lockstep.DataLoader(torch.rand(100_000, 4), batch_size=2)
checkpoint = lockstep.Checkpoint(FOLDER + "/runs", model=model, update=update, train=train)
for epoch in checkpoint.epochs(1):
    for x in train:
        with update:
            update.backward(model(x).square().squeeze(1))
        checkpoint.step()
        if checkpoint.step_count == 3:
            pathlib.Path(FOLDER, "training").touch()
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1], ids=["TERM", "USR1"])
def test_c09_preemption_signals_save_on_all_ranks_at_one_step(tmp_path, number):
    """Preemption signal not handled/forwarded: job dies without checkpoint."""
    source = f"FOLDER = {str(tmp_path)!r}" + TRAINING
    with started(tmp_path, source, "-n", "2", "--max-restarts", "3") as launcher:
        until((tmp_path / "training").exists, "it trains")
        launcher.send_signal(number)
        _, said = launcher.communicate(timeout=PATIENCE)
    (folder,) = (tmp_path / "runs").iterdir()
    step = int(folder.name.rpartition("-")[2])

    assert launcher.returncode == 75
    assert f"lockstep: {number.name}: saved at step {step} in " in said
    assert "restart" not in said
    assert "failed first" not in said
    assert step > 2


def one_is_told(rank, directory, told):
    checkpoint = lockstep.Checkpoint(directory, values={"step": 0})
    try:
        for epoch in checkpoint.epochs(3):
            for number in range(10):
                if epoch == 1 and number == 4 and rank == told:
                    os.kill(os.getpid(), signal.SIGUSR1)
                checkpoint.step()
    except SystemExit as end:
        return end.code, checkpoint.step_count, checkpoint.epoch


@pytest.mark.parametrize("told", [0, 1])
def test_all_ranks_agree_on_the_step_whichever_was_told(tmp_path, told):
    assert run_ranks(one_is_told, 2, tmp_path, told) == [(75, 16, 1)] * 2


def told_at_the_end(rank, directory):
    checkpoint = lockstep.Checkpoint(directory, values={"step": 0}, every_steps=100)
    try:
        for _ in checkpoint.epochs(3):
            checkpoint.step()
            if rank == 1:
                os.kill(os.getpid(), signal.SIGTERM)  # during the evaluation
    except SystemExit as end:
        return end.code, checkpoint.step_count, checkpoint.epoch


def test_a_signal_behind_the_last_step_is_obeyed_at_the_end_of_the_epoch(tmp_path):
    assert run_ranks(told_at_the_end, 2, tmp_path) == [(75, 1, 1)] * 2


def test_signals_mean_what_they_meant_before_once_the_epochs_are_over(tmp_path):
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)]
    for _ in lockstep.Checkpoint(tmp_path, values={}).epochs(1):
        assert signal.getsignal(signal.SIGTERM) != before[0]

    assert before == [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)]
