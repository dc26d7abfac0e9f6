"""Which samples each rank gets, and how they get there."""

from lockstep.data.loader import DataLoader
from lockstep.data.sampler import DistributedSampler

__all__ = ["DataLoader", "DistributedSampler"]
