"""Whether ranks are more than their cores: then a wait must leave the core at once, and else it must not."""

import os
import subprocess
import sys
from contextlib import ExitStack

import pytest

from lockstep.shm.member import outnumber_cores

CORES = sorted(os.sched_getaffinity(0))
FIRST, OTHERS, ALL = {CORES[0]}, set(CORES[1:]), set(CORES)
TWO_CORES = pytest.mark.skipif(len(CORES) < 2, reason="needs two cores")


@pytest.mark.parametrize(
    ("own", "peers", "crowded"),
    [
        (FIRST, [FIRST], True),
        (FIRST, [], False),
        pytest.param(FIRST, [OTHERS], False, marks=TWO_CORES),  # each has its own, as from `lockstep run`
        pytest.param(ALL, [ALL], False, marks=TWO_CORES),
        pytest.param(ALL, [FIRST, FIRST], len(ALL) < 3, marks=TWO_CORES),
        (ALL, [ALL] * len(ALL), True),
        pytest.param(FIRST, [FIRST, OTHERS], True, marks=TWO_CORES),
        pytest.param(FIRST, [OTHERS, OTHERS], False, marks=TWO_CORES),  # whose cores these are is not this one's matter
    ],
)
def test_ranks_are_counted_against_the_cores_they_have_together(own, peers, crowded):
    os.sched_setaffinity(0, own)
    try:
        with ExitStack() as stack:
            pids = [os.getpid()]
            for cores in peers:
                peer = stack.enter_context(subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE))
                stack.callback(peer.kill)
                os.sched_setaffinity(peer.pid, cores)
                pids.append(peer.pid)

            assert outnumber_cores(pids) is crowded
    finally:
        os.sched_setaffinity(0, ALL)


def test_a_process_that_has_ended_takes_no_core():
    with subprocess.Popen([sys.executable, "-c", ""]) as peer:
        pass
    os.sched_setaffinity(0, FIRST)
    try:
        assert not outnumber_cores([os.getpid(), peer.pid])
    finally:
        os.sched_setaffinity(0, ALL)
