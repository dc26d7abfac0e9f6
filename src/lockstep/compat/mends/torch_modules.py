"""Modules, and names in modules, that went from torch."""

import collections.abc
import importlib.abc
import importlib.util
import math
import queue
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

from lockstep.compat.mends.row import Mend, Note, Put, Undo, missing_attribute, module, replacement

_SIX = {
    "PY2": False,
    "PY3": True,
    "PY37": True,
    "inf": math.inf,
    "nan": math.nan,
    "string_classes": (str, bytes),
    "int_classes": int,
    "container_abcs": collections.abc,
    "queue": queue,
    "imap": map,
    "FileNotFoundError": FileNotFoundError,
    "istuple": lambda x: isinstance(x, tuple),
    "iteritems": lambda d, **more: iter(d.items(**more)),
    "itervalues": lambda d, **more: iter(d.values(**more)),
    "iterkeys": lambda d, **more: iter(d.keys(**more)),
}


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Asked last, when nobody else has the module."""

    def __init__(self, name: str, contents: dict[str, object] | None, note: Note) -> None:
        self._name, self._contents, self._note = name, contents, note

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        del path, target
        if fullname != self._name:
            return None
        self._note()
        return importlib.util.spec_from_loader(fullname, self)

    def exec_module(self, module: ModuleType) -> None:
        contents = self._contents
        if contents is None:  # torch.distributed.deprecated: what is there under its present name
            contents = vars(importlib.import_module(self._name.rpartition(".")[0]))
        module.__dict__.update({name: value for name, value in contents.items() if not name.startswith("__")})


def _missing_module(name: str, contents: dict[str, object] | None) -> Put:
    def put(note: Note) -> Undo:
        finder = _Finder(name, contents, note)
        sys.meta_path.append(finder)

        def undo() -> None:
            sys.meta_path.remove(finder)
            sys.modules.pop(name, None)
            parent, _, last = name.rpartition(".")
            vars(sys.modules[parent]).pop(last, None)

        return undo

    return put


def _next(_: object, note: Note) -> object:
    def next_of(self: object) -> object:
        note()
        return next(self)  # type: ignore[call-overload]

    return next_of


MENDS = (
    Mend(
        old="torch._six",
        gone="torch 2.0",
        today="str, int, math.inf, collections.abc: Python's own names",
        example="from torch._six import container_abcs, string_classes, int_classes, inf\n"
        "assert isinstance({}, container_abcs.Mapping) and isinstance('', string_classes) and inf > 1",
        put=_missing_module("torch._six", _SIX),
    ),
    Mend(
        old="torch.distributed.deprecated",
        gone="torch 1.2",
        today="torch.distributed",
        example="import torch.distributed.deprecated as dist\nassert dist.init_process_group",
        put=_missing_module("torch.distributed.deprecated", None),
    ),
    Mend(
        old="torch.utils.model_zoo",
        gone="torch 1.6, without an import of its own",
        today="torch.hub.load_state_dict_from_url",
        example="import torch, sys\n"
        "vars(torch.utils).pop('model_zoo', None), sys.modules.pop('torch.utils.model_zoo', None)\n"
        "assert torch.utils.model_zoo.load_url",
        put=missing_attribute("torch.utils", "model_zoo", module("torch.utils.model_zoo")),
    ),
    Mend(
        old="torch.utils.data.dataloader._DataLoaderIter",
        gone="torch 1.2",
        today="iter(loader); its class is private",
        example="from torch.utils.data.dataloader import _DataLoaderIter\n"
        "assert isinstance(iter(__import__('torch').utils.data.DataLoader([1])), _DataLoaderIter)",
        put=missing_attribute(
            "torch.utils.data.dataloader",
            "_DataLoaderIter",
            lambda: module("torch.utils.data.dataloader")()._BaseDataLoaderIter,
        ),
    ),
    Mend(
        old="iter(loader).next()",
        gone="torch 1.13",
        today="next(iter(loader))",
        example="import torch\nassert iter(torch.utils.data.DataLoader([7])).next().tolist() == [7]",
        put=replacement(lambda: module("torch.utils.data.dataloader")()._BaseDataLoaderIter, "next", _next),
    ),
)
