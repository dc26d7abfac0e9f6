"""The random number generators of this rank as tensors, and back."""

import random
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lockstep.errors import UsageError


def state_dict() -> dict[str, Tensor]:
    """Give the states of python's, numpy's and torch's generators; of this rank's GPU too, if it has been used."""
    version, numbers, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state()
    if name != "MT19937":
        raise UsageError(f"numpy's global generator is a {name}; a checkpoint holds MT19937, which it is by default.")
    states = {
        "python": torch.tensor([version, *numbers]),
        "python_gauss": torch.tensor([] if gauss is None else [gauss], dtype=torch.float64),
        "numpy": torch.tensor([position, has_gauss, *np.asarray(keys).tolist()]),
        "numpy_gauss": torch.tensor([cached], dtype=torch.float64),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def load_state_dict(states: dict[str, Any]) -> None:
    """Set the generators to what `state_dict` gave.

    Example:
        >>> states = state_dict()
        >>> first = random.random(), torch.rand(1)
        >>> load_state_dict(states)
        >>> (random.random(), torch.rand(1)) == first
        True
    """
    version, *numbers = states["python"].tolist()
    gauss = states["python_gauss"].tolist()
    random.setstate((version, tuple(numbers), gauss[0] if gauss else None))
    position, has_gauss, *keys = states["numpy"].tolist()
    cached = states["numpy_gauss"].item()
    np.random.set_state(("MT19937", np.array(keys, dtype=np.uint32), position, has_gauss, cached))
    torch.set_rng_state(states["torch"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
