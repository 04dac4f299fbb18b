"""What does each policy cost beside the default?

W2, 4,096 tokens of which 2,048 are cached, into a full pool. Reference: the default policy, `priority`.
"""

from __future__ import annotations

from functools import partial

from harness import Prepare, interleave
from report import Options, Row, main
from subjects import kvist_manager, serve, steady
from workloads import SharedPrefixes

DEFAULT = "priority"
POLICIES = ("fifo", "lru", "lfu", "slru", "s3fifo", "cost")
NUM_BLOCKS = 8_192


def measure(options: Options) -> list[Row]:
    """W2 under each policy, in turns."""
    repeats, times = (3, 2) if options.quick else (30, 256)
    prompts = SharedPrefixes(16, 2_048, 2_048)
    timings = interleave({policy: serving(policy, prompts, times) for policy in (DEFAULT, *POLICIES)}, repeats=repeats)
    us = {policy: timing.median_us for policy, timing in timings.items()}
    row = partial(Row, unit="µs", reference=us[DEFAULT], reference_name=DEFAULT)
    return [row(name=f"admit, commit, free 4,096 tokens, {policy}", value=us[policy]) for policy in POLICIES]


def serving(policy: str, prompts: SharedPrefixes, times: int) -> Prepare:
    """A full pool under one policy, with every shared prefix cached."""
    manager = kvist_manager(NUM_BLOCKS, policy=policy)
    return steady(partial(serve, manager), prompts, prompts.batch, NUM_BLOCKS, times)


if __name__ == "__main__":
    main("policies", measure, __doc__)
