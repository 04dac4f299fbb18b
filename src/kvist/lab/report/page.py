"""One page of HTML with everything in it: it loads nothing, and shows its tables where scripts do not run."""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Sequence
from hashlib import sha256
from html import escape
from importlib.resources import files
from string import Template
from typing import Any

from kvist.lab.curves import Curve, References
from kvist.lab.replay import ReplayResult
from kvist.lab.report.contents import Contents, Named, contents_of
from kvist.lab.report.icicle import PrefixIcicle
from kvist.lab.report.tables import Section, sections_of, summary

__all__ = ["html_report"]

SCRIPTS = ("charts.js", "icicle.js", "page.js")


def html_report(
    trace_name: str,
    curves: Sequence[Curve] = (),
    results: Sequence[ReplayResult] = (),
    references: References | None = None,
    tree: PrefixIcicle | None = None,
) -> str:
    """Return a report as one HTML page, with a section for everything that is given.

    Names come from traces and are nobody's markup: they are escaped in tables, and the script puts them into the page
    as text. The page forbids itself to load or run anything but what it has.
    """
    contents = contents_of(trace_name, curves, results, references, tree)
    style, script = _text("page.css"), "".join(map(_text, SCRIPTS))
    sections = [f'<section class="card wide"><h2>Trace</h2>{summary(contents)}</section>']
    sections += map(_section, sections_of(contents))
    return Template(_text("page.html")).substitute(
        title=escape(f"Prefix cache report: {trace_name}"),
        policy=f"default-src 'none'; img-src data:; style-src {_digest(style)}; script-src {_digest(script)}; "
        "base-uri 'none'; form-action 'none'",
        style=style,
        script=script,
        sections="\n".join(sections),
        data=_json(_as_dict(contents)),
    )


def _text(name: str) -> str:
    return files("kvist.lab.report").joinpath(name).read_text(encoding="utf-8")


def _digest(text: str) -> str:
    """Return what the page's policy says of a script or style that it has."""
    return f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'"


def _json(value: Any) -> str:
    """Return JSON that nothing in it can end: < and & are written as escapes, as are line separators."""
    told = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return told.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _section(section: Section) -> str:
    name = escape(section.heading)
    tables = "".join(section.tables)
    return (
        f'<section class="card{" wide" * section.is_wide}" aria-label="{name}"><h2>{name}</h2>'
        f'<p class="say">{escape(section.says)}</p>'
        f'<div class="figure needs-script" data-picture="{section.picture}"></div>'
        f"<details open><summary>Numbers as a table</summary>{tables}</details></section>"
    )


def _as_dict(contents: Contents) -> dict[str, Any]:
    """Return what the page's script reads."""
    return {
        "block_size": contents.block_size,
        "curves": [_series(each) for each in contents.curves],
        "points": [_series(each) for each in contents.points],
        "miss_classes": contents.miss_classes,
        "results": [
            {
                "name": replay.name,
                "time": replay.time,
                "hit_rate": replay.hit_rate,
                "tiers": [{"name": each.name, "y": each.y} for each in replay.tiers],
                "namespaces": [{"name": each.name, "y": each.y} for each in replay.namespaces],
                "misses": replay.misses,
            }
            for replay in contents.replays
        ],
        "reuse": [
            {
                "name": "first" if each.up_to is None else _short(each.up_to),
                "text": "first use"
                if each.up_to is None
                else f"used again after {each.above + 1:,} to {each.up_to:,} blocks",
                "count": each.num_references,
                "share": each.share,
                "is_first": each.up_to is None,
            }
            for each in contents.reuse
        ],
        "icicle": None if contents.icicle is None else _tree(contents.icicle),
    }


def _series(series: Named) -> dict[str, Any]:
    told: dict[str, Any] = {"name": series.name, "x": series.x, "y": series.y}
    return told if series.error is None else told | {"error": series.error}


def _tree(tree: PrefixIcicle) -> dict[str, Any]:
    """Return the tree by columns, which are shorter than as many objects."""
    nodes = tree.nodes
    return {
        "block_size": tree.block_size,
        "parent": [node.parent for node in nodes],
        "label": [node.label for node in nodes],
        "first": [node.first_block for node in nodes],
        "blocks": [node.num_blocks for node in nodes],
        "requests": [node.num_requests for node in nodes],
        "request": [node.first_request + 1 for node in nodes],
        "hidden": [node.num_hidden for node in nodes],
        "hidden_requests": [node.num_hidden_requests for node in nodes],
    }


def _short(number: int) -> str:
    for unit, size in (("M", 2**20), ("k", 2**10)):
        if number >= size:
            return f"{number // size}{unit}"
    return str(number)
