"""Who this process is. Knows nothing of models."""

from lockstep.world.turns import first
from lockstep.world.world import World, current, init

__all__ = ["World", "current", "first", "init"]
