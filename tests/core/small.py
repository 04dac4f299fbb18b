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


def label(value):
    """A test's id for a value of any kind: the same in every process."""
    return re.sub(" at 0x[0-9a-f]+", "", repr(value))[:60]


def books(manager):
    """Everything that a call which is refused must leave as it was."""
    rows = manager._state.rows
    return {
        "digest": manager.digest(),
        "stats": manager.stats(),
        "tick": manager._state.tree.tick,
        "moves": list(manager._state.moves),
        "namespaces": list(manager._state.tree.roots),
        "free": manager._state.pools[0].free_blocks().tolist(),
        "candidates": sorted(extent.ticket for extent in manager._state.tree.queue.candidates()),
        "published": rows.num_published.tolist(),
        "versions": rows.version.tolist(),
        "limits": rows.limit.tolist(),
        "tables": rows.block_table.tolist(),
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
