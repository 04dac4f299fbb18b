"""Small traces of prefix-chained blocks, and plain models of what caches of them hit."""

import os
from pathlib import Path

import numpy as np
import pytest

from kvist.lab.curves import References
from kvist.lab.traces.requests import HashedPrompt, Request, TokenPrompt


def asked(*prompts, block_size=16):
    """References of prompts that are given as lists of block ids, each id standing for one prefix."""
    starts = np.cumsum([0, *map(len, prompts)])
    return References(np.array([block for prompt in prompts for block in prompt], np.int64), starts, block_size)


def hashed(*prompts, block_size=4, **fields):
    """Requests whose prompts are whole blocks with these ids."""
    return [
        Request(HashedPrompt(np.array(ids, np.int64), block_size, len(ids) * block_size), line=line, **fields)
        for line, ids in enumerate(prompts, 1)
    ]


def token_requests(*prompts, **fields):
    return [Request(TokenPrompt(np.array(ids, np.int32)), line=line, **fields) for line, ids in enumerate(prompts, 1)]


def forest(seed, num_requests=60, fan_out=3, longest=8):
    """Prompts that walk down random prefix trees: lists of ids, equal for equal prefixes, 0 the first seen."""
    rng = np.random.default_rng(seed)
    ids, prompts = {}, []
    for _ in range(num_requests):
        path, prompt = (), []
        for _ in range(int(rng.integers(1, longest + 1))):
            path = (*path, int(rng.integers(fan_out)))
            prompt.append(ids.setdefault(path, len(ids)))
        prompts.append(prompt)
    return prompts


def hits_of_lru(prompts, num_blocks):
    """Hits of a cache that looks a prompt up from its root, then touches it from the tail: a dict, oldest first."""
    held, num_hits = {}, 0
    for prompt in prompts:
        for block in prompt:
            if block not in held:
                break
            num_hits += 1
        for block in reversed(prompt):
            held.pop(block, None)
            held[block] = None
        while len(held) > num_blocks:
            del held[next(iter(held))]
    return num_hits


def traces_folder():
    """The folder with other people's traces; the test that asks is skipped where there is none."""
    folder = os.environ.get("KVIST_TRACES")
    if not folder:
        pytest.skip("KVIST_TRACES names no folder with traces")
    return Path(folder)
