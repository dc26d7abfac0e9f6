"""What is said of a rank whose exit status torch's agent has collected before the watching thread looked."""

import os
import signal
import subprocess
import sys
from multiprocessing.connection import Pipe

import pytest

from lockstep.launcher import reports
from lockstep.launcher.machine import Machine
from lockstep.launcher.plan import Wish, make_plan
from lockstep.launcher.stall import Stall
from lockstep.launcher.watch import Watch


@pytest.fixture
def crashed():
    """The number of a process that is gone, with nobody to ask how."""
    with subprocess.Popen([sys.executable, "-c", "import os; os.abort()"], stderr=subprocess.DEVNULL) as process:
        process.wait()
        return process.pid


def test_what_the_fault_handler_wrote_is_reported_also_where_torchs_agent_was_first(crashed, monkeypatch):
    monkeypatch.setattr("lockstep.launcher.orphans.kill_descendants", lambda *_, **__: None)  # pytest has some
    plan = make_plan(Wish(nproc_per_node="1"), Machine(gpus=0, groups=((0,),)), {})
    (control, _keeps), (theirs, ours) = Pipe(), Pipe(duplex=False)
    watch = Watch(plan, control, [theirs], lambda **_: None, Stall(0, [], [], lambda **_: None))
    watch.before_start({}, by_another=False)

    reports.tell(ours.fileno(), pid=crashed, rank=0, size=1)
    os.write(ours.fileno(), b"Fatal Python error: Aborted\n")
    (end,) = watch.ends({0: -signal.SIGABRT})

    assert (end.rank, end.code, end.signal) == (0, None, signal.SIGABRT)
    assert end.text == "Fatal Python error: Aborted\n"
