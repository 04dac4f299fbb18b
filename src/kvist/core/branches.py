"""Sequences that share a past: forks, beams and their reordering. Only the block being written is ever private."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from numpy.typing import ArrayLike

from kvist.core import holdings, recurrent, rewinding, rings
from kvist.core.arguments import as_int_array
from kvist.core.rows import RUNNING, WAITING, RowState
from kvist.core.sequences import Encoder, Sequence, Wishes
from kvist.core.state import CacheState
from kvist.core.tokens import TOKEN_BYTES
from kvist.errors import ArgumentError, ArgumentTypeError, SequenceError

__all__ = ["add_beams", "fork", "leave_beams", "refuse_waiting", "reorder", "require_exact_prompt", "start_beams"]


# -- forks and reordering ---------------------------------------------------------------------------------------------


def fork(state: CacheState, sequence: Sequence, n: int) -> list[Sequence]:
    """Return n copies of a sequence."""
    state.rows.check_running(sequence, "fork")
    refuse_waiting(sequence, "fork")
    state.require_rows(n, state.rows.num_free)
    num_private = _num_private(state, sequence, "fork")
    state.require(_needs(state, n * num_private, n, [sequence] * n))
    state.publish(sequence)
    past = state.rows.snapshot(sequence)
    children = []
    for _ in range(n):
        state.tree.hold(past.extent)
        holdings.hold_past(state, past)
        child = _like(state, sequence)
        state.rows.open(child, past.extent)
        state.join_encoder(child, sequence._encoder)
        _copy_into(state, child, past)
        children.append(child)
    return children


def _like(state: CacheState, sequence: Sequence) -> Sequence:
    """Return a new sequence that publishes and reuses as another one does, and has no row yet."""
    wishes = Wishes(sequence.publishes, sequence.reuses)
    return Sequence(state.rows, sequence.namespace, wishes, num_cached_tokens=sequence.num_cached_tokens)


def reorder(state: CacheState, beams: list[Sequence], parents: ArrayLike) -> None:
    """Let each beam go on from its parent: one takes over the parent's own block, the others copy it."""
    origins = _checked_parents(state, beams, parents)
    heirs = {parent: parent if origins[parent] == parent else origins.index(parent) for parent in set(origins)}
    copied = [parent for at, parent in enumerate(origins) if heirs[parent] != at]
    orphans = [at for at in range(len(beams)) if at not in heirs]
    num_copied = sum(_num_private(state, beams[parent], "reorder") for parent in copied)
    of_copies = [beams[parent] for parent in copied]
    needs = _needs(state, num_copied, len(copied) - len(orphans), of_copies)
    for at in orphans:
        own = holdings.num_growing_from(state, beams[at].row, beams[at].num_computed_tokens // state.block_size)
        needs = [needed - had for needed, had in zip(needs, own, strict=True)]
        for group in state.rings:
            needs[state.pool_of[group.index]] -= rings.num_own(state, group, beams[at].row, beams[at].num_columns)
    state.require(needs)

    for beam in beams:
        state.publish(beam)
    pasts = [state.rows.snapshot(beam) for beam in beams]
    for at in orphans:
        holdings.give_past(state, pasts[at])
    changed = [at for at, parent in enumerate(origins) if parent != at]
    _exchange_holds(state, [pasts[at] for at in changed], [pasts[origins[at]] for at in changed])
    _exchange_encoders(state, [beams[at] for at in changed], [beams[origins[at]]._encoder for at in changed])
    for at in changed:
        if heirs[origins[at]] == at:
            state.rows.restore(beams[at], pasts[origins[at]])
    for at in changed:
        if heirs[origins[at]] != at:
            _copy_into(state, beams[at], pasts[origins[at]])


def _exchange_holds(state: CacheState, old: list[RowState], new: list[RowState]) -> None:
    """Hold what rows are to share before what they shared is let go."""
    for past in new:
        state.tree.hold(past.extent)
        holdings.hold_past(state, past)
    for past in old:
        holdings.release_past(state, past)
        state.tree.release(past.extent)


def _exchange_encoders(state: CacheState, beams: list[Sequence], encoders: list[Encoder | None]) -> None:
    kept = [encoder for encoder in encoders if encoder is not None]
    for encoder in kept:  # until the last beam has left it
        encoder.num_holders += 1
    for beam in beams:
        state.leave_encoder(beam)
    for beam, joined in zip(beams, encoders, strict=True):
        state.join_encoder(beam, joined)
    for encoder in kept:
        state.end_encoder_hold(encoder)


def _needs(state: CacheState, num_columns: int, num_states: int, copied: list[Sequence]) -> list[int]:
    """Count the blocks by pool of so many new columns and states, and of the rings of copies of these sequences."""
    needs = state.column_needs(num_columns)
    for group in state.rings:
        for sequence in copied:
            num_filled = state.rows.columns_for(sequence.num_tokens)
            needs[state.pool_of[group.index]] += rings.num_own(state, group, sequence.row, num_filled)
    if state.recurrent is not None:
        needs[state.pool_of[state.recurrent.index]] += num_states
    return needs


def _copy_into(state: CacheState, sequence: Sequence, past: RowState) -> None:
    """Make a row share what another has published, with a copy of the block that the other is writing."""
    rows, published = state.rows, past.num_published
    rows.restore(sequence, holdings.published_part(state, past))
    end = rows.columns_for(published * state.block_size + len(past.tokens) // TOKEN_BYTES)
    if end > published or past.wrapped:
        _fill_own(state, sequence.row, published, end)
        rows.refresh_limit(sequence.row)
        if written := past.num_computed - published * state.block_size:
            state.order_column_moves(past.blocks[:, published], published, sequence.row, written, skip_rings=True)
    if state.rings:
        rings.copy_own(state, sequence.row, past)
    if state.recurrent is not None:
        recurrent.give_row_a_state(state, sequence.row)
        if past.num_computed:
            recurrent.order_state_move(state, past.blocks.item(state.recurrent.index, 0), sequence.row)


def _fill_own(state: CacheState, row: int, start: int, end: int) -> None:
    """Give a row that shows what it shares blocks of its own for the columns from `start` on; there must be as many."""
    if not state.rings:
        state.fill(row, start, end)
        return
    state.make_room(state.column_needs(end - start))
    table = state.rows.block_table
    if state.has_full:
        table[0, row, start:end] = state.take(0, end - start)
    for group in state.sliding:
        table[group.index, row, start:end] = state.take(group.index, end - start)
        state.rows.ends_of[group.index][row] = end
    rings.fill_own(state, row, end)
    state.rows.blocks_of[row] = end


def _num_private(state: CacheState, sequence: Sequence, call: str) -> int:
    """Count the blocks with tokens that stay a sequence's own when it is published; raises if they are not 0 or 1."""
    num_tokens, num_computed = sequence.num_tokens, sequence.num_computed_tokens
    count = state.rows.columns_for(num_tokens) - num_computed // state.block_size
    if count > state.rows.columns_for(1):
        raise SequenceError(
            f"{call}: row {sequence.row} has {count} blocks of tokens not committed, and only the last may be; "
            f"{num_computed} of its {num_tokens} tokens are computed: commit first"
        )
    return count


def _checked_parents(state: CacheState, beams: Any, parents: ArrayLike) -> list[int]:
    if not isinstance(beams, list | tuple):
        raise ArgumentTypeError(f"reorder: beams must be a list of Sequence, not {type(beams).__name__}")
    for beam in beams:
        state.rows.check_running(beam, "reorder")
        refuse_waiting(beam, "reorder")
    if len(set(map(id, beams))) < len(beams):
        raise SequenceError("reorder: a sequence is named twice")
    origins = as_int_array(parents, "reorder: parents")
    if origins.shape != (len(beams),):
        raise ArgumentError(f"reorder: parents must be {len(beams)} ints, one for each beam, not {parents!r}")
    if len(beams) and not 0 <= int(origins.min()) <= int(origins.max()) < len(beams):
        raise ArgumentError(f"reorder: parents are indices into beams, 0 .. {len(beams) - 1}, not {origins.tolist()}")
    if len({beam.namespace for beam in beams}) > 1:
        raise SequenceError("reorder: the sequences are of different namespaces")
    return [int(parent) for parent in origins]


# -- beams that wait for their prompt ---------------------------------------------------------------------------------


def add_beams(state: CacheState, leader: Sequence, prompt: bytes, num_beams: int) -> None:
    """Give a prompt just admitted its other beams, which show its full blocks, own a last one, and wait."""
    rows, root = state.rows, state.tree.root(leader.namespace)
    num_full, rest = divmod(len(prompt) // TOKEN_BYTES, state.block_size)
    beams = [leader]
    past = replace(
        rows.snapshot(leader),
        extent=root,
        num_published=num_full,
        num_computed=0,
        tokens=prompt[num_full * state.tree.block_bytes :],
    )
    for _ in range(num_beams - 1):
        state.tree.hold(root)
        beam = _like(state, leader)
        rows.open(beam, root)
        beam.leader = leader
        rows.set_state(beam, WAITING)
        state.join_encoder(beam, leader._encoder)
        rows.restore(beam, holdings.published_part(state, past))
        end = rows.columns_for(num_full * state.block_size + rest)
        if end > num_full or rows.wrapped[beam.row]:
            _fill_own(state, beam.row, num_full, end)
            rows.refresh_limit(beam.row)
        if state.recurrent is not None:
            recurrent.give_row_a_state(state, beam.row)
        beams.append(beam)
    for beam in beams:
        beam._beams = beams
    rows.refresh_limit(leader.row)


def start_beams(state: CacheState, leader: Sequence) -> None:
    """Turn the beams that wait for a leader into forks of it, if all of the prompt is committed by now."""
    rows = state.rows
    waiting = leader._waiting_beams()
    if not waiting or rows.num_computed[leader.row] < rows.num_tokens[waiting[0].row]:
        return
    num_full, rest = divmod(int(rows.num_tokens[waiting[0].row]), state.block_size)
    sources = rows.block_table[:, leader.row, num_full].copy() if rest else None
    past = rows.snapshot(leader) if state.rings else None
    state.publish(leader)
    extent = rewinding.extent_ending_at(state, leader, num_full)
    for beam in waiting:
        state.tree.hold(extent)
        state.tree.release(beam._extent)
        state.show_leaders_blocks(beam)
        beam._extent, beam.leader = extent, None
        holdings.hold_shared(state, beam.row)
        rows.set_state(beam, RUNNING)
        rows.num_computed[beam.row] = rows.num_tokens[beam.row]
        if sources is not None:
            state.order_column_moves(sources, num_full, beam.row, rest, skip_rings=True)
        if past is not None:
            rings.copy_own(state, beam.row, replace(past, num_computed=int(rows.num_computed[beam.row])))
        if state.recurrent is not None:
            working = rows.block_table.item(state.recurrent.index, leader.row, 0)
            recurrent.order_state_move(state, working, beam.row)
    rows.refresh_limit(leader.row)


def require_exact_prompt(state: CacheState, leader: Sequence, num_computed: int) -> None:
    """Raise SequenceError if beams wait for the state after a prompt that a commit would go past."""
    waiting = leader._waiting_beams() if state.recurrent is not None else []
    if waiting and num_computed > state.rows.tokens_of[waiting[0].row]:
        raise SequenceError(
            f"commit: beams wait for the state after the {state.rows.tokens_of[waiting[0].row]} tokens of the prompt, "
            f"and {num_computed} computed tokens go past it: commit the prompt first"
        )


def leave_beams(state: CacheState, sequence: Sequence) -> None:
    """Take a sequence that is about to be freed out of its beams; the first that waits for it takes its place."""
    assert sequence._beams is not None
    waiting = sequence._waiting_beams()
    sequence._beams.remove(sequence)
    sequence._beams = None
    if not waiting:
        return
    heir = waiting[0]
    ours, theirs = state.rows.snapshot(sequence), state.rows.snapshot(heir)
    state.rows.restore(heir, ours)
    state.rows.restore(sequence, theirs)
    heir._checkpoints, sequence._checkpoints = sequence._checkpoints, []
    heir.num_shared_tokens = sequence.num_shared_tokens
    state.rows.set_state(heir, RUNNING)
    state.rows.set_state(sequence, WAITING)
    sequence.leader = heir
    state.note_committed(heir.row, ours.num_computed)
    rewinding.rewind_own(state, heir, theirs.num_published * state.block_size + len(theirs.tokens) // TOKEN_BYTES)
    for beam in waiting:
        beam.leader = heir if beam is not heir else None
    state.rows.refresh_limit(heir.row)  # an heir for whom others wait must not overwrite its ring, either


def refuse_waiting(sequence: Sequence, call: str) -> None:
    """Raise SequenceError if beams wait for the sequence's prompt to be committed."""
    if waiting := sequence._waiting_beams():
        raise SequenceError(f"{call}: {len(waiting)} beams wait until {sequence!r} has committed the whole prompt")
