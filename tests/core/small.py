"""Small managers, what is done with them again and again, and all of their books as one value to compare."""

import re
from contextlib import contextmanager

import pytest

from kvist import AttentionSpec, CacheConfig, KVCacheManager


def small(block_size=2, num_blocks=8, **settings):
    """A manager of few blocks and no memory."""
    settings = {"max_sequences": 8, "max_sequence_length": 64} | settings
    return KVCacheManager(CacheConfig([AttentionSpec(1, 1)], block_size, num_blocks, **settings))


def computed(manager, tokens, **options):
    """A new sequence of which all tokens are committed."""
    sequence = manager.add_sequence(tokens, **options)
    manager.commit([sequence])
    return sequence


def cached(manager, tokens, **options):
    """Let tokens be in the cache, held by nobody; the blocks they were in."""
    sequence = computed(manager, tokens, **options)
    blocks = sequence.block_ids.tolist()
    manager.free(sequence)
    return blocks


def ids(sequence):
    return sequence.block_ids.tolist()


def moves(manager):
    """The moves to be made as (source, destination, number of tokens)."""
    return [(move.source, move.destination, move.num_tokens) for move in manager.take_moves()]


def group_moves(manager):
    """The moves to be made as (group, source, destination, number of tokens)."""
    return [(move.group, move.source, move.destination, move.num_tokens) for move in manager.take_moves()]


def label(value):
    """A test's id for a value of any kind: the same in every process."""
    return re.sub(" at 0x[0-9a-f]+", "", repr(value))[:60]


def books(manager):
    """Everything that a call which is refused must leave as it was."""
    state, rows = manager._state, manager._state.rows
    return {
        "digest": manager.digest(),
        "stats": manager.stats(),
        "tick": state.tree.tick,
        "moves": list(state.moves),
        "namespaces": list(state.tree.roots),
        "free": [pool.free_blocks().tolist() for pool in state.pools],
        "candidates": sorted(extent.ticket for extent in state.tree.queue.candidates()),
        "published": rows.num_published.tolist(),
        "versions": rows.version.tolist(),
        "limits": rows.limit.tolist(),
        "tables": rows.block_table.tolist(),
        "spans": [rows.firsts.tolist(), rows.ends.tolist()],
        "references": [group.references.tolist() for group in state.spanned],
        "evictable": [group.num_evictable for group in state.spanned],
        "checkpoints": [list(sequence._checkpoints) for sequence in rows.running()],
        "suspended": list(state.suspended),
        "pins": list(state.pins),
    }


@contextmanager
def refused(manager, error, *parts):
    """Expect an error whose text has these parts, and no change in any of the manager's books."""
    before = books(manager)
    with pytest.raises(error) as caught:
        yield caught
    missing = [part for part in parts if part not in str(caught.value)]
    assert not missing, f"{str(caught.value)!r} does not say {missing}"
    assert books(manager) == before
    manager.check()
