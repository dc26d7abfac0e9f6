"""``lockstep.launch(fn)``: a function on several ranks, from a notebook, a test or a script.

The ranks are forked from a new process, not from the caller: a caller that has computed with several threads, or has
touched CUDA, cannot be forked without hanging now and then, and nobody can tell from outside whether it has. So
function, arguments and results travel by cloudpickle, which takes closures, lambdas and what was defined in a notebook.
"""

import contextlib
import functools
import importlib.machinery
import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from multiprocessing import connection
from multiprocessing.connection import Connection
from types import ModuleType
from typing import IO, Any, NamedTuple, TypeVar

import cloudpickle  # type: ignore[import-untyped]

from lockstep.errors import LostRankError, UsageError
from lockstep.launcher import child, front, machine, orphans
from lockstep.launcher.plan import LaunchPlan, Wish, make_plan

T = TypeVar("T")

_SERVE = "import sys; sys.path[:] = {path!r}; from lockstep.launcher import function; function.serve()"


class _Order(NamedTuple):
    """What the caller hands to the new process."""

    plan: LaunchPlan
    call: bytes
    caller: int
    results: list[int]
    word: int


def launch(fn: Callable[..., T], *args: Any, ranks: int | None = None) -> list[T]:
    """Run a function on several ranks of this machine, and wait for all of them.

    Ranks are new processes, as `lockstep run` starts them: with threads, cores and an environment of their own.
    They share nothing with the caller; in a notebook, what ``fn`` refers to is sent along.

    Args:
        fn: Any function, also a closure or a lambda. It begins with `lockstep.init`, if ranks are to meet.
        *args: Its arguments, the same on every rank.
        ranks: How many; by default one for each GPU, or for each group of cores that share a cache.

    Returns:
        What each rank returned, by rank. Tensors are copies.

    Raises:
        LostRankError: A rank raised, ended or was killed. The message has its traceback; the exception itself is the
            cause, where it can be sent.
        UsageError: ``fn``, its arguments or a result cannot be sent; or ``ranks`` is no number of ranks.
    """
    if ranks is not None and ranks < 1:
        raise UsageError(f"lockstep.launch(ranks={ranks}): write a number from 1 on, or leave it out.")
    plan = make_plan(Wish(nproc_per_node="auto" if ranks is None else str(ranks)), machine.look(_gpus), os.environ)
    call = _pack(fn, args)
    pipes = [connection.Pipe(duplex=False) for _ in plan.seats]
    word, their_word = connection.Pipe(duplex=False)
    theirs = [end for _, end in pipes] + [their_word]
    try:
        order = _Order(plan, call, os.getpid(), [end.fileno() for _, end in pipes], their_word.fileno())
        with _started(order, [end.fileno() for end in theirs]) as process:
            for end in theirs:
                end.close()
            answers = _collect([end for end, _ in pipes], word, process)
    finally:
        for end in (*(end for pair in pipes for end in pair), word, their_word):
            end.close()
    return _open(answers, len(plan.seats))


class _CannotBeSentError(UsageError):
    """A result that does not travel: the caller's mistake, not the rank's."""


class _Answers(NamedTuple):
    values: dict[int, bytes]
    last: front.LastWord


def _gpus() -> int:
    import torch

    return torch.cuda.device_count()


def _pack(fn: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    module = sys.modules.get(getattr(fn, "__module__", None) or "")
    by_value = module is not None and module.__name__ != "__main__" and not _importable(module)
    with _sent_by_value(module) if by_value and module else contextlib.nullcontext():
        try:
            packed: bytes = cloudpickle.dumps((fn, args))
        except Exception as error:
            raise UsageError(
                f"lockstep.launch: the function or its arguments cannot be sent to the ranks ({type(error).__name__}: "
                f"{error}). Open files, locks, generators and the like must be made inside the function."
            ) from error
    return packed


def _importable(module: ModuleType) -> bool:
    """Whether a new process finds this module by its name; not if pytest or a notebook has loaded it its own way."""
    path, name = None, ""
    spec = None
    for part in module.__name__.split("."):
        name = f"{name}.{part}" if name else part
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is None:
            return module.__name__ in sys.builtin_module_names
        path = spec.submodule_search_locations
    return spec is not None and spec.origin == getattr(module, "__file__", None)


@contextlib.contextmanager
def _sent_by_value(module: ModuleType) -> Iterator[None]:
    cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        cloudpickle.unregister_pickle_by_value(module)


@contextlib.contextmanager
def _started(order: _Order, fds: list[int]) -> Iterator[subprocess.Popen[bytes]]:
    """Start the front in a new process, and see that it ends. What it prints goes where the caller prints."""
    shown = [_is_real(sys.stdout, 1), _is_real(sys.stderr, 2)]
    process = subprocess.Popen(  # noqa: S603  (python itself)
        [sys.executable, "-c", _SERVE.format(path=sys.path)],
        stdin=subprocess.PIPE,
        stdout=None if shown[0] else subprocess.PIPE,
        stderr=None if shown[1] else subprocess.PIPE,
        pass_fds=fds,
    )
    carriers = [
        threading.Thread(target=_carry, args=(source, target), daemon=True)
        for source, target in ((process.stdout, sys.stdout), (process.stderr, sys.stderr))
        if source is not None
    ]
    for carrier in carriers:
        carrier.start()
    try:
        assert process.stdin is not None
        with process.stdin as pipe:
            pickle.dump(order, pipe)
        yield process
    except BaseException:
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(2.0)
        raise
    finally:
        process.kill()  # its agent sees that, and ends everybody
        process.wait()
        for carrier in carriers:
            carrier.join()


def _is_real(stream: Any, number: int) -> bool:
    """Whether what a process writes to 1 or 2 comes out where the caller prints; not so in a notebook."""
    try:
        stream.flush()
        return bool(stream.fileno() == number)
    except (AttributeError, OSError, ValueError):
        return False


def _carry(source: IO[bytes], target: Any) -> None:
    with source:
        for line in source:
            target.write(line.decode(errors="replace"))
            target.flush()


def _collect(ends: list[Connection], word: Connection, process: subprocess.Popen[bytes]) -> _Answers:
    values: dict[int, bytes] = {}
    ranks = {end: rank for rank, end in enumerate(ends)}
    last = None
    while ranks or last is None:
        for end in connection.wait([*ranks, *([word] if last is None else [])]):
            try:
                data = end.recv_bytes()  # type: ignore[union-attr]
            except EOFError:
                if end is word:
                    last = front.LastWord(128 - process.wait(), -1, "lockstep.launch: the launcher was killed\n")
                else:
                    del ranks[end]  # type: ignore[arg-type]
                continue
            if end is word:
                last = front.LastWord(*pickle.loads(data))  # noqa: S301  (from our own child)
            else:
                values[ranks[end]] = data  # type: ignore[index]
    process.wait()
    return _Answers(values, last)


def _open(answers: _Answers, size: int) -> list[Any]:
    """Turn what came back into results, or raise."""
    opened = {rank: pickle.loads(data) for rank, data in answers.values.items()}  # noqa: S301  (from our own children)
    last = answers.last
    if last.code == 0 and len(opened) == size:
        return [opened[rank][1] for rank in range(size)]
    error = opened.get(last.rank, (True, None))
    if isinstance(error[1], _CannotBeSentError):
        raise UsageError(str(error[1]))
    raise LostRankError(f"lockstep.launch: {last.text.removeprefix('lockstep: ').rstrip()}") from (
        None if error[0] else error[1]
    )


def serve() -> None:
    """In the new process: take the order, be the front, hand over the last word."""
    order: _Order = pickle.load(sys.stdin.buffer)  # noqa: S301  (from the caller, which started this process)
    orphans.die_with(order.caller)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    for end in (*order.results, order.word):
        os.set_inheritable(end, False)  # a program that a rank starts must not hold them open
    last = front.run(order.plan, functools.partial(_call, order))
    Connection(order.word, readable=False).send_bytes(pickle.dumps(tuple(last)))


def _call(order: _Order) -> None:
    """In a rank: call the function and send back what came of it."""
    rank = int(os.environ["RANK"])
    for end in (*order.results, order.word):
        if end != order.results[rank]:
            os.close(end)
    results = Connection(order.results[rank], readable=False)
    try:
        fn, args = pickle.loads(order.call)  # noqa: S301
        value = fn(*args)
        results.send_bytes(_pack_result(value, rank))
    except BaseException as error:
        error.__traceback__ = child.trim(error)
        with contextlib.suppress(Exception):
            results.send_bytes(cloudpickle.dumps((False, error)))
        raise


def _pack_result(value: object, rank: int) -> bytes:
    try:
        packed: bytes = cloudpickle.dumps((True, value))
    except Exception as error:
        raise _CannotBeSentError(
            f"rank {rank}: the result, a {type(value).__name__}, cannot be sent back ({type(error).__name__}: "
            f"{error}). Return numbers, tensors, arrays, or containers of them."
        ) from error
    return packed
