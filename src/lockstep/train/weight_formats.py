"""Files of weights: safetensors, and what torch.save writes, read without running anything from them."""

import errno
import json
import os
import pickle
import re
import secrets
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lockstep.errors import UsageError

TORCH_ENDINGS = (".pt", ".pth", ".bin", ".ckpt")
SAFETENSORS_ENDING = ".safetensors"
_ZIP = b"PK\x03\x04"
_HEADER_LIMIT = 100_000_000  # bytes, the format's own


def writer_for(path: str, weights: Mapping[str, Any]) -> Callable[[str], None]:
    """Choose a format by a path's ending, and give what writes the weights to a path.

    Raises:
        UsageError: The ending is unknown, or the weights do not fit into the format.
    """
    ending = os.path.splitext(path)[1].lower()  # noqa: PTH122
    if ending == SAFETENSORS_ENDING:
        return _safetensors_writer(weights)
    if ending in TORCH_ENDINGS:
        return _torch_writer(weights)
    raise UsageError(f"{path}: the ending says the format. Write {SAFETENSORS_ENDING}, or one of {TORCH_ENDINGS}.")


def _safetensors_writer(weights: Mapping[str, Any]) -> Callable[[str], None]:
    from safetensors import SafetensorError
    from safetensors.torch import _TYPES, save_file  # _TYPES: checked on safetensors 0.8, a test fails when it moves

    kinds = set(_TYPES.values())
    first: dict[object, str] = {}
    tensors: dict[str, Tensor] = {}
    notes = {"format": "pt"}
    for name, value in weights.items():
        if not isinstance(value, Tensor) or value.layout != torch.strided or value.dtype not in kinds:
            what = f"{value.layout} {value.dtype} tensor" if isinstance(value, Tensor) else type(value).__name__
            raise UsageError(f"{name!r} is a {what}, which safetensors has no place for. Give the path the ending .pt.")
        same = first.setdefault(_place(value), name)
        if same == name:
            tensors[name] = value.detach().cpu().contiguous()
        else:
            notes[name] = same  # safetensors' own way to note a tied tensor; its load_model understands it too
    # What shares a storage without being one tensor gets its own.
    storages: set[int] = set()
    for name, tensor in tensors.items():
        where = tensor.untyped_storage().data_ptr()
        if where in storages or not _is_whole(tensor):
            tensors[name] = tensor.clone()
        storages.add(where)

    def write(path: str) -> None:
        try:
            save_file(tensors, path, notes)
        except SafetensorError as error:
            code = re.search(r"(?:os error|code:) (\d+)", str(error))
            if code is None:
                raise
            raise OSError(int(code[1]), os.strerror(int(code[1])), path) from error

    return write


def _torch_writer(weights: Mapping[str, Any]) -> Callable[[str], None]:
    copies: dict[object, Tensor] = {}

    def on_cpu(tensor: Tensor) -> Tensor:
        place = _place(tensor)
        if place not in copies:
            plain = tensor.detach().cpu()
            # A part of something larger would bring all of it into the file.
            copies[place] = plain if plain.layout != torch.strided or _is_whole(plain) else plain.clone()
        return copies[place]

    there = type(weights)(weights.items())  # type: ignore[call-arg]  # a dict or an OrderedDict
    for name, value in weights.items():
        if isinstance(value, Tensor):
            there[name] = on_cpu(value)  # type: ignore[index]
    if hasattr(weights, "_metadata"):
        there._metadata = weights._metadata  # type: ignore[attr-defined]  # versions of the modules' formats

    def write(path: str) -> None:
        # To a file of ours: torch's own says of a full disk only "unexpected pos".
        with open(path, "wb") as file:  # noqa: PTH123
            try:
                torch.save(there, file)
            except RuntimeError as error:
                raise (error.__context__ if isinstance(error.__context__, OSError) else error) from None

    return write


def _is_whole(tensor: Tensor) -> bool:
    return tensor.untyped_storage().nbytes() == tensor.numel() * tensor.itemsize


def _place(tensor: Tensor) -> object:
    """Equal for tensors that are one in memory."""
    if tensor.layout != torch.strided or tensor.is_quantized or not tensor.numel():
        return id(tensor)
    where = (tensor.untyped_storage().data_ptr(), tensor.storage_offset())
    return tensor.device, tensor.dtype, tensor.shape, tensor.stride(), where


def write_whole(path: str, write: Callable[[str], None]) -> None:
    """Write a file beside, sync it and rename it: there is the old file or the new one, never half of one."""
    target = Path(os.path.realpath(path))
    if target.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(target))
    beside = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
    # Made here and not by what writes: with the usual permissions, and never an existing file.
    os.close(os.open(beside, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
    mode = beside.stat().st_mode
    try:
        write(str(beside))
        beside.chmod(mode & 0o7777)
        _sync(beside)
        beside.replace(target)
        _sync(target.parent)
    finally:
        beside.unlink(missing_ok=True)


def _sync(path: Path) -> None:
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def read_whole(path: str) -> object:
    """Give what a file of either format holds, told by its first bytes: a dictionary, its tensors in the file's pages.

    Raises:
        UsageError: The file is damaged, is no such file, or holds objects that only its own code could rebuild.
        OSError: There is no such file, or it may not be read.
    """
    with Path(path).open("rb") as file:
        start = file.read(9)
    named = path.endswith(SAFETENSORS_ENDING) and start[:4] != _ZIP
    if named or (start[8:] == b"{" and int.from_bytes(start[:8], "little") <= _HEADER_LIMIT):
        return _read_safetensors(path)
    with _naming_what_is_wrong(path):
        return torch.load(path, map_location="cpu", weights_only=True, mmap=start[:4] == _ZIP)


def _read_safetensors(path: str) -> dict[str, Tensor]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (no mapping)
            notes = file.metadata() or {}
    except (SafetensorError, json.JSONDecodeError) as error:
        raise UsageError(f"{path} is damaged: {error}") from error
    return tensors | {name: tensors[same] for name, same in notes.items() if same in tensors and name != "format"}


@contextmanager
def _naming_what_is_wrong(path: str) -> Iterator[None]:
    try:
        yield
    except pickle.UnpicklingError as error:
        unsafe = _unsafe_names(path)
        if not unsafe:
            raise UsageError(f"{path} is damaged, or no file of weights: {str(error).splitlines()[0]}") from error
        allow = ", ".join(unsafe)
        raise UsageError(
            f"{path} holds more than weights: {allow}. To rebuild these, python would run code that the file names. If "
            f"you trust it, import them and write: with torch.serialization.safe_globals([{allow}]): "
            f"lockstep.load_weights(...)"
        ) from error
    except (RuntimeError, EOFError, ValueError, KeyError, zipfile.BadZipFile) as error:
        first = (str(error).splitlines() or [type(error).__name__])[0]
        raise UsageError(f"{path} is damaged, or no file of weights: {first}") from error


def _unsafe_names(path: str) -> list[str]:
    try:
        return sorted(torch.serialization.get_unsafe_globals_in_checkpoint(path))
    except (RuntimeError, ValueError, EOFError, pickle.UnpicklingError, KeyError, IndexError):  # not a zip file
        return []
