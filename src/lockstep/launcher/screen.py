"""What several ranks print, put together for one terminal or file: whole lines, and a bar left whole. Pure."""

_CLEAR = b"\r\x1b[K"
_DIM, _PLAIN = b"\x1b[2m", b"\x1b[0m"
_LONGEST = 1 << 20
"""Bytes of an unfinished line that are kept; a longer one goes out in pieces."""


class Screen:
    """One place that is written to.

    One rank, the owner, has it as if it were alone: its bytes pass as they are, unfinished lines too, so that bars, prompts and
    cursor codes work. Lines of others come whole, with their rank in front. Where the owner stands in the middle of a
    line, a terminal is wiped and the owner's line drawn again below; a file gets a line break.
    """

    def __init__(self, terminal: bool, colour: bool = False) -> None:
        self._terminal = terminal
        self._dim, self._plain = (_DIM, _PLAIN) if colour else (b"", b"")
        self._standing = b""
        self._unfinished: dict[object, bytes] = {}

    def own(self, data: bytes) -> bytes:
        """Bytes of the owner: what to write."""
        line = (self._standing + data).rpartition(b"\n")[2]
        # Of a bar only the newest drawing counts, and the one before, where the newest is only begun.
        self._standing = b"\r".join(line.rsplit(b"\r", 2)[-2:])[-_LONGEST:]
        return data

    def other(self, who: object, name: str, data: bytes) -> bytes:
        """Bytes of another rank's stream ``who``: what to write, which is nothing until a line is whole."""
        *lines, rest = (self._unfinished.get(who, b"") + data).split(b"\n")
        if len(rest) > _LONGEST:
            lines, rest = [*lines, rest], b""
        self._unfinished[who] = rest
        return self.lines([self._label(name, line) for line in lines])

    def finish(self, who: object, name: str) -> bytes:
        """The stream has ended: what of it was no whole line yet."""
        rest = self._unfinished.pop(who, b"")
        return self.lines([self._label(name, rest)]) if rest else b""

    def lines(self, lines: list[bytes]) -> bytes:
        """Write whole lines beside what the owner has standing."""
        text = b"".join(line + b"\n" for line in lines)
        if not text or not self._standing:
            return text
        if self._terminal:
            return _CLEAR + text + self._standing.rpartition(b"\r")[2 if not self._standing.endswith(b"\r") else 0]
        self._standing = b""
        return b"\n" + text

    def _label(self, name: str, line: bytes) -> bytes:
        # A bar of another rank: its last drawing. A line may end with a carriage return and a line feed.
        shown = line.rstrip(b"\r").rpartition(b"\r")[2]
        return self._dim + f"[{name}]".encode() + self._plain + b" " + shown
