"""Where scripts import FusedSGD from, too."""

from ...optimizers.fused_sgd import FusedSGD

__all__ = ["FusedSGD"]
