"""A store in a bucket of S3, GCS or Azure, or in a local folder, that machines may share: one object an entry."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Coroutine, Iterable, Sequence
from concurrent.futures import CancelledError
from datetime import timedelta
from pathlib import Path
from threading import Lock, Thread
from typing import Any, TypeVar
from urllib.parse import parse_qsl, urlsplit, urlunsplit

from kvist.errors import ConfigError, TransferError
from kvist.tiers.certificates import check_files
from kvist.tiers.counting import Counts
from kvist.tiers.envelope import ENVELOPE_BYTES, Envelope
from kvist.tiers.protocol import NAMESPACE_TAG_BYTES, StoreFormat, StoreStats

try:
    import obstore
    import obstore.exceptions
    import obstore.store
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"ObjectStore needs {error.name}: pip install 'kvist[objects]'", name=error.name
    ) from error

__all__ = ["ObjectStore"]

_T = TypeVar("_T")
_LISTED_AT_ONCE = 1000
_CLIENT_SETTINGS = frozenset((
    "allow_http", "allow_invalid_certificates", "default_content_type", "http1_only", "http2_keep_alive_interval",
    "http2_keep_alive_timeout", "http2_keep_alive_while_idle", "http2_max_frame_size", "http2_only",
    "pool_idle_timeout", "pool_max_idle_per_host", "proxy_ca_certificate", "proxy_excludes", "proxy_url",
    "randomize_addresses", "user_agent",
))  # fmt: skip
"""Settings of any kind of store that are for the client of HTTP; `obstore` panics where it finds them among others."""
_LIMITS = frozenset(("connect_timeout", "read_timeout", "timeout"))


class ObjectStore:
    """Contents as objects `kvist/{format}/{namespace tag}/{rest}`, in hexadecimal.

    `url` is `s3://bucket/prefix`, `gs://bucket/prefix`, `az://container/prefix` or `file:///folder`. Behind a
    `?` stand settings of that kind of store as `obstore` calls them (`endpoint=...&region=...`), those of its client
    (`proxy_url`) as well; what is not said there comes from the environment, credentials above all. TLS trusts what the
    system trusts, and `ca_file=...`, a file of certificates in PEM. Without TLS only an address that begins with
    `http://` is asked. A call asks for `num_concurrent` objects at a time and ends after
    `timeout_s`: what has not come by then is not there. Requests are repeated `num_retries` times within that. An
    object that is not whole and of this format and key is a miss, and removed. Nothing here bounds how much is kept:
    that is for the life cycle rules of the bucket.

    What a bucket holds is shared, and `stats` does not ask for it: it counts what was done here.

    Raises:
        ConfigError: there is no such bucket's name, setting or file.
        TimeoutError: nothing at all came in time.
        TransferError: no request was served.
    """

    def __init__(
        self, url: str, format: StoreFormat, *, timeout_s: float = 5.0, num_concurrent: int = 16, num_retries: int = 2
    ) -> None:
        self._bucket = _opened(url, timeout_s, num_retries)
        self._timeout_s, self._num_concurrent = timeout_s, num_concurrent
        self._envelope = Envelope(format)
        self._prefix = f"kvist/{format.fingerprint.hex()[:16]}"
        self._counts = Counts()
        self._loop = _Loop()

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """Say of each key whether there is an object."""
        answers = self._found(self._look, [self._path(key) for key in keys])
        return [answer is not None for answer in answers]

    def put(self, entries: Sequence[tuple[bytes, memoryview]]) -> int:
        """Write objects, each whole or not at all, and return how many are there."""
        sealed = [(self._path(key), self._envelope.seal(key, contents)) for key, contents in entries]
        outcomes = self._outcomes(self._write, sealed)
        num_put = len(outcomes) - self._check(outcomes)
        self._counts.add(num_put=num_put, num_refused=len(outcomes) - num_put)
        return num_put

    def get(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[bool]:
        """Read objects at the same time, and fill the buffers of those that came whole and right."""
        paths = [self._path(key) for key in keys]
        sizes = [ENVELOPE_BYTES + buffer.nbytes for buffer in buffers]
        objects = self._found(self._read, list(zip(paths, sizes, strict=True)))
        found = [
            content is not None and self._envelope.unseal(key, content, buffer)
            for key, content, buffer in zip(keys, objects, buffers, strict=True)
        ]
        self._counts.add_found(found)
        wrong = [
            path for path, each, right in zip(paths, objects, found, strict=True) if each is not None and not right
        ]
        self._counts.add(num_corrupt=len(wrong))
        self._outcomes(self._remove, wrong)
        return found

    def drop(self, tag: bytes) -> None:
        """Remove all objects of a namespace, or, for an empty tag, of this format; others stay.

        The time limit is that of each thousand of them.
        """
        prefix, before = self._folder(tag) if tag else self._prefix, None
        while some := self._found(self._list, [prefix])[0]:
            if not any(self._found(self._remove, some)) and some == before:
                return  # whatever is listed there, it is nothing that can be removed
            before = some

    def stats(self) -> StoreStats:
        """Return what was done here; no bucket is asked what it holds."""
        return self._counts.stats()

    def close(self) -> None:
        """Give up requests that are under way."""
        self._loop.close()

    def _folder(self, tag: bytes) -> str:
        return f"{self._prefix}/{tag.hex()}"

    def _path(self, key: bytes) -> str:
        self._envelope.check_key(key)
        return f"{self._folder(key[:NAMESPACE_TAG_BYTES])}/{key[NAMESPACE_TAG_BYTES:].hex()}"

    async def _look(self, path: str) -> object:
        return await obstore.head_async(self._bucket, path)

    async def _read(self, entry: tuple[str, int]) -> memoryview:
        """Read an object of so many bytes; of another size, which can only be wrong, nothing is read."""
        path, num_bytes = entry
        answer = await obstore.get_async(self._bucket, path)
        return memoryview(await answer.bytes_async() if answer.meta["size"] == num_bytes else b"")

    async def _write(self, entry: tuple[str, bytes]) -> object:
        path, sealed = entry
        return await obstore.put_async(self._bucket, path, sealed, use_multipart=False)

    async def _remove(self, path: str) -> bool:
        await obstore.delete_async(self._bucket, path)
        return True

    async def _list(self, prefix: str) -> list[str]:
        """Return the first paths there are.

        Nobody else may hold the listing: who lets go of one whose request was given up has to be a thread of `obstore`,
        which panics on any other.
        """
        listed = await anext(obstore.list(self._bucket, prefix, chunk_size=_LISTED_AT_ONCE), None)
        return [each["path"] for each in listed or []]

    def _found(self, request: Callable[[Any], Coroutine[Any, Any, Any]], arguments: Sequence[Any]) -> list[Any]:
        """Make requests at the same time; return their answers, None where there is nothing or it did not come."""
        outcomes = self._outcomes(request, arguments)
        self._check([None if isinstance(each, FileNotFoundError) else each for each in outcomes])
        return [None if isinstance(each, Exception) else each for each in outcomes]

    def _outcomes(self, request: Callable[[Any], Coroutine[Any, Any, Any]], arguments: Sequence[Any]) -> list[Any]:
        """Make requests at the same time, and return the answer or exception of each."""
        return self._loop.run(_gathered(request, arguments, self._num_concurrent, self._timeout_s)) if arguments else []

    def _check(self, outcomes: Sequence[object]) -> int:
        """Count failures among outcomes and return their number; if there is nothing else, raise the first."""
        failures = [each for each in outcomes if isinstance(each, Exception)]
        num_timeouts = sum(isinstance(each, TimeoutError) for each in failures)
        self._counts.add(num_timeouts=num_timeouts, num_errors=len(failures) - num_timeouts)
        if failures and len(failures) == len(outcomes):
            raise _told(failures[0]) from failures[0]
        return len(failures)


def _told(failure: Exception) -> OSError:
    if isinstance(failure, TimeoutError):
        return failure
    reason = next(iter(str(failure).splitlines()), type(failure).__name__)
    if refused := re.search(r"InvalidCertificate\(\s*(\w+)", str(failure)):
        reason = f"the server's certificate is not trusted ({refused[1]}): {reason}"
    return TransferError(f"no request was served: {reason}")


async def _gathered(
    request: Callable[[Any], Coroutine[Any, Any, Any]], arguments: Sequence[Any], num_concurrent: int, timeout_s: float
) -> list[Any]:
    """Await requests, some at a time; return the answer or exception of each, and give up what is late."""
    gate = asyncio.Semaphore(num_concurrent)

    async def admitted(argument: Any) -> Any:
        async with gate:
            return await request(argument)

    tasks = [asyncio.ensure_future(admitted(argument)) for argument in arguments]
    _, late = await asyncio.wait(tasks, timeout=timeout_s)
    for task in late:
        task.cancel()
    await _ended(late)
    return [
        TimeoutError(f"nothing came within {timeout_s} s") if task in late else task.exception() or task.result()
        for task in tasks
    ]


class _Loop:
    """An event loop on a thread of its own, begun with the first call; no interpreter waits for it to end."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: Thread | None = None

    def run(self, coroutine: Coroutine[Any, Any, _T]) -> _T:
        """Return what a coroutine returns; any thread may call, also one that runs a loop itself."""
        with self._lock:
            future = asyncio.run_coroutine_threadsafe(coroutine, self._begun())
        try:
            return future.result()
        except CancelledError as error:
            raise TransferError("the store was closed meanwhile") from error

    def close(self) -> None:
        """Cancel all that runs, and end the thread."""
        with self._lock:
            loop, thread, self._loop, self._thread = self._loop, self._thread, None, None
            if loop is not None:
                loop.call_soon_threadsafe(loop.stop)
        if thread is not None:
            thread.join()

    def _begun(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            self._thread = Thread(target=_run, args=(self._loop,), name="kvist objects", daemon=True)
            self._thread.start()
        return self._loop


def _run(loop: asyncio.AbstractEventLoop) -> None:
    """Run a loop until it is stopped, then cancel and await what is left, so that nobody waits for it in vain."""
    loop.run_forever()
    left = asyncio.all_tasks(loop)
    for task in left:
        task.cancel()
    loop.run_until_complete(_ended(left))
    loop.close()


async def _ended(tasks: Iterable[asyncio.Task[Any]]) -> None:
    await asyncio.gather(*tasks, return_exceptions=True)


def _opened_folder(path: str) -> Any:
    try:
        return obstore.store.LocalStore(path, mkdir=True)
    except (obstore.exceptions.BaseError, OSError, ValueError) as error:
        told = next(iter(str(error).splitlines()), "")
        raise ConfigError([f"file://{path} cannot be a folder of objects: {told}"]) from error


def _opened(url: str, timeout_s: float, num_retries: int) -> Any:
    """Return obstore's store for a URL, with time limits on all that it does."""
    parts = urlsplit(url)
    address, settings = urlunsplit(parts._replace(query="")), dict(parse_qsl(parts.query))
    if parts.scheme == "file":
        return _opened_folder(parts.path)
    if parts.scheme == "memory":
        return obstore.store.MemoryStore()
    limit = timedelta(seconds=timeout_s)
    options: dict[str, Any] = {
        "config": {
            name: value for name, value in settings.items() if _bare(name) not in (*_CLIENT_SETTINGS, "ca_file")
        },
        "client_options": {**_client_options(address, settings), "timeout": limit, "connect_timeout": limit},
        "retry_config": {"max_retries": num_retries, "retry_timeout": limit},
    }
    try:
        return obstore.store.from_url(address, **options)
    except (obstore.exceptions.BaseError, ValueError) as error:
        told = next(iter(str(error).splitlines()), "")
        raise ConfigError([f"{address} with settings for {', '.join(settings) or 'nothing'}: {told}"]) from error


def _client_options(address: str, settings: dict[str, str]) -> dict[str, Any]:
    """Return those settings that are for the client of HTTP; plain HTTP is for who gives such an address."""
    if limits := [name for name in settings if _bare(name) in _LIMITS]:
        raise ConfigError([f"{address} with {', '.join(limits)}: all time limits of a store are its timeout_s"])
    options: dict[str, Any] = {
        _bare(name): value for name, value in settings.items() if _bare(name) in _CLIENT_SETTINGS
    }
    if any(value.startswith("http://") for name, value in settings.items() if _bare(name) not in _CLIENT_SETTINGS):
        options.setdefault("allow_http", True)
    if "ca_file" in settings:
        check_files({"ca_file": settings["ca_file"]})
        options["root_certificate"] = Path(settings["ca_file"]).read_bytes()
    return options


def _bare(name: str) -> str:
    """Return a setting's name without the kind of store, which `obstore` lets stand before it."""
    return re.sub("^(aws|azure|google)_", "", name.lower())
