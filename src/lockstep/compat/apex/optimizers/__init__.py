"""``apex.optimizers``: the fused optimizers, without the extension they needed."""

from typing import Any

from .fused_adagrad import FusedAdagrad
from .fused_adam import FusedAdam
from .fused_lamb import FusedLAMB
from .fused_mixed_precision_lamb import FusedMixedPrecisionLamb
from .fused_novograd import FusedNovoGrad
from .fused_sgd import FusedSGD

__all__ = ["FusedAdagrad", "FusedAdam", "FusedLAMB", "FusedMixedPrecisionLamb", "FusedNovoGrad", "FusedSGD"]


def __getattr__(name: str) -> Any:
    if name == "FP16_Optimizer":  # lived here until August 2019
        from ..contrib.optimizers import FP16_Optimizer

        return FP16_Optimizer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
