"""A rank's own part: it counts its steps, and tells the launcher where it is when asked.

A thread waits for the launcher's question; between questions nothing is written and nothing is looked at, so that
watching costs a step no more than adding one to a number. Where the thread cannot run, because something holds Python's
lock, the launcher sends a signal that makes Python's fault handler write the stack.
"""

import _thread
import faulthandler
import json
import os
import signal
import sys
import threading
from typing import Any

from lockstep.watch.verdict import Call, Seen

STACK_SIGNAL = signal.SIGRTMIN + 7
"""Makes a rank write its stacks without Python's help. No program's usual signal."""

STEPS, ALL = b"s", b"a"
"""What the launcher asks: how many steps, or everything."""

_MOST = 12_000  # characters of a stack


class _Steps:
    """Optimizer steps that this process has finished."""

    def __init__(self) -> None:
        self.count = 0

    def add(self, *_: Any) -> None:
        """One more; two optimizers that take turns (a GAN's) both count."""
        self.count += 1


def serve(ask: int, answer: int) -> None:
    """Begin to count steps and to answer; called once in a rank, before its script.

    Args:
        ask: A pipe's end that the launcher's questions come from.
        answer: One for the answers.
    """
    from torch.optim.optimizer import register_optimizer_step_post_hook

    if "TORCH_NCCL_TRACE_BUFFER_SIZE" not in os.environ:  # the older name
        # torch 2.9 and 2.10 record gloo's calls only where this is there; later ones do so by themselves.
        os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")
    steps = _Steps()
    register_optimizer_step_post_hook(steps.add)
    faulthandler.register(STACK_SIGNAL, file=answer, all_threads=True, chain=False)
    # Not threading.Thread: the script's own list of threads stays as it is.
    _thread.start_new_thread(_answer, (ask, answer, steps, os.getpid()))


def _answer(ask: int, answer: int, steps: _Steps, pid: int) -> None:
    _tell(answer, pid=pid, steps=steps.count)
    while question := os.read(ask, 1):
        if question == ALL:
            _tell(answer, pid=pid, steps=steps.count, seen=look(steps.count))
        else:
            _tell(answer, pid=pid, steps=steps.count)


def _tell(answer: int, **facts: object) -> None:
    os.write(answer, b"\n\0" + json.dumps(facts).encode() + b"\n")


def look(steps: int) -> dict[str, Any]:
    """Where this process is: the fields of a `Seen`, but for the rank."""
    from lockstep.watch.flight import read_recorder
    from lockstep.watch.stacks import find_spot, write_stack

    frames = sys._current_frames()
    main = frames[threading.main_thread().ident or 0]
    spot = find_spot(main)
    flight = read_recorder()
    call = _in_shm(list(frames.values())) if spot.inside else None
    if call is None and spot.inside and flight.open:
        call = flight.open[0]
    return {
        "steps": steps,
        "call": call,
        "place": spot.place,
        "guard": spot.guard,
        "doing": spot.doing,
        "ended": not spot.place and "_shutdown" in spot.names,
        "stack": write_stack(main)[-_MOST:],
        "past": flight.past,
    }


def _in_shm(frames: list[Any]) -> Call | None:
    """The shm call that a thread of this process is in."""
    shm = sys.modules.get("lockstep.shm.glance")
    if shm is None and "lockstep.shm.member" in sys.modules:
        from lockstep.shm import glance as shm
    if shm is None:
        return None
    found = next((seen for frame in frames if (seen := shm.find_call(frame))), None)
    if found is None:
        return None
    return Call(tuple(found.ranks), found.group, found.number, found.kind, found.detail)


def read_seen(rank: int, facts: dict[str, Any]) -> Seen:
    """What `look` gave, after its way through the pipe."""
    call = facts["call"]
    if call is not None:
        call = Call(tuple(call[0]), *call[1:])
    past = tuple((group, number, what) for group, number, what in facts["past"])
    return Seen(rank, **(facts | {"call": call, "past": past}))
