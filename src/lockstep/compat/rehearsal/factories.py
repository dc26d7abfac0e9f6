"""Functions that make tensors: ``device="cuda"`` gives a CPU tensor that says cuda."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils._device import DeviceContext

from lockstep.compat.rehearsal.devices import CPU, Devices, mark, marked, name_of
from lockstep.compat.rehearsal.entry import Entry

NEW = (
    "arange", "asarray", "as_tensor", "bartlett_window", "blackman_window", "empty", "empty_permuted",
    "empty_strided", "eye", "full", "hamming_window", "hann_window", "kaiser_window", "linspace", "logspace",
    "normal", "rand", "randint", "randn", "randperm", "range", "scalar_tensor", "sparse_coo_tensor",
    "sparse_csr_tensor", "tensor", "tril_indices", "triu_indices", "zeros", "ones",
)  # fmt: skip
LIKE = ("empty_like", "full_like", "ones_like", "rand_like", "randint_like", "randn_like", "zeros_like")
METHODS = ("new_empty", "new_empty_strided", "new_full", "new_ones", "new_tensor", "new_zeros", "new")
FROM_HOST = ("from_numpy", "frombuffer")


def entries(devices: Devices) -> list[Entry]:
    """Every factory, and what decides on which device it makes tensors."""

    def usual(*args: Any) -> int | None:
        """An argument that is a tensor keeps its device, as in torch.as_tensor; else the default device."""
        if args and isinstance(args[0], Tensor):
            return marked(args[0])
        index = _in_context()
        return devices.usual if index is None else index

    def alike(*args: Any) -> int | None:
        return marked(args[0]) if args and isinstance(args[0], Tensor) else None

    def host(*_: Any) -> int:
        return CPU

    makers = [
        ("torch", NEW, usual),
        ("torch", LIKE, alike),
        ("torch:Tensor", METHODS, alike),
        ("torch", FROM_HOST, host),
    ]
    found = [
        Entry(owner, name, _maker(getattr(torch.Tensor if ":" in owner else torch, name), devices, otherwise))
        for owner, names, otherwise in makers
        for name in names
    ]
    return [*found, *_parameters(), *_defaults(devices)]


def _maker(function: Callable[..., Any], devices: Devices, otherwise: Callable[..., int | None]) -> Callable[..., Any]:
    @functools.wraps(function)
    def make(*args: Any, **kwargs: Any) -> Any:
        wanted = kwargs.get("device")
        kwargs.pop("pin_memory", None)
        if wanted is None:
            index = otherwise(*args)
        else:
            index = devices.index(wanted)
            if index is not None:
                kwargs["device"] = "cpu"
        made = function(*args, **kwargs)
        if index is None:
            return made
        if args and made is args[0] and marked(made) not in (None, index):  # torch.as_tensor(x, device="cuda")
            made = made.clone()
        return mark(made, index)

    # torch.jit.script finds what it may call by identity.
    builtins: Any = torch.jit._builtins
    name = builtins._find_builtin(function)
    if name is not None:
        builtins._register_builtin(make, name)
    return make


def _parameters() -> list[Entry]:
    """A parameter is where the tensor is that it was made of."""

    def in_front(make: Callable[..., Any]) -> Any:
        def new(cls: type, data: Any = None, *args: Any, **kwargs: Any) -> Any:
            made = make(cls, data, *args, **kwargs)
            index = marked(data) if isinstance(data, Tensor) else None
            return made if index is None else mark(made, index)

        return staticmethod(new)

    return [Entry("torch.nn:Parameter", "__new__", in_front(Parameter.__new__))]


def _defaults(devices: Devices) -> list[Entry]:
    set_type = torch.set_default_tensor_type

    def set_default_tensor_type(wanted: Any) -> None:
        name = wanted if isinstance(wanted, str) else f"{wanted.__module__}.{wanted.__name__}"
        devices.usual = devices.current if ".cuda." in name else CPU
        set_type(name.replace(".cuda.", "."))

    class Looks(type):
        def __instancecheck__(cls, thing: Any) -> bool:
            return isinstance(thing, DeviceContext)

    class Context(metaclass=Looks):
        """``with torch.device("cuda"):`` and ``torch.set_default_device``, for which torch makes this object."""

        def __new__(cls, device: Any) -> Any:
            index = devices.index(device)
            return DeviceContext(device) if index is None else _Usual(index)

    return [
        Entry("torch", "device", _numbered(torch.device)),
        Entry("torch", "set_default_tensor_type", set_default_tensor_type),
        Entry("torch.utils._device", "DeviceContext", Context),
    ]


def _numbered(plain: Any) -> Any:
    """``torch.device`` that takes a number for a CUDA device; without an accelerator torch's own refuses it."""

    class Looks(type):
        def __instancecheck__(cls, thing: Any) -> bool:
            return isinstance(thing, plain)

    class device(metaclass=Looks):  # noqa: N801  (torch's name)
        def __new__(cls, *args: Any, **kwargs: Any) -> Any:
            return plain("cuda", args[0]) if len(args) == 1 and type(args[0]) is int else plain(*args, **kwargs)

    device.__module__, device.__qualname__ = plain.__module__, plain.__qualname__
    return device


class _Usual(DeviceContext):
    """Stands in torch's stack of modes while ``with torch.device("cuda"):`` lasts; C++ takes it away again."""

    def __init__(self, index: int) -> None:
        super().__init__(name_of(index))
        self.index = index

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def _in_context() -> int | None:
    """The device of the innermost ``with torch.device(...)``."""
    stack = [torch._C._get_function_stack_at(i) for i in range(torch._C._len_torch_function_stack())]
    return next((mode.index for mode in reversed(stack) if isinstance(mode, _Usual)), None)
