"""What a report shows, cut to a size that a page can carry: plain values, for the browser, tables and plots alike."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from kvist.lab.curves import Curve, Knee, References, knee
from kvist.lab.replay import ReplayResult
from kvist.lab.report.icicle import PrefixIcicle
from kvist.lab.report.reuse import ReuseClass, reuse_classes

__all__ = ["Contents", "Named", "Replay", "contents_of"]

MAX_POINTS = 256
MAX_SERIES = 12
MAX_PARTS = 8
DIGITS = 6


@dataclass(frozen=True, slots=True)
class Named:
    """Values by name, such as a curve's `y` at `x`, with their `error` where they are estimates."""

    name: str
    x: list[float]
    y: list[float]
    error: list[float] | None = None


@dataclass(frozen=True, slots=True)
class Replay:
    """One replay: what happened in the course of time, what it missed by class, and the numbers of its end.

    `tiers` and `namespaces` have blocks at each `time`; there are at most `MAX_PARTS` of each, the last one for all
    others. `misses` are in the order of `Contents.miss_classes`.
    """

    name: str
    time: list[float]
    hit_rate: list[float]
    tiers: list[Named]
    namespaces: list[Named]
    misses: list[int]
    result: ReplayResult


@dataclass(frozen=True, slots=True)
class Contents:
    """All that is shown of a trace; `knees` are those of curves, by name, `notes` say what was left out."""

    trace: str
    block_size: int | None
    numbers: dict[str, int]
    curves: list[Named]
    knees: dict[str, Knee]
    points: list[Named]
    replays: list[Replay]
    miss_classes: list[str]
    reuse: list[ReuseClass]
    icicle: PrefixIcicle | None
    notes: list[str]


def contents_of(
    trace_name: str,
    curves: Sequence[Curve] = (),
    results: Sequence[ReplayResult] = (),
    references: References | None = None,
    tree: PrefixIcicle | None = None,
) -> Contents:
    """Gather what is to be shown; each part may be missing.

    A curve keeps 256 of its sizes, and of more than 12 replays only the first ones' course of time is shown.
    """
    classes = list(dict.fromkeys(name for result in results for name, count in result.misses.items() if count))
    return Contents(
        trace=trace_name,
        block_size=_block_size(references, tree),
        numbers=_numbers(references, results),
        curves=[_curve(curve) for curve in curves if len(curve.num_blocks)],
        knees={curve.name: found for curve in curves if (found := knee(curve)) is not None},
        points=_points(results),
        replays=[
            _replay(result, classes, is_shown=number < MAX_SERIES) for number, result in enumerate(_distinct(results))
        ],
        miss_classes=classes,
        reuse=reuse_classes(references) if references is not None and references.num_references else [],
        icicle=tree,
        notes=list(_notes(curves, results, references, tree)),
    )


def _block_size(references: References | None, tree: PrefixIcicle | None) -> int | None:
    if references is not None:
        return references.block_size
    return None if tree is None else tree.block_size


def _numbers(references: References | None, results: Sequence[ReplayResult]) -> dict[str, int]:
    numbers: dict[str, int] = {}
    if references is not None:
        numbers["requests"] = references.num_requests
        numbers["block references"] = references.num_seen or references.num_references
        numbers["different blocks"] = round(references.num_unique / references.rate)
        numbers["tokens in a block"] = references.block_size
    elif results:
        numbers["requests"] = results[0].num_requests
    if results:
        numbers["prompt tokens"] = max(result.num_prompt_tokens for result in results)
        numbers["output tokens"] = max(result.num_output_tokens for result in results)
        numbers["replays"] = len(results)
    return numbers


def _curve(curve: Curve) -> Named:
    thin = curve.thinned(MAX_POINTS)
    error = None if thin.error is None else _rounded(thin.error.tolist())
    return Named(
        curve.name, [float(size) for size in thin.num_blocks.tolist()], _rounded(thin.hit_rate.tolist()), error
    )


def _points(results: Sequence[ReplayResult]) -> list[Named]:
    """Return the hit rates of replays over their sizes, those of one policy together."""
    found: dict[str, list[tuple[float, float]]] = {}
    for result in results:
        num_blocks = result.config["num_blocks"]
        size = num_blocks if isinstance(num_blocks, int) else num_blocks[0]
        tiers = "".join(f" + {tier.get('name', 'host')}" for tier in result.config.get("tiers") or ())
        name = f"replayed {result.config.get('policy', '')}{tiers}"
        found.setdefault(name, []).append((float(size), result.hit_rate_blocks))
    return [
        Named(name, [size for size, _ in sorted(pairs)], _rounded(rate for _, rate in sorted(pairs)))
        for name, pairs in found.items()
    ]


def _distinct(results: Sequence[ReplayResult]) -> Iterator[tuple[str, ReplayResult]]:
    """Yield replays with names of their own: a name that comes again gets a number."""
    seen: dict[str, int] = {}
    for result in results:
        seen[result.name] = seen.get(result.name, 0) + 1
        yield (result.name if seen[result.name] == 1 else f"{result.name} ({seen[result.name]})"), result


def _replay(named: tuple[str, ReplayResult], classes: Sequence[str], *, is_shown: bool) -> Replay:
    name, result = named
    series = result.series if is_shown else []
    return Replay(
        name=name,
        time=_rounded(point["time_s"] for point in series),
        hit_rate=_rounded(point["hit_rate"] for point in series),
        tiers=_parts([point["occupancy"] for point in series], first=("device", "host")),
        namespaces=_parts([point["by_namespace"] for point in series]),
        misses=[int(result.misses.get(each, 0)) for each in classes],
        result=result,
    )


def _parts(points: Sequence[dict[str, int]], first: Sequence[str] = ()) -> list[Named]:
    """Return blocks by part at each point: some `first`, then the largest; of many, the smallest are put together."""
    totals: dict[str, int] = {}
    for point in points:
        for name, count in point.items():
            totals[name] = totals.get(name, 0) + count
    ranked = [name for name in first if totals.get(name)]
    ranked += sorted((name for name in totals if totals[name] and name not in first), key=lambda name: -totals[name])
    num_own = MAX_PARTS if len(ranked) <= MAX_PARTS else MAX_PARTS - 1
    own, rest = ranked[:num_own], ranked[num_own:]
    x = [float(number) for number in range(len(points))]
    parts = [Named(name, x, [float(point.get(name, 0)) for point in points]) for name in own]
    if rest:
        others = [float(sum(point.get(name, 0) for name in rest)) for point in points]
        parts.append(Named(f"{len(rest):,} others", x, others))
    return parts


def _notes(
    curves: Sequence[Curve],
    results: Sequence[ReplayResult],
    references: References | None,
    tree: PrefixIcicle | None,
) -> Iterator[str]:
    if references is not None and references.rate < 1:
        yield f"Numbers of blocks are estimates from a sample of {references.rate:.3%} of them."
    if any(curve.error is not None for curve in curves):
        yield "Bands around curves are 95 % intervals of estimates from samples."
    if len(results) > MAX_SERIES:
        yield f"Of {len(results):,} replays, the first {MAX_SERIES} are shown in the course of time."
    if incomplete := [result.name for result in results if not result.is_complete]:
        yield f"Interrupted, so that only a part of the trace was replayed: {', '.join(incomplete)}."
    if tree is not None and tree.num_shown < tree.num_runs:
        yield (
            f"Of {tree.num_runs:,} runs of blocks in the prefix tree, the {tree.num_shown:,} that most requests begin "
            "with are shown; where others are left out, a box says how many."
        )


def _rounded(values: Iterable[float]) -> list[float]:
    """Return numbers with as many digits as can be seen."""
    return [float(f"{value:.{DIGITS}g}") for value in values]
