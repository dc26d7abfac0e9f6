"""Dense tensors to bytes and back."""

import math
import mmap
import zlib
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from lockstep.errors import UsageError
from lockstep.train.checkpoint import sums
from lockstep.train.checkpoint.manifest import DamagedError
from lockstep.train.checkpoint.shares import Extent, Piece
from lockstep.train.checkpoint.trees import MalformedError, dtype_of

COMPARED = 1 << 15
"""Bytes up to which ranks compare a tensor before each writes its share: what may differ between them is small, such as
running statistics and the states of random number generators."""


class Held(NamedTuple):
    """A dense tensor of a state.

    Attributes:
        extent: Name, dtype, shape as it lies in memory.
        flat: Its bytes in that order: uint8, one dimension; no copy where that can be avoided.
        order: How the dimensions lie in memory; None if as they are counted.
        cuda: Whether it is on a GPU.
        compared: Whether ranks compare it.
    """

    extent: Extent
    flat: Tensor
    order: list[int] | None
    cuda: bool
    compared: bool

    def entry(self, pieces: list[list[str]]) -> dict[str, Any]:
        """What the manifest says of it."""
        shape = list(self.extent.shape)
        return {"dtype": self.extent.dtype, "shape": shape, "order": self.order, "cuda": self.cuda, "pieces": pieces}


class Collection:
    """The tensors of one part, each once: those that share their memory have one name.

    Args:
        buffers: Memory addresses of tensors that ranks compare whatever their size.
    """

    def __init__(self, buffers: frozenset[int] = frozenset()) -> None:
        self.held: dict[str, Held] = {}
        self._buffers = buffers
        self._known: dict[tuple[Any, ...], str] = {}

    def put(self, tensor: Tensor, path: str) -> str:
        """Take a tensor; gives its name."""
        key = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        known = self._known.get(key) if tensor.numel() else None
        if known is not None:
            return known
        name = path if "/" in path else f"{path}/"
        while name in self.held:  # keys 1 and "1" of one dict
            name += "'"
        self.held[name] = hold(name, tensor, tensor.data_ptr() in self._buffers)
        self._known[key] = name
        return name


def hold(name: str, tensor: Tensor, compared: bool = False) -> Held:
    """Look at a dense tensor as bytes.

    Example:
        >>> held = hold("x", torch.tensor([[1, 2], [3, 4]], dtype=torch.uint8).T)
        >>> held.flat, held.order
        (tensor([1, 2, 3, 4], dtype=torch.uint8), [1, 0])
    """
    plain = tensor.resolve_conj().resolve_neg()
    order = None
    if not plain.is_contiguous():
        order = sorted(range(plain.ndim), key=plain.stride, reverse=True)
        if plain.permute(order).is_contiguous():
            plain = plain.permute(order)
        else:  # with holes, or overlapping
            order, plain = None, plain.contiguous()
    try:
        flat = plain.reshape(-1).view(torch.uint8)
    except RuntimeError as error:
        raise UsageError(f"{name}: a tensor of {tensor.dtype} cannot be saved ({error}).") from None
    dtype = str(tensor.dtype).removeprefix("torch.")
    extent = Extent(name, dtype, tuple(plain.shape), tensor.element_size())
    return Held(extent, flat, order, tensor.is_cuda, compared or len(flat) <= COMPARED)


def digest(held: Held) -> int:
    """A number that tells tensors apart, with all that the manifest says of them."""
    facts = repr((held.extent, held.order, held.cuda)).encode()
    return zlib.crc32(memoryview(held.flat.cpu().numpy()), zlib.crc32(facts))  # type: ignore[arg-type]


class Filled(NamedTuple):
    """A file that is ready to be written.

    Attributes:
        data: Its bytes.
        crc: Their CRC-32; None if it has not been taken while they were copied.
    """

    data: Tensor
    crc: int | None


class Buffer:
    """Memory that a rank's share is copied to, used again by the next save; pinned for copies from a GPU."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    def fill(self, pieces: list[Piece], held: Mapping[str, Held], head: bytes) -> Filled:
        """Copy a file's beginning and its pieces; comes back once they are there.

        Args:
            pieces: What to copy, in the file's order.
            held: The tensors.
            head: The beginning.
        """
        size = len(head) + sum(piece.size for piece in pieces)
        cuda = any(held[piece.extent.name].cuda for piece in pieces)
        if len(self._memory) < size or (cuda and not self._memory.is_pinned()):
            self._memory = torch.empty(0, dtype=torch.uint8)  # the old one first: never two of them
            self._memory = torch.empty(size, dtype=torch.uint8, pin_memory=True) if cuda else _whole_pages(size)
        memory = self._memory[:size]
        memory[: len(head)] = torch.frombuffer(bytearray(head), dtype=torch.uint8)
        summed = sums.WHILE_COPYING and all(held[piece.extent.name].flat.is_cpu for piece in pieces)
        crc, at = sums.crc32(head), len(head)
        for piece in pieces:
            start = piece.start * piece.extent.itemsize
            source = held[piece.extent.name].flat[start : start + piece.size]
            target = memory[at : at + piece.size]
            if summed:
                crc = sums.copy(target, source, crc)
            else:
                target.copy_(source, non_blocking=True)
            at += piece.size
        if cuda:
            torch.cuda.synchronize()  # the loop goes on to change what is being copied
        return Filled(memory, crc if summed else None)


def _whole_pages(size: int) -> Tensor:
    """Memory that begins at a page, as direct writes need it; processes that are forked from here do without it."""
    at_once = getattr(mmap, "MAP_POPULATE", 0)  # page by page, in the middle of the copy, it takes half as long again
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | at_once)
    if hasattr(mmap, "MADV_DONTFORK"):
        pages.madvise(mmap.MADV_DONTFORK)
    return torch.frombuffer(pages, dtype=torch.uint8)


class Opened(Protocol):
    """An open safetensors file."""

    def get_tensor(self, name: str) -> Tensor:
        """Give a tensor."""
        ...

    def get_slice(self, name: str) -> Any:
        """Look at a tensor without reading it."""
        ...


def read(name: str, entry: dict[str, Any], opened: Mapping[str, Opened], device: torch.device) -> Tensor:
    """Read a tensor that the manifest describes.

    Memory is taken only once its size is that of the bytes in the files.

    Args:
        name: Its name.
        entry: What `Held.entry` gave.
        opened: The files.
        device: Where it goes if it comes from a GPU and this is one.

    Raises:
        DamagedError: The files do not hold what is described.
    """
    try:
        dtype = dtype_of(entry["dtype"])
        shape, itemsize = entry["shape"], dtype.itemsize
        sizes = [_bytes_of(opened[file].get_slice(key)) for file, key in entry["pieces"]]
        if sum(sizes) != math.prod(shape) * itemsize:
            raise DamagedError(
                f"tensor {name!r} is described with {shape} elements of {dtype}, and has {sum(sizes)} bytes"
            )
        parts = [opened[file].get_tensor(key).reshape(-1).view(torch.uint8) for file, key in entry["pieces"]]
        whole = torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8)  # a copy: not the file's own memory
        tensor = whole.view(dtype).reshape(shape) if len(whole) else torch.empty(shape, dtype=dtype)
        order = entry["order"]
        if order is not None:
            tensor = tensor.permute([order.index(dimension) for dimension in range(len(order))])
    except (
        MalformedError,
        ValueError,
        TypeError,
        RuntimeError,
        OverflowError,
        KeyError,
        _safetensors_error(),
    ) as error:
        raise DamagedError(f"tensor {name!r}: {error}"[:300]) from None
    return tensor.to(device) if entry["cuda"] is True and device.type == "cuda" else tensor


def _bytes_of(found: Any) -> int:
    size: int = math.prod(found.get_shape()) * _SIZES[found.get_dtype()]
    return size


_SIZES = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "F16": 2, "BF16": 2, "I16": 2} | dict.fromkeys(
    ("I8", "U8", "BOOL", "F8_E4M3", "F8_E5M2"), 1
)


def _safetensors_error() -> type[Exception]:
    from safetensors import SafetensorError

    return SafetensorError
