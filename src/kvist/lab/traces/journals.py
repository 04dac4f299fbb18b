"""Kvist journals as traces: the calls are made again, and each sequence that was admitted is a request.

A journal has the order of calls, and the clock only where the manager has read it; requests in between arrive at the
last reading.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kvist.errors import KvistError, TraceError
from kvist.journal import Replay
from kvist.lab.traces.requests import Request, TokenPrompt
from kvist.lab.traces.streams import Source, uncompressed
from kvist.lab.traces.watching import Seen, Watch

__all__ = ["is_journal", "read"]


def is_journal(value: Any) -> bool:
    """Whether a JSON value looks like the head of a journal."""
    return isinstance(value, dict) and "kvist journal" in value


def read(source: Source) -> Iterator[Request]:
    """Yield the requests in the order in which they ended, each with the line of the call that ended it."""
    with uncompressed(source.path) as path:
        try:
            replay = Replay(path)
        except Exception as error:  # a head that is damaged makes settings of any kind
            told = str(error) if isinstance(error, KvistError) else f"its head cannot be read: {error!r:.80}"
            raise TraceError(told, file=str(source.path)) from error
        yield from _requests(source, replay)


def _requests(source: Source, replay: Replay) -> Iterator[Request]:
    ended: list[Seen] = []
    first_s: float | None = None
    watch = Watch(replay.manager, ended.append, replay.manager.clock)
    is_over = False
    while not is_over:
        try:
            is_over = replay.step() is None
        except Exception as error:  # a line that is damaged makes arguments of any kind
            source.add(replay.num_calls + 1, "a call that cannot be made again", f"{error}"[:200])
            is_over = True
        if is_over:
            watch.close()
        for seen in ended:
            first_s = seen.arrival_s if first_s is None else first_s
            yield _request(seen, first_s, replay.num_calls + 1)
        ended.clear()


def _request(seen: Seen, first_s: float, line: int) -> Request:
    prompt, output = seen.tokens[: seen.num_prompt_tokens], seen.tokens[seen.num_prompt_tokens :]
    return Request(
        TokenPrompt(prompt),
        max(0.0, seen.arrival_s - first_s),
        len(output),
        output if len(output) else None,
        seen.namespace,
        line=line,
    )
