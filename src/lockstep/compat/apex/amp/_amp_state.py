"""The process's state."""

from lockstep.amp.state import AmpState, _amp_state, master_params, maybe_print, warn_or_err

__all__ = ["AmpState", "_amp_state", "master_params", "maybe_print", "warn_or_err"]
