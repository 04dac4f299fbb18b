"""Records real requests as a trace that holds no text and no token ids: only hashes, keyed with a salt that is lost."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from hashlib import blake2b
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

import numpy as np
from numpy.typing import NDArray

from kvist.errors import ArgumentError
from kvist.lab.traces.chains import chain_hashes, namespace_bytes
from kvist.lab.traces.recorded import head_line, request_line
from kvist.lab.traces.requests import HashedPrompt, Request, TokenPrompt
from kvist.lab.traces.streams import created
from kvist.lab.traces.watching import EngineWatch, Seen, Watch, Watching
from kvist.manager import KVCacheManager

__all__ = ["TraceRecorder", "record"]

_log = logging.getLogger("kvist.lab")

SALT_BYTES = 32
DEFAULT_BLOCK_SIZE = 16


class TraceRecorder:
    """Writes requests into a trace of kind `kvist`, gz or zst by the file's name.

    Of a request it keeps its arrival since the recorder began, its lengths, and a keyed hash (BLAKE2b, 64 bits) for
    each block of `block_size` tokens that stands for all before it, too; namespaces and sessions are hashed as well.
    The key, `salt`, is drawn at random and forgotten, so that no text can be tried against the hashes; where traces of
    several processes are to be compared, give them the same and keep it from whoever gets the traces. Lengths and times
    are those of the requests, and equal beginnings can be seen: that is what a trace is for.

    A file that cannot be written is told once, and ends the recording, not the requests: `num_lost` counts these.

    >>> from tempfile import TemporaryDirectory
    >>> from kvist import AttentionSpec, CacheConfig
    >>> from kvist.lab.traces import open_trace
    >>> manager = KVCacheManager(CacheConfig([AttentionSpec(2, 64)], block_size=4, num_blocks=8))
    >>> with TemporaryDirectory() as folder:
    ...     with TraceRecorder(f"{folder}/day.jsonl", block_size=4) as recorder:
    ...         recorder.attach(manager)
    ...         sequence = manager.add_sequence([1, 2, 3, 4, 5])
    ...         manager.free(sequence)
    ...     [(request.prompt.num_tokens, len(request.prompt.hash_ids)) for request in open_trace(f"{folder}/day.jsonl")]
    [(5, 2)]
    """

    def __init__(
        self,
        path: str | Path,
        *,
        block_size: int = DEFAULT_BLOCK_SIZE,
        salt: bytes | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if block_size < 1:
            raise ArgumentError(f"block_size is {block_size}, must be 1 or more")
        if salt is not None and not 16 <= len(salt) <= 64:
            raise ArgumentError(f"salt has {len(salt)} bytes, must have 16 to 64")
        self.path, self.block_size = Path(path), block_size
        self.num_recorded = self.num_lost = 0
        self._salt = secrets.token_bytes(SALT_BYTES) if salt is None else salt
        self._clock, self._began_s = clock, clock()
        self._watching: list[Watching] = []
        self._closing = ExitStack()
        self._file: BinaryIO | None = self._closing.enter_context(created(self.path))
        self._file.write(head_line(block_size))

    def attach(self, target: KVCacheManager | Any) -> None:
        """Record each request of a manager, or of a `kvist.serve.Engine`, that ends from now on.

        Of an engine, arrivals are when requests were submitted; of a manager, when they were admitted. Nothing else of
        it changes. Raises SequenceError if it is being recorded already.
        """
        kind = Watch if isinstance(target, KVCacheManager) else EngineWatch
        self._watching.append(kind(target, self._seen, self._clock))

    def add(self, request: Request) -> None:
        """Record a request, such as one of another trace, at its own time."""
        tokens = request.prompt.tokens()
        if request.output is not None:
            tokens = np.concatenate([tokens, request.output])
        self._write(request, tokens)

    def close(self) -> None:
        """Record what still runs, and end the file; a second time does nothing."""
        while self._watching:
            self._watching.pop().close()
        self._file = None
        self._closing.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _seen(self, seen: Seen) -> None:
        prompt, output = seen.tokens[: seen.num_prompt_tokens], seen.tokens[seen.num_prompt_tokens :]
        arrival_s = max(0.0, seen.arrival_s - self._began_s)
        request = Request(TokenPrompt(prompt), arrival_s, len(output), output, seen.namespace)
        try:
            self._write(request, seen.tokens)
        except OSError as error:
            self.num_lost += 1
            if self._file is not None:
                _log.warning("requests are not recorded any more: %s: %s", self.path, error)
                self._file = None

    def _write(self, request: Request, tokens: NDArray[np.int32]) -> None:
        if self._file is None:
            raise OSError(f"{self.path} is closed")
        root = self._hash(namespace_bytes(request.namespace))
        hashes = chain_hashes(tokens, self.block_size, root, self._salt)
        namespace = self._hash(b"namespace" + namespace_bytes(request.namespace)).hex() if request.namespace else ""
        session = self._hash(b"session" + request.session.encode()).hex() if request.session else ""
        self._file.write(request_line(request, hashes.tolist(), namespace, session))
        self.num_recorded += 1

    def _hash(self, content: bytes) -> bytes:
        return blake2b(content, digest_size=8, key=self._salt).digest()


def record(
    requests: Iterable[Request], path: str | Path, *, block_size: int | None = None, salt: bytes | None = None
) -> int:
    """Write a trace as hashes that nobody can try text against; returns how many requests it has.

    `block_size` is in tokens; None takes that of hashed prompts, and 16 for token ids.
    """
    waiting = iter(requests)
    first = next(waiting, None)
    if block_size is None:
        prompt = None if first is None else first.prompt
        block_size = prompt.block_size if isinstance(prompt, HashedPrompt) else DEFAULT_BLOCK_SIZE
    with TraceRecorder(path, block_size=block_size, salt=salt) as recorder:
        if first is not None:
            recorder.add(first)
        for request in waiting:
            recorder.add(request)
        return recorder.num_recorded
