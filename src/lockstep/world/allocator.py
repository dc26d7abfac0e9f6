"""Memory that a step on the CPU frees stays with the process, for the next step."""

import ctypes
import os

# Names and numbers of glibc's mallopt(3). It hands back what is free at the end of the heap above the first, by default
# at times as little as 128 KiB, and gets whatever is larger than the second, at first 128 KiB, from the kernel anew.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_KEPT = 1 << 30
_LARGEST_IN_HEAP = 32 << 20  # as much as glibc allows

_SAID_OTHERWISE = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_", "GLIBC_TUNABLES")


def keep_freed_memory() -> None:
    """Have glibc keep up to 1 GiB of freed memory, where the environment does not set its allocator.

    A training step frees what it has allocated, and the next one allocates the same. Handed back in between, each page
    costs a fault and is zeroed: 8 to 13 % of a small convolutional network's step (``benchmarks/allocator.py``), where
    the most memory ever used grew by 1 to 2 %. Other allocators, preloaded or of other systems, are left as they are.
    """
    if any(name in os.environ for name in _SAID_OTHERWISE):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if os.name == "posix" else None
    if mallopt is not None:
        mallopt(_TRIM_THRESHOLD, _KEPT)
        mallopt(_MMAP_THRESHOLD, _LARGEST_IN_HEAP)
