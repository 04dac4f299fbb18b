"""T12: a hit ends where every group can go on, no earlier and no later, whatever each of them has lost."""

from random import Random

import numpy as np
import pytest
from tests.core.layers import FULL, chunked, grouped, hit, sliding, state
from tests.torture.over import EVERYWHERE, of_groups, over
from tests.torture.rig import Rig, some_tokens

HYBRIDS = of_groups(EVERYWHERE, "sliding", "sinks", "chunked", "state", "mixed", "windows alone", "one pool")


def can_go_on(spec, num_tokens, present, block_size=4):
    """Whether a group that has these blocks can go on after so many tokens."""
    if spec.kind == "full":
        needed = range(num_tokens // block_size)
    elif spec.kind == "sliding":
        first = max(num_tokens + 1 - spec.window, 0)
        sinks = range(-(-min(spec.sink_tokens, num_tokens) // block_size))
        needed = [*sinks, *range(first // block_size, num_tokens // block_size)]
    elif spec.kind == "chunked":
        needed = range(num_tokens // spec.chunk_tokens * spec.chunk_tokens // block_size, num_tokens // block_size)
    else:
        needed = [num_tokens // block_size - 1]
    return all(column in present for column in needed)


@pytest.mark.parametrize("seed", range(12))
def test_B099_B101_B147_the_longest_boundary_that_all_groups_have_is_found(seed):
    """Random holes in each group of a prompt of 10 blocks; what is found is what plain arithmetic says."""
    chance = Random(seed)
    layers = [FULL, sliding(10), sliding(7, sink_tokens=3), chunked(12)]
    layers = layers[: 2 + seed % 3] + ([state()] if seed % 2 else [])
    manager = grouped(layers, num_blocks=64)
    sequence = manager.add_sequence(range(40))
    while sequence.num_computed_tokens < 40:
        manager.commit([sequence], sequence.num_computed_tokens + 4)
    manager.free(sequence)
    present = [set(range(10)) for _ in layers]
    for at, spec in enumerate(manager.config.groups):
        if spec.kind == "full":
            continue
        [spanned] = [each for each in manager._state.spanned if each.index == at]
        for column in range(10):
            has = any(
                extent.start <= column < extent.start + extent.num_blocks
                and extent.blocks[at][column - extent.start] >= 0
                for extent in manager._state.tree.extents()
            )
            if not has:
                present[at].discard(column)
            elif chance.random() < 0.35:
                for extent in manager._state.tree.extents():
                    if extent.start <= column < extent.start + extent.num_blocks:
                        spanned._take(extent, np.array([column - extent.start]), 1, "made room")
                present[at].discard(column)
    for shared in range(1, 41):
        boundaries = [
            4 * column
            for column in range(shared // 4 + 1)
            if all(can_go_on(spec, 4 * column, present[at]) for at, spec in enumerate(manager.config.groups) if column)
        ]
        assert hit(manager, [*range(shared), 999, 998]) == max(boundaries)


@over(HYBRIDS, num_blocks=14)
def test_B147_B103_B102_whatever_is_said_to_be_there_is_there_in_every_group(rig):
    """Random prompts in little room: each admission reads all it was promised, then its own, in all groups."""
    chance, hits = Random(4), 0
    for _ in range(60):
        sequence = rig.serve(some_tokens(chance, most=26))
        hits += sequence.num_cached_tokens
        rig.memory.verify(sequence)
        rig.free(sequence)
        if chance.random() < 0.2:
            rig.manager.evict(chance.randrange(6))
        if chance.random() < 0.1:
            rig.send_down()
    assert hits > 0
    rig.require_all_back()


@pytest.mark.parametrize(
    ("groups", "expected"),
    [("full", [0, 0, 4, 4, 8, 12]), ("sliding", [0, 0, 4, 4, 8, 12]), ("state", [0, 0, 4, 4, 8, 12])],
)
def test_B109_less_than_the_smallest_unit_is_no_hit_and_said_to_be_so(groups, expected):
    """States are kept after each block, where commits end there."""
    rig, found = Rig(groups, partial=False, num_blocks=40), []
    sequence = rig.add(range(16))
    for end in (4, 8, 12, 16):
        rig.compute(sequence, end)
    rig.free(sequence)
    for shared in (1, 3, 4, 7, 8, 12):
        match = rig.manager.match_prefix([*range(shared), 500, 501, 502, 503])
        found.append(match.num_tokens)
        assert match.miss
    assert found == expected


def test_B147_tiers_that_have_groups_to_different_depths_bring_up_what_all_have():
    """K and V of full attention are in host memory whole, of the window only the end: the hit is what both have."""
    rig = Rig("sliding", "host", False, num_blocks=16)
    rig.leave(range(24))
    rig.manager.evict(rig.manager.num_blocks)
    for shared in range(4, 25, 4):
        sequence = rig.serve([*range(shared), 900 + shared])
        assert sequence.num_cached_tokens in (0, *range(4, shared + 1, 4))
        rig.memory.verify(sequence)
        rig.free(sequence, publish=False)
        rig.manager.evict(rig.manager.num_blocks)
    rig.require_all_back()
