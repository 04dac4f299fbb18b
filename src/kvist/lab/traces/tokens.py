"""Token-id JSONL: a line has the token ids of a prompt, and perhaps those of the answer, a time, a tenant.

Names of fields are those that are in use: `tokens`, `prompt_token_ids`, `input_tok_ids`, `input_ids`, `token_ids` or
`prompt` for the prompt; see docs/traces.md for the others.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from kvist.core.extents import Namespace
from kvist.lab.traces.fields import Malformed, count, first_of, seconds, text, token_ids
from kvist.lab.traces.requests import Request, TokenPrompt
from kvist.lab.traces.streams import Source, created

__all__ = ["arrival_of", "is_tokens", "namespace_of", "read", "write"]

PROMPTS = ("tokens", "prompt_token_ids", "input_tok_ids", "input_ids", "token_ids", "prompt")
OUTPUTS = ("output", "output_token_ids", "output_tok_ids", "output_ids")
LENGTHS = ("num_output_tokens", "output_toks", "output_length", "output_len")
TIMES = (
    ("arrival_s", 1.0), ("arrival_time", 1.0), ("arrival_time_ns", 1e-9), ("arrival_time_ms", 1e-3),
    ("timestamp", 1e-3),
)  # fmt: skip
"""Fields that say when a request arrived, and what makes seconds of them."""


def is_tokens(value: Any) -> bool:
    """Whether a JSON value looks like a line of this form."""
    return isinstance(value, dict) and any(_is_ids(value.get(name)) for name in PROMPTS)


def read(source: Source) -> Iterator[Request]:
    """Yield the requests, as they lie in the file."""
    return source.each(_request)


def write(requests: Iterable[Request], path: str | Path) -> int:
    """Write requests as token ids, gz or zst by the file's name; returns how many.

    Hashed prompts are written as the token ids that stand for them.
    """
    num_written = 0
    with created(path) as file:
        for request in requests:
            file.write(_line(request))
            num_written += 1
    return num_written


def arrival_of(value: dict[str, Any]) -> float:
    """Return when a request arrived, in seconds; 0 where the line does not say."""
    for name, scale in TIMES:
        if value.get(name) is not None:
            return seconds(value, name, scale)
    return 0.0


def namespace_of(value: dict[str, Any]) -> Namespace:
    """Return the namespace of a line: text, or a list of text and ints."""
    told = value.get("namespace")
    if told is None or told == []:
        return ()
    parts = told if isinstance(told, list) else [told]
    if any(isinstance(part, bool) or not isinstance(part, str | int) for part in parts):
        raise Malformed("namespace is no text, nor a list of text and ints", f"got {told!r:.60}")
    return tuple(parts)


def _request(value: dict[str, Any], line: int) -> Request:
    name = next((each for each in PROMPTS if value.get(each) is not None), "tokens")
    ids = token_ids(value.get(name), name)
    if not len(ids):
        raise Malformed("no tokens", f"{name} is empty")
    told = first_of(value, OUTPUTS)
    output = token_ids(told, "output") if isinstance(told, list) else None
    length = next((each for each in LENGTHS if value.get(each) is not None), None)
    num_output = len(output) if output is not None else count(value, length) if length else 0
    return Request(
        TokenPrompt(ids), arrival_of(value), num_output, output, namespace_of(value), text(value, "session"), line
    )


def _line(request: Request) -> bytes:
    told: dict[str, Any] = {"tokens": request.prompt.tokens().tolist(), "arrival_s": round(request.arrival_s, 9)}
    if request.output is not None:
        told["output"] = request.output.tolist()
    elif request.num_output_tokens:
        told["num_output_tokens"] = request.num_output_tokens
    if request.namespace:
        told["namespace"] = [part.hex() if isinstance(part, bytes) else part for part in request.namespace]
    if request.session:
        told["session"] = request.session
    return json.dumps(told, separators=(",", ":")).encode() + b"\n"


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(each) is int for each in value[:8])
