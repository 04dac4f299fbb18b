import itertools

import numpy as np
import pytest
from tests.core.small import books, cached, computed, ids, label, refused, small

import kvist
from kvist import (
    ArgumentError,
    ArgumentTypeError,
    AttentionSpec,
    CacheConfig,
    KVCacheManager,
    KvistError,
    Move,
    SequenceError,
    TransferError,
)

# -- evict, drop, reset -----------------------------------------------------------------------------------------------


def test_evict_returns_how_many_blocks_there_were_to_evict():
    manager = small()
    cached(manager, [1, 2, 3, 4, 5])
    assert manager.evict(0) == 0
    assert manager.evict(2) == 2
    assert manager.evict(100) == 1
    assert manager.evict(2**70) == 0
    assert manager.stats().num_evicted_blocks == 3
    assert manager.num_free_blocks == 8


def test_evict_first_publishes_what_is_committed():
    manager = small()
    computed(manager, [1, 2, 3, 4], reuse=False)
    computed(manager, [1, 2, 3, 4], reuse=False)
    assert manager.evict(8) == 0
    assert manager.num_free_blocks == 6
    manager.check()


@pytest.mark.parametrize(
    ("num_blocks", "error"),
    [
        (-1, ArgumentError),
        (1.0, ArgumentTypeError),
        (None, ArgumentTypeError),
        (True, ArgumentTypeError),
        ("1", ArgumentTypeError),
    ],
    ids=label,
)
def test_a_number_of_blocks_that_cannot_be_is_refused(num_blocks, error):
    manager = small()
    cached(manager, [1, 2])
    with refused(manager, error, f"num_blocks is {num_blocks!r}"):
        manager.evict(num_blocks)


def test_drop_forgets_one_namespace_and_no_other():
    manager = small(num_blocks=16)
    for namespace in ((), ("a",), ("a", 1)):
        cached(manager, [1, 2, 3, 4], namespace=namespace)
    assert manager.drop(namespace=("a",)) == 2
    found = [manager.match_prefix([1, 2, 3, 4], namespace=each).num_tokens for each in ((), ("a",), ("a", 1))]
    assert found == [3, 0, 3]
    assert manager.stats().num_evictable_blocks == 4
    manager.check()


def test_dropping_the_unknown_changes_nothing():
    manager = small()
    cached(manager, [1, 2])
    before = books(manager)
    assert manager.drop(namespace=("a",)) == 0
    assert books(manager) == before


def test_what_sequences_and_pins_hold_of_a_dropped_namespace_ends_with_them():
    manager = small()
    sequence = computed(manager, [1, 2, 3, 4])
    pin = manager.pin(manager.match_prefix([1, 2, 9]))
    cached(manager, [1, 2, 5, 6])
    assert manager.drop(namespace=()) == 1
    assert (ids(sequence), manager.num_free_blocks) == ([0, 1], 6)
    assert manager.match_prefix([1, 2, 3]).num_tokens == 0
    manager.check()
    manager.free(sequence)
    assert manager.num_free_blocks == 7
    pin.release()
    assert (manager.num_free_blocks, manager.stats().num_evictable_blocks) == (8, 0)
    manager.check()


def test_partly_filled_blocks_below_what_is_held_are_dropped():
    manager = small()
    cached(manager, [1, 2, 3])
    sequence = manager.add_sequence([1, 2, 9])
    assert manager.drop(namespace=()) == 1
    manager.check()
    manager.free(sequence)
    assert (manager.num_free_blocks, manager.stats().num_evictable_blocks) == (8, 0)
    manager.check()


def test_drop_does_not_take_the_blocks_of_sequences_that_are_not_published():
    manager = small()
    sequence = computed(manager, [1, 2, 3, 4], publish=False)
    manager.fork(sequence)
    assert manager.drop(namespace=()) == 0
    assert sequence.tokens.tolist() == [1, 2, 3, 4]
    manager.check()


def test_drop_can_be_repeated_while_old_and_new_sequences_run():
    manager = small(num_blocks=16)
    sequences = []
    for number in range(3):
        sequences.append(computed(manager, [1, 2, 3, 4]))
        assert sequences[-1].num_cached_tokens == 0
        manager.drop(namespace=())
        manager.check()
        assert sequences[number].tokens.tolist() == [1, 2, 3, 4]
    for sequence in sequences:
        manager.free(sequence)
        manager.check()
    assert manager.num_free_blocks == 16


def test_reset_forgets_content_and_statistics():
    manager = small()
    cached(manager, [1, 2, 3], namespace=("a",))
    cached(manager, [1, 2, 3, 4])
    manager.reset()
    assert manager.digest() == small().digest()
    assert manager.stats() == small().stats()
    assert manager.match_prefix([1, 2, 3]).num_tokens == 0
    assert manager.take_moves() == []
    manager.check()
    assert ids(computed(manager, [1, 2, 3])) == [0, 1]


def test_reset_with_sequences_running_is_refused_and_says_who():
    manager = small()
    sequence = computed(manager, [1, 2, 3])
    with refused(manager, SequenceError, "reset: 1 sequences run (row 0 (3 tokens)) and 0 pins hold"):
        manager.reset()
    manager.free(sequence)
    pin = manager.pin(manager.match_prefix([1, 2, 3]))
    with refused(manager, SequenceError, "reset: 0 sequences run () and 1 pins hold"):
        manager.reset()
    pin.release()
    manager.reset()


def test_reset_names_the_first_few_of_many_sequences():
    manager = small(num_blocks=16, max_sequences=16)
    for _ in range(12):
        manager.add_sequence([1])
    with refused(manager, SequenceError, "reset: 12 sequences run", "row 7 (1 tokens), ...") as caught:
        manager.reset()
    assert "row 8" not in str(caught.value)


def test_a_sequence_of_before_a_reset_stays_ended():
    manager = small()
    old = computed(manager, [1, 2])
    manager.free(old)
    manager.reset()
    manager.add_sequence([3])
    with refused(manager, SequenceError, "has been freed"):
        manager.free(old)


# -- free -------------------------------------------------------------------------------------------------------------


def test_a_sequence_is_freed_once():
    manager = small()
    sequence, other = computed(manager, [1, 2]), computed(manager, [1, 2, 3])
    manager.free(sequence)
    manager.add_sequence([7])
    with refused(manager, SequenceError, "free: the sequence has been freed"):
        manager.free(sequence)
    assert other.is_live


def test_all_blocks_come_back_whatever_was_committed():
    for num_computed, length, reserve in itertools.product(range(6), range(1, 6), (0, 5)):
        manager = small()
        sequence = manager.add_sequence(list(range(length)))
        manager.commit([sequence], min(num_computed, length))
        manager.reserve([sequence], reserve)
        manager.free(sequence)
        manager.check()
        assert manager.num_free_blocks == 8
        assert manager.evict(8) == -(-min(num_computed, length) // 2)


# -- numbers ----------------------------------------------------------------------------------------------------------


def test_free_blocks_are_never_used_given_back_or_cached_and_unreferenced():
    manager = small()
    assert (manager.num_blocks, manager.num_free_blocks) == (8, 8)
    cached(manager, [1, 2, 3])
    assert manager.num_free_blocks == 8
    sequence = computed(manager, [1, 2, 3, 4, 5])
    assert manager.num_free_blocks == 5
    manager.free(sequence)
    assert manager.num_free_blocks == 8


def test_as_many_blocks_can_be_taken_as_are_said_to_be_free():
    manager = small()
    cached(manager, [1, 2, 3])
    cached(manager, [1, 2, 5, 6])
    computed(manager, [1, 2, 3])
    computed(manager, [1, 2, 3], reuse=False)
    free = manager.num_free_blocks
    sequence = manager.add_sequence([9])
    manager.reserve([sequence], 2 * free - 1)
    assert manager.num_free_blocks == 0
    manager.check()


def test_stats_count_what_happened():
    manager = small()
    cached(manager, [1, 2, 3, 4])
    sequence = computed(manager, [1, 2, 3, 4, 5])
    manager.append([sequence], [[6, 7]])
    with manager.pin(manager.match_prefix([1, 2, 3])):
        stats = manager.stats()
    assert (stats.num_blocks, stats.num_free_blocks, stats.num_evictable_blocks, stats.num_held_blocks) == (8, 4, 0, 4)
    assert (stats.num_sequences, stats.num_pins, stats.num_extents) == (1, 1, 2)
    assert (stats.num_admitted, stats.num_query_tokens, stats.num_hit_tokens) == (2, 9, 4)
    assert (stats.num_reused_blocks, stats.num_missed_blocks, stats.num_allocated_blocks) == (2, 3, 4)
    assert (stats.num_shared_blocks, stats.num_evicted_blocks) == (0, 0)
    assert stats.usage == 0.5
    assert stats.token_hit_rate == 4 / 9
    assert stats.block_hit_rate == 2 / 5


def test_rates_of_nothing_are_zero():
    stats = small().stats()
    assert stats.usage == stats.token_hit_rate == stats.block_hit_rate == 0.0


def test_stats_of_beams_count_the_prompt_once_and_all_blocks():
    manager = small()
    manager.add_sequence([1, 2, 3], num_beams=3)
    stats = manager.stats()
    assert (stats.num_admitted, stats.num_query_tokens, stats.num_sequences) == (1, 3, 3)
    assert (stats.num_missed_blocks, stats.num_allocated_blocks, stats.num_held_blocks) == (4, 4, 4)


def test_stats_cannot_be_changed():
    with pytest.raises(AttributeError):
        small().stats().num_blocks = 1


# -- explain ----------------------------------------------------------------------------------------------------------


def test_a_sequence_is_explained_by_its_extents_and_what_is_its_own():
    manager = small()
    cached(manager, [1, 2, 3, 4])
    computed(manager, [1, 2, 9])
    sequence = manager.add_sequence([1, 2, 3, 4, 5, 6, 7])
    manager.commit([sequence], 5)
    explanation = manager.explain(sequence)
    assert "7 tokens, 5 computed, 4 blocks" in explanation.subject
    assert "4 of its prompt's tokens came from the cache" in explanation.subject
    states = [(part.start, part.num_tokens, part.num_blocks, part.num_holders) for part in explanation.parts]
    assert states == [(0, 2, 1, 2), (2, 2, 1, 1), (4, 3, 2, 1)]
    assert str(explanation).splitlines()[1].strip().startswith("tokens 0 .. 1: 1 block, committed, for all to share")
    assert explanation.parts[-1].state == "its own, 1 tokens computed"
    assert explanation.reason == ""


def test_unlisted_blocks_are_explained_as_such():
    manager = small()
    sequence = computed(manager, [1, 2, 3], publish=False)
    manager.fork(sequence)
    parts = manager.explain(sequence).parts
    assert parts[0].state == "committed, for its holders only"
    assert parts[0].num_holders == 2


def test_a_waiting_beam_can_be_explained():
    manager = small()
    leader = manager.add_sequence([1, 2, 3], num_beams=2)
    assert "3 tokens, 0 computed, 2 blocks" in str(manager.explain(leader.beams[1]))


def test_an_ended_sequence_cannot_be_explained():
    manager = small()
    sequence = computed(manager, [1, 2])
    manager.free(sequence)
    with refused(manager, SequenceError, "explain: the sequence has been freed"):
        manager.explain(sequence)
    with refused(manager, SequenceError, "explain: the sequence belongs to another manager"):
        manager.explain(small().add_sequence([1]))


def reason(manager, tokens, **options):
    return manager.explain(tokens, **options).reason


def test_a_prompt_is_explained_by_what_is_cached_of_it():
    manager = small()
    cached(manager, [1, 2, 3, 4, 5, 6])
    computed(manager, [1, 2, 9])
    explanation = manager.explain([1, 2, 3, 4, 5, 9])
    assert explanation.subject == "prompt of 6 tokens in namespace (): 5 cached"
    parts = [(part.start, part.num_tokens, part.state) for part in explanation.parts]
    assert parts == [(0, 2, "in use"), (2, 2, "evictable"), (4, 1, "in a block that agrees in part, to be copied")]


def test_why_no_more_is_cached():
    manager = small(num_blocks=16)
    cached(manager, [1, 2, 3, 4])
    cached(manager, [5, 6, 7, 8], namespace=("a",))
    manager.add_sequence([1, 2, 3, 4, 7, 8, 9, 9])
    assert "the last token" in reason(manager, [1, 2, 3])
    assert reason(manager, [1, 2, 3, 4, 7, 8, 9]).startswith("uncommitted: row 0 has more of it, but only 4")
    assert reason(manager, [5, 6, 7, 8, 9]).startswith("cold")
    assert reason(manager, [1, 2, 3, 4, 5, 6]).startswith("under a block")
    assert reason(manager, [11, 12, 13, 14]).startswith("cold")
    assert reason(manager, [11, 12, 13, 14], namespace=("b",)).startswith("cold")


# -- digest and check -------------------------------------------------------------------------------------------------


def worked(manager):
    """A manager that was given some of every call."""
    cached(manager, [1, 2, 3, 4, 5], namespace=("a",))
    first = computed(manager, [1, 2, 3, 4, 5, 6])
    second = manager.add_sequence([1, 2, 3, 4, 7, 8, 9], num_beams=2)
    manager.append([first], [7])
    manager.commit([first, second], [6, 5])
    manager.rewind(first, 2)
    manager.pin(manager.match_prefix([1, 2, 0]))
    (third,) = manager.fork(first)
    manager.reorder([first, third], [1, 0])
    manager.evict(1)
    return manager


def test_equal_calls_give_equal_digests():
    assert worked(small(num_blocks=16)).digest() == worked(small(num_blocks=16)).digest()
    assert len(small().digest()) == 64


def test_a_digest_can_be_taken_of_pins_in_namespaces_of_any_types():
    manager = small(num_blocks=16)
    for namespace in (("a",), (1,), (b"a",), ()):
        manager.pin(manager.match_prefix([1, 2], namespace=namespace))
    assert manager.digest() == manager.digest()


CHANGES = {
    "append": lambda manager, one: manager.append([one], [9]),
    "reserve": lambda manager, one: manager.reserve([one], 5),
    "commit": lambda manager, one: manager.commit([one], 3),
    "rewind": lambda manager, one: manager.rewind(one, 1),
    "fork": lambda manager, one: manager.fork(one),
    "free": lambda manager, one: manager.free(one),
    "add": lambda manager, one: manager.add_sequence([9]),
    "add in a namespace": lambda manager, one: manager.add_sequence([9], namespace=("b",)),
    "pin": lambda manager, one: manager.pin(manager.match_prefix([7, 8, 0])),
    "evict": lambda manager, one: manager.evict(1),
    "drop": lambda manager, one: manager.drop(namespace=()),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_every_change_changes_the_digest(change):
    manager = small()
    cached(manager, [7, 8])
    sequence = manager.add_sequence([1, 2, 3])
    manager.commit([sequence], 2)
    before = manager.digest()
    change(manager, sequence)
    assert manager.digest() != before
    manager.check()


@pytest.mark.parametrize(
    "settings", [{"block_size": 4}, {"num_blocks": 9}, {"max_sequences": 9}, {"max_sequence_length": 65}], ids=label
)
def test_other_geometries_have_other_digests(settings):
    assert small(**settings).digest() != small().digest()


def test_namespaces_that_look_alike_have_different_digests():
    digests = set()
    for namespace in ((1,), ("1",), (b"1",), ("", "1"), ("1", ""), ("'1'",)):
        manager = small()
        cached(manager, [1, 2], namespace=namespace)
        digests.add(manager.digest())
    assert len(digests) == 6


def test_what_decides_later_is_part_of_the_digest():
    digests = set()
    for publish in (True, False):
        manager = small()
        manager.add_sequence([1, 2, 3], publish=publish)
        digests.add(manager.digest())
    manager = small()
    cached(manager, [1, 2])
    (extent,) = manager._state.tree.extents()
    digests.add(manager.digest())
    extent.hits += 1
    digests.add(manager.digest())
    extent.last_use += 1
    digests.add(manager.digest())
    assert len(digests) == 5


def test_check_passes_in_between_and_changes_nothing():
    manager = worked(small(num_blocks=16))
    before = books(manager)
    manager.check()
    assert books(manager) == before


# -- moves and memory -------------------------------------------------------------------------------------------------


def test_moves_are_taken_once_and_in_the_order_they_were_decided():
    manager = small()
    parent = computed(manager, [1, 2, 3])
    first, second = manager.fork(parent, 2)
    manager.rewind(parent, 0)
    assert manager.take_moves() == [Move(1, ids(first)[1], 1), Move(1, ids(second)[1], 1)]
    assert manager.take_moves() == []


class Recorder:
    def __init__(self):
        self.moves = []

    def perform(self, moves):
        self.moves.append(moves)


def test_with_a_memory_moves_are_made_before_the_call_returns():
    config = small().config
    memory = Recorder()
    manager = KVCacheManager(config, memory=memory)
    sequence = computed(manager, [1, 2, 3])
    assert memory.moves == []
    manager.fork(sequence)
    assert memory.moves == [[Move(1, 2, 1)]]
    assert manager.take_moves() == []
    manager._state.publish_committed()
    manager.rewind(sequence, 2)
    assert memory.moves[1:] == [[Move(0, ids(sequence)[0], 1)]]
    cached(manager, [5, 6, 7, 8])
    manager.add_sequence([5, 6, 7, 9])
    assert len(memory.moves) == 3


def test_a_manager_is_made_of_a_config_only():
    for wrong in (None, {}, 3):
        with pytest.raises((KvistError, TypeError), match="CacheConfig"):
            KVCacheManager(wrong)


# -- names ------------------------------------------------------------------------------------------------------------


def test_every_public_name_is_there_and_every_error_is_of_one_family():
    for name in kvist.__all__:
        assert hasattr(kvist, name)
    errors = [getattr(kvist, name) for name in kvist.__all__ if name.endswith(("Error", "OutOfBlocks", "NeverFits"))]
    assert all(issubclass(error, KvistError) for error in errors)


@pytest.mark.parametrize(
    ("error", "builtin"),
    [
        (kvist.ArgumentError, ValueError),
        (kvist.ArgumentTypeError, TypeError),
        (kvist.ConfigError, ValueError),
        (kvist.InvariantError, AssertionError),
        (kvist.LayoutError, ValueError),
        (kvist.NeverFits, ValueError),
        (kvist.OutOfBlocks, RuntimeError),
        (kvist.OutOfRows, kvist.OutOfBlocks),
        (kvist.SequenceError, ValueError),
        (kvist.StaleMatch, ValueError),
        (TransferError, OSError),
        (kvist.WireError, ValueError),
    ],
)
def test_errors_are_of_the_fitting_builtin_kind(error, builtin):
    assert issubclass(error, builtin)
    assert issubclass(error, KvistError)


def test_row_arrays_are_as_long_as_there_may_be_sequences():
    manager = small(max_sequences=5)
    for array in (manager.num_tokens, manager.num_computed_tokens, manager.row_version):
        assert array.shape == (5,)
        assert array.dtype == np.int64


class FailingMemory:
    """A memory that can be told to fail."""

    def __init__(self):
        self.fails = True
        self.made = []

    def perform(self, moves):
        if self.fails:
            raise OSError("no such device")
        self.made += moves


def manager_with(memory):
    config = CacheConfig([AttentionSpec(1, 1)], 2, 8, max_sequences=8, max_sequence_length=64)
    return KVCacheManager(config, memory=memory)


def test_a_prompt_whose_copy_cannot_be_made_is_not_admitted():
    manager = manager_with(FailingMemory())
    cached(manager, [1, 2, 3, 4])
    with pytest.raises(TransferError, match="could not make 1 copies: OSError"):
        manager.add_sequence([1, 2, 3, 9], num_beams=2)
    assert (manager.stats().num_sequences, manager.num_free_blocks) == (0, 8)
    assert manager.take_moves() == []
    manager.check()
    manager.reset()


def test_a_fork_whose_copy_cannot_be_made_does_not_come_about():
    manager = manager_with(FailingMemory())
    sequence = computed(manager, [1, 2, 3])
    with pytest.raises(TransferError):
        manager.fork(sequence, 2)
    assert (manager.stats().num_sequences, manager.num_free_blocks) == (1, 6)
    manager.check()


def test_the_copy_of_a_rewind_that_failed_is_made_with_the_next():
    memory = FailingMemory()
    manager = manager_with(memory)
    sequence = computed(manager, [1, 2, 3, 4])
    assert manager.num_free_blocks == 6
    other = manager.add_sequence([1, 2, 3, 4, 5])
    with pytest.raises(TransferError):
        manager.rewind(sequence, 1)
    assert sequence.tokens.tolist() == [1, 2, 3]
    with pytest.raises(TransferError):
        manager.add_sequence([1, 2, 3, 4, 8])
    memory.fails = False
    manager.commit([other])
    assert [(move.source, move.num_tokens) for move in memory.made] == [(1, 1)]
    manager.check()


@pytest.mark.parametrize(("options", "says"), [({"memory": 3}, "perform"), ({"clock": 3}, "clock is a int")])
def test_what_cannot_be_a_memory_or_a_clock_is_refused_at_once(options, says):
    with pytest.raises(ArgumentTypeError, match=says):
        KVCacheManager(CacheConfig([AttentionSpec(1, 1)], 2, 8), **options)
