import numpy as np
import pytest
from tests.core.small import ids, small

from kvist import KVCacheManager, Move
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
