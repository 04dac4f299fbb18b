"""Makes a Grafana dashboard of what `CacheCollector` gives: `python -m kvist.wire.dashboard > kvist.json`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["PANELS", "Panel", "dashboard"]


@dataclass(frozen=True, slots=True)
class Panel:
    """One graph: its PromQL by legend, in a Grafana unit; `SELECTOR` in an expression are the chosen labels."""

    title: str
    queries: Mapping[str, str]
    unit: str = "short"
    told: str = ""
    maximum: float | None = None
    is_stacked: bool = False


def _rate(name: str, by: str = "") -> str:
    rate = f"rate(kvist:{name}_total{{SELECTOR}}[$__rate_interval])"
    return f"sum by ({by}) ({rate})" if by else f"sum({rate})"


PANELS = (
    Panel(
        "Prefix cache hit rate",
        {
            "all prompts": f"{_rate('prefix_cache_hits')} / {_rate('prefix_cache_queries')}",
            "last 1,000 prompts": "avg(kvist:cache_hit_rate{SELECTOR})",
        },
        unit="percentunit",
        told="Share of the prompts' tokens that were reused.",
        maximum=1.0,
    ),
    Panel(
        "Usage by tier",
        {
            "{{tier}}, holds something": "sum by (tier) (kvist:tier_used_blocks{SELECTOR}) "
            "/ sum by (tier) (kvist:tier_blocks{SELECTOR})",
            "device, in use": "avg(kvist:kv_cache_usage_perc{SELECTOR})",
            "{{store}}, bytes": "sum by (store) (kvist:store_bytes{SELECTOR}) "
            "/ sum by (store) (kvist:store_capacity_bytes{SELECTOR})",
        },
        unit="percentunit",
        told="Share of each tier that holds something, and of the device that running sequences and pins hold.",
        maximum=1.0,
    ),
    Panel(
        "Evictions by reason",
        {"{{reason}}": _rate("evicted_blocks", "reason"), "from {{tier}}": _rate("tier_evicted_blocks", "tier")},
        told="Blocks a second that left the device, and positions that slower tiers forgot.",
        is_stacked=True,
    ),
    Panel(
        "Misses by class",
        {"{{reason}}": _rate("prefix_cache_misses", "reason")},
        told="Tokens of prompts a second that had to be computed, by why they were not there.",
        is_stacked=True,
    ),
    Panel(
        "Preemptions",
        {
            "suspended": _rate("num_preemptions"),
            "resumed": _rate("num_resumed"),
            "waiting": "sum(kvist:num_requests_suspended{SELECTOR})",
        },
        told="Sequences a second that had to give their blocks back, and came back.",
    ),
    Panel(
        "Tokens computed again",
        {"tokens": _rate("recomputed_tokens")},
        told="What preemptions have cost: tokens a second.",
    ),
    Panel(
        "Store latency",
        {"{{store}}": f"{_rate('store_seconds', 'store')} / {_rate('store_calls', 'store')}"},
        unit="s",
        told="Mean time of a store's calls.",
    ),
    Panel(
        "Stores",
        {
            f"{{{{store}}}}, {name}": _rate(f"store_{name}", "store")
            for name in ("hits", "misses", "put", "refused", "timeouts", "errors", "corrupt")
        },
        told="Blocks a second that stores had, had not, took and did not take; and calls that failed.",
    ),
    Panel(
        "Moves between device and host",
        {"to {{tier}}": _rate("demoted_blocks", "tier"), "from {{tier}}": _rate("promoted_blocks", "tier")},
        told="Positions of blocks a second.",
    ),
    Panel(
        "Sequences",
        {
            "running": "sum(kvist:num_requests_running{SELECTOR})",
            "admitted a second": _rate("num_requests"),
        },
    ),
    Panel(
        "Usage by group",
        {"group {{group}}, {{kind}}": "avg by (group, kind) (kvist:group_usage_perc{SELECTOR})"},
        unit="percentunit",
        told="Share of each group's blocks that running sequences and pins hold.",
        maximum=1.0,
    ),
    Panel(
        "Events",
        {
            "{{publisher}}, published": _rate("event_batches_published", "publisher"),
            "{{publisher}}, dropped": _rate("event_batches_dropped", "publisher"),
            "{{publisher}}, sent again": _rate("event_batches_replayed", "publisher"),
            "{{publisher}}, waiting": "sum by (publisher) (kvist:event_batches_waiting{SELECTOR})",
        },
        told="Batches of events a second; those that were dropped show to subscribers as gaps.",
    ),
)
"""What the dashboard shows, two in a row."""

_DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
_WIDTH, _HEIGHT = 12, 8


def dashboard(title: str = "Kvist", selector: str = "") -> dict[str, Any]:
    """Return a dashboard as Grafana imports it.

    `selector` are label matchers for every query, such as `'model_name="llama"'`; without, the dashboard asks for an
    instance of those that Prometheus scrapes.

    >>> [panel["title"] for panel in dashboard()["panels"]][:2]
    ['Prefix cache hit rate', 'Usage by tier']
    """
    chosen = selector or 'instance=~"$instance"'
    variables = [_datasource_variable()] + ([] if selector else [_instance_variable()])
    return {
        "title": title,
        "uid": "kvist-kv-cache",
        "tags": ["kvist", "kv cache"],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": variables},
        "annotations": {"list": []},
        "panels": [_panel(number, panel, chosen) for number, panel in enumerate(PANELS)],
    }


def _panel(number: int, panel: Panel, selector: str) -> dict[str, Any]:
    row, column = divmod(number, 2)
    custom: dict[str, Any] = {"fillOpacity": 10}
    if panel.is_stacked:
        custom["stacking"] = {"mode": "normal", "group": "A"}
    defaults: dict[str, Any] = {"unit": panel.unit, "min": 0, "custom": custom}
    if panel.maximum is not None:
        defaults["max"] = panel.maximum
    return {
        "id": number + 1,
        "type": "timeseries",
        "title": panel.title,
        "description": panel.told,
        "datasource": _DATASOURCE,
        "gridPos": {"x": column * _WIDTH, "y": row * _HEIGHT, "w": _WIDTH, "h": _HEIGHT},
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
        "targets": [
            {
                "refId": chr(ord("A") + index),
                "datasource": _DATASOURCE,
                "expr": expression.replace("SELECTOR", selector),
                "legendFormat": legend,
            }
            for index, (legend, expression) in enumerate(panel.queries.items())
        ],
    }


def _datasource_variable() -> dict[str, Any]:
    return {"name": "datasource", "label": "Prometheus", "type": "datasource", "query": "prometheus"}


def _instance_variable() -> dict[str, Any]:
    query = "label_values(kvist:kv_cache_usage_perc, instance)"
    return {
        "name": "instance",
        "label": "Instance",
        "type": "query",
        "datasource": _DATASOURCE,
        "query": {"query": query, "refId": "instances"},
        "definition": query,
        "includeAll": True,
        "allValue": ".*",
        "multi": True,
        "refresh": 2,
        "current": {"text": "All", "value": "$__all"},
    }


if __name__ == "__main__":
    print(json.dumps(dashboard(), indent=2))
