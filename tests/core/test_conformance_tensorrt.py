"""What TensorRT-LLM's cache manager does, as facts about this one: numbers as theirs, or better with the reason said.

Theirs counts a token as written only when the next one is added; here it counts when it is committed, so "generate two
tokens and release" is: append two, commit all but the last, free. Facts that do not apply are in `facts.py`, with the
reason.
"""

import numpy as np
import pytest
from tests.core.layers import grouped, sliding, tables
from tests.core.small import cached, computed, ids, moves, small

from kvist import ArgumentError, AttentionSpec, CacheConfig, KVCacheManager, OutOfBlocks, Retention, SequenceError
from kvist.testing import TokenMemory


def hit(manager, tokens, **options):
    return manager.match_prefix(tokens, **options).num_tokens


def release(manager, sequence, generated=()):
    """Generate tokens, of which the last is never computed, and end."""
    manager.append([sequence], [list(generated)])
    manager.commit([sequence], sequence.num_tokens - 1)
    manager.free(sequence)


# -- A: allocation and beams ------------------------------------------------------------------------------------------


def blocks_of_64(num_blocks, **settings):
    return small(block_size=64, num_blocks=num_blocks, max_sequence_length=1024, **settings)


def test_TRT1_beams_share_full_blocks_and_own_the_last():
    manager = blocks_of_64(24)
    beams = manager.add_sequence(range(129), num_beams=8).beams
    assert manager.num_free_blocks == 14
    tables = [ids(beam) for beam in beams]
    assert [len(table) for table in tables] == [3] * 8
    assert {tuple(table[:2]) for table in tables} == {tuple(tables[0][:2])}
    assert len({block for table in tables for block in table}) == 10


def test_TRT2_releasing_all_beams_gives_everything_back():
    manager = blocks_of_64(24)
    for beam in manager.add_sequence(range(129), num_beams=8).beams:
        manager.free(beam)
    assert manager.num_free_blocks == 24


def test_TRT3_beams_of_full_blocks_are_identical():
    manager = blocks_of_64(24)
    beams = manager.add_sequence(range(192), num_beams=8).beams
    assert manager.num_free_blocks == 21
    assert len({tuple(ids(beam)) for beam in beams}) == 1


def test_TRT5_TRT7_575_tokens_in_4_beams_are_8_blocks_and_4():
    manager = blocks_of_64(128, reuse=False)
    beams = manager.add_sequence(range(575), num_beams=4).beams
    assert manager.num_free_blocks == 116
    for beam in beams:
        manager.free(beam)
    assert manager.num_free_blocks == 128


# -- B: rewind --------------------------------------------------------------------------------------------------------


def test_TRT13_TRT14_TRT15_rewind_returns_the_block_that_the_577th_token_opened():
    manager = blocks_of_64(80, reuse=False)
    sequence = computed(manager, range(575))
    free = [manager.num_free_blocks]
    for num_tokens in (2, 3):
        manager.append([sequence], [[7] * num_tokens])
        free.append(manager.num_free_blocks)
    manager.rewind(sequence, 4)
    assert [*free, manager.num_free_blocks] == [71, 70, 70, 71]


def test_TRT17_every_beam_can_be_rewound_and_taking_nothing_back_does_nothing():
    """Differs: theirs refuses with more than one beam; here beams are sequences, and each is rewound for itself."""
    manager = blocks_of_64(80)
    first = manager.add_sequence(range(70), num_beams=4)
    manager.commit([first])
    manager.rewind(first.beams[3], 5)
    assert [beam.num_tokens for beam in first.beams] == [70, 70, 70, 65]
    before = manager.digest()
    manager.rewind(first, 0)
    assert manager.digest() == before
    with pytest.raises(SequenceError, match="70 tokens"):
        manager.rewind(first, 71)


# -- B: windows -------------------------------------------------------------------------------------------------------


def test_TRT18_a_window_that_does_not_wrap_takes_one_block_more_and_gives_it_back():
    """Differs: theirs wraps at 575 tokens and stays at 9 blocks; a window takes the tenth before the first can go."""
    manager = grouped([sliding(575)], block_size=64, num_blocks=80, reuse=False)
    sequence = computed(manager, range(575))
    free = [manager.num_free_blocks]
    for num_tokens in (1, 1, 61, 1):
        manager.append([sequence], [[7] * num_tokens])
        manager.commit([sequence])
        free.append(manager.num_free_blocks)
    manager.free(sequence)
    assert [*free, manager.num_free_blocks] == [71, 71, 70, 71, 71, 80]


def test_TRT27_TRT29_prompts_over_two_windows_are_published_and_found_again():
    """Differs: theirs stores nothing of a sequence that has filled the smaller window, and finds 0 tokens the first
    time and 3 the second; here 8 of its 9 tokens stay, and what was computed before is always found.
    """
    manager = grouped([sliding(16), sliding(8), sliding(16), sliding(8)], num_blocks=16, partial_reuse=True)
    first = computed(manager, range(7))
    assert manager.num_blocks == 32
    assert [len(table) for table in tables(manager, first)] == [2, 2]
    manager.append([first], [[7, 8]])
    assert [len(table) for table in tables(manager, first)] == [3, 3]
    manager.commit([first], 8)
    manager.free(first)
    assert manager.num_free_blocks == 32
    assert hit(manager, range(9)) == 8
    for found in (0, 3):
        again = computed(manager, [20, 21, 22, 23])
        assert (again.num_cached_tokens, again.num_blocks) == (found, 2)
        manager.free(again)


@pytest.mark.parametrize("sink_tokens", [4, 5])
def test_TRT26_sinks_that_fill_no_block_do_not_end_reuse(sink_tokens):
    """Differs: theirs gives reuse up where unused positions follow the sinks; here a window with sinks has none."""
    manager = grouped([sliding(8, sink_tokens)], num_blocks=16)
    sequence = computed(manager, range(24))
    num_sink_blocks = -(-sink_tokens // 4)
    [table] = tables(manager, sequence)
    assert [block < 0 for block in table] == [num_sink_blocks <= column < 4 for column in range(6)]
    manager.free(sequence)
    again = manager.add_sequence(range(25))
    assert again.num_cached_tokens == 24
    assert tables(manager, again)[0][:6] == table


# -- C: reuse and partial reuse ---------------------------------------------------------------------------------------


def test_TRT33_TRT34_what_is_released_is_cached_down_to_the_last_written_token():
    manager = small(block_size=4, num_blocks=8)
    first = manager.add_sequence(range(9))
    assert (first.num_cached_tokens, first.num_blocks, manager.num_free_blocks) == (0, 3, 5)
    release(manager, first, [9, 10])
    assert manager.num_free_blocks == 8
    assert hit(manager, range(12)) == 10


def test_TRT35_content_that_is_there_already_is_not_stored_again():
    manager = small(block_size=4, num_blocks=8)
    release(manager, manager.add_sequence(range(9)), [9, 10])
    second = manager.add_sequence(range(9))
    assert second.num_cached_tokens == 8
    release(manager, second, [9, 10])
    assert (manager.num_free_blocks, manager.stats().num_evictable_blocks) == (8, 3)


def test_TRT36_TRT37_TRT38_a_partly_filled_block_is_copied_for_each_that_needs_it():
    """Differs: theirs gives the block itself to the first that matches, and the second finds 8 tokens. Here both copy
    from it, and it stays: 9 and 10 tokens.
    """
    manager = small(block_size=4, num_blocks=8)
    release(manager, manager.add_sequence(range(9)), [9, 10])
    second = manager.add_sequence(range(10))
    assert (second.num_cached_tokens, manager.num_free_blocks) == (9, 5)
    third = manager.add_sequence(range(11))
    assert (third.num_cached_tokens, manager.num_free_blocks) == (10, 4)
    assert ids(second)[:2] == ids(third)[:2]
    copies = moves(manager)
    assert [(source, n) for source, _, n in copies] == [(copies[0][0], 1), (copies[0][0], 2)]
    manager.append([second], [[10]])
    manager.commit([second, third], [10, 11])
    manager.free(second)
    assert manager.num_free_blocks == 5
    manager.free(third)
    assert manager.num_free_blocks == 8
    assert hit(manager, range(12)) == 11


def test_TRT39_TRT44_short_prompts_reuse_what_fits_and_a_single_token_nothing():
    manager = small(block_size=4, num_blocks=8)
    release(manager, manager.add_sequence(range(9)), [9, 10])
    short = manager.add_sequence(range(5))
    assert (short.num_cached_tokens, short.num_blocks, manager.num_free_blocks) == (4, 2, 6)
    release(manager, short)
    single = manager.add_sequence([0])
    assert (single.num_cached_tokens, single.num_blocks) == (0, 1)
    release(manager, single)
    assert manager.num_free_blocks == 8


# -- E: counts per request --------------------------------------------------------------------------------------------


def test_TRT57_TRT58_blocks_reused_and_missed_are_counted_once_per_admission():
    manager = small(block_size=4, num_blocks=16)
    cached(manager, range(9))
    first = manager.stats()
    assert (first.num_reused_blocks, first.num_missed_blocks, first.num_allocated_blocks) == (0, 3, 3)
    manager.add_sequence(range(9))
    both = manager.stats()
    reused, missed = both.num_reused_blocks, both.num_missed_blocks - first.num_missed_blocks
    assert (reused, missed, both.num_allocated_blocks - first.num_allocated_blocks) == (2, 1, 1)
    assert reused / (reused + missed) == pytest.approx(2 / 3)


# -- F: eviction ------------------------------------------------------------------------------------------------------


def test_TRT66_blocks_without_content_go_before_cached_ones():
    manager = small(block_size=4, num_blocks=4)
    release(manager, computed(manager, [0, 1, 2, 3]), [4])
    other = manager.add_sequence([1, 1, 2, 3])
    assert other.num_cached_tokens == 0
    assert manager.stats().num_evicted_blocks == 0
    assert hit(manager, range(5)) == 4


def test_TRT68_a_block_of_priority_0_stays_while_its_child_does():
    """They send the child to a second tier, which there is none of here: it is gone."""
    manager = small(block_size=4, num_blocks=4)
    first = computed(manager, range(12), retention=Retention([(4, 8, 0, None)]))
    manager.add_sequence(range(100, 104))
    assert manager.num_free_blocks == 0
    manager.free(first)
    assert manager.num_free_blocks == 3
    found = []
    for _ in range(3):
        manager.evict(1)
        found.append(hit(manager, range(13)))
    assert found == [8, 4, 0]


def test_TRT73_what_was_released_first_is_evicted_first():
    manager = small(block_size=4, num_blocks=8, policy="lru")
    first, second = computed(manager, [1] * 4), computed(manager, [2] * 4)
    manager.free(second)
    manager.free(first)
    found = []
    for num_blocks in (6, 7, 8):
        filler = manager.add_sequence([9] * 4 * num_blocks)
        found.append((hit(manager, [1] * 5), hit(manager, [2] * 5)))
        manager.free(filler)
    assert found == [(4, 4), (4, 0), (0, 0)]


def clocked(num_blocks=4, **settings):
    """A manager of blocks of 4 tokens, and its clock: a list of one number of seconds."""
    now = [0.0]
    manager = small(block_size=4, num_blocks=num_blocks, **settings)
    return KVCacheManager(manager.config, clock=lambda: now[0]), now


def test_TRT59_the_least_priority_goes_first_and_what_its_end_protects_stays():
    manager, _ = clocked()
    first = computed(manager, range(8), retention=Retention([(0, 4, 90, None), (4, 8, 10, None)], 20))
    second = computed(manager, range(8, 16))
    manager.free(first)
    manager.free(second)
    cached(manager, range(16, 24), retention=Retention([(0, None, 20, None)], 20))
    assert hit(manager, range(8, 16)) == 4  # the first one's tail at 10 went, then a tail at the default of 35
    assert hit(manager, range(8)) == 4


def test_TRT64_a_priority_whose_time_is_over_protects_no_more():
    manager, now = clocked(num_blocks=8)
    first = computed(manager, range(12), retention=Retention([(0, None, 80, 0.010)]))
    second = computed(manager, range(12, 24), retention=Retention([(0, None, 50, None)]))
    manager.free(first)
    manager.free(second)
    now[0] = 0.050
    cached(manager, [1] * 12)
    assert manager.add_sequence(range(12, 24)).num_cached_tokens == 11


def test_TRT74_of_80_and_5_the_5_goes_first():
    manager, _ = clocked()
    cached(manager, [1] * 4, retention=Retention([(0, None, 5, None)]))
    cached(manager, [2] * 4, retention=Retention([(0, None, 80, None)]))
    cached(manager, [1] * 4)  # used last, and still at 5: a prompt that asks for nothing changes nothing
    manager.evict(1)
    assert (hit(manager, [1] * 5), hit(manager, [2] * 5)) == (0, 4)


def test_TRT75_a_duration_counts_from_the_release():
    manager, now = clocked()
    sequence = computed(manager, [1] * 4, retention=Retention([(0, None, 80, 1.0)]))
    now[0] = 100.0
    manager.free(sequence)
    for second, gone in ((100.5, [2] * 5), (102.0, [1] * 5)):
        now[0] = second
        cached(manager, [2] * 4, retention=Retention([(0, None, 50, None)]))
        manager.evict(1)
        assert hit(manager, gone) == 0
    assert hit(manager, [2] * 5) == 4


@pytest.mark.parametrize(
    ("ranges", "block_size", "num_tokens", "priorities"),
    [
        ([(0, 64, 80), (64, 128, 50)], 64, 256, [80, 50, 35, 35]),
        ([(0, 63, 80), (63, 127, 30)], 32, 127, [80, 80, 30, 30]),
        ([(0, 1, 80), (1, 2, 5)], 32, 128, [80, 35, 35, 35]),
        ([(0, 128, 80)], 256, 192, [80]),
        ([(0, 65, 80), (65, 129, 30)], 64, 192, [80, 80, 30]),
        ([(0, 64, 80), (129, None, 50)], 64, 256, [80, 35, 35, 50]),
        ([(0, 64, 80), (66, 67, 50)], 64, 256, [80, 35, 35, 35]),
        ([(127, 193, 80)], 64, 256, [35, 35, 80, 80]),
        ([(127, 193, 80)], 64, 32, [35]),
        ([(1, None, 80)], 64, 128, [35, 80]),
    ],
)
def test_TRT77_a_block_is_kept_as_the_range_that_holds_its_first_token(ranges, block_size, num_tokens, priorities):
    manager = small(block_size=block_size, num_blocks=8, max_sequence_length=1024)
    retention = Retention([(*each, None) for each in ranges])
    sequence = manager.add_sequence(range(num_tokens), retention=retention)
    found = []
    for stop, keep in sequence._keeps(0, len(priorities)):
        found += [keep.priority] * (stop - len(found))
    assert found == priorities


@pytest.mark.parametrize(
    "ranges",
    [[(0, None, 80, None), (64, 128, 80, None)], [(64, 32, 80, None)], [(0, 64, 80, None), (30, 128, 80, None)]],
)
def test_TRT78_ranges_that_are_open_reversed_or_overlap_are_refused(ranges):
    with pytest.raises(ArgumentError, match="retention"):
        Retention(ranges)


# -- I: capacity ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("block_size", "expected"), [(1, 1152), (64, 18)])
def test_TRT107_prompt_and_generated_tokens_need_what_is_allocated_and_what_is_told(block_size, expected):
    manager = small(block_size=block_size, num_blocks=2048, max_sequence_length=4096)
    sequence = manager.add_sequence(range(1024))
    assert sequence.num_blocks + manager.blocks_needed_to_completion(sequence, 128) == expected


def test_TRT107_a_window_changes_nothing_in_what_a_request_is_given_over_time():
    """They count 18 with a window widened for the prefill; here the window holds a prompt until it is committed."""
    manager = grouped([sliding(128)], block_size=64)
    sequence = computed(manager, range(1024))
    assert manager.stats().groups[0].num_allocated_blocks == 16
    assert 16 + manager.blocks_needed_to_completion(sequence, 128) == 18


@pytest.mark.parametrize(("num_tokens", "num_beams", "expected"), [(13, 1, 2), (13, 4, 5), (16, 4, 2), (60, 4, 7 + 4)])
def test_a_first_step_takes_the_full_blocks_once_and_the_rest_for_each_beam(num_tokens, num_beams, expected):
    manager = small(block_size=8, num_blocks=64)
    assert manager.forecast().add(num_tokens, num_beams=num_beams).free_blocks == 64 - expected
    manager.add_sequence(range(num_tokens), num_beams=num_beams)
    assert manager.num_free_blocks == 64 - expected


@pytest.mark.parametrize(
    ("num_beams", "num_generated", "lookahead", "num_draft_tokens", "expected"),
    [(4, 3, 1, 0, 0), (4, 4, 1, 0, 4), (4, 3, 2, 0, 4), (1, 3, 1, 5, 1), (1, 3, 2, 5, 2)],
)
def test_a_next_step_takes_blocks_where_any_beam_crosses_a_boundary(
    num_beams, num_generated, lookahead, num_draft_tokens, expected
):
    """A prompt of 13 in blocks of 8, and what was generated after it, the last token of that still to be computed."""
    manager = small(block_size=8, num_blocks=64)
    first = manager.add_sequence(range(13), num_beams=num_beams)
    manager.commit([first])
    beams = first.beams
    manager.append(beams, [[7] * (num_generated - 1)] * num_beams)
    needed = [manager.blocks_needed_next_step(beam, lookahead, num_draft_tokens=num_draft_tokens) for beam in beams]
    assert sum(needed) == expected
    before = manager.num_free_blocks
    manager.append(beams, [[7] * lookahead * (1 + num_draft_tokens)] * num_beams)
    assert before - manager.num_free_blocks == expected


def test_to_completion_a_request_takes_its_prompt_once_and_its_answers_for_each_beam():
    """A prompt of 13 in blocks of 8, 20 new tokens, 4 beams: 17 blocks, of which admission takes 1 and 4."""
    manager = small(block_size=8, num_blocks=64)
    first = manager.add_sequence(range(13), num_beams=4)
    manager.commit([first])
    beams = first.beams
    assert 64 - manager.num_free_blocks == 5
    assert sum(manager.blocks_needed_to_completion(beam, 20) for beam in beams) == 12
    manager.append(beams, [[7] * 20] * 4)
    assert 64 - manager.num_free_blocks == 17


def test_TRT125_memory_is_a_bound():
    """Differs: theirs may take a little more than it was given, 5,619,712 bytes for 8 layers; here that is the most."""
    layers = [AttentionSpec(8, 64), *[AttentionSpec(8, 64, sliding_window=128)] * 7]
    config = CacheConfig(layers, block_size=32, memory=5_619_712, max_sequence_length=1024)
    config.validate()
    taken = sum(
        group.block_bytes * num_blocks for group, num_blocks in zip(config.groups, config.group_num_blocks, strict=True)
    )
    assert 5_619_712 - sum(group.block_bytes for group in config.groups) < taken <= 5_619_712


# -- G: partial copies ------------------------------------------------------------------------------------------------


def test_TRT79_TRT80_TRT81_three_tokens_of_a_block_in_use_are_copied_and_no_more():
    manager = small(block_size=8, num_blocks=4)
    memory = manager.memory = TokenMemory(manager.config)
    memory.attach(manager)
    first = manager.add_sequence(range(17))
    assert (first.num_cached_tokens, first.num_blocks) == (0, 3)
    memory.write(first)
    release(manager, first)
    again = manager.add_sequence(range(17))
    assert again.num_cached_tokens == 16
    second = manager.add_sequence([*range(11), 99])
    assert second.num_cached_tokens == 11
    assert ids(second)[0] == ids(again)[0]
    source, copy = memory.slots[ids(again)[1]], memory.slots[ids(second)[1]]
    assert copy.tolist() == [*source[:3].tolist(), 0, 0, 0, 0, 0]
    assert memory.num_copied_tokens == 3


# -- J: the tree ------------------------------------------------------------------------------------------------------


def test_TRT108_TRT109_a_chain_is_there_as_long_as_its_head_and_goes_from_its_end():
    """Differs: theirs may take the head of a chain out first, and keeps a node for it; here nobody can ask for that."""
    manager = small(block_size=4, num_blocks=8)
    head = computed(manager, range(4))
    cached(manager, range(8))
    assert manager.stats().num_extents == 2
    assert manager.evict(8) == 1
    assert (manager.stats().num_extents, hit(manager, range(9))) == (1, 4)
    manager.free(head)
    assert manager.evict(8) == 1
    assert (manager.stats().num_extents, hit(manager, range(9))) == (0, 0)


def test_TRT110_two_windows_share_one_place_which_ends_with_the_first_that_loses_its_block():
    """Differs: theirs keeps the place until both have lost it; nothing could hit it, so here it goes at once."""
    manager = grouped([sliding(8), sliding(4)], num_blocks=[8, 1])
    cached(manager, range(4))
    assert (manager.stats().num_extents, hit(manager, range(5))) == (1, 4)
    manager.free(manager.add_sequence([9]))
    assert (manager.stats().num_extents, manager.stats().num_evictable_blocks) == (0, 0)
    assert hit(manager, range(5)) == 0


def test_TRT111_a_block_that_holds_other_content_is_found_under_that_alone():
    manager = small(block_size=4, num_blocks=1)
    [block] = cached(manager, range(4))
    assert cached(manager, range(10, 14)) == [block]
    assert (hit(manager, range(5)), hit(manager, range(10, 15))) == (0, 4)
    assert manager.stats().num_extents == 1


def test_TRT114_dropping_what_two_continue_from_drops_all_three():
    manager = small(block_size=4, num_blocks=8)
    for last in (1, 2):
        cached(manager, [*range(4), *[last] * 4])
    assert manager.stats().num_extents == 3
    assert manager.drop(namespace=()) == 3
    assert (manager.stats().num_extents, manager.num_free_blocks) == (0, 8)


def test_TRT112_all_of_a_partly_filled_block_is_found_as_a_part_of_one():
    manager = small(block_size=4, num_blocks=8)
    cached(manager, [1, 2])
    match = manager.match_prefix([1, 2, 3])
    assert (match.num_block_tokens, match.num_partial_tokens) == (0, 2)
    cached(manager, [1, 2, 3, 4])
    match = manager.match_prefix([1, 2, 3, 4, 5])
    assert (match.num_block_tokens, match.num_partial_tokens) == (4, 0)


def test_TRT113_a_block_that_agrees_in_three_of_four_tokens_gives_three():
    manager = small(block_size=4, num_blocks=8)
    cached(manager, [1, 2, 3, 4])
    assert hit(manager, [1, 2, 3, 9]) == 3


def test_TRT115_the_first_block_of_a_content_is_kept():
    manager = small(block_size=4, num_blocks=8)
    left = cached(manager, [1, 2, 3, 4])
    again = computed(manager, [1, 2, 3, 4], reuse=False)
    assert ids(again) != left
    assert manager.num_free_blocks == 7
    assert ids(again) == left


# -- K: the first Python reference ------------------------------------------------------------------------------------


def test_TRT116_TRT117_three_sequences_step_by_step():
    manager = small(block_size=32, num_blocks=128, max_sequence_length=256)
    sequences = [computed(manager, [start] * length) for start, length in enumerate((30, 35, 31))]
    assert [sequence.num_blocks for sequence in sequences] == [1, 2, 1]
    for _ in range(3):
        manager.append(sequences, np.array([7, 7, 7]))
    assert [sequence.num_tokens for sequence in sequences] == [33, 38, 34]
    assert [sequence.num_blocks for sequence in sequences] == [2, 2, 2]
    manager.free(sequences.pop(1))
    manager.append(sequences, np.array([7, 7]))
    assert [sequence.num_tokens for sequence in sequences] == [34, 35]
    assert manager.stats().num_sequences == 2


@pytest.mark.parametrize(("num_tokens", "num_free"), [(4, [7, 7, 7, 7, 8]), (3, [4, 5, 6, 7, 8])])
def test_TRT118_a_shared_block_is_free_after_the_last_beam_and_private_ones_one_by_one(num_tokens, num_free):
    manager = small(block_size=4, num_blocks=8)
    first = manager.add_sequence(range(num_tokens), num_beams=4)
    manager.commit([first])
    free = [manager.num_free_blocks]
    for beam in first.beams:
        manager.free(beam, publish=False)
        free.append(manager.num_free_blocks)
    assert free == num_free


def test_TRT119_an_empty_pool_is_an_error():
    manager = small(block_size=4, num_blocks=1)
    manager.add_sequence([1])
    with pytest.raises(OutOfBlocks):
        manager.add_sequence([2])
