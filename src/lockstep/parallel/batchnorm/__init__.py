"""Batch norm over the global batch: the layer, and models converted to it and back."""

from lockstep.parallel.batchnorm.convert import convert_sync_batchnorm, revert_sync_batchnorm
from lockstep.parallel.batchnorm.groups import create_syncbn_process_group
from lockstep.parallel.batchnorm.layer import SyncBatchNorm

__all__ = ["SyncBatchNorm", "convert_sync_batchnorm", "create_syncbn_process_group", "revert_sync_batchnorm"]
