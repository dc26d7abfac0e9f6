"""torch's DataLoader, over all ranks."""

import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils import data as torch_data

from lockstep.data.ahead import ahead
from lockstep.data.arguments import cores_of_node, crowded, refuse, refuse_small_batch
from lockstep.data.orders import Order, Positions
from lockstep.data.rounds import Rounds
from lockstep.data.samplers import Divided, Drawn, division, epoch_of
from lockstep.data.samples import Samples, nested_sets
from lockstep.data.streams import Stream
from lockstep.data.tasks import Run, Tasks
from lockstep.data.workers import Opening
from lockstep.errors import UsageError
from lockstep.world import World, current
from lockstep.world.seeds import derive_seed

T_co = TypeVar("T_co", covariant=True)
_END = object()


class DataLoader(torch_data.DataLoader[T_co]):
    """torch's `DataLoader` with ``batch_size`` counted over all ranks.

    Global batch ``k`` of an epoch is the same samples whatever the number of ranks; each rank gets its slice of it, and
    every sample comes exactly once. Every rank sees the same number of batches. Where the last global batch has fewer
    samples than there are ranks, some local batches are empty: the same structure with leading dimension 0.

    Iterating is something that all ranks do together: they compare notes when an epoch begins. Each iteration is a new
    epoch with a new order, whether the one before came to its end or not; `set_epoch` decides otherwise. On CUDA,
    batches arrive on this rank's device.

    Args:
        dataset: A map-style or an iterable data set. Its ``set_epoch(epoch)``, if it has one, is called before each
            epoch, in workers too.
        batch_size: Samples in a global batch, over all ranks together.
        shuffle: Whether each epoch has a random order of its own.
        sampler: Gives the order instead: indices for all ranks together, the same on each. One that is divided between
            ranks already (torch's ``DistributedSampler``) is left alone.
        batch_sampler: Gives lists of indices, each a global batch, in place of ``batch_size``, ``shuffle``,
            ``sampler``, ``drop_last``.
        num_workers: Worker processes of this rank. Their random numbers differ between ranks, batches and epochs.
        collate_fn: Makes a batch of a list of samples.
        pin_memory: None for: if the device is CUDA.
        drop_last: Whether a last short global batch is left out.
        timeout: Seconds to wait for a worker; 0 for ever.
        worker_init_fn: Called in each worker with its number.
        multiprocessing_context: How workers start.
        generator: Its ``initial_seed()`` fixes the orders, as ``seed`` does.
        seed: Fixes the orders and the workers' random numbers; None for the world's, which `lockstep.init` agreed on.
        prefetch_factor: Batches that each worker has ready.
        persistent_workers: Whether workers live on between epochs. None for: as long as no attribute of the data set is
            set anew.
        pin_memory_device: Accepted; memory is pinned for this rank's device.
        in_order: Only True.

    Raises:
        UsageError: Arguments that contradict each other, or a global batch smaller than the number of ranks.

    Example:
        >>> import lockstep, torch
        >>> loader = lockstep.DataLoader(torch.arange(5), batch_size=2)
        >>> [batch.tolist() for batch in loader]
        [[0, 1], [2, 3], [4]]
    """

    def __init__(
        self,
        dataset: torch_data.Dataset[T_co],
        batch_size: int | None = 1,
        shuffle: bool | None = None,
        sampler: torch_data.Sampler[Any] | Iterable[Any] | None = None,
        batch_sampler: torch_data.Sampler[list[Any]] | Iterable[list[Any]] | None = None,
        num_workers: int = 0,
        collate_fn: Callable[[list[T_co]], Any] | None = None,
        pin_memory: bool | None = None,
        drop_last: bool = False,
        timeout: float = 0,
        worker_init_fn: Callable[[int], None] | None = None,
        multiprocessing_context: Any = None,
        generator: torch.Generator | None = None,
        *,
        seed: int | None = None,
        prefetch_factor: int | None = None,
        persistent_workers: bool | None = None,
        pin_memory_device: str = "",
        in_order: bool = True,
    ) -> None:
        refuse(dataset, batch_size, shuffle, sampler, batch_sampler, drop_last, in_order, seed, generator)
        super().__init__(
            dataset,
            batch_size,
            shuffle,
            sampler,
            batch_sampler,
            num_workers,
            collate_fn,
            bool(pin_memory),
            drop_last,
            timeout,
            worker_init_fn,
            multiprocessing_context,
            generator,
            prefetch_factor=prefetch_factor,
            persistent_workers=bool(persistent_workers if persistent_workers is not None else num_workers),
            pin_memory_device=pin_memory_device,
            in_order=in_order,
        )
        self._order = choose_order(dataset, batch_size, bool(shuffle), sampler, batch_sampler, drop_last, num_workers)
        self._pin_memory = pin_memory
        self._seed = generator.initial_seed() if generator is not None else seed
        self._collate = collate_fn or torch_data.default_collate
        self._keep_workers = persistent_workers
        self._engine: torch_data.DataLoader[Any] | None = None
        self._tasks = Tasks()
        self._seen: list[Any] = []  # what the workers' copy of the data set was made of
        self._next = (0, 0)  # epoch, and position in its order, where the next iteration begins
        self._told = epoch_of(self._users_sampler)
        self._latest: _Progress | None = None
        self._open: _Progress | None = None  # the iteration that `state_dict` describes
        self._runs = 0
        refuse_small_batch(current(), self.batch_size)
        crowd = crowded(num_workers, current(), cores_of_node())
        if crowd:
            warnings.warn(crowd, stacklevel=2)

    def __len__(self) -> int:
        """Give the number of batches in a whole epoch; the same on every rank.

        Raises:
            TypeError: It is not known: a stream without a length, or one that divides itself between workers.
        """
        return len(self._order)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        """Begin a new epoch, on all ranks."""
        world = current()
        refuse_small_batch(world, self.batch_size)
        run = self._next_run(world)
        self._tasks.coming = self._order.begin(world, run)
        self._next, self._told = (run.epoch + 1, 0), epoch_of(self._users_sampler)
        self._latest = self._open = progress = _Progress(run)
        world.part_ways()
        engine = self._ready_engine(world, run)
        batches = self._order.batches(world, run, iter(engine))
        if world.device.type == "cuda":
            batches = ahead(batches, world.device)
        return self._count(world, batches, progress)

    def check_worker_number_rationality(self) -> None:
        """Leave torch's question, whether workers outnumber the cores of this one rank, to a rank that is alone."""
        if current().local_size == 1:
            super().check_worker_number_rationality()

    def set_epoch(self, epoch: int) -> None:
        """Let the next iteration be ``epoch``; without this each is the next one.

        A position in this very epoch that `load_state_dict` brought stays.
        """
        if epoch != self._next[0]:
            self._next = (epoch, 0)
        self._open = None

    def state_dict(self) -> dict[str, Any]:
        """Give what it takes to go on behind the batch that came out last, with any number of ranks and workers.

        Returns:
            Plain numbers and texts; the same on every rank.
        """
        world = current()
        epoch, position, seed = *self._next, self._seed_in(world)
        if self._open is not None and not self._open.through:
            run = self._open.run
            epoch, position, seed = run.epoch, self._order.position(run, self._open.batches), run.seed
        return {"epoch": epoch, "position": position, "seed": seed, **self._order.facts(world)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Let the next iteration go on where ``state`` was taken, at once; the one after that is a whole epoch.

        Args:
            state: From `state_dict`, of a loader over the same data. Another number of ranks or workers may go on.

        Raises:
            UsageError: The state is of other data, or of another kind of order.
        """
        mine = {"order": self._order.name, **self._order.facts(current())}
        for name in ("order", "samples", "ranks", "parts"):
            if name in state and name in mine and state[name] != mine[name]:
                raise UsageError(
                    f"the state was taken with {name} {state[name]!r}, this loader has {mine[name]!r}: its position "
                    f"would mean other samples. Make the loader as it was then."
                )
        self._next = (int(state["epoch"]), int(state["position"]))
        self._seed = int(state["seed"])
        self._open = None

    def positions(self) -> Tensor:
        """Data set index of every sample that this rank was given in the current or last iteration, in order.

        For a stream, the position in the stream. What came before a resumed iteration began does not count.

        Returns:
            Shape ``(n,)``, int64; `lockstep.gather` uses it to put results back in the order of the data set.
        """
        if self._latest is None:
            return torch.empty(0, dtype=torch.int64)
        return torch.from_numpy(self._order.given(self._latest.run, self._latest.batches))

    @property
    def epoch(self) -> int:
        """The epoch of the iteration in progress, or else of the next one."""
        return self._next[0] if self._open is None or self._open.through else self._open.run.epoch

    @property
    def even(self) -> bool | None:
        """Whether all ranks get equally many samples of every global batch; None where nobody knows before."""
        return self._order.even(current()) if isinstance(self._order, Positions) else None

    @property
    def _users_sampler(self) -> Any:
        return None if isinstance(self._order, Positions | Rounds) else self.batch_sampler

    def _seed_in(self, world: World) -> int:
        return world.seed if self._seed is None else self._seed

    def _next_run(self, world: World) -> Run:
        epoch, start = self._next
        asked = epoch_of(self._users_sampler)
        if asked is not None and asked != self._told and asked != epoch:
            epoch, start = asked, 0  # the script has told its sampler by itself
        self._runs += 1
        return Run(self._runs, self._seed_in(world), epoch, start, world.rank, world.size)

    def _ready_engine(self, world: World, run: Run) -> torch_data.DataLoader[Any]:
        """Give torch's loader over tasks, with the workers of the last epoch if they may stay."""
        seen = attributes(self.dataset) if self.num_workers and self._keep_workers is None else []
        if self._engine is None or len(seen) != len(self._seen) or any(map(_is_not, seen, self._seen)):
            self._engine = self._make_engine(world)
        self._seen = seen
        assert self._engine.generator is not None
        self._engine.generator.manual_seed(derive_seed(run.seed, run.epoch, run.rank))
        return self._engine

    def _make_engine(self, world: World) -> torch_data.DataLoader[Any]:
        source: Samples | Stream = (
            Stream(self.dataset, self._collate, self.batch_size or 1, self.drop_last, world.rank, world.size)
            if isinstance(self._order, Rounds)
            else Samples(self.dataset, self._collate)
        )
        return _Engine(
            source,
            batch_size=None,
            sampler=self._tasks,
            collate_fn=_as_it_is,
            num_workers=self.num_workers,
            pin_memory=world.device.type == "cuda" if self._pin_memory is None else self._pin_memory,
            timeout=self.timeout,
            worker_init_fn=Opening(self.worker_init_fn),
            multiprocessing_context=self.multiprocessing_context,
            generator=torch.Generator(),
            prefetch_factor=self.prefetch_factor,
            persistent_workers=self.persistent_workers,
        )

    def _count(self, world: World, batches: Iterator[Any], progress: "_Progress") -> Iterator[Any]:
        while True:
            if self._latest is not progress and self.persistent_workers:
                raise UsageError(
                    "another iteration of this lockstep.DataLoader has begun, and its workers serve one at a time. "
                    "Write persistent_workers=False, or make two loaders."
                )
            batch = next(batches, _END)
            if batch is _END:
                break
            progress.batches += 1
            world.feed.gives(self)
            yield batch
        progress.through = True
        world.feed.ended(self)


class _Engine(torch_data.DataLoader[Any]):
    """torch's loader over tasks, without a second warning of too many workers."""

    def check_worker_number_rationality(self) -> None:
        """Said already."""


class _Progress:
    """How far an iteration has come: what was given out, not what was fetched ahead."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.batches = 0
        self.through = False


def choose_order(
    dataset: Any,
    batch_size: int | None,
    shuffle: bool,
    sampler: Any,
    batch_sampler: Any,
    drop_last: bool,
    num_workers: int,
) -> Order:
    """Choose what decides on the order."""
    if isinstance(dataset, torch_data.IterableDataset):
        return Rounds(dataset, batch_size or 1, drop_last, num_workers)
    if batch_sampler is not None:
        return Divided(batch_sampler, None, False) if division(batch_sampler) else Drawn(batch_sampler, None, False)
    if sampler is not None:
        return (Divided if division(sampler) else Drawn)(sampler, batch_size, drop_last)
    return Positions(dataset, batch_size or 1, shuffle, drop_last)


def attributes(dataset: Any) -> list[Any]:
    """Give what the attributes of a data set, and of those it wraps, are bound to."""
    return [value for each in nested_sets(dataset) for value in vars_of(each).values()]


def vars_of(x: Any) -> dict[str, Any]:
    """Give an object's attributes; none where it keeps no dictionary."""
    return getattr(x, "__dict__", {})


def _is_not(a: Any, b: Any) -> bool:
    return a is not b


def _as_it_is(batch: Any) -> Any:
    return batch
