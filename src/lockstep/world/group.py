"""Starts, adopts and ends the process group."""

import functools
import itertools
import os
import sys
from collections.abc import Mapping
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store
from torch.distributed.rendezvous import rendezvous

from lockstep.errors import LateRankError, LostRankError, UsageError
from lockstep.world.device import find_shared, identity
from lockstep.world.place import Place
from lockstep.world.slurm import first_host, port_of_job

_starts = itertools.count()


def find_address(place: Place, environ: Mapping[str, str]) -> tuple[str, int]:
    """Where rank 0 is to be met.

    Returns:
        Host and port: from ``MASTER_ADDR`` and ``MASTER_PORT``, else from Slurm's node list and job id.

    Raises:
        UsageError: Neither is there.

    Example:
        >>> place = Place(0, 2, 0, 1, 0, 2, "Slurm")
        >>> find_address(place, {"SLURM_STEP_NODELIST": "gpu[3-4]", "SLURM_JOB_ID": "77"})
        ('gpu3', 15077)
    """
    host, port = environ.get("MASTER_ADDR"), environ.get("MASTER_PORT")
    if place.launcher == "Slurm":
        nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST")
        host = host or (first_host(nodes) if nodes else None)
        port = port or str(port_of_job(environ.get("SLURM_JOB_ID", ""), environ.get("SLURM_STEP_ID", "")))
    elif place.nodes == 1 and place.launcher != "torchrun":
        host = host or "127.0.0.1"
    if not host or not port:
        missing = "MASTER_ADDR" if not host else "MASTER_PORT"
        raise UsageError(
            f"rank {place.rank} of {place.size}: {missing} is not set, so the ranks cannot find each other. Start the "
            f"script with `lockstep run`, or set MASTER_ADDR to rank 0's host and MASTER_PORT to a free port there."
        )
    if not port.isdecimal():
        raise UsageError(f"rank {place.rank} of {place.size}: MASTER_PORT={port!r} is not a port number.")
    return host, int(port)


@functools.cache
def connect(place: Place, address: tuple[str, int], timeout: float) -> Store:
    """Open the store where the ranks first meet; once a process, so that `first` and `init` share it."""
    host, port = address
    seconds = timedelta(seconds=timeout)
    kept = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    url = f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"
    try:
        if place.rank == 0 and not kept:
            # As torch's rendezvous does, but for the wait for all, which doesn't say who is missing.
            return dist.TCPStore(  # type: ignore[attr-defined]
                host, port, place.size, is_master=True, timeout=seconds, multi_tenant=True, wait_for_workers=False
            )
        query = f"rank={place.rank}&world_size={place.size}"
        store: Store = next(rendezvous(f"{url}?{query}", timeout=seconds))[0]
    except dist.DistError as error:
        what = "cannot listen" if place.rank == 0 else f"no answer from rank 0 within {timeout:g} s"
        raise LateRankError(
            f"rank {place.rank} of {place.size}: {what} at {host}:{port} ({error}). Check that rank 0 was started, and "
            f"that MASTER_ADDR and MASTER_PORT name its host and a free port there."
        ) from error
    return store


def roll_call(store: Store, place: Place, timeout: float) -> None:
    """Wait until every rank has come.

    Raises:
        LateRankError: Some did not; the message names them.
        LostRankError: Rank 0 has ended, and its store with it.
    """
    names = [f"here/{rank}" for rank in range(place.size)]
    try:
        store.set(names[place.rank], "")
        store.wait(names, timedelta(seconds=timeout))
    except dist.DistNetworkError as error:
        raise lost_store(place, "the ranks were meeting") from error
    except dist.DistError as error:
        missing = [rank for rank, name in enumerate(names) if not store.check([name])]
        raise LateRankError(
            f"rank {place.rank} of {place.size}: rank(s) {', '.join(map(str, missing))} did not come within "
            f"{timeout:g} s. Look for their own errors first; if they need longer, write lockstep.init(timeout=...)."
        ) from error


def lost_store(place: Place, when: str) -> LostRankError:
    """What to raise where the store cannot be reached any more."""
    return LostRankError(
        f"rank {place.rank} of {place.size}: the store where the ranks meet is gone while {when}. Rank 0 keeps it, or "
        f"the launcher: look for their own errors first."
    )


def choose_backend(wanted: str, device: torch.device, nodes: int) -> tuple[str, ...]:
    """Which backends to try, in turn: for CPU tensors shared memory between the ranks of one node.

    A GPU's world keeps gloo for its CPU tensors: with shm, every collective would pass through Python before nccl.

    Example:
        >>> choose_backend("auto", torch.device("cpu"), nodes=2)
        ('hierarchy', 'gloo')
        >>> choose_backend("auto", torch.device("cuda:0"), nodes=1)
        ('cpu:gloo,cuda:nccl',)
    """
    if wanted != "auto":
        return (wanted,)
    if device.type != "cpu":
        return ("cpu:gloo,cuda:nccl",)
    if sys.platform != "linux":
        return ("gloo",)
    return ("shm" if nodes == 1 else "hierarchy", "gloo")


def start(place: Place, device: torch.device, backends: tuple[str, ...], timeout: float) -> str:
    """Connect the ranks and make the default process group.

    Returns:
        Why the first of ``backends`` could not be used, if it could not; else an empty string.

    Raises:
        LateRankError: A rank did not come in time.
        UsageError: The environment does not say where to meet, two ranks have the same GPU, or no backend can be used.
    """
    store = connect(place, find_address(place, os.environ), timeout)
    # A second init in one process must not find the first one's keys.
    store = dist.PrefixStore(f"lockstep/{next(_starts)}", store)  # type: ignore[attr-defined]
    roll_call(store, place, timeout)
    refuse_shared_devices(store, place, device)
    reason = ""
    for backend in backends:
        try:
            dist.init_process_group(
                backend,
                store=dist.PrefixStore(backend, store),  # type: ignore[attr-defined]
                rank=place.rank,
                world_size=place.size,
                timeout=timedelta(seconds=timeout),
            )
        except UsageError as error:  # shm: the same on every rank
            if backend == backends[-1]:
                raise
            reason = str(error)
        else:
            break
    return reason


def refuse_shared_devices(store: Store, place: Place, device: torch.device) -> None:
    """Raise on every rank if two of them were given one GPU, which would hang inside nccl."""
    if device.type != "cuda":
        return
    store.set(f"device/{place.rank}", f"{os.uname().nodename} {identity(device)}")
    lines = [store.get(f"device/{rank}").decode() for rank in range(place.size)]
    pair = find_shared([(host, gpu) for host, _, gpu in (line.partition(" ") for line in lines)])
    if pair is not None:
        raise UsageError(
            f"rank {place.rank} of {place.size}: ranks {pair[0]} and {pair[1]} are both on GPU {lines[pair[0]]}. "
            f"Start one rank per GPU, or give each rank its own in CUDA_VISIBLE_DEVICES."
        )


def end() -> None:
    """Leave the process group, so that the process ends without complaints."""
    if dist.is_initialized():
        dist.destroy_process_group()
