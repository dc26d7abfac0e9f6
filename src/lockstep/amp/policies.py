"""How a function is wrapped so that its arguments are cast, and which functions are: apex's lists and the user's."""

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any, Protocol

import torch
from torch import Tensor

from lockstep.amp import lists
from lockstep.amp.levels import HALF_TYPES

_LISTS = (list, tuple)  # torch 2.9's compiler does not know types joined by |
# What autocast does on a CUDA device and torch 2.9 to 2.14 do not on a CPU.
_NOT_ON_CPU = frozenset(["mv", "addmv", "addr"])


class Casting(Protocol):
    """What a wrapper asks at every call."""

    half: torch.dtype
    devices: tuple[str, ...]

    def on(self) -> bool:
        """Whether to cast."""
        ...

    def by_autocast(self) -> bool:
        """Whether autocast is casting."""
        ...

    def disabled(self) -> Any:
        """A context without casts."""
        ...

    def in_backward(self) -> Any:
        """A context for torch's backward formulas."""
        ...


Wrap = Callable[[Casting, Any], Any]


def to_half(value: Any, half: torch.dtype) -> Any:
    """Floating tensors as ``half``; so are those in lists and tuples that hold nothing else."""
    if isinstance(value, Tensor):
        return value.to(half) if value.is_floating_point() and value.dtype != half else value
    return _inside(value, lambda item: to_half(item, half))


def as_autocast(value: Any, half: torch.dtype) -> Any:
    """The same, but float64 stays, as it does under autocast."""
    if isinstance(value, Tensor):
        return value if value.dtype == torch.float64 else to_half(value, half)
    return _inside(value, lambda item: as_autocast(item, half))


def to_float(value: Any) -> Any:
    """Half tensors as float32; so are those in lists and tuples of floating tensors."""
    if isinstance(value, Tensor):
        return value.float() if value.dtype in HALF_TYPES else value
    return _inside(value, to_float)


def _inside(value: Any, cast: Callable[[Any], Any]) -> Any:
    if type(value) in (list, tuple) and value and _all_floating(value):
        return type(value)([cast(item) for item in value])
    return value


def _all_floating(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.is_floating_point()
    return isinstance(value, _LISTS) and bool(value) and all(map(_all_floating, value))


def _types(values: Any) -> set[torch.dtype]:
    found: set[torch.dtype] = set()
    for value in values:
        if isinstance(value, Tensor):
            if value.is_floating_point():
                found.add(value.dtype)
        elif isinstance(value, _LISTS) and _all_floating(value):
            found |= _types(value)
    return found


def _call(function: Any, cast: Callable[[Any], Any], args: Any, kwargs: Any) -> Any:
    if not kwargs:
        return function(*[cast(arg) for arg in args])
    given = kwargs.get("out")
    kwargs = {key: cast(value) for key, value in kwargs.items()}
    result = function(*[cast(arg) for arg in args], **kwargs)
    if not isinstance(given, Tensor) or kwargs["out"] is given:
        return result
    written = kwargs["out"]  # of another type: what the user holds must have the values, and the shape, too
    with torch.no_grad():
        given.resize_(written.shape).copy_(written)
    return given if result is written else result


def half_policy(casts: Casting, function: Any) -> Any:
    """Arguments become half. One of torch's own functions then runs in half whatever autocast thinks of it."""
    own = not str(getattr(function, "__module__", None) or "torch").startswith("torch")

    @functools.wraps(function)
    def in_half(*args: Any, **kwargs: Any) -> Any:
        if not casts.on():
            return function(*args, **kwargs)
        if own:
            return _call(function, lambda value: to_half(value, casts.half), args, kwargs)
        with casts.disabled():
            return _call(function, lambda value: to_half(value, casts.half), args, kwargs)

    return in_half


def float_policy(casts: Casting, function: Any) -> Any:
    """Arguments become float32, and nothing is cast inside."""

    @functools.wraps(function)
    def in_float(*args: Any, **kwargs: Any) -> Any:
        if not casts.on():
            return function(*args, **kwargs)
        with casts.disabled():
            return _call(function, to_float, args, kwargs)

    return in_float


def promote_policy(casts: Casting, function: Any) -> Any:
    """Arguments become float32 where half and float32 meet; any other mixture is left to torch."""

    @functools.wraps(function)
    def promoted(*args: Any, **kwargs: Any) -> Any:
        if casts.on() and _mixed(args, kwargs):
            return _call(function, to_float, args, kwargs)
        return function(*args, **kwargs)

    return promoted


def _mixed(args: Any, kwargs: Any) -> bool:
    types = _types((*args, *kwargs.values()))
    return torch.float32 in types and not types.isdisjoint(HALF_TYPES) and len(types) == 2


POLICIES: dict[str, Wrap] = {"half": half_policy, "float": float_policy, "promote": promote_policy}


def listed_half(casts: Casting, function: Any) -> Any:
    """A function of the half list: autocast casts, but not in a backward that a user wrote."""

    @functools.wraps(function)
    def cast(*args: Any, **kwargs: Any) -> Any:
        if not casts.on() or casts.by_autocast():
            return function(*args, **kwargs)
        return _call(function, lambda value: as_autocast(value, casts.half), args, kwargs)

    return cast


def listed_half_always(casts: Casting, function: Any) -> Any:
    """A function of the half list that autocast does not know here."""

    @functools.wraps(function)
    def cast(*args: Any, **kwargs: Any) -> Any:
        if not casts.on():
            return function(*args, **kwargs)
        return _call(function, lambda value: as_autocast(value, casts.half), args, kwargs)

    return cast


def listed_float(casts: Casting, function: Any) -> Any:
    """A function of the float list."""

    @functools.wraps(function)
    def cast(*args: Any, **kwargs: Any) -> Any:
        if not casts.on():
            return function(*args, **kwargs)
        return _call(function, to_float, args, kwargs)

    return cast


def listed_in_place(casts: Casting, function: Any) -> Any:
    """A method that writes into its first argument: the others take its type."""

    @functools.wraps(function)
    def cast(target: Tensor, *args: Any, **kwargs: Any) -> Any:
        if not casts.on():
            return function(target, *args, **kwargs)
        return _call(functools.partial(function, target), lambda value: to_half(value, target.dtype), args, kwargs)

    return cast


def listed_recurrent(casts: Casting, function: Any) -> Any:
    """A recurrent layer or cell: input and hidden state become half, the weights are left to autocast and its cache."""

    @functools.wraps(function)
    def cast(x: Any, second: Any, *args: Any, **kwargs: Any) -> Any:
        if not casts.on():
            return function(x, second, *args, **kwargs)
        x = as_autocast(x, casts.half)
        if args and isinstance(second, Tensor) and not second.is_floating_point():  # lengths: a packed sequence
            return function(x, second, as_autocast(args[0], casts.half), *args[1:], **kwargs)
        return function(x, as_autocast(second, casts.half), *args, **kwargs)

    return cast


def listed_promotion(casts: Casting, function: Any) -> Any:
    """A function that autocast promotes on a CUDA device: it runs in the widest type, and nothing is cast inside."""

    @functools.wraps(function)
    def promoted(*args: Any, **kwargs: Any) -> Any:
        if not casts.on():
            return function(*args, **kwargs)
        with casts.disabled():
            return _call(function, to_float, args, kwargs) if _mixed(args, kwargs) else function(*args, **kwargs)

    return promoted


def listed_backward(casts: Casting, function: Any) -> Any:
    """Torch's engine: its formulas run in the types of the forward, whoever starts a backward and where."""

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        with casts.in_backward():
            return function(*args, **kwargs)

    return run


# What to put back: where, which name, what was there (`_ABSENT`: it was inherited).
_ABSENT = object()
_changed: list[tuple[Any, str, Any]] = []
# The user's registrations, last one last.
_registrations: dict[tuple[int, str], tuple[Any, str, str]] = {}


def registered(casts: Casting, module: Any, name: str, policy: str) -> None:
    """Remember a registration; if casting is on already, put it in place.

    Raises:
        ValueError: There is no such function.
    """
    if not hasattr(module, name):
        raise ValueError(f"No function named {name} in module {module}.")
    _registrations.pop((id(module), name), None)
    _registrations[id(module), name] = (module, name, policy)
    if casts.devices:
        uninstall()
        install(casts)


def install(casts: Casting) -> None:
    """Wrap the user's functions, then those of the lists around them."""
    users = set()
    for module, name, policy in _registrations.values():
        _replace(module, name, functools.partial(POLICIES[policy], casts))
        users.add((id(module), name))
    for table in lists.ALL:
        _install_table(casts, table, users)
    for module, names in lists.PROMOTED_BY_CUDA:
        for name in names:
            _replace(module, name, functools.partial(listed_promotion, casts))
    for name in lists.RECURRENT:
        _replace(torch._VF, name, functools.partial(listed_recurrent, casts))
    for name in lists.IN_PLACE:
        _replace(torch.Tensor, name, functools.partial(listed_in_place, casts))
    # What backward() and grad() of torch.autograd call, wherever they were taken from. Private; in torch 2.9 to 2.14.
    _replace(torch.autograd, "_engine_run_backward", functools.partial(listed_backward, casts))


def _install_table(casts: Casting, table: lists.Overrides, users: set[tuple[int, str]]) -> None:
    module = table.MODULE
    for name in table.FP16_FUNCS:
        missing = name in _NOT_ON_CPU and "cpu" in casts.devices
        wrap = listed_half_always if missing or (id(module), name) in users else listed_half
        _replace(module, name, functools.partial(wrap, casts))
    for name in (*table.FP32_FUNCS, *(name for name, _ in table.BANNED_FUNCS)):
        _replace(module, name, functools.partial(listed_float, casts))
    for name in (*table.CASTS, *table.SEQUENCE_CASTS):
        if name not in lists.NATIVE_PROMOTION:
            _replace(module, name, functools.partial(promote_policy, casts))


def uninstall() -> None:
    """Put everything back."""
    while _changed:
        module, name, before = _changed.pop()
        if before is _ABSENT:
            delattr(module, name)
        else:
            setattr(module, name, before)


def _replace(module: Any, name: str, wrap: Callable[[Any], Any]) -> None:
    function = getattr(module, name, None)
    if function is None:
        return
    _changed.append((module, name, vars(module).get(name, _ABSENT) if hasattr(module, "__dict__") else function))
    wrapped = wrap(function)
    if isinstance(module, ModuleType):  # where pickle finds it; torch's own say another place
        wrapped.__module__, wrapped.__qualname__ = module.__name__, name
    setattr(module, name, wrapped)
