"""How long a call may look for its peers, and in whose thread."""

BESIDE, IN_CALLER, AT_ONCE, FOR_A_MOMENT = range(4)
"""In the group's own thread; in the caller's, until it is over; in the caller's, without waiting, or for a moment."""


class UnfinishedError(Exception):
    """A call at once, or for a moment, is not over; the same call must be made again. Never leaves this package."""
