"""Rings: bounded lists of blocks that are written in place, in which nobody's content but one's own is overwritten."""

import contextlib

import numpy as np
import pytest
from tests.core.layers import FULL, chunked, grouped, hit, sliding, tables
from tests.core.small import cached, computed, refused

from kvist import ConfigError, OutOfBlocks, SequenceError
from kvist.core.groups import RingGeometry


def ring(window, sink_tokens=0, block_size=2, **settings):
    settings = {"num_blocks": 16, "partial_reuse": True} | settings
    return grouped([sliding(window, sink_tokens)], block_size=block_size, ring=True, **settings)


class Contents:
    """What lies in every position of the rings of some sequences, written as forward passes would."""

    def __init__(self, manager):
        self.manager, self.at = manager, {}
        self.ring = manager._state.spans[0].ring

    def compute(self, sequence, stop=None):
        """Write what is not computed, from the first to `stop`, and commit it."""
        self.read(sequence)
        stop = sequence.num_tokens if stop is None else stop
        for token in range(sequence.num_computed_tokens, stop):
            self.at[self._place(sequence, token)] = tuple(sequence.tokens[: token + 1].tolist())
        self.manager.commit([sequence], stop)

    def read(self, sequence):
        """Check that all that the next token sees is there."""
        for move in self.manager.take_moves():
            for n in range(move.num_tokens):
                source = (move.source, move.source_offset + n)
                self.at[move.destination, move.destination_offset + n] = self.at.get(source)
        num_computed, window = sequence.num_computed_tokens, self.ring.window - self.ring.sink_tokens
        for token in range(num_computed):
            if token < self.ring.sink_tokens or token > num_computed - window:
                assert self.at.get(self._place(sequence, token)) == tuple(sequence.tokens[: token + 1].tolist())

    def _place(self, sequence, token):
        column, offset = divmod(self.ring.position(token), self.manager.config.block_size)
        return int(sequence.group_blocks(0)[column]), offset


SHAPES = [(1, 0, 1), (2, 0, 1), (3, 0, 2), (4, 0, 2), (5, 2, 2), (5, 1, 4), (7, 4, 4), (8, 0, 4)]


# -- geometry ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("has_extra_block", [False, True])
@pytest.mark.parametrize(("window", "sink_tokens", "block_size"), SHAPES)
def test_tokens_in_the_window_and_sinks_never_share_a_position(window, sink_tokens, block_size, has_extra_block):
    ring = RingGeometry(block_size, window, sink_tokens, has_extra_block)
    for num_tokens in range(1, 40):
        seen = {
            token for token in range(num_tokens) if token < sink_tokens or token >= num_tokens - window + sink_tokens
        }
        positions = {ring.position(token) for token in seen}
        assert len(positions) == len(seen)
        assert max(positions) < ring.num_blocks_for(num_tokens) * block_size <= ring.num_blocks * block_size


@pytest.mark.parametrize(("window", "sink_tokens", "block_size"), SHAPES)
def test_positions_of_many_tokens_are_those_of_each(window, sink_tokens, block_size):
    ring = RingGeometry(block_size, window, sink_tokens, has_extra_block=False)
    tokens = np.arange(50)
    assert ring.positions(tokens).tolist() == [ring.position(int(token)) for token in tokens]


def test_sinks_that_fill_the_window_leave_nothing_to_write():
    with pytest.raises(ConfigError, match="leaves nothing to write"):
        ring(4, 4)


# -- going round ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_beams", [1, 2])
@pytest.mark.parametrize("step", [1, 2, 3, 5])
@pytest.mark.parametrize(("window", "sink_tokens", "block_size"), SHAPES)
def test_a_sequence_goes_round_and_reads_its_window(window, sink_tokens, block_size, step, max_beams):
    manager = ring(window, sink_tokens, block_size, max_beams=max_beams)
    contents = Contents(manager)
    sequence = manager.add_sequence([7])
    contents.compute(sequence)
    for token in range(0, 40, step):
        manager.append([sequence], [list(range(token, token + step))])
        for stop in range(sequence.num_computed_tokens + 1, sequence.num_tokens + 1):
            contents.compute(sequence, stop)
        contents.read(sequence)
        manager.check()
    assert len(sequence.group_blocks(0)) <= contents.ring.num_blocks
    manager.free(sequence)
    assert manager.num_free_blocks == 16


@pytest.mark.parametrize("max_beams", [1, 2])
@pytest.mark.parametrize(("window", "sink_tokens", "block_size"), SHAPES)
def test_sequences_that_share_a_prompt_wrap_without_harm_to_each_other(window, sink_tokens, block_size, max_beams):
    manager = ring(window, sink_tokens, block_size, max_beams=max_beams, num_blocks=48)
    contents = Contents(manager)
    prompt = list(range(window))
    first = manager.add_sequence(prompt)
    contents.compute(first)
    manager.stats()
    others = [manager.add_sequence([*prompt[:-1], 50]), *manager.fork(first)]
    for token in range(12):
        for sequence in (first, *others):
            manager.append([sequence], [60 + token])
            contents.compute(sequence)
            manager.check()
    for sequence in (first, *others):
        contents.read(sequence)
        manager.free(sequence)
    again = manager.add_sequence([*prompt, 99][:window])
    contents.read(again)


def test_several_tokens_at_once_keep_what_the_first_of_them_sees():
    manager = ring(2, max_beams=2)
    contents = Contents(manager)
    sequence = manager.add_sequence([1, 2, 3, 4])
    contents.compute(sequence)
    manager.stats()
    manager.append([sequence], [[5, 6, 7]])
    contents.read(sequence)
    contents.compute(sequence, 5)
    contents.compute(sequence)


def test_what_was_committed_before_the_ring_was_full_can_be_found():
    manager = ring(8)
    contents = Contents(manager)
    sequence = manager.add_sequence(range(8))
    contents.compute(sequence)
    manager.stats()
    for token in range(8, 20):
        manager.append([sequence], [token])
        contents.compute(sequence)
    manager.free(sequence)
    assert hit(manager, range(8)) == 7
    contents.read(manager.add_sequence(range(8)))


def test_a_sequence_that_has_wrapped_leaves_nothing():
    manager = ring(4)
    cached(manager, range(12))
    assert hit(manager, range(5)) == 0
    assert manager.stats().num_evictable_blocks == 0


# -- branches ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_tokens", [3, 4, 6, 9])
@pytest.mark.parametrize("max_beams", [1, 3])
def test_beams_and_forks_of_any_length_read_their_own_rings(num_tokens, max_beams):
    manager = ring(4, block_size=2, max_beams=max_beams, num_blocks=32)
    contents = Contents(manager)
    leader = manager.add_sequence(range(num_tokens), num_beams=3)
    contents.compute(leader)
    family = [*leader.beams, *manager.fork(leader)]
    for token in range(7):
        manager.append(family, [10 * n + token for n in range(4)])
        for sequence in family:
            contents.compute(sequence)
        manager.reorder(family, [token % 4, 1, 2, 3])
        for sequence in family:
            contents.read(sequence)
        manager.check()


@pytest.mark.parametrize("block_size", [1, 2, 4])
@pytest.mark.parametrize("one_by_one", [False, True])
def test_a_leader_does_not_go_past_a_prompt_that_beams_are_to_copy(block_size, one_by_one):
    manager = ring(4, block_size=block_size, num_blocks=32)
    contents = Contents(manager)
    leader = manager.add_sequence([1, 2, 3, 4, 5], num_beams=2)
    for token in (6, 7, 8):
        with contextlib.suppress(SequenceError):
            manager.append([leader], [token] if one_by_one else [[token]])
    contents.compute(leader)
    assert leader.beams[1].num_computed_tokens == 5
    contents.read(leader.beams[1])


def test_a_beam_that_takes_its_leaders_place_wraps_as_its_leader_would_have():
    manager = ring(3, block_size=4, max_beams=2)
    leader = manager.add_sequence([1, 2, 3, 4, 5, 6, 7], num_beams=2)
    heir = leader.beams[1]
    manager.free(leader)
    contents = Contents(manager)
    for token in (8, 9, 10):
        manager.append([heir], [token])
        contents.compute(heir)
        manager.check()
    manager.free(heir)
    assert hit(manager, [1, 2, 3, 4, 5, 6, 7, 9]) <= 4


# -- stepping back ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_beams", [1, 2])
@pytest.mark.parametrize(("window", "sink_tokens", "block_size"), SHAPES)
@pytest.mark.parametrize("num_back", [1, 2, 3])
def test_after_steps_back_all_that_is_said_to_be_computed_can_be_read(
    window, sink_tokens, block_size, num_back, max_beams
):
    manager = ring(window, sink_tokens, block_size, max_beams=max_beams)
    contents = Contents(manager)
    sequence = manager.add_sequence(range(3))
    contents.compute(sequence)
    for token in range(12):
        manager.append([sequence], [[30 + token, 40 + token]])
        contents.compute(sequence, sequence.num_tokens - token % 2)
        for _ in range(2):
            manager.rewind(sequence, min(num_back, sequence.num_tokens - 1))
            contents.read(sequence)
            manager.check()
        manager.append([sequence], [[50 + token] * (num_back + 1)])
        contents.compute(sequence)


def test_drafts_that_were_written_and_taken_back_have_overwritten_what_lay_there():
    manager = ring(2, block_size=1, reuse=False)
    sequence = computed(manager, [1, 2])
    manager.append([sequence], [3])
    manager.rewind(sequence, 2)
    assert (sequence.num_tokens, sequence.num_computed_tokens) == (1, 0)


def test_a_step_back_with_unused_positions_after_the_sinks():
    manager = ring(13, 2, block_size=4)
    contents = Contents(manager)
    sequence = manager.add_sequence(range(9))
    contents.compute(sequence)
    manager.stats()
    (fork,) = manager.fork(sequence)
    for num_back in (2, 1, 3):
        manager.rewind(sequence, num_back)
        contents.read(sequence)
        contents.read(fork)
        manager.check()


@pytest.mark.parametrize("sink_tokens", [0, 2])
def test_nodes_of_a_tree_move_to_their_places_or_are_refused_where_they_overwrote(sink_tokens):
    manager = ring(8, sink_tokens, block_size=4)
    sequence = computed(manager, [1, 2, 3])
    manager.reserve([sequence], 4)
    manager.accept(sequence, [50, 51], [1, 3])
    ring_of = manager._state.spans[0].ring
    moved = [
        (move.source * 4 + move.source_offset, move.destination * 4 + move.destination_offset)
        for move in manager.take_moves()
    ]
    slots = [block * 4 + offset for block in sequence.group_blocks(0).tolist() for offset in range(4)]
    expected = [(slots[ring_of.position(3 + node)], slots[ring_of.position(3 + at)]) for at, node in enumerate([1, 3])]
    assert moved == expected
    manager.reserve([sequence], 6)
    with refused(manager, SequenceError, "overwritten"):
        manager.accept(sequence, [60], [4])


# -- room -------------------------------------------------------------------------------------------------------------


def test_a_ring_in_a_pool_of_its_own_size_goes_round():
    manager = ring(4, block_size=2, num_blocks=2)
    contents = Contents(manager)
    sequence = manager.add_sequence([1, 2, 3])
    contents.compute(sequence)
    for token in range(12):
        manager.append([sequence], [token])
        contents.compute(sequence)
        manager.check()


def test_without_room_for_a_block_of_its_own_nothing_changes():
    manager = ring(4, block_size=2, num_blocks=4)
    first = computed(manager, range(4))
    manager.stats()
    second = manager.add_sequence([0, 1, 2, 9])
    manager.commit([second])
    manager.stats()
    with refused(manager, OutOfBlocks):
        manager.append([first, second], [[50, 51, 52, 53], [60, 61, 62, 63]])
    manager.free(second)
    manager.append([first], [[50, 51]])
    manager.check()


def test_a_question_does_not_raise_where_a_leader_must_wait():
    manager = ring(3, block_size=1)
    leader = manager.add_sequence([1, 2, 3], num_beams=2)
    assert manager.blocks_needed_next_step(leader) >= 0
    assert manager.blocks_needed_to_completion(leader, 5) >= 0


def test_rings_beside_full_attention_stay_bounded():
    manager = grouped([FULL, sliding(4)], block_size=2, num_blocks=32, ring=True)
    sequence = computed(manager, range(3))
    for token in range(20):
        manager.append([sequence], [token])
        manager.commit([sequence])
    full, rings = tables(manager, sequence)
    assert (len(full), len(rings)) == (12, 2)
    manager.check()


def test_a_wrapped_prompt_may_be_taken_back_step_by_step_before_anything_is_computed():
    manager = ring(1, block_size=4, num_blocks=3, max_beams=3)
    sequence = manager.add_sequence([0] * 6)
    for left in (4, 0):
        manager.rewind(sequence, sequence.num_tokens - left)
        manager.check()
    manager.append([sequence], [[1, 2, 3, 4, 5, 6]])
    manager.check()
    manager.free(sequence)
    assert manager.num_free_blocks == manager.num_blocks


def test_a_fork_of_a_sequence_that_was_taken_back_whole_has_no_blocks():
    manager = ring(18, 5, block_size=4, max_beams=3, reuse=False)
    sequence = computed(manager, range(6))
    manager.rewind(sequence, 6)
    (fork,) = manager.fork(sequence)
    assert (sequence.num_blocks, fork.num_blocks) == (0, 0)
    manager.check()


def test_the_heir_of_a_leader_does_not_overwrite_what_beams_wait_for_either():
    manager = ring(2, 1, block_size=4, num_blocks=12, max_beams=3)
    leader = manager.add_sequence(range(7), num_beams=3)
    heir = leader.beams[1]
    manager.free(leader)
    with pytest.raises(SequenceError, match="1 beams wait for the prompt"):
        manager.append([heir], [9])
    manager.commit([heir])
    manager.append([heir], [9])
    manager.check()


def test_to_reserve_nothing_for_a_sequence_without_tokens_gives_it_nothing():
    manager = ring(3, 1, block_size=2)
    sequence = computed(manager, [1])
    manager.rewind(sequence, 1)
    manager.reserve([sequence], 0)
    assert sequence.num_blocks == 0
    manager.check()


def test_reserve_refuses_what_beams_wait_for_before_it_looks_for_room():
    manager = grouped([sliding(3), chunked(4)], block_size=2, num_blocks=6, ring=True, max_beams=2, max_chunk_tokens=2)
    leader = manager.add_sequence([1, 2, 3], num_beams=2)
    with pytest.raises(SequenceError, match="beams wait"):
        manager.reserve([leader], 9)
