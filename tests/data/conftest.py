import threading

import pytest


@pytest.fixture(autouse=True)
def queues_are_through():
    """Wait for the threads of a loader's queues, which torch leaves to end by themselves."""
    yield
    for thread in threading.enumerate():
        if thread.name == "QueueFeederThread":
            thread.join(10)
