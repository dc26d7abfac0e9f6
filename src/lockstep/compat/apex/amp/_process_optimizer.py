"""What `initialize` keeps beside an optimizer."""

from lockstep.amp.masters import AmpOptimizerState

__all__ = ["AmpOptimizerState"]
