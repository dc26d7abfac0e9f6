import threading

import pytest


@pytest.fixture(autouse=True)
def queues_are_through():
    """torch leaves the threads of a loader's queues to end by themselves, which on a busy machine takes a moment."""
    yield
    for thread in threading.enumerate():
        if thread.name == "QueueFeederThread":
            thread.join(10)
