"""What TensorRT-LLM's cyclic cache does, as facts about windows that are written round and round in place.

Facts that do not apply are in `facts.py`, with the reason.
"""

import pytest
from tests.core.layers import grouped, hit, sliding, tables
from tests.core.small import cached, computed, moves

from kvist.core.groups import spans_of


def ring(window, sink_tokens=0, **settings):
    return grouped([sliding(window, sink_tokens)], ring=True, **settings)


def test_TRT18_a_ring_of_575_tokens_never_takes_a_tenth_block():
    manager = ring(575, block_size=64, num_blocks=80, reuse=False)
    [span] = spans_of(manager.config)
    assert span.ring.num_blocks == 9
    sequence = computed(manager, range(575))
    free = [manager.num_free_blocks]
    for _ in range(2):
        manager.append([sequence], [[7]])
        manager.commit([sequence])
        free.append(manager.num_free_blocks)
    manager.free(sequence)
    assert [*free, manager.num_free_blocks] == [71, 71, 71, 80]


def test_TRT24_TRT25_beams_that_wrap_into_a_shared_block_get_one_each():
    manager = ring(515, 4, block_size=64, num_blocks=296, reuse=False, max_beams=4, max_sequence_length=640)
    [span] = spans_of(manager.config)
    assert (span.ring.num_sink_positions + span.ring.num_ring_tokens, span.ring.num_blocks) == (639, 10)
    first = manager.add_sequence(range(579), num_beams=4)
    beams = first.beams
    free = [manager.num_free_blocks]
    manager.commit([first])
    for _ in range(2):
        manager.append(beams, [[7]] * 4)
        manager.commit(beams)
        free.append(manager.num_free_blocks)
    for beam in beams:
        manager.free(beam)
    assert [*free, manager.num_free_blocks] == [283, 280, 280, 296]


@pytest.mark.parametrize(("sink_tokens", "found"), [(2, 0), (4, 4)])
def test_TRT26_unused_positions_after_the_sinks_of_a_ring_end_reuse(sink_tokens, found):
    """Tokens after them lie in other places of their blocks than those of sequences without."""
    manager = ring(12, sink_tokens, num_blocks=8)
    cached(manager, range(7))
    sequence = manager.add_sequence(range(8))
    assert sequence.num_cached_tokens == found
    [table] = tables(manager, sequence)
    bubble = -sink_tokens % 4
    positions = [token if token < sink_tokens else token + bubble for token in range(found, 8)]
    slots = [table[position // 4] * 4 + position % 4 for position in positions]
    assert manager.tables([sequence]).slot_mapping.tolist() == slots


def test_TRT27_the_smaller_of_two_rings_stays_at_its_two_blocks():
    """Nothing that has wrapped is stored; what both rings still held when the smaller one was full is."""
    manager = grouped([sliding(16), sliding(8)] * 2, num_blocks=16, ring=True)
    assert manager.num_blocks == 32
    sequence = computed(manager, range(7))
    assert [len(table) for table in tables(manager, sequence)] == [2, 2]
    for token in (7, 8):
        manager.append([sequence], [[token]])
        manager.commit([sequence])
    assert [len(table) for table in tables(manager, sequence)] == [3, 2]
    assert manager.num_free_blocks == 27
    manager.free(sequence)
    assert manager.num_free_blocks == 32


def test_a_sequence_that_wraps_leaves_shared_blocks_as_they_are():
    """Differs: theirs overwrites them, with what others read; here it goes on in a copy of its own."""
    manager = ring(8, num_blocks=8)
    first = computed(manager, range(8))
    second = manager.add_sequence(range(8))
    shared = tables(manager, first)[0]
    assert tables(manager, second)[0][0] == shared[0]
    manager.append([first], [[8]])
    [own, *_] = tables(manager, first)[0]
    assert own not in shared
    assert moves(manager) == [(shared[0], own, 4)]
    assert manager.tables([first], 1).slot_mapping.tolist() == [own * 4]
    assert tables(manager, second)[0][0] == shared[0]


@pytest.mark.parametrize(("num_tokens", "num_blocks"), [(13, 2), (16, 2), (60, 6)])
def test_a_first_step_takes_no_more_than_the_ring(num_tokens, num_blocks):
    """A window of 46 tokens in blocks of 8."""
    manager = ring(46, block_size=8)
    assert manager.forecast().add(num_tokens).free_blocks == 64 - num_blocks
    manager.add_sequence(range(num_tokens))
    assert manager.num_free_blocks == 64 - num_blocks


def test_a_full_ring_needs_nothing_for_its_next_step_nor_until_the_end():
    manager = ring(46, block_size=8)
    sequence = computed(manager, range(44))
    manager.append([sequence], [[7, 7]])
    assert sequence.num_tokens == 46
    assert manager.blocks_needed_next_step(sequence) == 0
    assert manager.blocks_needed_to_completion(sequence, 20) == 0
    before = manager.num_free_blocks
    manager.append([sequence], [[7] * 18])
    assert manager.num_free_blocks == before


@pytest.mark.parametrize("reuse", [True, False])
def test_a_ring_that_has_the_whole_pool_goes_round_in_it(reuse):
    manager = ring(8, num_blocks=2, reuse=reuse)
    sequence = computed(manager, range(5))
    for token in range(5, 40):
        manager.append([sequence], [[token]])
        manager.commit([sequence])
        manager.check()
    assert (sequence.num_tokens, manager.num_free_blocks) == (40, 0)


@pytest.mark.parametrize(("num_tokens", "num_blocks"), [(13, 5), (16, 2), (54, 6 + 4), (60, 4 * 7)])
def test_beams_of_a_prompt_that_wraps_share_nothing(num_tokens, num_blocks):
    """Differs: 4 beams of a prompt longer than their ring of 7 blocks take 28, not 9 that theirs replaces one by one
    as the beams go on.
    """
    manager = ring(46, block_size=8, max_beams=4)
    first = manager.add_sequence(range(num_tokens), num_beams=4)
    assert 64 - manager.num_free_blocks == num_blocks
    manager.commit([first])
    assert 64 - manager.num_free_blocks == num_blocks


@pytest.mark.parametrize("num_tokens", [9, 12, 20])
def test_a_prompt_longer_than_the_ring_finds_nothing_and_leaves_nothing(num_tokens):
    manager = ring(8, num_blocks=8)
    cached(manager, range(8))
    sequence = computed(manager, range(num_tokens))
    assert (sequence.num_cached_tokens, len(tables(manager, sequence)[0])) == (0, 2)
    before = manager.stats().num_evictable_blocks
    manager.free(sequence)
    assert manager.stats().num_evictable_blocks == before
    assert hit(manager, range(8)) == 4
