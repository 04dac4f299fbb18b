"""Run CacheMachine for long: random calls on caches that are too small, each checked by an oracle and a model.

    python scripts/soak_machine.py --examples 2000 --steps 100 --seed 1

Exits 1 and prints the shortest sequence of calls found where something is wrong; the same seed finds it again.
"""

import argparse
import random
import sys
import time
from collections.abc import Sequence
from typing import Any

from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

import kvist.core.rows
from kvist.core.policies import POLICIES
from kvist.testing import CacheMachine, cache_configs, cache_machine
from kvist.testing.configs import ALL_KINDS, ALL_POLICIES, BLOCK_SIZES

EXAMPLES_PER_ROUND = 100
"""Rounds with seeds of their own say how far the run has come."""


def soak(machine: type[CacheMachine], examples: int, steps: int, seed: int, *, shrink: bool) -> None:
    """Run that many examples of that many steps; raises the first failure."""
    phases = [Phase.generate, Phase.shrink] if shrink else [Phase.generate]
    options: dict[str, Any] = {"database": None, "deadline": None, "suppress_health_check": list(HealthCheck)}
    chosen = settings(
        max_examples=examples, stateful_step_count=steps, phases=phases, report_multiple_bugs=False, **options
    )
    machine._hypothesis_internal_use_seed = seed  # what @seed sets, for a class
    run_state_machine_as_test(machine, settings=chosen)


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--examples", type=int, default=2000)
    parser.add_argument("--steps", type=int, default=100, help="rules that each example applies")
    parser.add_argument("--seed", type=int, default=None, help="default: a random one, printed")
    parser.add_argument("--policy", choices=sorted(POLICIES), help="default: all, and two that are no library's")
    parser.add_argument("--block-size", type=int, help="default: 1, 2, 4 and 16")
    parser.add_argument("--kinds", nargs="+", choices=ALL_KINDS, default=ALL_KINDS, help="groups to mix; default: all")
    parser.add_argument(
        "--no-shrink", action="store_true", help="stop at the first failure, however long its example is"
    )
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run rounds until done or something is wrong; half of them with tails so short that they overflow."""
    options = parsed(arguments)
    seed = random.randrange(2**32) if options.seed is None else options.seed
    policies = [options.policy] if options.policy else ALL_POLICIES
    block_sizes = [options.block_size] if options.block_size else BLOCK_SIZES
    configs = cache_configs(policies, block_sizes, kinds=options.kinds)
    usual, began = kvist.core.rows.MIN_TAIL_TOKENS, time.perf_counter()
    print(f"seed {seed}: {options.examples} examples of {options.steps} steps", flush=True)
    for number, done in enumerate(range(0, options.examples, EXAMPLES_PER_ROUND)):
        examples = min(EXAMPLES_PER_ROUND, options.examples - done)
        kvist.core.rows.MIN_TAIL_TOKENS = usual if number % 2 else 1
        soak(cache_machine(configs), examples, options.steps, seed + number, shrink=not options.no_shrink)
        print(f"{done + examples} examples, {time.perf_counter() - began:.0f} s: nothing wrong", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
