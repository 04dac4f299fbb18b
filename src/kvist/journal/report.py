"""What a journal says and what a replay of it came to, for people: the text of `kvist replay journal`."""

from __future__ import annotations

from collections import Counter, deque
from os import PathLike
from typing import Any

from kvist.journal.replaying import Call, Replay, ReplayError
from kvist.journal.settings import Policies
from kvist.manager import KVCacheManager

__all__ = ["describe", "report"]

NUM_LAST_CALLS = 5
MAX_SEQUENCES_SHOWN = 20


def report(
    path: str | PathLike[str], *, stop_at: int | None = None, policies: Policies | None = None, state: bool = False
) -> dict[str, Any]:
    """Replay a journal, to its end or up to and including call `stop_at`, and return what happened, as JSON can say it.

    Keys: `versions` of what wrote it, `num_calls` made, `calls` by name, `raised` by error, `last_calls` as text,
    `digest` of what it came to, `problem` (where it differs from the journal, or the books are wrong; None if nowhere),
    `never_returned` (whether the last call was begun and not ended), and with `state` the text of `describe`. Raises
    WireError for what is no journal, OSError for what cannot be read.
    """
    again = Replay(path, policies=policies)
    calls, errors = Counter[str](), Counter[str]()
    last: deque[Call] = deque(maxlen=NUM_LAST_CALLS)
    problem = None
    try:
        while (stop_at is None or again.num_calls < stop_at) and (call := again.step()) is not None:
            calls[call.name.strip("_")] += 1
            last.append(call)
            if call.outcome and "raised" in call.outcome:
                errors[call.outcome["raised"]] += 1
        again.manager.check()
    except (ReplayError, AssertionError) as error:
        problem = str(error)
    told: dict[str, Any] = {
        "versions": again.head["versions"],
        "num_calls": again.num_calls,
        "calls": dict(calls.most_common()),
        "raised": dict(errors.most_common()),
        "last_calls": list(map(str, last)),
        "never_returned": again.last is not None and again.last.outcome is None,
        "problem": problem,
    }
    if state:
        told["state"] = describe(again.manager)
    return told | {"digest": again.manager.digest()}


def describe(manager: KVCacheManager) -> str:
    """Return what runs, what is held and what is cached, line by line."""
    stats = manager.stats()
    lines = [
        f"{stats.num_sequences} sequences run, {stats.num_suspended_now} are suspended, {stats.num_pins} pins hold",
        f"{stats.num_blocks} blocks, {stats.num_free_blocks} free, of these {stats.num_evictable_blocks} evictable; "
        f"{stats.num_extents} extents cached",
    ]
    for index, group in enumerate(stats.groups):
        lines.append(
            f"group {index} ({group.kind}): {group.num_blocks} blocks, {group.num_free_blocks} free, "
            f"{group.num_held_blocks} held, {group.num_pinned_blocks} pinned"
        )
    lines += [f"{tier.name}: {tier.num_blocks} blocks, {tier.num_free_blocks} free" for tier in stats.tiers]
    running = manager._state.rows.running()
    lines += [
        f"row {each.row}: {each.num_tokens} tokens, {each.num_computed_tokens} computed, {each.num_cached_tokens} "
        f"found in the cache, namespace {each.namespace!r}, blocks {each.block_ids.tolist()}"
        for each in running[:MAX_SEQUENCES_SHOWN]
    ]
    if len(running) > MAX_SEQUENCES_SHOWN:
        lines.append(f"... and {len(running) - MAX_SEQUENCES_SHOWN} more")
    return "\n".join(lines)
