"""Streams and events: there is one stream, and what was put into it has happened."""

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import torch

from lockstep.compat.rehearsal.devices import Devices
from lockstep.compat.rehearsal.entry import Entry


class Event:
    """``torch.cuda.Event``: a moment."""

    def __init__(self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> None:  # noqa: ARG002
        self._at = 0.0

    def record(self, stream: Any = None) -> None:  # noqa: ARG002
        """Now."""
        self._at = time.perf_counter()

    def elapsed_time(self, end: "Event") -> float:
        """Milliseconds from this moment to another."""
        return (end._at - self._at) * 1000.0

    def query(self) -> bool:
        """It has happened."""
        return True

    def wait(self, stream: Any = None) -> None:
        """Nothing to wait for."""

    def synchronize(self) -> None:
        """Nothing to wait for."""


class Stream:
    """``torch.cuda.Stream``: work put into it is done at once, in the order in which it is put."""

    def __init__(self, device: Any = None, priority: int = 0, **_: Any) -> None:
        self.device, self.priority = device, priority
        self.cuda_stream = self.stream_id = 0

    def record_event(self, event: Event | None = None) -> Event:
        """Now."""
        event = event or Event()
        event.record()
        return event

    def wait_event(self, event: Event) -> None:
        """Nothing to wait for."""

    def wait_stream(self, stream: "Stream") -> None:
        """Nothing to wait for."""

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def query(self) -> bool:
        """It is done."""
        return True

    def is_capturing(self) -> bool:
        """No graph is recorded."""
        return False

    def __enter__(self) -> "Stream":
        return self

    def __exit__(self, *_: object) -> None:
        pass


def entries(devices: Devices) -> list[Entry]:
    """Every name of ``torch.cuda`` for streams and events."""
    only = [Stream(torch.device("cuda", index)) for index in range(devices.count)]

    def current(device: Any = None) -> Stream:
        return only[devices.cuda(device)]

    @contextlib.contextmanager
    def within(_: Any) -> Iterator[None]:
        yield

    def choose(_: Any) -> None:
        pass

    calls = {
        "Stream": Stream,
        "ExternalStream": Stream,
        "Event": Event,
        "StreamContext": within,
        "current_stream": current,
        "default_stream": current,
        "set_stream": choose,
        "is_current_stream_capturing": lambda: False,
    }
    return [
        *(Entry("torch.cuda", name, call) for name, call in calls.items()),
        Entry("torch.nn.parallel._functions", "_get_stream", lambda device: only[device.index]),
    ]
