"""What do several groups of layers cost beside one?

Reference: a model of full layers alone. Against it stand full layers with sliding windows of 1,024 and of 512 tokens,
which are three groups; for information, full layers with a window of 1,024 and recurrent states. All take turns at the
same work, and every group has as many blocks as the one. Where requests are served, pools of attention layers are full,
so that every allocation evicts.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from bench_decode import NUM_SEQUENCES, STEPS_PER_REPETITION, UNITS_PER_REPETITION, mean_ns
from harness import Prepare, Timing, Work, again, interleave
from kvist import AttentionSpec, KVCacheManager, StateSpec
from report import AtMostTimes, Options, Row, main
from subjects import BLOCK_SIZE, FULL, compute, kvist_manager, serve, serve_in_chunks, serving, steady, step
from workloads import DecodeBatch, SharedPrefixes, Tokens, random_tokens

NUM_BLOCKS = 8_192
PROMPT_TOKENS = 4_096
PROMPT_BLOCKS = PROMPT_TOKENS // BLOCK_SIZE
LONG_TOKENS = 32_768
STATES = "  full, a window, states"
AT_MOST_TWICE = AtMostTimes(2)


@dataclass(frozen=True, slots=True)
class Mix:
    """The layers of a model, and how its prompts are served."""

    layers: tuple[AttentionSpec | StateSpec, ...]
    serve: Callable[[KVCacheManager, Sequence[Tokens]], int] = serve


def window(num_tokens: int) -> AttentionSpec:
    return AttentionSpec(num_kv_heads=8, head_dim=128, sliding_window=num_tokens)


MIXES = {
    "one": Mix((FULL,)),
    "three": Mix((FULL, window(1_024), window(512))),
    "states": Mix((FULL, window(1_024), StateSpec(shapes=((64, 128),), dtype="bfloat16")), serve_in_chunks),
}


def measure(options: Options) -> list[Row]:
    """Each kind of work in turns: finding, serving, decoding, then what schedulers do less often."""
    repeats, times = (3, 2) if options.quick else (30, 256)
    w2 = interleave(serving_contestants(SharedPrefixes(16, 2_048, 2_048), times), repeats=repeats)
    short = interleave(serving_contestants(SharedPrefixes(50, 48, 52), 2 * times), repeats=repeats)
    return [
        *rows("match 32k tokens, cached", interleave(match_contestants(min(times, 50)), repeats=repeats)),
        *rows("admit, commit, free 4,096 tokens, 2,048 cached", w2),
        *rows("admit, commit, free 100 tokens, 48 cached", short),
        *decode_rows("decode 1,024 within their windows, per sequence", options, 33),
        *decode_rows("decode 1,024 past their windows, per sequence", options, 1_025),
        *occasional_rows(min(times, 4), repeats),
    ]


def rows(name: str, timings: dict[str, Timing], target: AtMostTimes | None = AT_MOST_TWICE) -> list[Row]:
    """Three groups beside one, and below it the mix with states."""
    us = {mix: timing.median_us for mix, timing in timings.items()}
    return rows_of(name, us, "µs", target)


def rows_of(name: str, values: dict[str, float], unit: str, target: AtMostTimes | None) -> list[Row]:
    row = partial(Row, unit=unit, reference=values["one"], reference_name="full alone")
    return [row(name=name, value=values["three"], target=target), row(name=STATES, value=values["states"])]


# -- finding and serving ----------------------------------------------------------------------------------------------


def match_contestants(times: int) -> dict[str, Prepare]:
    """32k tokens that are cached as the beginning of a longer prompt, and one token that is not."""
    rng = np.random.default_rng(1)
    shared = random_tokens(rng, LONG_TOKENS)
    prompt, longer = (np.concatenate([shared, random_tokens(rng, n)]) for n in (1, BLOCK_SIZE))
    cached = [*SharedPrefixes(20, 48, 52, seed=2).batch(1_000), longer]
    return {name: matching(mix, cached, prompt, times) for name, mix in MIXES.items()}


def matching(mix: Mix, cached: Sequence[Tokens], prompt: Tokens, times: int) -> Prepare:
    """Look a prompt up. Raises RuntimeError if the cached ones do not hold it."""
    manager = kvist_manager(NUM_BLOCKS, layers=mix.layers, max_sequence_length=2 * LONG_TOKENS)
    mix.serve(manager, cached)
    num_found = manager.match_prefix(prompt).num_tokens
    if num_found < LONG_TOKENS:
        raise RuntimeError(f"the prompt should be cached, but only {num_found} of its tokens are")
    return lambda _: again(partial(manager.match_prefix, prompt), times)


def serving_contestants(prompts: SharedPrefixes, times: int) -> dict[str, Prepare]:
    """W2 or the short request, with full pools and every shared prefix cached."""
    return {name: FullPools.of(mix, prompts).serving(times) for name, mix in MIXES.items()}


@dataclass(frozen=True, slots=True)
class FullPools:
    """A manager of which all blocks of attention layers are cached, every shared prefix among them."""

    mix: Mix
    manager: KVCacheManager
    prompts: SharedPrefixes

    @classmethod
    def of(cls, mix: Mix, prompts: SharedPrefixes) -> FullPools:
        """Serve until the pools are full. Raises RuntimeError if they are not, or a prefix is not there."""
        manager = kvist_manager(NUM_BLOCKS, layers=mix.layers)
        steady(partial(mix.serve, manager), prompts, prompts.batch, NUM_BLOCKS, 1)
        for group in manager.stats().groups:
            num_blank = group.num_free_blocks - group.num_evictable_blocks
            if group.kind != "state" and num_blank > PROMPT_BLOCKS // 2:
                raise RuntimeError(f"allocations should evict, but {num_blank} {group.kind} blocks are blank")
        return cls(mix, manager, prompts)

    def serving(self, times: int) -> Prepare:
        """Serve as many prompts a repetition."""
        return serving(partial(self.mix.serve, self.manager), partial(self.prompts.batch, times))

    def forecasting(self, times: int) -> Prepare:
        """Ask whether a prompt of which half is cached could be admitted."""
        prompt = self.prompts.prompt()
        return lambda _: again(lambda: self.manager.forecast().add(prompt), times)

    def preempting(self, times: int) -> Prepare:
        """Suspend the only sequence, resume it, and commit what it lost."""
        manager, sequence = self.manager, self.manager.add_sequence(self.prompts.prompt())
        compute(manager, sequence)

        def preempt() -> None:
            manager.suspend(sequence)
            manager.resume(sequence)
            manager.commit([sequence])
            manager.take_moves()

        return lambda _: again(preempt, times)

    def evicting(self, times: int) -> Prepare:
        """Evict what 4,096 tokens hold in attention layers; what went the last time is replaced before."""
        num_groups = sum(isinstance(layer, AttentionSpec) for layer in self.mix.layers)
        num_blocks, refill = num_groups * PROMPT_BLOCKS, self.serving(times)

        def prepare(repetition: int) -> Work:
            refill(repetition).call()
            return Work(partial(self.manager.evict, num_blocks))

        return prepare


# -- decoding ---------------------------------------------------------------------------------------------------------


def decode_rows(name: str, options: Options, shortest: int) -> list[Row]:
    """The mean over all steps of a round, the median over rounds."""
    num_steps, num_rounds = (STEPS_PER_REPETITION, 1) if options.quick else (2 * STEPS_PER_REPETITION, 3)
    means = mean_ns(
        [one_round(DecodeBatch.make(NUM_SEQUENCES, num_steps, n, shortest=shortest)) for n in range(num_rounds)]
    )
    return rows_of(name, means, "ns", AT_MOST_TWICE)


def one_round(batch: DecodeBatch) -> dict[str, float]:
    """Mean nanoseconds per sequence and step, in turns of 160 steps."""
    contestants = {name: decoding(mix, batch) for name, mix in MIXES.items()}
    timings = interleave(contestants, repeats=len(batch.steps) // STEPS_PER_REPETITION, warmup=0)
    return {name: statistics.fmean(timing.samples_ns) for name, timing in timings.items()}


def decoding(mix: Mix, batch: DecodeBatch) -> Prepare:
    """All prompts admitted and computed; then a token for each in every step, and the moves taken."""
    longest = max(len(prompt) for prompt in batch.prompts) + len(batch.steps)
    manager = kvist_manager(
        batch.num_blocks(BLOCK_SIZE), layers=mix.layers, max_sequences=NUM_SEQUENCES, max_sequence_length=longest
    )
    sequences = [manager.add_sequence(prompt) for prompt in batch.prompts]
    manager.commit(sequences)
    sequence_rows = np.array([sequence.row for sequence in sequences], np.int64)

    def take_steps(start: int) -> None:
        for tokens in batch.steps[start : start + STEPS_PER_REPETITION]:
            step(manager, sequence_rows, tokens)
            manager.take_moves()

    return lambda repetition: Work(partial(take_steps, repetition * STEPS_PER_REPETITION), UNITS_PER_REPETITION)


# -- what schedulers do less often ------------------------------------------------------------------------------------


def occasional_rows(times: int, repeats: int) -> list[Row]:
    """Forecasts, preemption and eviction on request, with the pools of W2."""
    prompts = SharedPrefixes(16, 2_048, 2_048)
    pools = {name: FullPools.of(mix, prompts) for name, mix in MIXES.items()}
    kinds = {
        "forecast whether 4,096 tokens fit": FullPools.forecasting,
        "suspend, resume, commit 4,096 tokens": FullPools.preempting,
        "evict what 4,096 tokens hold": FullPools.evicting,
    }
    return [
        row
        for name, kind in kinds.items()
        for row in rows(
            name, interleave({mix: kind(each, times) for mix, each in pools.items()}, repeats=repeats), None
        )
    ]


if __name__ == "__main__":
    main("groups", measure, __doc__)
