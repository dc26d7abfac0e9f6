"""What several ranks print, put together for one terminal or file: whole lines, and a bar left whole. Pure."""

_CLEAR = b"\r\x1b[K"
_DIM, _PLAIN = b"\x1b[2m", b"\x1b[0m"
_LONGEST = 1 << 20
"""Bytes of an unfinished line that are kept; a longer one goes out in pieces."""


class Screen:
    r"""One place that is written to.

    One rank, the owner, has it as if it were alone: its bytes come out as they are. Lines of others come whole, with
    their rank in front. On a terminal the owner's bytes pass at once, so that bars, prompts and cursor codes work,
    and when a line of another rank comes while the owner stands in the middle of one, that is wiped and drawn again
    below. In a file the owner's lines are kept until they are whole, or `release` says that it has waited long enough.

    Example:
        >>> screen = Screen(terminal=False)
        >>> screen.own(b"step 1, lo"), screen.other("err", "rank 1", b"careful\n"), screen.own(b"ss 0.5\n")
        (b'', b'[rank 1] careful\n', b'step 1, loss 0.5\n')
    """

    def __init__(self, terminal: bool, colour: bool = False) -> None:
        self._terminal = terminal
        self._dim, self._plain = (_DIM, _PLAIN) if colour else (b"", b"")
        self._standing = b""  # what the owner has on the line where the cursor is
        self._kept = b""
        self._unfinished: dict[object, bytes] = {}

    @property
    def keeps(self) -> bool:
        """Whether the owner has given something that is not written yet."""
        return bool(self._kept)

    def own(self, data: bytes) -> bytes:
        """Take bytes of the owner; give what to write."""
        data, self._kept = self._kept + data, b""
        if not self._terminal and len(data) < _LONGEST:
            end = max(data.rfind(b"\n"), data.rfind(b"\r")) + 1
            data, self._kept = data[:end], data[end:]
        self._stand(data)
        return data

    def release(self) -> bytes:
        """Give what was kept of the owner's, line or not."""
        data, self._kept = self._kept, b""
        self._stand(data)
        return data

    def settle(self) -> bytes:
        """End the owner's line where it stands, for something that must come after it."""
        data = self.release()
        if self._standing:
            self._standing = b""
            return data + b"\n"
        return data

    def other(self, who: object, name: str, data: bytes) -> bytes:
        """Take bytes of another rank's stream ``who``; give what to write, which is nothing until a line is whole."""
        *lines, rest = (self._unfinished.get(who, b"") + data).split(b"\n")
        if len(rest) > _LONGEST:
            lines, rest = [*lines, rest], b""
        self._unfinished[who] = rest
        return self.lines([self._label(name, line) for line in lines])

    def finish(self, who: object, name: str) -> bytes:
        """The stream has ended: give what of it was no whole line yet."""
        rest = self._unfinished.pop(who, b"")
        return self.lines([self._label(name, rest)]) if rest else b""

    def lines(self, lines: list[bytes]) -> bytes:
        """Give whole lines, set beside what the owner has standing."""
        text = b"".join(line + b"\n" for line in lines)
        if not text or not self._standing:
            return text
        if self._terminal:
            return _CLEAR + text + self._standing
        self._standing = b""
        return b"\n" + text

    def _stand(self, data: bytes) -> None:
        line = (self._standing + data).rpartition(b"\n")[2]
        # Of a bar only its newest drawing; a carriage return at the end has drawn nothing yet.
        drawn, back = line.rstrip(b"\r"), b"\r" * line.endswith(b"\r")
        self._standing = (drawn.rpartition(b"\r")[2] + back)[-_LONGEST:]

    def _label(self, name: str, line: bytes) -> bytes:
        # A bar of another rank: its last drawing. A line may end with a carriage return and a line feed.
        shown = line.rstrip(b"\r").rpartition(b"\r")[2]
        return self._dim + f"[{name}]".encode() + self._plain + b" " + shown
