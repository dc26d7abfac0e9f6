"""Batch norm to synchronised batch norm, and the groups it can work in."""

from typing import Any

from torch import nn

from lockstep.errors import UsageError
from lockstep.parallel import batchnorm
from lockstep.parallel.batchnorm.convert import find_batchnorms


def convert_syncbn_model(module: nn.Module, process_group: Any = None, channel_last: bool = False) -> nn.Module:
    """Make every batch norm of a model synchronised, in place.

    Parameters, buffers, hooks and flags stay the same objects, so an optimizer that was made before still fits.

    Args:
        module: The model.
        process_group: The ranks that normalise together, see `create_syncbn_process_group`; None for all.
        channel_last: Whether channels are the last dimension of inputs.

    Returns:
        The model.
    """
    found = [layer for _, layer, _ in find_batchnorms(module)]
    converted = batchnorm.convert_sync_batchnorm(module, process_group)
    for layer in found:
        if isinstance(layer, batchnorm.SyncBatchNorm):
            layer.channel_last = channel_last
    return converted


def create_syncbn_process_group(group_size: int) -> Any:
    """Make groups of ``group_size`` neighbouring ranks; every rank calls it.

    Args:
        group_size: Ranks in a group; 0 means all.

    Returns:
        This rank's group; None for all ranks.

    Raises:
        AssertionError: ``group_size`` does not divide the number of ranks.
    """
    try:
        return batchnorm.create_syncbn_process_group(group_size)
    except UsageError as error:
        raise AssertionError(str(error)) from error
