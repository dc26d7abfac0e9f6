"""What is to be started: ranks, devices, threads, cores, addresses, and which rule said so. Pure."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from lockstep.compat.choose import Compat
from lockstep.errors import UsageError
from lockstep.launcher import attention
from lockstep.launcher.link import INTERFACE_VARIABLES, Link


class Machine(NamedTuple):
    """What this node has.

    Attributes:
        gpus: CUDA devices that torch can use.
        groups: Core groups: the cores that this process may use, those that share a last-level cache together.
        quota: Processors' worth of time that a container may use, if it is limited.
    """

    gpus: int
    groups: tuple[tuple[int, ...], ...]
    quota: float | None = None

    @property
    def cores(self) -> tuple[int, ...]:
        """Every core that this process may use, group by group."""
        return tuple(core for group in self.groups for core in group)

    @property
    def threads(self) -> int:
        """How many threads can run at once."""
        return max(1, min(len(self.cores), int(self.quota or len(self.cores))))


class Rehearsal(NamedTuple):
    """What `lockstep run --device cpu` adds.

    Attributes:
        devices: CUDA devices that the script sees; as many as ranks.
        hide_cuda: Whether it is told that there is none.
        steps: After how many optimizer steps it ends; 0 for never.
        folder: Where ranks leave what they have seen.
        own_ranks: Whether the script starts its ranks itself, so that one process is started, as by ``python script``.
    """

    devices: int = 0
    hide_cuda: bool = False
    steps: int = 0
    folder: str = ""
    own_ranks: bool = False


class Wish(NamedTuple):
    """What the user asked for; None and empty where nothing was said. Named like the options of ``lockstep run``."""

    nproc_per_node: str = "auto"
    nnodes: str = "1"
    node_rank: int = 0
    master_addr: str = ""
    master_port: int | None = None
    rdzv_backend: str = ""
    rdzv_endpoint: str = ""
    rdzv_id: str = ""
    rdzv_conf: str = ""
    local_addr: str = ""
    max_restarts: int = 0
    compat: Compat | None = None
    start: str = "fork"
    grace: float = 10.0
    log_dir: str = ""
    debug: int | None = None
    rehearsal: Rehearsal | None = None
    watch: bool | None = None
    stall: float = 120.0
    terminal: bool = False


class Choice(NamedTuple):
    """A value and the rule that it came from."""

    value: str
    rule: str


class Seat(NamedTuple):
    """What one local rank gets."""

    local_rank: int
    device: str
    cores: tuple[int, ...]
    environment: dict[str, str]


class Meeting(NamedTuple):
    """How the nodes find each other: torch's rendezvous backend and its settings. ``backend`` is empty on one node."""

    backend: str
    endpoint: str
    run_id: str
    settings: dict[str, Any]
    least_nodes: int = 1
    most_nodes: int = 1
    local_addr: str = ""
    port: int = 0


class LaunchPlan(NamedTuple):
    """All that the launcher does, decided. ``wanted`` is ``--nproc-per-node`` as written; ``link`` is found later."""

    seats: tuple[Seat, ...]
    threads: int
    meeting: Meeting
    max_restarts: int
    compat: Compat | None
    start: str
    grace: float
    log_dir: str
    debug: int | None
    stall: float
    choices: dict[str, Choice]
    rehearsal: Rehearsal | None = None
    wanted: str = "auto"
    link: Link | None = None

    @property
    def one_node(self) -> bool:
        """Whether everything happens on this machine."""
        return not self.meeting.backend


def make_plan(wish: Wish, machine: Machine, environ: Mapping[str, str]) -> LaunchPlan:
    """Decide everything.

    Args:
        wish: What the user said.
        machine: What there is.
        environ: The user's environment.

    Raises:
        UsageError: The wish contradicts itself or the machine.

    Example:
        >>> plan = make_plan(Wish(nproc_per_node="2"), Machine(gpus=0, groups=((0, 1, 2, 3),)), {})
        >>> [seat.cores for seat in plan.seats], plan.threads
        ([(0, 1), (2, 3)], 2)
    """
    machine = machine._replace(gpus=0) if wish.rehearsal else machine
    count, ranks = choose_ranks(wish.nproc_per_node, machine)
    own_ranks = bool(wish.compat and wish.compat.own_ranks)
    if own_ranks and not wish.rehearsal:
        count, ranks = 1, Choice("1", "the script starts its ranks itself")
    meeting = choose_meeting(wish)
    rehearsal = choose_rehearsal(wish.rehearsal, count, meeting, own_ranks)
    gpu = device_kind(wish.nproc_per_node, count, machine) == "cuda"
    threads, threads_choice = choose_threads(count, machine, environ)
    cores, cores_choice = choose_cores(count, machine, environ, gpu)
    shared = {"OMP_NUM_THREADS": str(threads)} | loopback(meeting, environ)
    started = 1 if rehearsal and rehearsal.own_ranks else count
    pinned = cores if started == count else []
    seats = tuple(
        Seat(rank, f"cuda:{rank}" if gpu else "cpu", pinned[rank] if pinned else (), dict(shared))
        for rank in range(started)
    )
    if wish.debug is not None and not 0 <= wish.debug < started:
        raise UsageError(f"--debug {wish.debug}: local ranks here count from 0 to {started - 1}.")
    stall, rule = attention.choose(wish.watch, wish.stall, wish.terminal, environ, debugged=wish.debug is not None)
    choices = {"ranks": ranks, "threads": threads_choice, "cores": cores_choice, "meeting": meeting_choice(meeting)}
    choices["watch"] = Choice(f"after {stall:g} s without a step" if stall else "off", rule)
    if rehearsal:
        who = "started by the script itself" if rehearsal.own_ranks else "one for each rank"
        choices["devices"] = Choice(f"{count} that say cuda and are this CPU", f"--device cpu; {who}")
    return LaunchPlan(
        seats=seats,
        threads=threads,
        meeting=meeting,
        max_restarts=wish.max_restarts,
        compat=wish.compat,
        start=wish.start,
        grace=wish.grace,
        log_dir=wish.log_dir,
        debug=wish.debug,
        stall=stall,
        choices=choices,
        rehearsal=rehearsal,
        wanted=wish.nproc_per_node,
    )


def choose_rehearsal(
    wanted: Rehearsal | None, count: int, meeting: Meeting, own_ranks: bool = False
) -> Rehearsal | None:
    """A rehearsal has as many devices as ranks, all on this machine."""
    if wanted is None:
        return None
    if meeting.backend:
        raise UsageError("--device cpu rehearses on one machine: leave --nnodes and --rdzv-* out, and write -n RANKS.")
    if wanted.steps < 0:
        raise UsageError(f"--steps {wanted.steps}: write how many optimizer steps to take, from 1 on.")
    return wanted._replace(devices=count, own_ranks=wanted.own_ranks or own_ranks)


def device_kind(wanted: str, count: int, machine: Machine) -> str:
    """Say what the ranks compute on, as `lockstep.init` will choose."""
    return "cuda" if machine.gpus and wanted != "cpu" and count <= machine.gpus else "cpu"


def choose_ranks(wanted: str, machine: Machine) -> tuple[int, Choice]:
    """How many ranks this node gets.

    Example:
        >>> choose_ranks("auto", Machine(gpus=0, groups=((0, 1), (2, 3))))[1]
        Choice(value='2', rule='one for each core group (cores that share a cache)')
    """
    if wanted == "gpu" and not machine.gpus:
        raise UsageError("--nproc-per-node gpu, but torch sees no GPU here. Write cpu, or a number.")
    rules = {
        "auto": (machine.gpus, "one for each GPU") if machine.gpus else (len(machine.groups), _GROUPS),
        "gpu": (machine.gpus, "one for each GPU"),
        "cpu": (len(machine.groups), _GROUPS),
    }
    if wanted in rules:
        count, rule = rules[wanted]
        return count, Choice(str(count), rule)
    if not wanted.isdecimal() or int(wanted) < 1:
        raise UsageError(f"--nproc-per-node {wanted}: write a number from 1 on, auto, gpu or cpu.")
    return int(wanted), Choice(wanted, "--nproc-per-node")


_GROUPS = "one for each core group (cores that share a cache)"


def choose_threads(count: int, machine: Machine, environ: Mapping[str, str]) -> tuple[int, Choice]:
    """How many threads each rank computes with.

    Example:
        >>> choose_threads(2, Machine(gpus=0, groups=((0, 1, 2, 3),)), {})
        (2, Choice(value='2', rule='4 cores for 2 ranks'))
    """
    own = environ.get("OMP_NUM_THREADS", "")
    first = own.split(",")[0]  # a list is one number for each level of nested parallel regions
    if first.isdecimal() and int(first) > 0:
        return int(first), Choice(own, "OMP_NUM_THREADS in the environment")
    threads = max(1, machine.threads // count)
    what = "cores" if machine.threads == len(machine.cores) else "cores' worth of time in this container"
    return threads, Choice(str(threads), f"{machine.threads} {what} for {count} rank{'s' * (count > 1)}")


_PINNED_BY_USER = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")


def choose_cores(
    count: int, machine: Machine, environ: Mapping[str, str], gpu: bool
) -> tuple[list[tuple[int, ...]], Choice]:
    """Which cores each rank keeps to; an empty list where it is better to leave that to the kernel.

    Example:
        >>> choose_cores(2, Machine(gpus=0, groups=((0, 2), (1, 3))), {}, gpu=False)[0]
        [(0, 2), (1, 3)]
    """
    cores = machine.cores
    own = next((name for name in _PINNED_BY_USER if name in environ), None)
    rules = (
        (count == 1, "one rank has the machine"),
        (own is not None, f"{own} in the environment"),
        (gpu, "ranks on GPUs move freely"),
        (count > len(cores), "more ranks than cores"),
        (machine.threads < len(cores), "a container's share of time is not tied to cores"),
    )
    for applies, rule in rules:
        if applies:
            return [], Choice("not pinned", rule)
    slices = [cores[rank * len(cores) // count : (rank + 1) * len(cores) // count] for rank in range(count)]
    return slices, Choice("pinned", f"{len(cores)} cores in {len(machine.groups)} groups, in slices")


def loopback(meeting: Meeting, environ: Mapping[str, str]) -> dict[str, str]:
    """Variables that keep the ranks of one machine on its loopback interface, unless the user has named another.

    Example:
        >>> loopback(choose_meeting(Wish()), {"NCCL_SOCKET_IFNAME": "eth0"})
        {'GLOO_SOCKET_IFNAME': 'lo', 'TP_SOCKET_IFNAME': 'lo'}
    """
    if meeting.backend:
        return {}
    return {name: "lo" for name in INTERFACE_VARIABLES if name not in environ}


def choose_meeting(wish: Wish) -> Meeting:
    """How the nodes find each other; the rules are torchrun's.

    Example:
        >>> wish = Wish(nnodes="2", node_rank=1, master_addr="gpu3", master_port=29500)
        >>> meeting = choose_meeting(wish)
        >>> meeting.backend, meeting.endpoint, meeting.settings
        ('static', 'gpu3:29500', {'rank': 1})
    """
    least, most = read_nodes(wish.nnodes)
    if most == 1 and not wish.rdzv_backend and not wish.rdzv_endpoint:
        return Meeting("", "", wish.rdzv_id, {}, port=wish.master_port or 0)
    backend = wish.rdzv_backend or "static"
    settings = read_settings(wish.rdzv_conf)
    endpoint = wish.rdzv_endpoint
    if backend == "static":
        settings["rank"] = wish.node_rank
        if not endpoint and not wish.master_addr:
            raise UsageError(
                f"--nnodes {wish.nnodes}: where is node 0? Write --master-addr HOST on every node, or "
                f"--rdzv-backend c10d --rdzv-endpoint HOST:PORT."
            )
        endpoint = endpoint or f"{wish.master_addr}:{wish.master_port or 29500}"
        if least != most:
            raise UsageError(f"--nnodes {wish.nnodes} is a range, which needs --rdzv-backend c10d.")
        if not 0 <= wish.node_rank < most:
            raise UsageError(f"--node-rank {wish.node_rank}: {most} nodes count from 0 to {most - 1}.")
    elif not endpoint:
        raise UsageError(f"--rdzv-backend {backend}: write --rdzv-endpoint HOST:PORT, the same on every node.")
    return Meeting(backend, endpoint, wish.rdzv_id or "none", settings, least, most, wish.local_addr)


def meeting_choice(meeting: Meeting) -> Choice:
    """The same in words."""
    if meeting.backend:
        return Choice(f"{meeting.backend} at {meeting.endpoint}", "--nnodes, --rdzv-* and --master-*")
    port = f"port {meeting.port}" if meeting.port else "a free port"
    return Choice(f"127.0.0.1, {port}", "--master-port" if meeting.port else "one node")


def read_nodes(text: str) -> tuple[int, int]:
    """Read ``--nnodes``: a number, or least and most.

    Example:
        >>> read_nodes("2"), read_nodes("1:4")
        ((2, 2), (1, 4))
    """
    least, colon, most = text.partition(":")
    if not least.isdecimal() or (colon and not most.isdecimal()) or not 1 <= int(least) <= int(most or least):
        raise UsageError(f"--nnodes {text}: write a number of nodes, or the least and the most, such as 2:4.")
    return int(least), int(most or least)


def read_settings(text: str) -> dict[str, Any]:
    """Read ``--rdzv-conf``: ``key=value`` with commas between; numbers become numbers.

    Example:
        >>> read_settings("join_timeout=60,is_host=true")
        {'join_timeout': 60, 'is_host': 'true'}
    """
    settings: dict[str, Any] = {}
    for pair in filter(None, (part.strip() for part in text.split(","))):
        key, equals, value = pair.partition("=")
        if not equals or not key or not value:
            raise UsageError(f"--rdzv-conf {text}: {pair!r} is not of the form key=value.")
        settings[key] = int(value) if value.isdecimal() else value
    return settings


def in_one_line(plan: LaunchPlan) -> str:
    """What a run that was given no number says of its choice."""
    count, choice = len(plan.seats), plan.choices["ranks"]
    ranks = f"{count} rank{'s' * (count > 1)}"
    return f"lockstep: {ranks}, {choice.rule}; {plan.threads} thread{'s' * (plan.threads > 1)} each. Another number: -n"


def in_full(plan: LaunchPlan, job: str) -> str:
    """What ``--dry-run`` prints."""
    width = max(map(len, plan.choices))
    lines = [f"{'job':<{width}}  {job}"]
    lines += [f"{name:<{width}}  {choice.value}  ({choice.rule})" for name, choice in plan.choices.items()]
    if plan.compat:
        how = f"gets {plan.compat.argument}" if plan.compat.argument else "gets no argument"
        lines.append(
            f"{'script':<{width}}  an old one; {how}, and what is gone is mended  (--compat, or what its text says)"
        )
    for seat in plan.seats:
        cores = f"cores {show_cores(seat.cores)}" if seat.cores else "any core"
        lines.append(f"local rank {seat.local_rank}: {seat.device}, {cores}")
    if plan.seats:
        lines.append("environment of every rank, beside torchrun's variables:")
        lines += [f"  {name}={value}" for name, value in plan.seats[0].environment.items()]
    return "\n".join(lines) + "\n"


def show_cores(cores: Sequence[int]) -> str:
    """Write cores as ranges.

    Example:
        >>> show_cores((0, 1, 2, 5))
        '0-2,5'
    """
    parts: list[list[int]] = []
    for core in sorted(cores):
        if parts and core == parts[-1][-1] + 1:
            parts[-1].append(core)
        else:
            parts.append([core])
    return ",".join(f"{part[0]}-{part[-1]}" if len(part) > 1 else str(part[0]) for part in parts)
