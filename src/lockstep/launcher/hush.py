"""Torch's C++ writes twenty lines of its own frames whenever a connection ends; the launcher says it in a sentence.

A private name of torch, checked on 2.13: ``c10::initLogging``, which reads TORCH_CPP_LOG_LEVEL anew. Where it is
gone, the lines are there again, and nothing else changes.
"""

import ctypes
import os
from pathlib import Path

import torch

_LEVEL = "TORCH_CPP_LOG_LEVEL"


def hush() -> None:
    """Let torch's C++ be silent in this process, unless the user has said how much it may write."""
    if _LEVEL not in os.environ:
        os.environ[_LEVEL] = "FATAL"
        _read_level()
        del os.environ[_LEVEL]


def speak() -> None:
    """Let it write again as the environment says: in a rank, which was forked from a silent launcher."""
    _read_level()


def _read_level() -> None:
    library = Path(torch.__file__).parent / "lib" / "libc10.so"
    try:
        ctypes.CDLL(str(library))._ZN3c1011initLoggingEv()
    except (OSError, AttributeError):
        return
