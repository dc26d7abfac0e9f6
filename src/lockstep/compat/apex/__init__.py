"""NVIDIA apex as scripts of 2018 to 2023 import it, on today's torch: names and translation, no engine.

Loaded under the name ``apex`` once `lockstep.compat.install` was called; its parts when they are first used.
"""

import importlib
import logging
import os
import warnings
from typing import Any

# The parts that NVIDIA's own `import apex` has loaded; scripts write `apex.amp.initialize` after it.
__all__ = ["amp", "fp16_utils", "multi_tensor_apply", "normalization", "optimizers", "parallel"]

_LATER = (*__all__, "RNN", "contrib", "fused_dense", "mlp")


def __getattr__(name: str) -> Any:
    if name in _LATER:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


class RankInfoFormatter(logging.Formatter):
    """Puts ``(global rank, ...)`` of a process into log lines, as ``%(rank_info)s``."""

    def format(self, record: logging.LogRecord) -> str:
        """Format with the rank that a launcher gave."""
        record.rank_info = os.environ.get("RANK", "0")
        return super().format(record)


class DeprecatedFeatureWarning(FutureWarning):
    """What NVIDIA's apex warned with; nothing here does."""


def deprecated_warning(msg: str) -> None:
    """Warn once, on rank 0."""
    if os.environ.get("RANK", "0") == "0":
        warnings.warn(msg, DeprecatedFeatureWarning, stacklevel=2)


def check_cudnn_version_and_warn(global_option: str, required_cudnn_version: int) -> bool:
    """Whether cuDNN is there in this version or a newer one; warns if not."""
    import torch

    version = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
    if version is not None and version >= required_cudnn_version:
        return True
    warnings.warn(f"Skip `{global_option}` as it requires cuDNN {required_cudnn_version} or later", stacklevel=2)
    return False
