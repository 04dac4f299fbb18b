"""Opens a trace of any kind: named as `kind:path`, or told by its content."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from kvist.errors import ArgumentError, TraceError
from kvist.lab.traces.conversations import NEEDS_TOKENIZER
from kvist.lab.traces.forms import FORMS, Form, Reading
from kvist.lab.traces.ordering import by_arrival, from_first
from kvist.lab.traces.problems import OnError, Problems
from kvist.lab.traces.requests import Request
from kvist.lab.traces.streams import Source

__all__ = ["KINDS", "FileTrace", "open_trace"]

KINDS = tuple(FORMS)


class FileTrace:
    """The requests of a file, read anew at each iteration, in the order of their arrival.

    `kind` is one of KINDS; `block_size` is that of hashed prompts, None where prompts are tokens. `problems` are those
    of the last pass: of lines that are malformed, counted by reason.
    """

    def __init__(self, form: Form, path: Path, on_error: OnError, reading: Reading, limit: int | None) -> None:
        self.kind, self.path, self.name = form.kind, path, path.name
        self.problems = Problems(on_error)
        self._on_error, self._reading, self._limit = on_error, reading, limit
        self.block_size: int | None = form.block_size(Source(path, Problems("skip")))

    def __iter__(self) -> Iterator[Request]:
        """Read the trace from its start; `problems` begin anew."""
        self.problems = Problems(self._on_error)
        source = Source(self.path, self.problems)
        form = FORMS[self.kind]  # not kept, so that a trace can be pickled, for processes that replay it
        requests = iter(form.read(source, self._reading))
        if not form.is_sorted:
            requests = by_arrival(requests, self.problems, self.path)
        if form.counts_from_first:
            requests = from_first(requests)
        return islice(requests, self._limit)

    def __repr__(self) -> str:
        return f"<{self.kind} trace {self.path}>"


def open_trace(
    spec: str | Path,
    *,
    on_error: OnError = "fatal",
    tokenizer: str | Path | None = None,
    limit: int | None = None,
    at_once: int = 16,
) -> FileTrace:
    """Open a trace, `kind:path` or a path alone, whose content then tells its kind; gz and zst are read as they are.

    With `on_error="skip"`, lines that are malformed are counted in the trace's `problems`; else the first one raises
    TraceError when it is read. `tokenizer` is a `tokenizer.json`, or the folder that it is in, for kinds that have
    text. `limit` is how many requests to give at most. Of sessions without a common clock, `at_once` go on side by
    side: when one ends, the next begins; of chats without any clock, so many take turns until all have ended.

    Raises:
        ArgumentError: an option is out of range.
        TraceError: there is no such file, it is empty or of no known kind, or needs a tokenizer.
    """
    if on_error not in ("skip", "fatal"):
        raise ArgumentError(f"on_error is {on_error!r}, must be 'skip' or 'fatal'")
    if limit is not None and limit < 0:
        raise ArgumentError(f"limit is {limit}, must be 0 or more")
    if at_once < 1:
        raise ArgumentError(f"at_once is {at_once}, must be 1 or more")
    form, path = _form_and_path(spec)
    reading = Reading(None if tokenizer is None else Path(tokenizer), at_once)
    if form.needs_tokenizer and tokenizer is None:
        raise TraceError(NEEDS_TOKENIZER, file=str(path))
    return FileTrace(form, path, on_error, reading, limit)


def _form_and_path(spec: str | Path) -> tuple[Form, Path]:
    """Part `kind:path`; a file of that whole name is taken as it is."""
    kind, _, rest = str(spec).partition(":")
    if isinstance(spec, str) and rest and kind in FORMS and not Path(spec).exists():
        return FORMS[kind], _existing(Path(rest))
    return _detected(_existing(Path(spec)))


def _existing(path: Path) -> Path:
    if path.is_dir():
        raise TraceError("is a folder; name the file", file=str(path))
    if not path.exists():
        raise TraceError(f"there is no such file; a kind before the path is one of {', '.join(KINDS)}", file=str(path))
    return path


def _detected(path: Path) -> tuple[Form, Path]:
    """Return the form that the first values of the file have, of the first lines that can be read."""
    source = Source(path, Problems("skip"))
    is_empty = True
    for _, value in source.heads():
        is_empty = False
        for form in FORMS.values():
            if form.matches(value):
                return form, path
    if is_empty:
        raise TraceError("is empty; there are no requests", file=str(path))
    raise TraceError(f"is of no known kind; name it as one of {', '.join(KINDS)}, before the path", file=str(path))
