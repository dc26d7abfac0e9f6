"""Data-parallel training for PyTorch: your single-device script on every device you have, with the same numbers."""

from typing import TYPE_CHECKING, Any

import torch.distributed

if TYPE_CHECKING:
    from lockstep import amp as amp
    from lockstep.collectives import gather as gather
    from lockstep.collectives import mean as mean
    from lockstep.collectives import total as total
    from lockstep.data import DataLoader as DataLoader
    from lockstep.data import DistributedSampler as DistributedSampler
    from lockstep.errors import CheckpointError as CheckpointError
    from lockstep.errors import LateRankError as LateRankError
    from lockstep.errors import LockstepError as LockstepError
    from lockstep.errors import LostRankError as LostRankError
    from lockstep.errors import MismatchError as MismatchError
    from lockstep.errors import NotFiniteError as NotFiniteError
    from lockstep.errors import UsageError as UsageError
    from lockstep.launcher.function import launch as launch
    from lockstep.parallel.attach import no_sync as no_sync
    from lockstep.parallel.attach import replicate as replicate
    from lockstep.parallel.attach import sync_gradients as sync_gradients
    from lockstep.parallel.attach import unwrap as unwrap
    from lockstep.parallel.batchnorm import SyncBatchNorm as SyncBatchNorm
    from lockstep.parallel.batchnorm import convert_sync_batchnorm as convert_sync_batchnorm
    from lockstep.parallel.batchnorm import create_syncbn_process_group as create_syncbn_process_group
    from lockstep.parallel.batchnorm import revert_sync_batchnorm as revert_sync_batchnorm
    from lockstep.parallel.buffers import sync_buffers as sync_buffers
    from lockstep.parallel.ddp import DistributedDataParallel as DistributedDataParallel
    from lockstep.parallel.one_process import DataParallel as DataParallel
    from lockstep.train.bar import progress as progress
    from lockstep.train.checkpoint import Checkpoint as Checkpoint
    from lockstep.train.update import Update as Update
    from lockstep.train.weight_files import load_weights as load_weights
    from lockstep.train.weight_files import save_weights as save_weights
    from lockstep.watch.drift import check_in_step as check_in_step
    from lockstep.world import World as World
    from lockstep.world import first as first
    from lockstep.world import init as init
else:
    # Every public name and the module it lives in, which is loaded when the name is first used.
    _HOMES = {
        "Checkpoint": "lockstep.train.checkpoint",
        "CheckpointError": "lockstep.errors",
        "DataLoader": "lockstep.data",
        "DataParallel": "lockstep.parallel.one_process",
        "DistributedDataParallel": "lockstep.parallel.ddp",
        "DistributedSampler": "lockstep.data",
        "LateRankError": "lockstep.errors",
        "LockstepError": "lockstep.errors",
        "LostRankError": "lockstep.errors",
        "MismatchError": "lockstep.errors",
        "NotFiniteError": "lockstep.errors",
        "SyncBatchNorm": "lockstep.parallel.batchnorm",
        "Update": "lockstep.train.update",
        "UsageError": "lockstep.errors",
        "World": "lockstep.world",
        "check_in_step": "lockstep.watch.drift",
        "convert_sync_batchnorm": "lockstep.parallel.batchnorm",
        "create_syncbn_process_group": "lockstep.parallel.batchnorm",
        "first": "lockstep.world",
        "gather": "lockstep.collectives",
        "init": "lockstep.world",
        "launch": "lockstep.launch",
        "load_weights": "lockstep.train.weight_files",
        "mean": "lockstep.collectives",
        "no_sync": "lockstep.parallel.attach",
        "progress": "lockstep.train.bar",
        "replicate": "lockstep.parallel.attach",
        "revert_sync_batchnorm": "lockstep.parallel.batchnorm",
        "save_weights": "lockstep.train.weight_files",
        "sync_buffers": "lockstep.parallel.buffers",
        "sync_gradients": "lockstep.parallel.attach",
        "total": "lockstep.collectives",
        "unwrap": "lockstep.parallel.attach",
    }

    def __getattr__(name):
        import importlib

        if name == "amp":  # a package by itself, under apex's names
            return importlib.import_module("lockstep.amp")
        if name in _HOMES:
            value = globals()[name] = getattr(importlib.import_module(_HOMES[name]), name)
            return value
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def __dir__():
        return sorted({*globals(), *_HOMES, "amp"})


def _start_shm(options: Any, more: object) -> Any:
    from lockstep.shm.backend import start_group

    return start_group(options, more)


def _start_hierarchy(options: Any, more: object) -> Any:
    from lockstep.shm.hierarchy import start_group

    return start_group(options, more)


# Like gloo and nccl, shm is there by name: init_process_group("shm"), "cpu:shm,cuda:nccl", new_group(backend="shm").
torch.distributed.Backend.register_backend("shm", _start_shm, extended_api=True, devices=["cpu"])
# The same for several nodes: shm within each, gloo between them.
torch.distributed.Backend.register_backend("hierarchy", _start_hierarchy, extended_api=True, devices=["cpu"])

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "DataLoader",
    "DataParallel",
    "DistributedDataParallel",
    "DistributedSampler",
    "LateRankError",
    "LockstepError",
    "LostRankError",
    "MismatchError",
    "NotFiniteError",
    "SyncBatchNorm",
    "Update",
    "UsageError",
    "World",
    "amp",
    "check_in_step",
    "convert_sync_batchnorm",
    "create_syncbn_process_group",
    "first",
    "gather",
    "init",
    "launch",
    "load_weights",
    "mean",
    "no_sync",
    "progress",
    "replicate",
    "revert_sync_batchnorm",
    "save_weights",
    "sync_buffers",
    "sync_gradients",
    "total",
    "unwrap",
]
