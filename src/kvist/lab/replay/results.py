"""Results of replays as tables and files, and as curves."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import numpy as np

from kvist.errors import ArgumentError
from kvist.lab.curves.curve import Curve
from kvist.lab.replay.result import ReplayResult

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["FORMATS", "curves_of", "flat", "table", "write_results"]

FORMATS = ("json", "csv", "parquet")
LEFT_OUT = ("series", "config", "by_namespace")


def flat(result: ReplayResult) -> dict[str, Any]:
    """Return a result as one row: settings are `config.<name>`, counts by reason `<what>.<reason>`; no series.

    Lists are JSON text, so that every value is a number, text, true, false or nothing.
    """
    told = result.as_dict()
    row: dict[str, Any] = {}
    for name, value in told.items():
        if isinstance(value, Mapping) and name not in LEFT_OUT:
            row |= {f"{name}.{reason}": count for reason, count in value.items()}
        elif name not in LEFT_OUT:
            row[name] = value
    for namespace, counts in told["by_namespace"].items():
        row |= {f"by_namespace.{namespace}.{name}": count for name, count in counts.items()}
    for name, value in told["config"].items():
        row[f"config.{name}"] = value if isinstance(value, str | int | float | None) else json.dumps(value)
    return row


def write_results(results: Sequence[ReplayResult], path: str | Path, format: str | None = None) -> None:
    """Write results to a file: "json" (all, with the series), "csv" or "parquet" (a row each); by its ending.

    Raises ArgumentError for another ending or format, and ModuleNotFoundError without pyarrow, for Parquet.
    """
    target = Path(path)
    chosen = format or target.suffix.lstrip(".").lower()
    if chosen not in FORMATS:
        raise ArgumentError(f"results are written as {', '.join(FORMATS)}, not as {chosen or target.name!r}")
    if chosen == "parquet":
        _write_parquet(results, target)
        return
    with target.open("w", encoding="utf-8", newline="") as file:
        if chosen == "csv":
            write_csv(results, file)
        else:
            json.dump([result.as_dict() for result in results], file, indent=1)


def write_csv(results: Sequence[ReplayResult], file: TextIO) -> None:
    """Write a header and a line for each result."""
    rows = _rows(results)
    writer = csv.DictWriter(file, list(rows[0]) if rows else ["name"], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)


def _write_parquet(results: Sequence[ReplayResult], path: Path) -> None:
    try:
        import pyarrow as pa  # type: ignore[import-untyped]
        from pyarrow import parquet
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "results as Parquet need pyarrow: pip install 'kvist[lab]'", name=error.name
        ) from error
    parquet.write_table(pa.Table.from_pylist(_rows(results)), path)


def _rows(results: Sequence[ReplayResult]) -> list[dict[str, Any]]:
    """Return the results as rows that all have the same columns."""
    rows = [flat(result) for result in results]
    columns = list(dict.fromkeys(name for row in rows for name in row))
    return [{name: row.get(name) for name in columns} for row in rows]


def table(results: Sequence[ReplayResult]) -> Table:
    """Return the results as a table of `rich`: what one compares configurations by.

    Raises ModuleNotFoundError without rich.
    """
    try:
        from rich.table import Table
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("tables need rich: pip install 'kvist[cli]'", name=error.name) from error
    found = dict.fromkeys(name for result in results for name in result.hit_tokens_by_tier)
    tiers = sorted(found, key=lambda name: {"device": 0, "host": 1}.get(name, 2))
    shown = Table(header_style="bold")
    shown.add_column("configuration", overflow="fold")
    for name in ("hit, blocks", "hit, tokens", *(f"from {tier}" for tier in tiers if len(tiers) > 1)):
        shown.add_column(name, justify="right")
    for name in ("evicted", "preempted", "never fit", "TTFT p50", "p90", "p99"):
        shown.add_column(name, justify="right")
    for result in results:
        shown.add_row(*_cells(result, tiers))
    return shown


def _cells(result: ReplayResult, tiers: Sequence[str]) -> list[str]:
    name = result.name if result.is_complete else f"{result.name} (first {result.num_requests:,} requests)"
    cells = [name, f"{result.hit_rate_blocks:.3f}", f"{result.hit_rate_tokens:.3f}"]
    total = max(result.num_prompt_tokens, 1)
    cells += [f"{result.hit_tokens_by_tier.get(tier, 0) / total:.3f}" for tier in tiers if len(tiers) > 1]
    counts = (sum(result.evictions.values()), result.num_preemptions, result.num_never_fit)
    return [*cells, *(f"{count:,}" for count in counts), *(_seconds(result.ttft_s[each]) for each in result.ttft_s)]


def _seconds(seconds: float) -> str:
    return f"{seconds * 1e3:.0f} ms" if seconds < 1 else f"{seconds:,.1f} s"


def curves_of(results: Sequence[ReplayResult]) -> list[Curve]:
    """Return the hit rate by blocks over sizes for each policy among results that differ in nothing but size.

    What else tells configurations apart is in the curve's name. Those of one size only are curves of one point.
    """
    points: dict[str, dict[int, float]] = {}
    names: dict[str, str] = {}
    for result in results:
        settings = {name: value for name, value in result.config.items() if name not in ("num_blocks", "name")}
        key = json.dumps(settings, sort_keys=True)
        size = result.config["num_blocks"]
        points.setdefault(key, {})[size if isinstance(size, int) else sum(size)] = result.hit_rate_blocks
        names[key] = _told_apart(settings)
    return [
        Curve(names[key], np.array(sorted(each), np.int64), np.array([each[size] for size in sorted(each)]))
        for key, each in points.items()
    ]


def _told_apart(settings: Mapping[str, Any]) -> str:
    parts = [str(settings["policy"])]
    parts += [f"blocks of {settings['block_size']}"] if settings["block_size"] else []
    parts += [f"+ {tier.get('name', 'host')}" for tier in settings["tiers"]]
    parts += [f"{settings['concurrency']} at once"] if settings["concurrency"] > 1 else []
    return " ".join(parts)
