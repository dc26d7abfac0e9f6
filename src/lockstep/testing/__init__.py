"""For users' own tests: does my model train the same on any number of ranks?"""

from lockstep.testing.same_step import assert_same_step

__all__ = ["assert_same_step"]
