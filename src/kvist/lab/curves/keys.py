"""Names blocks by what they and all blocks before them hold: 64 bits, the same in any process."""

from __future__ import annotations

from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from kvist.core.extents import Namespace
from kvist.lab.traces.requests import GOLDEN, MIX_1, mixed

__all__ = ["Keys", "chained", "content_keys", "mixed", "scope_key"]

Keys = NDArray[np.uint64]
"""Names of blocks, uint64 `[n]`."""


def scope_key(namespace: Namespace, salt: int = 0) -> np.uint64:
    """Return what keeps the blocks of a namespace, and of ids with a salt, apart from all others."""
    told = "\0".join(f"{type(each).__name__} {each!r}" for each in (*namespace, salt))
    return np.uint64(int.from_bytes(blake2b(told.encode(), digest_size=8).digest(), "little"))


def content_keys(tokens: NDArray[np.int32], block_size: int) -> Keys:
    """Return a key for what each full block holds, whatever comes before it, `[len(tokens) // block_size]`.

    It is a multilinear hash: the sum of the tokens with fixed pseudo-random odd weights, modulo 2**64.
    """
    num_blocks = len(tokens) // block_size
    weights = mixed(np.arange(1, block_size + 1, dtype=np.uint64) * GOLDEN) | np.uint64(1)
    blocks = tokens[: num_blocks * block_size].reshape(num_blocks, block_size)
    keys: Keys = blocks.astype(np.uint64) @ weights
    return keys


def chained(contents: Keys, counts: NDArray[np.int64], scopes: Keys) -> Keys:
    """Return a key for each block and all before it in its request.

    `contents` are the requests' blocks one after another, `counts[i]` of them of request i, whose scope is `scopes[i]`.
    Two different prefixes get the same key with a probability of 2**-64: among a million of them, 3e-8.

    >>> contents, counts, scopes = np.array([1, 2, 1, 3], np.uint64), np.array([2, 2]), np.zeros(2, np.uint64)
    >>> keys = chained(contents, counts, scopes)
    >>> bool(keys[0] == keys[2]), bool(keys[1] == keys[3])
    (True, False)
    """
    starts = np.cumsum(counts) - counts
    depths = (np.arange(len(contents)) - np.repeat(starts, counts)).astype(np.uint64)
    sums = np.cumsum(mixed(contents * GOLDEN + mixed(depths * MIX_1 + GOLDEN)), dtype=np.uint64)
    before = np.concatenate([np.zeros(1, np.uint64), sums])[starts]
    return mixed(sums - np.repeat(before - scopes, counts))
