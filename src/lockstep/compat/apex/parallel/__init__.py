"""``apex.parallel``: data-parallel training as apex had it, on lockstep's reducer and batch norm."""

from torch.distributed import ReduceOp

from .convert import convert_syncbn_model, create_syncbn_process_group
from .distributed import DistributedDataParallel, Reducer
from .LARC import LARC
from .optimized_sync_batchnorm import SyncBatchNorm

__all__ = [
    "LARC",
    "DistributedDataParallel",
    "ReduceOp",
    "Reducer",
    "SyncBatchNorm",
    "convert_syncbn_model",
    "create_syncbn_process_group",
]
