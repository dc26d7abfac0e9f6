"""``SyncBatchNorm``: lockstep's, which takes apex's arguments."""

from lockstep.parallel.batchnorm import SyncBatchNorm

__all__ = ["SyncBatchNorm"]
