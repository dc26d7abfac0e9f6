"""CRC-32, and copies that give it: in one pass where the C part is there, otherwise by zlib.

CRC-32 finds every flip of up to 32 bits in a row. It is no protection against forgery, but neither is any sum that
stands beside the file.
"""

import zlib

import numpy as np
from torch import Tensor

try:
    from lockstep.train.checkpoint import _sums
except ImportError:  # another processor than x86's, or installed without a C compiler
    _sums = None  # type: ignore[assignment]

WHILE_COPYING = _sums is not None
"""Whether a copy gives its sum in passing."""


def crc32(data: memoryview | bytes | bytearray, crc: int = 0) -> int:
    """Go on with a CRC-32, as ``zlib.crc32`` does at 1.2 GB/s; this one keeps up with the memory.

    Example:
        >>> crc32(b"sheep", crc32(b"two ")) == zlib.crc32(b"two sheep")
        True
    """
    if _sums is None or not data:
        return zlib.crc32(data, crc)
    return _sums.copy(0, np.frombuffer(data, np.uint8).ctypes.data, len(data), crc)


def copy(to: Tensor, source: Tensor, crc: int) -> int:
    """Copy bytes of the CPU's memory, and go on with a CRC-32 over them; needs `WHILE_COPYING`."""
    assert len(to) == len(source)
    return _sums.copy(to.data_ptr(), source.data_ptr(), len(source), crc)
