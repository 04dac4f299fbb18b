"""Kvist's own form of traces, for requests that must not be read: a head, then a line of hashes for each request.

A hash stands for a block of tokens, all that came before it, and the namespace; it is keyed with a salt that is not
kept, so that nobody can try what text it is of. Hashes go on over the output, so that a next turn that begins with it
is known to.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from kvist.lab.traces.fields import (
    MAX_PROMPT_TOKENS,
    Malformed,
    block_size,
    count,
    hash_ids,
    prompt_length,
    seconds,
    text,
)
from kvist.lab.traces.requests import HashedPrompt, Request
from kvist.lab.traces.streams import Source

__all__ = ["FORMAT", "block_size_of", "head_line", "is_recorded", "read", "request_line"]

FORMAT = 1
HEAD = "kvist trace"


def is_recorded(value: Any) -> bool:
    """Whether a JSON value looks like the head of this form."""
    return isinstance(value, dict) and HEAD in value


def block_size_of(value: dict[str, Any]) -> int:
    """Return how many tokens a hash of this trace stands for."""
    if value[HEAD] != FORMAT:
        raise Malformed("another format", f"expected {FORMAT}, got {value[HEAD]!r:.40}")
    return block_size(value)


def head_line(block_size: int) -> bytes:
    """Return the head of a trace."""
    return _line({HEAD: FORMAT, "block_size": block_size})


def request_line(request: Request, hashes: list[int], namespace: str = "", session: str = "") -> bytes:
    """Return the line of a request whose prompt, and output if known, have these hashes.

    Lengths and the time are those of the request; namespace and session are hashed by whoever calls.
    """
    told: dict[str, Any] = {
        "t": round(request.arrival_s, 6),
        "in": request.prompt.num_tokens,
        "out": request.num_output_tokens,
        "h": hashes,
    }
    return _line(told | {name: each for name, each in (("ns", namespace), ("s", session)) if each})


def read(source: Source) -> Iterator[Request]:
    """Yield the requests, as they lie in the file."""
    objects = source.objects()
    size = None
    for line, value in objects:
        with source.trying(line):
            if size is None:
                if not is_recorded(value):
                    raise Malformed("no head", f"the first line must have {HEAD!r} and block_size")
                size = block_size_of(value)
            else:
                yield _request(size, value, line)


def _request(size: int, value: dict[str, Any], line: int) -> Request:
    num_tokens, num_output, ids = prompt_length(value, "in"), count(value, "out", 0), hash_ids(value.get("h"), "h")
    num_blocks, num_all = -(-num_tokens // size), -(-(num_tokens + num_output) // size)
    if len(ids) not in (num_blocks, num_all):
        told = f"{num_tokens} and {num_output} tokens are {num_blocks} or {num_all} blocks of {size}, got {len(ids)}"
        raise Malformed("in, out and h disagree", told)
    output = None
    if num_output and len(ids) == num_all and num_output <= MAX_PROMPT_TOKENS:
        output = HashedPrompt(ids, size, num_tokens + num_output).tokens()[num_tokens:]
    namespace = text(value, "ns")
    return Request(
        HashedPrompt(ids[:num_blocks], size, num_tokens),
        seconds(value, "t"),
        num_output,
        output,
        (namespace,) if namespace else (),
        text(value, "s"),
        line,
    )


def _line(told: dict[str, Any]) -> bytes:
    return json.dumps(told, separators=(",", ":")).encode() + b"\n"
