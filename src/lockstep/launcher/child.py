"""The first lines in a rank, and the last ones."""

import atexit
import contextlib
import faulthandler
import gc
import io
import multiprocessing
import os
import runpy
import signal
import sys
import threading
import time
import traceback
import types
from collections.abc import Callable
from multiprocessing import process
from multiprocessing.connection import Connection
from typing import NamedTuple, NoReturn

from lockstep.launcher import orphans, reports
from lockstep.launcher.hush import speak
from lockstep.launcher.plan import LaunchPlan, Rehearsal, Seat

# What multiprocessing takes a main process for: this module is imported before a process that it starts gets its task.
_MAIN_PROCESS = process.current_process()


_HERE = os.path.join(os.path.dirname(__file__), "")  # noqa: PTH118, PTH120  (as code objects name their files)
_COMPAT = os.path.join(os.path.dirname(os.path.dirname(__file__)), "compat", "")  # noqa: PTH118, PTH120
_BEFORE_THE_SCRIPT = (_HERE, _COMPAT, runpy.__file__, "<frozen runpy>", "<frozen importlib._bootstrap")


PASSED_ON = frozenset({signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2})
"""Signals for the launcher that are meant for its ranks."""


ROUND = "LOCKSTEP_ROUND"
"""Set by a rendezvous that counts the starts of all nodes together; torch's agent counts its own node's only."""


class Streams(NamedTuple):
    """Where one rank writes: its output, its errors and its reports. None where it keeps what the launcher has.

    The last two are there where somebody watches for ranks that do not go on: the launcher's questions, and answers.
    """

    out: Connection | None
    err: Connection | None
    report: Connection
    ask: Connection | None = None
    answer: Connection | None = None


class Start(NamedTuple):
    """What every rank is given; picklable, for ``--start spawn``."""

    plan: LaunchPlan
    job: Callable[[], None]
    streams: tuple[Streams, ...]
    agent: int
    mask: frozenset[int]
    ignored: frozenset[int]


def be_a_rank(start: Start) -> None:
    """Become a rank and run the job. Torch's agent calls this in the new process, with torchrun's variables set."""
    local_rank = int(os.environ["LOCAL_RANK"])
    seat, streams = start.plan.seats[local_rank], start.streams[local_rank]
    pipe = streams.report.fileno()
    reports.tell(pipe, pid=os.getpid(), rank=int(os.environ["RANK"]), size=int(os.environ["WORLD_SIZE"]))
    try:
        _take_signals(start)
        orphans.die_with(start.agent)
        _take_streams(start, local_rank)
        speak()
        os.environ.update(seat.environment)
        if ROUND in os.environ:  # a node that replaces another has not seen the starts before
            os.environ["TORCHELASTIC_RESTART_COUNT"] = os.environ.pop(ROUND)
        _forget_multiprocessing()
        _take_cores(seat, start.plan.threads)
        faulthandler.enable(pipe, all_threads=False)
        if start.plan.compat:
            from lockstep.compat.begin import begin

            begin(start.plan.compat, one_node=start.plan.one_node)
        if start.plan.rehearsal:
            _rehearse(start.plan.rehearsal)
        if streams.ask is not None and streams.answer is not None:
            from lockstep.watch.record import serve

            serve(streams.ask.fileno(), streams.answer.fileno())
    except BaseException as error:
        tell_failure(error, pipe)
        os._exit(1)
    code = _run(start.job, pipe)
    if code:
        os._exit(code)
    reports.tell(pipe, code=0)  # from here on it only waits for torch's agent, and can be told to end


def _take_signals(start: Start) -> None:
    """Undo what the launcher and torch's agent did to signals, before any can arrive."""
    debugged = start.plan.debug in (None, int(os.environ["LOCAL_RANK"]))
    # While one rank is debugged, ctrl-C is for the debugger. What nohup or a shell's & had ignored stays so.
    ignored = start.ignored | (set() if debugged else {signal.SIGINT})
    for number in PASSED_ON:
        usual = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
        signal.signal(number, signal.SIG_IGN if number in ignored else usual)
    signal.pthread_sigmask(signal.SIG_SETMASK, start.mask)


def _take_streams(start: Start, local_rank: int) -> None:
    mine = start.streams[local_rank]
    for end, number in ((mine.out, 1), (mine.err, 2)):
        if end is not None:
            os.dup2(end.fileno(), number)
    for rank, streams in enumerate(start.streams):
        for end in streams:
            if (
                end is not None
                and not end.closed
                and (rank != local_rank or end not in (mine.report, mine.ask, mine.answer))
            ):
                end.close()
    owner = start.plan.debug or 0
    if local_rank != owner:
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.close(nothing)
    sys.stdin = sys.__stdin__ = open(0, closefd=False)  # type: ignore[misc]  # noqa: SIM115  (it was closed)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True)  # what was printed is seen, also if the rank is killed


def _forget_multiprocessing() -> None:
    """A rank is a main process, not somebody's worker: libraries look at this, and multiprocessing at its own past."""
    process._parent_process = None  # type: ignore[attr-defined]
    process._current_process = _MAIN_PROCESS  # type: ignore[attr-defined]
    _MAIN_PROCESS.name = "MainProcess"
    if multiprocessing.get_start_method(allow_none=True) is not None:
        multiprocessing.set_start_method(None, force=True)


def _take_cores(seat: Seat, threads: int) -> None:
    if seat.cores:
        os.sched_setaffinity(0, seat.cores)
    import threadpoolctl  # type: ignore[import-untyped]
    import torch

    # Both were loaded before the fork, and read the variable then: torch's threads, and those of numpy's BLAS.
    torch.set_num_threads(threads)
    threadpoolctl.threadpool_limits(threads, user_api="blas")


def _rehearse(wanted: Rehearsal) -> None:
    from lockstep.compat.children import forget_launcher
    from lockstep.compat.rehearsal import install
    from lockstep.compat.rehearsal.settings import Settings

    if wanted.own_ranks:
        forget_launcher(os.environ)
    install.install(Settings(wanted.devices, wanted.hide_cuda, wanted.steps, wanted.folder))


def _run(job: Callable[[], None], pipe: int) -> int:
    """Run the job and end it as python would; give the exit code. A failure is told before anything can hang."""
    mine = os.getpid()
    try:
        try:
            job()
        finally:
            if os.getpid() != mine:
                _end_of_fork()
        code = 0
    except SystemExit as end:
        code = _exit_code(end, pipe)
    except BaseException as error:
        tell_failure(error, pipe)
        code = 130 if isinstance(error, KeyboardInterrupt) else 1
    _end()
    return code


def _end_of_fork() -> NoReturn:
    """What the script has forked comes here too: it is no rank, and must not tell of it or leave its groups."""
    error = sys.exc_info()[1]
    code = 0 if error is None else 1
    if isinstance(error, SystemExit):
        code = error.code & 0xFF if isinstance(error.code, int) else int(error.code is not None)
        if error.code is not None and not isinstance(error.code, int):
            sys.stderr.write(f"{error.code}\n")
    elif error is not None:
        traceback.print_exception(error)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
    os._exit(code)


def tell_failure(error: BaseException, pipe: int) -> None:
    """Tell an exception, with the traceback that python would print, or that the script's own hook prints."""
    when = time.monotonic()
    error.__traceback__ = trim(error)
    text = io.StringIO()
    # torch.distributed sets a hook that puts the rank before every line, which stands above the traceback here.
    if sys.excepthook is sys.__excepthook__ or sys.excepthook.__module__ == "torch.distributed.distributed_c10d":
        traceback.print_exception(error, file=text)
    else:
        with contextlib.redirect_stderr(text):
            sys.excepthook(type(error), error, error.__traceback__)
    last = "".join(traceback.format_exception_only(error)).strip().splitlines() or [type(error).__name__]
    code = 130 if isinstance(error, KeyboardInterrupt) else 1
    facts = {"when": when, "code": code, "kind": type(error).__name__, "error": last[-1][:500]}
    reports.tell(pipe, **facts, text=reports.shorten(text.getvalue()))


def trim(error: BaseException) -> types.TracebackType | None:
    """Give the part of a traceback that is the script's own: without our frames and runpy's above it."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename.startswith(_BEFORE_THE_SCRIPT):
        trace = trace.tb_next
    # Of a script that python cannot read there is no frame; the error itself names the line.
    return trace if trace or isinstance(error, SyntaxError) else error.__traceback__


def _exit_code(end: SystemExit, pipe: int) -> int:
    if end.code is None or end.code == 0:
        return 0
    code = end.code & 0xFF if isinstance(end.code, int) else 1
    text = "" if isinstance(end.code, int) else f"{end.code}\n"
    reports.tell(pipe, when=time.monotonic(), code=code, text=reports.shorten(text))
    return code


def _end() -> None:
    """What python does after a script's last line, but for the last step.

    Python would now stop every other thread where it next asks for the interpreter's lock. A thread of gloo's that lets
    go of a tensor is unwound through C++ that allows none: "terminate called without an active exception". A rank goes
    another way: it lets go of the script's objects while everything works, and then leaves at once.
    """
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads that are not daemons
    atexit._run_exitfuncs()
    space = sys.modules["__main__"].__dict__
    for name in [name for name in space if not name.startswith("__")]:
        space[name] = None
    gc.collect()
    for stream in [thing for thing in gc.get_objects() if issubclass(type(thing), io.IOBase)]:
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
