"""``apex.contrib.optimizers``: the optimizers of before August 2019."""

from ...optimizers.fused_lamb import FusedLAMB
from ...optimizers.fused_sgd import FusedSGD
from .fp16_optimizer import FP16_Optimizer
from .fused_adam import FusedAdam

__all__ = ["FP16_Optimizer", "FusedAdam", "FusedLAMB", "FusedSGD"]
