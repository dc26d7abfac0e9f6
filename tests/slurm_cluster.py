"""A Slurm of two nodes on this machine: munged, slurmctld and two slurmd in a private folder, on loopback."""

import contextlib
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

NODES = ("127.0.0.2", "127.0.0.3")  # names that need no name server, and that Slurm writes as 127.0.0.[2-3]
PATIENCE = 90.0

# cred_expire: a job that is requeued may start again once its credentials have expired, by default after two minutes.
CONFIG = """
ClusterName=private
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock,cred_expire=5
CredType=cred/munge
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
MpiDefault=none
ReturnToService=2
NodeName={nodes[0]} NodeHostname=localhost NodeAddr=127.0.0.1 Port={ports[1]} CPUs=2
NodeName={nodes[1]} NodeHostname=localhost NodeAddr=127.0.0.1 Port={ports[2]} CPUs=2
PartitionName=all Nodes=ALL Default=YES State=UP
"""


def missing():
    """Why there can be no such cluster here; empty if there can."""
    if os.environ.get("LOCKSTEP_SLURM") != "1":
        return "takes minutes and needs Slurm: make slurm"
    lacking = [name for name in ("munged", "slurmctld", "slurmd", "srun", "sbatch") if not shutil.which(name)]
    if lacking:
        return f"{', '.join(lacking)} not installed: apt-get install slurmctld slurmd slurm-client munge"
    return "" if os.geteuid() == 0 else "slurmd that starts jobs needs root"


class Cluster:
    """Commands in the cluster's environment."""

    def __init__(self, folder):
        self.folder = folder
        own = {key: value for key, value in os.environ.items() if not key.startswith("SLURM_")}
        path = f"{Path(sys.executable).parent}:{own['PATH']}"
        # Both nodes are this machine, so ranks do not get its cores twice.
        self.environ = own | {"SLURM_CONF": f"{folder}/slurm.conf", "PATH": path, "OMP_NUM_THREADS": "1"}

    def ask(self, *words, **more):
        """Run a command to its end; give what it printed."""
        ended = self.run(*words, **more)
        assert ended.returncode == 0, (words, ended.stdout, ended.stderr)
        return ended.stdout

    def run(self, *words, timeout=PATIENCE, **more):
        """Run a command to its end, whatever that is."""
        return subprocess.run(
            words, env=self.environ, capture_output=True, text=True, timeout=timeout, check=False, **more
        )

    def until(self, condition, what):
        """Wait for a condition; give its value."""
        end = time.monotonic() + PATIENCE
        while not (value := condition()):
            assert time.monotonic() < end, f"not within {PATIENCE:g} s: {what()}"
            time.sleep(0.2)
        return value

    def logs(self):
        """The ends of the daemons' logs."""
        return "\n".join(f"{log.name}: {log.read_text()[-2000:]}" for log in sorted(self.folder.glob("*.log")))


@contextlib.contextmanager
def started():
    """Start the daemons; end them, and every job, and leave nothing."""
    folder = Path(tempfile.mkdtemp(prefix="slurm-"))
    cluster = Cluster(folder)
    (folder / "state").mkdir(mode=0o700)
    (folder / "key").touch(mode=0o400)
    (folder / "key").write_bytes(secrets.token_bytes(128))
    (folder / "slurm.conf").write_text(CONFIG.format(folder=folder, ports=free_ports(3), nodes=NODES))
    munge = [f"--{name}={folder}/{file}" for name, file in MUNGE.items()]
    try:
        with (
            daemon(cluster, "munged", "--foreground", "--force", *munge),
            daemon(cluster, "slurmctld", "-D", "-i"),
            daemon(cluster, "slurmd", "-D", "-N", NODES[0]),
            daemon(cluster, "slurmd", "-D", "-N", NODES[1]),
        ):
            cluster.until(
                lambda: cluster.run("sinfo", "-h", "-N", "-o", "%T").stdout.split() == ["idle"] * 2, cluster.logs
            )
            try:
                yield cluster
            finally:
                cluster.run("scancel", "--user=root")
                cluster.until(lambda: not cluster.run("squeue", "-h").stdout, cluster.logs)
    finally:
        shutil.rmtree(folder)


MUNGE = {
    "socket": "munge.sock",
    "key-file": "key",
    "pid-file": "munged.pid",
    "log-file": "munged-own.log",
    "seed-file": "seed",
}


def free_ports(count):
    """Ports on loopback that nobody has now. Slurm cannot be given a socket."""
    with contextlib.ExitStack() as stack:
        return [stack.enter_context(socket.create_server(("127.0.0.1", 0))).getsockname()[1] for _ in range(count)]


@contextlib.contextmanager
def daemon(cluster, *words):
    """One daemon in the foreground, its output in a file."""
    name = f"{words[0]}-{words[-1]}.log".replace("/", "_")[-60:]
    with (cluster.folder / name).open("w") as log:
        process = subprocess.Popen(words, env=cluster.environ, stdout=log, stderr=subprocess.STDOUT)
        try:
            yield
        finally:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
