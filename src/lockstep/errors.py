"""What lockstep raises.

Every error is also one of Python's own, so that ``except`` clauses written before lockstep go on working::

    LockstepError
    ├── UsageError (ValueError)           the call or the environment is wrong; says what to write instead
    ├── MismatchError (RuntimeError)      the ranks disagree: other models, other collectives, other lengths
    ├── LateRankError (TimeoutError)      a rank did not come in time
    ├── LostRankError (RuntimeError)      a rank failed or died while others were waiting for it
    ├── CheckpointError (OSError)         a checkpoint could not be written or read; says which file and why
    └── NotFiniteError (ArithmeticError)  losses or gradients are not numbers any more
"""


class LockstepError(Exception):
    """Anything that lockstep raises by itself."""


class UsageError(LockstepError, ValueError):
    """The call or the environment is wrong; the message says what to write instead."""


class MismatchError(LockstepError, RuntimeError):
    """The ranks disagree where they must not; the message names both sides."""


class LateRankError(LockstepError, TimeoutError):
    """A rank did not come in time; the message names it where that can be known."""


class LostRankError(LockstepError, RuntimeError):
    """A rank failed or died while others were waiting for it."""


class CheckpointError(LockstepError, OSError):
    """A checkpoint could not be written or read; the message says which file, on which rank, and why."""


class NotFiniteError(LockstepError, ArithmeticError):
    """Losses or gradients are not numbers any more; the message says since which step, and on which rank."""
