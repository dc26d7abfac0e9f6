"""What the reducer needs of torch's autograd engine; the one file that touches its private side.

Checked on torch 2.9 to 2.14: ``torch._C._current_graph_task_id``, ``torch._C._storage_Use_Count``,
``Variable._execution_engine.queue_callback``, and that a Python function's backward runs below a frame of
``BackwardCFunction.apply``.
"""

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Variable
from torch.autograd.function import BackwardCFunction

NO_BACKWARD = -1

current_backward: Callable[[], int] = torch._C._current_graph_task_id
"""The number of the backward that is running in this thread, or `NO_BACKWARD`; a nested one has its own."""

_APPLY = BackwardCFunction.apply.__code__


def at_the_end_of_backward(callback: Callable[[], None], node: Any) -> None:
    """Call ``callback`` when the outermost running backward is through; what it raises comes out of that backward.

    Re-entrant checkpointing runs a backward inside a node of another one. The engine's own callback would come at the
    end of the inner one, once for every checkpoint, so this waits until the outer one goes on with its next node.

    Args:
        callback: What to call.
        node: What `enclosing_node` gives.
    """
    following = next((n for n, _ in node.next_functions if n is not None), None) if node is not None else None
    if following is None:
        _queue(callback)
        return

    def back_outside(_: Any) -> None:
        handle.remove()
        at_the_end_of_backward(callback, enclosing_node())

    handle = following.register_prehook(back_outside)


def enclosing_node() -> Any:
    """The node whose own backward runs the current one, if it is nested, else None."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code is _APPLY:
            return frame.f_locals["self"]
        frame = frame.f_back  # type: ignore[assignment]
    return None


def _queue(callback: Callable[[], None]) -> None:
    Variable._execution_engine.queue_callback(callback)


def storage_uses(tensor: Tensor) -> int:
    """How many tensors lie in this one's memory."""
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))
