"""Small layers of every span, managers over several of them, and ways to see and to make holes in a group."""

import numpy as np

from kvist import AttentionSpec, CacheConfig, KVCacheManager, StateSpec

FULL = AttentionSpec(1, 1)
CROSS = AttentionSpec(1, 1, cross=True)


def sliding(window, sink_tokens=0):
    return AttentionSpec(1, 1, sliding_window=window, sink_tokens=sink_tokens)


def chunked(chunk_tokens):
    return AttentionSpec(1, 1, chunk_tokens=chunk_tokens)


def state(checkpoint_tokens=None):
    return StateSpec([(1,)], checkpoint_tokens=checkpoint_tokens)


def grouped(layers, block_size=4, num_blocks=64, **settings):
    """A manager of these layers that finds whole blocks only, and has no memory."""
    settings = {"max_sequences": 8, "max_sequence_length": 2048, "partial_reuse": False} | settings
    return KVCacheManager(CacheConfig(layers, block_size, num_blocks, **settings))


def hit(manager, tokens, **options):
    return manager.match_prefix(tokens, **options).num_tokens


def tables(manager, sequence):
    """The block ids of a sequence in every group, -1 where a block was let go, after all that is due was done."""
    manager.stats()
    return [sequence.group_blocks(group).tolist() for group in range(len(manager.config.groups))]


def lose(manager, group, column):
    """Let a group lose its cached blocks of one column, as eviction would."""
    [spanned] = [each for each in manager._state.spanned if each.index == group]
    lost = 0
    for extent in manager._state.tree.extents():
        if extent.start <= column < extent.start + extent.num_blocks:
            lost += spanned._take(extent, np.array([column - extent.start]), 1, "made room")
    assert lost


def boundaries(manager, tokens, num_blocks):
    """The blocks after which a prompt that shares so much, and no more, would go on."""
    size = manager.config.block_size
    other = [10**6] * (size + 1)
    return [n - 1 for n in range(1, num_blocks + 1) if hit(manager, [*tokens[: n * size], *other]) == n * size]
