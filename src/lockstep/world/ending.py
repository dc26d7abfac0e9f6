"""How a rank says that it ended on purpose, and should be started again."""

SAVED = 75
"""The exit code after a save that a signal asked for: ``EX_TEMPFAIL`` of sysexits.h, "try again later".

No failure: the launcher does not start ranks again on a machine that is about to be taken. Batch systems may.
"""
