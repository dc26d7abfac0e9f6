"""Start `lockstep run` for real, and look at what it and everything below it does."""

import contextlib
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

LOCKSTEP = [sys.executable, "-m", "lockstep_cli"]
SOAK = pytest.mark.skipif("LOCKSTEP_SOAK" not in os.environ, reason="takes too long for every change: make soak")
PATIENCE = 90.0
"""Seconds after which a condition that should come true at once is given up, on the slowest machine."""


def command(folder, source, *options, arguments=()):
    """Write a script and give the command that runs it."""
    script = Path(folder) / "train.py"
    script.write_text(source)
    return [*LOCKSTEP, "run", *options, str(script), *arguments]


def run(folder, source, *options, arguments=(), timeout=PATIENCE, **more):
    """Run a script to its end; code, output and errors are in the result."""
    done = subprocess.run(
        command(folder, source, *options, arguments=arguments),
        capture_output=True,
        text=True,
        timeout=timeout,
        stdin=more.pop("stdin", subprocess.DEVNULL) if "input" not in more else None,
        check=False,
        **more,
    )
    done.stdout = without_gloo(done.stdout)
    return done


def without_gloo(text):
    """Output but for the lines in which torch 2.9's gloo says that it has connected."""
    return "".join(line for line in text.splitlines(keepends=True) if "[Gloo] Rank " not in line)


def two_nodes(folder, source, *options):
    """The commands of two nodes of one run, both on loopback, which needs no root."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    where = ["--nnodes", "2", "--master-addr", "127.0.0.1", "--master-port", str(port), *options]
    return [command(folder, source, *where, "--node-rank", str(node)) for node in range(2)]


@contextlib.contextmanager
def started(folder, source, *options, **more):
    """A launcher that runs; killed at the end if it still does."""
    with subprocess.Popen(
        command(folder, source, *options), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **more
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def until(condition, what):
    """Wait for a condition; give its value. ``what`` is a text, or gives one when it is needed."""
    end = time.monotonic() + PATIENCE
    while not (value := condition()):
        assert time.monotonic() < end, f"not within {PATIENCE:g} s: {what() if callable(what) else what}"
        time.sleep(0.02)
    return value


def alive(pid):
    """Whether a process runs, as something other than a zombie."""
    try:
        return (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def children(pid):
    """The processes that a process has started."""
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def written(folder, count):
    """The process numbers that scripts have left as file names in a folder, once there are so many."""
    return until(
        lambda: (
            pids if len(pids := [int(p.name) for p in Path(folder).iterdir() if p.name.isdecimal()]) >= count else 0
        ),
        f"{count} processes have begun",
    )


def listeners(pids):
    """Addresses (hexadecimal, as the kernel writes them) that these processes listen on."""
    sockets = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            for fd in (Path("/proc") / str(pid) / "fd").iterdir():
                with contextlib.suppress(OSError):
                    sockets.add(os.readlink(fd))  # noqa: PTH115
    rows = [row.split() for name in ("tcp", "tcp6") for row in (Path("/proc/net") / name).read_text().splitlines()[1:]]
    return {row[1].partition(":")[0] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in sockets}
