"""How functions were wrapped; lockstep.amp.policies does it."""

from lockstep.amp.policies import POLICIES

__all__ = ["POLICIES"]
