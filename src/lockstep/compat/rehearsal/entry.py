"""A name of torch's and what stands in its place during a rehearsal."""

import pkgutil
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple


class Entry(NamedTuple):
    """One replacement.

    Attributes:
        owner: Where the name lives, such as ``"torch.cuda"`` or ``"torch:Tensor"``.
        name: The name.
        value: What stands there during a rehearsal.
    """

    owner: str
    name: str
    value: Any

    def __str__(self) -> str:
        """As people write it."""
        return f"{self.owner}.{self.name}".replace(":", ".")


_ABSENT = object()


def put_in_place(entries: Iterable[Entry]) -> Callable[[], None]:
    """Put every entry in its place.

    Returns:
        What undoes it all.

    Example:
        >>> import math
        >>> undo = put_in_place([Entry("math", "tau", 6)])
        >>> math.tau, undo(), round(math.tau, 2)
        (6, None, 6.28)
    """
    before = []
    for entry in entries:
        owner = pkgutil.resolve_name(entry.owner)
        # A class may only inherit the name; then undoing means taking ours away.
        before.append((owner, entry.name, vars(owner).get(entry.name, _ABSENT)))
        setattr(owner, entry.name, entry.value)

    def undo() -> None:
        for owner, name, value in reversed(before):
            if value is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, value)

    return undo
