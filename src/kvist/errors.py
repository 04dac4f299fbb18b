"""Every error that Kvist raises: each says what was asked, what is true, and what to do."""

from typing import Any

__all__ = [
    "ArgumentError",
    "ArgumentTypeError",
    "ConfigError",
    "InvariantError",
    "KvistError",
    "LayoutError",
    "NeverFits",
    "OutOfBlocks",
    "OutOfRows",
    "SequenceError",
    "StaleMatch",
    "TraceError",
    "TransferError",
    "WireError",
]


class KvistError(Exception):
    """The root of all errors of this library."""


class ArgumentError(KvistError, ValueError):
    """An argument has a value that no state of the cache could accept."""


class ArgumentTypeError(ArgumentError, TypeError):
    """An argument has a type that is not accepted."""


class ConfigError(KvistError, ValueError):
    """Settings that contradict each other or make no sense; `problems` lists all of them."""

    def __init__(self, problems: list[str]) -> None:
        self.problems = problems
        super().__init__("; ".join(problems))


class OutOfBlocks(KvistError, RuntimeError):
    """The call does not fit now, and could once others have ended.

    Counts are blocks of `group`: `needed` by the call, `free` (never used or given back), `evictable` (cached and
    unreferenced, without those that the call itself would reuse), `held` (in use by sequences and pins).
    """

    def __init__(self, message: str, *, needed: int, free: int, evictable: int, held: int, group: int = 0) -> None:
        self.needed, self.free, self.evictable, self.held, self.group = needed, free, evictable, held, group
        super().__init__(message)


class OutOfRows(OutOfBlocks):
    """All `max_sequences` rows are taken; counts are rows."""


class NeverFits(KvistError, ValueError):
    """The call would not fit even in an empty cache."""


class SequenceError(KvistError, ValueError):
    """The call does not fit the state of the sequence: freed, not computed that far, named twice, ..."""


class StaleMatch(KvistError, ValueError):
    """A match was used after what it found had been evicted."""


class LayoutError(KvistError, ValueError):
    """This view or copy cannot be made of this storage; the message says which can."""


class TransferError(KvistError, OSError):
    """A copy failed: tier, key, cause.

    `sequences` lists the running ones that had to be suspended, since a copy that failed was to bring what they had.
    """

    sequences: tuple[Any, ...] = ()


class WireError(KvistError, ValueError):
    """Not a message of this protocol: field, expected, got."""


class TraceError(KvistError, ValueError):
    """A trace cannot be read, or a line of it: `file`, `line` (1 the first, 0 for the file as a whole), `reason`."""

    def __init__(self, reason: str, *, file: str = "", line: int = 0) -> None:
        self.reason, self.file, self.line = reason, file, line
        place = f"{file}:{line}: " if line else f"{file}: " if file else ""
        super().__init__(f"{place}{reason}")


class InvariantError(KvistError, AssertionError):
    """`check()` found the books wrong; `problems` lists what, and who holds it."""

    def __init__(self, problems: list[str]) -> None:
        self.problems = problems
        super().__init__("\n".join(problems))
