"""Requests of a trace, and their prompts: token ids, or ids of prefix-chained blocks that stand for them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kvist.core.extents import Namespace
from kvist.lab.traces.problems import Problems

__all__ = ["GOLDEN", "MIX_1", "HashedPrompt", "Prompt", "Request", "TokenPrompt", "Trace", "mixed", "salt_of"]

GOLDEN = np.uint64(0x9E3779B97F4A7C15)
MIX_1, MIX_2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


class Prompt(Protocol):
    """What a request asks for."""

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt."""

    def tokens(self) -> NDArray[np.int32]:
        """Return the token ids, `[num_tokens]`; equal prefixes of prompts have equal ids."""


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    """Token ids, `[num_tokens]`."""

    ids: NDArray[np.int32]

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self.ids)

    def tokens(self) -> NDArray[np.int32]:
        """Return the token ids, `[num_tokens]`."""
        return self.ids


@dataclass(frozen=True, slots=True)
class HashedPrompt:
    """Ids of blocks of `block_size` tokens, `[ceil(num_tokens / block_size)]`, the last one perhaps partly filled.

    Where a trace names full blocks only, there are `floor` instead of `ceil`, and the rest is known by its length. An
    id stands for a block and all before it. Ids with another `salt` are others: those that are local to a session have
    a salt of their own.
    """

    hash_ids: NDArray[np.int64]
    block_size: int
    num_tokens: int
    salt: int = 0

    def tokens(self) -> NDArray[np.int32]:
        """Return ids, `[num_tokens]`, that are fixed pseudo-random ones of each block's id and the salt.

        The same in any process (splitmix64 counters), 0 .. 2**31-1, so that blocks that differ agree nowhere.

        >>> one = HashedPrompt(np.array([7, 8]), block_size=4, num_tokens=6).tokens()
        >>> other = HashedPrompt(np.array([7, 9]), block_size=4, num_tokens=8).tokens()
        >>> len(one), bool((one[:4] == other[:4]).all()), bool((one[4:] == other[4:6]).any())
        (6, True, False)
        """
        with np.errstate(over="ignore"):
            salt = mixed(np.array([self.salt & (2**64 - 1)], np.uint64) + GOLDEN)
            seeds = mixed(self.hash_ids.astype(np.int64, copy=False).view(np.uint64) * GOLDEN + salt)
            if len(seeds) * self.block_size < self.num_tokens:
                last = seeds[-1:] if len(seeds) else salt
                seeds = np.append(seeds, mixed(last ^ np.uint64(self.num_tokens)))
            counters = np.arange(1, self.block_size + 1, dtype=np.uint64) * GOLDEN
            drawn = mixed((seeds[:, None] + counters).ravel()[: self.num_tokens])
        return (drawn >> np.uint64(33)).astype(np.int32)


@dataclass(frozen=True, slots=True)
class Request:
    """One request of a trace.

    `arrival_s` counts from the trace's start. `output` has the token ids, `[num_output_tokens]`, where the trace does.
    Requests of one `session` follow one another. `line` is where in the trace it was, 1 the first.
    """

    prompt: Prompt
    arrival_s: float = 0.0
    num_output_tokens: int = 0
    output: NDArray[np.int32] | None = None
    namespace: Namespace = ()
    session: str = ""
    line: int = 0


class Trace(Protocol):
    """Requests in the order of their arrival; can be iterated many times, and holds no more than it must.

    `block_size` is that of hashed prompts, None where prompts are tokens. `problems` are those of the last pass.
    """

    name: str
    block_size: int | None
    problems: Problems

    def __iter__(self) -> Iterator[Request]:
        """Read the trace from its start."""


def salt_of(session: str) -> int:
    """Return a number of 63 bits for ids that are local to a session; the same in any process.

    >>> salt_of("trace_0001") == salt_of("trace_0001") != salt_of("trace_0002")
    True
    """
    return int.from_bytes(blake2b(session.encode(), digest_size=8).digest(), "little") >> 1


def mixed(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return splitmix64's finaliser of each value, a bijection (Steele, Lea and Flood, OOPSLA 2014).

    >>> bool((mixed(np.arange(3, dtype=np.uint64)) != mixed(np.arange(1, 4, dtype=np.uint64))).all())
    True
    """
    values = (values ^ (values >> np.uint64(30))) * MIX_1
    values = (values ^ (values >> np.uint64(27))) * MIX_2
    return values ^ (values >> np.uint64(31))
