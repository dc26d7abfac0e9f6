"""What a group does with tensors that are not on the CPU: the backend that was named for their device does it.

Which that is stands in torch's own table of groups, which is private; read for torch 2.9 to 2.14.
"""

from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch._C import _distributed_c10d as c10d
from torch.distributed import distributed_c10d as python_c10d

from lockstep.errors import UsageError


def backends_of(group: dist.ProcessGroup) -> dict[str, str]:
    """Which backend each kind of device has in this group, as in "cpu:shm,cuda:nccl"."""
    config = python_c10d._world.pg_backend_config.get(group, "cpu:shm")
    return dict(python_c10d.BackendConfig(python_c10d.Backend(config)).get_device_backend_map())


def start_backend(
    group: dist.ProcessGroup, device: str, store: c10d.Store, timeout: float, who: str
) -> tuple[dist.ProcessGroup.BackendType, Any]:
    """Make the backend for the group's tensors on ``device``; every rank has one when its first such tensor comes.

    Raises:
        UsageError: None was named for it.
    """
    name = backends_of(group).get(device)
    store, wait = c10d.PrefixStore(f"{device}/", store), timedelta(seconds=timeout)
    if name == "nccl":
        options = c10d.ProcessGroupNCCL.Options()
        options._timeout = wait
        nccl = c10d.ProcessGroupNCCL(store, group.rank(), group.size(), options)
        return dist.ProcessGroup.BackendType.NCCL, nccl
    if name == "gloo":
        return dist.ProcessGroup.BackendType.GLOO, c10d.ProcessGroupGloo(store, group.rank(), group.size(), wait)
    raise UsageError(
        f"{who}: shm moves CPU tensors, and this group has no nccl or gloo for {device}. Start it with "
        f'init_process_group("cpu:shm,cuda:nccl"), or move the tensor to the CPU.'
    )
