"""What other caches would have hit, followed beside a running manager."""

import numpy as np
import pytest
from tests.lab.forests import forest, hashed, token_requests, traces_folder

from kvist import AttentionSpec, CacheConfig, KVCacheManager, Media, NeverFits
from kvist.errors import ArgumentError, SequenceError
from kvist.journal import Journal, Replay
from kvist.lab.curves import lru_curve, references_of
from kvist.lab.replay import ReplayConfig, replay
from kvist.lab.shadow import Shadow, ShadowCaches, ShadowCollector
from kvist.lab.traces import open_trace


def manager(num_blocks=64, block_size=4, **settings):
    return KVCacheManager(
        CacheConfig([AttentionSpec(1, 8)], block_size=block_size, num_blocks=num_blocks, max_sequences=4, **settings)
    )


def serve(running, requests):
    for request in requests:
        sequence = running.add_sequence(request.prompt.tokens(), namespace=request.namespace)
        running.commit([sequence])
        running.free(sequence)


def test_shadows_of_all_blocks_hit_what_lru_of_these_sizes_does():
    requests = hashed(*forest(1, num_requests=300))
    sizes = [1, 2, 5, 10, 50, 1000]
    with ShadowCaches(manager(), [Shadow(size, "lru") for size in sizes], rate=1.0) as shadows:
        serve(shadows._manager, requests)
    references = references_of(requests)
    expected = lru_curve(references, sizes).hit_rate
    assert [stats.num_hit_blocks for stats in shadows.stats()] == np.rint(expected * references.num_references).tolist()
    assert [stats.num_query_blocks for stats in shadows.stats()] == [references.num_references] * len(sizes)


def test_shadows_have_the_policies_of_the_manager():
    popular = [[7, 7, 7, 7, 8]] * 4
    scan = [[n, n, n, n] for n in range(100, 112)]
    requests = token_requests(*popular, *scan, [7, 7, 7, 7, 9])
    with ShadowCaches(manager(), [Shadow(4, "lfu"), Shadow(4, "lru")], rate=1.0) as shadows:
        serve(shadows._manager, requests)
    assert [stats.num_hit_blocks for stats in shadows.stats()] == [4, 3]


def test_a_sample_of_blocks_comes_near():
    requests = hashed(*forest(2, num_requests=6_000, fan_out=4, longest=12), block_size=2)
    references = references_of(requests)
    sizes = [1_000, 5_000, 100_000]
    with ShadowCaches(manager(block_size=2), [Shadow(size, "lru") for size in sizes], rate=1 / 8) as shadows:
        serve(shadows._manager, requests)
    exact = lru_curve(references, sizes).hit_rate
    assert np.abs([stats.hit_rate for stats in shadows.stats()] - exact).max() < 0.03
    (sampled,) = {stats.num_sampled_blocks for stats in shadows.stats()}
    assert 0.05 < sampled / references.num_references < 0.25


def test_namespaces_are_apart_and_short_prompts_have_no_blocks():
    requests = [
        *token_requests([1, 2, 3, 4], namespace=("a",)),
        *token_requests([1, 2, 3, 4], [9], namespace=("b",)),
        *token_requests([1, 2, 3, 4, 5], namespace=("a",)),
    ]
    with ShadowCaches(manager(), [Shadow(10)], rate=1.0) as shadows:
        serve(shadows._manager, requests)
    (stats,) = shadows.stats()
    assert (stats.num_query_blocks, stats.num_hit_blocks, stats.hit_rate) == (3, 1, 1 / 3)


def test_only_admitted_prompts_of_plain_tokens_that_may_reuse_are_followed():
    running = manager(num_blocks=4)
    with ShadowCaches(running, [Shadow(10)], rate=1.0) as shadows:
        with pytest.raises(NeverFits):
            running.add_sequence(range(100))
        with pytest.raises(ArgumentError):
            running.add_sequence([-1])
        running.free(running.add_sequence([1, 2, 3, 4], media=[Media(0, 2, b"cat")]))
        running.free(running.add_sequence([1, 2, 3, 4], reuse=False))
        running.free(running.add_sequence([1, 2, 3, 4], extra_ids=[1, 0, 0, 0]))
        assert shadows.stats()[0].num_query_blocks == 0
        running.free(running.add_sequence((1, 2, 3, 4)))
        assert shadows.stats()[0].num_query_blocks == 1
    assert shadows.num_failures == 0


def test_a_long_prompt_costs_no_more_than_its_leading_blocks():
    running = manager(num_blocks=64)
    with ShadowCaches(running, [Shadow(10)], rate=1.0, max_prompt_blocks=3) as shadows:
        running.free(running.add_sequence(list(range(100))))
    assert shadows.stats()[0].num_query_blocks == 3


def test_what_goes_wrong_is_counted_and_never_reaches_the_caller(monkeypatch, caplog):
    def fail(*_):
        raise RuntimeError("no such luck")

    running = manager()
    with ShadowCaches(running, [Shadow(10)], rate=1.0) as shadows:
        monkeypatch.setattr("kvist.lab.shadow.content_keys", fail)
        for _ in range(3):
            running.free(running.add_sequence([1, 2, 3, 4]))
    assert shadows.num_failures == 3
    assert [record.message for record in caplog.records] == [
        "shadow caches left a prompt out: RuntimeError('no such luck')"
    ]


def test_a_manager_is_left_as_it_was_and_has_one_set_of_shadows():
    running = manager()
    shadows = ShadowCaches(running, [Shadow(10)], rate=1.0)
    with pytest.raises(SequenceError, match="has shadows already"):
        ShadowCaches(running, [Shadow(10)])
    shadows.close()
    shadows.close()
    assert "add_sequence" not in vars(running)
    running.free(running.add_sequence([1, 2, 3, 4]))
    assert shadows.stats()[0].num_query_blocks == 0
    ShadowCaches(running, [Shadow(10)]).close()


def test_a_journal_that_begins_later_still_hears_of_admissions(tmp_path):
    running = manager()
    with ShadowCaches(running, [Shadow(10)], rate=1.0) as shadows:
        with Journal(tmp_path / "calls.journal").attach(running):
            running.free(running.add_sequence([1, 2, 3, 4]))
        running.free(running.add_sequence([1, 2, 3, 4]))
    assert shadows.stats()[0].num_query_blocks == 2
    again = Replay(tmp_path / "calls.journal")
    assert [again.step().name for _ in range(2)] == ["add_sequence", "free"]


def test_settings_that_cannot_be_are_refused_and_leave_the_manager_alone():
    running = manager()
    for settings, told in (
        ({"rate": 0.0}, "rate is 0.0"),
        ({"max_prompt_blocks": 0}, "max_prompt_blocks is 0"),
    ):
        with pytest.raises(ArgumentError, match=told):
            ShadowCaches(running, [Shadow(10)], **settings)
    with pytest.raises(ArgumentError, match="a shadow has 0 blocks"):
        ShadowCaches(running, [Shadow(0)])
    with pytest.raises(ValueError, match="policy"):
        ShadowCaches(running, [Shadow(10, "newest")])
    assert "add_sequence" not in vars(running)


def test_the_numbers_are_exported_for_prometheus():
    prometheus = pytest.importorskip("prometheus_client")
    registry = prometheus.CollectorRegistry()
    with ShadowCaches(manager(), [Shadow(4, "lru"), Shadow(100, "lfu")], rate=1.0) as shadows:
        registry.register(ShadowCollector(shadows))
        serve(shadows._manager, hashed([1, 2], [1, 2], [1, 3]))
        text = prometheus.generate_latest(registry).decode()
    assert 'kvist:shadow_hit_blocks{num_blocks="4",policy="lru"} 3.0' in text
    assert 'kvist:shadow_hit_blocks{num_blocks="100",policy="lfu"} 3.0' in text
    assert "kvist:shadow_query_blocks_total 6.0" in text
    assert "kvist:shadow_sampled_blocks_total 6.0" in text
    assert "kvist:shadow_failures_total 0.0" in text


@pytest.mark.slow
def test_shadows_come_near_the_replays_of_the_mooncake_conversations():
    trace = open_trace(traces_folder() / "mooncake" / "conversation_trace.jsonl.gz")
    asked = [Shadow(10_000, "lru"), Shadow(10_000, "lfu"), Shadow(40_000, "s3fifo")]
    with ShadowCaches(manager(num_blocks=1_000, block_size=512, max_sequence_length=512_000), asked) as shadows:
        serve(shadows._manager, trace)
    for stats in shadows.stats():
        config = ReplayConfig(num_blocks=stats.shadow.num_blocks, policy=stats.shadow.policy, content="blocks")
        assert stats.hit_rate == pytest.approx(replay(trace, config).hit_rate_blocks, abs=0.02)
