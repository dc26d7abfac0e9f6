"""The front: what the user started. It takes signals and writes; the agent, its only child, does the rest.

Two processes rather than one, so that each can clean up after the other (see `orphans`), and so that what
forks the ranks has no thread that writes to the terminal.
"""

import contextlib
import json
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from multiprocessing import util
from multiprocessing.connection import Connection
from typing import NamedTuple, NoReturn

from lockstep.errors import UsageError
from lockstep.launcher import failure, orphans, resources
from lockstep.launcher.child import PASSED_ON, Start, Streams
from lockstep.launcher.output import Output
from lockstep.launcher.plan import LaunchPlan

_FROM_TERMINAL = 128  # si_code SI_KERNEL: the terminal sent it, to every process in the foreground


class Ends(NamedTuple):
    """The pipes between front, agent and ranks; each process closes what is not its own."""

    control: tuple[Connection, Connection]
    words: tuple[Connection, Connection]
    reports: list[tuple[Connection, Connection]]
    asks: list[tuple[Connection, Connection]]
    answers: list[tuple[Connection, Connection]]


class LastWord(NamedTuple):
    """How it ended.

    Attributes:
        code: The exit code: 0, or that of the rank that failed first.
        rank: That rank; -1 if there is none.
        text: What is to be said of it.
    """

    code: int
    rank: int
    text: str


def run(plan: LaunchPlan, job: Callable[[], None]) -> LastWord:
    """Run a job on every rank of the plan; what is said of its end is not printed yet."""
    count = len(plan.seats)
    resources.fill_closed()
    alone = plan.one_node and count == 1 and not plan.log_dir
    try:
        resources.make_room(count)
        resources.need_semaphores()
        output = Output(
            count,
            owner=plan.debug or 0,
            direct=alone or plan.debug is not None,
            host="" if plan.one_node else f"{socket.gethostname()} ",
            log_dir=plan.log_dir,
        )
    except UsageError as error:
        return LastWord(2, -1, f"lockstep: {error}\n")
    asked = range(count) if plan.stall else ()
    ends = Ends(_pipe(), _pipe(), [_pipe() for _ in range(count)], [_pipe() for _ in asked], [_pipe() for _ in asked])
    ignored = frozenset(number for number in PASSED_ON if signal.getsignal(number) == signal.SIG_IGN)
    watched = (PASSED_ON - ignored) | {signal.SIGCHLD, signal.SIGWINCH}
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, watched)
    orphans.adopt_orphans()
    sys.stdout.flush()
    sys.stderr.flush()
    agent = os.fork()
    if agent == 0:
        _be_the_agent(plan, job, output, ends, (frozenset(mask), ignored))
    return _Front(plan, output, ends, agent, watched).stay()


def leave(code: int) -> NoReturn:
    """End the process that was the front. Python's own end takes torch apart, which is half a second for nothing."""
    with contextlib.suppress(OSError):  # a closed pipe: nobody reads it any more
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def _pipe() -> tuple[Connection, Connection]:
    ours, theirs = os.pipe()
    return Connection(ours, writable=False), Connection(theirs, readable=False)


class _Front:
    def __init__(self, plan: LaunchPlan, output: Output, ends: Ends, agent: int, watched: frozenset[int]) -> None:
        self._plan, self._output, self._agent, self._watched = plan, output, agent, watched
        self._control = ends.control[1]
        self._words = ends.words[0]
        self._last: LastWord | None = None
        output.close_theirs()
        between = (end for pairs in (ends.reports, ends.asks, ends.answers) for pair in pairs for end in pair)
        for theirs in (ends.control[0], ends.words[1], *between):
            theirs.close()
        output.listen(self._words.fileno(), self._hear)

    def stay(self) -> LastWord:
        """Pass signals on until the agent has ended; then see that nobody is left, and have the last word."""
        self._output.start()
        status = self._wait()
        stuck = orphans.kill_descendants(os.getpid())
        _reap_all()
        self._output.join(timeout=5.0 if stuck else None)
        if stuck:
            self._output.say(f"lockstep: processes {sorted(stuck)} hang inside the kernel and could not be ended")
        self._output.settle()
        if self._last:
            return self._last
        code = os.waitstatus_to_exitcode(status)
        if code >= 0:  # it has written why
            return LastWord(code, -1, "")
        who = f"lockstep: the launcher's agent was ended by {failure.signal_name(-code)}, and its ranks with it\n"
        return LastWord(128 - code, -1, who)

    def _wait(self) -> int:
        while True:
            info = signal.sigwaitinfo(self._watched)
            if info.si_signo == signal.SIGCHLD:
                status = self._reap()
                if status is not None:
                    return status
            elif info.si_signo == signal.SIGWINCH:
                self._output.resize()
            else:
                self._pass_on(info)

    def _pass_on(self, info: signal.struct_siginfo) -> None:
        from_terminal = info.si_code == _FROM_TERMINAL and info.si_signo in (signal.SIGINT, signal.SIGQUIT)
        if from_terminal and info.si_signo == signal.SIGINT and self._plan.debug is not None:
            return  # it is for the debugger
        with contextlib.suppress(BrokenPipeError):  # the agent has just ended; SIGCHLD comes next
            os.write(self._control.fileno(), bytes((info.si_signo, from_terminal)))

    def _reap(self) -> int | None:
        """Collect whoever has ended; the agent's status if it is among them."""
        found = None
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return found
            if pid == self._agent:
                found = status
            elif pid == 0:
                return found

    def _hear(self) -> bool:
        """In the output's thread: a word from the agent."""
        try:
            word = json.loads(self._words.recv_bytes())
        except EOFError:
            return False
        if "say" in word:
            self._output.say(word["say"])
        elif "log" in word:
            self._output.log(*word["log"])
        elif "name" in word:
            self._output.name(*word["name"])
        else:
            self._last = LastWord(**word)
        return True


def _reap_all() -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _streams(output: Output, ends: Ends) -> tuple[Streams, ...]:
    """What each rank gets of the pipes."""
    watched = list(zip((end for end, _ in ends.asks), (end for _, end in ends.answers), strict=True))
    return tuple(
        Streams(*pair, ends.reports[number][1], *(watched[number] if watched else ()))
        for number, pair in enumerate(output.streams)
    )


def _be_the_agent(
    plan: LaunchPlan,
    job: Callable[[], None],
    output: Output,
    ends: Ends,
    signals: tuple[frozenset[int], frozenset[int]],
) -> NoReturn:
    code = 1
    try:
        output.close_ours()
        ends.control[1].close()
        ends.words[0].close()
        orphans.adopt_orphans()
        os.environ["OMP_NUM_THREADS"] = plan.seats[0].environment["OMP_NUM_THREADS"]  # for what reads it later

        def say(**word: object) -> None:
            ends.words[1].send_bytes(json.dumps(word).encode())

        from lockstep.launcher import agent
        from lockstep.launcher.stall import Stall
        from lockstep.launcher.watch import Watch

        stall = Stall(plan.stall, [end for _, end in ends.asks], [end for end, _ in ends.answers], say)
        watch = Watch(plan, ends.control[0], [end for end, _ in ends.reports], say, stall)
        streams = _streams(output, ends)
        start = Start(plan, job, streams, os.getpid(), *signals)
        watch.start()
        seen = agent.run(plan, start, watch.before_start, stall.others.meet, lambda: bool(watch.stopped_by))
        util._exit_function()  # type: ignore[attr-defined]  # gives back what `spawn` has in /dev/shm
        found = watch.ends(seen)
        first = failure.find_first(found)
        code = failure.exit_code(first)
        if watch.stopped_by and not found:  # before any rank had begun
            code = 128 + watch.stopped_by
        for end in found:
            say(log=[end.local_rank, end.text])
        say(code=code, rank=first.rank if first else -1, text=failure.report(found, watch.size(), watch.stopped_by))
    except UsageError as error:
        say(code=2, rank=-1, text=f"lockstep: {error}\n")
        code = 2
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)
