"""Which devices the replicas run on, and whether the module is where it has to be."""

from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
from torch import nn

from lockstep.errors import UsageError


def as_device(x: Any, cuda_devices: int, argument: str) -> torch.device:
    """Read one device as torch's DataParallel does, and CPU devices besides.

    Args:
        x: A CUDA device's index, a device or its name.
        cuda_devices: How many CUDA devices there are.
        argument: What to call it in messages.

    Raises:
        UsageError: It is none, or there is no such device.

    Example:
        >>> as_device(1, 2, "output_device"), as_device("cpu:3", 2, "output_device")
        (device(type='cuda', index=1), device(type='cpu'))
    """
    if isinstance(x, bool) or not isinstance(x, (int, str, torch.device)):
        raise UsageError(f"{argument}: {x!r} is no device. Write an index such as 0, 'cuda:0', or 'cpu'.")
    try:
        device = torch.device("cuda", x) if isinstance(x, int) else torch.device(x)
    except RuntimeError as error:
        raise UsageError(f"{argument}: {x!r} is no device. Write an index such as 0, 'cuda:0', or 'cpu'.") from error
    if device.type == "cpu":
        return torch.device("cpu")  # cpu:0 and cpu are one device, but torch takes them for two
    if device.type == "cuda":
        if not cuda_devices:
            raise UsageError(f"{argument}: {x!r}, but torch sees no CUDA device here. Write 'cpu'.")
        if device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        if device.index >= cuda_devices:
            raise UsageError(
                f"{argument}: {x!r} is past the last of {cuda_devices} visible CUDA device(s). Name devices 0 to "
                f"{cuda_devices - 1}, make more visible (CUDA_VISIBLE_DEVICES), or leave {argument} out."
            )
    return device


def find_devices(device_ids: Sequence[Any] | None) -> list[torch.device]:
    """Give one device per replica; none where the module simply runs.

    As with torch's, that is the case on a machine without CUDA, whatever CUDA devices ``device_ids`` names.

    Raises:
        UsageError: See `as_device`; or CPU and CUDA devices together.
    """
    available = torch.cuda.device_count() if torch.cuda.is_available() else 0
    wanted = list(range(available)) if device_ids is None else list(device_ids)
    without = not available and all(_is_cuda(x) for x in wanted)
    devices = [] if without else [as_device(x, available, "device_ids") for x in wanted]
    if len({device.type for device in devices}) > 1:
        raise UsageError(f"device_ids={wanted}: replicas run on devices of one kind. Name CUDA or CPU devices only.")
    return devices


def _is_cuda(x: Any) -> bool:
    if isinstance(x, torch.device):
        return x.type == "cuda"
    return not isinstance(x, bool) and (isinstance(x, int) or (isinstance(x, str) and x.startswith("cuda")))


def find_output_device(output_device: Any, devices: Sequence[torch.device]) -> torch.device:
    """Give the device that outputs are gathered on: the first replica's if None, the CPU for -1."""
    if output_device is None:
        return devices[0]
    if output_device == -1 and not isinstance(output_device, bool):
        return torch.device("cpu")
    return as_device(output_device, torch.cuda.device_count() if torch.cuda.is_available() else 0, "output_device")


def as_torch_shows(device: torch.device) -> int | torch.device:
    """The value torch's attributes have for a device: the index of a CUDA one."""
    return device.index if device.type == "cuda" else device


def check_home(module: nn.Module, home: torch.device) -> None:
    """See that every parameter and buffer is on the first device.

    Raises:
        UsageError: One is not; says which is where, and the line that mends it.
    """
    if all(tensor.device == home for tensor in chain(module.parameters(), module.buffers())):
        return
    kinds = (("parameter", module.named_parameters()), ("buffer", module.named_buffers()))
    named = [(f"{kind} {name!r}", tensor.device) for kind, tensors in kinds for name, tensor in tensors]
    elsewhere = [(name, device) for name, device in named if device != home]
    name, device = elsewhere[0]
    more = f", and {len(elsewhere) - 1} more of {len(named)} are not there either" if len(elsewhere) > 1 else ""
    raise UsageError(
        f"{name} is on {device}{more}, but device_ids[0] is {home}, where DataParallel's module has to be: "
        f"the others get their copies from there. Write model.to({str(home)!r}), or name {device} first in device_ids."
    )
