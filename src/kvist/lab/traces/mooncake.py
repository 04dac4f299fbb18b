"""Mooncake's form: a line has a request's time in ms, its lengths, and the ids of its prompt's prefix-chained blocks.

An id stands for 512 tokens and all that came before them, in the whole trace. A file with other blocks, or without ids
for a last block that is partly filled, says so in each line, as `block_size`, which other readers pass over.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from kvist.lab.traces.chains import Chains
from kvist.lab.traces.fields import Malformed, block_size, count, hash_ids, prompt_length, seconds, text
from kvist.lab.traces.requests import HashedPrompt, Request
from kvist.lab.traces.streams import Source, created

__all__ = ["BLOCK_SIZE", "block_size_of", "is_mooncake", "read", "write"]

BLOCK_SIZE = 512


def is_mooncake(value: Any) -> bool:
    """Whether a JSON value looks like a line of this form."""
    return isinstance(value, dict) and "hash_ids" in value and "input_length" in value


def block_size_of(value: dict[str, Any]) -> int:
    """Return how many tokens an id of this line stands for."""
    return block_size(value, BLOCK_SIZE)


def read(source: Source) -> Iterator[Request]:
    """Yield the requests, as they lie in the file."""
    return source.each(_request)


def _request(value: dict[str, Any], line: int) -> Request:
    size, num_tokens = block_size_of(value), prompt_length(value, "input_length")
    ids = hash_ids(value.get("hash_ids"), "hash_ids")
    if len(ids) != -(-num_tokens // size) and not ("block_size" in value and len(ids) == num_tokens // size):
        told = f"{num_tokens} tokens are {-(-num_tokens // size)} blocks of {size}, got {len(ids)} ids"
        raise Malformed("input_length and hash_ids disagree", told)
    return Request(
        HashedPrompt(ids, size, num_tokens),
        seconds(value, "timestamp", 1e-3),
        count(value, "output_length", 0),
        session=text(value, "session"),
        line=line,
    )


def write(requests: Iterable[Request], path: str | Path, *, block_size: int | None = None) -> int:
    """Write requests in this form, gz or zst by the file's name; returns how many.

    Ids are numbered from 0, and those of different namespaces or sessions differ where the requests' own do. Prompts
    are cut into blocks of `block_size` tokens; None takes that of hashed prompts, and 16 for token ids. A file that is
    begun and not ended is left as it is.
    """
    chains, num_written = Chains(block_size), 0
    with created(path) as file:
        for request in requests:
            file.write(line_of(request, chains.ids(request).tolist(), chains.size_for(request)))
            num_written += 1
    return num_written


def line_of(request: Request, ids: list[int], block_size: int) -> bytes:
    """Return the line of a request whose blocks have these ids."""
    told: dict[str, Any] = {
        "timestamp": _plain(request.arrival_s * 1e3),
        "input_length": request.prompt.num_tokens,
        "output_length": request.num_output_tokens,
        "hash_ids": ids,
    }
    if block_size != BLOCK_SIZE or len(ids) * block_size < request.prompt.num_tokens:
        told["block_size"] = block_size
    if request.session:
        told["session"] = request.session
    return json.dumps(told, separators=(", ", ": ")).encode() + b"\n"


def _plain(value: float) -> int | float:
    """Return a number of ms without the noise of a product, an int where it is whole."""
    rounded = round(value, 6)
    return int(rounded) if rounded.is_integer() else rounded
