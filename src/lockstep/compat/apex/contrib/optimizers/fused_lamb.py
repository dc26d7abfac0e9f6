"""Where scripts import FusedLAMB from, too."""

from ...optimizers.fused_lamb import FusedLAMB

__all__ = ["FusedLAMB"]
