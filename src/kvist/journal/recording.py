"""Writes the calls of a manager to a file: a head, and a line of JSON for each call.

A line is `[call, arguments, options, outcome]`. All but the outcome is written before the call is made, so that the
last line tells which call never returned; the outcome is what the call took from elsewhere, and what it raised.
"""

from __future__ import annotations

import os
import sys
from importlib.metadata import PackageNotFoundError, version
from os import PathLike
from types import TracebackType
from typing import Any, BinaryIO, Self

import numpy as np

from kvist.core.matching import Pin
from kvist.core.sequences import Sequence
from kvist.errors import SequenceError
from kvist.journal.settings import write_config
from kvist.journal.taps import taps_of
from kvist.journal.values import Names, Values, compact
from kvist.manager import KVCacheManager

__all__ = ["FORMAT", "Journal", "made_by"]

FORMAT = 1
BUFFER_BYTES = 1 << 18


class Journal:
    """Records every call of one manager in a file, from the moment that it is attached.

    With `survives`, each call is with the operating system before it is made, so that a process that is killed leaves
    all of them; without, calls are written in pieces, which costs less. `digest_every` calls, and when it is closed, it
    notes the manager's digest, which a replay must come to. The file has the prompts' token ids, and neither text nor
    directories, hosts or credentials; if it is made, it is its owner's alone (0600).

    >>> from tempfile import TemporaryDirectory
    >>> from kvist import AttentionSpec, CacheConfig
    >>> from kvist.journal import replay
    >>> manager = KVCacheManager(CacheConfig([AttentionSpec(2, 64)], block_size=4, num_blocks=8))
    >>> with TemporaryDirectory() as folder:
    ...     with Journal(f"{folder}/calls.jsonl").attach(manager):
    ...         sequence = manager.add_sequence([1, 2, 3, 4, 5])
    ...         manager.commit([sequence])
    ...     again = replay(f"{folder}/calls.jsonl")
    >>> again.num_calls, again.manager.digest() == manager.digest()
    (3, True)
    """

    def __init__(self, path: str | PathLike[str], *, survives: bool = True, digest_every: int = 0) -> None:
        self._path = path
        self._file: BinaryIO | None = None
        self._survives, self._digest_every = survives, digest_every
        self._values = Values(Names())
        self._outcome: dict[str, Any] = {}
        self._manager: KVCacheManager | None = None
        self._started = b""
        self.num_calls, self._digest_at = 0, digest_every

    def attach(self, manager: KVCacheManager) -> Self:
        """Begin with a manager on which nothing runs; it forgets what is cached. Returns the journal.

        Raises SequenceError while sequences run or pins hold.
        """
        if self._manager is not None:
            raise SequenceError("the journal is attached already")
        head = {
            "kvist journal": FORMAT,
            "versions": {"kvist": _own_version(), "numpy": np.__version__, "python": sys.version.split()[0]},
            "byteorder": sys.byteorder,
            "has_memory": manager.memory is not None,
            "config": write_config(manager.config),
        }
        file = open(  # noqa: SIM115  # it is closed with the journal
            self._path, "wb", buffering=BUFFER_BYTES, opener=_opened_for_its_owner
        )
        try:
            taps_of(manager).add(self)
        except BaseException:
            file.close()
            raise
        file.write(f"{compact(head)}\n".encode())
        file.flush()
        self._manager, self._file = manager, file
        return self

    def close(self) -> None:
        """Note the digest, write all, and let go of the manager; a second time does nothing."""
        if self._manager is None or self._file is None or self._file.closed:
            return
        try:
            self._manager.digest()
        finally:
            self.cut()

    def cut(self) -> None:
        """Let go of the manager as it is, without asking for its digest: after a call that may have broken it."""
        if self._manager is not None and self._file is not None and not self._file.closed:
            taps_of(self._manager).remove(self)
            self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -- what the taps tell -------------------------------------------------------------------------------------------

    def begin(self, call: str, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        """Write a call that is about to be made."""
        write = self._values.write
        told = compact([call, list(map(write, arguments)), {name: write(value) for name, value in options.items()}])
        self._outcome = {}
        self._started = f"{told[:-1]},".encode()
        if self._survives and call != "take_moves":
            self._write(self._started)
            self._started = b""

    def note(self, what: str, value: Any) -> None:
        """Keep what a call has taken from elsewhere."""
        self._outcome.setdefault(what, []).append(value)

    def end(self, call: str, result: Any, error: BaseException | None) -> None:
        """Write how a call has ended."""
        if call == "take_moves" and not result and error is None:  # asked at each step, and nothing has changed
            return
        for made in made_by(result):
            self._values.names.add(made)
        if error is not None:
            self._outcome["raised"] = type(error).__name__
        elif call == "digest":
            self._outcome["digest"] = result
        outcome = compact(self._outcome).encode() if self._outcome else b"{}"
        self._write(b"%b%b]\n" % (self._started, outcome))
        self.num_calls += 1

    def rest(self) -> None:
        """Note the digest, where it is due."""
        if self._digest_every and self.num_calls >= self._digest_at and self._manager is not None:
            self._digest_at = self.num_calls + 1 + self._digest_every
            self._manager.digest()

    def _write(self, told: bytes) -> None:
        assert self._file is not None
        self._file.write(told)
        if self._survives:
            self._file.flush()


def made_by(result: Any) -> list[Sequence | Pin]:
    """List the sequences and pins that a call has returned, with their beams, in order."""
    if type(result) is Sequence:
        return [result] if result._beams is None else [*result.beams]
    if type(result) is Pin:
        return [result]
    if type(result) is list and result and type(result[0]) is Sequence:
        return [made for each in result for made in made_by(each)]
    return []


def _own_version() -> str:
    """Return the version that is installed; source that is run as it lies has none."""
    try:
        return version("kvist")
    except PackageNotFoundError:
        return "not installed"


def _opened_for_its_owner(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
