from dataclasses import dataclass

import numpy as np
import pytest
from tests.core.small import ids, small

from kvist import AttentionSpec, CacheConfig, KVCacheManager, Move
from kvist.config import StateSpec
from kvist.testing import Prefixes, TokenMemory, WrongContents


def watched(by_hand=False, **settings):
    """A small manager and the memory that watches it."""
    config = small(**settings).config
    memory = TokenMemory(config)
    return memory.attach(KVCacheManager(config, None if by_hand else memory)), memory


def written(manager, memory, tokens, **options):
    sequence = manager.add_sequence(tokens, **options)
    memory.write(sequence)
    manager.commit([sequence])
    return sequence


def test_prefixes_differ_in_namespace_position_and_past():
    prefixes = Prefixes()
    of = {
        (namespace, tokens): prefixes.along(namespace, tokens)[-1]
        for namespace in [(), ("a",)]
        for tokens in [(1,), (1, 1), (2, 1), (1, 1, 1)]
    }
    assert len(set(of.values())) == len(of)
    assert prefixes.along((), (2, 1))[-1] == of[(), (2, 1)]
    assert prefixes.describe(of[("a",), (2, 1)]) == "position 1 of [2, 1] in namespace ('a',)"


def test_what_was_written_reads_back():
    manager, memory = watched()
    memory.verify(written(manager, memory, [1, 2, 3]))


def test_what_was_not_written_does_not():
    manager, memory = watched()
    sequence = manager.add_sequence([1, 2, 3])
    manager.commit([sequence])
    with pytest.raises(WrongContents, match="slot 0 of block 0 holds nothing; needed is position 0 of"):
        memory.verify(sequence)


def test_the_same_token_after_another_past_is_other_content():
    manager, memory = watched()
    first = written(manager, memory, [1, 2, 3, 4])
    second = written(manager, memory, [9, 9, 3, 4])
    memory.slots[ids(second)[1]] = memory.slots[ids(first)[1]]
    with pytest.raises(WrongContents, match="slot 0 of block 3"):
        memory.verify(second)


def test_the_same_tokens_in_another_namespace_are_other_content():
    manager, memory = watched()
    first = written(manager, memory, [1, 2])
    second = written(manager, memory, [1, 2], namespace=("other",))
    memory.slots[ids(second)[0]] = memory.slots[ids(first)[0]]
    with pytest.raises(WrongContents, match=r"needed is position 0 of .* in namespace \('other',\)"):
        memory.verify(second)


def test_a_block_that_is_reused_too_early_shows():
    manager, memory = watched()
    first, second = (written(manager, memory, [at, at]) for at in range(2))
    memory.slots[ids(first)[0]] = memory.slots[ids(second)[0]]
    with pytest.raises(WrongContents):
        memory.verify(first)


def test_writing_reads_what_came_before():
    manager, memory = watched()
    sequence = written(manager, memory, [1, 2])
    memory.slots[:] = 0
    manager.append([sequence], np.array([3]))
    with pytest.raises(WrongContents, match="needed is position 0"):
        memory.write(sequence)


def test_a_committed_block_may_not_be_written():
    manager, memory = watched()
    sequence = written(manager, memory, [1, 2, 3])
    manager._state.publish_committed()
    memory.write(sequence, start=2, stop=3)
    with pytest.raises(WrongContents, match="committed and read-only"):
        memory.write(sequence, start=1, stop=3)


def test_a_block_in_the_table_of_another_may_not_be_written():
    manager, memory = watched()
    first, second = manager.add_sequence([1, 2]), manager.add_sequence([1, 2])
    manager._state.rows.block_table[0, second.row, 0] = ids(first)[0]
    with pytest.raises(WrongContents, match=r"which <Sequence row 0.* holds too"):
        memory.write(second)


def test_nonsense_may_be_written_past_what_is_computed_only():
    manager, memory = watched()
    sequence = written(manager, memory, [1, 2, 3])
    manager.reserve([sequence], 4)
    memory.spoil(sequence)
    memory.verify(sequence)
    other = manager.add_sequence([1, 2, 3, 4])
    memory.spoil(other)
    memory.verify(sequence)


def test_copies_are_made_in_order_and_end_where_they_say():
    memory = TokenMemory(small(block_size=4).config)
    memory.slots[0] = [1, 2, 3, 4]
    memory.slots[2] = 9
    memory.perform([Move(0, 1, 3), Move(1, 2, 2)])
    assert memory.slots[1].tolist() == [1, 2, 3, 0]
    assert memory.slots[2].tolist() == [1, 2, 0, 0]
    assert memory.num_copied_tokens == 5


@pytest.mark.parametrize("move", [Move(0, 1, 0), Move(0, 1, 5), Move(1, 1, 2)])
def test_a_copy_of_nothing_or_too_much_or_onto_itself_is_refused(move):
    memory = TokenMemory(small(block_size=4).config)
    with pytest.raises(WrongContents, match=r"is no copy of 1 \.\. 4 tokens"):
        memory.perform([move])


@pytest.mark.parametrize("move", [Move(0, 8, 1), Move(8, 0, 1), Move(-1, 0, 1)])
def test_a_copy_of_or_to_a_block_that_is_not_there_is_refused(move):
    memory = TokenMemory(small(block_size=4).config)
    with pytest.raises(WrongContents, match="names a block that is none of 8"):
        memory.perform([move])


@pytest.mark.parametrize("num_tokens", [1, 3])
def test_a_copy_must_be_of_as_many_tokens_as_count_as_computed(num_tokens):
    manager, memory = watched(by_hand=True, block_size=4)
    manager.free(written(manager, memory, [1, 2, 3, 4]))
    sequence = manager.add_sequence([1, 2, 9])
    [move] = manager.take_moves()
    assert move.num_tokens == sequence.num_cached_tokens == 2
    with pytest.raises(WrongContents, match="counts 2 tokens in it as computed"):
        memory.perform([Move(move.source, move.destination, num_tokens)])
    memory.perform([move])
    memory.verify(sequence)


def test_a_copy_onto_a_committed_block_is_refused():
    manager, memory = watched(block_size=4)
    sequence = written(manager, memory, [1, 2, 3, 4])
    manager._state.publish_committed()
    with pytest.raises(WrongContents, match="committed and read-only"):
        memory.perform([Move(7, ids(sequence)[0], 4)])


def test_a_copy_that_was_lost_shows():
    manager, memory = watched(by_hand=True, block_size=4)
    manager.free(written(manager, memory, [1, 2, 3, 4]))
    sequence = manager.add_sequence([1, 2, 9])
    manager.take_moves()
    with pytest.raises(WrongContents, match="slot 0 of block"):
        memory.verify(sequence)


def test_late_copies_need_not_fit_what_has_changed_since():
    manager, memory = watched(by_hand=True, block_size=4)
    first = written(manager, memory, [1, 2, 3])
    [second] = manager.fork(first)
    manager.rewind(second, 1)
    memory.perform(manager.take_moves(), late=True)
    memory.verify(second)


# -- groups: tables made by hand --------------------------------------------------------------------------------------


@dataclass
class ByHand:
    """A sequence with tables made by hand: one list of block ids for each group, -1 in holes."""

    tables: list[list[int]]
    tokens: np.ndarray
    num_computed_tokens: int = 0
    capacity: int = 16
    num_encoder_tokens: int = 0
    namespace: tuple = ()
    leader: None = None

    @classmethod
    def of(cls, num_tokens, *tables, **settings):
        return cls(list(tables), np.arange(10, 10 + num_tokens), **settings)

    @property
    def num_tokens(self):
        return len(self.tokens)

    def group_blocks(self, group):
        return np.array(self.tables[group], np.int32)


def memory_of(*layers, block_size=2, num_blocks=16, **settings):
    return TokenMemory(CacheConfig(layers, block_size, num_blocks, max_sequence_length=64, **settings))


FULL, WINDOW, SINKS = AttentionSpec(1, 1), AttentionSpec(1, 1, sliding_window=3), AttentionSpec(1, 1, "int8", 5, 3)
CHUNKS, CROSS = AttentionSpec(1, 1, chunk_tokens=4), AttentionSpec(1, 1, cross=True)
STATE = StateSpec([(8,)], "uint8")


def commit(memory, sequence, num_tokens=None, **contents):
    """Compute a sequence up to some of its tokens."""
    stop = sequence.num_tokens if num_tokens is None else num_tokens
    memory.write(sequence, sequence.num_computed_tokens, stop, **contents)
    sequence.num_computed_tokens = stop


def test_the_same_token_is_other_content_in_another_group():
    memory = memory_of(FULL, WINDOW, shared_pool=True)
    sequence = ByHand.of(4, [0, 1], [2, 3])
    commit(memory, sequence)
    memory.verify(sequence)
    sequence.tables[1] = [0, 1]
    with pytest.raises(WrongContents, match=r"slot 0 of block 1 of group 1 holds position 2 .* of group 0; needed is"):
        memory.verify(sequence)


def test_groups_that_share_no_pool_may_have_blocks_of_the_same_ids():
    memory = memory_of(FULL, WINDOW)
    commit(memory, sequence := ByHand.of(4, [0, 1], [0, 1]))
    memory.verify(sequence)


@pytest.mark.parametrize(
    ("layer", "num_tokens", "needed"),
    [
        (FULL, 9, range(9)),
        (WINDOW, 9, [7, 8]),
        (WINDOW, 2, [0, 1]),
        (SINKS, 9, [0, 1, 2, 5, 6, 7, 8]),
        (SINKS, 4, [0, 1, 2, 3]),
        (CHUNKS, 9, [8]),
        (CHUNKS, 7, [4, 5, 6]),
        (CHUNKS, 8, []),
    ],
)
def test_the_next_token_reads_what_is_in_span_and_nothing_else(layer, num_tokens, needed):
    memory = memory_of(layer)
    commit(memory, sequence := ByHand.of(num_tokens, [0, 1, 2, 3, 4]))
    read = []
    for position in range(num_tokens):
        before = memory.slots.copy()
        memory.slots[position // 2, position % 2] = 0
        try:
            memory.verify(sequence)
        except WrongContents:
            read.append(position)
        memory.slots[:] = before
    assert read == list(needed)


def test_a_hole_in_span_shows_and_one_out_of_span_does_not():
    memory = memory_of(SINKS)
    commit(memory, sequence := ByHand.of(12, [0, 1, 2, 3, 4, 5]))
    sequence.tables[0][2:4] = [-1, -1]
    memory.verify(sequence)
    sequence.tables[0][4] = -1
    with pytest.raises(WrongContents, match="no block for position 8 holds nothing"):
        memory.verify(sequence)


def test_a_token_needs_a_block_to_be_written_to():
    memory = memory_of(WINDOW)
    with pytest.raises(WrongContents, match="position 4 has no block in group 0"):
        memory.write(ByHand.of(6, [0, 1, -1]))


def test_a_ring_holds_each_token_at_its_place():
    memory = memory_of(SINKS, ring=True)
    commit(memory, sequence := ByHand.of(5, [7, 8, 9]), 4)
    commit(memory, sequence)
    prefixes = memory.prefixes.along((), range(10, 18))
    assert memory.slots[[7, 8, 9]].tolist() == [[*prefixes[:2]], [prefixes[2], 0], [*prefixes[3:5]]]
    sequence.tokens = np.arange(10, 18)
    commit(memory, sequence)
    assert memory.slots[[7, 8, 9]].tolist() == [[*prefixes[:2]], [prefixes[2], 0], [prefixes[7], prefixes[6]]]
    memory.verify(sequence)
    memory.slots[9, 0] = prefixes[5]
    with pytest.raises(WrongContents, match="slot 0 of block 9 holds position 5 of"):
        memory.verify(sequence)


def test_drafts_overwrite_in_a_ring_only_what_is_not_needed_again():
    memory = memory_of(WINDOW, ring=True)
    commit(memory, sequence := ByHand.of(7, [0, 1]), 5)
    memory.spoil(sequence)
    memory.verify(sequence)
    assert memory.slots[:2].tolist() == [[memory.prefixes.along((), range(10, 14))[3], memory.slots[0, 1]], [0, 0]]


def test_a_state_is_that_after_the_last_computed_token():
    memory = memory_of(FULL, STATE)
    sequence = ByHand.of(5, [0, 1, 2], [4])
    commit(memory, sequence, 3)
    memory.verify(sequence)
    commit(memory, sequence)
    memory.spoil(sequence)
    memory.verify(sequence)
    sequence.num_computed_tokens = 4
    with pytest.raises(WrongContents, match=r"block 4 of group 1 holds position 4 of .*needed is position 3 of"):
        memory.verify(sequence)


def test_a_state_is_copied_whole_and_then_goes_on_by_itself():
    memory = memory_of(FULL, STATE)
    commit(memory, sequence := ByHand.of(4, [0, 1], [4]))
    memory.perform([Move(4, 6, 2, group=1)])
    commit(memory, ByHand.of(6, [0, 1, 2], [4], num_computed_tokens=4))
    memory.verify(ByHand([[0, 1], [6]], sequence.tokens, 4))
    with pytest.raises(WrongContents, match="is of a part of a state"):
        memory.perform([Move(4, 6, 1, group=1)])


def test_a_sequence_of_which_nothing_is_computed_needs_no_state():
    memory = memory_of(STATE)
    memory.group_slots(0)[4] = 99
    memory.verify(sequence := ByHand.of(3, [4]))
    commit(memory, sequence)
    memory.verify(sequence)


def test_single_tokens_change_places():
    memory = memory_of(FULL, block_size=4)
    memory.slots[:2] = [[1, 2, 3, 4], [5, 6, 7, 8]]
    memory.perform(
        [
            Move(0, 0, 1, source_offset=3, destination_offset=1),
            Move(1, 0, 1, source_offset=2, destination_offset=2),
            Move(1, 0, 1, source_offset=3, destination_offset=3),
        ]
    )
    assert memory.slots[:2].tolist() == [[1, 4, 7, 8], [5, 6, 7, 8]]
    with pytest.raises(WrongContents, match="is no copy"):
        memory.perform([Move(1, 0, 2, source_offset=3)])


def test_an_encoders_tokens_are_those_of_what_it_was_given():
    memory = memory_of(FULL, CROSS)
    sequence = ByHand.of(2, [0], [3, 4], num_encoder_tokens=3)
    with pytest.raises(WrongContents, match="slot 0 of block 3 of group 1 holds nothing"):
        memory.write(sequence, encoder="a picture")
    memory.encode(sequence, "a picture")
    commit(memory, sequence, encoder="a picture")
    memory.verify(sequence, encoder="a picture")
    memory.verify(ByHand([[0], [3, 4]], sequence.tokens, 2, num_encoder_tokens=3), encoder="a picture")
    for table in [0], [1]:
        with pytest.raises(WrongContents):
            memory.verify(ByHand([table, [3, 4]], sequence.tokens, 2, num_encoder_tokens=3), encoder="a sound")


def test_a_token_may_be_more_than_its_id():
    memory = memory_of(FULL)
    commit(memory, sequence := ByHand.of(2, [0]), tokens=[10, (11, "cat", 0)])
    memory.verify(sequence, tokens=[10, (11, "cat", 0)])
    with pytest.raises(WrongContents, match=r"holds position 1 of \[10, \(11, 'cat', 0\)\]"):
        memory.verify(sequence)


def test_a_tree_of_drafts_has_what_is_accepted_at_its_nodes():
    manager, memory = watched(block_size=4)
    sequence = written(manager, memory, [1, 2, 3])
    manager.append([sequence], np.array([4]))
    manager.reserve([sequence], 5)
    memory.write_tree(sequence, [0, 2, 5], tokens=[1, 2, 3, 4, 5, 6])
    accepted = memory.prefixes.along((), [1, 2, 3, 4, 5, 6])[3:]
    assert memory.slots[ids(sequence)].ravel()[3:9].tolist() == [accepted[0], 0, accepted[1], 0, 0, accepted[2]]
    manager.accept(sequence, [4, 5, 6], [0, 2, 5])
    memory.verify(sequence)


def test_accepted_drafts_may_come_in_several_calls_where_one_would_write_what_another_has_read():
    manager, memory = watched(block_size=4, num_blocks=3, max_sequence_length=30)
    sequence = written(manager, memory, [0] * 6)
    manager.commit([sequence])
    manager.rewind(sequence, 4)
    manager.reserve([sequence], 9)
    memory.write_tree(sequence, [0, 3, 6, 8], tokens=[0] * 6)
    manager.accept(sequence, [0] * 4, [0, 3, 6, 8])
    memory.verify(sequence)
    assert sequence.num_computed_tokens == 6
