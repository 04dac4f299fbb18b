"""The system calls that a disk store makes, all on names in one directory; tests put failing ones in their place."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Sequence
from pathlib import Path

from kvist.errors import ConfigError

__all__ = ["Files", "read_fully", "write_fully"]

Buffer = memoryview | bytes | bytearray
OF_OTHERS = 0o077
MAX_BUFFERS = 1024
"""As many as Linux takes in one call."""


class Files:
    """The files of one directory, by name. All are 0600 and plain, and never reached through a link.

    A file under another name as well (a hard link) could lie outside, so it is refused like a symbolic link.
    """

    def enter(self, path: Path) -> None:
        """Make the directory if it is missing, and keep it open; raises `ConfigError` if it is not ours to write in."""
        if not hasattr(os, "preadv"):
            raise ConfigError(["a disk store needs a POSIX system, with preadv and pwritev"])
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.mkdir(mode=0o700, exist_ok=True)
            self._directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise ConfigError([f"{path} cannot be a store's directory: {error.strerror}; give another"]) from error
        self._claim(path)

    def _claim(self, path: Path) -> None:
        status = os.fstat(self._directory)
        if status.st_uid != os.geteuid() and os.geteuid():
            self.leave()
            raise ConfigError([f"{path} belongs to user {status.st_uid}, this process to {os.geteuid()}; give another"])

    def close_to_others(self) -> None:
        """Take the rights that others have on the directory."""
        if os.fstat(self._directory).st_mode & OF_OTHERS:
            os.fchmod(self._directory, 0o700)

    def leave(self) -> None:
        """Let go of the directory."""
        os.close(self._directory)

    def names(self) -> list[str]:
        """Return the names in the directory, sorted."""
        return sorted(os.listdir(self._directory))

    def open(self, name: str, *, direct: bool = False) -> int:
        """Open a file to read and write; raises OSError if it is missing, or anything but a plain file of one name."""
        return self._plain(name, os.O_DIRECT if direct else 0)

    def create(self, name: str) -> int:
        """Make a file that is not there yet, and open it to read and write."""
        return self._plain(name, os.O_CREAT | os.O_EXCL)

    def _plain(self, name: str, flags: int) -> int:
        flags |= os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        file = os.open(name, flags, 0o600, dir_fd=self._directory)
        status = os.fstat(file)
        if not stat.S_ISREG(status.st_mode) or status.st_nlink != 1:
            os.close(file)
            raise OSError(errno.EMLINK, "not a plain file of one name", name)
        if status.st_mode & OF_OTHERS:
            os.fchmod(file, 0o600)
        return file

    def num_bytes(self, file: int) -> int:
        """Return the length of an open file."""
        return os.fstat(file).st_size

    def lock(self, file: int) -> None:
        """Take the file's only lock, which ends with the process; raises BlockingIOError if somebody has it."""
        from fcntl import LOCK_EX, LOCK_NB, flock  # not on Windows, where `enter` has refused

        flock(file, LOCK_EX | LOCK_NB)

    def allocate(self, file: int, num_bytes: int) -> None:
        """Reserve room for so many bytes; raises OSError (ENOSPC) if there is none."""
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file, 0, num_bytes)
        else:  # pragma: no cover  (macOS)
            os.ftruncate(file, num_bytes)

    def read(self, file: int, buffers: Sequence[Buffer], offset: int) -> int:
        """Fill buffers from an offset on, as far as the system likes to, and return the number of bytes."""
        return os.preadv(file, buffers, offset)

    def write(self, file: int, buffers: Sequence[Buffer], offset: int) -> int:
        """Write buffers from an offset on, as far as the system likes to, and return the number of bytes."""
        return os.pwritev(file, buffers, offset)

    def expect(self, file: int, offset: int, num_bytes: int) -> None:
        """Have the system read ahead."""
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file, offset, num_bytes, os.POSIX_FADV_WILLNEED)

    def sync(self, file: int) -> None:
        """Wait until what was written to a file would survive a loss of power."""
        os.fsync(file)

    def sync_names(self) -> None:
        """Wait until names given and taken would survive a loss of power."""
        os.fsync(self._directory)

    def rename(self, name: str, new: str) -> None:
        """Give a file another name, in place of the file that has it."""
        os.rename(name, new, src_dir_fd=self._directory, dst_dir_fd=self._directory)

    def remove(self, name: str) -> None:
        """Take a name away."""
        os.unlink(name, dir_fd=self._directory)

    def close(self, file: int) -> None:
        """Close a file."""
        os.close(file)


def write_fully(files: Files, file: int, buffers: Sequence[Buffer], offset: int) -> None:
    """Write all bytes of at most `MAX_BUFFERS` buffers of bytes; raises OSError if it cannot."""
    rest = buffers
    while rest:
        num_bytes = files.write(file, rest, offset)
        if not num_bytes:
            raise OSError(errno.ENOSPC, "nothing more could be written")
        offset += num_bytes
        rest = beyond(rest, num_bytes)


def read_fully(files: Files, file: int, buffers: Sequence[Buffer], offset: int) -> int:
    """Fill at most `MAX_BUFFERS` buffers of bytes, and return how many: fewer only where the file ends."""
    rest, num_read = buffers, 0
    while rest:
        num_bytes = files.read(file, rest, offset + num_read)
        if not num_bytes:
            break
        num_read += num_bytes
        rest = beyond(rest, num_bytes)
    return num_read


def beyond(buffers: Sequence[Buffer], num_bytes: int) -> Sequence[Buffer]:
    """What is left of buffers of bytes after the first `num_bytes` of them.

    >>> [bytes(buffer) for buffer in beyond([b"abc", b"def"], 4)]
    [b'ef']
    """
    if num_bytes == sum(map(len, buffers)):
        return []
    for index, buffer in enumerate(buffers):
        if num_bytes < len(buffer):
            return [memoryview(buffer)[num_bytes:], *buffers[index + 1 :]]
        num_bytes -= len(buffer)
    return []
