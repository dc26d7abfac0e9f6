"""Where scripts import apex's Python fallback from; it is the same here."""

from lockstep.parallel.batchnorm import SyncBatchNorm

__all__ = ["SyncBatchNorm"]
