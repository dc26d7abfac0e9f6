"""``python -m lockstep run train.py``: the command line where `lockstep` is not on the PATH.

It begins anew as another package, which starts ranks without torch in its own memory.
"""

import os
import sys

os.execv(sys.executable, [sys.executable, "-m", "lockstep_cli", *sys.argv[1:]])  # noqa: S606
