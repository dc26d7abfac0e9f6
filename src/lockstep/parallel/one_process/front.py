"""torch's DataParallel, its interface on kept replicas."""

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from lockstep.parallel.one_process.copies import Copies
from lockstep.parallel.one_process.devices import (
    as_device,
    as_torch_shows,
    check_home,
    find_devices,
    find_output_device,
)
from lockstep.parallel.one_process.hints import say_once
from lockstep.parallel.one_process.losses import WithLoss, mean_over
from lockstep.parallel.one_process.meeting import run_met, seat_layers
from lockstep.parallel.one_process.shells import make_replica
from lockstep.parallel.one_process.split import join, split
from lockstep.parallel.one_process.spread import spread
from lockstep.parallel.one_process.threads import run_all

_POINTER = (
    "DataParallel drives {} devices from one Python process, so their threads wait for each other's Python code. "
    "`lockstep run script.py` gives each device a process of its own, which is usually faster."
)


class DataParallel(nn.Module):
    """Drop-in for ``torch.nn.DataParallel``: one process, several devices, CUDA or CPU.

    Every forward splits the batch along ``dim``, runs a replica of the module on each device in a thread of its own,
    and gathers the outputs on ``output_device``. Gradients come back to the module's own parameters, added in a fixed
    order. What replica 0 writes to buffers stays; what the others write, and attributes that any of them sets, is lost.
    ``docs/data_parallel.md`` has the whole of it.

    Devices keep their copies between steps; only what changed is copied again.

    Args:
        module: The model, with everything on ``device_ids[0]`` when it runs.
        device_ids: CUDA devices, by index or name, or CPU devices, ``"cpu"`` as often as replicas are wanted; None for
            every CUDA device. Without CUDA devices the module simply runs.
        output_device: Where outputs are gathered; the first of ``device_ids`` if None, the CPU for -1.
        dim: The dimension that is split and joined.
        loss: ``loss(output, targets)``, computed on each device. Calls then take the targets as their last positional
            argument and give the mean loss over the whole batch; outputs never leave their devices. It gives one loss
            for each sample, or their mean, or a pair of a mean and how many it is the mean of.

    Attributes:
        module: The module itself, not a replica.

    Raises:
        UsageError: At construction: a device that is none, or not there. In forward: a parameter or buffer on another
            device than the first; a batch that cannot be split; outputs that cannot be joined.

    Example:
        >>> import lockstep, torch
        >>> model = lockstep.DataParallel(torch.nn.Linear(2, 1), device_ids=["cpu", "cpu"])
        >>> model(torch.ones(30, 2)).shape, list(model.state_dict())
        (torch.Size([30, 1]), ['module.weight', 'module.bias'])
    """

    def __init__(
        self,
        module: nn.Module,
        device_ids: Sequence[Any] | None = None,
        output_device: Any = None,
        dim: int = 0,
        *,
        loss: Callable[..., Any] | None = None,
    ) -> None:
        super().__init__()
        self.module = module
        self.dim = dim
        self.__dict__["loss"] = loss  # no part of state_dict, as a loss beside torch's is none
        self._keeper = _Keeper()
        devices = find_devices(device_ids)
        self.device_ids = [as_torch_shows(device) for device in devices]
        if not devices:
            return
        self.output_device = as_torch_shows(find_output_device(output_device, devices))
        self.src_device_obj = devices[0]
        if len(devices) == 1:
            module.to(devices[0])
        else:
            say_once(_POINTER.format(len(devices)))

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the replicas on their pieces of the batch, and gather what they give."""
        loss = self.__dict__["loss"]
        unit = self.module if loss is None else WithLoss(self.module, loss, self.dim)
        # A replica of this wrapper, inside another one, has but one device.
        if not self.device_ids or "_is_replica" in self.__dict__:
            output = unit(*inputs, **kwargs)
            return output if loss is None else output[0]
        check_home(unit, self.src_device_obj)
        batches, options = self.scatter(inputs, kwargs, self.device_ids)
        if len(self.device_ids) == 1:
            outputs = [unit(*batches[0], **options[0])]
        else:
            replicas = self.replicate(unit, self.device_ids[: len(batches)])
            outputs = self.parallel_apply(replicas, batches, options)
        if loss is not None:
            return mean_over(outputs, _place(self.output_device))
        if len(self.device_ids) == 1 and self.output_device == self.device_ids[0]:
            return outputs[0]
        return self.gather(outputs, self.output_device)

    def scatter(
        self, inputs: tuple[Any, ...], kwargs: dict[str, Any] | None, device_ids: Sequence[Any]
    ) -> tuple[tuple[Any, ...], tuple[dict[str, Any], ...]]:
        """Split a call's arguments; a step of `forward`, for subclasses that change it."""
        pieces = split((inputs, kwargs or {}), [_place(x) for x in device_ids], self.dim)
        return tuple(piece[0] for piece in pieces), tuple(piece[1] for piece in pieces)

    def replicate(self, module: nn.Module, device_ids: Sequence[Any]) -> list[nn.Module]:
        """Give a replica on each device; a step of `forward`, for subclasses that change it."""
        return self._keeper.replicas(module, [_place(x) for x in device_ids])

    def parallel_apply(self, replicas: Sequence[nn.Module], inputs: Sequence[Any], kwargs: Any) -> list[Any]:
        """Run the replicas; a step of `forward`, for subclasses that change it."""
        return _run(replicas, inputs, kwargs, [_place(x) for x in self.device_ids[: len(replicas)]])

    def gather(self, outputs: Any, output_device: Any) -> Any:
        """Put outputs together; a step of `forward`, for subclasses that change it."""
        return join(outputs, _place(output_device), self.dim)

    def __getstate__(self) -> dict[str, Any]:
        """Everything but the copies on other devices."""
        return {**self.__dict__, "_keeper": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Begin without copies."""
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._keeper = _Keeper()


def data_parallel(
    module: nn.Module,
    inputs: Any,
    device_ids: Sequence[Any] | None = None,
    output_device: Any = None,
    dim: int = 0,
    module_kwargs: dict[str, Any] | None = None,
) -> Any:
    """Run ``module(*inputs, **module_kwargs)`` once on several devices, as `DataParallel` does.

    Args:
        module: The model, on the first device.
        inputs: Its positional arguments, as a tuple; or the only one; or None.
        device_ids: See `DataParallel`.
        output_device: See `DataParallel`.
        dim: The dimension that is split and joined.
        module_kwargs: Its keyword arguments.

    Raises:
        UsageError: See `DataParallel`.

    Example:
        >>> import torch
        >>> from lockstep.parallel import data_parallel
        >>> data_parallel(torch.nn.Linear(2, 1), torch.ones(5, 2), ["cpu", "cpu"]).shape
        torch.Size([5, 1])
    """
    if not isinstance(inputs, tuple):
        inputs = () if inputs is None else (inputs,)
    devices = find_devices(device_ids)
    if not devices:
        return module(*inputs, **(module_kwargs or {}))
    target = find_output_device(output_device, devices)
    check_home(module, devices[0])
    pieces = split((inputs, module_kwargs or {}), devices, dim)
    batches, options = [piece[0] for piece in pieces], [piece[1] for piece in pieces]
    if len(devices) == 1:
        output = module(*batches[0], **options[0])
        return output if target == devices[0] else join([output], target, dim)
    used = devices[: len(pieces)]
    return join(_run(_Keeper().replicas(module, used), batches, options, used), target, dim)


class _Keeper:
    """What a DataParallel keeps between steps: for each further device, its copies."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # two threads may run one model
        self._copies: list[Copies] = []

    def replicas(self, module: nn.Module, devices: Sequence[torch.device]) -> list[nn.Module]:
        """Give a replica on each device; the first shares memory with ``module``."""
        parameters, buffers = list(module.parameters()), list(module.buffers())
        masters = [*parameters, *buffers]
        with self._lock:
            for place, device in enumerate(devices[1:]):
                if place == len(self._copies):
                    self._copies.append(Copies(device))
            found = [copies.refresh(parameters, buffers) for copies in self._copies[: len(devices) - 1]]
        rows = spread(masters, [[copies[id(master)] for master in masters] for copies in found])
        keys = [id(master) for master in masters]
        replicas = [make_replica(module, dict(zip(keys, row, strict=True))) for row in rows]
        seat_layers(replicas)
        return replicas


def _run(
    replicas: Sequence[nn.Module], inputs: Sequence[Any], kwargs: Sequence[dict[str, Any]], devices: list[torch.device]
) -> list[Any]:
    def work(place: int) -> Callable[[], Any]:
        given = inputs[place] if isinstance(inputs[place], (list, tuple)) else (inputs[place],)
        return lambda: run_met(replicas[place], place, given, kwargs[place] if kwargs else {})

    return run_all([work(place) for place in range(len(replicas))], devices)


def _place(x: Any) -> torch.device:
    """A device from what the attributes show."""
    return torch.device("cpu") if x == -1 else as_device(x, torch.cuda.device_count(), "device")
