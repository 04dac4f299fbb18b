"""Rows of a benchmark: a value beside its reference and its target, printed as a table or as JSON."""

from __future__ import annotations

import argparse
import json
import os
import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from kvist.core import tree

__all__ = [
    "LEANEST",
    "AtMost",
    "AtMostTimes",
    "Options",
    "Row",
    "Target",
    "TimesFaster",
    "machine",
    "machine_line",
    "main",
    "table",
]

LEANEST = "  against the leanest form we could write"
TRACE_VARIABLE = "KVIST_BENCH_TRACE"


class Target(Protocol):
    """What a value has to reach; says itself in words."""

    def holds(self, value: float, reference: float) -> bool:
        """Whether a value, beside its reference in the same unit, reaches the target."""
        ...

    def ratio(self, value: float, reference: float) -> float:
        """The ratio that the target speaks of."""
        ...


@dataclass(frozen=True, slots=True)
class AtMost:
    """An absolute limit in the row's unit; the ratio is value to reference."""

    limit: float
    unit: str

    def holds(self, value: float, reference: float) -> bool:
        return value <= self.limit

    def ratio(self, value: float, reference: float) -> float:
        return value / reference

    def __str__(self) -> str:
        return f"at most {self.limit:g} {self.unit}"


@dataclass(frozen=True, slots=True)
class AtMostTimes:
    """At most so many times the reference, and a constant in the row's unit; the ratio is value to reference."""

    factor: float
    constant: float = 0.0
    unit: str = ""

    def holds(self, value: float, reference: float) -> bool:
        return value <= self.factor * reference + self.constant

    def ratio(self, value: float, reference: float) -> float:
        return value / reference

    def __str__(self) -> str:
        return f"at most {self.factor:g}x" + (f" + {self.constant:g} {self.unit}" if self.constant else "")


@dataclass(frozen=True, slots=True)
class TimesFaster:
    """At least so many times faster than the reference; the ratio is reference to value."""

    factor: float

    def holds(self, value: float, reference: float) -> bool:
        return value * self.factor <= reference

    def ratio(self, value: float, reference: float) -> float:
        return reference / value

    def __str__(self) -> str:
        return f"at least {self.factor:g}x faster"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One measured line. `target` None: shown for information; `goal` is what we would like to reach, in `unit`.

    `ratio_as` gives a line without a target its ratio in the sense of another line's target.
    """

    name: str
    value: float
    unit: str
    reference: float
    reference_name: str
    target: Target | None = None
    ratio_as: Target | None = None
    goal: float | None = None
    note: str = ""

    @property
    def ratio(self) -> float:
        sense = self.target or self.ratio_as
        return self.value / self.reference if sense is None else sense.ratio(self.value, self.reference)

    @property
    def holds(self) -> bool | None:
        return None if self.target is None else self.target.holds(self.value, self.reference)

    def as_json(self) -> dict[str, str | float | bool | None]:
        """The row as plain values; `ratio` is in the sense of `target` or `ratio_as`; without, value to reference."""
        return {
            "name": self.name,
            "value": self.value,
            "unit": self.unit,
            "reference": self.reference,
            "reference_name": self.reference_name,
            "ratio": self.ratio,
            "target": None if self.target is None else str(self.target),
            "holds": self.holds,
            "goal": self.goal,
            "note": self.note,
        }


@dataclass(frozen=True, slots=True)
class Options:
    """How a benchmark is to be run: `quick` takes small sizes and few repetitions, `trace` names a request trace."""

    quick: bool = False
    trace: Path | None = None


def main(benchmark: str, measure: Callable[[Options], list[Row]], description: str | None) -> None:
    """Run one benchmark from the command line."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.add_argument(
        "--quick", action="store_true", help="small sizes, few repetitions: shows that it runs, not how fast"
    )
    parser.add_argument(
        "--trace", type=Path, default=trace_from_environment(), help="request trace (JSON lines with hash_ids)"
    )
    arguments = parser.parse_args()
    rows = measure(Options(quick=arguments.quick, trace=arguments.trace))
    records = [row.as_json() for row in rows]
    if arguments.json:
        print(json.dumps({"benchmark": benchmark, "quick": arguments.quick, **machine(), "rows": records}, indent=2))
    else:
        print(f"{machine_line(machine())}\n\n{table(records)}")


def trace_from_environment() -> Path | None:
    """The trace that the environment names, if it names one."""
    path = os.environ.get(TRACE_VARIABLE)
    return Path(path) if path else None


def machine() -> dict[str, str | int]:
    """What the numbers were measured on; the kind of processor is known on Linux only."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    facts = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in reversed(lines))}
    return {
        "python": platform.python_version(),
        "numpy": np.__version__,
        "machine": platform.machine(),
        "processor": facts.get("model name", "unknown"),
        "cores": os.cpu_count() or 0,
        "core": "plain" if (tree.__file__ or "").endswith(".py") else "compiled",
        "sha_instructions": sha_instructions(facts.get("flags") or facts.get("Features") or ""),
    }


def sha_instructions(flags: str) -> str:
    """Whether the processor hashes SHA-256 in hardware, by the flags that Linux lists."""
    return "unknown" if not flags else "yes" if {"sha_ni", "sha2"} & set(flags.split()) else "no"


def machine_line(facts: dict[str, str | int]) -> str:
    """The machine in one line."""
    software = f"Kvist's core {facts['core']}, Python {facts['python']}, NumPy {facts['numpy']}"
    hardware = f"{facts['processor']}, {facts['machine']}, {facts['cores']} cores"
    return f"{software}; {hardware}, SHA instructions: {facts['sha_instructions']}"


def table(records: Sequence[dict[str, str | float | bool | None]]) -> str:
    """Lay rows out in columns; notes follow their row."""
    header = ("name", "value", "unit", "reference", "ratio", "target", "holds")
    cells = [header, *(_cells(record) for record in records)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(header))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in cells]
    return "\n".join(
        [lines[0], "-" * len(lines[0]), *(_with_note(*pair) for pair in zip(lines[1:], records, strict=True))]
    )


def _cells(record: dict[str, str | float | bool | None]) -> tuple[str, ...]:
    target, goal, ratio = record["target"], record["goal"], record["ratio"]
    wanted = ([str(target)] if target else []) + ([f"goal {goal:g} {record['unit']}"] if goal is not None else [])
    holds = {None: "-", True: "yes", False: "NO"}[record["holds"]]  # type: ignore[index]
    reference = f"{_number(record['reference'])} {record['reference_name']}"
    return (
        str(record["name"]),
        _number(record["value"]),
        str(record["unit"]),
        reference,
        _ratio(ratio),
        ", ".join(wanted) or "-",
        holds,
    )


def _ratio(ratio: object) -> str:
    assert isinstance(ratio, float)
    return f"{_number(ratio)}x" if ratio >= 0.1 else f"1/{_number(1 / ratio)}x"


def _number(value: object) -> str:
    assert isinstance(value, float | int)
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _with_note(line: str, record: dict[str, str | float | bool | None]) -> str:
    return f"{line}\n    {record['note']}" if record["note"] else line
