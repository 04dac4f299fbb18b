"""The work that is measured: seeded prompts, batches and traces, as int32 arrays made outside the timed parts."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "DecodeBatch",
    "PrefixForest",
    "SharedPrefixes",
    "Tokens",
    "as_lists",
    "expand_ids",
    "random_tokens",
    "read_trace",
    "synthetic_trace",
]

Tokens = NDArray[np.int32]
VOCABULARY = 128_000


def random_tokens(rng: np.random.Generator, num_tokens: int) -> Tokens:
    """A prompt that shares nothing with any other, int32 `[num_tokens]`."""
    return rng.integers(0, VOCABULARY, num_tokens, dtype=np.int32)


def as_lists(prompts: Sequence[Tokens]) -> list[list[int]]:
    """The same prompts as lists of ints."""
    return [prompt.tolist() for prompt in prompts]


class SharedPrefixes:
    """Prompts that take turns in a few shared prefixes and go on with tokens of their own.

    Args:
        num_prefixes: how many prefixes take turns.
        prefix_tokens: length of the shared part.
        own_tokens: length of the part that no other prompt has.
    """

    def __init__(self, num_prefixes: int, prefix_tokens: int, own_tokens: int, seed: int = 0) -> None:
        self.rng = np.random.default_rng(seed)
        self.prefixes = [random_tokens(self.rng, prefix_tokens) for _ in range(num_prefixes)]
        self.own_tokens = own_tokens
        self.num_made = 0

    def batch(self, n: int) -> list[Tokens]:
        """The next n prompts."""
        return [self.prompt() for _ in range(n)]

    def prompt(self) -> Tokens:
        """The next prompt, int32 `[prefix_tokens + own_tokens]`."""
        prefix = self.prefixes[self.num_made % len(self.prefixes)]
        self.num_made += 1
        return np.concatenate([prefix, random_tokens(self.rng, self.own_tokens)])


@dataclass(frozen=True, slots=True)
class DecodeBatch:
    """Sequences that decode together: prompts of mixed length, so that some cross a block boundary in every step."""

    prompts: list[Tokens]
    steps: Tokens
    """Tokens of each step, `[num_steps, num_sequences]`."""

    @classmethod
    def make(cls, num_sequences: int, num_steps: int, seed: int = 0, *, shortest: int = 33) -> DecodeBatch:
        """Prompts of `shortest` to 63 more tokens, and a random token for each sequence and step."""
        rng = np.random.default_rng(seed)
        prompts = [random_tokens(rng, int(length)) for length in rng.integers(shortest, shortest + 64, num_sequences)]
        steps = rng.integers(0, VOCABULARY, (num_steps, num_sequences), dtype=np.int32)
        return cls(prompts, steps)

    def num_blocks(self, block_size: int) -> int:
        """Blocks that hold all sequences when all steps are done."""
        longest = max(len(prompt) for prompt in self.prompts) + len(self.steps)
        return len(self.prompts) * -(-longest // block_size)


class PrefixForest:
    """Requests from a Zipf prefix tree: a system prompt, a document under it, and tokens of the request's own.

    System prompts have 128 to 511 tokens, documents 64 to 511, own parts 32 to 480; the rank of a request's document
    follows a Zipf law with exponent 1, and a document belongs to one system prompt, again by a Zipf law.
    """

    def __init__(self, num_documents: int, num_systems: int = 64, seed: int = 0) -> None:
        self.rng = rng = np.random.default_rng(seed)
        systems = [random_tokens(rng, int(length)) for length in rng.integers(128, 512, num_systems)]
        parents = rng.choice(num_systems, num_documents, p=zipf(num_systems))
        lengths = rng.integers(64, 512, num_documents)
        self.prefixes = [
            np.concatenate([systems[parent], random_tokens(rng, int(length))])
            for parent, length in zip(parents, lengths, strict=True)
        ]
        self.shares = zipf(num_documents)

    def batch(self, n: int) -> list[Tokens]:
        """The next n prompts."""
        documents = self.rng.choice(len(self.prefixes), n, p=self.shares)
        lengths = self.rng.integers(32, 481, n)
        own = np.split(random_tokens(self.rng, int(lengths.sum())), np.cumsum(lengths)[:-1])
        return [
            np.concatenate([self.prefixes[document], tokens]) for document, tokens in zip(documents, own, strict=True)
        ]


def zipf(n: int) -> NDArray[np.float64]:
    """Shares of ranks 1 to n that fall as 1/rank and add up to one, `[n]`."""
    shares: NDArray[np.float64] = 1.0 / np.arange(1, n + 1, dtype=np.float64)
    shares /= shares.sum()
    return shares


def read_trace(path: Path) -> list[list[int]]:
    """Read the block ids of each request from JSON lines with `hash_ids`, plain or gzip."""
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as lines:
        return [json.loads(line)["hash_ids"] for line in lines if line.strip()]


def synthetic_trace(num_requests: int, seed: int = 0) -> list[list[int]]:
    """Block ids of conversations whose turns go on from each other: about 24 a request, a third seen before.

    Each request opens a conversation (two in three) or takes up one of the last 400; all share their first id.
    """
    rng = np.random.default_rng(seed)
    fresh = iter_ids(1)
    conversations: list[list[int]] = []
    for _ in range(num_requests):
        if conversations and rng.random() < 0.33:
            recent = min(len(conversations), 400)
            history = conversations[-int(rng.integers(1, recent + 1))]
        else:
            history = [0]
        num_new = 1 + int(rng.lognormal(2.2, 1.0))
        conversations.append(history + [next(fresh) for _ in range(num_new)])
    return conversations


def iter_ids(start: int) -> Iterator[int]:
    """Ids that were not given before."""
    while True:
        yield start
        start += 1


def expand_ids(ids: Sequence[int], block_size: int) -> Tokens:
    """Token ids of the blocks with these ids: each becomes `block_size` tokens of its own.

    Returns int32 `[len(ids) * block_size]`.

    >>> expand_ids([0, 2], 4).tolist()
    [0, 1, 2, 3, 8, 9, 10, 11]
    """
    starts = np.asarray(ids, np.int32)[:, None] * block_size
    return np.add(starts, np.arange(block_size, dtype=np.int32), dtype=np.int32).reshape(-1)
