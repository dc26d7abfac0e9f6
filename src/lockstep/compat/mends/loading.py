"""What torch.load refuses today: files of a GPU where there is none, and harmless classes beside the tensors."""

import argparse
import datetime
import functools
import pathlib
import pickle
from typing import Any

from lockstep.compat.mends.row import Mend, Note, module, replacement
from lockstep.errors import UsageError

TRUST = "--trust-checkpoints"


def _map_to_cpu(original: Any, note: Note) -> Any:
    @functools.wraps(original)
    def load(f: Any, map_location: Any = None, *args: Any, **named: Any) -> Any:
        start = _tell(f)
        try:
            return original(f, map_location, *args, **named)
        except RuntimeError as error:
            if map_location is not None or "Attempting to deserialize object on a CUDA" not in str(error):
                raise
            note()
            _back(f, start)
            return original(f, "cpu", *args, **named)

    return load


def _harmless() -> dict[str, Any]:
    """Classes whose making runs no code of the file's, by the names that files have for them."""
    import numpy as np

    plain = [argparse.Namespace, datetime.datetime, datetime.date, datetime.timedelta]
    plain += [pathlib.PosixPath, pathlib.PurePosixPath, np.ndarray, np.dtype]
    found: dict[str, Any] = {f"{kind.__module__}.{kind.__qualname__}": kind for kind in plain}
    found |= {f"builtins.{kind.__name__}": kind for kind in (list, dict, int, float, set, tuple, str, complex, bool)}
    for home in ("numpy.core.multiarray", "numpy._core.multiarray"):
        for name in ("scalar", "_reconstruct"):
            found[f"{home}.{name}"] = getattr(np._core.multiarray, name)  # type: ignore[attr-defined]
    return found


def _dtype_kinds() -> list[Any]:
    import numpy as np

    return [kind for kind in vars(np.dtypes).values() if isinstance(kind, type)]


def _allow_harmless(original: Any, note: Note) -> Any:
    @functools.wraps(original)
    def load(f: Any, *args: Any, **named: Any) -> Any:
        start = _tell(f)
        try:
            return original(f, *args, **named)
        except pickle.UnpicklingError:
            import torch

            needed = unsafe_names(f, start)
            harmless = _harmless()
            if not needed or not all(name in harmless for name in needed):
                raise
            note()
            _back(f, start)
            # numpy's kinds of dtype stand in no file by name, but torch asks for them as it makes a dtype.
            kinds = [kind for kind in _dtype_kinds() if any(name.startswith("numpy.") for name in needed)]
            with torch.serialization.safe_globals([*kinds, *((harmless[name], name) for name in needed)]):
                return original(f, *args, **named)

    return load


def naming_the_classes(original: Any) -> Any:
    """Have torch.load say which classes a file needs, and how to allow them."""

    @functools.wraps(original)
    def load(f: Any, *args: Any, **named: Any) -> Any:
        start = _tell(f)
        try:
            return original(f, *args, **named)
        except pickle.UnpicklingError as error:
            needed = [name for name in unsafe_names(f, start) if name not in _harmless()]
            if not needed:
                raise
            what = f if isinstance(f, (str, pathlib.Path)) else "the file"
            raise UsageError(
                f"torch.load: to read {what}, python would run code that it names: {', '.join(needed)}. If you trust "
                f"the file, run the script with {TRUST}, or write torch.load(..., weights_only=False) in it."
            ) from error

    return load


def trusting(original: Any) -> Any:
    """Have torch.load read everything unless the script says otherwise, as it did before torch 2.6."""

    @functools.wraps(original)
    def load(f: Any, *args: Any, **named: Any) -> Any:
        if named.get("weights_only") is None:
            named["weights_only"] = False
        return original(f, *args, **named)

    return load


def unsafe_names(f: Any, start: int | None) -> list[str]:
    """The classes and functions in a file that torch does not know as harmless; empty where that can't be read."""
    import torch

    try:
        _back(f, start)
        return sorted(torch.serialization.get_unsafe_globals_in_checkpoint(f))
    except (RuntimeError, ValueError, EOFError, pickle.UnpicklingError):  # files of before torch 1.6
        return []


def _tell(f: Any) -> int | None:
    return f.tell() if hasattr(f, "seek") else None


def _back(f: Any, start: int | None) -> None:
    if start is not None:
        f.seek(start)


MENDS = (
    Mend(
        old="torch.load of a GPU's file without map_location, where there is no GPU",
        gone="the beginning",
        today='torch.load(path, map_location="cpu")',
        example="import io, torch\n"
        "registry, file = torch.serialization._package_registry, io.BytesIO()\n"
        "registry.insert(0, (0, lambda storage: 'cuda:0', lambda storage, where: None))\n"
        "torch.save(torch.ones(2), file)\n"
        "del registry[0]\n"
        "file.seek(0)\n"
        "assert torch.load(file).tolist() == [1.0, 1.0]",
        put=replacement(module("torch"), "load", _map_to_cpu),
    ),
    Mend(
        old="torch.load of a Namespace, numpy numbers and other harmless things",
        gone="torch 2.6",
        today="torch.serialization.add_safe_globals([argparse.Namespace, ...]), and save plain values",
        example="import argparse, datetime, io, numpy, pathlib, torch\n"
        "made = {'args': argparse.Namespace(lr=0.1), 'best': numpy.float64(0.5), 'scores': numpy.arange(3)}\n"
        "made |= {'at': datetime.datetime(2019, 1, 1), 'where': pathlib.Path('/data')}\n"
        "file = io.BytesIO()\n"
        "torch.save(made, file)\n"
        "file.seek(0)\n"
        "loaded = torch.load(file)\n"
        "assert loaded['args'].lr == 0.1 and loaded['best'] == 0.5 and loaded['scores'].tolist() == [0, 1, 2]\n"
        "assert loaded['at'].year == 2019 and loaded['where'] == pathlib.Path('/data')",
        put=replacement(module("torch"), "load", _allow_harmless),
    ),
)
