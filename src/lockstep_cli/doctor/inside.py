"""What is asked of python in a new process, where a crash costs nothing: torch, its parts, and what a run would be."""

import json
import os
import subprocess
import sys
import warnings
from collections.abc import Mapping
from typing import Any, NamedTuple

_PATIENCE = 60.0

_RANK_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")
_RANK_PREFIXES = ("SLURM_", "OMPI_", "PMI_", "PMIX_", "TORCHELASTIC_")


class Inside(NamedTuple):
    """What a process with torch knows.

    Attributes:
        trouble: Why there is none: the last line of what went wrong. The rest is then empty.
        torch: Its version.
        cuda: The CUDA that torch was built for; empty without.
        nccl: NCCL's version; empty without.
        gloo: Whether torch has gloo.
        shm: Why shared memory between ranks cannot be used; empty if it can.
        gpus: The name of each GPU that torch can use.
        complaint: What torch said when it was asked for GPUs.
        driver: The CUDA that the driver supports; empty if unknown.
        groups: Cores that this process may use, those that share a last-level cache together.
        quota: Processors' worth of time that a container may use, if it is limited.
        run: What `lockstep run` would start here.
    """

    trouble: str = ""
    torch: str = ""
    cuda: str = ""
    nccl: str = ""
    gloo: bool = False
    shm: str = ""
    gpus: tuple[str, ...] = ()
    complaint: str = ""
    driver: str = ""
    groups: tuple[tuple[int, ...], ...] = ()
    quota: float | None = None
    run: str = ""


def command(code: str, *arguments: str) -> list[str]:
    """Python with this process's search path, not with the current folder before it."""
    return [sys.executable, "-c", f"import sys; sys.path[:] = {sys.path!r}; {code}", *arguments]


def environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables without those that would make a new process a rank of the job that the doctor was started in.

    Example:
        >>> environment({"SLURM_NTASKS": "2", "RANK": "1", "HOME": "/root"})
        {'HOME': '/root'}
    """
    return {
        name: value
        for name, value in environ.items()
        if name not in _RANK_NAMES and not name.startswith(_RANK_PREFIXES)
    }


def look() -> Inside:
    """Ask a new process."""
    return understand(*ask(_PATIENCE, "from lockstep_cli.doctor import inside; inside.tell()"))


def ask(seconds: float, code: str, *arguments: str) -> tuple[int, str, str]:
    """Have a new python run some code; give its exit code, output and errors. One that is late has failed."""
    try:
        done = subprocess.run(  # noqa: S603  (python itself)
            command(code, *arguments),
            capture_output=True,
            text=True,
            errors="replace",
            timeout=seconds,
            stdin=subprocess.DEVNULL,
            env=environment(os.environ),
            check=False,
        )
    except subprocess.TimeoutExpired:
        return 1, "", f"no answer within {seconds:g} s"
    return done.returncode, done.stdout, done.stderr


def understand(code: int, output: str, errors: str) -> Inside:
    r"""Read what the process has left.

    Example:
        >>> understand(1, "", "Traceback (most recent call last):\nImportError: libcudart.so.13 is missing\n").trouble
        'ImportError: libcudart.so.13 is missing'
        >>> understand(-11, "", "").trouble
        'python ended by signal 11'
    """
    if code != 0 or not output.strip():
        said = errors.strip().splitlines()
        ended = f"python ended by signal {-code}" if code < 0 else f"python ended with code {code}"
        return Inside(trouble=said[-1] if said and code >= 0 else ended)
    facts: dict[str, Any] = json.loads(output.strip().splitlines()[-1])
    facts["gpus"] = tuple(facts["gpus"])
    facts["groups"] = tuple(map(tuple, facts["groups"]))
    return Inside(**facts)


def tell() -> None:
    """In the new process: find everything out and print it."""
    import torch
    import torch.distributed as dist

    from lockstep import shm
    from lockstep.launcher import machine, plan

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        gpus = _gpus(torch)
    here = machine.look(lambda: len(gpus))
    driver = torch._C._cuda_getDriverVersion() if torch.version.cuda and gpus else 0  # type: ignore[attr-defined]
    nccl = dist.is_available() and dist.is_nccl_available()
    facts = Inside(
        torch=torch.__version__,
        cuda=torch.version.cuda or "",
        nccl=".".join(map(str, torch.cuda.nccl.version())) if nccl else "",  # type: ignore[no-untyped-call]
        gloo=dist.is_available() and dist.is_gloo_available(),
        shm=shm.available(),
        gpus=gpus,
        complaint=" ".join(str(warning.message).splitlines()[0] for warning in caught),
        driver=f"{driver // 1000}.{driver % 1000 // 10}" if driver else "",
        groups=here.groups,
        quota=here.quota,
        run=plan.in_one_line(plan.make_plan(plan.Wish(), here, os.environ)),
    )
    sys.stdout.write(json.dumps(facts._asdict()) + "\n")


def _gpus(torch: Any) -> tuple[str, ...]:
    if not torch.cuda.is_available():
        return ()
    return tuple(torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count()))
