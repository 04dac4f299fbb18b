import numpy as np
import pytest
from tests.core.small import books, cached, computed, label, refused, small

from kvist import ArgumentError, ArgumentTypeError, Pin, PrefixMatch, SequenceError, StaleMatch

# -- match_prefix -----------------------------------------------------------------------------------------------------


def test_a_match_counts_whole_blocks_partial_tokens_and_what_is_missing():
    manager = small(block_size=4)
    cached(manager, [1, 2, 3, 4, 5, 6, 7, 8])
    match = manager.match_prefix([1, 2, 3, 4, 5, 6, 9, 9, 9], namespace=())
    assert isinstance(match, PrefixMatch)
    assert (match.num_tokens, match.num_block_tokens, match.num_partial_tokens) == (6, 4, 2)
    assert (match.num_prompt_tokens, match.num_missing_tokens) == (9, 3)
    assert match.namespace == ()


@pytest.mark.parametrize("block_size", [2, 4, 8])
@pytest.mark.parametrize("length", range(1, 8))
def test_the_last_token_is_always_missing(length, block_size):
    manager = small(block_size)
    cached(manager, [1, 2, 3, 4, 5, 6, 7])
    match = manager.match_prefix([1, 2, 3, 4, 5, 6, 7][:length])
    assert (match.num_tokens, match.num_missing_tokens) == (length - 1, 1)


def test_a_cold_prompt_matches_nothing():
    manager = small()
    match = manager.match_prefix([1, 2, 3])
    assert (match.num_tokens, match.num_missing_tokens) == (0, 3)


@pytest.mark.parametrize("length", [1, 2, 3, 5, 8])
def test_a_match_says_what_an_admission_would_reuse(length):
    manager = small(num_blocks=32)
    cached(manager, [1, 2, 3, 4, 5])
    cached(manager, [1, 2, 6, 7, 8, 9])
    for prompt in ([1, 2, 3, 4, 5, 6, 7, 8], [1, 2, 6, 7, 8, 0, 0, 0], [1, 0, 0, 0, 0, 0, 0, 0], [9] * 8):
        match = manager.match_prefix(prompt[:length])
        sequence = manager.add_sequence(prompt[:length])
        assert sequence.num_cached_tokens == match.num_tokens
        manager.free(sequence)


def test_looking_changes_nothing():
    manager = small()
    cached(manager, [1, 2, 3, 4])
    computed(manager, [1, 2, 5, 6])
    before = books(manager)
    manager.match_prefix([1, 2, 3, 9])
    manager.match_prefix([1, 2, 3, 9], namespace=("unknown",))
    assert books(manager) == before


def test_looking_in_an_unknown_namespace_does_not_make_it_known():
    manager = small()
    assert manager.match_prefix([1, 2], namespace=("a",)).num_tokens == 0
    assert not manager._state.tree.roots


def test_a_long_prompt_is_matched_in_a_view_of_the_callers_array():
    manager = small(block_size=16, num_blocks=1024, max_sequence_length=20_000)
    prompt = np.arange(10_000, dtype=np.int32)
    cached(manager, prompt)
    assert manager.match_prefix(prompt).num_tokens == 9999
    prompt[9000] = 0
    assert manager.match_prefix(prompt).num_tokens == 9000
    prompt[0] = 1
    assert manager.match_prefix(prompt).num_tokens == 0


@pytest.mark.parametrize(
    ("wrong", "error", "part"),
    [
        ([], ArgumentError, "tokens is empty; a prompt has at least one token"),
        (np.array([], np.int32), ArgumentError, "tokens is empty"),
        (None, ArgumentTypeError, "NoneType"),
        ("ab", ArgumentTypeError, "str"),
        ([1.0], ArgumentTypeError, "tokens[0] is a float"),
        ([-1], ArgumentError, "tokens[0] is -1"),
        (np.array([[1]]), ArgumentError, "one dimension"),
    ],
    ids=label,
)
def test_a_prompt_that_cannot_be_is_refused(wrong, error, part):
    manager = small()
    cached(manager, [1, 2, 3])
    with refused(manager, error, part):
        manager.match_prefix(wrong)
    with refused(manager, error, part):
        manager.explain(wrong)


# -- pin --------------------------------------------------------------------------------------------------------------


def test_a_pin_keeps_whole_blocks_until_it_is_released():
    manager = small(num_blocks=4)
    cached(manager, [1, 2, 3, 4, 5])
    pin = manager.pin(manager.match_prefix([1, 2, 3, 4, 5, 6]))
    assert isinstance(pin, Pin)
    assert (pin.num_tokens, pin.namespace) == (4, ())
    assert manager.stats().num_pins == 1
    assert manager.evict(4) == 1
    assert manager.match_prefix([1, 2, 3, 4, 5, 6]).num_tokens == 4
    assert manager.num_free_blocks == 2
    manager.check()
    pin.release()
    assert (manager.num_free_blocks, manager.stats().num_pins) == (4, 0)
    manager.check()


def test_a_pin_holds_no_more_of_an_extent_than_it_matched():
    manager = small()
    cached(manager, [1, 2, 3, 4, 5, 6])
    with manager.pin(manager.match_prefix([1, 2, 9])) as pin:
        assert pin.num_tokens == 2
        assert manager.evict(8) == 2
        assert manager.match_prefix([1, 2, 3, 4]).num_tokens == 2
    assert manager.evict(8) == 1


def test_leaving_a_pins_context_releases_it_even_through_an_error():
    manager = small()
    cached(manager, [1, 2, 3])
    with pytest.raises(KeyError), manager.pin(manager.match_prefix([1, 2, 3])):
        raise KeyError
    assert manager.stats().num_pins == 0
    manager.check()


def test_a_pin_is_released_once():
    manager = small()
    cached(manager, [1, 2, 3])
    pin = manager.pin(manager.match_prefix([1, 2, 3]))
    pin.release()
    with refused(manager, SequenceError, "the pin has been released"):
        pin.release()


def test_one_match_may_be_pinned_several_times():
    manager = small()
    cached(manager, [1, 2, 3])
    match = manager.match_prefix([1, 2, 3])
    first, second = manager.pin(match), manager.pin(match)
    first.release()
    assert manager.evict(8) == 1
    second.release()
    assert manager.evict(8) == 1
    manager.check()


def test_a_match_of_nothing_can_be_pinned():
    manager = small()
    pin = manager.pin(manager.match_prefix([1, 2, 3], namespace=("a",)))
    assert pin.num_tokens == 0
    manager.check()
    pin.release()
    assert not manager._state.tree.roots
    manager.check()


def test_partial_tokens_are_not_pinned():
    manager = small(block_size=4)
    cached(manager, [1, 2, 3])
    match = manager.match_prefix([1, 2, 3, 4])
    assert match.num_tokens == 3
    with manager.pin(match) as pin:
        assert pin.num_tokens == 0
        assert manager.evict(8) == 1


def test_a_match_older_than_an_eviction_is_stale():
    manager = small()
    cached(manager, [1, 2, 3, 4])
    match = manager.match_prefix([1, 2, 3, 4, 5])
    manager.evict(1)
    with refused(manager, StaleMatch, "the match had 4 tokens in whole blocks, 2 are left; match again"):
        manager.pin(match)
    manager.evict(1)
    with refused(manager, StaleMatch, "4 tokens in whole blocks, 0 are left"):
        manager.pin(match)


def test_an_eviction_of_other_content_makes_no_match_stale():
    manager = small(policy="fifo", partial_reuse=False)
    cached(manager, [7, 8])
    cached(manager, [1, 2])
    match = manager.match_prefix([1, 2, 3])
    manager.evict(1)
    assert manager.pin(match).num_tokens == 2


def test_content_that_came_back_makes_no_match_stale():
    manager = small()
    cached(manager, [1, 2])
    match = manager.match_prefix([1, 2, 3])
    manager.evict(1)
    cached(manager, [1, 2])
    assert manager.pin(match).num_tokens == 2


@pytest.mark.parametrize("tail", [[], [9, 9]], ids=["whole extent", "part of an extent"])
def test_a_match_remembers_the_tokens_it_found_whatever_becomes_of_their_extent(tail):
    manager = small()
    cached(manager, [1, 2, 3, 4])
    manager.evict(1)
    cached(manager, [1, 2, 7, 8, *tail], reuse=False)
    match = manager.match_prefix([1, 2, 7, 8, 0])
    assert match.num_tokens == 4
    manager.evict(1 + len(tail) // 2)
    cached(manager, [1, 2, 5, 6], reuse=False)
    assert [extent.num_blocks for extent in manager._state.tree.extents()] == [2]
    with refused(manager, StaleMatch, "the match had 4 tokens in whole blocks, 2 are left"):
        manager.pin(match)


def test_a_match_finds_what_others_have_committed_since_the_last_look():
    manager = small(num_blocks=16)
    sequences = [manager.add_sequence(prompt) for prompt in ([1, 2, 3, 4], [1, 2, 5, 6], [7, 8])]
    manager.commit(np.arange(3))
    assert manager.match_prefix([1, 2, 5, 6, 9]).num_tokens == 4
    manager.append(sequences, [[9, 10], [11, 12], [13, 14]])
    manager.commit(np.arange(3))
    assert manager.match_prefix([7, 8, 13, 14, 0]).num_tokens == 4
    assert manager.match_prefix([20, 20]).num_tokens == 0
    assert manager.match_prefix([1, 2, 5, 6, 11, 12, 0]).num_tokens == 6
    assert manager.match_prefix([1, 2, 3, 4, 9, 10, 0]).num_tokens == 6
    manager.check()


def test_a_match_finds_what_was_committed_by_one_that_began_above_it():
    manager = small(num_blocks=16)
    cached(manager, [1, 2])
    computed(manager, [1, 2, 7, 8], reuse=False)
    assert manager.match_prefix([1, 2, 7, 8, 9]).num_tokens == 4
    manager.check()


@pytest.mark.parametrize("forget", ["drop", "reset"])
def test_a_match_of_what_was_forgotten_is_stale(forget):
    manager = small()
    cached(manager, [1, 2], namespace=("a",))
    match = manager.match_prefix([1, 2, 3], namespace=("a",))
    if forget == "drop":
        manager.drop(namespace=("a",))
    else:
        manager.reset()
    with refused(manager, StaleMatch, "0 are left"):
        manager.pin(match)


def test_a_pin_follows_content_through_splits():
    manager = small(num_blocks=16)
    cached(manager, [1, 2, 3, 4, 5, 6])
    pin = manager.pin(manager.match_prefix([1, 2, 3, 4, 5, 6, 7]))
    computed(manager, [1, 2, 9, 9])
    computed(manager, [1, 2, 3, 4, 8, 8])
    manager.evict(16)
    assert manager.match_prefix([1, 2, 3, 4, 5, 6, 7]).num_tokens == 6
    manager.check()
    pin.release()
    manager.check()


def test_a_pinned_extent_does_not_grow_into_what_others_add():
    manager = small(num_blocks=16)
    sequence = computed(manager, [1, 2])
    pin = manager.pin(manager.match_prefix([1, 2, 3]))
    manager.append([sequence], [[3, 4]])
    manager.commit([sequence])
    manager.free(sequence)
    assert manager.evict(16) == 1
    pin.release()
    manager.check()


@pytest.mark.parametrize("wrong", [None, [1, 2], 3, "a", b"ab"], ids=label)
def test_only_a_match_can_be_pinned(wrong):
    manager = small()
    with refused(manager, ArgumentTypeError, f"pin: expected a PrefixMatch, got {type(wrong).__name__}"):
        manager.pin(wrong)
