"""Faults that users reported of windows, hybrids and recurrent states, each as the calls that would show it here.

The letters and numbers are those of the collection of reports; what does not apply is in `facts.py`, with the reason.
"""

import random

import pytest
from tests.core.layers import FULL, boundaries, grouped, hit, lose, sliding, state, tables
from tests.core.small import cached, computed, moves

from kvist import CacheConfig, ConfigError, OutOfBlocks

# -- windows ----------------------------------------------------------------------------------------------------------


def test_B007_a_sequence_gives_back_the_blocks_of_its_window_and_no_hole():
    manager = grouped([sliding(8)], num_blocks=8)
    sequence = computed(manager, range(20))
    [table] = tables(manager, sequence)
    assert table[:3] == [-1, -1, -1]
    assert (manager.num_free_blocks, manager.stats().num_held_blocks) == (6, 2)
    manager.free(sequence)
    assert manager.num_free_blocks == 8
    assert sorted(tables(manager, manager.add_sequence([9] * 32))[0]) == list(range(8))


def test_B095_what_has_left_the_window_and_was_given_to_another_is_not_found():
    manager = grouped([sliding(8)], num_blocks=8)
    first = computed(manager, range(20))
    before = tables(manager, first)[0][3:]
    other = manager.add_sequence([9] * 24)
    assert not set(before) & set(tables(manager, other)[0])
    manager.free(first)
    assert boundaries(manager, range(20), 5) == [4]
    manager.free(other)
    again = manager.add_sequence(range(21))
    assert again.num_cached_tokens == 20
    assert tables(manager, again)[0][:5] == [-1, -1, -1, *before]


@pytest.mark.parametrize(
    ("block_size", "window", "num_tokens", "found"), [(4, 3, 9, 8), (64, 127, 1024, 1023 // 64 * 64)]
)
def test_B097_a_block_may_be_larger_than_the_window(block_size, window, num_tokens, found):
    manager = grouped([sliding(window)], block_size=block_size)
    sequence = computed(manager, range(num_tokens))
    first = (num_tokens + 1 - window) // block_size
    [table] = tables(manager, sequence)
    assert [block < 0 for block in table] == [column < first for column in range(len(table))]
    manager.free(sequence)
    assert hit(manager, range(num_tokens)) == found


def test_B098_a_prompt_that_leaves_another_inside_its_last_block_finds_20_of_22_tokens_or_is_told_why_not():
    """Differs: they keep one window at the end and find nothing; here all stay while there is room."""
    manager = grouped([FULL, sliding(12)], num_blocks=[64, 8])
    cached(manager, range(24))
    prompt = [*range(22), 98, 99]
    assert hit(manager, prompt) == 20
    lose(manager, 1, 2)
    match = manager.match_prefix(prompt)
    assert (match.num_tokens, match.num_known_tokens, match.miss) == (8, 20, "window")
    assert hit(manager, range(25)) == 24


def test_B099_counts_are_of_tokens_and_equal_for_all_groups():
    manager = grouped([FULL, sliding(20), state()], block_size=16)
    cached(manager, range(32))
    match = manager.match_prefix([*range(32), *[9] * 8])
    assert (match.num_prompt_tokens, match.num_tokens, match.num_missing_tokens) == (40, 32, 8)
    sequence = manager.add_sequence([*range(32), *[9] * 8])
    assert (sequence.num_cached_tokens, sequence.num_computed_tokens) == (32, 32)


@pytest.mark.parametrize(("layers", "found"), [([FULL], [0, 16, 16, 16, 32]), ([FULL, state()], [0, 16, 16, 16, 32])])
def test_B109_less_than_a_block_in_common_is_no_hit_and_said_to_be_so(layers, found):
    hits, misses = [], []
    for num_shared in (15, 16, 17, 31, 32):
        manager = grouped(layers, block_size=16)
        sequence = manager.add_sequence(range(48))
        for num_computed in (16, 32, 48):
            manager.commit([sequence], num_computed)
        match = manager.match_prefix([*range(num_shared), 99])
        hits.append(match.num_tokens)
        misses.append(match.miss)
    assert hits == found
    assert misses == ["under a block", "", "under a block", "under a block", ""]


def test_B147_a_prompt_is_found_as_far_as_the_group_that_has_least():
    manager = grouped([FULL, sliding(16)])
    cached(manager, range(16))
    lose(manager, 1, 3)
    assert hit(manager, range(17)) == 12


# -- states -----------------------------------------------------------------------------------------------------------


def test_B086_a_state_that_has_seen_rejected_drafts_is_not_the_state_of_what_was_accepted():
    manager = grouped([FULL, state()], block_size=8)
    sequence = computed(manager, range(7))
    manager.append([sequence], [[7, 8, 9]])
    manager.commit([sequence])  # the forward pass went on over two drafts
    assert moves(manager) == []
    manager.rewind(sequence, 2)
    assert (sequence.num_tokens, sequence.num_computed_tokens) == (8, 0)
    assert hit(manager, range(9)) == 0
    manager.commit([sequence])  # computed again, and exactly so far
    assert len(moves(manager)) == 1
    assert hit(manager, range(9)) == 8


@pytest.mark.parametrize(("stops", "found"), [([8, 16, 20], 8), ([16, 20], 0), ([20], 0)])
def test_B101_a_prompt_goes_on_from_a_state_or_from_nothing(stops, found):
    manager = grouped([FULL, state()], block_size=8)
    sequence = manager.add_sequence(range(20))
    for stop in stops:
        manager.commit([sequence], stop)
    other = manager.add_sequence([*range(12), *[9] * 8])
    assert (other.num_cached_tokens, other.num_shared_tokens) == (found, 0 if found else 8)


def test_B102_a_sequence_has_one_state_whatever_its_length():
    manager = grouped([FULL, state()], block_size=16)
    sequence = computed(manager, range(40))
    assert [len(table) for table in tables(manager, sequence)] == [3, 1]
    group = manager.tables([sequence], 1, group=1)
    assert group.block_table.tolist() == [tables(manager, sequence)[1]]


def test_B103_a_hit_comes_with_the_state_after_it_and_no_hit_comes_with_none():
    manager = grouped([FULL, state()], block_size=8, num_blocks=[64, 3])
    cached(manager, range(16))
    [(_, kept, _)] = moves(manager) or [(None, None, None)]
    cold = manager.add_sequence([9] * 16)
    assert (cold.num_cached_tokens, moves(manager)) == (0, [])
    manager.free(cold)
    warm = manager.add_sequence(range(17))
    assert warm.num_cached_tokens == 16
    [(source, destination, _)] = moves(manager)
    assert [destination] == tables(manager, warm)[1]
    assert source != destination
    assert kept in (None, source)


def test_B107_a_state_that_finds_no_room_is_not_kept_and_nobody_loses_anything():
    manager = grouped([FULL, state()], num_blocks=[16, 2])
    first, second = manager.add_sequence(range(9)), manager.add_sequence([9] * 9)
    manager.commit([first], 8)
    assert moves(manager) == []
    manager.commit([first, second])
    manager.check()
    assert [len(table) for table in tables(manager, first)] == [3, 1]
    with pytest.raises(OutOfBlocks, match="group 1 needs 1 blocks"):
        manager.add_sequence([7])
    manager.free(second)
    manager.append([first], [[9, 10, 11]])
    manager.commit([first])
    assert len(moves(manager)) == 1
    assert hit(manager, [*range(12), 7]) == 12


@pytest.mark.parametrize(("block_size", "fits"), [(2048, False), (1000, False), (512, True), (1024, True)])
def test_B105_states_are_kept_at_block_boundaries_or_the_settings_are_refused(block_size, fits):
    config = CacheConfig([FULL, state(1024)], block_size, 8)
    if fits:
        config.validate()
    else:
        with pytest.raises(ConfigError, match=f"checkpoint_tokens is 1024, not a multiple of block_size={block_size}"):
            config.validate()


def test_B110_a_unit_that_is_no_multiple_of_the_block_is_refused_before_the_first_request():
    with pytest.raises(ConfigError, match="checkpoint_tokens is 6, not a multiple of block_size=4"):
        grouped([FULL, state(6)])


# -- numbers ----------------------------------------------------------------------------------------------------------


def test_B191_usage_stays_between_0_and_1_while_windows_give_blocks_back():
    manager = grouped([FULL, sliding(6), state()], num_blocks=[12, 7, 5], max_sequence_length=64)
    rng, live, seen = random.Random(3), [], set()
    for _ in range(400):
        try:
            if rng.random() < 0.4:
                live.append(computed(manager, [rng.randrange(2) for _ in range(rng.randint(1, 20))]))
            elif live and rng.random() < 0.6:
                manager.append([live[0]], [[1] * rng.randint(1, 5)])
                manager.commit([live[0]])
            elif live:
                manager.free(live.pop(rng.randrange(len(live))))
        except OutOfBlocks:
            manager.free(live.pop())
        moves(manager)
        stats = manager.stats()
        for group in stats.groups:
            assert 0 <= group.usage <= 1
            assert group.num_held_blocks + group.num_free_blocks == group.num_blocks
            assert 0 <= group.num_evictable_blocks <= group.num_free_blocks
        assert 0 <= stats.usage <= 1
        seen.add(stats.usage)
    assert len(seen) > 10
