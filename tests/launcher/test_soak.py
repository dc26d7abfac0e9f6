"""Clean ends, and starts and failures of all kinds: one round here, a hundred in ``make soak``."""

import os
from pathlib import Path

import pytest
from launching import PATIENCE, alive, run, started, until

ROUNDS = int(os.environ.get("LOCKSTEP_SOAK", "1"))
pytestmark = pytest.mark.timeout(120 + ROUNDS * 60)

TRAINING = """
import os, sys, pathlib, torch, torch.distributed as dist
dist.init_process_group("gloo")
net = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.BatchNorm1d(64), torch.nn.Linear(64, 64))
model = torch.nn.parallel.DistributedDataParallel(net)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(5):
    optimizer.zero_grad()
    model(torch.randn(8, 64)).sum().backward()
    optimizer.step()
pending = dist.all_reduce(torch.ones(1000), async_op=True)
"""

BEGIN = (
    "import os, sys, signal, time, pathlib\n"
    "pathlib.Path(sys.argv[1], str(os.getpid())).touch()\nrank = int(os.environ['RANK'])\n"
)
ENDINGS = {
    "clean": ("", 0),
    "raises": ("if rank: raise ValueError(rank)\ntime.sleep(1000)", 1),
    "exits": ("if rank: sys.exit(3)\ntime.sleep(1000)", 3),
    "killed": ("if rank: os.kill(os.getpid(), 9)\ntime.sleep(1000)", 137),
    "crashes": ("if rank: os.abort()\ntime.sleep(1000)", 134),
    "leaves a child": ("import subprocess; subprocess.Popen(['sleep', '1000'], start_new_session=True)", 0),
    "stopped": ("time.sleep(1000)", 143),
    "launcher killed": ("time.sleep(1000)", -9),
}


@pytest.mark.parametrize("ending", ["", "pending.wait()\ndist.destroy_process_group()\n"], ids=["left", "destroyed"])
def test_l17_a_clean_script_ends_clean(tmp_path, ending):
    """Wall of warnings / SIGABRT at exit if group not destroyed."""
    ends = [run(tmp_path, TRAINING + ending, "-n", "3") for _ in range(ROUNDS)]

    assert [(end.returncode, end.stdout, end.stderr) for end in ends] == [(0, "", "")] * ROUNDS


@pytest.mark.parametrize("kind", ENDINGS)
def test_nothing_is_left_however_it_ends(tmp_path, kind):
    """Files in /tmp are looked at by a fixture."""
    source, code = ENDINGS[kind]
    for number in range(-(-ROUNDS // len(ENDINGS))):
        marks = tmp_path / str(number)
        marks.mkdir()
        if kind in ("stopped", "launcher killed"):
            with started(tmp_path, BEGIN.replace("sys.argv[1]", repr(str(marks))) + source, "-n", "2") as process:
                until(lambda marks=marks: len(list(marks.iterdir())) == 2, "both ranks have begun")
                process.send_signal(15 if kind == "stopped" else 9)
                assert process.wait(PATIENCE) == code
        else:
            assert run(tmp_path, BEGIN + source, "-n", "2", arguments=(str(marks),)).returncode == code
        pids = [int(mark.name) for mark in marks.iterdir()]
        until(lambda pids=pids: not any(map(alive, pids)), "every rank is gone")
        until(lambda: not below(tmp_path), "nobody runs who was started here")


def below(folder):
    """Processes whose command or environment names this test's folder."""
    others = (p for p in Path("/proc").iterdir() if p.name.isdecimal() and p.name != str(os.getpid()))
    return [entry.name for entry in others if alive(entry.name) and str(folder) in environment(entry)]


def environment(entry):
    try:
        return (entry / "environ").read_text(errors="replace") + (entry / "cmdline").read_text(errors="replace")
    except OSError:
        return ""
