"""`initialize` and the state."""

from lockstep.amp.front import initialize
from lockstep.amp.levels import Properties
from lockstep.amp.state import load_state_dict, state_dict

__all__ = ["Properties", "initialize", "load_state_dict", "state_dict"]
