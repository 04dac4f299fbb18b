"""Sequences that share a past: forks, beams, and beam search's reordering. Only the block being written is ever
private.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from numpy.typing import ArrayLike

from kvist.core import publishing, rewinding
from kvist.core.arguments import as_int_array
from kvist.core.sequences import RUNNING, WAITING, RowState, Sequence
from kvist.core.tokens import TOKEN_BYTES
from kvist.errors import ArgumentError, ArgumentTypeError, SequenceError

if TYPE_CHECKING:
    from kvist.core.manager import CacheCore

__all__ = ["add_beams", "fork", "leave_beams", "refuse_waiting", "reorder", "start_beams"]


# -- forks and reordering ---------------------------------------------------------------------------------------------


def fork(core: CacheCore, sequence: Sequence, n: int) -> list[Sequence]:
    """Return n copies of a sequence."""
    core.rows.check_running(sequence, "fork")
    refuse_waiting(sequence, "fork")
    core.require_rows(n, core.rows.num_free)
    core.require_blocks(n * _num_private(core, sequence, "fork"))
    publishing.publish(core, sequence)
    state = core.rows.snapshot(sequence)
    children = []
    for _ in range(n):
        core.tree.hold(state.extent)
        child = core.rows.open(sequence.namespace, state.extent, publishes=sequence.publishes)
        child.num_cached_tokens = sequence.num_cached_tokens
        _copy_into(core, child, state)
        children.append(child)
    return children


def reorder(core: CacheCore, beams: list[Sequence], parents: ArrayLike) -> None:
    """Let each beam go on from its parent: one takes over the parent's own block, the others copy it."""
    origins = _checked_parents(core, beams, parents)
    users = Counter(origins)
    heirs = {parent: parent if origins[parent] == parent else origins.index(parent) for parent in users}
    num_copied = sum(
        _num_private(core, beams[parent], "reorder") for at, parent in enumerate(origins) if heirs[parent] != at
    )
    num_orphaned = sum(
        beam.num_blocks - beam.num_computed_tokens // core.block_size
        for at, beam in enumerate(beams)
        if at not in users
    )
    core.require_blocks(num_copied - num_orphaned)

    for beam in beams:
        publishing.publish(core, beam)
    states = [core.rows.snapshot(beam) for beam in beams]
    orphaned = [states[at].blocks[0, states[at].num_published :] for at in range(len(beams)) if at not in users]
    for own in orphaned:
        core.pool.give(own)
    changed = [at for at, parent in enumerate(origins) if parent != at]
    for at in changed:
        core.tree.hold(states[origins[at]].extent)
    for at in changed:
        core.tree.release(states[at].extent)
    for at in changed:
        if heirs[origins[at]] == at:
            core.rows.restore(beams[at], states[origins[at]])
    for at in changed:
        if heirs[origins[at]] != at:
            _copy_into(core, beams[at], states[origins[at]])


def _copy_into(core: CacheCore, sequence: Sequence, state: RowState) -> None:
    """Make a row share what another has published, with a block of its own and a copy of what the other wrote into its
    last.
    """
    rows, published = core.rows, state.num_published
    rows.restore(sequence, replace(state, blocks=state.blocks[:, :published]))
    if not state.tokens:
        return
    core.fill(sequence.row, published, published + 1)
    rows.refresh_limit(sequence.row)
    if written := state.num_computed - published * core.block_size:
        core.order_move(int(state.blocks[0, published]), rows.block_table.item(0, sequence.row, published), written)


def _num_private(core: CacheCore, sequence: Sequence, call: str) -> int:
    """Count the blocks with tokens that will be a sequence's own once it is published: 0 or 1, or it cannot be
    copied.
    """
    num_tokens, num_computed = sequence.num_tokens, sequence.num_computed_tokens
    count = -(-num_tokens // core.block_size) - num_computed // core.block_size
    if count > 1:
        raise SequenceError(
            f"{call}: row {sequence.row} has {count} blocks of tokens not committed, and only the last may be; "
            f"{num_computed} of its {num_tokens} tokens are computed: commit first"
        )
    return count


def _checked_parents(core: CacheCore, beams: Any, parents: ArrayLike) -> list[int]:
    if not isinstance(beams, list | tuple):
        raise ArgumentTypeError(f"reorder: beams must be a list of Sequence, not {type(beams).__name__}")
    for beam in beams:
        core.rows.check_running(beam, "reorder")
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


def add_beams(core: CacheCore, leader: Sequence, prompt: bytes, num_beams: int) -> None:
    """Give a prompt just admitted its other beams: their rows show the leader's full blocks, own a last one, and
    wait.
    """
    rows, root = core.rows, core.tree.root(leader.namespace)
    num_full, rest = divmod(len(prompt) // TOKEN_BYTES, core.block_size)
    beams = [leader]
    for _ in range(num_beams - 1):
        core.tree.hold(root)
        beam = rows.open(leader.namespace, root, publishes=leader.publishes)
        beam.leader, beam.num_cached_tokens = leader, leader.num_cached_tokens
        rows.set_state(beam, WAITING)
        own = RowState(
            extent=root,
            blocks=rows.block_table[:, leader.row, :num_full],
            num_published=num_full,
            num_computed=0,
            tokens=prompt[num_full * core.tree.block_bytes :],
            publishes=leader.publishes,
            num_prompt_tokens=leader.num_prompt_tokens,
            retention=leader.retention,
        )
        rows.restore(beam, own)
        if rest:
            core.fill(beam.row, num_full, num_full + 1)
            rows.refresh_limit(beam.row)
        beams.append(beam)
    for beam in beams:
        beam._beams = beams


def start_beams(core: CacheCore, leader: Sequence) -> None:
    """Turn the beams that wait for a leader into forks of it, if all of the prompt is committed by now."""
    rows = core.rows
    waiting = leader.waiting_beams()
    if not waiting or rows.num_computed[leader.row] < rows.num_tokens[waiting[0].row]:
        return
    num_full, rest = divmod(int(rows.num_tokens[waiting[0].row]), core.block_size)
    source = rows.block_table.item(0, leader.row, num_full) if rest else 0
    publishing.publish(core, leader)
    extent = rewinding.extent_ending_at(core, leader, num_full)
    for beam in waiting:
        core.tree.hold(extent)
        core.tree.release(beam._extent)
        beam._extent, beam.leader = extent, None
        rows.set_state(beam, RUNNING)
        rows.num_computed[beam.row] = rows.num_tokens[beam.row]
        if rest:
            core.order_move(source, rows.block_table.item(0, beam.row, num_full), rest)


def leave_beams(core: CacheCore, sequence: Sequence) -> None:
    """Take a sequence that is about to be freed out of its beams; the first that waits for it takes its place."""
    assert sequence._beams is not None
    waiting = sequence.waiting_beams()
    sequence._beams.remove(sequence)
    sequence._beams = None
    if not waiting:
        return
    heir = waiting[0]
    ours, theirs = core.rows.snapshot(sequence), core.rows.snapshot(heir)
    core.rows.restore(heir, ours)
    core.rows.restore(sequence, theirs)
    core.rows.set_state(heir, RUNNING)
    rewinding.rewind_own(core, heir, theirs.num_published * core.block_size + len(theirs.tokens) // TOKEN_BYTES)
    core.rows.refresh_limit(heir.row)
    for beam in waiting:
        beam.leader = heir if beam is not heir else None


def refuse_waiting(sequence: Sequence, call: str) -> None:
    """Raise SequenceError if beams wait for the sequence's prompt to be committed."""
    if waiting := sequence.waiting_beams():
        raise SequenceError(f"{call}: {len(waiting)} beams wait until {sequence!r} has committed the whole prompt")
