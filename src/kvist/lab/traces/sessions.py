"""Agents' sessions: a line has all requests of one, with the ids of their blocks, which are local to the session.

A session has `id`, `block_size`, `requests`, and perhaps `subagents`, which have requests of their own from their time
`t` on. A request has its time `t` since the session began, `in` and `out` in tokens, how long it took (`api`), and `h`:
runs `[first, last]` of ids of full blocks.
"""

from __future__ import annotations

from collections.abc import Iterator
from operator import itemgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvist.lab.traces.fields import Malformed, block_size, count, prompt_length, seconds, text
from kvist.lab.traces.requests import HashedPrompt, Request, salt_of
from kvist.lab.traces.side_by_side import Turns, side_by_side
from kvist.lab.traces.streams import Source

__all__ = ["block_size_of", "is_session", "read"]

MAX_BLOCKS = 2**24


def is_session(value: Any) -> bool:
    """Whether a JSON value looks like a session."""
    return isinstance(value, dict) and isinstance(value.get("requests"), list) and "block_size" in value


def block_size_of(value: dict[str, Any]) -> int:
    """Return how many tokens an id stands for."""
    return block_size(value)


def read(source: Source, at_once: int) -> Iterator[Request]:
    """Yield the requests of all sessions, by arrival, with so many sessions at once."""
    return side_by_side(_sessions(source), at_once)


def _sessions(source: Source) -> Iterator[Turns]:
    size = None
    for line, value in source.objects():
        with source.trying(line):
            if not is_session(value):
                raise Malformed("no session", f"the fields are {', '.join(value)}"[:120])
            size = size or block_size_of(value)
            if block_size_of(value) != size:
                raise Malformed("another block_size", f"the first session has {size}, this one {value['block_size']}")
            yield _turns(source, line, value, text(value, "id") or f"line {line}")


def _turns(source: Source, line: int, session: dict[str, Any], name: str) -> Turns:
    size, salt = block_size_of(session), salt_of(name)
    timed = []
    for began_s, value in _with_subagents(source, line, session):
        with source.trying(line):
            if not isinstance(value, dict):
                raise Malformed("a request is no object", f"got {value!r:.60}")
            timed.append((began_s + seconds(value, "t"), value))
    timed.sort(key=itemgetter(0))
    for arrival_s, value in timed:
        with source.trying(line):
            prompt = _prompt(value, size, salt)
            request = Request(prompt, arrival_s, count(value, "out", 0), session=name, line=line)
            yield request, seconds(value, "api", default=0.0)


def _with_subagents(source: Source, line: int, session: dict[str, Any]) -> Iterator[tuple[float, Any]]:
    """Yield all requests of a session, each with when whoever makes it began."""
    yield from ((0.0, value) for value in session["requests"])
    agents = session.get("subagents") or []
    for agent in agents if isinstance(agents, list) else [agents]:
        with source.trying(line):
            if not isinstance(agent, dict) or not isinstance(agent.get("requests"), list):
                raise Malformed("a subagent has no requests", f"got {agent!r:.60}")
            began_s = seconds(agent, "t", default=0.0)
            yield from ((began_s, value) for value in agent["requests"])


def _prompt(value: dict[str, Any], size: int, salt: int) -> HashedPrompt:
    num_tokens, ids = prompt_length(value, "in"), _expanded(value.get("h"))
    if len(ids) not in (num_tokens // size, -(-num_tokens // size)):
        told = f"{num_tokens} tokens are {num_tokens // size} full blocks of {size}, got {len(ids)} ids"
        raise Malformed("in and h disagree", told)
    return HashedPrompt(ids, size, num_tokens, salt)


def _expanded(runs: Any) -> NDArray[np.int64]:
    """Return the ids of runs, `[first, last]` each.

    >>> _expanded([[1, 3], [7, 8]]).tolist()
    [1, 2, 3, 7, 8]
    """
    if not isinstance(runs, list):
        raise Malformed("h is no list of runs", f"got {runs!r:.60}")
    ids, num_ids = [], 0
    for run in runs:
        match run:
            case [int(first), int(last)] if 0 <= first <= last < 2**63 and last - first < MAX_BLOCKS - num_ids:
                ids.append(np.arange(first, last + 1, dtype=np.int64))
                num_ids += last - first + 1
            case _:
                raise Malformed("h has what is no run", f"expected [first, last], got {run!r:.60}")
    return np.concatenate(ids) if ids else np.empty(0, np.int64)
