"""Files and folders: written beside, synced, renamed; read only if they are plain files of the right size."""

import contextlib
import os
import shutil
import stat
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lockstep.train.checkpoint import keeping
from lockstep.train.checkpoint.keeping import Name
from lockstep.train.checkpoint.manifest import DamagedError

_CHUNK = 1 << 22  # bytes summed while they are in the cache, then written


def write(path: Path, data: memoryview) -> tuple[int, int]:
    """Write a new file and sync it; gives its size and its CRC-32.

    CRC-32 is the fastest sum that python itself has (0.9 GB/s where SHA-256 does 0.4), and it finds every flip of up to
    32 bits in a row. It is no protection against forgery, but neither is any sum that stands beside the file.
    """
    crc = 0
    # What is written through a link would land outside.
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    try:
        for start in range(0, len(data), _CHUNK):
            chunk = data[start : start + _CHUNK]
            crc = zlib.crc32(chunk, crc)
            while chunk:
                chunk = chunk[os.write(fd, chunk) :]
        os.fsync(fd)
    finally:
        os.close(fd)
    return len(data), crc


def sync_folder(path: Path) -> None:
    """Make the names in a folder durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def make_directory(directory: Path) -> None:
    """Make a directory and those above it, durably."""
    missing = [path for path in (directory, *directory.parents) if not path.exists()]
    for path in reversed(missing):
        os.mkdir(path)  # noqa: PTH102  (all effects go through os: the tests make each of them fail)
        sync_folder(path.parent)


def begin(directory: Path, serial: int, step: int) -> Name:
    """Tidy up behind saves that were killed, and make the folder for a new one.

    Args:
        directory: Where checkpoints are.
        serial: The least number it gets.
        step: Goes into its name.
    """
    make_directory(directory)
    names = os.listdir(directory)  # noqa: PTH208
    for name in keeping.leftovers(names):
        discard(directory / name)
    newest = max((name.serial for name in keeping.read_names(names)), default=0)
    chosen = Name(max(newest + 1, serial), step)
    os.mkdir(directory / chosen.partial)  # noqa: PTH102
    return chosen


def publish(directory: Path, name: Name) -> None:
    """Give a folder that is written its name, durably; if that fails it is gone."""
    final = directory / str(name)
    sync_folder(directory / name.partial)
    os.rename(directory / name.partial, final)  # noqa: PTH104
    try:
        sync_folder(directory)
    except OSError:
        discard(final)
        raise


def remove(directory: Path, name: Name) -> None:
    """Remove a checkpoint; killed meanwhile, it leaves nothing that looks like one."""
    os.rename(directory / str(name), directory / name.gone)  # noqa: PTH104
    discard(directory / name.gone)


def discard(path: Path) -> None:
    """Remove a folder as far as that can be done."""
    with contextlib.suppress(OSError):
        shutil.rmtree(path, ignore_errors=True)


def list_directory(directory: Path) -> list[Name]:
    """Find the checkpoints of a directory, newest first; none if there is no such directory."""
    try:
        with os.scandir(directory) as entries:
            return keeping.read_names(entry.name for entry in entries if entry.is_dir(follow_symlinks=False))
    except FileNotFoundError:
        return []


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    """Open a plain file; not through a link, and without waiting where it is a pipe."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise DamagedError(f"{path.name} cannot be opened ({error.strerror})") from None
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise DamagedError(f"{path.name} is no plain file")
        yield fd
    except OSError as error:
        raise DamagedError(f"{path.name} cannot be read ({error.strerror})") from None
    finally:
        os.close(fd)


def read(path: Path, most: int) -> bytes:
    """Read a whole file of ``most`` bytes at most."""
    with _opened(path) as fd, open(fd, "rb", closefd=False) as file:
        size = os.fstat(fd).st_size
        if size > most:
            raise DamagedError(f"{path.name} has {size} bytes, more than the {most} that are read")
        return file.read(size)


def check(path: Path, size: int, crc: int) -> None:
    """Raise DamagedError unless a file is what was written."""
    with _opened(path) as fd:
        found = os.fstat(fd).st_size
        if found != size:
            raise DamagedError(f"{path.name} has {found} bytes, and {size} were written")
        chunk, sum_ = bytearray(_CHUNK), 0
        while count := os.readv(fd, [chunk]):
            sum_ = zlib.crc32(memoryview(chunk)[:count], sum_)
    if sum_ != crc:
        raise DamagedError(f"{path.name} is damaged: its checksum does not fit")
