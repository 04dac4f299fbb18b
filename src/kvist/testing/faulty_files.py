"""Files for a disk store that fail when told to: errors, short and torn writes, crashes, and a loss of power."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from kvist.tiers.disk.files import Buffer, Files

__all__ = ["Crash", "Fault", "FaultyFiles"]

SECTOR_BYTES = 512
"""What a disk writes whole or not at all."""


class Crash(BaseException):
    """The process would be dead here. No `except` for errors must hold it up, so it is none."""


@dataclass(slots=True)
class Fault:
    """What fails: calls of the method called `operation`, after `skip` of them, `times` times; `number` is an errno.

    With `short`, a write or read does not fail but stops after so many bytes.

    >>> Fault("write", errno.ENOSPC, skip=2)
    Fault(operation='write', number=28, skip=2, times=1, short=None)
    """

    operation: str
    number: int = errno.EIO
    skip: int = 0
    times: int = 1
    short: int | None = None

    def strikes(self, operation: str) -> bool:
        """Whether this call is one that fails; counts it."""
        if operation != self.operation:
            return False
        self.skip -= 1
        return -self.times <= self.skip < 0


@dataclass(frozen=True, slots=True)
class Write:
    """A write that only the page cache has: before and after, from `offset` on in a file."""

    file: int
    offset: int
    old: bytes
    new: bytes


class FaultyFiles(Files):
    """The files of one directory, with faults.

    `faults` strike in turn. A crash comes at the change (allocation, write, sync, rename, removal, new file) of number
    `crash_at`, counted from 0: of a write, `torn` of its bytes, from 0 to 1, are in the file then, and all later calls
    crash as well. `num_changes` says how many there were. `bury` closes what a dead process would leave open.

    What is opened for direct I/O goes through the page cache all the same, so that writes may be torn at any byte.
    """

    def __init__(self, *faults: Fault, crash_at: int | None = None, torn: float = 0.0) -> None:
        self.faults = list(faults)
        self.crash_at, self.torn = crash_at, torn
        self.num_changes = 0
        self.is_dead = False
        self._open: set[int] = set()
        self._unsynced: list[Write] = []

    def bury(self) -> None:
        """Close all files as the end of a process does; only then others can open the directory."""
        for file in self._open:
            os.close(file)
        self._open.clear()
        Files.leave(self)

    def cut_power(self, chance: Random) -> None:
        """Die, and lose any of the writes that were not synced, or sectors of them."""
        self.is_dead = True
        for write in reversed(self._unsynced):
            os.pwrite(write.file, write.old, write.offset)
        for write in self._unsynced:
            for begin in range(0, len(write.new), SECTOR_BYTES):
                if chance.random() < 0.5:
                    os.pwrite(write.file, write.new[begin : begin + SECTOR_BYTES], write.offset + begin)

    def write(self, file: int, buffers: Sequence[Buffer], offset: int) -> int:
        """Write, or fail, or write less than was asked for."""
        fault = self._struck("write")
        data = b"".join(buffers)
        if self._is_crash():
            os.pwrite(file, data[: int(self.torn * len(data))], offset)
            self._die()
        if fault is not None:
            data = data[: fault.short]
        old = os.pread(file, len(data), offset)
        self._unsynced.append(Write(file, offset, old.ljust(len(data), b"\0"), data))
        return os.pwrite(file, data, offset)

    def read(self, file: int, buffers: Sequence[Buffer], offset: int) -> int:
        """Read, or fail, or read less than was asked for."""
        fault = self._struck("read")
        if fault is None or fault.short is None:
            return super().read(file, buffers, offset)
        return super().read(file, [memoryview(buffers[0])[: fault.short]], offset)

    def create(self, name: str) -> int:
        """Make a file, or fail."""
        self._change("create")
        return self._opened(super().create(name))

    def open(self, name: str, *, direct: bool = False) -> int:
        """Open a file, or fail."""
        self._struck("open_direct" if direct else "open")
        file = self._opened(super().open(name, direct=direct))
        if direct:
            from fcntl import F_GETFL, F_SETFL, fcntl  # not on Windows, where `enter` has refused

            fcntl(file, F_SETFL, fcntl(file, F_GETFL) & ~os.O_DIRECT)
        return file

    def allocate(self, file: int, num_bytes: int) -> None:
        """Reserve room, or fail."""
        self._change("allocate")
        super().allocate(file, num_bytes)

    def sync(self, file: int) -> None:
        """Write a file out, or fail."""
        self._change("sync")
        self._unsynced = [write for write in self._unsynced if write.file != file]

    def sync_names(self) -> None:
        """Write the directory out, or fail."""
        self._change("sync_names")

    def rename(self, name: str, new: str) -> None:
        """Give another name, or fail."""
        self._change("rename")
        super().rename(name, new)

    def remove(self, name: str) -> None:
        """Take a name away, or fail."""
        self._change("remove")
        super().remove(name)

    def close(self, file: int) -> None:
        """Close a file; the dead close nothing."""
        if not self.is_dead:
            self._open.discard(file)
            self._unsynced = [write for write in self._unsynced if write.file != file]
            super().close(file)

    def leave(self) -> None:
        """Let go of the directory; the dead do not."""
        if not self.is_dead:
            super().leave()

    def _opened(self, file: int) -> int:
        self._open.add(file)
        return file

    def _change(self, operation: str) -> None:
        self._struck(operation)
        if self._is_crash():
            self._die()

    def _struck(self, operation: str) -> Fault | None:
        if self.is_dead:
            raise Crash
        fault = next((fault for fault in self.faults if fault.strikes(operation)), None)
        if fault is not None and fault.short is None:
            raise OSError(fault.number, os.strerror(fault.number))
        return fault

    def _is_crash(self) -> bool:
        self.num_changes += 1
        return self.num_changes - 1 == self.crash_at

    def _die(self) -> None:
        self.is_dead = True
        raise Crash
