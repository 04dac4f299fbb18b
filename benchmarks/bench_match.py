"""What does it cost to find a 32,768-token prompt in the cache, and to find that it is not there?

References: one memcmp of the prompt's bytes; what the field's Python managers do, which is to hash the blocks of a new
request and look each up; and the leanest form of that, SHA-256 over the bytes of the array and a dict.
"""

from __future__ import annotations

from functools import partial
from itertools import cycle

import numpy as np

from harness import Prepare, Timing, again, interleave
from kvist import KVCacheManager
from references.field import FieldManager, GroupBlocks, Request
from references.lean import BlockChainIndex, bytes_agree
from report import LEANEST, AtMost, AtMostTimes, Options, Row, TimesFaster, main
from subjects import BLOCK_SIZE, field_manager, kvist_manager, serve, serve_field
from workloads import SharedPrefixes, Tokens, as_lists, random_tokens

NUM_TOKENS = 32_768
NUM_BLOCKS = 8_192
AGAIN = "a request that waits is looked up again in every step; the field then has its hashes from the first time"


def measure(options: Options) -> list[Row]:
    """W1: match one prompt that is fully cached, from an array and from a list, and prompts that are not cached."""
    rng = np.random.default_rng(1)
    prompt = random_tokens(rng, NUM_TOKENS)
    cold = [random_tokens(rng, NUM_TOKENS) for _ in range(8)]
    times, repeats = (2, 3) if options.quick else (50, 60)
    ours = kvist_contestants(cached_manager(rng, prompt), prompt, cold, times)
    references = {
        **field_contestants(cached_field(rng, prompt), prompt.tolist(), as_lists(cold)),
        **lean_contestants(prompt, times),
    }
    return rows(interleave({**ours, **references}, repeats=repeats))


def cached_prompts(rng: np.random.Generator, prompt: Tokens) -> list[Tokens]:
    """1,000 shorter prompts, and the prompt with one block more than is looked for."""
    longer = np.concatenate([prompt, random_tokens(rng, BLOCK_SIZE)])
    return [*SharedPrefixes(20, 48, 52, seed=2).batch(1_000), longer]


def cached_manager(rng: np.random.Generator, prompt: Tokens) -> KVCacheManager:
    """Kvist with the prompt cached."""
    manager = kvist_manager(NUM_BLOCKS, max_sequence_length=2 * NUM_TOKENS)
    serve(manager, cached_prompts(rng, prompt))
    require_found(manager.match_prefix(prompt).num_tokens)
    return manager


def cached_field(rng: np.random.Generator, prompt: Tokens) -> FieldManager:
    """The field's manager with the prompt cached."""
    manager = field_manager(NUM_BLOCKS)
    serve_field(manager, as_lists(cached_prompts(rng, prompt)))
    require_found(look_up(manager, prompt.tolist())[1])
    return manager


def require_found(num_tokens: int) -> None:
    if num_tokens < NUM_TOKENS - BLOCK_SIZE:
        raise RuntimeError(f"the prompt should be cached, but only {num_tokens} of its tokens are")


def look_up(manager: FieldManager, tokens: list[int]) -> tuple[GroupBlocks, int]:
    """Make a request, which hashes its blocks, and look them up."""
    return manager.computed_blocks(Request("request", tokens, BLOCK_SIZE))


def kvist_contestants(manager: KVCacheManager, prompt: Tokens, cold: list[Tokens], times: int) -> dict[str, Prepare]:
    """Each of the cold prompts differs from all cached ones in its first block."""
    cold_prompts, as_list = cycle(cold), prompt.tolist()
    return {
        "kvist": lambda _: again(partial(manager.match_prefix, prompt), times),
        "kvist, cold": lambda _: again(lambda: manager.match_prefix(next(cold_prompts)), times),
        "kvist, list": lambda _: again(partial(manager.match_prefix, as_list), max(times // 10, 1)),
    }


def field_contestants(manager: FieldManager, prompt: list[int], cold: list[list[int]]) -> dict[str, Prepare]:
    """The field's way with a new request, with one whose hashes are there from an earlier try, and with a cold one."""
    cold_prompts = cycle(cold)
    hashed = Request("request", prompt, BLOCK_SIZE)
    return {
        "field": lambda _: again(partial(look_up, manager, prompt), 1),
        "field, hashed": lambda _: again(partial(manager.computed_blocks, hashed), 1),
        "field, cold": lambda _: again(lambda: look_up(manager, next(cold_prompts)), 1),
    }


def lean_contestants(prompt: Tokens, times: int) -> dict[str, Prepare]:
    """One memcmp; the chain over bytes, from an array and from a list."""
    data, as_list = prompt.tobytes(), prompt.tolist()
    cached = bytes(bytearray(data))
    lean = BlockChainIndex(BLOCK_SIZE)
    lean.publish(data)
    return {
        "memcmp": lambda _: again(partial(bytes_agree, cached, data), times),
        "lean": lambda _: again(lambda: lean.match(prompt.tobytes()), 1),
        "lean, list": lambda _: again(lambda: lean.match(np.array(as_list, np.int32).tobytes()), 1),
    }


def rows(timings: dict[str, Timing]) -> list[Row]:
    """One row for each target, the leanest form below it; then lists, and what hashing has no part in."""
    us = {name: timing.median_us for name, timing in timings.items()}
    row = partial(Row, unit="µs", ratio_as=TimesFaster(300))
    memcmp = partial(row, reference=us["memcmp"], reference_name="one memcmp")
    field, lean = (partial(row, reference=us[name], reference_name=name) for name in ("field", "lean"))
    lean_list = partial(lean, reference=us["lean, list"])
    name = "match 32k tokens, cached"
    return [
        memcmp(name=name, value=us["kvist"], target=AtMostTimes(5, 10, "µs"), goal=8),
        field(name=name, value=us["kvist"], target=TimesFaster(300)),
        lean(name=LEANEST, value=us["kvist"]),
        field(name=f"{name}, from a list", value=us["kvist, list"]),
        lean_list(name=LEANEST, value=us["kvist, list"]),
        field(name=f"{name}, again", value=us["kvist"], reference=us["field, hashed"], note=AGAIN),
        memcmp(name="match 32k tokens, cold", value=us["kvist, cold"], target=AtMost(10, "µs")),
        field(name="match 32k tokens, cold", value=us["kvist, cold"], reference=us["field, cold"]),
    ]


if __name__ == "__main__":
    main("match", measure, __doc__)
