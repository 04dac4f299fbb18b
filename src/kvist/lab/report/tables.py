"""The numbers of a report as tables, for readers without scripts, and a sentence on what each picture shows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape

from kvist.lab.report.contents import Contents, Named, Replay
from kvist.lab.report.icicle import IcicleNode, PrefixIcicle

__all__ = ["Section", "sections_of", "summary"]

MAX_ROWS = 24
MAX_ICICLE_ROWS = 40


@dataclass(frozen=True, slots=True)
class Section:
    """A picture's place on the page: its name, heading, what it says in a sentence, and its tables."""

    picture: str
    heading: str
    says: str
    tables: tuple[str, ...]
    is_wide: bool = False


def sections_of(contents: Contents) -> list[Section]:
    """Return a section for each picture that there is something for."""
    found = [_hit_rate(contents), _time(contents), _misses(contents), _reuse(contents), _occupancy(contents)]
    found.append(_icicle(contents.icicle) if contents.icicle is not None else None)
    return [section for section in found if section is not None]


def summary(contents: Contents) -> str:
    """Return the numbers of the trace, and of replays a table."""
    tiles = "".join(f"<div><dt>{escape(name)}</dt><dd>{count:,}</dd></div>" for name, count in contents.numbers.items())
    notes = "".join(f"<li>{escape(note)}</li>" for note in contents.notes)
    parts = [f'<dl class="tiles">{tiles}</dl>', f'<ul class="notes">{notes}</ul>' if notes else ""]
    if contents.replays:
        replays = table("Replays", _REPLAY_HEAD, (_replay_row(each) for each in contents.replays))
        parts.append(f"<details open><summary>All replays as a table</summary>{replays}</details>")
    return "".join(parts)


_REPLAY_HEAD = [
    "replay", "requests", "hit rate, tokens", "hit rate, blocks", "preemptions", "evicted blocks",
    "first token, p50 s", "p90 s", "p99 s",
]  # fmt: skip


def _replay_row(replay: Replay) -> list[str]:
    result = replay.result
    counts = [f"{result.hit_rate_tokens:.2%}", f"{result.hit_rate_blocks:.2%}", f"{result.num_preemptions:,}"]
    times = [f"{result.ttft_s.get(name, 0):,.2f}" for name in ("p50", "p90", "p99")]
    return [replay.name, f"{result.num_requests:,}", *counts, f"{sum(result.evictions.values()):,}", *times]


def table(caption: str, head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table as HTML; all texts are escaped."""
    top = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in head)
    body = "".join(
        f'<tr><th scope="row">{escape(first)}</th>{"".join(map(_cell, others))}</tr>' for first, *others in rows
    )
    told = f"<caption>{escape(caption)}</caption><thead><tr>{top}</tr></thead><tbody>{body}</tbody>"
    return f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(caption)}"><table>{told}</table></div>'


def _cell(text: str) -> str:
    """Return a cell; what does not begin with a digit, a sign or nothing is set as text."""
    is_text = bool(text) and not (text[0].isdecimal() or text[0] == "-")
    return f"<td{' class=text' * is_text}>{escape(text)}</td>"


def _hit_rate(contents: Contents) -> Section | None:
    series = [*contents.curves, *contents.points]
    if not series:
        return None
    sizes = _some(sorted({size for each in series for size in each.x}))
    rows = ([f"{size:,.0f}", *(_at(each, size, each in contents.points) for each in series)] for size in sizes)
    names = ["blocks", *(each.name for each in series)]
    says = "The share of block references that hit, by the number of blocks in the cache."
    if any(each.name == "optimal" for each in contents.curves):
        says += " No eviction policy can do better than optimal, which knows the future."
    if (knee := contents.knees.get("lru")) is not None:
        says += (
            f" The knee of lru is at {knee.num_blocks:,} blocks, {knee.hit_rate:.1%}: beyond it, blocks bring less "
            "than the average so far."
        )
    return Section("hit-rate", "Hit rate over cache size", says, (table("Hit rate over cache size", names, rows),))


def _at(series: Named, size: float, is_point: bool) -> str:
    """Return the value at a size: that of the largest one of the curve which is no larger; of points only their own."""
    if is_point:
        return f"{series.y[series.x.index(size)]:.2%}" if size in series.x else ""
    below = [place for place, each in enumerate(series.x) if each <= size]
    if not below:
        return "0.00%" if series.error is None else ""
    error = "" if series.error is None else f" ± {series.error[below[-1]]:.2%}"
    return f"{series.y[below[-1]]:.2%}{error}"


def _time(contents: Contents) -> Section | None:
    timed = [replay for replay in contents.replays if replay.time]
    if not timed:
        return None
    tables = tuple(
        table(
            f"Hit rate over time: {replay.name}",
            ["seconds", "hit rate"],
            ([f"{replay.time[at]:,.6g}", f"{replay.hit_rate[at]:.2%}"] for at in _places(len(replay.time))),
        )
        for replay in timed
    )
    says = "The share of prompt tokens that were found, of the requests since the point before."
    return Section("time", "Hit rate over time", says, tables)


def _occupancy(contents: Contents) -> Section | None:
    timed = [replay for replay in contents.replays if replay.time]
    if not timed:
        return None
    tables = []
    for replay in timed:
        parts = [*replay.tiers, *replay.namespaces]
        head = ["seconds", *(each.name for each in replay.tiers), *(f"in {each.name}" for each in replay.namespaces)]
        rows = (
            [f"{replay.time[at]:,.6g}", *(f"{each.y[at]:,.0f}" for each in parts)] for at in _places(len(replay.time))
        )
        tables.append(table(f"Blocks over time: {replay.name}", head, rows))
    says = "Blocks that hold something, in each tier and of each namespace."
    return Section("occupancy", "Occupancy by tier and namespace", says, tuple(tables), is_wide=True)


def _misses(contents: Contents) -> Section | None:
    missed = [replay for replay in contents.replays if sum(replay.misses)]
    if not missed:
        return None
    rows = ([replay.name, *(f"{count:,}" for count in replay.misses)] for replay in missed)
    says = "Prompt tokens that had to be computed, by the reason why they were not found."
    shown = table("Tokens missed, by reason", ["replay", *contents.miss_classes], rows)
    return Section("misses", "Miss classes", says, (shown,))


def _reuse(contents: Contents) -> Section | None:
    if not contents.reuse:
        return None
    rows = (
        ["first use" if each.up_to is None else f"{each.above + 1:,} to {each.up_to:,}", f"{each.num_references:,}",
         f"{each.share:.2%}"]
        for each in contents.reuse
    )  # fmt: skip
    says = "How many other blocks were touched since a block's last use: a cache of that many would have had it."
    shown = table("References by reuse distance", ["blocks since the last use", "references", "share"], rows)
    return Section("reuse", "Reuse distance", says, (shown,))


def _icicle(tree: PrefixIcicle) -> Section | None:
    runs = [node for node in tree.nodes if node.num_blocks]
    if not runs:
        return None
    saved = sorted(runs, key=lambda node: -_num_again(node))[:MAX_ICICLE_ROWS]
    head = ["blocks of the prompt", "under", "requests", "tokens", "tokens found again", "first request"]
    says = (
        "What prompts begin with. A box is a run of blocks, as wide as the requests that have it after all boxes above "
        "it. Click a box to zoom in, the top one to zoom out."
    )
    caption = f"The {len(saved):,} runs that most tokens are found again in"
    shown = table(caption, head, (_run_row(tree, node) for node in saved))
    return Section("icicle", "Prefix tree", says, (shown,), is_wide=True)


def _num_again(node: IcicleNode) -> int:
    return node.num_blocks * (node.num_requests - 1)


def _run_row(tree: PrefixIcicle, node: IcicleNode) -> list[str]:
    top = node
    while top.parent > 0:
        top = tree.nodes[top.parent]
    under = top.label or f"request {top.first_request + 1:,}"
    last = node.first_block + node.num_blocks - 1
    counts = [node.num_requests, node.num_blocks * tree.block_size, _num_again(node) * tree.block_size]
    return [f"{node.first_block:,} to {last:,}", under, *(f"{n:,}" for n in counts), f"{node.first_request + 1:,}"]


def _some(values: Sequence[float]) -> Iterator[float]:
    return (values[place] for place in _places(len(values)))


def _places(count: int) -> list[int]:
    """Return places evenly spread over so many, the last one among them."""
    if count <= MAX_ROWS:
        return list(range(count))
    return sorted({round(row * (count - 1) / (MAX_ROWS - 1)) for row in range(MAX_ROWS)})
