"""The directory of a disk store: whose it is, of what format, and that one store alone has it."""

from __future__ import annotations

import json
import mmap
import os
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Any

from kvist.errors import ConfigError
from kvist.tiers.disk.checksums import XXH3, checksum_named, preferred_checksum
from kvist.tiers.disk.files import Files, read_fully, write_fully
from kvist.tiers.disk.segments import Geometry, Seal, aligned
from kvist.tiers.protocol import StoreFormat

__all__ = ["Directory", "overhead_bytes"]

FORMAT, LOCK, UNFINISHED, PROBE = "format", "lock", "format.new", "probe"
DISK_VERSION = 2
SEED_BYTES = 4
LOCK_BYTES = 20
MAX_FORMAT_BYTES = 1 << 20


def overhead_bytes(store_format: StoreFormat) -> int:
    """Return what the files beside the segments take at most, in whole pages: the lock, and what describes the format.

    >>> overhead_bytes(StoreFormat("a model", block_size=2, block_bytes=(4,)))
    8192
    """
    return aligned(LOCK_BYTES) + aligned(len(_told_of(store_format, XXH3)))


class Directory:
    """A directory that this store alone has, and that holds blocks of its format or none.

    Two stores never share one, in one process or in two: the index of each is in memory, so that a look-up costs no
    system call, and neither would see what the other evicts. The lock is the kernel's and ends with the process, so
    none is left behind by `kill -9`. What several machines or processes are to share belongs in a remote store.
    """

    def __init__(self, path: Path, store_format: StoreFormat, files: Files) -> None:
        self.path, self.files = path, files
        files.enter(path)
        self._locked: int | None = None
        try:
            self._check_contents()
            self._locked = self._lock()
            name = self._agree(store_format)
            files.close_to_others()
        except BaseException:
            self.close()
            raise
        self.checksum = checksum_named(name)
        seed = sha256(store_format.fingerprint + name.encode()).digest()[:SEED_BYTES]
        self.seal = Seal(self.checksum.whole, int.from_bytes(seed, "little"))

    def _check_contents(self) -> None:
        names = self.files.names()
        if names and not any(name in (FORMAT, LOCK, UNFINISHED) or Geometry.parse(name) for name in names):
            raise ConfigError([f"{self.path} is neither empty nor a store (it holds {names[0]!r}); give another"])

    def _lock(self) -> int:
        try:
            file = self.files.open(LOCK) if LOCK in self.files.names() else self.files.create(LOCK)
        except OSError as error:
            raise ConfigError([f"{self.path / LOCK} cannot be opened: {error.strerror}"]) from error
        try:
            self.files.lock(file)
        except OSError as error:
            problem = self._owner(file) if isinstance(error, BlockingIOError) else f"cannot be locked: {error.strerror}"
            self.files.close(file)
            raise ConfigError([f"{self.path} {problem}"]) from error
        with suppress(OSError):  # only for the message to others
            write_fully(self.files, file, [f"{os.getpid():<{LOCK_BYTES - 1}}\n".encode()], 0)
        return file

    def _owner(self, file: int) -> str:
        told, num_read = bytearray(LOCK_BYTES), 0
        with suppress(OSError):
            num_read = read_fully(self.files, file, [told], 0)
        process = told[:num_read].decode("ascii", "replace").strip() or "unknown"
        return f"is in use by a store of process {process}; close that, or give a directory to each"

    def _agree(self, store_format: StoreFormat) -> str:
        """Return the checksum that the directory has, after giving it the format or finding that it has it."""
        told = self._told()
        if told is None:
            checksum = preferred_checksum()
            self._tell(store_format, checksum)
            return checksum
        ours = {"disk": DISK_VERSION, "format": json.loads(store_format.describe())}
        theirs = {name: told.get(name) for name in ours}
        if theirs != ours:
            shown = [json.dumps(each, sort_keys=True) for each in (theirs, ours)]
            raise ConfigError(
                [f"{self.path} holds blocks of {shown[0]}, not of {shown[1]}; give another directory, or delete it"]
            )
        checksum_named(told["checksum"])
        return str(told["checksum"])

    def _told(self) -> dict[str, Any] | None:
        """What the format file says; None if it is missing or damaged, for records are sealed with the format, too."""
        try:
            file = self.files.open(FORMAT)
        except OSError:
            return None
        text = bytearray(min(self.files.num_bytes(file), MAX_FORMAT_BYTES))
        try:
            num_read = read_fully(self.files, file, [text], 0)
        except OSError as error:
            raise ConfigError([f"{self.path / FORMAT} cannot be read: {error.strerror}"]) from error
        finally:
            self.files.close(file)
        told, _, digest = bytes(text[:num_read]).partition(b"\n")
        if digest != _digest_line(told):
            return None
        found: dict[str, Any] = json.loads(told)
        return found

    def _tell(self, store_format: StoreFormat, checksum: str) -> None:
        try:
            self.remove(UNFINISHED)
            file = self.files.create(UNFINISHED)
            try:
                write_fully(self.files, file, [_told_of(store_format, checksum)], 0)
                self.files.sync(file)
            finally:
                self.files.close(file)
            self.files.rename(UNFINISHED, FORMAT)
            self.files.sync_names()
        except OSError as error:
            raise ConfigError([f"{self.path / FORMAT} cannot be written: {error.strerror}"]) from error

    def takes_direct(self) -> bool:
        """Whether files here can be written past the page cache: not on every file system."""
        try:
            self.remove(PROBE)
            self.files.close(self.files.create(PROBE))
            file = self.files.open(PROBE, direct=True)
            try:
                self.files.write(file, [memoryview(mmap.mmap(-1, mmap.PAGESIZE))], 0)
            finally:
                self.files.close(file)
        except (OSError, AttributeError):
            return False
        finally:
            with suppress(OSError):
                self.remove(PROBE)
        return True

    def remove(self, name: str) -> None:
        """Take a name away, if it is there."""
        with suppress(FileNotFoundError):
            self.files.remove(name)

    def close(self) -> None:
        """Let go of the lock and the directory."""
        if self._locked is not None:
            self.files.close(self._locked)
        self.files.leave()


def _told_of(store_format: StoreFormat, checksum: str) -> bytes:
    """What the format file says."""
    told = {"disk": DISK_VERSION, "checksum": checksum, "format": json.loads(store_format.describe())}
    text = json.dumps(told, sort_keys=True).encode()
    return text + b"\n" + _digest_line(text)


def _digest_line(text: bytes) -> bytes:
    return sha256(text).hexdigest().encode() + b"\n"
