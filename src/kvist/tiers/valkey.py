"""A store on a Valkey or Redis server, or a cluster of them, that several machines may share.

The client is `redis`: plain Python, no runtime threads of its own, the same commands for servers and clusters, and one
socket for each call in flight, so that giving a call up costs a socket and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from threading import Lock
from typing import Any
from urllib.parse import parse_qsl, urlencode, urlsplit

from kvist.errors import ConfigError, TransferError
from kvist.tiers.certificates import check_files
from kvist.tiers.counting import Counts
from kvist.tiers.envelope import ENVELOPE_BYTES, Envelope
from kvist.tiers.protocol import NAMESPACE_TAG_BYTES, StoreFormat, StoreStats

try:
    import redis
    from redis.backoff import NoBackoff
    from redis.exceptions import OutOfMemoryError, RedisClusterException, RedisError, ResponseError
    from redis.retry import Retry
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"ValkeyStore needs {error.name}: pip install 'kvist[valkey]'", name=error.name
    ) from error

from kvist.tiers.valkey_servers import ClusterNodes, OneServer

__all__ = ["TLS_SETTINGS", "ValkeyStore"]

TLS_SETTINGS = {"ca_file": "ssl_ca_certs", "cert_file": "ssl_certfile", "key_file": "ssl_keyfile"}
"""Settings of `valkeys://`, and what `redis` calls them."""
_READ_BYTES = 1 << 20


def _never(_: Exception) -> bool:
    return False


def _is_full(error: Exception) -> bool:
    return isinstance(error, OutOfMemoryError)


def _is_foreign(error: Exception) -> bool:
    """Whether somebody has put something there that is no string."""
    return isinstance(error, ResponseError) and "WRONGTYPE" in str(error)


class ValkeyStore:
    """Contents under the keys `kvist:{format}:{namespace tag}:{rest}`, in hexadecimal, as one value each.

    `url` is `valkey://[user:password@]host[:port][/database]`, or `valkeys://` for TLS; `redis://`, `rediss://` and
    `unix://` mean the same. TLS trusts what the system trusts, and what is in `?ca_file=...`, certificates in PEM; in
    `cert_file` and `key_file` are those that a server may want to see of us.

    No answer is waited for longer than `timeout_s`, and nothing is asked twice. The nodes of a `cluster` are asked at
    the same time and given half of that: what one of them does not answer is a miss, and what the others have comes. A
    node that has failed is not asked for some seconds.

    An entry is kept for `ttl_s` seconds, or as long as the server likes. A value that is not whole and of this format
    and key is a miss, and removed; of one that is too long no more is read than tells so. What a full server refuses is
    counted as refused. Many threads may call at once.

    What the server holds is shared, and `stats` does not ask it: it counts what was done here.

    Raises:
        ConfigError: a file for TLS cannot be read, or `url` is not encrypted.
        TimeoutError: the server did not answer in time.
        TransferError: it is out of reach, or will not serve, or one of us does not trust the other's certificate.
    """

    def __init__(
        self,
        url: str,
        format: StoreFormat,
        *,
        timeout_s: float = 1.0,
        ttl_s: float | None = None,
        cluster: bool = False,
    ) -> None:
        self._connect = partial(_connected, _as_redis(url), timeout_s, cluster)
        self._connected: OneServer | ClusterNodes | None = None
        self._connecting = Lock()
        self._envelope = Envelope(format)
        self._prefix = f"kvist:{format.fingerprint.hex()[:16]}:"
        self._expiry = () if ttl_s is None else ("PX", max(1, round(ttl_s * 1000)))
        self._counts = Counts()

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """Say of each key whether the server has something there."""
        return [bool(answer) for answer in self._answers("EXISTS", [(self._name(key),) for key in keys])]

    def put(self, entries: Sequence[tuple[bytes, memoryview]]) -> int:
        """Write entries in their order, each whole or not at all, and return how many the server took."""
        sealed = [(self._name(key), self._envelope.seal(key, contents)) for key, contents in entries]
        answers = self._answers("SET", [(*entry, *self._expiry) for entry in sealed], _is_full)
        num_refused = sum(answer is None or isinstance(answer, ResponseError) for answer in answers)
        self._counts.add(num_put=len(answers) - num_refused, num_refused=num_refused)
        return len(answers) - num_refused

    def get(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[bool]:
        """Read all entries in one round trip, and fill the buffers of those that are there, whole and right."""
        names = [self._name(key) for key in keys]
        values = self._beginnings(names, [ENVELOPE_BYTES + buffer.nbytes for buffer in buffers])
        found = [
            isinstance(value, bytes) and self._envelope.unseal(key, value, buffer)
            for key, value, buffer in zip(keys, values, buffers, strict=True)
        ]
        self._counts.add_found(found)
        wrong = [
            name
            for name, value, is_found in zip(names, values, found, strict=True)
            if value is not None and not is_found
        ]
        self._counts.add(num_corrupt=len(wrong))
        with suppress(OSError):
            self._remove(wrong)
        return found

    def _beginnings(self, names: Sequence[str], sizes: Sequence[int]) -> list[Any]:
        """Return what is there, cut off one byte after so many, which tells what is too long; None for nothing.

        The server answers for nothing as for an empty value, so these are asked for once more.
        """
        asked = [(name, 0, size) for name, size in zip(names, sizes, strict=True)]
        values = self._answers("GETRANGE", asked, _is_foreign)
        empty = [name for name, value in zip(names, values, strict=True) if value == b""]
        again = dict(zip(empty, self._answers("GET", [(name,) for name in empty], _is_foreign), strict=True))
        return [again.get(name, value) for name, value in zip(names, values, strict=True)]

    def drop(self, tag: bytes) -> None:
        """Remove all entries of a namespace, or, for an empty tag, of this format; others stay.

        In a cluster all nodes that answer forget them, even if it raises for one that does not.
        """
        pattern = f"{self._prefix}{tag.hex()}:*" if tag else f"{self._prefix}*"
        with self._failures():
            self._servers().forget(pattern)

    def stats(self) -> StoreStats:
        """Return what was done here; no server is asked what it holds."""
        return self._counts.stats()

    def close(self) -> None:
        """Close all sockets; a later call opens new ones."""
        with self._connecting:
            servers, self._connected = self._connected, None
        if servers is not None:
            servers.close()

    def _name(self, key: bytes) -> str:
        self._envelope.check_key(key)
        return f"{self._prefix}{key[:NAMESPACE_TAG_BYTES].hex()}:{key[NAMESPACE_TAG_BYTES:].hex()}"

    def _remove(self, names: Sequence[str | bytes]) -> None:
        self._answers("UNLINK", [(name,) for name in names])

    def _answers(
        self, command: str, arguments: Sequence[tuple[Any, ...]], is_answer: Callable[[Exception], bool] = _never
    ) -> list[Any]:
        """Send a command once for each tuple of arguments, in one round trip, and return the answers.

        Errors for which `is_answer` holds are answers. Others are counted, once for each node, and None; if there is
        nothing else, the first is raised.
        """
        if not arguments:
            return []
        with self._failures():
            answers = self._servers().ask([(command, *each) for each in arguments])
            failures = {id(each): each for each in answers if isinstance(each, Exception) and not is_answer(each)}
            if all(id(each) in failures for each in answers):
                raise answers[0]
        for failure in failures.values():
            self._count(failure)
        return [None if id(each) in failures else each for each in answers]

    def _servers(self) -> OneServer | ClusterNodes:
        with self._connecting:
            if self._connected is None:
                self._connected = self._connect()
            return self._connected

    @contextmanager
    def _failures(self) -> Iterator[None]:
        try:
            yield
        except redis.exceptions.TimeoutError as error:
            self._count(error)
            raise TimeoutError(f"no answer from the server in time: {error}") from error
        except (RedisError, RedisClusterException) as error:
            self._count(error)
            raise TransferError(f"the server did not do it: {error}") from error

    def _count(self, error: Exception) -> None:
        is_late = isinstance(error, redis.exceptions.TimeoutError)
        self._counts.add(num_timeouts=int(is_late), num_errors=int(not is_late))


def _connected(url: str, timeout_s: float, cluster: bool) -> OneServer | ClusterNodes:
    """Return what waits for no answer longer than the limit, a node of a cluster half of it, and asks nothing twice."""
    limit = timeout_s / 2 if cluster else timeout_s
    settings: dict[str, Any] = {
        "socket_connect_timeout": limit,
        "socket_timeout": limit,
        "socket_read_size": _READ_BYTES,
        "protocol": 2,
        "retry": Retry(NoBackoff(), 0),
    }
    return ClusterNodes(url, **settings) if cluster else OneServer(url, **settings)


def _as_redis(url: str) -> str:
    """Return a URL with the names that `redis` has for schemes and settings, once its files are known to be good."""
    parts = urlsplit(url)
    scheme = {"valkey": "redis", "valkeys": "rediss"}.get(parts.scheme, parts.scheme)
    settings = parse_qsl(parts.query, keep_blank_values=True)
    files = {name: value for name, value in settings if name in TLS_SETTINGS}
    if files and scheme != "rediss":
        raise ConfigError([f"{parts.scheme}:// is not encrypted and has no {', '.join(files)}: valkeys:// is"])
    if files:
        check_files(files)
    query = urlencode([(TLS_SETTINGS.get(name, name), value) for name, value in settings])
    return url.replace(f"{parts.scheme}://", f"{scheme}://", 1).partition("?")[0] + (f"?{query}" if query else "")
