"""`lockstep doctor` on this machine, for real."""

import json
import os
import shlex
import shutil
import subprocess
import sys

import pytest
from click.testing import CliRunner
from launching import LOCKSTEP, PATIENCE

from lockstep_cli.doctor import inside, page
from lockstep_cli.doctor.command import doctor
from lockstep_cli.doctor.line import Line


def test_the_doctor_looks_at_everything_and_measures_two_ranks(tmp_path):
    done = subprocess.run(
        [*LOCKSTEP, "doctor", "--json"],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        env=os.environ | {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "2", "SLURM_PROCID": "1", "TMPDIR": str(tmp_path)},
        check=False,
    )
    told = json.loads(done.stdout)
    lines = {line["about"]: line for line in told["lines"]}

    assert done.stderr == ""
    assert done.returncode == (told["state"] == "broken")
    assert {"lockstep", "python", "torch", "GPUs", "cores", "memory", "/dev/shm", "open files"} <= set(lines)
    assert {"loopback", "route out", "host name", "gloo", "shm", "NCCL", "2 ranks, shm", "2 ranks, gloo"} <= set(lines)
    assert [(speed["backend"], speed["trouble"]) for speed in told["facts"]["speed"][:2]] == [("shm", ""), ("gloo", "")]
    assert all(speed["latency"] > 0 and speed["bandwidth"] > 0 for speed in told["facts"]["speed"])
    assert told["facts"]["inside"]["groups"]
    assert list(tmp_path.glob("lockstep-*")) == []


def test_a_torch_that_cannot_be_imported_is_one_broken_line_and_the_rest_goes_on(tmp_path):
    (tmp_path / "torch.py").write_text("raise ImportError('libc10.so: cannot open shared object file')\n")

    done = subprocess.run(
        [*LOCKSTEP, "doctor"],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        check=False,
    )

    assert done.returncode == 1
    assert "broken    torch " in done.stdout
    assert "ImportError: libc10.so: cannot open shared object file" in done.stdout
    assert "/dev/shm" in done.stdout
    assert done.stdout.splitlines()[-1].endswith("1 broken")


def test_a_small_shm_a_low_limit_and_a_network_that_is_down_are_seen():
    """In namespaces of its own; without loopback nothing is measured, so this ends at once."""
    within = ["unshare", "--map-root-user", "--net", "--mount", "sh", "-c"]
    small = "mount -t tmpfs -o size=64m tmpfs /dev/shm && ulimit -n 200"
    if shutil.which("unshare") is None or subprocess.run([*within, small], capture_output=True, check=False).returncode:
        pytest.skip("no namespaces of one's own here")

    done = subprocess.run(
        [*within, f"{small} && exec {shlex.join([*LOCKSTEP, 'doctor', '--json'])}"],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        env=os.environ | {"GLOO_SOCKET_IFNAME": "eth7"},
        check=False,
    )
    told = json.loads(done.stdout)
    lines = {line["about"]: (line["state"], line["found"]) for line in told["lines"]}

    assert (done.returncode, told["state"], told["facts"]["speed"]) == (1, "broken", [])
    assert lines["/dev/shm"] == (
        "broken",
        "64 MiB, 64 MiB free: less than one batch of images; loader workers end with a bus error",
    )
    assert lines["open files"] == ("broken", "200 a process, may be raised to 200")
    assert lines["loopback"] == ("broken", "no interface that is up has 127.0.0.1")
    assert lines["route out"] == ("doubtful", "none")
    assert lines["GLOO_SOCKET_IFNAME"] == ("broken", "eth7, but no such interface is up")


def test_the_page_shows_each_line_with_its_remedy(capsys):
    page.show([Line("gloo", "fine", "there"), Line("/dev/shm", "broken", "64 MiB", "Write --shm-size=8g.")])

    assert [row.split() for row in capsys.readouterr().out.splitlines()] == [
        ["fine", "gloo", "there"],
        ["broken", "/dev/shm", "64", "MiB"],
        ["Write", "--shm-size=8g."],
        ["1", "fine,", "0", "doubtful,", "1", "broken"],
    ]


def test_a_new_python_does_not_look_into_the_current_folder_first(tmp_path):
    (tmp_path / "json.py").write_text("raise ImportError('not this one')\n")

    done = subprocess.run(inside.command("import json"), cwd=tmp_path, capture_output=True, text=True, check=False)

    assert (done.returncode, done.stderr) == (0, "")


def test_the_options_are_these():
    options = ["--json", "--master-addr", "--master-port", "--nnodes", "--node-rank", "--timeout"]
    assert sorted(option for p in doctor.params for option in p.opts) == options
    assert "measures two ranks" in CliRunner().invoke(doctor, ["--help"]).output


def test_the_command_is_found_without_torch():
    code = "import lockstep_cli.doctor.command, lockstep_cli.doctor.inside, sys; print('torch' in sys.modules)"

    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"
