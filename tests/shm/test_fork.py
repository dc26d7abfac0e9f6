"""A process that a rank has forked is none itself: it neither speaks nor leaves in the rank's name."""

import os

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks


def in_a_child(act):
    """What ``act`` gives or raises in a process that this one forks."""
    there, here = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            said = str(act())
        except BaseException as error:
            said = f"{type(error).__name__}: {error}"
        os.write(here, said.encode())
        os._exit(0)
    os.close(here)
    with os.fdopen(there) as pipe:
        said = pipe.read()
    os.waitpid(pid, 0)
    return said


def speak(rank, act):
    said = in_a_child(act) if rank == 0 else ""
    x = torch.tensor([1.0 + rank])
    dist.all_reduce(x)
    return said, x.item()


def sum_ones():
    x = torch.ones(1)
    dist.all_reduce(x)
    return x


def send_one():
    dist.send(torch.ones(1), 1)


def receive_one():
    dist.recv(torch.ones(1), 1)


@pytest.mark.parametrize("act", [sum_ones, send_one, receive_one])
def test_a_forked_process_does_not_speak_for_its_rank(act):
    (said, total), (_, other) = run_ranks(speak, 2, act, backend="shm")

    assert "UsageError: rank 0 of 2: process" in said
    assert "was forked from this rank and is none itself" in said
    assert (total, other) == (3.0, 3.0)


def gone(rank):
    in_a_child(dist.destroy_process_group)
    return dist.group.WORLD._member.core.gone(rank)


def test_a_forked_process_does_not_leave_for_its_rank():
    assert run_ranks(gone, 2, backend="shm") == [0, 0]
