"""What does a decode step of 1,024 sequences cost per sequence, block boundaries and all?

Reference: a call per sequence over one object per block, with the same tokens in the same process.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial

import numpy as np

from harness import Prepare, Timing, Work, interleave
from references import ObjectPerBlockManager
from report import AtMost, Options, Row, TimesFaster, main
from subjects import BLOCK_SIZE, kvist_manager, serve, serve_objects, step, step_objects
from workloads import DecodeBatch, SharedPrefixes, Tokens

NUM_SEQUENCES = 1_024
STEPS_PER_REPETITION = BLOCK_SIZE
UNITS_PER_REPETITION = STEPS_PER_REPETITION * NUM_SEQUENCES

Step = Callable[[Tokens], None]
Arrive = Callable[[list[Tokens]], int]


def measure(options: Options) -> list[Row]:
    """W3: mean over 16 steps of append and commit by rows; then the same with a request coming by every 16 steps."""
    num_steps, rounds = (32, 1) if options.quick else (256, 5)
    plain = [one_round(num_steps, seed, without_arrivals) for seed in range(rounds)]
    mixed = [one_round(num_steps, seed, with_arrivals) for seed in range(rounds)]
    kvist, objects = (ns_per_sequence(plain, name) for name in ("kvist", "objects"))
    row = partial(Row, unit="ns", reference_name="call per sequence")
    return [
        row(
            name="decode 1,024, per sequence and step",
            value=kvist,
            reference=objects,
            target=AtMost(100, "ns"),
            goal=25,
        ),
        row(name="decode 1,024, per sequence and step", value=kvist, reference=objects, target=TimesFaster(50)),
        row(
            name="the same, a request comes by every 16 steps",
            value=ns_per_sequence(mixed, "kvist"),
            reference=ns_per_sequence(mixed, "objects"),
            note="its admission publishes what all sequences have committed since the last one",
        ),
    ]


def one_round(num_steps: int, seed: int, prepared: Callable[[Step, Arrive, Tokens], Prepare]) -> dict[str, Timing]:
    """Admit all sequences to new managers, then time 16 steps at once: in these each row crosses one boundary."""
    work = DecodeBatch.make(NUM_SEQUENCES, num_steps + STEPS_PER_REPETITION, seed)
    contestants = {
        "kvist": prepared(*kvist_steps(work), work.steps),
        "objects": prepared(*object_steps(work), work.steps),
    }
    return interleave(contestants, repeats=num_steps // STEPS_PER_REPETITION, warmup=1)


def kvist_steps(work: DecodeBatch) -> tuple[Step, Arrive]:
    """The step of Kvist by rows, with every prompt admitted and computed."""
    longest = max(len(prompt) for prompt in work.prompts) + len(work.steps)
    manager = kvist_manager(num_blocks(work), max_sequences=NUM_SEQUENCES + 1, max_sequence_length=longest)
    sequences = [manager.add_sequence(prompt) for prompt in work.prompts]
    manager.commit(sequences)
    rows = np.array([sequence.row for sequence in sequences], np.int64)
    return partial(step, manager, rows), partial(serve, manager)


def object_steps(work: DecodeBatch) -> tuple[Step, Arrive]:
    """The step over objects, a call per sequence, with every prompt admitted and computed."""
    manager = ObjectPerBlockManager(num_blocks(work), BLOCK_SIZE)
    sequences = [manager.add_sequence(prompt) for prompt in work.prompts]
    for sequence in sequences:
        manager.commit(sequence)
    return partial(step_objects, manager, sequences), partial(serve_objects, manager)


def num_blocks(work: DecodeBatch) -> int:
    """Room for every step, and for the request that comes by."""
    return work.num_blocks(BLOCK_SIZE) + 64


def without_arrivals(take_step: Step, _: Arrive, steps: Tokens) -> Prepare:
    """Each repetition is 16 steps."""
    return lambda repetition: Work(partial(take_steps, take_step, steps_of(steps, repetition)), UNITS_PER_REPETITION)


def with_arrivals(take_step: Step, arrive: Arrive, steps: Tokens) -> Prepare:
    """Each repetition is a short request that is admitted, computed and freed, and 16 steps."""
    prompts = SharedPrefixes(4, 48, 52, seed=3)

    def prepare(repetition: int) -> Work:
        arrivals = prompts.batch(1)

        def call() -> None:
            arrive(arrivals)
            take_steps(take_step, steps_of(steps, repetition))

        return Work(call, UNITS_PER_REPETITION)

    return prepare


def take_steps(take_step: Step, steps: Tokens) -> None:
    """Take one step after the other."""
    for tokens in steps:
        take_step(tokens)


def steps_of(steps: Tokens, repetition: int) -> Tokens:
    """The tokens of one repetition, `[16, num_sequences]`."""
    return steps[repetition * STEPS_PER_REPETITION :][:STEPS_PER_REPETITION]


def ns_per_sequence(rounds: list[dict[str, Timing]], name: str) -> float:
    """Median over repetitions of the mean over their steps."""
    samples = [sample for timings in rounds for sample in timings[name].samples_ns]
    return statistics.median(samples)


if __name__ == "__main__":
    main("decode", measure, __doc__)
