"""`scale_loss`, and the handles of 2018."""

from lockstep.amp.casting import disable_casts
from lockstep.amp.front import scale_loss
from lockstep.amp.handle import AmpHandle, NoOpHandle

__all__ = ["AmpHandle", "NoOpHandle", "disable_casts", "scale_loss"]
