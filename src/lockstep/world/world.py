"""The world: who this process is, and the one place that remembers it."""

import atexit
import os
import sys
import zlib
from datetime import timedelta

import torch
import torch.distributed as dist

from lockstep.errors import MismatchError
from lockstep.world import group, seeds
from lockstep.world.allocator import keep_freed_memory
from lockstep.world.device import claim_device
from lockstep.world.feed import Feed
from lockstep.world.place import Place, find_place
from lockstep.world.ranks import Alone, Group, NotStarted, Ranks

DEFAULT_TIMEOUT = 600.0


class World:
    """All ranks, as one of them sees them. Made by `lockstep.init`.

    Attributes:
        rank: This process's number, from 0.
        size: How many ranks there are.
        local_rank: Its number on its node, from 0.
        local_size: How many ranks its node has.
        node: The node's number, from 0.
        nodes: How many nodes there are.
        device: This rank's device.
        seed: What all ranks shuffle by; the same on each.
        ranks: The few operations between ranks that lockstep is built from.
        feed: Which data loader gives the batches, and who wants to know when its epoch is over.
        started: Whether `lockstep.init` made it; False where lockstep only looked at what is there.

    Example:
        >>> import lockstep
        >>> world = lockstep.init(seed=0)
        >>> world.print(f"rank {world.rank} of {world.size}")
        rank 0 of 1
    """

    def __init__(self, place: Place, device: torch.device, seed: int, ranks: Ranks) -> None:
        self.rank, self.size = place.rank, place.size
        self.local_rank, self.local_size = place.local_rank, place.local_size
        self.node, self.nodes = place.node, place.nodes
        self.device = device
        self.seed = seed
        self.ranks = ranks
        self.started = False  # by init, and not only looked at
        self._parted = False
        self.feed = Feed()

    def __repr__(self) -> str:
        return f"<World: rank {self.rank} of {self.size}, node {self.node} of {self.nodes}, {self.device}>"

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, the one that prints and saves."""
        return self.rank == 0

    def barrier(self) -> None:
        """Wait until every rank has come here."""
        self.ranks.barrier()

    def print(self, *values: object, sep: str = " ", end: str = "\n") -> None:
        """Print on rank 0 only, at once."""
        if self.is_main:
            sys.stdout.write(sep.join(map(str, values)) + end)
            sys.stdout.flush()

    @property
    def parted(self) -> bool:
        """Whether each rank draws random numbers of its own by now; see `part_ways`."""
        return self._parted

    def part_ways(self) -> None:
        """From here on each rank draws its own random numbers; rank 0 goes on as if it were alone.

        Until then every rank draws the same, so that models, splits of the data and the like come out alike. Called by
        what begins the training (the first batch of a `lockstep.DataLoader`, the first forward of a replicated model);
        only the first call does something.
        """
        if not self._parted:
            self._parted = True
            if self.rank and self.started:
                seeds.plant(seeds.derive_seed(self.seed, self.rank))


_world: World | None = None


def init(
    backend: str = "auto", device: str = "auto", seed: int | None = None, timeout: float | timedelta = DEFAULT_TIMEOUT
) -> World:
    """Find out who this process is and connect it with the other ranks.

    Reads torchrun's variables (`lockstep run` sets the same), Slurm's, Open MPI's or PMI's, in that order. Where there
    are none, this is a world of one, which needs no process group. A process group that the script made is adopted.

    Args:
        backend: What torch.distributed calls it, such as ``"gloo"``, or ``"auto"``: nccl for CUDA tensors; for CPU
            tensors shm between the ranks of one machine, and gloo between machines.
        device: ``"auto"`` (CUDA if there is any), ``"cpu"``, ``"cuda"``, or one device such as ``"cuda:1"``.
        seed: Seeds python, numpy and torch alike on all ranks: each builds the same model. From the first batch or the
            first training forward on, ranks draw different numbers, for dropout and augmentation; rank 0 those that it
            would draw alone. None leaves a script's own seeds as they are where all ranks have the same; else rank 0's
            is taken, and python's and numpy's generators go by torch's seed.
        timeout: Seconds (or a ``timedelta``) that this rank waits for others, here and in every later collective.

    Returns:
        The world.

    Raises:
        UsageError: A launcher's variables are there in part or make no sense; there is no device for this rank.
        LateRankError: A rank did not come in time.
        MismatchError: Ranks gave different seeds.

    Example:
        >>> import lockstep
        >>> lockstep.init(device="cpu")
        <World: rank 0 of 1, node 0 of 1, cpu>
    """
    global _world  # noqa: PLW0603  (the one place that remembers)
    if _world is not None and _world.started and still(_world):
        if seed is not None:
            _world.seed = agree_on_seed(_world.ranks, seed, _world.rank)
            _world._parted = False
        return _world
    place = find_place(os.environ)
    adopted = dist.is_initialized()
    if adopted:
        place = place_in_group(place)
    chosen = claim_device(device, place)
    if chosen.type == "cpu":
        keep_freed_memory()
    note = ""
    if place.size > 1 and not adopted:
        seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else float(timeout)
        note = group.start(place, chosen, group.choose_backend(backend, chosen, place.nodes), seconds)
        atexit.register(group.end)
    ranks: Ranks = Group(chosen) if dist.is_initialized() else Alone()
    if adopted:
        place = seat(place.rank, hosts(ranks))
    _world = World(place, chosen, agree_on_seed(ranks, seed, place.rank), ranks)
    _world.started = True
    if place.size > 1 and place.rank == 0:
        sys.stderr.write(f"lockstep: {describe(place, chosen, note)}\n")
    return _world


def current() -> World:
    """The world as it is now: the one that `init` made, or what can be seen without it."""
    global _world  # noqa: PLW0603
    if _world is not None and still(_world):
        return _world
    place = find_place(os.environ)
    if dist.is_initialized():
        place = place_in_group(place)
        device = claim_device("auto", place)
        _world = World(place, device, 0, Group(device))
        return _world
    if place.size > 1:  # not remembered: it is about to change
        return World(place, claim_device("auto", place), 0, NotStarted(place.size))
    _world = World(place, claim_device("auto", place), 0, Alone())
    return _world


def still(world: World) -> bool:
    """Whether torch.distributed is as it was when this world was made."""
    now = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    return (world.rank, world.size) == now


def place_in_group(place: Place) -> Place:
    """This process's place in a process group that exists; what the environment does not tell is taken for one node."""
    rank, size = dist.get_rank(), dist.get_world_size()
    if (place.rank, place.size) == (rank, size):
        return place
    return Place(rank, size, local_rank=rank, local_size=size, node=0, nodes=1, launcher="process group")


def hosts(ranks: Ranks) -> list[int]:
    """A number for every rank's host, equal where the host is."""
    name = zlib.crc32(os.uname().nodename.encode())
    numbers: list[int] = ranks.line_up(torch.tensor(name)).tolist()
    return numbers


def seat(rank: int, hosts: list[int]) -> Place:
    """Work out a rank's place from the hosts of all ranks.

    Example:
        >>> seat(2, hosts=[7, 9, 7, 9])
        Place(rank=2, size=4, local_rank=1, local_size=2, node=0, nodes=2, launcher='process group')
    """
    mine, order = hosts[rank], list(dict.fromkeys(hosts))
    return Place(
        rank=rank,
        size=len(hosts),
        local_rank=hosts[:rank].count(mine),
        local_size=hosts.count(mine),
        node=order.index(mine),
        nodes=len(order),
        launcher="process group",
    )


def agree_on_seed(ranks: Ranks, seed: int | None, rank: int) -> int:
    """Seed every rank alike; see `init` for what None means."""
    mine = torch.initial_seed() if seed is None else seed
    # Two halves: a seed may need 64 bits without a sign.
    halves = [mine >> 32 & 0xFFFFFFFF, mine & 0xFFFFFFFF, seed is None]
    rows: list[list[int]] = ranks.line_up(torch.tensor([*halves, *seeds.marks()], dtype=torch.int64)).tolist()
    given, marks = [row[:3] for row in rows], [row[3:] for row in rows]
    other = next((r for r, row in enumerate(given) if row != given[0]), None)
    if other is not None and not all(row[2] for row in given):
        raise MismatchError(
            f"rank {rank} of {ranks.size}: lockstep.init(seed={seed}), but rank 0 and rank {other} gave different "
            f"seeds. Give the same on every rank; ranks part ways by themselves once training begins."
        )
    agreed = given[0][0] << 32 | given[0][1]
    if seed is not None or other is not None:
        seeds.plant(agreed)
    else:
        # A script that has seeded torch alone, or nothing: what it splits by numpy must be the same split everywhere.
        python, numpy = ([row[i] for row in marks] for i in range(2))
        seeds.plant_beside_torch(agreed, len(set(python)) > 1, len(set(numpy)) > 1)
    return agreed


def describe(place: Place, device: torch.device, note: str = "") -> str:
    """One line on what was found."""
    nodes = f" on {place.nodes} nodes" if place.nodes > 1 else ""
    return f"{place.size} ranks{nodes}, {device.type}, {dist.get_backend()}" + (f" ({note})" if note else "")
