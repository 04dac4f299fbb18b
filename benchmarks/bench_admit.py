"""What does a request cost from admission to the end, and does that grow with the length of its prompt?

Every pool is full, so every allocation evicts. References: a prompt of 1,024 tokens; the field's Python managers, one
object per block and a hash chain; the leanest form of that.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from harness import Prepare, Timing, Work, interleave
from report import LEANEST, AtMost, AtMostTimes, Options, Row, Target, TimesFaster, main
from subjects import (
    BLOCK_SIZE,
    field_manager,
    fill,
    kvist_manager,
    lean_manager,
    serve,
    serve_field,
    serve_lean,
    serving,
    steady,
)
from workloads import SharedPrefixes, Tokens, as_lists, random_tokens

LENGTHS = (1_024, 4_096, 16_384, 65_536)
SHORTEST, LONGEST = LENGTHS[0], LENGTHS[-1]
NUM_BLOCKS = 4 * LONGEST // BLOCK_SIZE


def measure(options: Options) -> list[Row]:
    """Flatness in prompt length, then W2 and the short request against the references."""
    lengths, repeats, times, small = (LENGTHS[:2], 3, 2, 512) if options.quick else (LENGTHS, 40, 16, 8_192)
    flat = interleave({**by_length(lengths, times), "crowded": into_a_crowd(lengths[-1])}, repeats=repeats)
    # A turn must be long beside what it takes to bring a contestant's state back into the processor's caches.
    turn = 16 * times
    w2 = interleave(beside_references(SharedPrefixes(16, 2_048, 2_048), 8_192, turn), repeats=repeats // 2 + 1)
    short = interleave(beside_references(SharedPrefixes(50, 48, 52), small, 4 * turn), repeats=repeats // 2 + 1)
    return [
        *flat_rows(flat, lengths),
        *request_rows("admit, commit, free 4,096 tokens, 2,048 cached", w2, TimesFaster(30), goal=12),
        *request_rows("admit, commit, free 100 tokens, 48 cached", short, AtMost(40, "µs"), goal=10),
    ]


def by_length(lengths: tuple[int, ...], times: int) -> dict[str, Prepare]:
    """For each length a pool full of prompts of that length, and prompts that share nothing with them or each other."""
    contestants = {}
    for length in lengths:
        rng = np.random.default_rng(length)
        run = partial(serve, kvist_manager(NUM_BLOCKS, max_sequence_length=LONGEST + BLOCK_SIZE))
        fill(run, partial(fresh_prompts, rng, length, times), NUM_BLOCKS)
        contestants[f"{length}"] = serving(run, partial(fresh_prompts, rng, length, times))
    return contestants


def into_a_crowd(length: int) -> Prepare:
    """One prompt into a pool full of prompts of the shortest length; it evicts as many as it needs room."""
    rng = np.random.default_rng(0)
    run = partial(serve, kvist_manager(NUM_BLOCKS, max_sequence_length=LONGEST + BLOCK_SIZE))

    def prepare(_: int) -> Work:
        fill(run, partial(fresh_prompts, rng, SHORTEST, 16), NUM_BLOCKS)
        return Work(partial(run, fresh_prompts(rng, length, 1)))

    return prepare


def fresh_prompts(rng: np.random.Generator, length: int, times: int) -> list[Tokens]:
    """Prompts of one length that were never seen before."""
    return [random_tokens(rng, length) for _ in range(times)]


def beside_references(prompts: SharedPrefixes, num_blocks: int, times: int) -> dict[str, Prepare]:
    """Kvist from arrays and from lists, and the references, all with a full pool and every shared prefix cached."""

    def lists(n: int) -> list[list[int]]:
        return as_lists(prompts.batch(n))

    return {
        "kvist": steady(partial(serve, kvist_manager(num_blocks)), prompts, prompts.batch, num_blocks, times),
        "kvist, list": steady(partial(serve, kvist_manager(num_blocks)), prompts, lists, num_blocks, times),
        "field": steady(partial(serve_field, field_manager(num_blocks)), prompts, lists, num_blocks, times),
        "lean": steady(partial(serve_lean, lean_manager(num_blocks)), prompts, prompts.batch, num_blocks, times),
    }


def flat_rows(timings: dict[str, Timing], lengths: tuple[int, ...]) -> list[Row]:
    """Each longer prompt beside the shortest, and the longest into a pool full of the shortest."""
    beside_shortest = partial(Row, unit="µs", reference=timings[f"{SHORTEST}"].median_us, reference_name="1,024 tokens")
    rows = [
        beside_shortest(
            name=f"admit, commit, free {length:,} tokens", value=timings[f"{length}"].median_us, target=AtMostTimes(3)
        )
        for length in lengths[1:]
    ]
    crowded = timings["crowded"].median_us
    num_evicted = lengths[-1] // SHORTEST
    return [*rows, beside_shortest(name=f"{lengths[-1]:,} tokens that evict {num_evicted} prompts", value=crowded)]


def request_rows(name: str, timings: dict[str, Timing], target: Target, goal: float) -> list[Row]:
    """A row for the target, the leanest form below it; then the same from lists."""
    us = {contestant: timing.median_us for contestant, timing in timings.items()}
    row = partial(Row, unit="µs", ratio_as=TimesFaster(30))
    field, lean = (partial(row, reference=us[name], reference_name=name) for name in ("field", "lean"))
    return [
        field(name=name, value=us["kvist"], target=target, goal=goal),
        lean(name=LEANEST, value=us["kvist"]),
        field(name=f"{name}, from a list", value=us["kvist, list"]),
    ]


if __name__ == "__main__":
    main("admit", measure, __doc__)
