"""Why a prompt was not found in the cache, as far as it was not."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from kvist.core.extents import Loss, Match, Namespace
from kvist.core.tokens import TOKEN_BYTES, common_prefix

if TYPE_CHECKING:
    from kvist.core.state import CacheState

__all__ = ["MISSES", "NOTHING_MISSED", "Miss", "miss_of"]

COLD, EVICTED, OTHER_NAMESPACE = "cold", "evicted", "other namespace"
UNCOMMITTED, UNDER_A_BLOCK, WINDOW = "uncommitted", "under a block", "window"
MISSES = (COLD, EVICTED, OTHER_NAMESPACE, UNCOMMITTED, UNDER_A_BLOCK, WINDOW)
"""The classes of misses.

Never committed here; evicted since; there, but in another namespace; in a running sequence that has not committed it;
less than a block; there, but without what windows or states would need to go on.
"""

MAX_COMPARED = 64


class Miss(NamedTuple):
    """Why a match ends where it does: the class, empty if nothing more could be found, and the eviction, if any."""

    reason: str
    loss: Loss | None = None


NOTHING_MISSED = Miss("")


def miss_of(state: CacheState, prompt: bytes | memoryview, namespace: Namespace, match: Match | None) -> Miss:
    """Class the miss at the end of a match of all of a prompt but its last token."""
    position = 0 if match is None else match.position
    num_partial = 0 if match is None else match.num_partial_tokens
    limit, block_bytes = len(prompt) - TOKEN_BYTES, state.tree.block_bytes
    if position + num_partial * TOKEN_BYTES >= limit:
        return NOTHING_MISSED
    if match is not None and match.known > position:
        return Miss(WINDOW)
    key = bytes(prompt[position : position + block_bytes])
    if match is None or match.child is None:
        loss = state.tree.loss(namespace, match, key)
        if loss is not None:
            return Miss(EVICTED, loss)
        if _is_uncommitted(state, namespace, match, key, num_partial):
            return Miss(UNCOMMITTED)
    if position + block_bytes > limit:
        return Miss(UNDER_A_BLOCK)
    if not position and state.tree.is_first_elsewhere(key, namespace):
        return Miss(OTHER_NAMESPACE)
    return Miss(COLD)


def _is_uncommitted(state: CacheState, namespace: Namespace, match: Match | None, key: bytes, num_partial: int) -> bool:
    """Say whether a running sequence goes on from the match with tokens that are not committed yet."""
    rows = state.rows
    if rows.num_free == len(rows.sequences):
        return False
    num_blocks = 0 if match is None else match.position // state.tree.block_bytes
    start, least = num_blocks * state.block_size, num_partial * TOKEN_BYTES
    same_place = np.flatnonzero((rows.num_published == num_blocks) & (rows.num_tokens > start + num_partial))
    for row in same_place[:MAX_COMPARED].tolist():
        sequence = rows.sequence_at(row)
        if sequence.namespace != namespace or not sequence.publishes or sequence.leader is not None:
            continue
        if match is not None and sequence._extent is not match.extent:
            continue
        ours = rows.token_bytes(sequence, start, min(start + state.block_size, rows.tokens_of[row]))
        if common_prefix(key, 0, ours, min(len(key), len(ours))) > least:
            return True
    return False
