"""What does it cost to find a 32,768-token prompt in the cache, and to find that it is not there?

References: one memcmp of the prompt's bytes; a SHA-256 chain over its blocks with a dict look-up for each.
"""

from __future__ import annotations

from functools import partial
from itertools import cycle

import numpy as np

from harness import Prepare, Timing, again, interleave
from kvist import KVCacheManager
from references import BlockChainIndex, bytes_agree
from report import AtMost, AtMostTimes, Options, Row, TimesFaster, main
from subjects import BLOCK_SIZE, kvist_manager, serve
from workloads import SharedPrefixes, Tokens, random_tokens

NUM_TOKENS = 32_768
NUM_BLOCKS = 8_192


def measure(options: Options) -> list[Row]:
    """W1: match one prompt that is fully cached, from an array and from a list, and prompts that are not cached."""
    rng = np.random.default_rng(1)
    prompt = random_tokens(rng, NUM_TOKENS)
    manager = cached_manager(rng, prompt)
    timings = interleave(
        contestants(manager, rng, prompt, 2 if options.quick else 50), repeats=3 if options.quick else 60
    )
    return rows(timings)


def cached_manager(rng: np.random.Generator, prompt: Tokens) -> KVCacheManager:
    """A manager that has the prompt, one block more than is looked for, and 1,000 shorter prompts beside it."""
    manager = kvist_manager(NUM_BLOCKS, max_sequence_length=2 * NUM_TOKENS)
    serve(manager, SharedPrefixes(20, 48, 52, seed=2).batch(1_000))
    serve(manager, [np.concatenate([prompt, random_tokens(rng, BLOCK_SIZE)])])
    found = manager.match_prefix(prompt).num_tokens
    if found < NUM_TOKENS - BLOCK_SIZE:
        raise RuntimeError(f"the prompt should be cached, but only {found} of its tokens are")
    return manager


def contestants(manager: KVCacheManager, rng: np.random.Generator, prompt: Tokens, times: int) -> dict[str, Prepare]:
    """Every way to look the prompt up. Each of the cold prompts differs from all cached ones in its first block."""
    cold = cycle([random_tokens(rng, NUM_TOKENS) for _ in range(8)])
    data, as_list = prompt.tobytes(), prompt.tolist()
    cached = bytes(bytearray(data))
    chain = BlockChainIndex(BLOCK_SIZE)
    chain.publish(data)
    return {
        "kvist": lambda _: again(partial(manager.match_prefix, prompt), times),
        "kvist, cold": lambda _: again(lambda: manager.match_prefix(next(cold)), times),
        "kvist, list": lambda _: again(partial(manager.match_prefix, as_list), max(times // 10, 1)),
        "memcmp": lambda _: again(partial(bytes_agree, cached, data), times),
        "chain": lambda _: again(lambda: chain.match(prompt.tobytes()), 1),
        "chain, list": lambda _: again(lambda: chain.match(np.array(as_list, np.int32).tobytes()), 1),
    }


def rows(timings: dict[str, Timing]) -> list[Row]:
    """One row for each target, and one for lists."""
    us = {name: timing.median_us for name, timing in timings.items()}
    beside_memcmp = partial(Row, unit="µs", reference=us["memcmp"], reference_name="one memcmp")
    beside_chain = partial(Row, unit="µs", reference_name="SHA-256 chain")
    name = "match 32k tokens, cached"
    return [
        beside_memcmp(name=name, value=us["kvist"], target=AtMostTimes(5, 10, "µs"), goal=8),
        beside_chain(name=name, value=us["kvist"], reference=us["chain"], target=TimesFaster(300)),
        beside_memcmp(name="match 32k tokens, cold", value=us["kvist, cold"], target=AtMost(10, "µs")),
        beside_chain(name=f"{name}, from a list", value=us["kvist, list"], reference=us["chain, list"]),
    ]


if __name__ == "__main__":
    main("match", measure, __doc__)
