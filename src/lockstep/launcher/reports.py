"""What a rank tells the launcher, through a pipe of its own: that it is there, and what it fails of."""

import json
import os
from typing import NamedTuple

# A pipe takes this much without anybody reading (64 KiB on Linux), so that telling never waits.
_MOST = 40_000


class Report(NamedTuple):
    """What has come through one rank's pipe."""

    pid: int = 0
    rank: int = 0
    size: int = 0
    when: float = 0.0
    code: int | None = None
    error: str = ""
    kind: str = ""
    text: str = ""


def tell(pipe: int, **facts: object) -> None:
    """Write one report, in the rank; the lines of a fault handler may stand between two of them."""
    os.write(pipe, b"\n\0" + json.dumps(facts).encode() + b"\n")


def shorten(text: str) -> str:
    """Leave out the middle of a text that would not fit into a pipe."""
    if len(text) <= _MOST:
        return text
    return f"{text[: _MOST // 2]}\n... {len(text) - _MOST} characters left out ...\n{text[-_MOST // 2 :]}"


def read(data: bytes) -> Report:
    r"""Put together what a rank has told, in the launcher.

    Example:
        >>> read(b'\n\0{"pid": 7, "rank": 1}\nFatal Python error: Aborted\n').text
        'Fatal Python error: Aborted\n'
    """
    report, dump = Report(), []
    for line in data.split(b"\n"):
        if line.startswith(b"\0"):
            try:
                report = report._replace(**json.loads(line[1:]))
            except ValueError:  # the rank was killed while it wrote
                continue
        elif line:
            dump.append(line.decode(errors="replace") + "\n")
    return report._replace(text=report.text or "".join(dump))
