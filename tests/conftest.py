import os
import threading
from multiprocessing import forkserver, resource_tracker
from pathlib import Path

import pytest
import ranks  # noqa: F401  (says what the server imports, before it starts)
from hypothesis import settings
from launching import until

# Ranks take as long as the machine is busy, so no deadline. Every run draws the same examples, so that a change fails
# for what it changed; `make soak` draws others.
settings.register_profile("lockstep", deadline=None, derandomize=not {"SOAK", "LOCKSTEP_SOAK"} & set(os.environ))
settings.load_profile("lockstep")


@pytest.fixture(autouse=True, scope="session")
def rank_server():
    """The two helpers that multiprocessing keeps for the whole session are not a test's debris."""
    resource_tracker.ensure_running()
    forkserver.ensure_running()


def traces() -> set[str]:
    """What a test could leave with this process: children, threads, the launcher's variables."""
    children = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()
    return (
        {f"process {pid}" for pid in children}
        | {f"thread {t.name}" for t in threading.enumerate()}
        | {f"${name}" for name in os.environ if name.startswith(("MASTER_", "RANK", "WORLD_", "LOCAL_"))}
    )


def shared_memory() -> set[str]:
    """What a test could leave on this machine."""
    return {f"/dev/shm/{p.name}" for p in Path("/dev/shm").iterdir()}


@pytest.fixture(autouse=True)
def nothing_is_left_behind():
    before, memory_before = traces(), shared_memory()
    yield
    for thread in threading.enumerate():
        if thread.name == "QueueFeederThread" and f"thread {thread.name}" not in before:
            thread.join(60.0)  # torch closes a data loader's queues, and does not wait for their threads
    left = traces() - before
    assert not left, f"the test left behind {sorted(left)}"
    # That of the tests that run beside this one may have a name for a moment; what this one left has it for good.
    until(
        lambda: shared_memory() <= memory_before,
        lambda: f"what the test left behind is gone: {sorted(shared_memory() - memory_before)}",
    )
