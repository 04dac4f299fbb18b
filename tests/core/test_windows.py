"""Windows, sinks and chunks: what a sequence keeps of its past, what others find of it, what pressure leaves."""

import random

import numpy as np
import pytest
from tests.core.layers import FULL, chunked, grouped, hit, sliding, tables
from tests.core.small import cached, computed, group_moves, refused

from kvist import NeverFits, OutOfBlocks, SequenceError


def windowed(window, sink_tokens=0, block_size=2, **settings):
    return grouped([FULL, sliding(window, sink_tokens)], block_size=block_size, **settings)


# -- falling out of span ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("window", "block_size", "num_tokens", "holes"),
    [
        (1, 2, 4, 2),
        (1, 2, 5, 2),
        (2, 2, 5, 2),
        (3, 2, 5, 1),
        (4, 2, 8, 2),
        (5, 2, 8, 2),
        (6, 2, 8, 1),
        (3, 1, 5, 3),
        (5, 4, 12, 2),
        (6, 4, 12, 1),
        (100, 4, 12, 0),
    ],
)
def test_blocks_that_the_next_token_does_not_see_go_back(window, block_size, num_tokens, holes):
    manager = windowed(window, block_size=block_size)
    full, windows = tables(manager, computed(manager, range(num_tokens)))
    assert -1 not in full
    assert windows == [-1] * holes + [block for block in windows if block >= 0]
    manager.check()


def test_sinks_stay_and_so_does_the_rest_of_their_block():
    manager = windowed(2, sink_tokens=3)
    [_, windows] = tables(manager, computed(manager, range(11)))
    assert [block >= 0 for block in windows] == [True, True, False, False, False, True]
    assert manager.match_prefix([*range(11), 9]).num_tokens == 10


def test_a_chunk_keeps_its_own_blocks_alone():
    manager = grouped([FULL, chunked(6)], block_size=2)
    sequence = manager.add_sequence(range(14))
    seen = []
    for num_computed in (5, 6, 11, 12, 13):
        manager.commit([sequence], num_computed)
        seen.append(tables(manager, sequence)[1].count(-1))
    assert seen == [0, 3, 3, 6, 6]


def test_a_chunk_that_begins_inside_a_block_keeps_it():
    manager = grouped([FULL, chunked(3)], block_size=2)
    sequence = manager.add_sequence(range(9))
    seen = []
    for num_computed in (2, 3, 5, 6):
        manager.commit([sequence], num_computed)
        seen.append(tables(manager, sequence)[1].count(-1))
    assert seen == [0, 1, 1, 3]


def test_blocks_go_back_while_the_sequence_runs_and_others_can_have_them():
    manager = grouped([sliding(2)], block_size=2, num_blocks=4, reuse=False)
    sequence = manager.add_sequence(range(3))
    for token in range(20):
        manager.append([sequence], [token])
        manager.commit([sequence])
        manager.check()
    assert manager.num_free_blocks >= 2
    assert sequence.num_blocks <= 2


def test_what_is_not_committed_keeps_its_blocks():
    manager = windowed(2)
    sequence = manager.add_sequence(range(8))
    assert tables(manager, sequence)[1].count(-1) == 0
    manager.commit([sequence], 4)
    assert tables(manager, sequence)[1].count(-1) == 1


def test_the_version_grows_when_a_block_leaves_the_table():
    manager = windowed(2)
    sequence = manager.add_sequence(range(8))
    version = sequence.version
    manager.commit([sequence])
    manager.stats()
    assert sequence.version > version


def test_rows_slide_together_whatever_their_lengths():
    manager = windowed(3, block_size=1, num_blocks=64)
    sequences = [computed(manager, range(start, start + 3 + start // 10)) for start in (10, 20, 30)]
    for token in range(5):
        manager.append(np.array([sequence.row for sequence in sequences]), np.array([token] * 3, np.int32))
        manager.commit(sequences)
    for sequence in sequences:
        held = [block >= 0 for block in tables(manager, sequence)[1]]
        assert held == [False] * (len(held) - 2) + [True, True]
    manager.check()


# -- hits -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block_size", [1, 2, 4])
@pytest.mark.parametrize("window", [1, 2, 3, 4, 5, 8])
def test_with_room_a_window_is_found_wherever_a_prompt_leaves_another(window, block_size):
    manager = windowed(window, block_size=block_size)
    cached(manager, range(16))
    found = [hit(manager, [*range(n), 99]) for n in range(1, 17)]
    assert found == [n // block_size * block_size for n in range(1, 17)]


def test_a_hit_shows_only_what_is_in_span():
    manager = windowed(4)
    first = cached(manager, range(12))
    sequence = manager.add_sequence([*range(12), 99])
    assert sequence.num_cached_tokens == 12
    full, windows = (sequence.group_blocks(group).tolist() for group in range(2))
    assert full[:6] == first
    assert [block >= 0 for block in windows] == [False] * 4 + [True, True, True]
    manager.check()


def test_a_hit_with_sinks_shows_them_too():
    manager = windowed(2, sink_tokens=2)
    cached(manager, range(12))
    sequence = manager.add_sequence([*range(12), 99])
    assert [block >= 0 for block in sequence.group_blocks(1).tolist()] == [True] + [False] * 4 + [True, True]


def test_a_block_that_agrees_in_part_is_copied_in_every_group():
    manager = windowed(3, block_size=4, partial_reuse=True)
    sources = cached(manager, range(7))
    sequence = manager.add_sequence([*range(6), 99])
    assert (sequence.num_cached_tokens, sequence.num_computed_tokens) == (6, 6)
    moves = group_moves(manager)
    assert [(group, num_tokens) for group, _, _, num_tokens in moves] == [(0, 2), (1, 2)]
    assert moves[0][1] == sources[1]
    assert [destination for _, _, destination, _ in moves] == [sequence.group_blocks(group)[1] for group in range(2)]


def test_two_who_compute_the_same_share_one_block_in_every_group():
    manager = windowed(4)
    both = [manager.add_sequence(range(9)) for _ in range(2)]
    manager.commit(both)
    ours, theirs = (tables(manager, sequence) for sequence in both)
    assert [table[:4] for table in ours] == [table[:4] for table in theirs]
    assert all(table[4] != other[4] for table, other in zip(ours, theirs, strict=True))
    manager.check()


# -- pressure ---------------------------------------------------------------------------------------------------------


def test_a_short_window_pool_gives_up_what_matters_least_and_prompts_are_found_whole():
    manager = grouped([FULL, sliding(4)], block_size=2, num_blocks=[64, 16])
    for start in range(0, 400, 100):
        cached(manager, range(start, start + 20))
        manager.check()
    assert [hit(manager, range(start, start + 21)) for start in range(100, 400, 100)] == [20, 20, 20]


@pytest.mark.parametrize("block_size", [1, 2, 4])
def test_evicting_half_of_the_blocks_of_a_hybrid_prompt_leaves_half_of_it(block_size):
    manager = windowed(3 * block_size + 1, block_size=block_size, num_blocks=16)
    cached(manager, range(16 * block_size))
    manager.evict(16)
    assert hit(manager, range(16 * block_size + 1)) == 8 * block_size
    manager.evict(8)
    assert hit(manager, range(16 * block_size + 1)) == 4 * block_size
    manager.check()


def test_what_is_committed_is_found_later_although_it_left_the_window_before_a_call_that_found_no_room():
    manager = windowed(2, block_size=1, num_blocks=8)
    first = computed(manager, range(6))
    with pytest.raises(OutOfBlocks):
        manager.add_sequence([50, 51, 52])
    manager.free(first)
    assert hit(manager, [0, 1, 2, 99]) == 3


@pytest.mark.parametrize("seed", range(60))
def test_hits_under_pressure_are_those_of_windows_that_never_slide(seed):
    """With pools of equal sizes a window costs no hit: it needs less than full attention has, whatever is evicted."""
    chance = random.Random(seed)
    block_size, num_blocks, window = chance.choice([1, 2, 4]), chance.randint(6, 20), chance.randint(1, 16)
    settings = {
        "block_size": block_size,
        "num_blocks": num_blocks,
        "max_sequences": 4,
        "max_sequence_length": 16 * block_size,
        "policy": chance.choice(["priority", "lru", "lfu", "fifo", "cost", "slru", "s3fifo"]),
        "partial_reuse": chance.random() < 0.5,
    }
    managers = [grouped([FULL, sliding(size)], **settings) for size in (16 * block_size + 1, window)]
    histories = [_history(manager, random.Random(seed)) for manager in managers]
    assert histories[0] == histories[1]


def _history(manager, chance):
    """What random calls return: hits, and errors."""
    running, prompts, seen = [], [[1, 2, 3]], []
    block_size = manager.config.block_size
    for _ in range(100):
        act = chance.choice("aaacpf")
        pick, size = chance.random(), chance.randint(1, block_size + 1)
        if act == "a":
            base = chance.choice(prompts[-10:])
            prompt = base[: chance.randint(0, len(base))] + [chance.randrange(3) for _ in range(chance.randint(1, 8))]
            prompts.append(prompt[: 10 * block_size])
        try:
            if act == "a":
                running.append(manager.add_sequence(prompts[-1]))
                seen.append(running[-1].num_cached_tokens)
            elif running:
                sequence = running[int(pick * len(running))]
                if act == "p":
                    manager.append([sequence], [[size] * size])
                manager.commit([sequence])
                if act == "f":
                    manager.free(sequence)
                    running.remove(sequence)
        except (OutOfBlocks, NeverFits) as error:
            seen.append(type(error).__name__)
    manager.check()
    return seen


@pytest.mark.parametrize("layers", [[chunked(4)], [sliding(1)], [chunked(2), sliding(1)]])
def test_memory_is_bounded_where_a_prefix_needs_no_block_at_its_end(layers):
    manager = grouped(layers, block_size=2, num_blocks=4)
    for start in range(0, 40_000, 100):
        cached(manager, range(start, start + 4))
    assert manager.stats().num_extents <= 4
    manager.check()


# -- stepping back ----------------------------------------------------------------------------------------------------


def test_drafts_are_taken_back_in_place_while_the_window_has_not_moved_on():
    manager = windowed(4)
    sequence = computed(manager, range(5))
    before = tables(manager, sequence)
    manager.append([sequence], [[7, 8, 9]])
    manager.rewind(sequence, 3)
    assert (sequence.num_tokens, sequence.num_computed_tokens) == (5, 5)
    assert tables(manager, sequence) == before
    assert group_moves(manager) == []


def test_a_step_back_inside_a_published_block_copies_it_in_every_group():
    manager = windowed(8)
    sequence = computed(manager, range(8))
    sources = [table[3] for table in tables(manager, sequence)]
    manager.rewind(sequence, 1)
    assert (sequence.num_tokens, sequence.num_computed_tokens) == (7, 7)
    copies = [sequence.group_blocks(group).tolist()[3] for group in range(2)]
    assert group_moves(manager) == [(0, sources[0], copies[0], 1), (1, sources[1], copies[1], 1)]
    manager.check()


def test_a_step_back_to_before_the_window_goes_on_from_what_the_cache_still_has():
    manager = windowed(2)
    sequence = computed(manager, range(10))
    assert tables(manager, sequence)[1].count(-1) == 4
    manager.rewind(sequence, 4)
    assert (sequence.tokens.tolist(), sequence.num_computed_tokens) == ([0, 1, 2, 3, 4, 5], 6)
    assert [block >= 0 for block in tables(manager, sequence)[1]] == [False, False, True]
    manager.check()


def test_what_the_cache_has_lost_of_a_window_must_be_computed_again_after_a_step_back():
    manager = windowed(2, num_blocks=[64, 8])
    sequence = computed(manager, range(10))
    assert tables(manager, sequence)[1].count(-1) == 4
    other = manager.add_sequence(range(100, 110))
    manager.rewind(sequence, 4)
    assert (sequence.num_tokens, sequence.num_computed_tokens) == (6, 4)
    assert tables(manager, sequence)[1].count(-1) == 1
    manager.commit([sequence])
    manager.free(other)
    assert hit(manager, [*range(6), 9]) == 6
    manager.check()


def test_a_step_back_that_finds_no_room_changes_nothing():
    manager = grouped([sliding(2)], block_size=1, num_blocks=6, reuse=False)
    sequence = computed(manager, range(6))
    assert manager.num_free_blocks == 5
    manager.add_sequence([50, 51, 52, 53])
    with refused(manager, OutOfBlocks, "rewind"):
        manager.rewind(sequence, 1)
    assert sequence.is_live


@pytest.mark.parametrize("num_tokens", [1, 3, 5])
def test_a_step_back_with_chunks_that_finds_no_room_changes_nothing(num_tokens):
    """A chunk that begins inside a block touches one block more than one that begins at the start."""
    manager = grouped([sliding(2)], block_size=2, num_blocks=4, max_chunk_tokens=2, partial_reuse=True)
    sequence = manager.add_sequence([1, 2, 3, 4, 5, 6, 7, 8, 9])
    while n := manager.chunk_limit(sequence, 9 - sequence.num_computed_tokens):
        manager.commit([sequence], sequence.num_computed_tokens + n)
    assert sequence.num_computed_tokens == 9
    manager.free(manager.add_sequence([1, 2, 3, 4]))
    other = manager.add_sequence([50, 51])
    manager.reserve([other], 2)
    try:
        manager.rewind(sequence, num_tokens)
    except OutOfBlocks:
        assert sequence.num_tokens == 9
    else:
        assert sequence.num_tokens == 9 - num_tokens
    manager.check()


def test_a_step_back_does_not_count_on_the_block_of_a_chunk_that_was_never_given():
    manager = grouped([chunked(5)], block_size=2, num_blocks=3, max_chunk_tokens=2)
    leader, beam = manager.add_sequence([0] * 4, num_beams=2).beams
    computed(manager, [1])
    for num_computed in (2, 4):
        manager.append([leader], [0])
        manager.commit([leader], num_computed)
    assert (leader.num_blocks, leader.num_tokens, manager.num_free_blocks) == (2, 6, 0)
    with refused(manager, OutOfBlocks, "group 0 needs 1"):
        manager.rewind(leader, 3)
    manager.free(beam)
    manager.rewind(leader, 3)
    assert leader.num_computed_tokens == 3
    manager.check()


def test_nothing_is_accepted_at_a_position_whose_block_a_window_was_never_given():
    manager = grouped([sliding(6)], block_size=4, num_blocks=3, max_chunk_tokens=4)
    other = computed(manager, [1])
    sequence = manager.add_sequence([0] * 9)
    for num_computed in (4, 8):
        manager.commit([sequence], num_computed)
    assert (sequence.capacity, manager.chunk_limit(sequence, 2)) == (12, 0)
    with refused(manager, SequenceError, "accept", "group 0 has blocks for 8"):
        manager.accept(sequence, [0, 5], [0, 1])
    manager.free(other)
    manager.reserve([sequence], 1)
    manager.accept(sequence, [0, 5], [0, 1])
    assert sequence.num_computed_tokens == 10
    manager.check()


def test_what_a_part_of_a_block_moves_out_of_span_goes_back_at_once():
    """Else it would go when some other sequence commits, and a tenant could see that one did."""
    manager = grouped([FULL, sliding(4)], block_size=2, num_blocks=8, partial_reuse=True, event_buffer=64)
    cached(manager, [1, 2, 3, 4, 5, 6])
    sequence = manager.add_sequence([1, 2, 3, 4, 5, 9])
    assert sequence.num_cached_tokens == 5
    manager.events.poll()
    assert manager.evict(8) == 3
    assert {event.reason for event in manager.events.poll()} == {"asked for"}
    assert tables(manager, sequence)[1][0] == -1
    manager.check()


def test_where_no_block_can_be_evicted_what_needs_none_stays():
    manager = grouped([chunked(2)], block_size=2, num_blocks=4)
    sequence = computed(manager, [1, 2])
    assert manager.evict(1) == 1
    manager.free(sequence)
    assert manager.evict(1) == 0
    assert hit(manager, [1, 2, 3]) == 2


def test_taking_everything_back_needs_nothing():
    manager = windowed(2)
    sequence = computed(manager, range(9))
    tables(manager, sequence)
    manager.rewind(sequence, 9)
    assert (sequence.num_tokens, sequence.num_computed_tokens) == (0, 0)
    manager.append([sequence], [[5, 6, 7]])
    manager.commit([sequence])
    assert sequence.tokens.tolist() == [5, 6, 7]
    manager.check()


# -- branches ---------------------------------------------------------------------------------------------------------


def test_a_fork_shares_what_is_in_span_and_copies_the_block_being_written_in_every_group():
    manager = windowed(3)
    parent = computed(manager, range(7))
    before = tables(manager, parent)
    (child,) = manager.fork(parent)
    ours = [child.group_blocks(group).tolist() for group in range(2)]
    assert [table[:3] for table in ours] == [table[:3] for table in before]
    assert group_moves(manager) == [(0, before[0][3], ours[0][3], 1), (1, before[1][3], ours[1][3], 1)]
    manager.free(parent)
    manager.append([child], [[7, 8, 9]])
    manager.commit([child])
    manager.check()


def test_a_fork_keeps_its_window_when_its_parent_moves_on():
    manager = windowed(2, block_size=1)
    parent = computed(manager, range(4))
    (child,) = manager.fork(parent)
    held = tables(manager, child)[1]
    manager.append([parent], [[4, 5, 6, 7]])
    manager.commit([parent])
    assert tables(manager, child)[1] == held
    assert [block >= 0 for block in held] == [False, False, False, True]
    manager.check()


def test_beams_show_their_leaders_window_and_hold_it_themselves_once_the_prompt_is_committed():
    manager = windowed(3)
    leader = manager.add_sequence(range(7), num_beams=3)
    manager.commit([leader], 4)
    shown = tables(manager, leader)[1]
    assert all(tables(manager, beam)[1][:3] == shown[:3] for beam in leader.beams)
    manager.commit([leader])
    beams = leader.beams[1:]
    manager.free(leader)
    for beam in beams:
        assert beam.num_computed_tokens == 7
        assert [block >= 0 for block in tables(manager, beam)[1]] == [False, False, True, True]
    manager.check()


def test_beams_do_not_count_on_blocks_of_a_chunk_that_were_never_given():
    manager = grouped([sliding(6)], block_size=2, num_blocks=3, max_sequence_length=12, max_chunk_tokens=2)
    full, short = manager.add_sequence([1, 2, 3, 4]), manager.add_sequence([5, 6, 7, 8, 9, 9])
    manager.commit([full], 2)
    manager.commit([short], 2)
    pin = manager.pin(manager.match_prefix([5, 6, 7]))
    with refused(manager, OutOfBlocks, "group 0 needs 1"):
        manager.reorder([full, short], [0, 0])
    pin.release()


def test_reordered_beams_take_over_windows_with_the_rest():
    manager = windowed(3, num_blocks=64)
    beams = manager.add_sequence(range(6), num_beams=2).beams
    manager.commit([beams[0]])
    manager.append(beams, [[7, 8, 9], [4, 5, 6]])
    manager.commit(beams)
    first = tables(manager, beams[0])
    manager.reorder(beams, [0, 0])
    assert beams[1].tokens.tolist() == [*range(6), 7, 8, 9]
    assert [table[:4] for table in tables(manager, beams[1])] == [table[:4] for table in first]
    assert [group for group, _, _, _ in group_moves(manager)] == [0, 1]
    manager.check()


def test_drafts_that_a_waiting_beams_leader_adds_do_not_take_its_window_away():
    manager = grouped([sliding(2)], block_size=1, max_chunk_tokens=2)
    leader = manager.add_sequence(range(6), num_beams=2)
    beam = leader.beams[1]
    manager.append([leader], [[7, 8, 9]])
    for num_computed in (1, 3, 5, 7):
        manager.commit([leader], num_computed)
    assert beam.num_computed_tokens == 6
    assert tables(manager, beam)[0][5] >= 0
    manager.check()


# -- prompts in chunks of computation ---------------------------------------------------------------------------------


def test_a_prompt_in_chunks_takes_blocks_of_windows_for_one_chunk_at_a_time():
    manager = grouped([FULL, sliding(4)], block_size=2, num_blocks=[64, 8], max_chunk_tokens=4)
    sequence = manager.add_sequence(range(40))
    ends = [len(sequence.group_blocks(1))]
    while sequence.num_computed_tokens < 40:
        n = manager.chunk_limit(sequence, 40 - sequence.num_computed_tokens)
        assert 0 < n <= 4
        manager.commit([sequence], sequence.num_computed_tokens + n)
        ends.append(len(sequence.group_blocks(1)))
        manager.check()
    assert ends == [2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 20]
    assert len(sequence.group_blocks(0)) == 20


def test_a_prompt_in_chunks_leaves_all_of_its_windows_while_there_is_room():
    manager = grouped([FULL, sliding(2)], block_size=2, num_blocks=64, max_chunk_tokens=4)
    sequence = manager.add_sequence(range(20))
    for num_computed in range(4, 24, 4):
        manager.commit([sequence], num_computed)
    manager.free(sequence)
    assert [hit(manager, [*range(n), 99]) for n in (2, 6, 10, 14, 20)] == [2, 6, 10, 14, 20]


def test_a_chunk_larger_than_was_promised_is_refused():
    manager = grouped([FULL, sliding(4)], block_size=2, max_chunk_tokens=4)
    sequence = manager.add_sequence(range(20))
    with refused(manager, SequenceError, "commit"):
        manager.commit([sequence], 9)


def test_chunks_wait_for_blocks_which_reserve_gets_or_says_that_there_are_none():
    manager = grouped([sliding(3)], block_size=1, num_blocks=6, max_chunk_tokens=2, reuse=False)
    sequence = manager.add_sequence(range(8))
    other = manager.add_sequence([50, 51])
    manager.reserve([other], 2)
    while n := manager.chunk_limit(sequence, 8 - sequence.num_computed_tokens):
        manager.commit([sequence], sequence.num_computed_tokens + n)
    assert 0 < sequence.num_computed_tokens < 8
    with refused(manager, OutOfBlocks):
        manager.reserve([sequence], 0)
    manager.free(other)
    manager.reserve([sequence], 0)
    assert manager.chunk_limit(sequence, 2) == 2


def test_a_prompt_whose_windows_fit_no_pool_even_in_chunks_never_fits():
    manager = grouped([sliding(8)], block_size=2, num_blocks=4, max_chunk_tokens=4)
    with refused(manager, NeverFits):
        manager.add_sequence(range(20))


def test_a_waiting_beam_shows_no_block_that_its_leader_has_not_got():
    manager = grouped([sliding(3)], block_size=1, max_chunk_tokens=2)
    manager.add_sequence([9])
    leader = manager.add_sequence([1, 2, 3, 4, 5, 6], num_beams=2)
    assert leader.group_blocks(0).tolist() == [1, 2]
    assert leader.beams[1].group_blocks(0).tolist() == [1, 2, -1, -1, -1, -1]


def test_what_a_rewound_sequence_goes_on_from_does_not_slide_out_while_room_is_made():
    """The step back needs a copy of a block that a beam shares; the pools are so short that windows slide first."""
    layers = [sliding(1), sliding(3), FULL]
    manager = grouped(layers, block_size=2, num_blocks=[4, 3, 3], max_sequences=2)
    cached(manager, [0] * 6)
    cached(manager, [0] * 5)
    manager.pin(manager.match_prefix([0] * 5))
    sequence = manager.add_sequence([0] * 6, num_beams=2)
    manager.commit([sequence])
    manager.rewind(sequence, 1)
    assert sequence.num_computed_tokens == 5
    assert tables(manager, sequence)[1][1] >= 0  # of position 3, which the next token sees in a window of three
    manager.check()
