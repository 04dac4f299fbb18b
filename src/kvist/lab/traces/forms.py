"""The forms of traces that can be read: how each is told by its content, and who reads it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvist.lab.traces import mooncake
from kvist.lab.traces.fields import Malformed
from kvist.lab.traces.requests import Request
from kvist.lab.traces.streams import Source

__all__ = ["FORMS", "Form", "Reading"]


@dataclass(frozen=True, slots=True)
class Reading:
    """How a trace is to be read, where it leaves a choice."""

    tokenizer: Path | None = None
    at_once: int = 16


@dataclass(frozen=True, slots=True)
class Form:
    """One form of traces.

    `matches` says of a JSON value, or of the bytes of a line that is none, whether it is of this form. `block_size_of`
    says it of one line of a hashed trace. What `may_be_unsorted` is sorted by arrival, within a window.
    """

    kind: str
    matches: Callable[[Any], bool]
    read: Callable[[Source, Reading], Iterable[Request]]
    block_size_of: Callable[[dict[str, Any]], int] | None = None
    needs_tokenizer: bool = False
    may_be_unsorted: bool = True

    def block_size(self, source: Source) -> int | None:
        """Return the block size of a hashed trace, as its first line of this form says it."""
        if self.block_size_of is None:
            return None
        for _, value in source.heads():
            if self.matches(value):
                try:
                    return self.block_size_of(value)
                except Malformed:
                    continue
        return None


def _forms() -> Iterator[Form]:
    yield Form("mooncake", mooncake.is_mooncake, lambda source, _: mooncake.read(source), mooncake.block_size_of)


FORMS = {form.kind: form for form in _forms()}
