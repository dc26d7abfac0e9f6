"""The optimizer of 2018's ``handle.wrap_optimizer``."""

from lockstep.amp.wrapped import OptimWrapper

__all__ = ["OptimWrapper"]
