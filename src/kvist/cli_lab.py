"""The commands `kvist lab curve`, `replay`, `compare` and `report`: what a trace would hit, and with what."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from kvist.cli_errors import errors_told
from kvist.cli_replays import (
    Arrivals,
    ArrivalsOption,
    Choices,
    Concurrency,
    DiskBlocks,
    DiskRate,
    HostBlocks,
    Policy,
    Processes,
    add_replay_commands,
    exit_interrupted,
    replayed,
)
from kvist.cli_traces import (
    AsJson,
    AtOnce,
    BlockSize,
    Limit,
    OnError,
    OnErrorChoice,
    Seed,
    Tokenizer,
    TraceSpec,
    add_trace_commands,
    check_writable,
    numbers,
    opened,
    tell_problems,
    writing,
)
from kvist.errors import ArgumentError, TraceError

if TYPE_CHECKING:
    from kvist.lab import replay as replays
    from kvist.lab.curves import Curve, References
    from kvist.lab.traces import FileTrace, Problems, Request

__all__ = ["add_commands"]

CURVE_EXAMPLES = """
\b
Examples:
  kvist lab curve conversation_trace.jsonl.gz
  kvist lab curve mooncake:day.jsonl --sizes 1000,10000,100000 --json
  kvist lab curve chats.jsonl --tokenizer ./my-model --block-size 32 --plot curve.svg
  kvist lab curve huge.jsonl.zst --sample 0.01

Exit status: 0 done; 1 the trace cannot be read or has no requests; 2 wrong arguments; 130 interrupted.
"""

REPORT_EXAMPLES = """
\b
Examples:
  kvist lab report conversation_trace.jsonl.gz --out report.html
  kvist lab report day.jsonl --blocks 1000,10000 --policy lru,priority --out report.html

The report is one file that needs no network. Exit status: 0 done; 1 the trace cannot be read or has no requests;
2 wrong arguments; 130 interrupted.
"""


lab = typer.Typer(
    help="Ask what a trace of requests would hit: with which size, policy and tiers.", no_args_is_help=True
)


def add_commands(app: typer.Typer) -> None:
    """Add the commands to the command line."""
    add_replay_commands(lab)
    add_trace_commands(lab)
    app.add_typer(lab, name="lab")


@lab.command(epilog=CURVE_EXAMPLES)
def curve(
    trace: TraceSpec,
    sizes: Annotated[
        str | None, typer.Option(metavar="N,...", help="Sizes to tell, in blocks; else about 16.", show_default=False)
    ] = None,
    block_size: BlockSize = None,
    optimal: Annotated[bool, typer.Option(help="Also tell what no policy can exceed; takes longer.")] = True,
    sample: Annotated[
        float | None, typer.Option(metavar="RATE", help="Look only at this share of the blocks.", show_default=False)
    ] = None,
    seed: Seed = 0,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Also draw it, as .png or .svg.", show_default=False)
    ] = None,
    on_error: OnError = OnErrorChoice.FATAL,
    tokenizer: Tokenizer = None,
    limit: Limit = None,
    at_once: AtOnce = 16,
    as_json: AsJson = False,
) -> None:
    """Tell the hit rate of LRU for every size, exactly and in one pass, with the optimal bound and the knee."""
    with errors_told(status=2):
        asked = None if sizes is None else numbers("--sizes", sizes)
        if sample is not None and not 0 < sample <= 1:
            raise ArgumentError(f"--sample is {sample}, must be above 0 and at most 1")
        if plot is not None and plot.suffix not in (".png", ".svg"):
            raise ArgumentError(f"--plot is {plot}, must end in .png or .svg")
    with errors_told(status=1):
        read = opened(trace, on_error, tokenizer, limit, at_once)
        references = _references(read, block_size, sample, seed)
        lru, bound = _curves(references, asked, optimal=optimal)
        tell_problems(read.problems)
        if plot is not None:
            _plot(plot, read.name, [each for each in (lru, bound) if each is not None], references)
        _print_curves(references, lru, bound, asked, as_json=as_json)


@lab.command(epilog=REPORT_EXAMPLES)
def report(
    trace: TraceSpec,
    out: Annotated[Path, typer.Option("--out", "-o", metavar="FILE", help="The HTML file to write.")],
    blocks: Annotated[
        str | None,
        typer.Option(metavar="N,...", help="Sizes to replay; by default the knee of LRU's curve.", show_default=False),
    ] = None,
    policy: Policy = "lru,priority",
    block_size: BlockSize = None,
    host_blocks: HostBlocks = "0",
    disk_blocks: DiskBlocks = "0",
    disk_rate: DiskRate = "2 GiB",
    concurrency: Concurrency = "1",
    arrivals: ArrivalsOption = Arrivals.ASAP,
    processes: Processes = None,
    on_error: OnError = OnErrorChoice.FATAL,
    tokenizer: Tokenizer = None,
    limit: Limit = None,
    at_once: AtOnce = 16,
) -> None:
    """Write one HTML page on a trace: curves with bounds, replays over time, misses, reuse, and the prefix tree."""
    size = None if block_size is None else str(block_size)
    choices = Choices(policy, size, host_blocks, disk_blocks, disk_rate, concurrency, arrivals)
    with errors_told(status=2):
        configs = choices.configs(blocks or "1")
        check_writable(out)
    with errors_told(status=1):
        read = opened(trace, on_error, tokenizer, limit, at_once)
        labelled = _Labelled(read)
        references = _references(labelled, block_size, None, 0)
        tell_problems(read.problems)
        lru, bound = _curves(references, None, optimal=True)
        if blocks is None:
            configs = choices.configs(str(_knee_size(lru)))
        results, is_whole = replayed(read, configs, processes, references.num_requests)
        _write_report(out, references, [lru, *([bound] if bound else [])], results, labelled.labels)
    print(f"kvist: {out}, {out.stat().st_size:,} bytes", file=sys.stderr)
    if not is_whole:
        exit_interrupted(len(results), len(configs))


# -- curves -----------------------------------------------------------------------------------------------------------

NUM_SHOWN = 16
NUM_DRAWN = 256
MAX_LABELS = 100


class _Labelled:
    """A trace that notes the names of namespaces while it is read, so that it need not be read for them again."""

    def __init__(self, trace: FileTrace) -> None:
        self.trace, self.path = trace, trace.path
        self.name, self.block_size = trace.name, trace.block_size
        self._names: list[str] = []

    @property
    def problems(self) -> Problems:
        """Those of the trace."""
        return self.trace.problems

    def __iter__(self) -> Iterator[Request]:
        from kvist.lab.replay.result import namespace_name

        names: dict[tuple[Any, ...], str] = {}
        self._names = []
        for request in self.trace:
            name = names.get(request.namespace)
            if name is None:
                name = names[request.namespace] = namespace_name(request.namespace)
            self._names.append(name)
            yield request

    @property
    def labels(self) -> list[str] | None:
        """The namespace of each request; of many, those of fewest requests go together. None if there is only one."""
        counts = Counter(self._names)
        if len(counts) < 2:
            return None
        if len(counts) <= MAX_LABELS:
            return self._names
        own = {name for name, _ in counts.most_common(MAX_LABELS - 1)}
        others = f"{len(counts) - len(own):,} other namespaces"
        return [name if name in own else others for name in self._names]


def _references(read: FileTrace | _Labelled, block_size: int | None, sample: float | None, seed: int) -> References:
    from kvist.lab.curves import references_of

    references = references_of(read, block_size, rate=sample or 1.0, seed=seed)
    if not references.num_requests:
        tell_problems(read.problems)
        raise TraceError("has no requests", file=str(read.path))
    return references


def _curves(references: References, sizes: list[int] | None, *, optimal: bool) -> tuple[Curve, Curve | None]:
    """Return LRU's curve, and the optimal one at about as many sizes as are drawn or told."""
    from kvist.lab.curves import curve_of_sample, lru_curve, optimal_curve, sizes_for

    if references.rate < 1:
        at = sizes_for(references).tolist() + (sizes or [])  # all of them, to find the knee
        return curve_of_sample(references, sorted(set(at))), None
    lru = lru_curve(references)
    if not optimal:
        return lru, None
    return lru, optimal_curve(references, sizes if sizes is not None else sizes_for(references, NUM_SHOWN))


def _print_curves(
    references: References, lru: Curve, bound: Curve | None, sizes: list[int] | None, *, as_json: bool
) -> None:
    from kvist.lab.curves import knee, sizes_for

    best = knee(lru)
    if as_json:
        told = {
            "trace": references.name,
            "block_size": references.block_size,
            "num_requests": references.num_requests,
            "num_references": references.num_in_trace,
            "sampled": references.rate,
            "num_unique": round(references.num_unique / references.rate),
            "knee": None if best is None else {"num_blocks": best.num_blocks, "hit_rate": best.hit_rate},
            "curves": [_plain(_at(each, sizes)) for each in (lru, bound) if each is not None],
        }
        print(json.dumps(told))
        return
    shown = sizes if sizes is not None else sizes_for(references, NUM_SHOWN).tolist()
    Console().print(_curve_table(_at(lru, shown), None if bound is None else _at(bound, shown), references.block_size))
    counted = f"{references.num_requests:,} requests, {references.num_in_trace:,} references to blocks"
    about = "" if references.rate == 1 else "about "
    unique = f"{about}{round(references.num_unique / references.rate):,} different ones"
    print(f"kvist: {counted}, {unique}", file=sys.stderr)
    if best is not None:
        print(f"kvist: the knee is at {best.num_blocks:,} blocks, hit rate {best.hit_rate:.3f}", file=sys.stderr)


def _drawn(curve: Curve, references: References) -> Curve:
    """Return a curve at sizes so close together that its steps are seen, also where it hits nothing, and at its knee.

    One of a few sizes, as the optimal one, is drawn as it is, and so is that of a sample, which has all its sizes.
    """
    from kvist.lab.curves import knee, sizes_for

    if curve.error is not None or curve.name != "lru":
        return curve.thinned(NUM_DRAWN)
    best = knee(curve)
    return _at(curve, [*sizes_for(references, NUM_DRAWN - 1).tolist(), *([best.num_blocks] if best else [])])


def _at(curve: Curve, sizes: Sequence[int] | None) -> Curve:
    """Return a curve at these sizes, or at no more than can be drawn."""
    from kvist.lab.curves import Curve

    if sizes is None:
        return curve.thinned(NUM_DRAWN)
    import numpy as np

    asked = np.unique(np.array(sizes, np.int64))
    if curve.error is not None:
        at = np.searchsorted(curve.num_blocks, asked)
        return Curve(curve.name, curve.num_blocks[at], curve.hit_rate[at], curve.error[at])
    return Curve(curve.name, asked, curve.at(asked))


def _curve_table(lru: Curve, bound: Curve | None, block_size: int) -> Table:
    table = Table(header_style="bold")
    for name in ("blocks", "tokens", "LRU", *(["optimal", "regret"] if bound is not None else [])):
        table.add_column(name, justify="right")
    for index, (size, rate) in enumerate(zip(lru.num_blocks.tolist(), lru.hit_rate.tolist(), strict=True)):
        error = "" if lru.error is None else f" ± {lru.error[index]:.3f}"
        cells = [f"{size:,}", f"{size * block_size:,}", f"{rate:.3f}{error}"]
        if bound is not None:
            best = float(bound.hit_rate[index])
            cells += [f"{best:.3f}", f"{best - rate:.3f}"]
        table.add_row(*cells)
    return table


def _plain(curve: Curve) -> dict[str, Any]:
    told: dict[str, Any] = {
        "name": curve.name, "num_blocks": curve.num_blocks.tolist(), "hit_rate": curve.hit_rate.tolist()
    }  # fmt: skip
    return told if curve.error is None else {**told, "error": curve.error.tolist()}


def _plot(path: Path, name: str, curves: list[Curve], references: References) -> None:
    from kvist.lab.report import save_plot

    save_plot(
        path, "hit-rate", trace_name=name, curves=[_drawn(each, references) for each in curves], references=references
    )


def _knee_size(lru: Curve) -> int:
    from kvist.lab.curves import knee

    best = knee(lru)
    return 1024 if best is None else max(best.num_blocks, 1)


def _write_report(
    out: Path,
    references: References,
    curves: list[Curve],
    results: list[replays.ReplayResult],
    labels: list[str] | None,
) -> None:
    from kvist.lab.report import PrefixIcicle, html_report

    drawn, tree = [_drawn(each, references) for each in curves], PrefixIcicle.of(references, labels)
    page = html_report(references.name, drawn, results, references, tree)
    with writing(out) as path:
        path.write_text(page, encoding="utf-8")
