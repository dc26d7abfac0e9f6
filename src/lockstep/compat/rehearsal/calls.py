"""Functions of ``torch.cuda`` that ask for devices, choose one or wait for it."""

import contextlib
import types
from collections.abc import Iterator
from typing import Any

import torch

from lockstep.compat.rehearsal.devices import CPU, Devices, marked
from lockstep.compat.rehearsal.entry import Entry
from lockstep.compat.rehearsal.memory import installed

_CAPABILITY = (8, 0)  # what most scripts ask before they use bfloat16 or tensor cores


def entries(devices: Devices, hide_cuda: bool) -> list[Entry]:
    """Everything but streams, memory and random numbers."""
    return [*_questions(devices, hide_cuda), *_choices(devices), *_switches(), *_profiling()]


def _questions(devices: Devices, hide_cuda: bool) -> list[Entry]:
    def properties(device: Any = None) -> Any:
        index = devices.cuda(device)
        return types.SimpleNamespace(
            name=f"lockstep rehearsal {index} (CPU)",
            major=_CAPABILITY[0],
            minor=_CAPABILITY[1],
            total_memory=installed(),
            multi_processor_count=1,
            max_threads_per_multi_processor=2048,
            warp_size=32,
            is_integrated=False,
            is_multi_gpu_board=False,
            uuid=f"rehearsal-{index}",
        )

    def utilization(device: Any = None) -> int:
        devices.cuda(device)
        return 0

    def yes(*_: Any, **__: Any) -> bool:
        return True

    answers = {
        "is_available": lambda: not hide_cuda,
        "device_count": lambda: 0 if hide_cuda else devices.count,
        "is_initialized": yes,
        "get_device_properties": properties,
        "get_arch_list": lambda: ["sm_80"],
        "can_device_access_peer": yes,
        "utilization": utilization,
    }
    return [Entry("torch.cuda", name, answer) for name, answer in answers.items()]


def _choices(devices: Devices) -> list[Entry]:
    def set_device(device: Any) -> None:
        if not (isinstance(device, int) and device < 0):  # CUDA takes -1 for: leave it
            devices.current = devices.cuda(device)

    @contextlib.contextmanager
    def chosen(device: Any) -> Iterator[None]:
        before, devices.current = devices.current, devices.cuda(device)
        try:
            yield
        finally:
            devices.current = before

    def device_of(x: torch.Tensor) -> Any:
        index = marked(x)
        return chosen(None if index in (None, CPU) else index)

    def wait(device: Any = None) -> None:
        devices.cuda(device)

    def nothing(*_: Any, **__: Any) -> None:
        pass

    answers = {
        "set_device": set_device,
        "device": chosen,
        "device_of": device_of,
        "current_device": lambda: devices.current,
        "synchronize": wait,
        "ipc_collect": nothing,  # after torch.cuda.empty_cache, which needs no replacement
    }
    return [Entry("torch.cuda", name, answer) for name, answer in answers.items()]


def _switches() -> list[Entry]:
    return [
        Entry("torch.backends.cudnn", "is_available", lambda: True),
        Entry("torch.backends.cudnn", "version", lambda: 90100),
        Entry("torch.backends.cudnn", "is_acceptable", lambda _: False),  # else recurrent layers call its kernels
        Entry("torch.version", "cuda", "12.6"),
    ]


def _profiling() -> list[Entry]:
    def nothing(*_: Any, **__: Any) -> int:
        return 0

    marks = [
        Entry("torch.cuda.nvtx", name, nothing)
        for name in ("range_push", "range_pop", "mark", "range_start", "range_end")
    ]
    runtime = types.SimpleNamespace(cudaProfilerStart=nothing, cudaProfilerStop=nothing, cudaDeviceSynchronize=nothing)
    return [
        *marks,
        Entry("torch.cuda.profiler", "start", nothing),
        Entry("torch.cuda.profiler", "stop", nothing),
        Entry("torch.cuda", "cudart", lambda: runtime),
    ]
