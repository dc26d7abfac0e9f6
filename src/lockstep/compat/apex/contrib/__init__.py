"""``apex.contrib``: clip_grad, xentropy, layer_norm, the older optimizers; an import of the rest says what to use."""

import importlib
from typing import Any

__all__ = ["clip_grad", "layer_norm", "optimizers", "xentropy"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
