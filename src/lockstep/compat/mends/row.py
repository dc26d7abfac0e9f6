"""What a mend is, and the two ways of putting one in place."""

import importlib
import sys
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol


class Note(Protocol):
    """Called where a mend is used, before it acts."""

    def __call__(self, place: str = "") -> None:
        """Note the line that led here, or another place."""
        ...


Undo = Callable[[], None]

Put = Callable[[Note], Undo]


class Mend(NamedTuple):
    """One row of the table.

    Attributes:
        old: What people wrote.
        gone: Since when it does not work.
        today: What to write instead.
        example: A program that stops without the mend and runs with it.
        put: Puts it in place; gives what takes it away again.
        sign: A regular expression: the mend is on a path that many steps take, so it is put in place only if a script's
            text has this. Empty: always.
    """

    old: str
    gone: str
    today: str
    example: str
    put: Put
    sign: str = ""


def missing_attribute(module: str, name: str, value: Callable[[], Any]) -> Put:
    """Answer for a name that a module does not have. What it has stays as it is, and as quick.

    Args:
        module: The module's name; it is imported.
        name: The missing name.
        value: Gives what stands for it.
    """

    def put(note: Note) -> Undo:
        space = vars(importlib.import_module(module))
        before = space.get("__getattr__")

        def look_up(wanted: str) -> Any:
            if wanted == name:
                note()
                return value()
            if before is not None:
                return before(wanted)
            raise AttributeError(f"module {module!r} has no attribute {wanted!r}")

        space["__getattr__"] = look_up

        def undo() -> None:
            if before is None:
                del space["__getattr__"]
            else:
                space["__getattr__"] = before

        return undo

    return put


_ABSENT = object()


def replacement(owner: Callable[[], Any], name: str, make: Callable[[Any, Note], Any]) -> Put:
    """Put something in place of an attribute.

    Args:
        owner: Gives the class or module.
        name: The attribute; it may be missing.
        make: Gives the new value from the old one (None if it is missing) and the note.
    """

    def put(note: Note) -> Undo:
        where = owner()
        before = vars(where).get(name, _ABSENT)  # a class may only inherit it; then undoing takes ours away
        setattr(where, name, make(getattr(where, name, None), note))

        def undo() -> None:
            if before is _ABSENT:
                delattr(where, name)
            else:
                setattr(where, name, before)

        return undo

    return put


def module(name: str) -> Callable[[], Any]:
    """Give a module by its name, past a function that its package has of the same name."""

    def find() -> Any:
        importlib.import_module(name)
        return sys.modules[name]

    return find
