"""T11: what a window has let go of is nobody's: not published again, not freed again, not found as what it was."""

from random import Random

import pytest
from tests.core.layers import FULL, chunked, grouped, hit, sliding, tables
from tests.torture.over import EVERYWHERE, of_groups, over
from tests.torture.rig import Rig

from kvist import CacheConfig, KVCacheManager
from kvist.testing import TokenMemory

SLIDING = of_groups(EVERYWHERE, "sliding", "sinks", "chunked", "ring", "windows alone", "mixed", "one pool")


@over(SLIDING, num_blocks=20)
def test_B007_B095_long_texts_give_their_windows_back_once_and_leave_what_is_right(rig):
    """30 tokens one by one, ended, asked again at every length, twice over with others in between."""
    for start in (0, 1000):
        sequence = rig.serve(range(start, start + 9))
        for token in range(start + 9, start + 39):
            rig.decode([sequence], [[token]])
        rig.memory.verify(sequence)
        for group, spec in enumerate(rig.config.groups):
            blocks = sequence.group_blocks(group)
            held = blocks[blocks >= 0].tolist()
            assert len(set(held)) == len(held)
            if spec.kind in ("sliding", "chunked"):
                assert len(held) < 10
        rig.free(sequence)
        for end in range(start + 2, start + 40, 5):
            rig.free(rig.serve([*range(start, end), 7]), publish=False)
    rig.require_all_back()


@over(SLIDING, num_blocks=12)
def test_B095_blocks_that_fell_out_of_a_window_may_be_anybodys_at_once(rig):
    """Two texts grow in a pool in which each needs what the other lets go of."""
    first, second = rig.serve(range(5)), rig.serve(range(100, 105))
    for step in range(14):
        rig.decode([first, second], [[step], [100 + step]])
        for one in (first, second):
            rig.memory.verify(one)
    for one in (first, second):
        rig.free(one)
    rig.leave(range(5))
    rig.require_all_back()


@pytest.mark.parametrize("window", [1, 2, 3, 4, 5, 8, 9])
@pytest.mark.parametrize("sinks", [0, 1, 4, 5])
@pytest.mark.parametrize("block_size", [1, 2, 4, 16])
def test_B097_a_block_may_be_larger_than_the_window_by_any_measure(window, sinks, block_size):
    config = CacheConfig(
        [FULL, sliding(window + sinks, sinks)], block_size, 40, max_sequences=4, max_sequence_length=64
    )
    memory = TokenMemory(config)
    manager = memory.attach(KVCacheManager(config, memory))
    for tokens in (range(17), range(9), [*range(13), 99, 98, 97], range(23)):
        sequence = manager.add_sequence(tokens)
        memory.verify(sequence)
        memory.write(sequence)
        manager.commit([sequence])
        for token in range(6):
            manager.append([sequence], [[token]])
            memory.write(sequence)
            manager.commit([sequence])
            manager.check()
        manager.free(sequence)
    assert manager.num_free_blocks == manager.num_blocks


@over(SLIDING)
def test_B095_a_step_back_over_what_a_window_let_go_of_computes_it_again(rig):
    for back in (1, 5, 9, 17, 25):
        sequence = rig.serve(range(9))
        for token in range(9, 30):
            rig.decode([sequence], [[token]])
        rig.manager.rewind(sequence, back)
        rig.check()
        rig.memory.verify(sequence)
        rig.compute(sequence)
        rig.decode([sequence], [[777]])
        rig.memory.verify(sequence)
        rig.free(sequence)
        rig.manager.drop(namespace=())
    rig.require_all_back()


def test_B098_how_much_of_a_text_is_found_that_parts_ways_inside_its_last_blocks():
    """24 tokens in blocks of 4 with a window of 12: in room enough all of what is shared is found, less a block."""
    manager = grouped([FULL, sliding(12)], num_blocks=40)
    sequence = manager.add_sequence(range(24))
    manager.commit([sequence])
    manager.free(sequence)
    found = [hit(manager, [*range(shared), *[999] * 6]) for shared in (8, 14, 20, 22, 24)]
    assert found == [8, 12, 20, 20, 24]


@pytest.mark.parametrize("max_chunk_tokens", [1, 3, 4, 7])
@pytest.mark.parametrize("groups", ["sliding", "sinks", "chunked", "windows alone"])
def test_B007_windows_of_prompts_in_chunks_never_hold_more_than_a_chunk_beside_their_own(groups, max_chunk_tokens):
    rig, chance = Rig(groups, num_blocks=12, max_chunk_tokens=max_chunk_tokens), Random(0)
    for _ in range(6):
        sequence = rig.add([chance.randrange(2) for _ in range(40)])
        while sequence.num_computed_tokens < 40:
            start = sequence.num_computed_tokens
            if not (more := rig.manager.chunk_limit(sequence, 40 - start)):
                rig.manager.reserve([sequence], 0)
                more = rig.manager.chunk_limit(sequence, 40 - start)
            assert 0 < more <= max_chunk_tokens
            rig.memory.write(sequence, start, start + more)
            rig.manager.commit([sequence], start + more)
            rig.check()
        rig.free(sequence)
    rig.require_all_back()


def test_B007_a_hole_is_told_by_what_the_caller_names_and_no_block_of_anybody():
    manager = grouped([chunked(8), FULL])
    sequence = manager.add_sequence(range(20))
    manager.commit([sequence])
    holes = [table.count(-1) for table in tables(manager, sequence)]
    manager.append([sequence], [[1]])
    told = manager.tables([sequence], 1, group=holes.index(max(holes)), padding=-7, holes=-9)
    assert set(told.block_table[0].tolist()) - set(range(64)) <= {-7, -9}
    manager.free(sequence)
