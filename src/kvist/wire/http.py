"""Answers `GET /kv_cache_events`: events as JSON, to clients that ask for them and wait.

| parameter | |
|---|---|
| `timeout_s` | how long to wait for the first event; default 0, at most `max_wait_s` |
| `max_events` | at most so many |
| `after` | `start`, or what `Kvist-Next` of the last answer said: the events after these, for each client its own |

Without `after`, an answer has the events that no such answer had before, as TensorRT-LLM's server does: each goes to
one client, once. `Kvist-Num-Lost` counts the events before those of the answer that were not kept long enough.
"""

from __future__ import annotations

import json
import logging
import secrets
import socket
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import islice
from math import isfinite
from threading import Condition, Lock, Semaphore, Thread
from time import monotonic
from types import TracebackType
from typing import Any, Self, cast
from urllib.parse import parse_qsl, urlsplit

from kvist.core.events import Event
from kvist.errors import ArgumentError
from kvist.wire.publishing import Encode, EventSource, Pump

__all__ = ["EventServer", "HttpLimits"]

_log = logging.getLogger("kvist.wire")

PATH = "/kv_cache_events"
_MAX_URL_BYTES = 2048
_MAX_BODY_BYTES = 65536
_BUSY = b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\nConnection: close\r\nRetry-After: 1\r\n\r\n"


@dataclass(frozen=True, slots=True)
class HttpLimits:
    """What a server keeps, and lets clients take.

    The last `max_kept` events are kept, in at most `max_kept_bytes` of JSON; an answer has at most `max_events` and
    `max_response_bytes`, though at least one event. At most `max_clients` are connected, others are told to come back.
    Nobody waits longer than `max_wait_s` for events, nor `io_timeout_s` for a client that neither reads nor writes.
    """

    max_kept: int = 100_000
    max_kept_bytes: int = 256 << 20
    max_events: int = 10_000
    max_response_bytes: int = 16 << 20
    max_clients: int = 64
    max_wait_s: float = 60.0
    io_timeout_s: float = 10.0

    def __post_init__(self) -> None:
        for name in ("max_kept", "max_kept_bytes", "max_events", "max_response_bytes", "max_clients"):
            if getattr(self, name) < 1:
                raise ArgumentError(f"{name} is {getattr(self, name)}, but must be at least 1")


_USUAL = HttpLimits()


class EventServer:
    """Serves what a source has over HTTP, on a thread for each client; on this machine only, unless `host` says other.

    `encode` makes the JSON array of a list of events, and is called with each event once, in order; one for which it
    raises is left out. Port 0 chooses a free one; `url` says where it serves.

    Raises:
        OSError: the port is in use.
    """

    def __init__(
        self,
        source: EventSource,
        encode: Encode,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        limits: HttpLimits = _USUAL,
    ) -> None:
        self._encode, self._num_unencoded = encode, 0
        self._kept = _Kept(limits)
        self._server = _Server((host, port), self._kept, limits)
        self._pump = Pump(source, self._add, name="http events")
        self._thread = Thread(target=self._server.serve_forever, args=(0.05,), name="kvist http", daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        """Where events are served."""
        host, port = cast(tuple[str, int], self._server.server_address[:2])
        return f"http://{f'[{host}]' if ':' in host else host}:{port}{PATH}"

    @property
    def num_errors(self) -> int:
        """Events that could not be taken or encoded."""
        return self._pump.num_errors + self._num_unencoded

    def close(self, timeout_s: float = 1.0) -> bool:
        """Answer those who wait, and end, within so long; returns whether every answer was given.

        Closing twice is fine.
        """
        deadline = monotonic() + timeout_s
        self._pump.close(timeout_s)
        self._kept.close()
        self._server.shutdown()
        is_answered = self._server.finish(deadline)
        self._server.server_close()
        self._thread.join(max(0.0, deadline - monotonic()))
        return is_answered

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _add(self, events: list[Event]) -> None:
        self._kept.add([self._encoded(event) for event in events])

    def _encoded(self, event: Event) -> bytes:
        """Return what stands between the brackets for an event; nothing for one that cannot be encoded."""
        try:
            told = self._encode([event]).strip()
        except Exception:
            if not self._num_unencoded:
                _log.exception("an event could not be encoded; more are only counted")
            self._num_unencoded += 1
            return b""
        return told[1:-1].strip() if told.startswith(b"[") else told


class _Kept:
    """The last events as JSON without the brackets of an array, by how many came before them."""

    def __init__(self, limits: HttpLimits) -> None:
        self._limits = limits
        self._events: deque[bytes] = deque()
        self._end = self._num_bytes = 0
        self._changed = Condition()
        self._is_closed = False

    def add(self, events: Iterable[bytes]) -> None:
        """Append events, and wake those who wait for some."""
        with self._changed:
            for event in events:
                self._events.append(event)
                self._end += 1
                self._num_bytes += len(event)
                while len(self._events) > 1 and self._is_over_limits():
                    self._num_bytes -= len(self._events.popleft())
            self._changed.notify_all()

    def after(self, position: int, limit: int, timeout_s: float) -> tuple[list[bytes], int, int]:
        """Return the events of one answer from a position on, the position of the first, and how many were lost before.

        Waits so long for one to be there.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or self._end > position, timeout_s)
            begin = self._end - len(self._events)
            first = max(position, begin)
            found: list[bytes] = []
            left_bytes = self._limits.max_response_bytes - 2
            for event in islice(self._events, first - begin, first - begin + limit):
                left_bytes -= len(event) + 1
                if found and left_bytes < -1:
                    break
                found.append(event)
            return found, first, first - position

    @property
    def end(self) -> int:
        """Events that have come."""
        return self._end

    @property
    def is_closed(self) -> bool:
        """Whether no more come."""
        return self._is_closed

    def close(self) -> None:
        """Wake all who wait."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def _is_over_limits(self) -> bool:
        return len(self._events) > self._limits.max_kept or self._num_bytes > self._limits.max_kept_bytes


class _BadRequest(Exception):
    """What is wrong with a request, and the status that says so."""

    def __init__(self, status: HTTPStatus, told: str) -> None:
        super().__init__(told)
        self.status = status


class _Server(ThreadingHTTPServer):
    """Knows who is connected and who is being answered."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, address: tuple[str, int], kept: _Kept, limits: HttpLimits) -> None:
        self.kept, self.limits = kept, limits
        self.token = secrets.token_hex(4)
        self.shared_position = 0
        self.sharing = Lock()
        self.state = Condition()
        self.num_answering = 0
        self._connected: set[socket.socket] = set()
        self._room = Semaphore(limits.max_clients)
        if ":" in address[0]:
            self.address_family = socket.AF_INET6
        super().__init__(address, _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._room.acquire(blocking=False):
            with suppress(OSError):
                request.settimeout(0.0)
                request.send(_BUSY)
            self.shutdown_request(request)
            return
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        with self.state:
            self._connected.add(request)
        try:
            super().process_request_thread(request, client_address)
        finally:
            with self.state:
                self._connected.discard(request)
            self._room.release()

    def finish(self, deadline: float) -> bool:
        """Wait for answers that are being given, and end all connections; returns whether all were given in time."""
        with self.state:
            is_done = self.state.wait_for(lambda: not self.num_answering, max(0.0, deadline - monotonic()))
            connected = list(self._connected)
        for each in connected:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        return is_done

    def handle_error(self, request: Any, client_address: Any) -> None:
        _log.debug("a client of the event server has gone", exc_info=True)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_version = "kvist"
    sys_version = ""

    def setup(self) -> None:
        super().setup()
        self.connection.settimeout(self._ours.limits.io_timeout_s)

    @property
    def _ours(self) -> _Server:
        return cast(_Server, self.server)

    def do_GET(self) -> None:
        with self._ours.state:
            self._ours.num_answering += 1
        try:
            self._respond()
        finally:
            with self._ours.state:
                self._ours.num_answering -= 1
                self._ours.state.notify_all()

    do_POST = do_GET  # noqa: N815 as TensorRT-LLM's server is asked

    def log_message(self, format: str, *args: Any) -> None:
        _log.debug(format, *args)

    def _respond(self) -> None:
        try:
            self._read_body()
            position, max_events, timeout_s = self._asked()
            if position is None:
                self._take_shared(max_events, timeout_s)
            else:
                self._send(*self._events_after(position, max_events, timeout_s)[:2])
        except _BadRequest as wrong:
            self._tell(wrong)

    def _read_body(self) -> None:
        """Pass over what comes with a POST."""
        length = self.headers.get("Content-Length", "0")
        if "Transfer-Encoding" in self.headers or not length.isdecimal():
            self.close_connection = True
            raise _BadRequest(HTTPStatus.LENGTH_REQUIRED, "a request needs no body, and one has its length")
        if int(length) > _MAX_BODY_BYTES:
            self.close_connection = True
            raise _BadRequest(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"a body has at most {_MAX_BODY_BYTES} bytes")
        self.rfile.read(int(length))

    def _asked(self) -> tuple[int | None, int, float]:
        """Return the position to begin with, None for what nobody had yet, how many events, and how long to wait."""
        if len(self.path) > _MAX_URL_BYTES:
            raise _BadRequest(HTTPStatus.REQUEST_URI_TOO_LONG, f"at most {_MAX_URL_BYTES} bytes")
        url = urlsplit(self.path)
        if url.path.rstrip("/") != PATH:
            raise _BadRequest(HTTPStatus.NOT_FOUND, f"there is {PATH} and nothing else")
        asked = dict(parse_qsl(url.query, keep_blank_values=True))
        if unknown := asked.keys() - {"timeout_s", "max_events", "after"}:
            raise _BadRequest(HTTPStatus.BAD_REQUEST, f"unknown: {', '.join(sorted(unknown))}")
        limits = self._ours.limits
        max_events = _number(asked, "max_events", limits.max_events)
        if max_events < 1:
            raise _BadRequest(HTTPStatus.BAD_REQUEST, "max_events must be at least 1")
        timeout_s = min(_number(asked, "timeout_s", 0.0), limits.max_wait_s)
        return self._position(asked.get("after")), int(min(max_events, limits.max_events)), timeout_s

    def _position(self, after: str | None) -> int | None:
        if after is None or after == "start":
            return None if after is None else 0
        token, _, position = after.partition("-")
        if not position.isdecimal():
            raise _BadRequest(HTTPStatus.BAD_REQUEST, "after is neither 'start' nor what Kvist-Next said")
        if token != self._ours.token or int(position) > self._ours.kept.end:
            raise _BadRequest(HTTPStatus.GONE, "after is of an earlier life of this server: begin with after=start")
        return int(position)

    def _take_shared(self, max_events: int, timeout_s: float) -> None:
        """Answer with what no such answer had; one client at a time waits for it."""
        deadline = monotonic() + timeout_s
        if not self._ours.sharing.acquire(timeout=timeout_s):
            self._send(b"[]", {})
            return
        try:
            left_s = max(0.0, deadline - monotonic())
            body, headers, position = self._events_after(self._ours.shared_position, max_events, left_s)
            self._ours.shared_position = position
        finally:
            self._ours.sharing.release()
        self._send(body, headers)

    def _events_after(self, position: int, max_events: int, timeout_s: float) -> tuple[bytes, dict[str, str], int]:
        events, first, num_lost = self._ours.kept.after(position, max_events, timeout_s)
        following = first + len(events)
        headers = {"Kvist-Next": f"{self._ours.token}-{following}", "Kvist-Num-Lost": str(num_lost)}
        return b"[" + b",".join(filter(None, events)) + b"]", headers, following

    def _send(self, body: bytes, headers: dict[str, str], status: HTTPStatus = HTTPStatus.OK) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        if self._ours.kept.is_closed:
            self.send_header("Connection", "close")
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def _tell(self, wrong: _BadRequest) -> None:
        headers = {"Connection": "close"} if self.close_connection else {}
        self._send(json.dumps({"error": str(wrong)}).encode(), headers, wrong.status)


def _number(asked: dict[str, str], name: str, default: float) -> float:
    try:
        number = float(asked.get(name, default))
    except ValueError:
        number = -1.0
    if not isfinite(number) or number < 0:
        raise _BadRequest(HTTPStatus.BAD_REQUEST, f"{name} is {asked[name]!r}, but must be a number from 0")
    return number
