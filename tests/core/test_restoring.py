"""What of a prompt stores are asked for, and where what they had is put: nothing is read before it is filled."""

import numpy as np
import pytest
from tests.core.layers import FULL, chunked, sliding, state
from tests.core.small import books, cached, computed

from kvist import CacheConfig, HostTier, Media, RemoteTier
from kvist.core import failures, restoring
from kvist.core.admission import match_prompt
from kvist.core.identity import UNKNOWN
from kvist.core.manager import CacheCore
from kvist.core.moves import Move
from kvist.core.tokens import TOKEN_BYTES


def core(num_blocks=8, block_size=2, layers=(FULL,), host=None, **settings):
    tiers = [RemoteTier(url="memory://")]
    if host is not None:
        tiers.insert(0, HostTier(num_blocks=host))
    settings = {"max_sequences": 8, "max_sequence_length": 256, "partial_reuse": False, "model": "m"} | settings
    return CacheCore(CacheConfig(list(layers), block_size, num_blocks, tiers=tiers, **settings), lambda: 0.0)


def packed(tokens):
    return np.array(list(tokens), np.int32).tobytes()


def missing(manager, tokens, namespace=(), limit=None):
    """What stores would be asked for of a prompt."""
    state, prompt = manager._state, packed(tokens)
    match = match_prompt(state, prompt, namespace)
    limit = len(prompt) - TOKEN_BYTES if limit is None else limit * TOKEN_BYTES
    return restoring.missing_of(state, prompt, namespace, limit, match)


def digests(manager, tokens, namespace=()):
    chain = manager._state.keeper.chain
    return chain.extend(chain.root(namespace), packed(tokens))


def nothing_else(manager):
    return [0] * len(manager._state.pools)


def put(manager, tokens, namespace=(), end=None):
    """Make room for a prompt's missing blocks on the device as if a store had had them."""
    found = missing(manager, tokens, namespace)
    return restoring.install(manager._state, found, end or len(found.digests), nothing_else(manager))


def installed(manager, tokens, namespace=(), end=None):
    """The extent with a prompt's missing blocks, held, and these blocks."""
    came = put(manager, tokens, namespace, end)
    return came.extent, came.blocks


# -- what is missing --------------------------------------------------------------------------------------------------


def test_all_whole_blocks_of_a_cold_prompt_are_missing_but_that_of_its_last_token():
    manager = core()
    found = missing(manager, range(8))
    assert (found.num_device, found.tokens) == (0, packed(range(6)))
    assert found.digests == digests(manager, range(6))
    assert missing(manager, range(2)) is None
    assert missing(manager, range(3)).digests == digests(manager, range(2))


def test_what_the_device_has_is_not_missing():
    manager = core()
    cached(manager, range(4))
    found = missing(manager, range(9))
    assert (found.num_device, found.tokens) == (2, packed(range(4, 8)))
    assert found.digests == digests(manager, range(8))[2:]
    assert missing(manager, range(4)) is None


def test_what_runs_and_is_committed_is_not_missing():
    manager = core()
    computed(manager, range(6))
    assert missing(manager, range(9)).num_device == 3


def test_a_prompt_that_parts_inside_an_extent_misses_what_comes_after():
    manager = core()
    cached(manager, range(8))
    found = missing(manager, [0, 1, 2, 3, 9, 9, 9])
    assert (found.num_device, found.digests) == (2, digests(manager, [0, 1, 2, 3, 9, 9])[2:])


def test_digests_depend_on_the_namespace():
    manager = core()
    assert missing(manager, range(5), ("a",)).digests == digests(manager, range(4), ("a",))
    assert missing(manager, range(5), ("a",)).digests != missing(manager, range(5)).digests


def test_to_look_for_what_is_missing_changes_nothing():
    manager = core()
    cached(manager, range(6))
    before = books(manager)
    missing(manager, range(9))
    missing(manager, range(9), ("another",))
    assert books(manager) == before


def lost(manager, columns, group=0):
    """Let the device lose blocks of the only extent that a group with a window or states has."""
    spanned = manager._state.spanned[group]
    [extent] = manager._state.tree.extents()
    assert spanned._take(extent, np.array(columns), len(columns), "made room") == len(columns)


def test_windows_that_the_device_has_lost_are_asked_for_with_what_comes_next_and_without():
    """Of 8 tokens a window of 4 needs blocks 2 and 3; the prompt of 9 ends there."""
    manager = core(layers=[FULL, sliding(4)], num_blocks=[8, 8])
    cached(manager, range(8))
    lost(manager, range(4))
    found = missing(manager, range(13))
    assert (found.num_device, found.num_reached, found.first) == (4, 0, 0)
    assert found.digests == digests(manager, range(12))
    assert [columns.tolist() for columns in found.wanted(6)] == [[4, 5], [4, 5]]
    assert [columns.tolist() for columns in found.wanted(5)] == [[4], [3, 4]]
    found = missing(manager, range(9))
    assert [columns.tolist() for columns in found.wanted(4)] == [[], [2, 3]]


def test_windows_that_no_longer_prefix_needs_are_not_asked_for():
    manager = core(layers=[FULL, sliding(4)], num_blocks=[8, 8])
    cached(manager, range(8))
    lost(manager, [0, 1])
    assert missing(manager, range(9)) is None
    found = missing(manager, range(13))
    assert (found.num_reached, found.first, found.tokens) == (4, 4, packed(range(8, 12)))


def test_a_lost_state_is_asked_for():
    manager = core(layers=[FULL, state(2)], num_blocks=[8, 8])
    sequence = manager.add_sequence(range(9))
    for end in (2, 4, 6, 8, 9):
        manager.commit([sequence], end)
    manager.free(sequence)
    lost(manager, [2, 3])
    found = missing(manager, range(9))
    assert (found.num_reached, found.first) == (2, 2)
    assert [columns.tolist() for columns in found.wanted(2)] == [[], [1]]
    assert found.reach(present([0, 0], [1, 0])) == 1


@pytest.mark.parametrize(("at", "num_blocks"), [(0, 0), (1, 0), (2, 1), (5, 2), (8, 4)])
def test_an_identity_that_is_not_known_ends_what_can_be_asked_for(at, num_blocks):
    manager = core()
    prompt = np.arange(10, dtype=np.int32)
    prompt[at] = UNKNOWN
    found = restoring.missing_of(manager._state, prompt.tobytes(), (), 8 * TOKEN_BYTES, None)
    assert (0 if found is None else len(found.digests)) == num_blocks


def test_media_that_are_known_are_asked_for():
    manager = core()
    cached(manager, [9, 9, 9, 9, 5, 5], media=[Media(0, 4, "cat")])
    manager.evict(8)
    prompt = manager._state.identities.look(packed([9, 9, 9, 9, 5, 5]), [Media(0, 4, "cat")])
    found = restoring.missing_of(manager._state, prompt, (), 5 * TOKEN_BYTES, None)
    assert found is not None
    assert len(found.digests) == 2


# -- how far it reaches -----------------------------------------------------------------------------------------------


def present(*rows):
    return np.array(rows, bool)


def test_full_attention_reaches_to_the_first_gap():
    manager = core()
    found = missing(manager, range(9))
    assert found.reach(present([1, 1, 0, 1])) == 2
    assert found.reach(present([0, 1, 1, 1])) == 0
    assert found.reach(present([1, 1, 1, 1])) == 4


def test_a_window_needs_only_what_is_in_span():
    """Of 4 tokens the window holds the last 3 and the next: the last two blocks."""
    manager = core(layers=[FULL, sliding(4)], num_blocks=[8, 8])
    found = missing(manager, range(9))
    assert found.reach(present([1, 1, 1, 1], [0, 0, 1, 1])) == 4
    assert found.reach(present([1, 1, 1, 1], [0, 0, 0, 1])) == 0
    assert found.reach(present([1, 1, 1, 1], [0, 1, 1, 0])) == 3
    assert found.reach(present([1, 1, 0, 1], [1, 1, 1, 1])) == 2


def test_a_state_is_needed_at_the_end_only():
    manager = core(layers=[FULL, state(2)], num_blocks=[8, 8])
    found = missing(manager, range(9))
    assert found.reach(present([1, 1, 1, 1], [0, 0, 0, 1])) == 4
    assert found.reach(present([1, 1, 1, 1], [0, 1, 0, 0])) == 2
    assert found.reach(present([1, 1, 1, 1], [0, 0, 0, 0])) == 0


def test_sinks_are_needed_too():
    manager = core(layers=[FULL, sliding(6, sink_tokens=2)], num_blocks=[8, 8])
    found = missing(manager, range(11))
    wanted = found.wanted(5)[1].tolist()
    assert wanted[0] == 0
    columns = np.isin(np.arange(5), wanted)
    assert found.reach(present([1] * 5, columns)) == 5
    columns[0] = False
    assert found.reach(present([1] * 5, columns)) < 5


def test_a_chunk_begins_anew():
    manager = core(layers=[FULL, chunked(4)], num_blocks=[8, 8])
    found = missing(manager, range(9))
    assert found.reach(present([1, 1, 1, 1], [0, 0, 0, 0])) == 4
    assert found.reach(present([1, 1, 1, 0], [0, 0, 1, 0])) == 3
    assert found.reach(present([1, 1, 1, 0], [0, 0, 0, 0])) == 2


def test_a_window_that_reaches_back_onto_the_device_needs_it_there():
    manager = core(layers=[FULL, sliding(6)], num_blocks=[8, 8])
    cached(manager, range(4))
    found = missing(manager, range(9))
    assert found.num_device == 2
    assert found.reach(present([1, 1], [1, 1])) == 2
    assert found.reach(present([1, 0], [1, 0])) == 1
    lost(manager, [0, 1])
    found = missing(manager, range(9))
    assert found.first == 0
    assert found.reach(present([0, 0, 1, 1], [0, 1, 1, 1])) == 4
    assert found.reach(present([0, 0, 1, 1], [0, 0, 1, 1])) == 0
    assert found.reach(present([0, 0, 1, 0], [0, 0, 1, 0])) == 0
    assert found.reach(present([0, 0, 1, 0], [0, 1, 1, 0])) == 0
    assert found.reach(present([0, 0, 1, 0], [1, 1, 1, 0])) == 3


def test_only_what_is_in_span_is_wanted():
    manager = core(layers=[FULL, sliding(4), state(2)], num_blocks=[8, 8, 8])
    found = missing(manager, range(9))
    assert [columns.tolist() for columns in found.wanted(4)] == [[0, 1, 2, 3], [2, 3], [3]]
    assert [columns.tolist() for columns in found.wanted(2)] == [[0, 1], [0, 1], [1]]


def test_keys_are_by_group():
    manager = core(layers=[FULL, sliding(4)], num_blocks=[8, 8])
    found = missing(manager, range(9))
    chain = manager._state.keeper.chain
    assert found.keys(manager._state, 1, np.array([2, 3])) == chain.keys((), digests(manager, range(8))[2:], 1)


# -- where it is put --------------------------------------------------------------------------------------------------


def test_what_came_is_an_extent_that_is_held_until_it_is_filled():
    manager = core()
    extent, blocks = installed(manager, range(9))
    assert blocks.shape == (1, 4)
    assert extent.references == 1
    assert manager.match_prefix(range(9)).num_tokens == 8
    assert manager.num_free_blocks == 4
    manager._state.tree.release(extent)
    assert manager.num_free_blocks == 8
    manager.check()


def test_it_goes_below_what_the_device_has_and_splits_that_where_it_must():
    manager = core()
    cached(manager, range(8))
    extent, _ = installed(manager, [0, 1, 2, 3, 9, 9, 9])
    manager._state.tree.release(extent)
    assert manager.match_prefix([0, 1, 2, 3, 9, 9, 9]).num_tokens == 6
    assert manager.match_prefix(range(9)).num_tokens == 8
    manager.check()


def test_only_some_of_it_can_be_put_there():
    manager = core()
    extent, blocks = installed(manager, range(9), end=2)
    assert blocks.shape == (1, 2)
    manager._state.tree.release(extent)
    assert manager.match_prefix(range(9)).num_tokens == 4
    manager.check()


def test_windows_and_states_get_blocks_only_where_they_are_needed():
    manager = core(layers=[FULL, sliding(4), state(2)], num_blocks=[8, 8, 8])
    extent, blocks = installed(manager, range(9))
    assert (blocks >= 0).tolist() == [[True] * 4, [False, False, True, True], [False, False, False, True]]
    manager._state.tree.release(extent)
    manager.check()
    assert manager.match_prefix(range(9)).num_tokens == 8


def test_room_is_made_by_evicting_and_never_what_it_goes_on_from():
    manager = core(num_blocks=6)
    cached(manager, range(4))
    cached(manager, range(20, 28))
    extent, _ = installed(manager, range(9))
    assert manager.match_prefix(range(9)).num_tokens == 8
    manager._state.tree.release(extent)
    manager.check()


@pytest.mark.parametrize(("num_others", "fits"), [(0, True), (2, True), (3, False)])
def test_without_room_for_it_and_what_else_is_needed_nothing_changes(num_others, fits):
    """8 blocks: 2 are held, 4 are to come."""
    manager = core()
    computed(manager, range(50, 54))
    found = missing(manager, range(9))
    before = books(manager)
    assert restoring.can_install(manager._state, found, 4, [num_others]) == fits
    assert books(manager) == before
    came = restoring.install(manager._state, found, 4, [num_others])
    assert (came is not None) == fits
    if not fits:
        assert books(manager) == before


def test_what_it_goes_on_from_does_not_count_as_room():
    manager = core(num_blocks=6)
    cached(manager, range(6))
    found = missing(manager, range(13))
    assert not restoring.can_install(manager._state, found, 3, [1])
    assert restoring.can_install(manager._state, found, 3, [0])


def test_windows_it_goes_on_from_do_not_count_as_room():
    manager = core(layers=[FULL, sliding(6)], num_blocks=[12, 4])
    cached(manager, range(6))
    found = missing(manager, range(9))
    assert (found.num_device, len(found.digests)) == (3, 1)
    assert restoring.can_install(manager._state, found, 1, [0, 0])
    assert not restoring.can_install(manager._state, found, 1, [0, 2])


def test_in_host_memory_it_takes_the_place_of_the_same():
    manager = core(host=8)
    cached(manager, range(12))
    manager.evict(6)
    manager.take_moves()
    extent, _ = installed(manager, range(9))
    manager._state.tree.release(extent)
    manager.check()
    assert manager.match_prefix(range(13)).tiers["host"] == 4
    assert manager.take_moves() == []


def test_lost_windows_are_put_where_they_were():
    manager = core(layers=[FULL, sliding(4)], num_blocks=[8, 8])
    cached(manager, range(8))
    lost(manager, range(4))
    came = put(manager, range(9))
    assert not came.is_new
    assert (came.blocks >= 0).tolist() == [[False] * 4, [False, False, True, True]]
    assert [(extent.start, columns.tolist()) for extent, _, columns in came.filled] == [(0, [2, 3])]
    assert manager.match_prefix(range(9)).num_tokens == 8
    manager._state.tree.release(came.extent)
    manager.check()
    assert manager.add_sequence(range(9)).num_cached_tokens == 8
    manager.check()


def test_lost_windows_and_what_comes_next_are_put_in_one_step():
    manager = core(layers=[FULL, sliding(6)], num_blocks=[8, 8])
    cached(manager, range(6))
    lost(manager, range(3))
    came = put(manager, range(9), end=4)
    assert came.is_new
    assert (came.blocks >= 0).tolist() == [[False, False, False, True], [False, True, True, True]]
    manager._state.tree.release(came.extent)
    manager.check()
    assert manager.match_prefix(range(9)).num_tokens == 8


# -- what could not be filled -----------------------------------------------------------------------------------------


def test_what_could_not_be_filled_is_gone():
    manager = core()
    before = manager.match_prefix(range(9))
    came = put(manager, range(9))
    restoring.discard(manager._state, came)
    manager.check()
    assert manager.match_prefix(range(9))[:3] == before[:3]
    assert manager.num_free_blocks == 8
    assert list(manager._state.tree.extents()) == []
    assert list(manager._state.tree.roots) == []


def test_what_it_went_on_from_stays():
    manager = core()
    cached(manager, range(4))
    came = put(manager, range(9))
    restoring.discard(manager._state, came)
    manager.check()
    assert manager.match_prefix(range(9)).num_tokens == 4


def test_what_was_split_off_its_head_meanwhile_is_gone_with_it():
    """Host memory had another way to go on from its middle, so that it is two extents."""
    manager = core(host=8, num_blocks=12)
    cached(manager, [0, 1, 2, 3, 9, 9])
    manager.evict(12)
    manager.take_moves()
    came = put(manager, range(9))
    assert came.extent.start == 2
    restoring.discard(manager._state, came)
    manager.check()
    assert list(manager._state.tree.extents()) == []
    assert manager.match_prefix([0, 1, 2, 3, 9, 9, 9]).num_tokens == 0


def test_windows_of_what_could_not_be_filled_are_given_back():
    manager = core(layers=[FULL, sliding(4)], num_blocks=[8, 8])
    cached(manager, range(4))
    came = put(manager, range(9))
    restoring.discard(manager._state, came)
    manager.check()
    assert manager.num_free_blocks == 16
    assert manager.match_prefix(range(9)).num_tokens == 4


def test_holes_that_could_not_be_filled_are_holes_again_in_what_was_split_and_forgotten_meanwhile():
    """A copy from host memory is found not to have been made while what comes from stores is to be filled."""
    manager = core(layers=[FULL, sliding(4)], num_blocks=[8, 8], event_buffer=100)
    cached(manager, range(8))
    lost(manager, range(4))
    came = put(manager, range(9))
    failures.forget_unmade(manager._state, [Move(0, int(came.extent.blocks[0, 3]), 2, 0, "host", "device")])
    assert (came.extent.start, came.extent.num_blocks) == (3, 1)
    restoring.discard(manager._state, came)
    manager.check()
    assert manager.num_free_blocks == 16
    assert manager.match_prefix(range(9)).num_tokens == 0


def test_holes_that_could_not_be_filled_are_holes_again():
    manager = core(layers=[FULL, sliding(4)], num_blocks=[8, 8], event_buffer=100)
    cached(manager, range(8))
    lost(manager, range(4))
    before = manager.num_free_blocks
    restoring.discard(manager._state, put(manager, range(9)))
    manager.check()
    assert manager.num_free_blocks == before
    assert manager.match_prefix(range(9)).num_tokens == 0
    restoring.discard(manager._state, put(manager, range(13)))
    manager.check()
    assert manager.num_free_blocks == before
