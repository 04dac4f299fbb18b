"""What does it cost to ask what a trace would hit: the whole LRU curve, the optimum, a replay through the manager?

Per block reference, on generated conversations of about 24 blocks of 512 tokens, and, where KVIST_TRACES names a folder
with them, on the Mooncake conversations. Reference: a bare ordered dict as LRU of one size, with the references as
lists of ints: no tokens, no time, no concurrency. Then what shadow caches add to a request.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np

from harness import Prepare, Work, interleave
from kvist.lab.curves import References, lru_curve, optimal_curve, references_of, sampled_curve
from kvist.lab.replay import ReplayConfig, replay
from kvist.lab.shadow import Shadow, ShadowCaches
from kvist.lab.traces.opening import open_trace
from kvist.lab.traces.requests import HashedPrompt, Request
from report import Options, Row, main
from subjects import kvist_manager, serve
from workloads import SharedPrefixes, synthetic_trace

TRACES_VARIABLE = "KVIST_TRACES"
NUM_BLOCKS, BLOCK_SIZE = 10_000, 512
DICT, SECOND_NS = "dict LRU", 1e9


def measure(options: Options) -> list[Row]:
    """The generated trace, the one there may be, and shadows."""
    traces = {"generated": generated(300 if options.quick else 12_031)}
    folder = os.environ.get(TRACES_VARIABLE)
    if folder and not options.quick:
        traces["Mooncake"] = list(open_trace(Path(folder) / "mooncake" / "conversation_trace.jsonl.gz"))
    repeats = 1 if options.quick else 3
    rows = [row for name, requests in traces.items() for row in trace_rows(name, requests, repeats)]
    return [*rows, shadow_row(options.quick)]


def generated(num_requests: int) -> list[Request]:
    """Conversations whose turns go on from each other, without outputs."""
    return [
        Request(HashedPrompt(np.array(ids, np.int64), BLOCK_SIZE, len(ids) * BLOCK_SIZE), line=line)
        for line, ids in enumerate(synthetic_trace(num_requests), 1)
    ]


def trace_rows(name: str, requests: Sequence[Request], repeats: int) -> list[Row]:
    """Every question about one trace, beside the dict."""
    references = references_of(requests, BLOCK_SIZE)
    prompts = [references.ids[start:end].tolist() for start, end in pairwise(references.starts.tolist())]
    questions: dict[str, Callable[[], object]] = {
        DICT: partial(hits_of_dict, prompts, NUM_BLOCKS),
        "LRU at every size": partial(lru_curve, references),
        "the same, and reading references": partial(curve_of, requests),
        "optimum at one size": partial(optimal_curve, references, [NUM_BLOCKS]),
        "LRU at every size, 1 block in 10": partial(sampled_curve, references, 0.1),
        "replay, whole blocks": partial(replay, requests, ReplayConfig(num_blocks=NUM_BLOCKS, content="blocks")),
        "replay, tokens and outputs": partial(replay, requests, ReplayConfig(num_blocks=NUM_BLOCKS)),
        "replay, 64 at once": partial(replay, requests, ReplayConfig(num_blocks=NUM_BLOCKS, concurrency=64)),
    }
    check(prompts, references)
    contestants = {question: prepared(call, references.num_references) for question, call in questions.items()}
    timings = interleave(contestants, repeats=repeats, warmup=1)
    ns = {question: timing.median_us * 1e3 for question, timing in timings.items()}
    row = partial(Row, unit="ns", reference=ns[DICT], reference_name=DICT)
    of = f"{references.num_references:,} references, {name}"
    rates = {question: f"{SECOND_NS / each:,.0f} references a second" for question, each in ns.items()}
    first = f"{of}; {DICT}: {rates[DICT]}"
    return [
        row(name=f"{question}, {name}", value=each, note=f"{rates[question]} ({first if at == 1 else of})")
        for at, (question, each) in enumerate(ns.items())
        if question != DICT
    ]


def prepared(call: Callable[[], object], num_references: int) -> Prepare:
    """The same call in every repetition, in references."""
    return lambda _: Work(call, num_references)


def curve_of(requests: Sequence[Request]) -> object:
    """The whole curve, from requests."""
    return lru_curve(references_of(requests, BLOCK_SIZE))


def check(prompts: Sequence[Sequence[int]], references: References) -> None:
    """Make sure that the dict answers the same question."""
    num_hits = hits_of_dict(prompts, NUM_BLOCKS)
    expected = lru_curve(references, [NUM_BLOCKS]).hit_rate[0]
    if round(expected * references.num_references) != num_hits:
        raise RuntimeError(f"the dict hits {num_hits} blocks, the curve says {expected:.4f}")


def hits_of_dict(prompts: Sequence[Sequence[int]], num_blocks: int) -> int:
    """Hits of an LRU that looks a prompt up from its root, then touches it from its tail: an ordered dict."""
    held: OrderedDict[int, None] = OrderedDict()
    num_hits = 0
    for prompt in prompts:
        for block in prompt:
            if block not in held:
                break
            num_hits += 1
        for block in reversed(prompt):
            if block in held:
                held.move_to_end(block)
            elif len(held) >= num_blocks:
                held.popitem(last=False)
            held[block] = None
    return num_hits


def shadow_row(quick: bool) -> Row:
    """What four shadows of a sixteenth of the blocks add to admitting, committing and freeing a prompt."""
    repeats, times = (3, 2) if quick else (30, 64)
    prompts = SharedPrefixes(16, 2_048, 2_048)
    bare, followed = kvist_manager(8_192), kvist_manager(8_192)
    shadows = [Shadow(size, policy) for size in (4_096, 65_536) for policy in ("lru", "lfu")]
    with ShadowCaches(followed, shadows):
        managers = {"without": bare, "with": followed}
        contestants: dict[str, Prepare] = {
            name: lambda _, manager=manager: Work(partial(serve, manager, prompts.batch(times)), times)  # type: ignore[misc]
            for name, manager in managers.items()
        }
        timings = interleave(contestants, repeats=repeats)
    us = {name: timing.median_us for name, timing in timings.items()}
    return Row(
        name="admit, commit, free 4,096 tokens beside 4 shadows",
        value=us["with"],
        unit="µs",
        reference=us["without"],
        reference_name="without shadows",
    )


if __name__ == "__main__":
    main("lab", measure, __doc__)
