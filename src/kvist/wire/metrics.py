"""Numbers of a manager, its tiers, stores and publishers for Prometheus.

Names are those of vLLM and SGLang where they have the same number, with the prefix `kvist:`. What they count in tokens
or blocks is counted so here:

| here | vLLM | SGLang |
|---|---|---|
| `kvist:kv_cache_usage_perc` | `vllm:kv_cache_usage_perc` | `sglang:token_usage` |
| `kvist:group_usage_perc{group, kind}` | | `sglang:full_token_usage`, `sglang:swa_token_usage`, `sglang:mamba_usage` |
| `kvist:cache_hit_rate` (last 1,000 prompts) | | `sglang:cache_hit_rate` (last batch) |
| `kvist:prefix_cache_queries_total` (tokens) | `vllm:prefix_cache_queries_total` | `sglang:prompt_tokens_total` |
| `kvist:prefix_cache_hits_total` (tokens) | `vllm:prefix_cache_hits_total` | `sglang:cached_tokens_total` |
| `kvist:prefix_cache_misses_total{reason}` (tokens) | | |
| `kvist:num_preemptions_total` | `vllm:num_preemptions_total` | `sglang:num_retracted_requests_total` |
| `kvist:num_requests_total` | | `sglang:num_requests_total` |
| `kvist:num_requests_running` (sequences) | `vllm:num_requests_running` | `sglang:num_running_reqs` |
| `kvist:num_requests_suspended` | | `sglang:num_retracted_reqs` |
| `kvist:held_blocks` | | `sglang:kv_used_tokens` |
| `kvist:evictable_blocks` | | `sglang:kv_evictable_tokens` |
| `kvist:free_blocks` (evictable ones included) | | `sglang:kv_available_tokens` + `sglang:kv_evictable_tokens` |
| `kvist:evicted_blocks_total{reason}` | | `sglang:evicted_tokens_total` |
| `kvist:tier_blocks{tier="host"}` | | `sglang:hicache_host_total_tokens` |
| `kvist:tier_used_blocks{tier="host"}` | | `sglang:hicache_host_used_tokens` |
| `kvist:promoted_blocks_total{tier}` | | `sglang:load_back_tokens_total` |
| `kvist:store_hits_total{store}` (blocks) | `vllm:external_prefix_cache_hits_total` (tokens) | |
| the same + `kvist:store_misses_total{store}` | `vllm:external_prefix_cache_queries_total` (tokens) | |
| `kvist:store_put_total{store}` (blocks) | | `sglang:backuped_tokens_total` |
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from threading import Lock, get_ident
from typing import Any, Protocol

from kvist.core.statistics import Stats
from kvist.wire.publishing import PublisherStats

try:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
    from prometheus_client.registry import Collector
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "CacheCollector needs prometheus_client: pip install 'kvist[metrics]'", name=error.name
    ) from error

__all__ = ["CacheCollector", "METRICS", "MetricInfo"]


class Measured(Protocol):
    """What numbers are read from: a manager."""

    def stats(self) -> Stats:
        """Return the numbers of now."""


class Counted(Protocol):
    """What publishes."""

    def stats(self) -> PublisherStats:
        """Return what was done so far."""


@dataclass(frozen=True, slots=True)
class MetricInfo:
    """One metric: its name without prefix and `_total`, its kind, its own labels and what it says."""

    name: str
    is_counter: bool
    labels: tuple[str, ...]
    told: str

    @property
    def full_name(self) -> str:
        """The name under which it is stored."""
        return f"kvist:{self.name}{'_total' if self.is_counter else ''}"


def _infos(is_counter: bool, labels: tuple[str, ...], told: Mapping[str, str]) -> list[MetricInfo]:
    return [MetricInfo(name, is_counter, labels, text) for name, text in told.items()]


_STORE_COUNTS = {
    "hits": "Blocks that a store had.",
    "misses": "Blocks that a store was asked for and did not have.",
    "put": "Blocks that a store took.",
    "refused": "Blocks that a store, or the queue before it, did not take.",
    "evicted": "Blocks that a store forgot to make room.",
    "corrupt": "Entries that were not whole, or not what they should be.",
    "errors": "Calls that failed.",
    "timeouts": "Calls that were given up.",
    "calls": "Calls that ended, for the mean of their time.",
}

METRICS: Mapping[str, MetricInfo] = {
    info.name: info
    for info in [
        *_infos(
            False,
            (),
            {
                "kv_cache_usage_perc": "Share of the device's blocks that sequences and pins hold, 0 to 1.",
                "cache_hit_rate": "Share of the tokens of the last 1,000 prompts that were reused, 0 to 1.",
                "num_requests_running": "Sequences that are running.",
                "num_requests_suspended": "Sequences that are suspended.",
                "num_pins": "Pins.",
                "num_extents": "Runs of blocks in the prefix tree.",
                "held_blocks": "Blocks on the device that sequences and pins hold.",
                "pinned_blocks": "Blocks on the device that pins hold.",
                "evictable_blocks": "Blocks on the device that are cached and not held.",
                "free_blocks": "Blocks on the device that an allocation could take: empty or evictable.",
            },
        ),
        *_infos(
            False, ("group", "kind"), {"group_usage_perc": "Share of a group's blocks that are held, 0 to 1; by group."}
        ),
        *_infos(
            False,
            ("tier",),
            {
                "tier_blocks": "Blocks that a tier has room for.",
                "tier_used_blocks": "Blocks of a tier that hold something, cached or in use.",
                "tier_usage_perc": "Share of a tier's blocks that hold something, 0 to 1.",
            },
        ),
        *_infos(
            False,
            ("store",),
            {
                "store_entries": "Blocks that a store holds, as far as it knows.",
                "store_bytes": "Bytes of contents that a store holds, as far as it knows.",
                "store_capacity_bytes": "Bytes of contents that a store has room for.",
            },
        ),
        *_infos(
            True,
            (),
            {
                "prefix_cache_queries": "Tokens of admitted prompts.",
                "prefix_cache_hits": "Tokens of admitted prompts that were reused.",
                "num_requests": "Prompts that were admitted.",
                "num_preemptions": "Sequences that were suspended.",
                "num_resumed": "Suspended sequences that went on.",
                "recomputed_tokens": "Tokens that resumed sequences had to compute again.",
                "shared_blocks": "Blocks that were computed although their content was there.",
                "policy_failures": "Exceptions of a caller's eviction policy.",
            },
        ),
        *_infos(
            True,
            ("group", "kind"),
            {
                "allocated_blocks": "Blocks that were allocated.",
                "new_blocks": "Blocks that were allocated without an eviction.",
                "reused_blocks": "Blocks of prompts that were shared.",
                "missed_blocks": "Blocks of prompts that had to be allocated.",
            },
        ),
        *_infos(
            True,
            ("reason",),
            {
                "prefix_cache_misses": "Tokens of admitted prompts that were not reused, by why.",
                "evicted_blocks": "Blocks that left the device's cache, by why.",
            },
        ),
        *_infos(
            True,
            ("tier",),
            {
                "demoted_blocks": "Positions of blocks that came to a tier from a faster one.",
                "promoted_blocks": "Positions of blocks that went from a tier to a faster one.",
                "tier_evicted_blocks": "Positions of blocks that a tier forgot.",
                "tier_refused_blocks": "Positions of blocks that a tier did not take.",
                "copied_blocks": "Positions of blocks that were copied to a tier while a faster one kept them.",
            },
        ),
        *_infos(True, ("store",), {f"store_{name}": told for name, told in _STORE_COUNTS.items()}),
        *_infos(True, ("store",), {"store_seconds": "Time that calls of a store took, together."}),
        *_infos(
            True,
            ("publisher",),
            {
                "event_batches_published": "Batches of events that were handed over.",
                "event_batches_dropped": "Batches of events that found no room, or could not be made or handed over.",
                "event_batches_replayed": "Batches of events that were sent again.",
                "event_replays": "Requests for past batches of events.",
                "event_errors": "Failures in publishing.",
            },
        ),
        *_infos(False, ("publisher",), {"event_batches_waiting": "Batches of events that wait to be published."}),
    ]
}
"""Every metric by its name; those of stores are there as far as a store counts them."""

_Labels = tuple[str, ...]
_Sample = tuple[str, _Labels, float]


class CacheCollector(Collector):
    """Gives Prometheus the numbers of one manager: `REGISTRY.register(CacheCollector(manager))`.

    A manager belongs to one thread, and scrapes come on another. So the thread that makes the collector reads the
    manager, then and at each `observe`, which an engine calls once in a while, such as every second between steps; a
    scrape on that thread reads anew, and one on any other gets what was last seen. Stores, which may be slow to say
    what they hold, and publishers, by name, are read by each scrape. Counters go on after `manager.reset()`, and never
    go down; what was counted between the last look and the reset is missing. `labels`, such as
    `{"model_name": "...", "engine": "0"}`, are on all.
    """

    def __init__(
        self,
        manager: Measured,
        *,
        labels: Mapping[str, str] | None = None,
        publishers: Mapping[str, Counted] | None = None,
    ) -> None:
        self._manager = manager
        self._store_stats: Callable[[], Mapping[str, Any]] = getattr(manager, "store_stats", dict)
        self._labels = dict(labels or {})
        self._publishers = dict(publishers or {})
        self._rising, self._rising_beside = _Rising(), _Rising()
        self._lock = Lock()
        self._seen: list[_Sample] = []
        self.observe()

    def observe(self) -> None:
        """Read the manager, on the thread that it belongs to."""
        self._reader = get_ident()
        seen = list(_of_manager(self._manager.stats()))
        with self._lock:
            self._seen = self._rising.raised(seen)

    def collect(self) -> Iterator[Metric]:
        """Yield every metric that has a value, with what was last seen."""
        if get_ident() == self._reader:
            self.observe()
        beside = [*_of_stores(self._store_stats()), *_of_publishers(self._publishers)]
        with self._lock:
            samples = [*self._seen, *self._rising_beside.raised(beside)]
        families: dict[str, CounterMetricFamily | GaugeMetricFamily] = {}
        for name, labels, value in samples:
            if name not in families:
                families[name] = self._family(METRICS[name])
            families[name].add_metric([*self._labels.values(), *labels], value)
        yield from families.values()

    def _family(self, info: MetricInfo) -> CounterMetricFamily | GaugeMetricFamily:
        kind = CounterMetricFamily if info.is_counter else GaugeMetricFamily
        return kind(f"kvist:{info.name}", info.told, labels=[*self._labels, *info.labels])


class _Rising:
    """Makes counters that begin again into such that go on."""

    def __init__(self) -> None:
        self._last: dict[tuple[str, _Labels], float] = {}
        self._before: dict[tuple[str, _Labels], float] = {}

    def raised(self, samples: list[_Sample]) -> list[_Sample]:
        """Return the samples, those of counters with what they had counted before they began again.

        A counter that is not among them, such as evictions for a reason that has not come up since, keeps its value.
        """
        seen = dict.fromkeys(self._last, 0.0) | {(name, labels): value for name, labels, value in samples}
        for key, value in seen.items():
            if METRICS[key[0]].is_counter:
                last = self._last.get(key, 0.0)
                self._before[key] = self._before.get(key, 0.0) + (last if value < last else 0.0)
                self._last[key] = value
        return [(*key, value + self._before.get(key, 0.0)) for key, value in seen.items()]


def _of_manager(stats: Stats) -> Iterator[_Sample]:
    yield "kv_cache_usage_perc", (), stats.usage
    yield "cache_hit_rate", (), stats.recent_token_hit_rate
    yield "num_requests_running", (), stats.num_sequences
    yield "num_requests_suspended", (), stats.num_suspended_now
    yield "num_pins", (), stats.num_pins
    yield "num_extents", (), stats.num_extents
    yield "held_blocks", (), stats.num_held_blocks
    yield "pinned_blocks", (), stats.num_pinned_blocks
    yield "evictable_blocks", (), stats.num_evictable_blocks
    yield "free_blocks", (), stats.num_free_blocks
    yield "prefix_cache_queries", (), stats.num_query_tokens
    yield "prefix_cache_hits", (), stats.num_hit_tokens
    yield "num_requests", (), stats.num_admitted
    yield "num_preemptions", (), stats.num_suspended
    yield "num_resumed", (), stats.num_resumed
    yield "recomputed_tokens", (), stats.num_recomputed_tokens
    yield "shared_blocks", (), stats.num_shared_blocks
    yield "policy_failures", (), stats.num_policy_failures
    for reason, num_tokens in stats.misses.items():
        yield "prefix_cache_misses", (reason,), num_tokens
    for reason, num_blocks in stats.evictions.items():
        yield "evicted_blocks", (reason,), num_blocks
    yield from _of_groups(stats)
    yield from _of_tiers(stats)


def _of_groups(stats: Stats) -> Iterator[_Sample]:
    for index, group in enumerate(stats.groups):
        labels = (str(index), group.kind)
        yield "group_usage_perc", labels, group.usage
        yield "allocated_blocks", labels, group.num_allocated_blocks
        yield "new_blocks", labels, group.num_new_blocks
        yield "reused_blocks", labels, group.num_reused_blocks
        yield "missed_blocks", labels, group.num_missed_blocks


def _of_tiers(stats: Stats) -> Iterator[_Sample]:
    on_device = stats.num_held_blocks + stats.num_evictable_blocks
    filled = [("device", stats.num_blocks, on_device)]
    filled += [(tier.name, tier.num_blocks, tier.num_used_blocks) for tier in stats.tiers]
    for name, num_blocks, num_used in filled:
        yield "tier_blocks", (name,), num_blocks
        yield "tier_used_blocks", (name,), num_used
        yield "tier_usage_perc", (name,), num_used / num_blocks if num_blocks else 0.0
    for tier in stats.tiers:
        yield "demoted_blocks", (tier.name,), tier.num_demoted_blocks
        yield "promoted_blocks", (tier.name,), tier.num_promoted_blocks
        yield "tier_evicted_blocks", (tier.name,), tier.num_evicted_blocks
        yield "tier_refused_blocks", (tier.name,), tier.num_refused_blocks
        yield "copied_blocks", (tier.name,), tier.num_copied_blocks


def _of_stores(stores: Mapping[str, Any]) -> Iterator[_Sample]:
    for name, stats in stores.items():
        yield "store_entries", (name,), stats.num_entries
        yield "store_bytes", (name,), stats.num_bytes
        if stats.capacity_bytes is not None:
            yield "store_capacity_bytes", (name,), stats.capacity_bytes
        for counter in _STORE_COUNTS:
            if (value := getattr(stats, f"num_{counter}", None)) is not None:
                yield f"store_{counter}", (name,), value
        if (seconds := getattr(stats, "seconds", None)) is not None:
            yield "store_seconds", (name,), seconds


def _of_publishers(publishers: Mapping[str, Counted]) -> Iterator[_Sample]:
    for name, publisher in publishers.items():
        stats = publisher.stats()
        yield "event_batches_published", (name,), stats.num_published
        yield "event_batches_dropped", (name,), stats.num_dropped
        yield "event_batches_replayed", (name,), stats.num_replayed
        yield "event_replays", (name,), stats.num_replays
        yield "event_errors", (name,), stats.num_errors
        yield "event_batches_waiting", (name,), stats.num_waiting
