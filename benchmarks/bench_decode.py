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
STEPS_PER_ARRIVAL = 16
WARMUP_STEPS = 4

Step = Callable[[Tokens], None]
Arrive = Callable[[list[Tokens]], int]


def measure(options: Options) -> list[Row]:
    """W3: mean over steps of append and commit by rows; then the same with a request coming by every 16 steps."""
    num_steps, rounds = (40, 1) if options.quick else (256, 5)
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
    """Admit all sequences to new managers, then time every step."""
    work = DecodeBatch.make(NUM_SEQUENCES, num_steps + WARMUP_STEPS, seed)
    contestants = {
        "kvist": prepared(*kvist_steps(work), work.steps),
        "objects": prepared(*object_steps(work), work.steps),
    }
    return interleave(contestants, repeats=num_steps, warmup=WARMUP_STEPS)


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
    """Each repetition is one step."""
    return lambda repetition: Work(partial(take_step, steps[repetition]), NUM_SEQUENCES)


def with_arrivals(take_step: Step, arrive: Arrive, steps: Tokens) -> Prepare:
    """Each repetition is one step; every 16th begins with a short request that is admitted, computed and freed."""
    prompts = SharedPrefixes(4, 48, 52, seed=3)

    def prepare(repetition: int) -> Work:
        arrivals = prompts.batch(1) if repetition % STEPS_PER_ARRIVAL == 0 else []

        def call() -> None:
            arrive(arrivals)
            take_step(steps[repetition])

        return Work(call, NUM_SEQUENCES)

    return prepare


def ns_per_sequence(rounds: list[dict[str, Timing]], name: str) -> float:
    """Median over rounds of the mean over steps."""
    return statistics.median(timings[name].mean_us for timings in rounds) * 1e3


if __name__ == "__main__":
    main("decode", measure, __doc__)
