"""Machines made of network namespaces: each has an interface of its own, and a bridge joins them."""

import contextlib
import functools
import itertools
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from launching import LOCKSTEP, without_gloo

PATIENCE = 120.0
_numbers = itertools.count()


def ip(*words):
    """Run iproute2's ip."""
    subprocess.run(["ip", *map(str, words)], check=True, capture_output=True, text=True)


@functools.cache
def why_not():
    """Why there can be no namespaces here; empty if there can."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "network namespaces need root on Linux"
    if shutil.which("ip") is None:
        return "network namespaces need iproute2 (ip)"
    try:
        with nodes(1):
            return ""
    except (subprocess.CalledProcessError, OSError) as error:
        return f"no network namespaces or bridges here: {getattr(error, 'stderr', '') or error}"


class Node:
    """One machine: a namespace with eth0 on the bridge."""

    def __init__(self, name, address, folder):
        self.name, self.address, self.folder = name, address, folder
        self.processes = []

    def ip(self, *words):
        """Run ip inside."""
        ip("-n", self.name, *words)

    def unplug(self):
        """Pull the cable out of the bridge."""
        ip("link", "set", self.cable, "down")

    def plug(self):
        """Put it back."""
        ip("link", "set", self.cable, "up")

    def command(self, *line):
        """Run a command inside, to its end."""
        subprocess.run(["ip", "netns", "exec", self.name, *map(str, line)], check=True, capture_output=True, text=True)

    def start(self, *line, env=None, hosts=""):
        """Start a command inside, in a session of its own; with /etc/hosts of its own if ``hosts`` is given."""
        inside = ["ip", "netns", "exec", self.name, "unshare", "--uts", "--mount", "sh", "-c"]
        mount = ""
        if hosts:
            (self.folder / "hosts").write_text(hosts)
            mount = f"mount --bind {self.folder / 'hosts'} /etc/hosts && "
        inside += [f'hostname {self.name} && {mount}exec "$@"', "sh", *map(str, line)]
        process = subprocess.Popen(
            inside,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            stdin=subprocess.DEVNULL,
            text=True,
            env=_plain() | (env or {}),
            start_new_session=True,
        )
        self.processes.append(process)
        return process

    def lockstep(self, source, *options, arguments=(), launcher=None, **more):
        """Start `lockstep run` on a script."""
        script = self.folder / "train.py"
        script.write_text(source)
        return self.start(*(launcher or LOCKSTEP), "run", *options, script, *arguments, **more)


@contextlib.contextmanager
def nodes(count):
    """So many machines; all that was started on them is killed at the end."""
    prefix = f"ls{os.getpid() % 100000}-{next(_numbers)}"
    bridge = f"br{prefix}"[:15]
    made = []
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ls")))
        ip("link", "add", bridge, "type", "bridge")
        stack.callback(ip, "link", "del", bridge)
        ip("link", "set", bridge, "up")
        for number in range(count):
            name, cable = f"{prefix}n{number}", f"v{prefix}-{number}"[:15]
            ip("netns", "add", name)
            stack.callback(ip, "netns", "del", name)
            node = Node(name, f"10.77.0.{number + 1}", folder / str(number))
            node.cable = cable
            node.folder.mkdir()
            ip("link", "add", cable, "type", "veth", "peer", "name", "eth0", "netns", name)
            ip("link", "set", cable, "master", bridge, "up")
            node.ip("link", "set", "lo", "up")
            node.ip("addr", "add", f"{node.address}/24", "dev", "eth0")
            node.ip("link", "set", "eth0", "up")
            stack.callback(_end, node)
            made.append(node)
        yield made


def results(processes, seconds=PATIENCE):
    """Wait for commands; (code, output, errors) of each."""
    found = []
    for process in processes:
        out, err = process.communicate(timeout=seconds)
        found.append((process.returncode, without_gloo(out), err))
    return found


def _end(node):
    for process in node.processes:
        if process.poll() is None:
            process.kill()
        process.communicate()


def _plain():
    ours = ("MASTER_", "RANK", "WORLD_", "LOCAL_", "GLOO_", "NCCL_", "TP_", "SLURM_")
    return {name: value for name, value in os.environ.items() if not name.startswith(ours)}
