"""The forms of traces that can be read: how each is told by its content, and who reads it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvist.lab.traces import captures, journals, mooncake, openai, recorded, sessions, text, tokens
from kvist.lab.traces.conversations import Tokenizing
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
    says it of one line of a hashed trace. What is not `is_sorted` is sorted by arrival, within a window; where the form
    `counts_from_first`, arrivals are times since 1970, and that of the first request becomes 0.
    """

    kind: str
    matches: Callable[[Any], bool]
    read: Callable[[Source, Reading], Iterable[Request]]
    block_size_of: Callable[[dict[str, Any]], int] | None = None
    needs_tokenizer: bool = False
    is_sorted: bool = False
    counts_from_first: bool = False

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
    """Yield the forms, those first that are told most surely."""
    yield Form("kvist", recorded.is_recorded, lambda source, _: recorded.read(source), recorded.block_size_of)
    yield Form("journal", journals.is_journal, lambda source, _: journals.read(source))
    yield Form("mooncake", mooncake.is_mooncake, lambda source, _: mooncake.read(source), mooncake.block_size_of)
    yield Form(
        "sessions",
        sessions.is_session,
        lambda source, reading: sessions.read(source, reading.at_once),
        sessions.block_size_of,
        is_sorted=True,
    )
    yield Form("trtllm-events", captures.is_trtllm, lambda source, _: captures.read(source, "trtllm"))
    yield Form("kvist-events", captures.is_kvist, lambda source, _: captures.read(source, "kvist"))
    yield Form("vllm-events", captures.is_vllm, lambda source, _: captures.read(source, "vllm"))
    yield Form("openai", openai.is_openai, _read_openai, counts_from_first=True)
    yield Form("tokens", tokens.is_tokens, lambda source, _: tokens.read(source))
    yield Form("text", text.is_text, _read_text, needs_tokenizer=True)


def _read_openai(source: Source, reading: Reading) -> Iterable[Request]:
    return openai.read(source, lambda: Tokenizing(reading.tokenizer, source.path))


def _read_text(source: Source, reading: Reading) -> Iterable[Request]:
    return text.read(source, Tokenizing(reading.tokenizer, source.path), reading.at_once)


FORMS = {form.kind: form for form in _forms()}
