"""A rehearsal inside a test: everything in place within the block, and torch as it was after it."""

import contextlib

from lockstep.compat.rehearsal.entry import put_in_place
from lockstep.compat.rehearsal.follow import Follow
from lockstep.compat.rehearsal.install import entries
from lockstep.compat.rehearsal.report.watching import Watch
from lockstep.compat.rehearsal.settings import Settings


@contextlib.contextmanager
def rehearsing(devices=2, **more):
    """Give what was noted of tensors on the wrong device, as ``{(place, what): count}``."""
    settings = Settings(devices, **more)
    mode = Follow(lambda _: None)
    undo = put_in_place(entries(settings, mode, Watch(settings, mode)))
    try:
        with mode:
            yield mode.misplaced
    finally:
        undo()
