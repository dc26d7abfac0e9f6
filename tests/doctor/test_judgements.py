"""What each fact is judged to be: plain facts in, lines out. No machine is asked."""

import pytest

from lockstep_cli.doctor import backends, cores, devices, limits, memory, network, shared_memory, speed, versions
from lockstep_cli.doctor.cores import Cores
from lockstep_cli.doctor.devices import Driver
from lockstep_cli.doctor.inside import Inside, environment, understand
from lockstep_cli.doctor.limits import Files
from lockstep_cli.doctor.memory import Memory
from lockstep_cli.doctor.network import Interface, Network
from lockstep_cli.doctor.shared_memory import Room
from lockstep_cli.doctor.speed import Speed

MIB, GIB = 2**20, 2**30
CPU = Inside(torch="2.13.0+cpu", gloo=True)
GPU = Inside(torch="2.13.0+cu130", cuda="13.0", nccl="2.28.9", gloo=True, gpus=("H200", "H200"), driver="13.1")
NO_GPU = GPU._replace(gpus=(), complaint="The NVIDIA driver on your system is too old (found version 12020).")
LO = Interface("lo", ("127.0.0.1", "::1"), up=True)
ETH = Interface("eth0", ("10.0.0.7",), up=True)
DOWN = Interface("eth1", ("10.2.0.7",), up=False)
NET = Network((ETH, DOWN, LO), "10.0.0.7", "ant", ("10.0.0.7",))

# Facts to lines, the thing looked at, the state, words of what was found, words of the remedy.
TABLE = [
    (versions.judge(("0.1.0", "3.12.1", "/usr/bin/python"), CPU), "torch", "fine", "without CUDA", ""),
    (versions.judge(("0.1.0", "3.12.1", "/usr/bin/python"), GPU), "torch", "fine", "for CUDA 13.0", ""),
    (versions.judge(("0.1.0", "3.12.1", "/p"), Inside(torch="2.8.1")), "torch", "broken", "2.8.1", "torch 2.9"),
    (versions.judge(("0.1.0", "3.12.1", "/p"), Inside(torch="2.10.0a0+git")), "torch", "fine", "2.10.0a0", ""),
    (versions.judge(("0.1.0", "3.12.1", "/p"), Inside(trouble="OSError: x.so")), "torch", "broken", "x.so", "again"),
    (devices.judge(Driver(), CPU), "GPUs", "fine", "none", ""),
    (devices.judge(Driver("580.1", 2), GPU), "GPUs", "fine", "2 x H200", ""),
    (devices.judge(Driver("580.1", 2), GPU), "CUDA driver", "fine", "580.1, for CUDA up to 13.1", ""),
    (devices.judge(Driver("580.1", 4), GPU), "GPUs", "doubtful", "the driver has 4", "dmesg"),
    (devices.judge(Driver("580.1", 4, visible="0,1"), GPU), "GPUs", "fine", "CUDA_VISIBLE_DEVICES=0,1", ""),
    (devices.judge(Driver("580.1", 1), CPU), "GPUs", "broken", "built without CUDA", "built for CUDA"),
    (devices.judge(Driver("535.1", 1), NO_GPU), "GPUs", "broken", "too old", "CUDA 13.0 or newer"),
    (devices.judge(Driver("580.1", 1), NO_GPU._replace(complaint="")), "GPUs", "broken", "not start", "driver"),
    (devices.judge(Driver("580.1", 1, visible=""), NO_GPU), "GPUs", "doubtful", "CUDA_VISIBLE_DEVICES=", "Unset"),
    (devices.judge(Driver("580.1", 2), GPU._replace(gpus=("H200", "T4"))), "GPUs", "doubtful", "1 x T4", "slowest"),
    (
        devices.judge(Driver("580.1", 2, memory=((0, 100), (50, 100))), GPU),
        *("GPU memory", "doubtful", "GPU 1: 50%", "nvidia-smi"),
    ),
    (backends.judge(CPU), "NCCL", "fine", "not needed", ""),
    (backends.judge(GPU), "NCCL", "fine", "2.28.9", ""),
    (backends.judge(GPU._replace(nccl="")), "NCCL", "broken", "without it", "wheel"),
    (backends.judge(CPU._replace(gloo=False)), "gloo", "broken", "without it", "wheel"),
    (backends.judge(CPU._replace(shm="no C part")), "shm", "doubtful", "no C part", "gloo instead"),
    ([shared_memory.judge(None)], "/dev/shm", "broken", "not there", "mount -t tmpfs"),
    ([shared_memory.judge(Room(64 * MIB, 64 * MIB))], "/dev/shm", "broken", "64 MiB", "--shm-size"),
    ([shared_memory.judge(Room(8 * GIB, 60 * MIB))], "/dev/shm", "broken", "60 MiB free", "Delete"),
    ([shared_memory.judge(Room(512 * MIB, 512 * MIB))], "/dev/shm", "doubtful", "512 MiB", "larger"),
    ([shared_memory.judge(Room(8 * GIB, 8 * GIB))], "/dev/shm", "fine", "8.0 GiB", ""),
    ([limits.judge(Files(1024, 524288))], "open files", "doubtful", "524,288", "ulimit -n 65536"),
    ([limits.judge(Files(1024, 20000))], "open files", "doubtful", "20,000", "ulimit -n 20000"),
    ([limits.judge(Files(1024, -1))], "open files", "doubtful", "any number", "ulimit -n 65536"),
    ([limits.judge(Files(1024, 1024))], "open files", "doubtful", "1,024", "limits.conf"),
    ([limits.judge(Files(100, 65536))], "open files", "broken", "100 a process", "ulimit"),
    ([limits.judge(Files(4096, 4096))], "open files", "fine", "4,096", ""),
    ([limits.judge(Files(-1, -1))], "open files", "fine", "no limit", ""),
    ([memory.judge(Memory(64 * GIB, 60 * GIB))], "memory", "fine", "64.0 GiB, 60.0 GiB free", ""),
    ([memory.judge(Memory(4 * GIB, GIB))], "memory", "doubtful", "1.0 GiB free", "fewer ranks"),
    ([memory.judge(Memory(64 * GIB, 60 * GIB, 2**63, 9))], "memory", "fine", "64.0 GiB, 60.0 GiB free", ""),
    ([memory.judge(Memory(64 * GIB, 60 * GIB, 4 * GIB, 4 * GIB))], "memory", "broken", "container, 0 MiB", "--memory"),
    (cores.judge(Cores(8, 8), CPU), "cores", "fine", "8", ""),
    (cores.judge(Cores(8, 4), CPU._replace(quota=2.5)), "cores", "fine", "4 of 8; time for 2.5", ""),
    (cores.judge(Cores(8, 8), CPU._replace(quota=0.5)), "cores", "doubtful", "time for 0.5", "--cpus"),
    (cores.judge(Cores(8, 1), CPU), "cores", "doubtful", "1 of 8", "--cpus-per-task"),
    (cores.judge(Cores(1, 1), CPU), "cores", "fine", "1", ""),
    (cores.judge(Cores(8, 8, ("0-3", "4-7")), CPU), "NUMA", "fine", "2 nodes: cores 0-3 | 4-7", ""),
    (cores.judge(Cores(8, 4, threads="8"), CPU), "threads", "doubtful", "OMP_NUM_THREADS=8 on 4", "Unset"),
    (cores.judge(Cores(8, 8, load=9.5), CPU), "load", "doubtful", "9.5 processes want 8", "top"),
    (cores.judge(Cores(8, 8), CPU._replace(run="lockstep: 1 rank")), "lockstep run", "fine", "1 rank", ""),
    (network.judge(NET), "loopback", "fine", "lo", ""),
    (network.judge(NET._replace(interfaces=(ETH, LO._replace(up=False)))), "loopback", "broken", "127", "set lo up"),
    (network.judge(NET), "route out", "fine", "eth0, 10.0.0.7", ""),
    (
        network.judge(NET._replace(interfaces=(ETH, Interface("ib0", ("10.1.0.7",), True), DOWN, LO))),
        *("route out", "fine", "also up: ib0", ""),
    ),
    (network.judge(NET._replace(source="")), "route out", "doubtful", "none; also up: eth0", "default route"),
    (network.judge(NET), "host name", "fine", "ant is 10.0.0.7", ""),
    (network.judge(NET._replace(resolved=())), "host name", "doubtful", "does not resolve", "'10.0.0.7 ant'"),
    (network.judge(NET._replace(resolved=None)), "host name", "doubtful", "within 3 s", "/etc/hosts"),
    (network.judge(NET._replace(resolved=("127.0.1.1",))), "host name", "doubtful", "cannot reach", "IFNAME=eth0"),
    (network.judge(NET._replace(resolved=("10.9.9.9",))), "host name", "doubtful", "no interface here", "/etc/hosts"),
    (
        network.judge(NET._replace(chosen=(("GLOO_SOCKET_IFNAME", "eth1"),))),
        *("GLOO_SOCKET_IFNAME", "broken", "eth1", "eth0, lo"),
    ),
    (speed.judge([Speed("shm", 7.25, 4.5)]), "2 ranks, shm", "fine", "4.5 GB/s", ""),
    (speed.judge([Speed("gloo", 9000.0, 4.5)]), "2 ranks, gloo", "doubtful", "9,000 µs", "again"),
    (speed.judge([Speed("nccl", 30.0, 1.5)]), "2 ranks, nccl", "doubtful", "1.5 GB/s", "topo -m"),
    (speed.judge([Speed("gloo", trouble="no answer")]), "2 ranks, gloo", "broken", "no answer", "lockstep run -n 2"),
]


@pytest.mark.parametrize(("lines", "about", "state", "found", "remedy"), TABLE)
def test_facts_give_this_line(lines, about, state, found, remedy):
    line = next(line for line in lines if line.about == about)

    assert line.state == state
    assert found in line.found
    assert remedy in line.remedy


@pytest.mark.parametrize("line", [line for row in TABLE for line in row[0]])
def test_what_is_not_fine_has_a_remedy_of_one_sentence(line):
    assert bool(line.remedy) == (line.state != "fine")
    assert not line.remedy or (line.remedy.endswith(".") and ". " not in line.remedy)


@pytest.mark.parametrize(
    ("name", "value", "state"),
    [
        ("GLOO_SOCKET_IFNAME", "eth0", "fine"),
        ("GLOO_SOCKET_IFNAME", "eth0,lo", "fine"),
        ("GLOO_SOCKET_IFNAME", "eth0,ib0", "broken"),
        ("TP_SOCKET_IFNAME", "eth", "broken"),
        ("NCCL_SOCKET_IFNAME", "eth", "fine"),
        ("NCCL_SOCKET_IFNAME", "ib,eth", "fine"),
        ("NCCL_SOCKET_IFNAME", "ib", "broken"),
        ("NCCL_SOCKET_IFNAME", "=eth", "broken"),
        ("NCCL_SOCKET_IFNAME", "=eth0", "fine"),
        ("NCCL_SOCKET_IFNAME", "^docker,lo", "fine"),
    ],
)
def test_variables_name_interfaces_as_their_readers_take_them(name, value, state):
    assert network.judge_variable(name, value, NET.interfaces).state == state


def test_beside_the_route_only_interfaces_are_listed_that_are_up_and_lead_somewhere():
    assert network.judge_route(NET).found == "eth0, 10.0.0.7"


def test_nothing_is_said_of_backends_without_torch():
    assert backends.judge(Inside(trouble="no torch")) == []


@pytest.mark.parametrize(
    ("inside", "measured"),
    [
        (CPU, ["shm", "gloo"]),
        (CPU._replace(shm="no C part"), ["gloo"]),
        (GPU, ["shm", "gloo", "nccl"]),
        (GPU._replace(gpus=("H200",)), ["shm", "gloo"]),
        (CPU._replace(gloo=False), []),
        (Inside(trouble="no torch"), []),
    ],
)
def test_these_backends_are_measured(inside, measured):
    assert speed.choose(inside, meet=True) == measured
    assert speed.choose(inside, meet=False) == []


def row(backend, trouble=""):
    return Speed(backend, 0.0 if trouble else 9.0, 0.0 if trouble else 2.0, trouble)._asdict()


def test_the_trouble_of_either_rank_counts_and_spares_the_other_backends():
    left = [[row("shm"), row("gloo")], [row("shm", "ValueError: no"), row("gloo")]]

    assert [speed.trouble for speed in speed.understand(["shm", "gloo"], left, 0, "")] == ["ValueError: no", ""]


def test_a_backend_that_nobody_came_to_has_the_last_words_of_the_run():
    speeds = speed.understand(["shm", "nccl"], [[row("shm")], [row("shm")]], 1, "a\nno answer within 30 s\n")

    assert [speed.trouble for speed in speeds] == ["", "no answer within 30 s"]


@pytest.mark.parametrize(
    ("code", "output", "errors", "trouble"),
    [
        (1, "", "Traceback\nImportError: libc10.so: no\n", "ImportError: libc10.so: no"),
        (-11, "", "Fatal Python error\n", "python ended by signal 11"),
        (3, "", "", "python ended with code 3"),
        (0, "", "", "python ended with code 0"),
    ],
)
def test_a_python_that_cannot_import_torch_leaves_its_reason(code, output, errors, trouble):
    assert understand(code, output, errors).trouble == trouble


def test_the_doctor_is_no_rank_of_the_job_that_it_is_started_in():
    job = {"SLURM_JOB_ID": "7", "PMI_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "RANK": "1", "MASTER_ADDR": "ant"}

    assert environment(job | {"PATH": "/bin", "NCCL_DEBUG": "INFO"}) == {"PATH": "/bin", "NCCL_DEBUG": "INFO"}
