"""Why a prompt was not found, as far as it was not: each class by the smallest case, and counted in tokens."""

import gc

import pytest
from tests.core.layers import FULL, grouped, lose, sliding, state
from tests.core.small import cached, computed, small

from kvist import KVCacheManager
from kvist.core import losses
from kvist.core.extents import Extent
from kvist.core.misses import MISSES


def miss(manager, tokens, **options):
    return manager.match_prefix(tokens, **options).miss


# -- classes ----------------------------------------------------------------------------------------------------------


def test_what_was_never_committed_is_cold():
    manager = small()
    cached(manager, [1, 2, 3, 4])
    assert miss(manager, [7, 8, 9]) == "cold"
    assert miss(manager, [1, 2, 7, 8, 9]) == "cold"


def test_nothing_is_missing_but_the_last_token():
    manager = small()
    cached(manager, [1, 2, 3, 4])
    assert [miss(manager, [1, 2, 3, 4][:n]) for n in (1, 3, 4)] == ["", "", ""]
    assert miss(manager, [1, 2, 3, 4, 5]) == ""


def test_less_than_a_block_is_under_a_block():
    manager = small(block_size=4)
    cached(manager, [1, 2, 3, 4])
    assert miss(manager, [9, 8]) == "under a block"
    assert miss(manager, [1, 2, 3, 4, 5, 6, 7]) == "under a block"
    assert miss(manager, [1, 2, 3, 4, 5, 6, 7, 8, 9]) == "cold"


def test_what_somebody_is_computing_is_uncommitted():
    manager = small()
    running = manager.add_sequence([1, 2, 3, 4, 5])
    assert miss(manager, [1, 2, 3, 4, 5]) == "uncommitted"
    manager.commit([running], 2)
    match = manager.match_prefix([1, 2, 3, 4, 5])
    assert (match.num_tokens, match.miss) == (2, "uncommitted")
    manager.commit([running])
    assert miss(manager, [1, 2, 3, 4, 5]) == ""


def test_what_somebody_computes_for_himself_is_not_uncommitted():
    manager = small()
    manager.add_sequence([1, 2, 3, 4, 5], publish=False)
    assert miss(manager, [1, 2, 3, 4, 5]) == "cold"


def test_what_another_namespace_has_is_said_to_be_there():
    manager = small()
    cached(manager, [1, 2, 3, 4], namespace=("a",))
    assert miss(manager, [1, 2, 3, 4, 5], namespace=("b",)) == "other namespace"
    assert miss(manager, [1, 2, 3, 4, 5], namespace=("a",)) == ""
    manager.drop(namespace=("a",))
    assert miss(manager, [1, 2, 3, 4, 5], namespace=("b",)) == "cold"


def test_with_private_namespaces_what_another_has_is_cold_and_only_counted_apart():
    manager = small(private_namespaces=True)
    cached(manager, [1, 2, 3, 4], namespace=("a",))
    assert miss(manager, [1, 2, 3, 4, 5], namespace=("b",)) == "cold"
    assert "other" not in str(manager.explain([1, 2, 3, 4, 5]))
    assert manager.add_sequence([1, 2, 3, 4, 5], namespace=("b",)).miss == "cold"
    assert manager.stats().misses["other namespace"] == 4


def test_what_another_namespace_has_just_committed_is_seen_too():
    manager = small()
    computed(manager, [1, 2, 3], namespace=("a",))
    assert miss(manager, [1, 2, 3, 4]) == "other namespace"
    assert manager.add_sequence([1, 2, 3, 4]).miss == "other namespace"


def test_what_both_namespaces_have_is_no_miss_of_another():
    manager = small()
    for namespace in ((), ("a",)):
        cached(manager, [1, 2], namespace=namespace)
    assert miss(manager, [1, 2, 7, 8, 9]) == "cold"


def test_content_without_its_window_is_known_but_not_found():
    manager = grouped([FULL, sliding(4)], block_size=2)
    cached(manager, range(10))
    lose(manager, 1, 2)
    match = manager.match_prefix([*range(8), 99])
    assert (match.num_tokens, match.num_known_tokens, match.miss) == (4, 8, "window")
    assert match.num_missing_tokens == 5
    assert manager.add_sequence([*range(8), 99]).miss == "window"
    assert {reason: n for reason, n in manager.stats().misses.items() if n} == {"cold": 9, "window": 4}


def test_a_state_that_was_not_kept_is_a_window_miss():
    manager = grouped([FULL, state()], block_size=2)
    sequence = manager.add_sequence(range(9))
    manager.commit([sequence], 8)
    match = manager.match_prefix([*range(6), 99])
    assert (match.num_tokens, match.num_known_tokens, match.miss) == (0, 6, "window")


# -- evictions --------------------------------------------------------------------------------------------------------


def test_what_was_evicted_says_when_and_why():
    clock = [10.0]
    manager = KVCacheManager(small(num_blocks=2).config, clock=lambda: clock[0])
    cached(manager, [1, 2, 3, 4])
    clock[0] = 12.0
    manager.free(manager.add_sequence([7, 8, 9]))
    clock[0] = 15.5
    match = manager.match_prefix([1, 2, 3, 4, 5])
    assert (match.miss, match.evicted_s, match.eviction) == ("evicted", 3.5, "made room")
    assert "evicted: what follows went 3.5 s ago (made room)" in str(manager.explain([1, 2, 3, 4, 5]))


def test_an_eviction_that_was_asked_for_is_told_from_one_for_room():
    manager = small()
    cached(manager, [1, 2, 3, 4])
    manager.evict(1)
    match = manager.match_prefix([1, 2, 3, 4, 5])
    assert (match.num_tokens, match.miss, match.eviction) == (2, "evicted", "asked for")


def test_what_comes_back_is_evicted_no_more():
    manager = small()
    cached(manager, [1, 2, 3, 4])
    manager.evict(8)
    assert miss(manager, [1, 2, 3, 4, 5]) == "evicted"
    cached(manager, [1, 2, 3, 4])
    assert miss(manager, [1, 2, 3, 4, 5]) == ""
    assert miss(manager, [1, 2, 8, 8, 8]) == "cold"


def test_an_eviction_belongs_to_its_namespace():
    manager = small()
    cached(manager, [1, 2, 3, 4], namespace=("a",))
    manager.evict(8)
    assert miss(manager, [1, 2, 3, 4], namespace=("a",)) == "evicted"
    assert miss(manager, [1, 2, 3, 4], namespace=("b",)) == "cold"


def test_a_bounded_number_of_evictions_is_remembered(monkeypatch):
    monkeypatch.setattr(losses, "MAX_LOSSES", 3)
    manager = small()
    for token in range(10, 20):
        cached(manager, [token, token])
        manager.evict(8)
    found = [miss(manager, [token, token, 99]) for token in range(10, 20)]
    assert found == ["cold"] * 7 + ["evicted"] * 3


def test_what_was_evicted_holds_no_tokens_any_more():
    manager = small(num_blocks=64, max_sequence_length=4096)
    before = _tokens_in_extents()
    for token in range(100):
        cached(manager, [token] * 64)
        cached(manager, [*[token] * 64, 7, 8])
    assert _tokens_in_extents() - before <= 2 * 64


def _tokens_in_extents():
    gc.collect()
    return sum(each.num_tokens for each in gc.get_objects() if type(each) is Extent)


# -- numbers ----------------------------------------------------------------------------------------------------------


def test_misses_are_counted_in_tokens_without_the_last_of_each_prompt():
    manager = small(block_size=2, num_blocks=16)
    cached(manager, [1, 2, 3, 4, 5, 6])
    manager.add_sequence([7] * 5)
    manager.add_sequence([1, 2, 3, 4, 8, 8, 8])
    manager.add_sequence([1, 2])
    manager.add_sequence([8])
    stats = manager.stats()
    assert {reason: n for reason, n in stats.misses.items() if n} == {"cold": 5 + 4 + 2}
    assert (stats.num_query_tokens, stats.num_hit_tokens, stats.num_missed_tokens) == (21, 5, 16)


def test_all_misses_and_hits_and_last_tokens_are_all_that_was_asked():
    manager = small(num_blocks=6, max_sequences=4)
    for round_ in range(30):
        tokens = [round_ % 3, 1, round_ % 2, round_ % 5, 7][: 1 + round_ % 5]
        sequence = manager.add_sequence(tokens, namespace=("a", round_ % 2))
        manager.commit([sequence], round_ % (len(tokens) + 1) if round_ % 4 else None)
        manager.free(sequence)
        stats = manager.stats()
        assert sum(stats.misses.values()) + stats.num_hit_tokens + stats.num_admitted == stats.num_query_tokens
        assert set(stats.misses) <= set(MISSES)


def test_a_sequence_remembers_why_its_prompt_was_missed():
    manager = small()
    cached(manager, [1, 2, 3, 4])
    found = [manager.add_sequence(tokens).miss for tokens in ([1, 2, 3], [9, 9, 9], [7])]
    assert found == ["", "cold", ""]


def test_a_prompt_that_must_not_look_is_not_told_what_is_there():
    manager = small()
    cached(manager, [1, 2, 3, 4])
    sequence = manager.add_sequence([1, 2, 3, 4, 5], reuse=False)
    assert sequence.num_cached_tokens == 0
    assert sum(manager.stats().misses.values()) == 4 + 4 - 1


@pytest.mark.parametrize("reason", MISSES)
def test_every_class_is_explained_in_words(reason):
    assert {
        "cold": lambda: _explain(small(), [1, 2, 3]),
        "evicted": lambda: _explain(_after_eviction(), [1, 2, 3]),
        "other namespace": lambda: _explain(_elsewhere(), [1, 2, 3]),
        "uncommitted": lambda: _explain(_running(), [1, 2, 3]),
        "under a block": lambda: _explain(small(block_size=4), [1, 2, 3]),
        "window": lambda: _explain(_without_state(), [*range(6), 99]),
    }[reason]().startswith(reason)


def _explain(manager, tokens):
    return manager.explain(tokens).reason


def _after_eviction():
    manager = small()
    cached(manager, [1, 2, 3])
    manager.evict(8)
    return manager


def _elsewhere():
    manager = small()
    cached(manager, [1, 2, 3], namespace=("a",))
    return manager


def _running():
    manager = small()
    manager.add_sequence([1, 2, 3])
    return manager


def _without_state():
    manager = grouped([FULL, state()], block_size=2)
    manager.commit([manager.add_sequence(range(9))], 8)
    return manager
