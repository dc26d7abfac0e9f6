"""O1's casts: autocast for the whole process, and functions wrapped where apex's lists say more than it does.

Autocast lives in each thread; ``torch.is_autocast_enabled`` is what everything here asks, so that a user's own
``torch.autocast(..., enabled=False)`` turns these casts off too.
"""

import functools
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import torch

from lockstep.amp.policies import POLICIES, install, registered, uninstall

# Up to torch 2.10, a weight that is first used without gradients (under no_grad, in a re-entrant checkpoint) gets none
# from later uses either: autocast keeps the half copy of the first. Without copies kept, each use casts anew.
KEEP_COPIES = torch.__version__ >= "2.11"

F = TypeVar("F", bound=Callable[..., Any])


class Casts:
    """The casts of this process: one object, `CASTS`.

    Attributes:
        half: What half is.
        devices: The types of device whose tensors are cast; none: casting is off.
        suspended: How many backwards are running in which autocast is off, since torch's own backward formulas must
            run in the types of the forward, but functions that a user's backward calls are cast all the same.
        evaluated: Whether the last forward of a model of amp's was one without gradients, or in eval mode.
    """

    def __init__(self) -> None:
        self.half = torch.float16
        self.devices: tuple[str, ...] = ()
        self.suspended = 0
        self.evaluated = False
        self._entered = threading.local()

    def on(self) -> bool:
        """Whether functions called now, in this thread, are cast."""
        for device in self.devices:
            if torch.is_autocast_enabled(device):
                return True
        # Only what runs inside a backward, and not what another thread does meanwhile. Private; in torch 2.9 to 2.14.
        return self.suspended > 0 and torch._C._current_graph_task_id() != -1

    def by_autocast(self) -> bool:
        """Whether autocast does its part now."""
        return any(torch.is_autocast_enabled(device) for device in self.devices)

    def activate(self, devices: tuple[str, ...], half: torch.dtype) -> None:
        """Turn casting on, in this thread and in every one that calls a model of amp's."""
        self.deactivate()
        self.devices, self.half = devices, half
        self._entered = threading.local()
        install(self)
        self.enter_thread()
        _follow_forks()

    def deactivate(self) -> None:
        """Turn casting off; torch is as it was."""
        if not self.devices:
            return
        self.switch(False)
        self.clear_cache()
        self.devices, self.suspended, self.evaluated = (), 0, False
        uninstall()

    def enter_thread(self) -> None:
        """Turn autocast on in a thread that has not been here."""
        if self.devices and not getattr(self._entered, "done", False):
            self._entered.done = True
            self.switch(True)

    def begin_forward(self, *, evaluating: bool) -> None:
        """Cast in this thread, with copies of the weights as they are now if they may have changed.

        A script may write into weights around an evaluation (averages of them, for instance), and nobody is told. So an
        evaluation begins with fresh copies, and so does the first forward after it. In training the copies last until
        the backward is through, like those of a ``with torch.autocast`` block, whatever number of forwards there are.
        """
        self.enter_thread()
        if torch.compiler.is_compiling():  # the graph casts weights by itself
            return
        if evaluating or self.evaluated:
            self.clear_cache()
        self.evaluated = evaluating

    def leave_process(self) -> None:
        """In a child that was forked, a worker of a data loader for instance: autocast is off until it runs a model."""
        if self.devices:
            self._entered = threading.local()
            self.switch(False)

    def switch(self, on: bool) -> None:
        """Turn autocast on or off in this thread."""
        for device in self.devices:
            torch.set_autocast_enabled(device, on)
            if on:
                torch.set_autocast_dtype(device, self.half)
        if not KEEP_COPIES:
            torch.set_autocast_cache_enabled(not on)

    def clear_cache(self) -> None:
        """Forget the half copies of weights."""
        if self.devices:
            torch.clear_autocast_cache()

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """No casts inside."""
        with self._autocast_off():
            before, self.suspended = self.suspended, 0
            try:
                yield
            finally:
                self.suspended = before

    @contextmanager
    def in_backward(self) -> Iterator[None]:
        """No autocast inside, but the listed functions cast; half copies of weights have served afterwards."""
        if not self.by_autocast():
            yield
            return
        with self._autocast_off():
            self.suspended += 1
            try:
                yield
            finally:
                self.suspended -= 1
                self.clear_cache()

    @contextmanager
    def _autocast_off(self) -> Iterator[None]:
        before = [(device, torch.is_autocast_enabled(device)) for device in self.devices]
        for device, _ in before:
            torch.set_autocast_enabled(device, False)
        try:
            yield
        finally:
            for device, was in before:
                if device in self.devices:  # unless it was deactivated inside
                    torch.set_autocast_enabled(device, was)

    def reenabled(self, function: Callable[[], Any]) -> Callable[[], Any]:
        """A function that runs with casts as they are now, wherever it is called."""
        before = [(device, torch.is_autocast_enabled(device)) for device in self.devices]
        if not any(was for _, was in before):
            return function

        @functools.wraps(function)
        def run() -> Any:
            inside = [(device, torch.is_autocast_enabled(device)) for device, _ in before]
            try:
                for device, was in before:
                    torch.set_autocast_enabled(device, was)
                return function()
            finally:
                for device, was in inside:
                    torch.set_autocast_enabled(device, was)

        return run


CASTS = Casts()


@contextmanager
def disable_casts() -> Iterator[None]:
    """Run a block (or, as a decorator, a function) without O1's casts; does nothing at other levels.

    Example:
        >>> from lockstep import amp
        >>> with amp.disable_casts():
        ...     (torch.ones(2, 2) @ torch.ones(2, 2)).dtype
        torch.float32
    """
    with CASTS.disabled():
        yield


def begin_forward(model: Any, *_: Any) -> None:
    """A forward pre-hook of O1's models: threads started by hand cast too, and no copy of a weight is stale."""
    training = model.training and torch.is_grad_enabled() and not torch.jit.is_tracing()  # type: ignore[attr-defined, no-untyped-call]
    CASTS.begin_forward(evaluating=not training)


def forget_copies(*_: Any) -> None:
    """A hook of O1's models: half copies of weights are stale once others are loaded."""
    CASTS.clear_cache()


@functools.cache
def _follow_forks() -> None:
    os.register_at_fork(after_in_child=CASTS.leave_process)


def register_half_function(module: Any, name: str) -> None:
    """At O1, cast the arguments of ``module.name`` to half.

    Args:
        module: A module, a class or any object with that attribute.
        name: The function's name there. A later registration of the same name wins.

    Raises:
        ValueError: There is no such function.

    Example:
        >>> from lockstep import amp
        >>> class Ops:
        ...     einsum = staticmethod(torch.einsum)
        >>> amp.register_half_function(Ops, "einsum")
    """
    registered(CASTS, module, name, "half")


def register_float_function(module: Any, name: str) -> None:
    """At O1, run ``module.name`` in float32: arguments are cast, and nothing inside of it is.

    Args:
        module: A module, a class or any object with that attribute.
        name: The function's name there. A later registration of the same name wins.

    Raises:
        ValueError: There is no such function.

    Example:
        >>> from lockstep import amp
        >>> class Ops:
        ...     sigmoid = staticmethod(torch.sigmoid)
        >>> amp.register_float_function(Ops, "sigmoid")
    """
    registered(CASTS, module, name, "float")


def register_promote_function(module: Any, name: str) -> None:
    """At O1, cast the arguments of ``module.name`` to float32 where half and float32 meet.

    Args:
        module: A module, a class or any object with that attribute.
        name: The function's name there. A later registration of the same name wins.

    Raises:
        ValueError: There is no such function.

    Example:
        >>> from lockstep import amp
        >>> class Ops:
        ...     hypot = staticmethod(torch.hypot)
        >>> amp.register_promote_function(Ops, "hypot")
    """
    registered(CASTS, module, name, "promote")


def half_function(function: F) -> F:
    """Decorate a function whose arguments become half at O1."""
    return cast(F, POLICIES["half"](CASTS, function))


def float_function(function: F) -> F:
    """Decorate a function that runs in float32 at O1, without casts inside.

    Example:
        >>> from lockstep import amp
        >>> @amp.float_function
        ... def distance(a, b):
        ...     return (a - b).norm()
    """
    return cast(F, POLICIES["float"](CASTS, function))


def promote_function(function: F) -> F:
    """Decorate a function whose arguments become float32 at O1 where half and float32 meet."""
    return cast(F, POLICIES["promote"](CASTS, function))
