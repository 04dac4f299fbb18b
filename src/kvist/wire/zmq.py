"""Publishes batches over ZeroMQ as vLLM does, so that what subscribes to its KV events can subscribe to these.

A PUB socket sends three frames: topic, number (8 bytes, big-endian, from 0), batch. A ROUTER socket answers requests
for past batches, whose one frame after the empty delimiter is the first number wanted, with

    delimiter, topic, number, batch        for each batch from there on that is still kept, and then
    delimiter, empty, 8 times 0xFF, empty  as the end mark.
"""

from __future__ import annotations

import logging
from collections import deque
from contextlib import suppress
from threading import Thread
from time import monotonic
from types import TracebackType
from typing import Any, Self

from kvist.errors import ArgumentError
from kvist.wire.publishing import Outbox, PublisherStats

try:
    import zmq
except ModuleNotFoundError as error:
    raise ModuleNotFoundError("ZmqPublisher needs zmq: pip install 'kvist[events]'", name=error.name) from error

__all__ = ["END", "ZmqPublisher", "offset_endpoint"]

END = b"\xff" * 8
"""The number in the end mark of a replay: -1."""

_log = logging.getLogger("kvist.wire")

LOOPBACK = "tcp://127.0.0.1:5557"
"""Where a publisher is found that was not told where."""

_MAX_REQUEST_BYTES = 256
_MAX_SUBSCRIPTION_BYTES = 4096
_CLOCK_MS = 5
"""Sockets give up this much after the limit, so that what ends before it has sent everything."""
_SENT_AT_ONCE, _ANSWERED_AT_ONCE = 256, 8
"""Batches sent, and requests answered, before the other is looked at again."""


def offset_endpoint(endpoint: str, rank: int) -> str:
    """Return the endpoint of a data-parallel rank: each has its own port, or in-process name.

    >>> offset_endpoint("tcp://*:5557", 1)
    'tcp://*:5558'
    >>> offset_endpoint("inproc://events", 1)
    'inproc://events_dp1'

    Raises:
        ArgumentError: the endpoint has no port and no in-process name, and `rank` is not 0.
    """
    scheme, _, address = endpoint.partition("://")
    host, _, port = address.rpartition(":")
    if rank == 0:
        return endpoint
    if scheme == "inproc":
        return f"{endpoint}_dp{rank}"
    if scheme == "tcp" and port.isdecimal():
        return f"{scheme}://{host}:{int(port) + rank}"
    raise ArgumentError(f"rank {rank} has no endpoint of its own in {endpoint!r}: use tcp:// with a port, or inproc://")


class ZmqPublisher:
    """Publishes encoded batches to vLLM-style subscribers; defaults are vLLM's, but for the endpoint.

    Without an `endpoint`, port 5557 is bound on this machine's loopback: batches have the prompts' token ids, and
    whoever reaches the port can read them. An endpoint with `*` or `::`, or of ipc or inproc, is bound, another
    connected to; `replay_endpoint` is always bound. All are moved by `rank`. The last `buffer_steps` batches can be
    asked for again. A subscriber that does not keep up loses batches once `hwm` of them wait for it, and sees a gap in
    the numbers, as it does for batches that found no room in the queue of `max_queue_size`. No subscriber can hold up
    another one, nor the caller.

    Sockets live in a context of their own, those of inproc in the process's; with a `context`, they live there, and
    what is being sent when the publisher closes is sent as long as that context lives, at most the time limit.

    Raises:
        ArgumentError: a limit is out of range, or the rank cannot have an endpoint.
        zmq.ZMQError: an endpoint is in use, or is none.
    """

    def __init__(
        self,
        endpoint: str | None = None,
        *,
        replay_endpoint: str | None = None,
        rank: int = 0,
        topic: str = "",
        hwm: int = 100_000,
        max_queue_size: int = 100_000,
        buffer_steps: int = 10_000,
        context: zmq.Context[Any] | None = None,
    ) -> None:
        for name, limit in (("rank", rank), ("hwm", hwm), ("buffer_steps", buffer_steps)):
            if limit < 0:
                raise ArgumentError(f"{name} is {limit}, but must be at least 0")
        binds = endpoint is None or any(sign in endpoint for sign in ("*", "::", "ipc://", "inproc://"))
        endpoint = offset_endpoint(LOOPBACK if endpoint is None else endpoint, rank)
        replay_endpoint = replay_endpoint and offset_endpoint(replay_endpoint, rank)
        self.rank, self.topic = rank, topic
        self._topic = topic.encode()
        self._past: deque[tuple[bytes, bytes]] = deque(maxlen=buffer_steps)
        self._num_published = self._num_replays = self._num_replayed = self._num_errors = 0
        self._outbox = Outbox(max_queue_size)
        self._sockets: list[zmq.Socket[bytes]] = []
        is_inproc = endpoint.startswith("inproc://")
        self._context, self._owns_context = context, context is None and not is_inproc
        if self._context is None:
            self._context = zmq.Context.instance() if is_inproc else zmq.Context()
        try:
            self._open(endpoint, replay_endpoint, hwm, binds=binds)
        except BaseException:
            self._outbox.dispose()
            self._let_go(0)
            raise
        self._is_all_sent = False
        self._thread = Thread(target=self._run, name="kvist zmq publisher", daemon=True)
        self._thread.start()

    def publish(self, batch: bytes) -> bool:
        """Queue a batch to be sent, or drop and count it where there is no room; returns whether it is queued.

        Any thread may call; none waits. Its number is one more than that of the batch before, sent or dropped.
        """
        return self._outbox.put(batch)

    def skip(self) -> None:
        """Use up a number for a batch that could not be made: subscribers see a gap."""
        self._outbox.skip()

    def stats(self) -> PublisherStats:
        """Return what was done so far."""
        return PublisherStats(
            num_published=self._num_published,
            num_dropped=self._outbox.num_dropped,
            num_waiting=self._outbox.num_waiting,
            num_replays=self._num_replays,
            num_replayed=self._num_replayed,
            num_errors=self._num_errors,
        )

    def close(self, timeout_s: float = 1.0) -> bool:
        """Send what is queued and close the sockets, within so long; returns whether everything went out.

        A subscriber that does not read holds this up until the limit. Closing twice is fine.
        """
        self._outbox.close(timeout_s)
        self._thread.join(timeout_s)
        return self._is_all_sent

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -- sockets ------------------------------------------------------------------------------------------------------

    def _open(self, endpoint: str, replay_endpoint: str | None, hwm: int, *, binds: bool) -> None:
        publishing = self._socket(zmq.PUB, endpoint)
        publishing.set_hwm(hwm)
        publishing.maxmsgsize = _MAX_SUBSCRIPTION_BYTES
        if binds:
            publishing.bind(endpoint)
            endpoint = publishing.get_string(zmq.LAST_ENDPOINT)
        else:
            publishing.connect(endpoint)
        self.endpoint = endpoint
        """Where subscribers find it, with the port that was chosen where the given one left that open."""
        self.replay_endpoint: str | None = None
        """Where past batches can be asked for."""
        self._publishing = publishing
        self._replaying: zmq.Socket[bytes] | None = None
        if replay_endpoint is not None:
            self._replaying = self._socket(zmq.ROUTER, replay_endpoint)
            self._replaying.maxmsgsize = _MAX_REQUEST_BYTES
            self._replaying.router_mandatory = True  # to be told, rather than to lose part of an answer silently
            # Room for one whole answer, however much of the one before has been read but not acknowledged.
            self._replaying.sndhwm = 2 * (self._past.maxlen or 0) + 4
            self._replaying.bind(replay_endpoint)
            self.replay_endpoint = self._replaying.get_string(zmq.LAST_ENDPOINT)

    def _socket(self, kind: zmq.SocketType, endpoint: str) -> zmq.Socket[bytes]:
        assert self._context is not None
        made: zmq.Socket[bytes] = self._context.socket(kind)
        made.linger = 0
        made.ipv6 = "::" in endpoint or "[" in endpoint
        self._sockets.append(made)
        return made

    def _let_go(self, linger_ms: int) -> None:
        """Close the sockets; with a context of our own, wait until what they hold is sent, or so long."""
        for each in self._sockets:
            each.close(linger_ms)
        if self._owns_context and self._context is not None:
            self._context.term()

    # -- the thread ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._outbox, zmq.POLLIN)
        if self._replaying is not None:
            poller.register(self._replaying, zmq.POLLIN)
        try:
            while not self._outbox.is_closed:
                poller.poll(0 if self._outbox.num_waiting else None)
                self._outbox.acknowledge()
                self._send_some()
                self._answer_some()
            while self._outbox.num_waiting and monotonic() < self._outbox.deadline:
                self._send_some()
        except Exception:
            _log.exception("the ZeroMQ publisher has ended")
        finally:
            self._end()

    def _end(self) -> None:
        is_left = self._outbox.num_waiting > 0
        self._outbox.dispose()
        left_s = max(0.0, min(self._outbox.deadline - monotonic(), 3600.0))
        self._let_go(int(left_s * 1000) + _CLOCK_MS)
        self._is_all_sent = not is_left and monotonic() < self._outbox.deadline

    def _send_some(self) -> None:
        for _ in range(_SENT_AT_ONCE):
            taken = self._outbox.take()
            if taken is None:
                return
            number, batch = taken[0].to_bytes(8, "big"), taken[1]
            self._publishing.send_multipart((self._topic, number, batch))
            self._past.append((number, batch))
            self._num_published += 1

    def _answer_some(self) -> None:
        for _ in range(_ANSWERED_AT_ONCE if self._replaying is not None else 0):
            assert self._replaying is not None
            try:
                request = self._replaying.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            with suppress(zmq.Again, zmq.ZMQError):  # it does not read, or has gone
                self._answer(request)

    def _answer(self, request: list[bytes]) -> None:
        """Send a client the batches it asks for, as far as they are kept; what is no request gets the end mark only."""
        assert self._replaying is not None
        client, asked = request[0], request[-1]
        if len(request) != 3 or len(asked) != len(END):
            self._num_errors += 1
            asked = END
        self._num_replays += 1
        for number, batch in self._past:
            if number >= asked:
                self._replaying.send_multipart((client, b"", self._topic, number, batch), zmq.NOBLOCK)
                self._num_replayed += 1
        self._replaying.send_multipart((client, b"", b"", END, b""), zmq.NOBLOCK)
