"""Sequences that give up their row and blocks, and go on later from what the cache still has."""

import pytest
from tests.core.layers import FULL, grouped, sliding, state, tables
from tests.core.small import computed, group_moves, ids, refused, small

from kvist import NeverFits, OutOfBlocks, OutOfRows, Retention, SequenceError

# -- suspending -------------------------------------------------------------------------------------------------------


def test_a_suspended_sequence_has_no_row_and_no_blocks_and_its_content_stays():
    manager = small()
    sequence = computed(manager, [1, 2, 3, 4, 5])
    manager.suspend(sequence)
    assert (sequence.is_suspended, sequence.is_live, sequence.row) == (True, False, -1)
    assert repr(sequence) == "<Sequence suspended>"
    assert manager.num_free_blocks == 8
    assert manager.match_prefix([1, 2, 3, 4, 5, 9]).num_tokens == 5
    manager.check()


def test_a_resumed_sequence_goes_on_where_it_was():
    manager = small()
    sequence = computed(manager, [1, 2, 3, 4, 5])
    blocks = ids(sequence)
    manager.suspend(sequence)
    assert manager.resume(sequence) == 0
    assert (sequence.tokens.tolist(), sequence.num_computed_tokens) == ([1, 2, 3, 4, 5], 5)
    assert ids(sequence)[:2] == blocks[:2]
    assert not sequence.is_suspended
    manager.append([sequence], [[6, 7]])
    manager.commit([sequence])
    assert manager.match_prefix([1, 2, 3, 4, 5, 6, 9]).num_tokens == 6
    manager.check()


@pytest.mark.parametrize("layers", [[FULL], [FULL, sliding(4)], [FULL, state()]], ids=["full", "window", "state"])
def test_a_sequence_is_resumed_with_more_tokens_or_not_at_all(layers):
    manager = grouped(layers, block_size=2, num_blocks=4)
    sequence = computed(manager, [1, 2, 3, 4])
    manager.suspend(sequence)
    assert sequence.num_suspended_tokens == 4
    other = manager.add_sequence([8, 9, 8, 9])
    with refused(manager, OutOfBlocks):
        manager.resume(sequence, [5])
    assert manager.stats().num_resumed == 0
    with refused(manager, NeverFits, "2049 tokens"):
        manager.resume(sequence, [5] * 2045)
    manager.free(other)
    assert manager.resume(sequence, [5]) == sequence.num_tokens - 1 - sequence.num_computed_tokens
    assert sequence.tokens.tolist() == [1, 2, 3, 4, 5]
    assert sequence.num_suspended_tokens == 0
    manager.commit([sequence])
    manager.check()


def test_even_the_last_token_is_found_again_since_its_logits_were_seen():
    manager = small()
    sequence = computed(manager, [1, 2, 3, 4])
    manager.suspend(sequence)
    assert manager.resume(sequence) == 0
    assert sequence.num_computed_tokens == 4
    assert group_moves(manager) == []


def test_tokens_that_were_not_computed_are_kept_and_computed_later():
    manager = small()
    sequence = computed(manager, [1, 2, 3])
    manager.append([sequence], [[4, 5, 6]])
    manager.suspend(sequence)
    assert manager.resume(sequence) == 0
    assert (sequence.tokens.tolist(), sequence.num_computed_tokens) == ([1, 2, 3, 4, 5, 6], 3)


def test_reserved_blocks_are_given_up():
    manager = small()
    sequence = computed(manager, [1, 2, 3])
    manager.reserve([sequence], 9)
    manager.suspend(sequence)
    manager.resume(sequence)
    assert sequence.num_columns == 2


def test_what_has_been_evicted_meanwhile_is_to_be_computed_again():
    manager = small(num_blocks=4)
    sequence = computed(manager, [1, 2, 3, 4, 5, 6])
    manager.suspend(sequence)
    other = manager.add_sequence([7, 8, 9, 10])
    manager.free(other)
    assert manager.resume(sequence) == 2
    assert sequence.num_computed_tokens == 4
    stats = manager.stats()
    assert (stats.num_suspended, stats.num_resumed, stats.num_recomputed_tokens) == (1, 1, 2)


def test_without_whole_blocks_of_partial_reuse_the_rest_of_a_block_is_computed_again():
    manager = small(partial_reuse=False)
    sequence = computed(manager, [1, 2, 3])
    manager.suspend(sequence)
    assert manager.resume(sequence) == 1


def test_nothing_is_left_of_a_sequence_that_does_not_publish():
    manager = small()
    sequence = computed(manager, [1, 2, 3, 4, 5], publish=False)
    manager.suspend(sequence)
    assert manager.match_prefix([1, 2, 3, 4, 5]).num_tokens == 0
    assert manager.resume(sequence) == 5


def test_a_sequence_that_does_not_publish_finds_what_others_left_meanwhile():
    manager = small()
    sequence = computed(manager, [1, 2, 3, 4, 5], publish=False)
    manager.suspend(sequence)
    manager.free(computed(manager, [1, 2, 3, 4]))
    assert manager.resume(sequence) == 1
    manager.commit([sequence])
    manager.free(sequence)
    assert manager.match_prefix([1, 2, 3, 4, 5, 6]).num_tokens == 4


def test_a_sequence_that_must_not_reuse_does_not_do_so_when_it_is_resumed():
    manager = small()
    sequence = computed(manager, [1, 2, 3, 4, 5], reuse=False)
    (fork,) = manager.fork(sequence)
    for each in (sequence, fork):
        manager.suspend(each)
        assert manager.resume(each) == 5


def test_content_that_was_dropped_meanwhile_is_computed_again_and_left_to_nobody():
    manager = small()
    sequence = computed(manager, [1, 2, 3, 4, 5], namespace=("old",))
    manager.suspend(sequence)
    manager.drop(namespace=("old",))
    assert manager.resume(sequence) == 5
    manager.commit([sequence])
    manager.free(sequence)
    assert manager.match_prefix([1, 2, 3, 4, 5], namespace=("old",)).num_tokens == 0
    manager.check()


def test_retention_and_namespace_are_kept():
    manager = small()
    retention = Retention([(0, None, 80, None)])
    sequence = computed(manager, [1, 2, 3, 4], namespace=("a", 1), retention=retention)
    manager.suspend(sequence)
    manager.resume(sequence)
    assert (sequence.namespace, sequence.retention, sequence.num_prompt_tokens) == (("a", 1), retention, 4)


def test_a_resumed_sequence_is_no_new_prompt():
    manager = small()
    sequence = computed(manager, [1, 2, 3, 4, 5])
    before = manager.stats()
    manager.suspend(sequence)
    manager.resume(sequence)
    after = manager.stats()
    assert (after.num_admitted, after.num_query_tokens, after.num_hit_tokens) == (1, 5, 0)
    assert after.misses == before.misses
    assert after.num_missed_blocks == before.num_missed_blocks


def test_a_beam_leaves_its_beams():
    manager = small(num_blocks=16)
    leader = manager.add_sequence([1, 2, 3], num_beams=3)
    with refused(manager, SequenceError, "2 beams wait"):
        manager.suspend(leader)
    with refused(manager, SequenceError, "is a beam that waits"):
        manager.suspend(leader.beams[1])
    manager.commit([leader])
    beams = leader.beams
    manager.suspend(beams[1])
    assert leader.beams == [beams[0], beams[2]]
    assert manager.resume(beams[1]) == 0
    assert beams[1].beams == [beams[1]]
    manager.check()


# -- several groups ---------------------------------------------------------------------------------------------------


def test_windows_come_back_with_what_is_in_span():
    manager = grouped([FULL, sliding(4)], block_size=2)
    sequence = computed(manager, range(11))
    before = tables(manager, sequence)
    manager.suspend(sequence)
    assert manager.resume(sequence) == 1
    assert [block >= 0 for block in sequence.group_blocks(1).tolist()] == [False] * 3 + [True] * 3
    manager.commit([sequence])
    assert [table[:5] for table in tables(manager, sequence)] == [table[:5] for table in before]
    manager.check()


def test_a_state_is_copied_from_its_checkpoint():
    manager = grouped([FULL, state()], block_size=2)
    sequence = manager.add_sequence(range(8))
    for num_computed in (4, 8):
        manager.commit([sequence], num_computed)
    group_moves(manager)
    manager.append([sequence], [8])
    manager.commit([sequence])
    manager.suspend(sequence)
    assert manager.resume(sequence) == 1
    [(group, _, destination, _)] = group_moves(manager)
    assert (group, destination) == (1, sequence.group_blocks(1)[0])
    manager.check()


def test_a_state_at_the_very_end_of_a_block_goes_on_without_a_loss():
    manager = grouped([FULL, state()], block_size=2)
    sequence = computed(manager, range(6))
    manager.suspend(sequence)
    assert manager.resume(sequence) == 0
    assert sequence.num_computed_tokens == 6
    manager.check()


# -- no room ----------------------------------------------------------------------------------------------------------


def test_without_room_a_sequence_stays_suspended_and_nothing_changes():
    manager = small(num_blocks=4)
    sequence = computed(manager, [1, 2, 3, 4, 5])
    manager.suspend(sequence)
    other = manager.add_sequence([7] * 6)
    with refused(manager, OutOfBlocks, "needs"):
        manager.resume(sequence)
    assert sequence.is_suspended
    manager.free(other)
    manager.resume(sequence)
    assert sequence.tokens.tolist() == [1, 2, 3, 4, 5]


def test_without_a_row_a_sequence_stays_suspended():
    manager = small(max_sequences=1)
    sequence = computed(manager, [1, 2, 3])
    manager.suspend(sequence)
    manager.add_sequence([9])
    with refused(manager, OutOfRows, "max_sequences=1"):
        manager.resume(sequence)
    assert sequence.is_suspended


# -- what cannot be done with one -------------------------------------------------------------------------------------


def test_a_suspended_sequence_can_be_freed_once():
    manager = small()
    sequence = computed(manager, [1, 2, 3])
    manager.suspend(sequence)
    manager.free(sequence)
    assert not sequence.is_suspended
    for call in (manager.free, manager.resume, manager.suspend):
        with refused(manager, SequenceError):
            call(sequence)
    manager.reset()


CALLS = {
    "append": lambda manager, sequence: manager.append([sequence], [1]),
    "commit": lambda manager, sequence: manager.commit([sequence]),
    "reserve": lambda manager, sequence: manager.reserve([sequence], 1),
    "rewind": lambda manager, sequence: manager.rewind(sequence, 1),
    "fork": lambda manager, sequence: manager.fork(sequence),
    "reorder": lambda manager, sequence: manager.reorder([sequence], [0]),
    "suspend": lambda manager, sequence: manager.suspend(sequence),
    "tables": lambda manager, sequence: manager.tables([sequence]),
    "accept": lambda manager, sequence: manager.accept(sequence, [1], [0]),
    "explain": lambda manager, sequence: manager.explain(sequence),
    "cheapest_victims": lambda manager, sequence: manager.cheapest_victims([sequence]),
    "chunk_limit": lambda manager, sequence: manager.chunk_limit(sequence, 1),
    "blocks_needed_next_step": lambda manager, sequence: manager.blocks_needed_next_step(sequence),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_no_other_call_takes_a_suspended_sequence(call):
    manager = small()
    sequence = computed(manager, [1, 2, 3])
    manager.suspend(sequence)
    with refused(manager, SequenceError, "suspended"):
        call(manager, sequence)


@pytest.mark.parametrize(
    "attribute", ["num_tokens", "num_computed_tokens", "tokens", "block_ids", "capacity", "version"]
)
def test_what_a_suspended_sequence_does_not_have_is_said_so(attribute):
    manager = small()
    sequence = computed(manager, [1, 2, 3])
    manager.suspend(sequence)
    with pytest.raises(SequenceError, match="suspended"):
        getattr(sequence, attribute)


def test_only_a_suspended_sequence_of_this_manager_is_resumed():
    manager, other = small(), small()
    sequence = computed(manager, [1, 2, 3])
    with refused(manager, SequenceError, "not a suspended sequence of this manager"):
        manager.resume(sequence)
    manager.suspend(sequence)
    with refused(other, SequenceError, "not a suspended sequence of this manager"):
        other.resume(sequence)


def test_reset_is_refused_while_a_sequence_is_suspended():
    manager = small()
    sequence = computed(manager, [1, 2, 3])
    manager.suspend(sequence)
    with refused(manager, SequenceError, "1 are suspended"):
        manager.reset()
    assert manager.stats().num_suspended_now == 1


def test_digests_of_equal_histories_are_equal_however_many_are_suspended():
    digests = []
    for size in (0, 100, 33):
        manager, others = small(), []
        for token in range(6):
            others.append([object() for _ in range(size * token)])
            manager.suspend(computed(manager, [token]))
        digests.append(manager.digest())
    assert len(set(digests)) == 1


# -- victims ----------------------------------------------------------------------------------------------------------


def test_the_cheapest_victim_loses_the_fewest_tokens_per_block_that_it_frees():
    manager = small(num_blocks=24, block_size=4)
    shared = computed(manager, range(13))
    sharing = manager.add_sequence([*range(12), 50])
    manager.commit([sharing])
    manager.stats()
    uncommitted = manager.add_sequence(range(100, 112))
    assert manager.cheapest_victims([shared, sharing, uncommitted])[0] is uncommitted
    assert set(manager.cheapest_victims([shared, sharing])) == {shared, sharing}


def test_a_victim_that_frees_nothing_comes_last():
    manager = small()
    first = computed(manager, [1, 2])
    (fork,) = manager.fork(first)
    own = computed(manager, [7, 8, 9])
    assert manager.cheapest_victims([first, fork, own]) == [own, first, fork]


def test_asking_for_victims_changes_nothing_and_refuses_what_does_not_run():
    manager = small()
    sequence = computed(manager, [1, 2, 3])
    assert manager.cheapest_victims([sequence]) == [sequence]
    assert manager.cheapest_victims([]) == []
    manager.free(sequence)
    with refused(manager, SequenceError, "has been freed"):
        manager.cheapest_victims([sequence])
