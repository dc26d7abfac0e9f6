"""One thread for each replica, with the modes of the thread that called."""

import contextvars
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack, _push_mode

from lockstep.errors import LostRankError


class Modes:
    """What of torch's state belongs to a thread: read in one, set in others."""

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self._grad = torch.is_grad_enabled()
        self._inference = torch.is_inference_mode_enabled()
        self._cache = torch.is_autocast_cache_enabled()
        self._autocast = [
            (kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))
            for kind in sorted({"cpu", *(device.type for device in devices)})
        ]
        # Private, torch 2.9 to 2.14; what `with torch.device(...)` and the like put there.
        self._functions: list[TorchFunctionMode] = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
        self._streams = {device: torch.cuda.current_stream(device) for device in devices if device.type == "cuda"}

    @contextmanager
    def on(self, device: torch.device) -> Iterator[None]:
        """Set them in this new thread, for work on ``device``."""
        with ExitStack() as stack:
            if device in self._streams:
                stack.enter_context(torch.cuda.device(device))
                stack.enter_context(torch.cuda.stream(self._streams[device]))
            stack.enter_context(torch.inference_mode(self._inference))
            stack.enter_context(torch.set_grad_enabled(self._grad))
            for kind, dtype, enabled in self._autocast:
                stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=self._cache))
            for mode in self._functions:
                # Not entered: a mode that several threads enter would mix up what it keeps of each. This thread ends.
                _push_mode(mode)  # type: ignore[no-untyped-call]
            yield


def run_all(works: Sequence[Callable[[], Any]], devices: Sequence[torch.device]) -> list[Any]:
    """Run each work in a thread of its own, and give their results in order.

    A single one runs in the calling thread.

    Raises:
        BaseException: What the first work raised that raised of its own accord; with its traceback, and with its
            replica and device in the message.
    """
    if len(works) == 1:
        return [works[0]()]
    modes = Modes(devices)
    results: list[Any] = [None] * len(works)
    errors: list[BaseException | None] = [None] * len(works)

    def work(place: int) -> None:
        try:
            with modes.on(devices[place]):
                results[place] = works[place]()
        except BaseException as error:
            errors[place] = error

    threads = [
        threading.Thread(target=contextvars.copy_context().run, args=(work, place), name=f"replica {place}")
        for place in range(len(works))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    try:
        _raise_first(errors, devices)
    finally:
        errors.clear()  # a traceback holds this frame, and this frame would hold it
    return results


def _raise_first(errors: Sequence[BaseException | None], devices: Sequence[torch.device]) -> None:
    raised = [(place, error) for place, error in enumerate(errors) if error is not None]
    if not raised:
        return
    # One that only waited for another in vain says less than that other.
    place, error = min(raised, key=lambda item: (isinstance(item[1], LostRankError), item[0]))
    where = f"in replica {place} of {len(errors)}, on device {devices[place]}"
    if len(error.args) == 1 and isinstance(error.args[0], str):
        error.args = (f"{error.args[0]}\n({where})",)
    elif hasattr(error, "add_note"):  # Python 3.11
        error.add_note(where)
    raise error
