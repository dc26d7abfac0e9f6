"""Files and folders: written beside, synced, renamed; read only if they are plain files of the right size."""

import contextlib
import errno
import fcntl
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lockstep.train.checkpoint import keeping, sums
from lockstep.train.checkpoint.keeping import Name
from lockstep.train.checkpoint.manifest import DamagedError

_CHUNK = 1 << 22  # bytes summed while they are in the cache
_BLOCK = 1 << 12  # what direct writes are multiples of
_AT_ONCE = 1 << 26  # bytes of one direct write, in the middle of which nobody can be stopped
_DIRECT = getattr(os, "O_DIRECT", 0)


def write(path: Path, data: memoryview, crc: int | None = None) -> tuple[int, int]:
    """Write a new file and sync it; gives its size and its CRC-32.

    Args:
        path: The file.
        data: What goes into it. From memory that begins at a page it goes to the disk directly, where the file system
            allows that: otherwise it is copied once more, and pushes what others have read out of the system's memory.
        crc: Its sum, if it is known.
    """
    # What is written through a link would land outside.
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    try:
        whole = len(data) // _BLOCK * _BLOCK
        done = _write_directly(fd, data[:whole]) if whole > _CHUNK else 0
        while done < len(data):
            done += os.write(fd, data[done:])
        os.fsync(fd)
    finally:
        os.close(fd)
    return len(data), sums.crc32(data) if crc is None else crc


def _write_directly(fd: int, data: memoryview) -> int:
    """Write past the system's memory, as far as that goes; gives how many bytes."""
    done, usual = 0, fcntl.fcntl(fd, fcntl.F_GETFL)
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, usual | _DIRECT)
        while done < len(data):
            done += os.write(fd, data[done : done + _AT_ONCE])
    except OSError as error:
        if error.errno != errno.EINVAL:  # that it cannot do this is no failure
            raise
    finally:
        fcntl.fcntl(fd, fcntl.F_SETFL, usual)
    return done


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
            sum_ = sums.crc32(memoryview(chunk)[:count], sum_)
    if sum_ != crc:
        raise DamagedError(f"{path.name} is damaged: its checksum does not fit")
