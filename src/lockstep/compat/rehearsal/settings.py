"""What a rehearsal is told. Plain values: they travel to processes that the script starts."""

from typing import NamedTuple


class Settings(NamedTuple):
    """What a rehearsal is told.

    Attributes:
        devices: How many CUDA devices the script sees.
        hide_cuda: Whether ``torch.cuda.is_available()`` says no; what the script calls all the same still works.
        steps: After how many optimizer steps it ends; 0 for never.
        folder: Where processes leave their facts and meet; private, and gone after the run. Empty: nowhere.
    """

    devices: int
    hide_cuda: bool = False
    steps: int = 0
    folder: str = ""
