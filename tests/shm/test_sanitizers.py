"""The C core under the compiler's sanitizers: no race between ranks, no byte out of bounds."""

import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).parent
CORE = HERE.parents[1] / "src" / "lockstep" / "shm"


@pytest.mark.parametrize("kind", ["thread", "address,undefined"])
def test_the_core_is_clean_under_the_sanitizer(kind, tmp_path):
    program = tmp_path / "sanitize"
    flags = [
        "-std=c11",
        "-O1",
        "-g",
        "-fwrapv",
        "-ffp-contract=off",
        "-Wall",
        "-Wextra",
        "-Werror",
        "-pthread",
        "-DPLAIN",
    ]
    subprocess.run(
        [
            "cc",
            *flags,
            f"-fsanitize={kind}",
            "-fno-sanitize-recover=all",
            f"-I{CORE}",
            HERE / "sanitize.c",
            "-o",
            program,
        ],
        check=True,
    )

    # Addresses are not shuffled: gcc's thread sanitizer does not know the layout of newer kernels.
    done = subprocess.run(["setarch", "-R", program], capture_output=True, text=True, timeout=100, check=False)

    assert (done.returncode, done.stderr) == (0, "")
