"""Scripts as people wrote them from 2017 to 2024, unchanged, on a machine without a GPU.

Each trains on the same 16 samples, so that one process computes here what they should come to.
"""

import re
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from launching import LOCKSTEP, PATIENCE
from torch import nn

HERE = Path(__file__).parent


def data():
    rng = np.random.RandomState(0)
    return torch.tensor(rng.randn(16, 6), dtype=torch.float64), torch.tensor(rng.randint(0, 3, 16))


def classifier(*norm):
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 8), *norm, nn.ReLU(), nn.Linear(8, 3)).double()


def descend(model):
    """Six steps of gradient descent in float64 on all samples at once."""
    x, y = data()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(6):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    with torch.no_grad():
        return float(nn.functional.cross_entropy(model(x), y))


def plain():
    return descend(classifier())


def with_batch_norm():
    return descend(classifier(nn.BatchNorm1d(8)))


def adversarial():
    torch.manual_seed(1)
    generator = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 6)).double()
    critic = nn.Sequential(nn.Linear(6, 8), nn.LeakyReLU(0.2), nn.Linear(8, 1), nn.Sigmoid()).double()
    steps = [torch.optim.SGD(model.parameters(), lr=0.5) for model in (critic, generator)]
    rng = np.random.RandomState(0)
    real, noises = torch.tensor(rng.randn(16, 6)), torch.tensor(rng.randn(6, 16, 2))
    yes, no = torch.ones(16, 1).double(), torch.zeros(16, 1).double()
    judge = nn.BCELoss()
    for noise in noises:
        critic.zero_grad()
        fake = generator(noise)
        of_critic = judge(critic(real), yes) + judge(critic(fake.detach()), no)
        of_critic.backward()
        steps[0].step()
        generator.zero_grad()
        of_generator = judge(critic(fake), yes)
        of_generator.backward()
        steps[1].step()
    return float((of_critic + of_generator).detach())


# The script, what one process comes to, and how far half precision may be from it.
SCRIPTS = [
    ("data_parallel_2017", plain, 1e-5),
    ("gan_2018", adversarial, 1e-5),
    ("imagenet_spawn_2018", plain, 1e-5),
    ("launch_local_rank_2018", plain, 1e-5),
    ("speech_hooks_2018", plain, 1e-5),
    ("apex_amp_2019", plain, 1e-2),
    ("apex_syncbn_2019", with_batch_norm, 1e-2),
    ("tutorial_process_2019", plain, 1e-5),
    ("detection_env_or_slurm_2020", plain, 1e-5),
    ("native_amp_2020", plain, 1e-2),
    ("resume_torchrun_2021", plain, 1e-5),
    ("syncbn_prefetcher_2021", with_batch_norm, 1e-5),
    ("compile_accumulate_2022", plain, 3e-2),
    ("default_device_2024", plain, 1e-5),
]


@pytest.mark.parametrize(("name", "expected", "tolerance"), SCRIPTS, ids=[name for name, _, _ in SCRIPTS])
def test_an_old_script_runs_as_it_is_and_ends_with_the_loss_of_one_process(
    name, expected, tolerance, tmp_path, monkeypatch
):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    done = subprocess.run(
        [*LOCKSTEP, "run", "--device", "cpu", "-n", "2", str(HERE / f"{name}.py")],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    assert "a GPU would refuse it" not in done.stderr
    (loss,) = re.findall(r"final loss ([\d.]+)", done.stdout)
    assert float(loss) == pytest.approx(expected(), abs=tolerance)
    assert [path for path in tmp_path.iterdir() if not path.name.startswith("torchinductor_")] == []  # torch's own


def test_they_are_fourteen_and_none_is_forgotten():
    names = {path.stem for path in HERE.glob("*.py")} - {Path(__file__).stem}

    assert names == {name for name, _, _ in SCRIPTS}
    assert len(names) == 14
