"""Random numbers: a CUDA device's generator is the CPU's, which is the one that draws."""

from typing import Any

import torch
from torch import Tensor

from lockstep.compat.rehearsal.devices import Devices
from lockstep.compat.rehearsal.entry import Entry


def entries(devices: Devices) -> list[Entry]:
    """Seeds and states of ``torch.cuda``, and ``torch.Generator(device="cuda")``."""
    seed_cpu, plain = torch.default_generator.manual_seed, torch.Generator

    def manual_seed(seed: int) -> None:
        seed_cpu(int(seed))  # torch.manual_seed calls this one, too

    def new_seed() -> None:
        torch.default_generator.seed()

    def get_state(device: Any = "cuda") -> Tensor:
        devices.cuda(device)
        return torch.default_generator.get_state()

    def set_state(state: Tensor, device: Any = "cuda") -> None:
        devices.cuda(device)
        torch.default_generator.set_state(state)

    class Looks(type):
        def __instancecheck__(cls, thing: Any) -> bool:
            return isinstance(thing, plain)

    class Generator(metaclass=Looks):
        """``torch.Generator`` that takes CUDA devices."""

        def __new__(cls, device: Any = "cpu") -> Any:
            return plain(device if devices.index(device) is None else "cpu")

    calls = {
        "manual_seed": manual_seed,
        "manual_seed_all": manual_seed,
        "seed": new_seed,
        "seed_all": new_seed,
        "initial_seed": torch.default_generator.initial_seed,
        "get_rng_state": get_state,
        "set_rng_state": set_state,
        "get_rng_state_all": lambda: [get_state() for _ in range(devices.count)],
    }
    found = [Entry(owner, name, call) for owner in ("torch.cuda", "torch.cuda.random") for name, call in calls.items()]
    generators = tuple(torch.default_generator for _ in range(devices.count))
    return [*found, Entry("torch.cuda", "default_generators", generators), Entry("torch", "Generator", Generator)]
