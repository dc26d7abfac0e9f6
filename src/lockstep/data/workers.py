"""What a data set learns from `torch.utils.data.get_worker_info` inside a worker.

torch keeps the answer in ``torch.utils.data._utils.worker._worker_info``, which is private; this is the only file that
touches it (checked on torch 2.9 to 2.14). Without it a data set would see lockstep's own wrapper in place of itself,
and one that divides itself would not know of the other ranks.
"""

from collections.abc import Callable
from typing import Any

from torch.utils.data import get_worker_info
from torch.utils.data._utils import worker as _torch


class Seat:
    """A worker's place among the workers of all ranks, in the form of torch's ``WorkerInfo``.

    Attributes:
        id: Counts over the workers of all ranks.
        seed: As torch's.
        dataset: The user's data set in this process.
        divides: Whether somebody has asked how many workers there are, as only a data set does that divides itself.
    """

    def __init__(self, number: int, count: int, dataset: object, when_asked: Callable[[], None]) -> None:
        here = get_worker_info()
        self.id = number
        self.dataset = dataset
        self.seed = here.seed if here else 0
        self.rng = getattr(here, "rng", None)
        self.worker_method = getattr(here, "worker_method", "multiprocessing")
        self.divides = False
        self._count = count
        self._when_asked = when_asked

    @property
    def num_workers(self) -> int:
        """Workers of all ranks together."""
        if not self.divides:
            self.divides = True
            self._when_asked()
        return self._count


def take(seat: Any) -> Any:
    """Answer ``get_worker_info`` with ``seat`` from now on; gives the answer that it had."""
    before = _torch._worker_info
    _torch._worker_info = seat
    return before


class Opening:
    """The first thing a worker does: the data set is shown its place, then the user's ``worker_init_fn`` is called."""

    def __init__(self, user_function: Callable[[int], None] | None) -> None:
        self._user_function = user_function

    def __call__(self, worker: int) -> None:
        """Be called by torch, in the worker."""
        info = get_worker_info()
        assert info is not None
        # In this process `info.dataset` is the source itself, not the copy that came with this function.
        number = info.dataset.take_seat(worker, info.num_workers)  # type: ignore[attr-defined]
        if self._user_function is not None:
            self._user_function(number)
