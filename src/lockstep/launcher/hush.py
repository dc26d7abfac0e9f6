"""Torch's C++ writes twenty lines of its own frames whenever a connection ends; the launcher says it in a sentence.

A private name of torch, checked on 2.13: ``c10::initLogging``, which reads TORCH_CPP_LOG_LEVEL anew. Where it is
gone, the lines are there again, and nothing else changes.
"""

import contextlib
import ctypes
import os
from pathlib import Path

import torch

_LEVEL = "TORCH_CPP_LOG_LEVEL"


def hush() -> None:
    """Let torch's C++ be silent in this process, unless the user has said how much it may write."""
    _set_level("FATAL")


def speak() -> None:
    """Let it write again, as it does by itself: in a rank, which was forked from a silent launcher."""
    _set_level("WARNING")


def _set_level(level: str) -> None:
    if _LEVEL in os.environ:
        return
    os.environ[_LEVEL] = level
    library = Path(torch.__file__).parent / "lib" / "libc10.so"
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(str(library))._ZN3c1011initLoggingEv()
    del os.environ[_LEVEL]
