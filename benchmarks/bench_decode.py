"""What does a decode step of 1,024 sequences cost per sequence, block boundaries and all?

A round admits all sequences to new managers and takes 640 steps, so that every row crosses 40 block boundaries and
fills its buffer of unpublished tokens at least once. What counts is the mean over all steps of a round; a row shows the
median of the rounds' means. References: the field's Python managers, an `allocate_slots` per sequence over one object
per block; the leanest form of that.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from harness import Prepare, Work, interleave
from report import LEANEST, AtMost, Options, Row, TimesFaster, main
from subjects import (
    BLOCK_SIZE,
    admit_field,
    field_manager,
    kvist_manager,
    lean_manager,
    serve,
    serve_field,
    serve_lean,
    step,
    step_field,
    step_lean,
)
from workloads import DecodeBatch, SharedPrefixes, Tokens, as_lists

NUM_SEQUENCES = 1_024
STEPS_PER_REPETITION = 10 * BLOCK_SIZE
UNITS_PER_REPETITION = STEPS_PER_REPETITION * NUM_SEQUENCES
NUM_STEPS, NUM_ROUNDS = 640, 5
ARRIVAL = "the same, a request comes by every 16 steps"
PUBLISHES = "its admission publishes what all sequences have committed since the last one"


@dataclass(frozen=True, slots=True)
class Decoder:
    """One contestant of a round."""

    take_step: Callable[[int], None]
    """Takes the step with this number: a token for each sequence."""
    arrival: Callable[[], Callable[[], object]]
    """Makes a request, and returns the call that serves it."""


def measure(options: Options) -> list[Row]:
    """W3: append and commit by rows; then the same with a request coming by every 16 steps."""
    num_steps, rounds = (STEPS_PER_REPETITION, 1) if options.quick else (NUM_STEPS, NUM_ROUNDS)
    plain = mean_ns([one_round(num_steps, seed, without_arrivals) for seed in range(rounds)])
    mixed = mean_ns([one_round(num_steps, seed, with_arrivals) for seed in range(rounds)])
    return rows(plain, mixed)


def rows(plain: dict[str, float], mixed: dict[str, float]) -> list[Row]:
    """A row for each target, the leanest form below; then lists, and arrivals."""
    row = partial(Row, unit="ns", ratio_as=TimesFaster(50))
    field, lean = (partial(row, reference=plain[name], reference_name=name) for name in ("field", "lean"))
    name = "decode 1,024, per sequence and step"
    return [
        field(name=name, value=plain["kvist"], target=AtMost(100, "ns"), goal=25),
        field(name=name, value=plain["kvist"], target=TimesFaster(50)),
        lean(name=LEANEST, value=plain["kvist"]),
        field(name=f"{name}, from a list", value=plain["kvist, list"]),
        field(name=ARRIVAL, value=mixed["kvist"], reference=mixed["field"], note=PUBLISHES),
        lean(name=LEANEST, value=mixed["kvist"], reference=mixed["lean"]),
    ]


def one_round(num_steps: int, seed: int, work: Callable[[Decoder, int], Work]) -> dict[str, float]:
    """Mean nanoseconds per sequence over all steps of a run, in which the contestants take turns of 160 steps each."""
    batch = DecodeBatch.make(NUM_SEQUENCES, num_steps, seed)
    decoders = {
        "kvist": kvist_decoder(batch, batch.steps),
        "kvist, list": kvist_decoder(batch, batch.steps.tolist()),
        "field": field_decoder(batch),
        "lean": lean_decoder(batch),
    }
    contestants: dict[str, Prepare] = {name: partial(work, decoder) for name, decoder in decoders.items()}
    timings = interleave(contestants, repeats=num_steps // STEPS_PER_REPETITION, warmup=0)
    return {name: statistics.fmean(timing.samples_ns) for name, timing in timings.items()}


def mean_ns(rounds: list[dict[str, float]]) -> dict[str, float]:
    """Median over rounds of their means."""
    return {name: statistics.median(means[name] for means in rounds) for name in rounds[0]}


def kvist_decoder(batch: DecodeBatch, steps: Tokens | list[list[int]]) -> Decoder:
    """Kvist by rows, with every prompt admitted and computed."""
    longest = max(len(prompt) for prompt in batch.prompts) + len(batch.steps)
    manager = kvist_manager(num_blocks(batch), max_sequences=NUM_SEQUENCES + 1, max_sequence_length=longest)
    sequences = [manager.add_sequence(prompt) for prompt in batch.prompts]
    manager.commit(sequences)
    rows = np.array([sequence.row for sequence in sequences], np.int64)
    requests = short_requests()
    return Decoder(lambda n: step(manager, rows, steps[n]), lambda: partial(serve, manager, requests.batch(1)))


def field_decoder(batch: DecodeBatch) -> Decoder:
    """The field's manager, with every prompt admitted and computed."""
    manager, steps = field_manager(num_blocks(batch)), batch.steps.tolist()
    running = [admit_field(manager, prompt)[0] for prompt in as_lists(batch.prompts)]
    requests = short_requests()
    return Decoder(
        lambda n: step_field(manager, running, steps[n]),
        lambda: partial(serve_field, manager, as_lists(requests.batch(1))),
    )


def lean_decoder(batch: DecodeBatch) -> Decoder:
    """The lean manager, with every prompt admitted and computed."""
    manager, steps = lean_manager(num_blocks(batch)), batch.steps.tolist()
    sequences = [manager.add_sequence(prompt) for prompt in batch.prompts]
    for sequence in sequences:
        manager.commit(sequence)
    requests = short_requests()
    return Decoder(
        lambda n: step_lean(manager, sequences, steps[n]), lambda: partial(serve_lean, manager, requests.batch(1))
    )


def short_requests() -> SharedPrefixes:
    """What comes by: 100 tokens, 48 of them as in the request four before."""
    return SharedPrefixes(4, 48, 52, seed=3)


def num_blocks(batch: DecodeBatch) -> int:
    """Room for every step, and for the request that comes by."""
    return batch.num_blocks(BLOCK_SIZE) + 64


def without_arrivals(decoder: Decoder, repetition: int) -> Work:
    """The steps of one turn."""
    return Work(partial(take_steps, decoder, repetition), UNITS_PER_REPETITION)


def with_arrivals(decoder: Decoder, repetition: int) -> Work:
    """The same, and before every 16 of them a short request that is admitted, computed and freed."""
    arrivals = [decoder.arrival() for _ in range(STEPS_PER_REPETITION // BLOCK_SIZE)]

    def call() -> None:
        start = repetition * STEPS_PER_REPETITION
        for number, arrive in enumerate(arrivals):
            arrive()
            for n in range(start + number * BLOCK_SIZE, start + (number + 1) * BLOCK_SIZE):
                decoder.take_step(n)

    return Work(call, UNITS_PER_REPETITION)


def take_steps(decoder: Decoder, repetition: int) -> None:
    """Take the steps of one repetition, one after the other."""
    start = repetition * STEPS_PER_REPETITION
    for n in range(start, start + STEPS_PER_REPETITION):
        decoder.take_step(n)


if __name__ == "__main__":
    main("decode", measure, __doc__)
