"""What Prometheus and Grafana are given, and spans."""

import builtins
import json
import re
import subprocess
import sys
from dataclasses import dataclass
from threading import Thread

import prometheus_client as prometheus
import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvist import AttentionSpec, CacheConfig, HostTier, KVCacheManager
from kvist.wire import metrics, tracing
from kvist.wire.dashboard import PANELS, dashboard
from kvist.wire.metrics import METRICS, CacheCollector
from kvist.wire.publishing import PublisherStats


def manager_of(num_blocks=8, **settings):
    return KVCacheManager(CacheConfig([AttentionSpec(1, 8)], block_size=4, num_blocks=num_blocks, **settings))


def run(manager, tokens):
    sequence = manager.add_sequence(tokens)
    manager.commit([sequence])
    manager.free(sequence)


def scraped(collector):
    """Every sample of a scrape by name and labels, as Prometheus reads it."""
    registry = prometheus.CollectorRegistry()
    registry.register(collector)
    text = prometheus.generate_latest(registry).decode()
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


@dataclass
class Store:
    """Numbers of a store, some of which only some stores have."""

    num_entries: int = 3
    num_bytes: int = 300
    capacity_bytes: int | None = 1000
    num_hits: int = 5
    num_misses: int = 2
    num_put: int = 9
    num_calls: int = 4
    seconds: float = 0.5


class Scripted:
    """A manager whose numbers a test sets."""

    def __init__(self, manager):
        self.manager, self.stores = manager, {}

    def stats(self):
        return self.manager.stats()

    def store_stats(self):
        return self.stores


# -- Prometheus -------------------------------------------------------------------------------------------------------


def test_hits_misses_and_usage_are_those_of_the_manager():
    manager = manager_of()
    run(manager, list(range(8)))
    manager.add_sequence([*range(8), 9])
    seen = scraped(CacheCollector(manager))
    assert seen["kvist:prefix_cache_queries_total",] == 8 + 9
    assert seen["kvist:prefix_cache_hits_total",] == 8
    assert seen["kvist:prefix_cache_misses_total", "cold"] == 7
    assert seen["kvist:num_requests_total",] == 2
    assert seen["kvist:num_requests_running",] == 1
    assert seen["kvist:kv_cache_usage_perc",] == 3 / 8
    assert seen["kvist:tier_used_blocks", "device"] == 3
    assert seen["kvist:reused_blocks_total", "0", "full"] == 2


def test_evictions_are_counted_by_reason():
    manager = manager_of(num_blocks=4)
    for first in range(0, 100, 20):
        run(manager, list(range(first, first + 12)))
    manager.evict(1)
    seen = scraped(CacheCollector(manager))
    assert seen["kvist:evicted_blocks_total", "made room"] == manager.stats().evictions["made room"] > 0
    assert seen["kvist:evicted_blocks_total", "asked for"] == 1


def test_host_memory_is_a_tier():
    manager = manager_of(num_blocks=4, tiers=[HostTier(num_blocks=8)])
    for first in range(0, 100, 20):
        run(manager, list(range(first, first + 12)))
    seen = scraped(CacheCollector(manager))
    (host,) = manager.stats().tiers
    assert seen["kvist:tier_blocks", "host"] == 8
    assert seen["kvist:tier_usage_perc", "host"] == host.num_used_blocks / 8
    assert seen["kvist:demoted_blocks_total", "host"] == host.num_demoted_blocks > 0


def test_preemptions_are_sequences_that_were_suspended():
    manager = manager_of()
    sequence = manager.add_sequence([1, 2, 3, 4, 5])
    manager.commit([sequence])
    manager.suspend(sequence)
    seen = scraped(CacheCollector(manager))
    assert seen["kvist:num_preemptions_total",] == 1
    assert seen["kvist:num_requests_suspended",] == 1


def test_stores_are_told_as_far_as_they_count():
    manager = Scripted(manager_of())
    manager.stores = {"disk": Store(), "valkey": Store(capacity_bytes=None, num_calls=None, seconds=None)}
    seen = scraped(CacheCollector(manager))
    assert seen["kvist:store_hits_total", "disk"] == 5
    assert seen["kvist:store_put_total", "valkey"] == 9
    assert seen["kvist:store_seconds_total", "disk"] == 0.5
    assert ("kvist:store_seconds_total", "valkey") not in seen
    assert ("kvist:store_capacity_bytes", "valkey") not in seen


def test_publishers_are_told_by_name():
    class Publisher:
        def stats(self):
            return PublisherStats(num_published=7, num_dropped=2, num_waiting=1)

    seen = scraped(CacheCollector(manager_of(), publishers={"zmq": Publisher()}))
    assert seen["kvist:event_batches_published_total", "zmq"] == 7
    assert seen["kvist:event_batches_dropped_total", "zmq"] == 2
    assert seen["kvist:event_batches_waiting", "zmq"] == 1


def test_labels_of_the_caller_are_on_everything():
    seen = scraped(CacheCollector(manager_of(), labels={"model_name": "m", "engine": "0"}))
    assert seen["kvist:num_requests_total", "0", "m"] == 0
    assert all({"m", "0"} <= set(key) for key in seen)


def test_counters_go_on_after_a_reset():
    manager = manager_of(num_blocks=4)
    collector = CacheCollector(manager)
    before = {}
    for _ in range(3):
        for first in range(0, 100, 20):
            run(manager, list(range(first, first + 12)))
            seen = scraped(collector)
            counters = {key: value for key, value in seen.items() if key[0].endswith("_total")}
            assert all(counters[key] >= value for key, value in before.items())
            before = counters
        manager.reset()
    assert before["kvist:prefix_cache_queries_total",] == 3 * 5 * 12
    assert before["kvist:num_requests_total",] == 15


def test_counters_of_stores_that_are_opened_anew_go_on():
    manager = Scripted(manager_of())
    manager.stores = {"disk": Store(num_hits=5)}
    collector = CacheCollector(manager)
    found = []
    for stores in ({"disk": Store(num_hits=5)}, {"disk": Store(num_hits=2)}, {}, {"disk": Store(num_hits=3)}):
        manager.stores = stores
        found.append(scraped(collector)["kvist:store_hits_total", "disk"])
    assert found == [5, 7, 7, 10]


def test_another_thread_sees_what_the_managers_thread_has_last_seen():
    manager = manager_of()
    collector = CacheCollector(manager)
    run(manager, [1, 2, 3, 4, 5])

    def elsewhere():
        seen = []
        thread = Thread(target=lambda: seen.append(scraped(collector)["kvist:num_requests_total",]))
        thread.start()
        thread.join()
        return seen[0]

    assert elsewhere() == 0
    collector.observe()
    assert elsewhere() == 1


def test_every_metric_is_given_by_a_manager_with_everything():
    class Publisher:
        stats = PublisherStats

    class Everything(Store):
        num_refused = num_evicted = num_corrupt = num_errors = num_timeouts = 0

    manager = manager_of(num_blocks=4, tiers=[HostTier(num_blocks=8)])
    for first in range(0, 100, 20):
        run(manager, list(range(first, first + 12)))
    scripted = Scripted(manager)
    scripted.stores = {"disk": Everything()}
    seen = {key[0] for key in scraped(CacheCollector(scripted, publishers={"zmq": Publisher()}))}
    assert seen == {info.full_name for info in METRICS.values()}


def test_the_table_of_names_names_metrics_that_there_are():
    named = set(re.findall(r"`(kvist:\w+)", metrics.__doc__))
    assert len(named) > 15
    assert named <= {info.full_name for info in METRICS.values()}


# -- Grafana ----------------------------------------------------------------------------------------------------------


def expressions(board):
    return [target["expr"] for panel in board["panels"] for target in panel["targets"]]


def test_the_dashboard_is_json_with_a_panel_for_each_question():
    board = json.loads(json.dumps(dashboard()))
    titles = [panel["title"] for panel in board["panels"]]
    wanted = {"Prefix cache hit rate", "Usage by tier", "Evictions by reason", "Misses by class", "Preemptions"}
    assert wanted | {"Store latency"} <= set(titles)
    assert len({panel["id"] for panel in board["panels"]}) == len(titles) == len(PANELS)
    places = [tuple(panel["gridPos"].values()) for panel in board["panels"]]
    assert len(set(places)) == len(places)
    assert all(x + width <= 24 for x, _, width, _ in places)


def test_the_dashboard_asks_for_metrics_and_labels_that_there_are():
    infos = {info.full_name: info for info in METRICS.values()}
    for expression in expressions(dashboard()):
        names = re.findall(r"kvist:\w+", expression)
        assert names
        for name in names:
            assert ("rate(" + name in expression) == infos[name].is_counter
        for by in re.findall(r"by \(([^)]*)\)", expression):
            assert set(by.split(", ")) <= set(infos[names[0]].labels)
        assert expression.count("(") == expression.count(")")
        assert expression.count('{instance=~"$instance"}') == len(names)


def test_a_selector_takes_the_place_of_the_instance():
    board = dashboard("Llama", 'model_name="llama"')
    assert all('{model_name="llama"}' in expression for expression in expressions(board))
    assert [variable["name"] for variable in board["templating"]["list"]] == ["datasource"]


def test_the_dashboard_can_be_printed():
    printed = subprocess.run(
        [sys.executable, "-m", "kvist.wire.dashboard"], capture_output=True, text=True, check=True
    ).stdout
    assert json.loads(printed) == dashboard()


# -- spans ------------------------------------------------------------------------------------------------------------


def use(traced):
    """What an engine does with spans."""
    request = traced.begin("kvist.request", num_prompt_tokens=5)
    with traced.span("kvist.step", num_tokens=5) as step:
        step.note(num_cached_tokens=4)
        step.event("preempted", priority=1)
    with pytest.raises(ValueError, match="wrong"), traced.span("kvist.step"):
        raise ValueError("wrong")
    request.end(RuntimeError("aborted"))
    request.end()


def test_without_the_package_spans_do_nothing(monkeypatch):
    real = builtins.__import__

    def missing(name, *args, **kwargs):
        if name.startswith("opentelemetry"):
            raise ModuleNotFoundError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", missing)
    assert tracing.tracing() is tracing.NO_TRACING
    use(tracing.tracing())


def test_with_the_package_but_nothing_set_up_spans_do_nothing():
    pytest.importorskip("opentelemetry")
    use(tracing.tracing())


def test_spans_have_names_attributes_events_errors_and_parents():
    sdk = pytest.importorskip("opentelemetry.sdk.trace")
    export = pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter")
    processors = pytest.importorskip("opentelemetry.sdk.trace.export")
    exporter = export.InMemorySpanExporter()
    provider = sdk.TracerProvider()
    provider.add_span_processor(processors.SimpleSpanProcessor(exporter))
    traced = tracing.OpenTelemetryTracing(provider.get_tracer("kvist"))
    with traced.span("around"):
        use(traced)
    step, failed, request, around = exporter.get_finished_spans()
    assert (step.name, dict(step.attributes)) == ("kvist.step", {"kvist.num_tokens": 5, "kvist.num_cached_tokens": 4})
    assert [(event.name, dict(event.attributes)) for event in step.events] == [("preempted", {"kvist.priority": 1})]
    assert not failed.status.is_ok
    assert (request.name, request.status.description) == ("kvist.request", "aborted")
    assert {span.parent.span_id for span in (step, failed, request)} == {around.context.span_id}
    provider.shutdown()
