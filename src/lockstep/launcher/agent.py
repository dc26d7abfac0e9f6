"""Torch's elastic agent on the plan: it starts the ranks, watches them and starts them again.

Public names of torch.distributed.elastic only, checked on torch 2.9 to 2.14.
"""

import errno
import gc
import logging
import os
import socket
import uuid
from collections.abc import Callable
from importlib import metadata
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.api import LogsDest, LogsSpecs
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo
from torch.distributed.elastic.rendezvous.api import RendezvousStoreInfo

from lockstep.errors import UsageError
from lockstep.launcher import orphans
from lockstep.launcher.cards import Card
from lockstep.launcher.child import Start, be_a_rank
from lockstep.launcher.elastic import Torchs
from lockstep.launcher.hush import hush
from lockstep.launcher.link import Link
from lockstep.launcher.nodes import Nodes
from lockstep.launcher.plan import LaunchPlan, Meeting

_ADDRESS = "127.0.0.1"
_LOOK_EVERY = 0.03  # seconds between the agent's looks at its ranks


class NoLogs(LogsSpecs):
    """The ranks' output is not the agent's business: no files, no folders in /tmp, no threads that follow them."""

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Give every rank an empty destination, which means: as it is."""
        nowhere = dict.fromkeys(envs, "")
        return LogsDest(stdouts=dict(nowhere), stderrs=dict(nowhere), error_files=dict(nowhere))

    @property
    def root_log_dir(self) -> str:
        """There is none."""
        return ""


class OneNode(RendezvousHandler):
    """A node alone waits for nobody: it has a store for its ranks, on loopback, on a port that the kernel picked."""

    def __init__(self, meeting: Meeting) -> None:
        self._run_id = meeting.run_id or uuid.uuid4().hex
        self._wanted_port = meeting.port
        # The agent has nobody but itself to talk to.
        self._for_agent = dist.HashStore()  # type: ignore[attr-defined]
        self._for_ranks: object = None  # kept, because the store ends with its last reference

    def get_backend(self) -> str:
        """Its name."""
        return "lockstep"

    @property
    def use_agent_store(self) -> bool:
        """Ranks, rank 0 too, join the agent's store."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """Meet: at once. Ranks that start again get a new store, so that they do not find the keys of those before."""
        self._for_ranks = None  # closes the one before, which may hold the port
        listener = listen(self._wanted_port)
        port = listener.getsockname()[1]
        # Given a listening socket, the store opens none of its own, which would listen everywhere.
        self._for_ranks = dist.TCPStore(  # type: ignore[attr-defined]
            _ADDRESS, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
        )
        return RendezvousInfo(self._for_agent, 0, 1, RendezvousStoreInfo(_ADDRESS, port))

    def is_closed(self) -> bool:
        """Never closed."""
        return False

    def set_closed(self) -> None:
        """Nobody else would come anyway."""

    def num_nodes_waiting(self) -> int:
        """None, ever."""
        return 0

    def get_run_id(self) -> str:
        """What the ranks find in TORCHELASTIC_RUN_ID."""
        return self._run_id

    def shutdown(self) -> bool:
        """Nothing to close: the store goes with the process."""
        return True


class Watched(RendezvousHandler):
    """Any rendezvous, with somebody told when the agent comes to it: before and at each start, and while ranks run."""

    def __init__(
        self,
        inner: RendezvousHandler,
        before_start: Callable[[], None],
        met: Callable[[RendezvousInfo], None],
        while_running: Callable[[], None],
    ) -> None:
        self._inner = inner
        self._before_start = before_start
        self._met = met
        self._while_running = while_running
        self.by_another = False
        """Whether a start comes because of another node, while this one's ranks are well."""

    def get_backend(self) -> str:
        """The inner one's."""
        return self._inner.get_backend()

    @property
    def use_agent_store(self) -> bool:
        """The inner one's."""
        return self._inner.use_agent_store

    def next_rendezvous(self) -> RendezvousInfo:
        """Tell, meet, and tell."""
        self._before_start()
        self.by_another = False
        info = self._inner.next_rendezvous()
        self._met(info)
        return info

    def is_closed(self) -> bool:
        """The inner one's."""
        return self._inner.is_closed()

    def set_closed(self) -> None:
        """Close the inner one."""
        self._inner.set_closed()  # type: ignore[no-untyped-call]

    def num_nodes_waiting(self) -> int:
        """Tell, then ask."""
        self._while_running()
        waiting = self._inner.num_nodes_waiting()
        self.by_another = waiting > 0
        return waiting

    def get_run_id(self) -> str:
        """The inner one's."""
        return self._inner.get_run_id()

    def shutdown(self) -> bool:
        """Shut the inner one down."""
        return self._inner.shutdown()


def listen(port: int) -> socket.socket:
    """Listen on loopback, at a port that the kernel picks where ``port`` is 0.

    Raises:
        UsageError: The port is taken; the message says by whom.
    """
    try:
        return socket.create_server((_ADDRESS, port), backlog=1024)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
    import psutil  # type: ignore[import-untyped]

    owners = {c.pid for c in psutil.net_connections("tcp") if c.laddr and c.laddr.port == port and c.status == "LISTEN"}
    who = " and ".join(f"process {pid} ({psutil.Process(pid).name()})" for pid in owners if pid) or "another process"
    raise UsageError(f"--master-port {port} is taken by {who}. Leave the option out to get a free port.")


def meet(plan: LaunchPlan, link: Link | None) -> RendezvousHandler:
    """Make the rendezvous that the plan says."""
    meeting = plan.meeting
    if not meeting.backend or link is None:
        return OneNode(meeting)
    if meeting.backend == "static":
        return Nodes(meeting, link, describe_node(plan, link))
    return Torchs(meeting, link, describe_node(plan, link))


def describe_node(plan: LaunchPlan, link: Link) -> Card:
    """What this node says of itself."""
    least, most = plan.meeting.least_nodes, plan.meeting.most_nodes
    return Card(
        host=os.uname().nodename,
        pid=os.getpid(),
        lockstep=metadata.version("lockstep-torch"),
        torch=torch.__version__.partition("+")[0],
        ranks=len(plan.seats),
        wanted=plan.wanted,
        address=link.local,
        port=0,
        interface=link.interface,
        restarts=plan.max_restarts,
        nodes=str(most) if least == most else f"{least}:{most}",
    )


def run(
    plan: LaunchPlan,
    start: Start,
    before_start: Callable[[dict[int, int], bool], None],
    met: Callable[[RendezvousInfo], None],
    stopped: Callable[[], bool] = lambda: False,
) -> dict[int, int]:
    """Start the ranks and stay until all have ended.

    Args:
        plan: How many, how they meet, how often they start again.
        start: What each rank is given.
        before_start: Called before each start with how the ranks before have failed, as in what this returns, and
            whether it comes because of another node; may raise RendezvousGracefulExitError, which ends it all.
        met: Called with what the nodes have agreed on, each time that they have met.
        stopped: Whether a signal ends this node.

    Returns:
        Exit codes of ranks that failed, as far as torch's agent noticed them; negative for a signal.
    """
    if "LOGLEVEL" not in os.environ:  # torch's own name for: I want to read its logs
        logging.disable(logging.CRITICAL)
    hush()
    pids: set[int] = set()

    def reap() -> None:
        pids.update(worker.id for worker in agent.get_worker_group().workers)
        orphans.reap(spare=pids)

    def before() -> None:
        before_start(_failures(agent), handler.by_another)
        pids.clear()
        gc.collect()
        gc.freeze()  # what was imported is not looked at again by the ranks' garbage collection, and stays shared

    meeting = meet(plan, plan.link)
    handler = Watched(meeting, before, met, reap)
    spec = WorkerSpec(
        role="default",
        local_world_size=len(plan.seats),
        rdzv_handler=handler,
        entrypoint=be_a_rank,
        args=(start,),
        max_restarts=plan.max_restarts,
        monitor_interval=_LOOK_EVERY,
    )
    agent = LocalElasticAgent(spec, NoLogs(), start_method=plan.start)
    ended, failed = False, True
    try:
        result = agent.run()
        failed = result is not None and result.is_failed()
        ended = result is not None and not failed
    finally:
        if not ended and isinstance(meeting, Nodes):
            meeting.give_up(failed)
        # Other nodes of an elastic run go on without one that was told to end; shutting down would end it for all.
        if not (stopped() and plan.meeting.least_nodes < plan.meeting.most_nodes):
            handler.shutdown()
    return {rank: failure.exitcode for rank, failure in result.failures.items()} if result else {}


def _failures(agent: LocalElasticAgent) -> dict[int, int]:
    """Exit codes by rank of those that have failed; ``_pcontext._pc`` is private, as it is in torch 2.9 to 2.14."""
    context: Any = getattr(getattr(agent, "_pcontext", None), "_pc", None)
    processes = context.processes if context else []
    codes = zip((worker.global_rank for worker in agent.get_worker_group().workers), processes, strict=False)
    return {rank: process.exitcode for rank, process in codes if process.exitcode}
