"""Where this process stands among all ranks, read from whatever launcher's variables there are. Pure."""

from collections.abc import Mapping
from typing import NamedTuple

from lockstep.errors import UsageError


class Place(NamedTuple):
    """This process among all ranks, and who said so."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    node: int
    nodes: int
    launcher: str


ALONE = Place(rank=0, size=1, local_rank=0, local_size=1, node=0, nodes=1, launcher="")


class Variables(NamedTuple):
    """What a launcher calls its numbers. Several names in one field are tried in order."""

    launcher: str
    rank: str
    size: tuple[str, ...]
    local_rank: tuple[str, ...]
    local_size: tuple[str, ...]
    node: tuple[str, ...] = ()
    nodes: tuple[str, ...] = ()


# Slurm's size is that of the job *step*: a batch script outside srun has SLURM_NTASKS of the job but is one process.
LAUNCHERS = (
    Variables(
        "torchrun",
        "RANK",
        ("WORLD_SIZE",),
        ("LOCAL_RANK",),
        ("LOCAL_WORLD_SIZE",),
        ("GROUP_RANK",),
        ("GROUP_WORLD_SIZE",),
    ),
    Variables(
        "Slurm",
        "SLURM_PROCID",
        ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"),
        ("SLURM_LOCALID",),
        ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"),
        ("SLURM_NODEID",),
        ("SLURM_STEP_NUM_NODES", "SLURM_NNODES"),
    ),
    Variables(
        "Open MPI",
        "OMPI_COMM_WORLD_RANK",
        ("OMPI_COMM_WORLD_SIZE",),
        ("OMPI_COMM_WORLD_LOCAL_RANK",),
        ("OMPI_COMM_WORLD_LOCAL_SIZE",),
    ),
    Variables(
        "PMI", "PMI_RANK", ("PMI_SIZE",), ("MPI_LOCALRANKID", "PMI_LOCAL_RANK"), ("MPI_LOCALNRANKS", "PMI_LOCAL_SIZE")
    ),
)


def find_place(environ: Mapping[str, str]) -> Place:
    """Read this process's place from torchrun's variables, Slurm's, Open MPI's or PMI's, in that order.

    Args:
        environ: The environment, usually ``os.environ``.

    Returns:
        The place; ``ALONE`` where no launcher has left its variables.

    Raises:
        UsageError: A launcher's variables are there in part, or contradict each other.

    Example:
        >>> env = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
        >>> find_place(env)
        Place(rank=5, size=8, local_rank=1, local_size=4, node=1, nodes=2, launcher='torchrun')
    """
    for names in LAUNCHERS:
        if names.launcher == "Slurm" and outside_srun(environ):
            continue
        if names.rank in environ:
            return read_place(names, environ)
        if names.launcher == "torchrun" and "WORLD_SIZE" in environ and "LOCAL_RANK" in environ:
            raise half_set("RANK", "WORLD_SIZE", environ)
    return ALONE


def outside_srun(environ: Mapping[str, str]) -> bool:
    """Whether this is Slurm's batch script or an interactive shell: one process, whatever the job's tasks."""
    return not any(name in environ for name in ("SLURM_STEP_ID", "SLURM_STEPID"))


def read_place(names: Variables, environ: Mapping[str, str]) -> Place:
    """Read one launcher's variables; what it does not say is worked out where there is only one possibility."""
    rank = number(names.rank, environ, names.rank)
    size = needed(names.size, environ, names.rank)
    if not 0 <= rank < size:
        raise UsageError(
            f"{names.rank}={rank} does not fit into {names.size[0]}={size}: ranks count from 0 to {size - 1}."
        )
    on_this_host = size == 1 or environ.get("MASTER_ADDR", "") in ("127.0.0.1", "localhost", "::1")
    local_rank = (
        rank
        if on_this_host and not present(names.local_rank, environ)
        else needed(names.local_rank, environ, names.rank)
    )
    node = optional(names.node, environ)
    local_size = find_local_size(names, environ, size if on_this_host else None, node)
    if not 0 <= local_rank < local_size:
        raise UsageError(
            f"rank {rank}: {names.local_rank[0]}={local_rank} does not fit into {names.local_size[0]}={local_size}: "
            f"local ranks count from 0 to {local_size - 1}."
        )
    nodes = optional(names.nodes, environ)
    return Place(
        rank=rank,
        size=size,
        local_rank=local_rank,
        local_size=local_size,
        node=node if node is not None else rank // local_size,
        nodes=nodes if nodes is not None else -(-size // local_size),
        launcher=names.launcher,
    )


def find_local_size(names: Variables, environ: Mapping[str, str], default: int | None, node: int | None) -> int:
    """Ranks on this node: a number, or Slurm's list with one entry a node."""
    name = present(names.local_size, environ)
    if name is None and default is not None:
        return default
    if name is not None and names.launcher == "Slurm":
        counts = tasks_per_node(environ[name])
        return counts[node or 0] if (node or 0) < len(counts) else counts[-1]
    return needed(names.local_size, environ, names.rank)


def tasks_per_node(text: str) -> list[int]:
    """Expand Slurm's ``SLURM_TASKS_PER_NODE``.

    Example:
        >>> tasks_per_node("2(x3),1")
        [2, 2, 2, 1]
    """
    counts: list[int] = []
    for entry in text.split(","):
        count, _, times = entry.partition("(x")
        try:
            counts += [int(count)] * int(times.rstrip(")") or 1)
        except ValueError:
            raise UsageError(f"SLURM_TASKS_PER_NODE={text!r} is not a list of task counts such as '2(x3),1'.") from None
    return counts


def present(names: tuple[str, ...], environ: Mapping[str, str]) -> str | None:
    """Give the first of these names that is set."""
    return next((name for name in names if name in environ), None)


def optional(names: tuple[str, ...], environ: Mapping[str, str]) -> int | None:
    """Read a number that a launcher may leave out."""
    name = present(names, environ)
    return None if name is None else number(name, environ, name)


def needed(names: tuple[str, ...], environ: Mapping[str, str], because: str) -> int:
    """Read a number that must be there because another one is."""
    name = present(names, environ)
    if name is None:
        raise half_set(names[0], because, environ)
    return number(name, environ, because)


def number(name: str, environ: Mapping[str, str], because: str) -> int:
    """Read one variable as a number."""
    try:
        return int(environ[name])
    except ValueError:
        raise UsageError(
            f"{name}={environ[name]!r} is not a number. Set it as a launcher would, or unset {because} to run alone."
        ) from None


def half_set(missing: str, because: str, environ: Mapping[str, str]) -> UsageError:
    """The error for a launcher's variables that are there in part."""
    return UsageError(
        f"{because}={environ[because]} is set but {missing} is not. Start the script with `lockstep run`, set both, "
        f"or unset {because} to run alone."
    )
