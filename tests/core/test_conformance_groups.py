"""What vLLM's and mistral.rs's managers of several groups do, as facts about this one.

Where the facts count n blocks, one of them is the null block, so there are n - 1 here, and what is null there is a hole
in the table here. Only whole blocks are found, as theirs, unless said otherwise. Facts that do not apply are in
`facts.py`, with the reason.
"""

import pytest
from tests.core.layers import CROSS, FULL, boundaries, chunked, grouped, hit, lose, sliding, state, tables
from tests.core.small import cached, computed, moves

from kvist import NeverFits, OutOfBlocks

# -- one window -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("blocks", "num_blocks"),
    [
        ("FFFFFFFFFF", 0),
        ("T", 1),
        ("TF", 1),
        ("TT", 2),
        ("TTF", 2),
        ("TTT", 3),
        ("TTTF", 3),
        ("TTFTFFTTFTTT", 12),
        ("TTFTFFTTFFF", 8),
        ("TTFTFFTTFFFT", 8),
    ],
)
def test_V35_a_window_of_four_tokens_is_found_where_its_last_two_blocks_are_there(blocks, num_blocks):
    manager = grouped([sliding(4)], block_size=2)
    cached(manager, range(2 * len(blocks)))
    for column, there in enumerate(blocks):
        if there == "F":
            lose(manager, 0, column)
    assert hit(manager, range(2 * len(blocks) + 1)) == 2 * num_blocks


def test_V37_a_sequence_lets_blocks_go_as_its_window_moves_on():
    manager = grouped([sliding(4)], block_size=2)
    sequence = manager.add_sequence(range(11))
    holes = []
    for num_computed in (0, 4, 5, 6, 7, 11):
        manager.commit([sequence], num_computed)
        holes.append(tables(manager, sequence)[0].count(-1))
    assert holes == [0, 0, 1, 1, 2, 4]


@pytest.mark.parametrize(("window", "num_others"), [(320, 0), (80, 5)])
def test_V40_a_prompt_needs_its_new_blocks_and_those_that_it_finds_in_span(window, num_others):
    """Of 20 blocks 10 are found: a wide window needs all 20, one of 80 tokens leaves 5 of them to others."""
    for num_held in (num_others, num_others + 1):
        manager = grouped([sliding(window)], block_size=16, num_blocks=20)
        cached(manager, range(160))
        if num_held:
            manager.add_sequence([9] * 16 * num_held)
        if num_held > num_others:
            with pytest.raises(OutOfBlocks, match="needs 10 blocks, but only 9 are"):
                manager.add_sequence(range(320))
        else:
            sequence = manager.add_sequence(range(320))
            assert (sequence.num_cached_tokens, sequence.num_blocks) == (160, 20 - num_others)


def test_V40_one_cached_block_of_two_is_taken_and_one_is_new():
    manager = grouped([sliding(32)], block_size=16, num_blocks=2)
    [left] = cached(manager, range(16))
    sequence = manager.add_sequence(range(32))
    assert sequence.num_cached_tokens == 16
    assert tables(manager, sequence)[0][0] == left
    assert manager.stats().groups[0].num_allocated_blocks == 1 + 1


@pytest.mark.parametrize(("layer", "num_holes"), [(sliding(16), 5), (chunked(32), 6)])
def test_V72_blocks_leave_a_window_or_a_chunk_when_the_prefill_is_committed(layer, num_holes):
    manager = grouped([layer], block_size=16)
    sequence = manager.add_sequence(range(100))
    assert tables(manager, sequence)[0].count(-1) == 0
    manager.commit([sequence])
    assert tables(manager, sequence)[0].count(-1) == num_holes
    assert manager.stats().num_held_blocks == 7 - num_holes


@pytest.mark.parametrize(
    ("num_tokens", "window", "num_query", "start"), [(100, 1, 4, 96), (100, 10, 4, 64), (8, 8, 4, 0)]
)
def test_M28_the_first_block_that_a_chunk_of_queries_sees(num_tokens, window, num_query, start):
    """Theirs cuts the window out of a whole table for every step; here what lies before it has been given back."""
    manager = grouped([sliding(window)], block_size=32)
    sequence = manager.add_sequence(range(num_tokens))
    manager.commit([sequence], num_tokens - num_query)
    [table] = tables(manager, sequence)
    assert [block >= 0 for block in table] == [32 * column >= start for column in range(len(table))]


# -- several groups ---------------------------------------------------------------------------------------------------


def test_M21_a_block_is_found_if_every_group_has_it():
    manager = grouped([FULL, sliding(4)])
    cached(manager, range(4))
    assert hit(manager, range(5)) == 4
    lose(manager, 1, 0)
    assert hit(manager, range(5)) == 0
    assert manager.match_prefix(range(9)).miss == "window"


def test_V23_evicting_half_of_the_blocks_of_a_hybrid_prompt_leaves_half_of_it():
    """Differs: they free one group after the other; the 4 blocks left of 8 are of one group, and hit nothing."""
    manager = grouped([FULL, sliding(8)], num_blocks=19, shared_pool=True)
    cached(manager, range(16))
    assert (manager.num_free_blocks, manager.stats().num_evictable_blocks) == (19, 8)
    assert manager.evict(4) == 4
    assert hit(manager, range(17)) == 8
    assert manager.stats().num_evictable_blocks == 4


@pytest.mark.parametrize(("num_taken", "found"), [(10, 16), (12, 12), (14, 8), (16, 4)])
def test_V23_a_prompt_that_needs_blocks_of_a_hybrid_one_takes_no_more_of_it_than_that(num_taken, found):
    """Differs: after 15 blocks of others they find nothing; of 19, others take what is free first, and then the end."""
    manager = grouped([FULL, sliding(8)], num_blocks=19, shared_pool=True)
    cached(manager, range(16))
    assert manager.add_sequence([9] * 4 * (num_taken // 2)).num_blocks == num_taken
    assert hit(manager, range(17)) == found


def three_groups(**settings):
    """Full attention and two windows of two blocks; theirs have equal widths, which would be one group here."""
    return grouped([FULL, sliding(32), sliding(31)], block_size=16, **settings)


def test_V42_a_hybrid_prompt_finds_all_of_its_past_and_two_blocks_of_each_window():
    manager = three_groups(num_blocks=7, shared_pool=False)
    first = computed(manager, range(55))
    before = tables(manager, first)
    assert [len(table) for table in before] == [4, 4, 4]
    manager.free(first)
    second = manager.add_sequence(range(55))
    assert second.num_cached_tokens == 48
    after = tables(manager, second)
    assert after[0][:3] == before[0][:3]
    assert [table[:3] for table in after[1:]] == [[-1, *table[1:3]] for table in before[1:]]
    assert [group.num_allocated_blocks for group in manager.stats().groups] == [4 + 1] * 3


def test_V43_what_a_hybrid_prompt_still_finds_when_blocks_are_lost():
    found = []
    for lost in ([(1, 0)], [(1, 2)], [(2, 2)], [(1, 2), (2, 2)]):
        manager = three_groups()
        cached(manager, range(48))
        for group, column in lost:
            lose(manager, group, column)
        found.append(hit(manager, range(49)) // 16)
    assert found == [3, 2, 2, 2]


@pytest.mark.parametrize(("lost", "num_blocks"), [([], 2), ([1, 2], 0)])
def test_V43_without_its_last_block_of_full_attention_a_prompt_ends_where_windows_reach(lost, num_blocks):
    """The first block alone is never lost under full attention: chains are evicted from their ends."""
    manager = three_groups(num_blocks=[3, 8, 8])
    cached(manager, range(48))
    for group in lost:
        lose(manager, group, 0)
    manager.add_sequence([9])
    assert hit(manager, range(49)) == 16 * num_blocks


@pytest.mark.parametrize(
    ("layers", "num_tokens", "found"), [([FULL], 48, 32), ([FULL], 37, 32), ([sliding(16)], 37, 32)]
)
def test_V45_B087_drafting_costs_no_cached_block(layers, num_tokens, found):
    """Differs: for draft heads they drop the last block of every hit, 16 tokens, to compute its hidden states again;
    here that is the caller's choice: who needs them admits a prompt without its last block, and appends that.
    """
    manager = grouped(layers, block_size=16)
    cached(manager, range(48))
    assert hit(manager, range(num_tokens)) == found
    sequence = manager.add_sequence(range(found))
    manager.append([sequence], [range(found, num_tokens)])
    assert (sequence.num_cached_tokens, sequence.num_tokens) == (found - 16, num_tokens)


def test_V45_a_window_of_one_block_needs_no_other():
    """Differs: their look at one block more makes the loss of block 0 a loss of everything; here block 1 is enough."""
    manager = grouped([sliding(16)], block_size=16)
    cached(manager, range(48))
    lose(manager, 0, 0)
    assert hit(manager, range(37)) == 32


def test_V47_every_full_block_of_every_group_is_published():
    """Differs: they clamp to a multiple of all block sizes, and lose the seventh block; here there is one size."""
    manager = grouped([FULL, sliding(16)], block_size=16)
    computed(manager, range(112))
    assert boundaries(manager, range(112), 7) == [0, 1, 2, 3, 4, 5, 6]


def test_V50_the_end_of_a_prompt_is_found_whatever_its_length():
    """Differs: 120 of 127 tokens, not 96, since groups have one block size; and 32 of 40, or 40 with a token more."""
    manager = grouped([FULL, sliding(24)], block_size=8)
    cached(manager, range(127))
    cached(manager, range(1000, 1040))
    assert [hit(manager, range(127)), hit(manager, range(1000, 1040)), hit(manager, range(1000, 1041))] == [120, 32, 40]


def test_V50_V53_under_pressure_windows_before_branches_and_ends_stay_longest():
    """Two prompts share 6 blocks of 16; the window pool has 8 of 17 blocks left: what the shared part, the longer
    prompt again and what follows it need, and one more.
    """
    manager = grouped([FULL, sliding(48)], block_size=16, num_blocks=[64, 24])
    cached(manager, range(256))
    cached(manager, [*range(96), 7])
    manager.free(manager.add_sequence([9] * 16 * 16))
    assert boundaries(manager, range(256), 16) == [4, 5, 14, 15]


@pytest.mark.parametrize("num_blocks", [45, 77])
def test_V59_a_prompt_computed_in_chunks_needs_its_whole_past_and_one_chunk_more_than_its_window(num_blocks):
    """512 tokens in chunks of 128 over full attention and a window of 64: 32 and 13 blocks of 16 tokens."""
    settings = {"block_size": 16, "shared_pool": True, "max_chunk_tokens": 128}
    manager = grouped([FULL, sliding(64)], num_blocks=num_blocks, **settings)
    _, chunks = prefill(manager, range(512))
    assert chunks == [128] * 4
    assert manager.stats().num_held_blocks == 32 + 4
    with pytest.raises(NeverFits, match="needs 45 blocks"):
        grouped([FULL, sliding(64)], num_blocks=44, **settings).add_sequence(range(512))
    with pytest.raises(NeverFits, match="needs 29 blocks"):
        grouped([FULL, sliding(64)], num_blocks=4, **settings).add_sequence(range(256))


def prefill(manager, tokens, at_most=None):
    """Admit and compute a prompt in the chunks that the manager asks for, of no more than so many tokens."""
    sequence = manager.add_sequence(tokens)
    chunks = []
    while left := sequence.num_tokens - sequence.num_computed_tokens:
        chunks.append(manager.chunk_limit(sequence, min(left, at_most or left)))
        manager.commit([sequence], sequence.num_computed_tokens + chunks[-1])
    return sequence, chunks


# -- recurrent states -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("checkpoint_tokens", "at_most", "kept"),
    [
        (None, 16, [*range(16)]),
        (16, None, [*range(16)]),
        (64, None, [3, 7, 11, 14, 15]),
        (1024, None, [14]),
    ],
)
def test_V52_states_are_kept_at_multiples_and_before_the_end_of_the_prompt(checkpoint_tokens, at_most, kept):
    manager = grouped([FULL, state(checkpoint_tokens)], block_size=16)
    sequence, _ = prefill(manager, range(256), at_most)
    assert boundaries(manager, range(256), 16) == kept
    assert len(moves(manager)) == len(kept)
    manager.free(sequence)
    assert boundaries(manager, range(256), 16) == sorted({*kept, 15})  # the last one takes no copy


@pytest.mark.parametrize("num_shared", [96, 100])
@pytest.mark.parametrize(("checkpoint_tokens", "kept"), [(1024, [5, 14]), (64, [3, 5, 7, 11, 14, 15])])
def test_V52_states_are_kept_where_another_prompt_has_left_the_same_path(num_shared, checkpoint_tokens, kept):
    manager = grouped([FULL, state(checkpoint_tokens)], block_size=16)
    manager.free(prefill(manager, [*range(num_shared), *[9] * 100])[0])
    prefill(manager, range(256))
    assert boundaries(manager, range(256), 16) == kept


def test_V54_B101_a_prompt_that_shares_two_blocks_computes_them_again_and_stops_there():
    manager = grouped([FULL, state()], block_size=16)
    cached(manager, range(48))
    prompt = [*range(32), *[9] * 31]
    sequence = manager.add_sequence(prompt)
    assert (sequence.num_cached_tokens, sequence.num_shared_tokens, sequence.miss) == (0, 32, "window")
    assert manager.chunk_limit(sequence, 48) == 32
    manager.commit([sequence], 32)
    assert hit(manager, [*range(32), *[8] * 31]) == 32


def test_V56_a_follower_goes_on_from_a_copy_of_the_state_after_six_tokens():
    """Theirs ends the hit inside a block of the state; with blocks of 2 tokens for all it ends between blocks."""
    manager = grouped([FULL, state()], block_size=2)
    first = computed(manager, range(6))
    [(working, kept, _)] = moves(manager)
    manager.free(first)
    before = manager.stats().groups
    follower = manager.add_sequence(range(8))
    assert follower.num_cached_tokens == 6
    [_, [own]] = tables(manager, follower)
    assert moves(manager) == [(kept, own, 2)]
    assert own != kept
    assert working != kept
    after = manager.stats().groups
    assert [group.num_allocated_blocks - before[i].num_allocated_blocks for i, group in enumerate(after)] == [1, 1]


# -- cross attention --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_tokens", "num_blocks"),
    [(500, 32), (1000, 63), (200, 13), (1, 1), (15, 1), (16, 1), (17, 2), (160, 10), (161, 11), (1500, 94), (0, 0)],
)
def test_V74_the_encoders_tokens_take_their_blocks_once_and_are_found_by_nobody(num_tokens, num_blocks):
    manager = grouped([FULL, CROSS], block_size=16, num_blocks=[64, 200])
    sequences = [computed(manager, range(20), encoder_tokens=num_tokens) for _ in range(2)]
    blocks = [tables(manager, sequence)[1] for sequence in sequences]
    assert [len(each) for each in blocks] == [num_blocks, num_blocks]
    assert not set(blocks[0]) & set(blocks[1])
    manager.append(sequences, [[7] * 20] * 2)
    assert tables(manager, sequences[0])[1] == blocks[0]
    for sequence in sequences:
        manager.free(sequence)
    assert manager.stats().groups[1].num_free_blocks == 200
    assert manager.stats().groups[1].num_evictable_blocks == 0


def test_V74_an_encoder_larger_than_its_pool_never_fits():
    manager = grouped([FULL, CROSS], block_size=16, num_blocks=[64, 12])
    with pytest.raises(NeverFits, match="needs 13 blocks"):
        manager.add_sequence([1], encoder_tokens=200)
