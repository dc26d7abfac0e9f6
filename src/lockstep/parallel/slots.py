"""One parameter, as the reducer keeps it."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from lockstep.parallel.flat import Bucket


class Slot:
    """A parameter, and where its gradient stands.

    Attributes:
        name: Its name in the model.
        param: The parameter.
        hook: What removes the hook on it.
        bucket: The bucket it lies in; None if it is in none.
        number: Its number among the model's dense gradients.
        place: Its place in that bucket.
        large: Whether its gradient is copied as soon as it is there.
        taken: Whether that was done in this round.
        fired: How often its gradient has grown in this round.
        expected: How often it did in the last one: a re-entrant checkpoint used twice makes it grow twice.
        graph: Its gradient with the graph behind it, in a backward that creates one.
        sparse: Whether its module says that its gradients are sparse.
        times: What its gradient was multiplied by at the end of the last round.
        compared: Whether it is known to have had the same values on all ranks.
        unsent: Whether a backward without communication gave it a gradient since the last round.
    """

    __slots__ = (
        "bucket",
        "compared",
        "expected",
        "fired",
        "graph",
        "hook",
        "large",
        "name",
        "number",
        "param",
        "place",
        "sparse",
        "taken",
        "times",
        "unsent",
    )

    def __init__(self, name: str, param: nn.Parameter) -> None:
        self.name, self.param = name, param
        self.hook: Any = None
        self.bucket: Bucket | None = None
        self.number, self.place, self.fired, self.expected = 0, 0, 0, 1
        self.graph: Tensor | None = None
        self.large = self.taken = self.sparse = self.compared = self.unsent = False
        self.times = 1.0

    def trained(self) -> bool:
        """Whether there is a gradient to come or to be sent: one that was frozen since has its last one still."""
        return self.param.requires_grad or self.unsent


@contextmanager
def unfrozen(param: Tensor) -> Iterator[None]:
    """For a hook on a parameter: torch takes none for a frozen one, but keeps it when it is frozen afterwards."""
    trained = param.requires_grad
    param.requires_grad_(True)
    try:
        yield
    finally:
        param.requires_grad_(trained)


def room(param: Tensor) -> int:
    """Real numbers that a gradient takes in a bucket: an even number, so that a complex one can start anywhere."""
    count = param.numel() * (2 if param.is_complex() else 1)
    return count + count % 2


def real_dtype(param: Tensor) -> torch.dtype:
    """The dtype of those numbers."""
    return param.dtype.to_real() if param.is_complex() else param.dtype
