"""Numbers, tensors and nested containers of them, over all ranks."""

from lockstep.collectives.gathering import gather
from lockstep.collectives.sums import mean, total

__all__ = ["gather", "mean", "total"]
