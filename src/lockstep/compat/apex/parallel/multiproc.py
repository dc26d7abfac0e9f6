"""``python -m apex.parallel.multiproc script.py ...``: one process for each device, by lockstep's launcher.

Outside of a rank no ``apex`` can be imported: write ``python -m lockstep.compat.apex.parallel.multiproc`` there. Each
process gets ``--rank`` and ``--world-size`` behind the script's own arguments, as in apex, and torchrun's variables.
"""

import os
import runpy
import sys
from collections.abc import Sequence

AS_RANK = "--as-rank"


def plan(arguments: Sequence[str], devices: int) -> tuple[int, list[str]]:
    """How many processes, and the arguments that they share.

    Example:
        >>> plan(["main.py", "--lr", "1"], devices=2)
        (2, ['main.py', '--lr', '1', '--world-size', '2'])
        >>> plan(["main.py", "--world-size", "4"], devices=0)
        (4, ['main.py', '--world-size', '4'])
    """
    shared = list(arguments)
    if "--world-size" in shared:
        return int(shared[shared.index("--world-size") + 1]), shared
    count = max(1, devices)
    return count, [*shared, "--world-size", str(count)]


def main(arguments: Sequence[str]) -> None:
    """Become the launcher, or one of its ranks."""
    if arguments[:1] == [AS_RANK]:
        sys.argv = [*arguments[1:], "--rank", os.environ["RANK"]]
        sys.path[0] = os.path.dirname(os.path.abspath(arguments[1]))  # noqa: PTH100, PTH120  (as python does)
        runpy.run_path(arguments[1], run_name="__main__")
        return
    if not arguments:
        sys.exit("usage: python -m apex.parallel.multiproc script.py [arguments]")
    import torch

    count, shared = plan(arguments, torch.cuda.device_count())
    command = ["run", "-n", str(count), "-m", "lockstep.compat.apex.parallel.multiproc", AS_RANK, *shared]
    os.execv(sys.executable, [sys.executable, "-m", "lockstep_cli", *command])  # noqa: S606


if __name__ == "__main__":
    main(sys.argv[1:])
