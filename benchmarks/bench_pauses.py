"""How long does Python's garbage collector stop everything when a pool of 1,000,000 blocks is full of cached prompts?

The longest full collection (generation 2), timed by the collector's own callbacks, in interpreters of their own: one
that has imported Kvist and nothing else, and one with a full pool, at two numbers of extents for as many blocks. A
third has called `gc.freeze()` once the pool was full: what is cached then is not followed any more.
"""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import numpy as np

from report import Options, Row, main
from subjects import BLOCK_SIZE, kvist_manager, serve

NUM_BLOCKS, FEW_BLOCKS = 1_000_000, 20_000
SHORT, LONG = 160, 4_000
"""Tokens of a prompt, each of which is an extent: 100,000 of ten blocks, or 4,000 of 250."""
NUM_COLLECTIONS = 5


def measure(options: Options) -> list[Row]:
    """Pauses of a full pool beside those of an empty interpreter, and what the collector follows for a block."""
    num_blocks = FEW_BLOCKS if options.quick else NUM_BLOCKS
    empty = observed(0, LONG)
    rows = []
    for length in (LONG, SHORT):
        name = f"{num_blocks:,} blocks in {num_blocks * BLOCK_SIZE // length:,} extents"
        full, frozen = observed(num_blocks, length), observed(num_blocks, length, "freeze")
        row = partial(Row, unit="ms", reference=empty["pause_ms"], reference_name="nothing cached")
        told = f"the collector follows {full['num_more'] / num_blocks:.3f} objects for each block"
        rows.append(row(name=f"longest full collection, {name}", value=full["pause_ms"], note=told))
        rows.append(row(name="  the same after gc.freeze()", value=frozen["pause_ms"]))
    return rows


def observed(num_blocks: int, length: int, *options: str) -> dict[str, float]:
    """Return the longest pause of an interpreter of its own, in ms, and how many more objects are followed there."""
    command = [sys.executable, str(Path(__file__)), "observe", str(num_blocks), str(length), *options]
    found: dict[str, float] = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    return found


def observe(num_blocks: int, length: int, *, freezes: bool) -> None:
    """Fill a pool, collect a few times, and print what was seen."""
    gc.collect()
    before = len(gc.get_objects())
    manager = kvist_manager(num_blocks or 1)
    rng = np.random.default_rng(4)
    for _ in range(num_blocks * BLOCK_SIZE // length):
        serve(manager, [rng.integers(0, 1 << 30, length, dtype=np.int32)])
    gc.collect()
    num_more = len(gc.get_objects()) - before
    if freezes:
        gc.freeze()
    print(json.dumps({"pause_ms": longest_pause_ms(), "num_more": num_more}))


def longest_pause_ms() -> float:
    """Collect a few times, and return how long the longest took, in ms of this thread's processor time."""
    began, longest = 0, 0

    def note(phase: str, information: dict[str, int]) -> None:
        nonlocal began, longest
        if phase == "start":
            began = time.thread_time_ns()
        elif information["generation"] == 2:
            longest = max(longest, time.thread_time_ns() - began)

    gc.callbacks.append(note)
    for _ in range(NUM_COLLECTIONS):
        gc.collect()
    gc.callbacks.remove(note)
    return longest / 1e6


if __name__ == "__main__":
    if sys.argv[1:2] == ["observe"]:
        observe(int(sys.argv[2]), int(sys.argv[3]), freezes="freeze" in sys.argv)
    else:
        main("pauses", measure, __doc__)
