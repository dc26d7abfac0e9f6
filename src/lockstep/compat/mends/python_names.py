"""Names that went from Python's own modules."""

import collections.abc
import inspect
import time

from lockstep.compat.mends.row import Mend, missing_attribute

_ABSTRACT = (
    "Callable",
    "Container",
    "Hashable",
    "ItemsView",
    "Iterable",
    "Iterator",
    "KeysView",
    "Mapping",
    "MappingView",
    "MutableMapping",
    "MutableSequence",
    "MutableSet",
    "Sequence",
    "Set",
    "Sized",
    "ValuesView",
)


def _abstract(name: str) -> Mend:
    return Mend(
        old=f"collections.{name}",
        gone="Python 3.10",
        today=f"collections.abc.{name}",
        example=f"import collections, collections.abc\nassert collections.{name} is collections.abc.{name}",
        put=missing_attribute("collections", name, lambda: getattr(collections.abc, name)),
    )


def _getargspec(function: object) -> tuple[object, ...]:
    found = inspect.getfullargspec(function)
    return found.args, found.varargs, found.varkw, found.defaults


MENDS = (
    *map(_abstract, _ABSTRACT),
    Mend(
        old="inspect.getargspec",
        gone="Python 3.11",
        today="inspect.getfullargspec or inspect.signature",
        example="import inspect\nassert inspect.getargspec(lambda a, b=1: 0) == (['a', 'b'], None, None, (1,))",
        put=missing_attribute("inspect", "getargspec", lambda: _getargspec),
    ),
    Mend(
        old="time.clock",
        gone="Python 3.8",
        today="time.perf_counter or time.process_time",
        example="import time\nassert time.clock() <= time.clock()",
        put=missing_attribute("time", "clock", lambda: time.perf_counter),
    ),
)
