"""OpenTelemetry spans, where `opentelemetry-api` is installed; where it is not, nothing happens, at little cost."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from types import TracebackType
from typing import Any, Protocol, Self

__all__ = ["NO_TRACING", "OpenTelemetryTracing", "Span", "Tracing", "tracing"]

Value = str | bool | int | float | Sequence[str] | Sequence[int] | Sequence[float]
"""What OpenTelemetry takes as an attribute."""


class Span(Protocol):
    """Something that takes time: it begins, is told what it was about, and ends."""

    def note(self, **attributes: Value) -> None:
        """Add attributes; their names get the prefix `kvist.`."""

    def event(self, name: str, **attributes: Value) -> None:
        """Say that something has happened now."""

    def child(self, name: str, **attributes: Value) -> Span:
        """Return a span that is a part of this one, and which its caller ends."""

    def end(self, error: BaseException | None = None) -> None:
        """End it, for an error if there is one; ending twice is fine."""


class Tracing(Protocol):
    """Where spans come from."""

    def span(self, name: str, **attributes: Value) -> AbstractContextManager[Span]:
        """Return a span around a `with` block; those begun inside it are its children."""

    def begin(self, name: str, **attributes: Value) -> Span:
        """Return a span that its caller ends, such as a request's, which outlives a step."""


class _NoSpan:
    """A span that is not recorded."""

    __slots__ = ()

    def note(self, **attributes: Value) -> None:
        pass

    def event(self, name: str, **attributes: Value) -> None:
        pass

    def child(self, name: str, **attributes: Value) -> _NoSpan:
        return self

    def end(self, error: BaseException | None = None) -> None:
        pass

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass


_NO_SPAN = _NoSpan()


class _NoTracing:
    """Records nothing."""

    __slots__ = ()

    def span(self, name: str, **attributes: Value) -> _NoSpan:
        return _NO_SPAN

    def begin(self, name: str, **attributes: Value) -> _NoSpan:
        return _NO_SPAN


NO_TRACING: Tracing = _NoTracing()
"""Records nothing."""


class _RecordedSpan:
    """A span of OpenTelemetry."""

    __slots__ = ("_span", "_tracer")

    def __init__(self, span: Any, tracer: Any) -> None:
        self._span, self._tracer = span, tracer

    def note(self, **attributes: Value) -> None:
        self._span.set_attributes(_named(attributes))

    def event(self, name: str, **attributes: Value) -> None:
        self._span.add_event(name, _named(attributes))

    def child(self, name: str, **attributes: Value) -> _RecordedSpan:
        from opentelemetry.trace import set_span_in_context

        inside = set_span_in_context(self._span)
        return _RecordedSpan(self._tracer.start_span(name, context=inside, attributes=_named(attributes)), self._tracer)

    def end(self, error: BaseException | None = None) -> None:
        if not self._span.is_recording():
            return
        if error is not None:
            from opentelemetry.trace import Status, StatusCode

            self._span.record_exception(error)
            self._span.set_status(Status(StatusCode.ERROR, str(error)))
        self._span.end()


class OpenTelemetryTracing:
    """Records spans with a tracer of OpenTelemetry; the application chooses where they go."""

    def __init__(self, tracer: Any) -> None:
        self._tracer = tracer

    @contextmanager
    def span(self, name: str, **attributes: Value) -> Iterator[Span]:
        """Return a span around a `with` block; an exception that leaves it is recorded."""
        with self._tracer.start_as_current_span(name, attributes=_named(attributes)) as span:
            yield _RecordedSpan(span, self._tracer)

    def begin(self, name: str, **attributes: Value) -> Span:
        """Return a span that its caller ends; it is a child of the current one."""
        return _RecordedSpan(self._tracer.start_span(name, attributes=_named(attributes)), self._tracer)


def tracing(name: str = "kvist") -> Tracing:
    """Return what records spans under the name of a library, or what records nothing, without OpenTelemetry.

    >>> with tracing().span("kvist.step", num_tokens=3) as span:
    ...     span.note(num_cached_tokens=2)
    """
    try:
        from opentelemetry import trace
    except ModuleNotFoundError:
        return NO_TRACING
    return OpenTelemetryTracing(trace.get_tracer(name))


def _named(attributes: dict[str, Value]) -> dict[str, Value]:
    return {f"kvist.{name}": value for name, value in attributes.items()}
