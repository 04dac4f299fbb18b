"""The commands `kvist lab replay` and `compare`: a trace on the real manager, with one configuration or many."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from kvist.cli_errors import errors_told
from kvist.cli_traces import (
    AsJson,
    AtOnce,
    Limit,
    OnError,
    OnErrorChoice,
    Tokenizer,
    TraceSpec,
    check_writable,
    numbers,
    opened,
    tell_problems,
    writing,
)
from kvist.errors import ArgumentError, TraceError
from kvist.tier_config import POLICY_NAMES, HostTier

if TYPE_CHECKING:
    from kvist.lab import replay as replays
    from kvist.lab.traces import FileTrace

__all__ = [
    "Arrivals", "ArrivalsOption", "Choices", "Concurrency", "DiskBlocks", "DiskRate", "HostBlocks", "Policy",
    "Processes", "add_replay_commands", "exit_interrupted", "replayed",
]  # fmt: skip

REPLAY_EXAMPLES = """
\b
Examples:
  kvist lab replay conversation_trace.jsonl.gz --blocks 30000
  kvist lab replay day.jsonl --blocks 30000 --policy lru --concurrency 64 --arrivals trace
  kvist lab replay day.jsonl --blocks 8000 --host-blocks 64000 --disk-blocks 500000 --json
  kvist lab replay day.jsonl --blocks 8000 --retain 0:1024:80 --fit steps.jsonl

Exit status: 0 done; 1 the trace cannot be read or has no requests; 2 wrong arguments; 130 interrupted, with what was
done until then.
"""

COMPARE_EXAMPLES = """
\b
Examples:
  kvist lab compare day.jsonl --blocks 1000,10000,30000 --policy lru,priority,s3fifo
  kvist lab compare day.jsonl --blocks 8000 --host-blocks 0,64000 --disk-blocks 0,500000 --out results.parquet
  kvist lab compare day.jsonl --blocks 1000,4000 --block-size 16,64 --processes 8 --json

Each combination is replayed. Exit status: 0 done; 1 the trace cannot be read or has no requests; 2 wrong arguments;
130 interrupted, with the results there are.
"""


class Arrivals(StrEnum):
    """When requests come."""

    ASAP = "asap"
    TRACE = "trace"


class Content(StrEnum):
    """What prompts are made of."""

    TOKENS = "tokens"
    BLOCKS = "blocks"


Blocks = Annotated[str, typer.Option(metavar="N,...", help="Blocks of the cache on the device.")]
Policy = Annotated[str, typer.Option(metavar="NAME,...", help=f"Eviction policies: {', '.join(POLICY_NAMES)}.")]
BlockSizes = Annotated[
    str | None,
    typer.Option(
        "--block-size", metavar="N,...", help="Tokens in a block; that of the trace, or 16.", show_default=False
    ),
]
HostBlocks = Annotated[str, typer.Option(metavar="N,...", help="Blocks of host memory; 0 for none.")]
DiskBlocks = Annotated[str, typer.Option(metavar="N,...", help="Blocks of a simulated disk; 0 for none.")]
DiskRate = Annotated[str, typer.Option(metavar="SIZE", help="What the disk reads in a second.")]
Concurrency = Annotated[str, typer.Option(metavar="N,...", help="Requests that run at once, at most.")]
ArrivalsOption = Annotated[Arrivals, typer.Option(help="As fast as there is a place, or at the trace's times.")]
ContentOption = Annotated[Content, typer.Option(help="All tokens as they are, or whole blocks as in the curves.")]
Retain = Annotated[
    list[str] | None,
    typer.Option(
        metavar="START:END:PRIORITY,...",
        help="Keep ranges of each prompt so; again for another way, or none.",
        show_default=False,
    ),
]
PrefillRate = Annotated[float | None, typer.Option(help="Prompt tokens computed in a second.", show_default=False)]
Fit = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE", help="Steps of an engine, from record --steps: times are fitted to them.", show_default=False
    ),
]
Processes = Annotated[
    int | None, typer.Option(min=1, help="Replays that run side by side; as many as processors.", show_default=False)
]
Output = Annotated[
    Path | None,
    typer.Option(
        "--out", "-o", metavar="FILE", help="Also write results: .json, .csv or .parquet.", show_default=False
    ),
]


def add_replay_commands(app: typer.Typer) -> None:
    """Add the commands to those of the lab."""
    app.command(epilog=REPLAY_EXAMPLES)(replay)
    app.command(epilog=COMPARE_EXAMPLES)(compare)


def replay(
    trace: TraceSpec,
    blocks: Blocks,
    policy: Policy = "priority",
    block_size: BlockSizes = None,
    host_blocks: HostBlocks = "0",
    disk_blocks: DiskBlocks = "0",
    disk_rate: DiskRate = "2 GiB",
    concurrency: Concurrency = "1",
    arrivals: ArrivalsOption = Arrivals.ASAP,
    content: ContentOption = Content.TOKENS,
    retain: Retain = None,
    prefill_rate: PrefillRate = None,
    fit: Fit = None,
    out: Output = None,
    on_error: OnError = OnErrorChoice.FATAL,
    tokenizer: Tokenizer = None,
    limit: Limit = None,
    at_once: AtOnce = 16,
    as_json: AsJson = False,
) -> None:
    """Replay a trace on the real manager, with one configuration."""
    with errors_told(status=2):
        choices = Choices(
            policy, block_size, host_blocks, disk_blocks, disk_rate, concurrency, arrivals, content, retain,
            prefill_rate, fit,
        )  # fmt: skip
        configs = choices.configs(blocks)
        if len(configs) > 1:
            raise ArgumentError(f"these are {len(configs)} configurations; kvist lab compare replays several")
        _check_out(out)
    with errors_told(status=1):
        read = opened(trace, on_error, tokenizer, limit, at_once)
        _compare(read, configs, 1, out, as_json=as_json)


def compare(
    trace: TraceSpec,
    blocks: Blocks,
    policy: Policy = "priority",
    block_size: BlockSizes = None,
    host_blocks: HostBlocks = "0",
    disk_blocks: DiskBlocks = "0",
    disk_rate: DiskRate = "2 GiB",
    concurrency: Concurrency = "1",
    arrivals: ArrivalsOption = Arrivals.ASAP,
    content: ContentOption = Content.TOKENS,
    retain: Retain = None,
    prefill_rate: PrefillRate = None,
    fit: Fit = None,
    processes: Processes = None,
    out: Output = None,
    on_error: OnError = OnErrorChoice.FATAL,
    tokenizer: Tokenizer = None,
    limit: Limit = None,
    at_once: AtOnce = 16,
    as_json: AsJson = False,
) -> None:
    """Replay a trace on the real manager with many configurations, side by side."""
    with errors_told(status=2):
        choices = Choices(
            policy, block_size, host_blocks, disk_blocks, disk_rate, concurrency, arrivals, content, retain,
            prefill_rate, fit,
        )  # fmt: skip
        configs = choices.configs(blocks)
        _check_out(out)
    with errors_told(status=1):
        read = opened(trace, on_error, tokenizer, limit, at_once)
        _compare(read, configs, processes, out, as_json=as_json)


@dataclass(frozen=True, slots=True)
class Choices:
    """What options say of replays: numbers and names with commas between them are all to be tried."""

    policy: str
    block_size: str | None
    host_blocks: str
    disk_blocks: str
    disk_rate: str
    concurrency: str
    arrivals: Arrivals
    content: Content = Content.TOKENS
    retain: list[str] | None = None
    prefill_rate: float | None = None
    fit: Path | None = None

    def configs(self, blocks: str) -> list[replays.ReplayConfig]:
        """Return a configuration for each combination, named by what tells them apart, with these sizes."""
        from kvist.lab.replay import ReplayConfig, grid

        cost = _cost(self.prefill_rate, self.fit)
        base = ReplayConfig(num_blocks=1, arrivals=self.arrivals.value, content=self.content.value, cost=cost)
        unknown = [name for name in self.policy.split(",") if name not in POLICY_NAMES]
        if unknown:
            raise ArgumentError(f"--policy: {unknown[0]!r} is not one of {', '.join(POLICY_NAMES)}")
        choices: dict[str, list[Any]] = {
            "block_size": [None] if self.block_size is None else numbers("--block-size", self.block_size),
            "policy": self.policy.split(","),
            "tiers": self._tiers(),
            "retention": [_retention(each) for each in self.retain or ["none"]],
            "concurrency": numbers("--concurrency", self.concurrency),
            "num_blocks": numbers("--blocks", blocks),
        }
        varied = {name for name, values in choices.items() if len(values) > 1}
        return [_named(config, varied) for config in grid(base, **choices)]

    def _tiers(self) -> list[list[HostTier | replays.SlowTier]]:
        return [
            _tiers(host, disk, self.disk_rate)
            for host in numbers("--host-blocks", self.host_blocks, least=0)
            for disk in numbers("--disk-blocks", self.disk_blocks, least=0)
        ]


def _named(config: replays.ReplayConfig, varied: set[str]) -> replays.ReplayConfig:
    """Return a configuration with a name that tells it from others, which differ in what is `varied`."""
    tiers = (("host" if isinstance(tier, HostTier) else tier.name, tier.num_blocks) for tier in config.tiers)
    parts = [replace(config, tiers=()).label, *(f"+ {name} {num_blocks:,}" for name, num_blocks in tiers)]
    if "concurrency" in varied:
        parts.append(f"{config.concurrency} at once")
    if "retention" in varied:
        ranges = () if config.retention is None else config.retention.ranges
        kept = ",".join(f"{start}:{end or ''}:{priority}" for start, end, priority, _ in ranges)
        parts.append(f"retain {kept or 'none'}")
    return replace(config, name=" ".join(parts))


def _tiers(host: int, disk: int, disk_rate: str) -> list[HostTier | replays.SlowTier]:
    from kvist.lab.replay import SlowTier
    from kvist.sizes import parse_bytes

    tiers: list[HostTier | replays.SlowTier] = []
    if host:
        tiers.append(HostTier(num_blocks=host))
    if disk:
        tiers.append(SlowTier("disk", disk, bytes_per_s=parse_bytes(disk_rate)))
    return tiers


def _retention(ranges: str) -> Any:
    """Return what `START:END:PRIORITY,...` asks for; None for "none"."""
    from kvist.core.retention import Retention

    if ranges == "none":
        return None
    found = []
    for each in ranges.split(","):
        try:
            start, end, priority = each.split(":")
            found.append((int(start or 0), int(end) if end else None, int(priority), None))
        except ValueError:
            raise ArgumentError(f"--retain is {each!r}, must be START:END:PRIORITY, as 0:1024:80 or 1024::10") from None
    return Retention(found)


def _cost(prefill_rate: float | None, fit: Path | None) -> replays.CostModel:
    from kvist.lab.replay import CostModel, StepTime

    cost = CostModel()
    if fit is not None:
        try:
            lines = fit.read_text(encoding="utf-8").splitlines()
            steps = [StepTime(**json.loads(line)) for line in lines if line.strip()]
        except (OSError, ValueError, TypeError) as error:
            raise ArgumentError(f"--fit: {fit} has no steps that can be read: {error}") from error
        cost = cost.fitted(steps)
    return cost if prefill_rate is None else replace(cost, prefill_tokens_per_s=prefill_rate)


def _check_out(out: Path | None) -> None:
    from kvist.lab.replay.results import FORMATS

    if out is None:
        return
    if out.suffix.lstrip(".").lower() not in FORMATS:
        raise ArgumentError(f"--out is {out}, must end in {', '.join(f'.{each}' for each in FORMATS)}")
    check_writable(out)


def _compare(
    read: FileTrace, configs: list[replays.ReplayConfig], processes: int | None, out: Path | None, *, as_json: bool
) -> None:
    """Replay, and tell what came out, also of what was done until Ctrl-C."""
    from kvist.lab.replay import table, write_results

    num_requests = sum(1 for _ in read)  # all of it, so that what is wrong is known before anything runs
    tell_problems(read.problems)
    if not num_requests:
        raise TraceError("has no requests", file=str(read.path))
    results, is_whole = replayed(read, configs, processes, num_requests)
    if as_json:
        print(json.dumps([result.as_dict() for result in results]))
    else:
        Console(width=None if sys.stdout.isatty() else 160).print(table(results))
    if out is not None:
        with writing(out) as path:
            write_results(results, path, out.suffix.lstrip(".").lower())
    if not is_whole:
        exit_interrupted(len(results), len(configs))


def exit_interrupted(num_done: int, num_configs: int) -> NoReturn:
    """Say that Ctrl-C came, and exit as commands do then."""
    print(f"kvist: interrupted with {num_done} of {num_configs} results", file=sys.stderr)
    raise typer.Exit(130)


def replayed(
    read: FileTrace, configs: list[replays.ReplayConfig], processes: int | None, num_requests: int
) -> tuple[list[replays.ReplayResult], bool]:
    """Return the results of a trace of so many requests, and whether they are all."""
    from kvist.lab.replay import ReplayInterrupted, compare

    try:
        with _bar() as tell:
            return compare(read, configs, processes, tell, num_requests=num_requests), True
    except ReplayInterrupted as interrupted:
        return interrupted.results, False


@contextmanager
def _bar() -> Iterator[Callable[[replays.Progress], None] | None]:
    """Show how far replays are, with their rate and the time left, on stderr where that is a terminal."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield None
        return
    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[rate]}"),
        TimeRemainingColumn(),
    )  # fmt: skip
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("replay", total=None, rate="")

        def tell(told: replays.Progress) -> None:
            progress.update(
                task,
                description=f"{told.num_done}/{told.num_configs} configurations",
                total=told.num_total,
                completed=told.num_requests,
                rate=f"{told.requests_per_s:,.0f} requests/s",
            )

        yield tell
