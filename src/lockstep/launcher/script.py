"""Runs the script as python would run it: the same ``__main__``, ``sys.argv`` and ``sys.path[0]``."""

import contextlib
import importlib.machinery
import importlib.util
import os
import pkgutil
import runpy
import shutil
import signal
import subprocess
import sys
import types
from typing import Any, NamedTuple, NoReturn

from lockstep.launcher.child import PASSED_ON


class Job(NamedTuple):
    """A script's path or a module's name, and what follows it.

    Attributes:
        target: The path or the name.
        arguments: What follows.
        module: Whether it is a module's name.
        program: Whether it is no python script, but a program.
        rank_argument: The name of an argument that tells it its local rank, if it knows one.
    """

    target: str
    arguments: tuple[str, ...] = ()
    module: bool = False
    program: bool = False
    rank_argument: str = ""

    def __str__(self) -> str:
        """As it was written."""
        return " ".join((*(("-m",) if self.module else ()), self.target, *self.arguments))


def run_as_main(job: Job) -> None:
    """Run a job; what it raises comes out as it is."""
    if job.rank_argument:
        job = job._replace(arguments=(f"{job.rank_argument}={os.environ['LOCAL_RANK']}", *job.arguments))
    if job.program:
        run_program(job)
    # A new module: nothing of the launcher's own __main__ shows, and multiprocessing finds the script by its __file__.
    # multiprocessing has a second name for the module, by which objects of loader workers come back.
    sys.modules["__main__"] = sys.modules["__mp_main__"] = main = types.ModuleType("__main__")
    main.__dict__.update(__builtins__=sys.modules["builtins"], __annotations__={})
    sys.argv = [job.target, *job.arguments]
    if job.module:
        sys.path[0] = os.getcwd()  # noqa: PTH109  (where `python -m` looks first)
        runpy._run_module_as_main(job.target)  # type: ignore[attr-defined]  # what `python -m` calls; checked on Python 3.10 to 3.14
    elif pkgutil.get_importer(job.target) is not None:
        sys.path[0] = os.path.abspath(job.target)  # noqa: PTH100  # a folder or a zip file with a __main__.py in it
        runpy._run_module_as_main("__main__", alter_argv=False)  # type: ignore[attr-defined]
    else:
        sys.path[0] = os.path.dirname(os.path.realpath(job.target))  # noqa: PTH120  (python takes these two)
        _run_file(os.path.abspath(job.target), main.__dict__)  # noqa: PTH100


def _run_file(path: str, space: dict[str, Any]) -> None:
    with open(path, "rb") as file:  # noqa: PTH123  (a Path would tidy what python leaves)
        source = file.read()
    loader = importlib.machinery.SourceFileLoader("__main__", path)
    # python leaves __spec__ None for a script, and multiprocessing relies on it.
    space.update(__file__=path, __loader__=loader, __cached__=None, __package__=None, __spec__=None)
    if path.endswith(".pyc"):
        exec(loader.get_code("__main__"), space)  # type: ignore[arg-type]  # noqa: S102
        return
    code = None
    with contextlib.suppress(SyntaxError):
        code = compile(source, path, "exec", dont_inherit=True)
    # Where lockstep.compat is on, the loader reads what older Pythons read; else it raises the same.
    exec(code or loader.source_to_code(source, path), space)  # noqa: S102


def run_program(job: Job) -> NoReturn:
    """Run a program in this rank's place, and end as it ends."""
    process = subprocess.Popen([job.target, *job.arguments])  # noqa: S603
    for number in PASSED_ON:
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, lambda number, _: process.send_signal(number))
    code = process.wait()
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    sys.exit(code)


def path_of(job: Job) -> str:
    """Where the text of what is run lies; empty if there is none to be read."""
    if job.program:
        return ""
    if not job.module:
        return os.path.join(job.target, "__main__.py") if os.path.isdir(job.target) else job.target  # noqa: PTH112, PTH118
    places = [os.getcwd(), *sys.path]  # noqa: PTH109
    for place in places:
        base = os.path.join(place, *job.target.split("."))  # noqa: PTH118
        for path in (f"{base}.py", os.path.join(base, "__main__.py")):  # noqa: PTH118
            if os.path.isfile(path):  # noqa: PTH113
                return path
    return ""


def missing(job: Job) -> str:
    """What to say if there is no such script or module; empty if there is."""
    if job.program:
        return "" if shutil.which(job.target) else f"there is no program {job.target}."
    if not job.module:
        return "" if os.path.exists(job.target) else f"there is no file {job.target}."  # noqa: PTH110
    top = job.target.partition(".")[0]
    found = importlib.machinery.PathFinder.find_spec(top, ["", *sys.path]) or importlib.util.find_spec(top)
    return "" if found else f"there is no module {top}."


def source_of(job: Job) -> str:
    """The text of what is run, to look at; empty if there is none to be read."""
    try:
        with open(path_of(job), encoding="utf-8") as file:  # noqa: PTH123
            return file.read()
    except (OSError, UnicodeDecodeError):
        return ""
