"""The pictures of a report as files, drawn by matplotlib."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvist.errors import ArgumentError
from kvist.lab.curves import Curve, References
from kvist.lab.replay import ReplayResult
from kvist.lab.report.contents import Contents, Named, contents_of
from kvist.lab.report.icicle import PrefixIcicle

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["PICTURES", "save_plot"]

COLOURS = ("#1f6fd6", "#c8500a", "#13805c", "#a2378f", "#7a6200", "#5b4bd0", "#b3261e", "#3f6b76")
DASHES = ("-", "--", ":", "-.")
MARKERS = ("s", "^", "D", "v")
USES = {1: "#eceff3", 2: "#cfe0f7", 4: "#93bdf0", 16: "#3f83d9", 64: "#154a94"}
GREY = "#e6e9ed"
MAX_DEPTH = 16
NARROWEST = 1 / 500
"""The least part of the picture's width that a box takes."""
MAX_NAME = 48
FORMATS = (".png", ".svg")


def save_plot(
    path: str | Path,
    picture: str,
    *,
    trace_name: str = "",
    curves: Sequence[Curve] = (),
    results: Sequence[ReplayResult] = (),
    references: References | None = None,
    tree: PrefixIcicle | None = None,
    replay: int = 0,
) -> None:
    """Draw one of `PICTURES` into a file, whose name ends in .png or .svg.

    "occupancy" is that of one of the results, the `replay`th. Raises `ArgumentError` for another picture or ending, and
    where there is nothing to draw; `ImportError` without matplotlib, which the extra `lab` brings.
    """
    file = Path(path)
    if picture not in _DRAWN:
        raise ArgumentError(f"picture is {picture!r}, must be one of {', '.join(PICTURES)}")
    if file.suffix.lower() not in FORMATS:
        raise ArgumentError(f"path is {str(path)!r}, must end in {' or '.join(FORMATS)}")
    contents = contents_of(trace_name, curves, results, references, tree)
    figure = _figure()
    if not _DRAWN[picture](figure, contents, replay):
        raise ArgumentError(f"there is nothing to draw for {picture!r}: it needs {_NEEDS[picture]}")
    if trace_name:
        figure.suptitle(_plain(trace_name), fontsize=10)
    _save(figure, file)


def _save(figure: Figure, file: Path) -> None:
    """Write a picture so that equal numbers make equal files: left alone, an SVG has a date and names of chance."""
    from matplotlib import rc_context

    with rc_context({"svg.hashsalt": "kvist"}):
        figure.savefig(file, dpi=150, metadata={"Date": None} if file.suffix.lower() == ".svg" else None)


def _figure() -> Figure:
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ImportError(f"plots need {error.name}; pip install 'kvist[lab]'") from error
    return Figure(figsize=(8, 4.5), layout="constrained")


def _plain(text: str) -> str:
    """Return a text in one line of bounded length, and not read as a formula, which is what dollar signs begin."""
    line = " ".join(text.split())
    line = line if len(line) <= MAX_NAME else f"{line[: MAX_NAME - 1]}…"
    return line.replace("$", r"\$")


def _hit_rate(figure: Figure, contents: Contents, _: int) -> bool:
    axes = figure.add_subplot()
    for number, curve in enumerate(contents.curves):
        axes.plot(curve.x, curve.y, label=_plain(curve.name), **_style(number))
        if curve.error is not None:
            lows = [max(y - error, 0.0) for y, error in zip(curve.y, curve.error, strict=True)]
            highs = [y + error for y, error in zip(curve.y, curve.error, strict=True)]
            axes.fill_between(curve.x, lows, highs, color=_colour(number), alpha=0.18)
    for number, points in enumerate(contents.points, start=len(contents.curves)):
        marker = MARKERS[number % len(MARKERS)]
        axes.plot(points.x, points.y, marker, color=_colour(number), label=_plain(points.name))
    axes.set_xscale("log")
    _label(axes, "blocks in the cache", "hit rate, by block")
    return bool(contents.curves or contents.points)


def _time(figure: Figure, contents: Contents, _: int) -> bool:
    axes = figure.add_subplot()
    timed = [replay for replay in contents.replays if replay.time]
    for number, replay in enumerate(timed):
        axes.plot(replay.time, replay.hit_rate, label=_plain(replay.name), **_style(number))
    _label(axes, "seconds", "hit rate, by token")
    return bool(timed)


def _occupancy(figure: Figure, contents: Contents, number: int) -> bool:
    timed = [replay for replay in contents.replays if replay.time]
    if number >= len(timed):
        return False
    replay = timed[number]
    above, below = figure.subplots(2, 1, sharex=True)
    for axes, parts in ((above, replay.tiers), (below, replay.namespaces)):
        if parts:
            _stack(axes, replay.time, parts)
    above.set_title(_plain(replay.name), fontsize=9)
    below.set_xlabel("seconds")
    return True


def _stack(axes: Axes, time: Sequence[float], parts: Sequence[Named]) -> None:
    colours = [_colour(number) for number in range(len(parts))]
    axes.stackplot(time, [part.y for part in parts], labels=[_plain(part.name) for part in parts], colors=colours)
    axes.set_ylabel("blocks")
    axes.legend(fontsize=8, loc="upper left")


def _misses(figure: Figure, contents: Contents, _: int) -> bool:
    axes = figure.add_subplot()
    missed = [replay for replay in contents.replays if sum(replay.misses)]
    names = [_plain(replay.name) for replay in missed]
    lefts = [0] * len(missed)
    for number, each in enumerate(contents.miss_classes):
        counts = [replay.misses[number] for replay in missed]
        axes.barh(names, counts, left=lefts, color=_colour(number), label=_plain(each))
        lefts = [left + count for left, count in zip(lefts, counts, strict=True)]
    axes.invert_yaxis()
    axes.set_xlabel("prompt tokens missed")
    axes.legend(fontsize=8, loc="lower left", bbox_to_anchor=(0, 1), ncols=4)
    return bool(missed)


def _reuse(figure: Figure, contents: Contents, _: int) -> bool:
    axes = figure.add_subplot()
    names = ["first use" if each.up_to is None else f"{each.up_to:,}" for each in contents.reuse]
    colours = [_colour(each.up_to is None) for each in contents.reuse]
    axes.bar(names, [each.share for each in contents.reuse], color=colours)
    axes.tick_params(axis="x", rotation=60, labelsize=8)
    axes.set_xlabel("blocks touched since the last use, up to")
    axes.set_ylabel("share of references")
    return bool(contents.reuse)


def _icicle(figure: Figure, contents: Contents, _: int) -> bool:
    tree = contents.icicle
    if tree is None or not tree.num_shown:
        return False
    axes = figure.add_subplot()
    boxes = list(_boxes(tree))
    for box in boxes:
        axes.barh(box.depth, box.width, left=box.left, height=1.0, color=box.colour, edgecolor="white", linewidth=0.4)
    axes.set_ylim(max(box.depth for box in boxes) + 0.5, -0.5)
    axes.set_xlim(0, 1)
    axes.set_xticks([])
    for least, colour in USES.items():
        axes.barh(0, 0, color=colour, label=f"{least:,} or more" if least > 1 else "1 request")
    axes.barh(0, 0, color=GREY, label="many narrow runs")
    axes.legend(fontsize=8, loc="lower left", bbox_to_anchor=(0, 1), ncols=6, title="requests that begin with it")
    axes.set_ylabel("runs of blocks, from the prompt's first on")
    return True


@dataclass(frozen=True, slots=True)
class _Box:
    depth: int
    left: float
    width: float
    colour: str


def _boxes(tree: PrefixIcicle) -> Iterator[_Box]:
    """Yield the boxes that can be seen; those beside one another that are too narrow, and those left out, as one."""
    children: dict[int, list[int]] = {}
    for place, node in enumerate(tree.nodes):
        children.setdefault(node.parent, []).append(place)
    waiting = [(0, 0, 0.0, 1.0)]
    while waiting:
        place, depth, left, width = waiting.pop()
        node = tree.nodes[place]
        yield _Box(depth, left, width, USES[max(least for least in USES if least <= max(node.num_requests, 1))])
        below = sorted(children.get(place, ()), key=lambda at: -tree.nodes[at].num_requests)
        total = max(node.num_requests, sum(tree.nodes[at].num_requests for at in below) + node.num_hidden_requests, 1)
        rest = node.num_hidden_requests
        for at in below if depth < MAX_DEPTH else ():
            wide = width * tree.nodes[at].num_requests / total
            if wide < NARROWEST:
                rest += tree.nodes[at].num_requests
                continue
            waiting.append((at, depth + 1, left, wide))
            left += wide
        if rest and depth < MAX_DEPTH:
            yield _Box(depth + 1, left, width * rest / total, GREY)


def _style(number: int) -> dict[str, Any]:
    return {"color": _colour(number), "linestyle": DASHES[number // len(COLOURS) % len(DASHES)]}


def _colour(number: int) -> str:
    return COLOURS[number % len(COLOURS)]


def _label(axes: Axes, x: str, y: str) -> None:
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(visible=True, color="#e6e9ed")
    axes.set_axisbelow(True)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=8)


_DRAWN: dict[str, Callable[[Figure, Contents, int], bool]] = {
    "hit-rate": _hit_rate, "time": _time, "occupancy": _occupancy, "misses": _misses, "reuse": _reuse,
    "icicle": _icicle,
}  # fmt: skip
_NEEDS = {
    "hit-rate": "curves or results", "time": "results", "occupancy": "a result of that number",
    "misses": "results that missed something", "reuse": "references", "icicle": "a tree",
}  # fmt: skip
PICTURES = tuple(_DRAWN)
"""What can be drawn."""
