"""Sequences that give their blocks up and go on later, or at once from where the cache still has what they need."""

from __future__ import annotations

from typing import Any

from kvist.core import admission, branches, holdings
from kvist.core.extents import Extent, Match
from kvist.core.sequences import Sequence, Suspended, Wishes
from kvist.core.state import CacheState
from kvist.core.tokens import TOKEN_BYTES
from kvist.errors import OutOfBlocks, SequenceError

__all__ = ["check_suspended", "cheapest_first", "is_suspended", "release_gains", "resume", "rewind_anew", "suspend"]


def suspend(state: CacheState, sequence: Sequence, *, publish: bool = True) -> None:
    """Free what a sequence holds, and keep its tokens; what is computed stays reusable until it is evicted.

    Unless it is not to be published, for it may be wrong.
    """
    rows, row = state.rows, sequence.row
    suspended = Suspended(
        rows.packed_tokens(sequence), rows.computed_of[row], sequence.num_encoder_tokens, rows.version.item(row)
    )
    if sequence._beams is not None:
        branches.leave_beams(state, sequence)
    state.end(sequence, publish=publish)
    sequence.leader = None  # where beams waited for it, it has taken the place of one
    sequence._suspended = suspended
    state.suspended[sequence] = None
    state.counters.num_suspended += 1


def resume(state: CacheState, sequence: Sequence, more: bytes) -> int:
    """Give a suspended sequence a row again, with `more` tokens at its end.

    Returns how many of its computed tokens are to be computed again.
    """
    suspended = sequence._suspended
    assert suspended is not None
    tokens = suspended.tokens + more
    num_lost = _readmit(state, sequence, tokens, suspended.num_computed, suspended.num_encoder_tokens)
    del state.suspended[sequence]
    sequence._suspended = None
    version = state.rows.version
    version[sequence.row] = max(version.item(sequence.row), suspended.version) + 1
    state.counters.num_resumed += 1
    state.counters.num_recomputed_tokens += num_lost
    return num_lost


def rewind_anew(state: CacheState, sequence: Sequence, left: int) -> None:
    """Take a sequence back to its first `left` tokens, and to what of them can still be gone on from."""
    rows, row = state.rows, sequence.row
    tokens = rows.packed_tokens(sequence)[: left * TOKEN_BYTES]
    num_computed, num_encoder_tokens = min(rows.computed_of[row], left), sequence.num_encoder_tokens
    _require_anew(state, sequence, left)
    encoder = sequence._encoder
    if encoder is not None:
        encoder.num_holders += 1
    state.end(sequence, publish=True)
    _readmit(state, sequence, tokens, num_computed, 0)
    if encoder is not None:
        state.join_encoder(sequence, encoder)
        state.end_encoder_hold(encoder)
    assert num_encoder_tokens == sequence.num_encoder_tokens
    rows.version[sequence.row] += 1


def _readmit(state: CacheState, sequence: Sequence, tokens: bytes, num_computed: int, num_encoder_tokens: int) -> int:
    """Admit the tokens of a sequence that has no row; returns how many of its computed tokens are not there any more.

    Unlike with a prompt, even the last token may be reused, as its logits were seen.
    """
    num_tokens = len(tokens) // TOKEN_BYTES
    state.require_rows(1, state.rows.num_free)
    limit = num_computed * TOKEN_BYTES
    match = None
    if sequence.reuses and limit:
        match = admission.match_prompt(state, tokens, sequence.namespace, limit)
    held = None
    if match is not None and state.lower is not None:
        match, held = admission.bring_up(state, tokens, sequence.namespace, match, limit=limit)
    try:
        _admit_again(state, sequence, tokens, match, num_encoder_tokens)
    except OutOfBlocks:  # with chunks, what is cached of a window takes blocks that a chunk from the start does not
        if match is None:
            raise
        _admit_again(state, sequence, tokens, None, num_encoder_tokens)
    finally:
        if held is not None:
            state.tree.release(held)
    state.rows.refresh_limit(sequence.row)
    assert state.rows.tokens_of[sequence.row] == num_tokens
    return num_computed - state.rows.computed_of[sequence.row]


def _admit_again(
    state: CacheState, sequence: Sequence, tokens: bytes, match: Match | None, num_encoder_tokens: int
) -> None:
    admission.admit(
        state,
        tokens,
        sequence.namespace,
        match,
        Wishes(sequence.publishes, sequence.reuses, sequence.retention, 1, num_encoder_tokens),
        sequence,
    )


def _require_anew(state: CacheState, sequence: Sequence, left: int) -> None:
    """Raise OutOfBlocks unless a sequence could begin again with nothing but what it gives back."""
    needs = admission.prompt_needs(state, left, 0, 1, 0)
    gains = _gains_but_encoder(state, sequence)
    for index, pool in enumerate(state.pools):
        free = pool.num_free + state.tree.evictable_in(pool) + gains[index]
        if needs[index] > free:
            raise OutOfBlocks(
                f"rewind: what row {sequence.row} needs to go on has left its window or state; to begin again takes "
                f"{needs[index]} blocks, but only {free} would be free or evictable",
                needed=needs[index],
                free=pool.num_free,
                evictable=free - pool.num_free,
                held=pool.num_blocks - free,
                group=state.pool_of.index(index),
            )


def release_gains(state: CacheState, sequence: Sequence) -> list[int]:
    """Count the blocks by pool that would become free or evictable if a running sequence were freed."""
    gains = _gains_but_encoder(state, sequence)
    if state.cross is not None and sequence._encoder is not None and sequence._encoder.num_holders == 1:
        gains[state.pool_of[state.cross]] += len(sequence._encoder.blocks)
    return gains


def _gains_but_encoder(state: CacheState, sequence: Sequence) -> list[int]:
    """Count them if it kept what it has of an encoder, as one does that begins again."""
    rows, row = state.rows, sequence.row
    gains = [0] * len(state.pools)
    if state.has_full:
        gains[0] = rows.blocks_of[row] - rows.published_of[row]
        node = sequence._extent
        while node.parent is not None and node.references == 1:
            gains[0] += node.num_blocks
            node = node.parent
    for group in state.linear:
        shared, own = holdings.held_blocks(state, group, row)
        gains[state.pool_of[group.index]] += len(own) + int((group.references[shared] == 1).sum())
    if state.recurrent is not None:
        gains[state.pool_of[state.recurrent.index]] += 1 + len(sequence._checkpoints)
    return gains


def cheapest_first(state: CacheState, sequences: list[Sequence]) -> list[Sequence]:
    """Sort running sequences by the computed tokens that their preemption may lose per block that it gains."""
    return sorted(sequences, key=lambda sequence: _loss_per_block(state, sequence))


def _loss_per_block(state: CacheState, sequence: Sequence) -> tuple[float, int]:
    gained = sum(release_gains(state, sequence))
    node: Extent = sequence._extent
    while node.parent is not None and node.references == 1:
        node = node.parent
    num_lost = sequence.num_computed_tokens - (node.start + node.num_blocks) * state.block_size
    return (num_lost / gained if gained else float("inf")), sequence.row


def is_suspended(state: CacheState, sequence: Any) -> bool:
    """Say whether something is a suspended sequence of this manager."""
    return isinstance(sequence, Sequence) and sequence in state.suspended


def check_suspended(state: CacheState, sequence: Sequence, call: str) -> None:
    """Raise SequenceError unless it is a suspended sequence of this manager."""
    if not is_suspended(state, sequence):
        raise SequenceError(f"{call}: {sequence!r} is not a suspended sequence of this manager")
