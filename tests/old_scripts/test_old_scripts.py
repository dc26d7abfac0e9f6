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


def images(seed, count):
    rng = np.random.RandomState(seed)
    pixels, labels = rng.randint(0, 256, (count, 8, 8, 3)), rng.randint(0, 5, count)
    x = (torch.tensor(pixels).permute(0, 3, 1, 2) / 255 - torch.tensor([0.485, 0.456, 0.406])[:, None, None]).double()
    return x / torch.tensor([0.229, 0.224, 0.225])[:, None, None], torch.tensor(labels)


def image_classifier():
    """Six epochs of two steps over shuffled images, with a warm-up."""
    torch.manual_seed(1)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(),
        nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(32, 5),
    ).double()  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    x, y = images(0, 32)
    for step in range(12):
        epoch, place = divmod(step, 2)
        order = torch.randperm(32, generator=torch.Generator().manual_seed(epoch))[16 * place :][:16]
        optimizer.param_groups[0]["lr"] = 0.05 * min(1, (step + 1) / 10)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[order]), y[order]).backward()
        optimizer.step()
    x, y = images(1, 16)
    with torch.no_grad():
        return float(nn.functional.cross_entropy(model.eval()(x), y))


def convolutional_adversaries():
    torch.manual_seed(2809)
    generator = nn.Sequential(
        nn.ConvTranspose2d(4, 4, 4, 1, 0, bias=False), nn.BatchNorm2d(4), nn.ReLU(),
        nn.ConvTranspose2d(4, 1, 4, 2, 1, bias=False), nn.Tanh(),
    )  # fmt: skip
    start(generator)
    critic = nn.Sequential(
        nn.Conv2d(1, 4, 4, 2, 1, bias=False), nn.BatchNorm2d(4), nn.LeakyReLU(0.2), nn.Conv2d(4, 1, 4, 1, 0, bias=False)
    )
    start(critic)
    models = [critic.double(), generator.double()]
    steps = [torch.optim.Adam(model.parameters(), lr=0.01, betas=(0.5, 0.999)) for model in models]
    rng = np.random.RandomState(0)
    real = torch.tensor(rng.rand(16, 1, 8, 8)) * 2 - 1
    judge, yes, no = nn.functional.binary_cross_entropy_with_logits, *torch.tensor([[1.0] * 8, [0.0] * 8]).double()
    for number, noise in enumerate(torch.tensor(rng.randn(6, 8, 4, 1, 1))):
        fake = generator(noise)
        critic.zero_grad()
        of_critic = judge(critic(real[number % 2 * 8 :][:8]).flatten(), yes)
        of_critic = of_critic + judge(critic(fake.detach()).flatten(), no)
        of_critic.backward()
        steps[0].step()
        generator.zero_grad()
        of_generator = judge(critic(fake).flatten(), yes)
        of_generator.backward()
        steps[1].step()
    return float((of_critic + of_generator).detach())


def start(model):
    for module in model:
        if isinstance(module, nn.Conv2d | nn.ConvTranspose2d):
            nn.init.normal_(module.weight, 0.0, 0.2)
        elif isinstance(module, nn.BatchNorm2d):
            nn.init.normal_(module.weight, 1.0, 0.02)


# The script, what one process comes to, and how far half precision may be from it.
SCRIPTS = [
    ("data_parallel_2017", plain, 1e-5),
    ("gan_2018", adversarial, 1e-5),
    ("imagenet_spawn_2018", plain, 1e-5),
    ("launch_local_rank_2018", plain, 1e-5),
    ("speech_hooks_2018", plain, 1e-5),
    ("apex_amp_2019", plain, 1e-2),
    ("apex_syncbn_2019", with_batch_norm, 1e-2),
    ("dcgan_amp_2019", convolutional_adversaries, 3e-2),
    ("tutorial_process_2019", plain, 1e-5),
    ("detection_env_or_slurm_2020", plain, 1e-5),
    ("native_amp_2020", plain, 1e-2),
    ("resume_torchrun_2021", plain, 1e-5),
    ("syncbn_prefetcher_2021", with_batch_norm, 1e-5),
    ("compile_accumulate_2022", plain, 3e-2),
    ("default_device_2024", plain, 1e-5),
]


def run(name, *arguments):
    return subprocess.run(
        [*LOCKSTEP, "run", "--device", "cpu", "-n", "2", str(HERE / f"{name}.py"), *arguments],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )


@pytest.mark.parametrize(("name", "expected", "tolerance"), SCRIPTS, ids=[name for name, _, _ in SCRIPTS])
def test_an_old_script_runs_as_it_is_and_ends_with_the_loss_of_one_process(
    name, expected, tolerance, tmp_path, monkeypatch
):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    done = run(name)

    assert done.returncode == 0, done.stderr
    assert "a GPU would refuse it" not in done.stderr
    (loss,) = re.findall(r"final loss ([\d.]+)", done.stdout)
    assert float(loss) == pytest.approx(expected(), abs=tolerance)
    assert [path for path in tmp_path.iterdir() if not path.name.startswith("torchinductor_")] == []  # torch's own


def test_an_old_script_goes_on_from_its_checkpoint_and_ends_with_the_loss_of_one_process(tmp_path):
    first = run("imagenet_amp_2019", "--epochs", "3", "--folder", str(tmp_path))
    assert first.returncode == 0, first.stderr
    rest = run("imagenet_amp_2019", "--resume", str(tmp_path / "checkpoint.pth.tar"))

    assert rest.returncode == 0, rest.stderr
    assert "a GPU would refuse it" not in first.stderr + rest.stderr
    assert re.findall(r"epoch (\d):", first.stdout + rest.stdout) == list("012345")
    (loss,) = re.findall(r"final loss ([\d.]+)", rest.stdout)
    assert float(loss) == pytest.approx(image_classifier(), abs=2e-3)


def test_they_are_sixteen_and_none_is_forgotten():
    names = {path.stem for path in HERE.glob("*.py")} - {Path(__file__).stem}

    assert names == {name for name, _, _ in SCRIPTS} | {"imagenet_amp_2019"}
    assert len(names) == 16
