"""How long a call may look for its peers, and in whose thread."""

BESIDE, IN_CALLER, AT_ONCE, FOR_A_MOMENT = range(4)
"""In the group's own thread; in the caller's, until it is over; in the caller's, without waiting, or for a moment."""


class UnfinishedError(Exception):
    """A call at once, or for a moment, is not over. Never leaves this package.

    Attributes:
        begun: This rank's part is out, and the next call must be the same again; if not, nothing has been done.
    """

    def __init__(self, *, begun: bool) -> None:
        super().__init__()
        self.begun = begun
