"""The command that proves the cache right for as long as it is let: `kvist soak`."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.live import Live
from rich.text import Text

from kvist.cli_errors import errors_told
from kvist.errors import ArgumentError

if TYPE_CHECKING:
    from kvist.testing.soak import Fault, Plan, Tally

__all__ = ["add_commands"]

EXAMPLES = """
\b
Examples:
  kvist soak --minutes 60 --seed 1
  kvist soak --examples 2000 --policy lru --block-size 16 --kinds full,sliding
  kvist replay kvist-soak.journal --state

Exit status: 0 nothing wrong; 1 a fault was found; 2 wrong arguments; 130 interrupted.
"""
DEFAULT_MINUTES = 1.0


def add_commands(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command(epilog=EXAMPLES)(soak)


def soak(
    minutes: Annotated[float | None, typer.Option(help="Stop after so long; 1 minute if no --examples.")] = None,
    examples: Annotated[int | None, typer.Option(min=1, help="Stop after so many caches.")] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="The same seed does the same; random if none.")] = None,
    steps: Annotated[int, typer.Option(min=1, help="What is done to each cache, in steps.")] = 100,
    policy: Annotated[str | None, typer.Option(help="The eviction policy; all, and two odd ones, if none.")] = None,
    block_size: Annotated[int | None, typer.Option(min=1, help="Tokens in a block; 1, 2, 4 and 16 if none.")] = None,
    kinds: Annotated[str | None, typer.Option(metavar="KIND,...", help="Groups to mix; all kinds if none.")] = None,
    no_shrink: Annotated[bool, typer.Option("--no-shrink", help="Keep the first fault, however long.")] = False,
    journal: Annotated[Path, typer.Option(help="Where the calls that lead to a fault are written.")] = Path(
        "kvist-soak.journal"
    ),
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Do everything to small caches at random, proving after each step that nothing is wrong."""
    with errors_told(status=2):
        seed = random.randrange(2**32) if seed is None else seed
        plan = _plan(seed, minutes, examples, steps, policy, block_size, kinds, shrinks=not no_shrink)
        if not journal.parent.is_dir():
            raise ArgumentError(f"--journal: {journal.parent} is no folder")
    tally, fault, is_interrupted = _run(plan, journal)
    told = _told(tally, fault, plan.seed, is_interrupted=is_interrupted)
    print(json.dumps(told) if as_json else _as_text(told))
    if fault is not None or is_interrupted:
        raise typer.Exit(1 if fault is not None else 130)


def _plan(
    seed: int,
    minutes: float | None,
    examples: int | None,
    steps: int,
    policy: str | None,
    block_size: int | None,
    kinds: str | None,
    *,
    shrinks: bool,
) -> Plan:
    try:
        from kvist.testing.soak import Plan
    except ModuleNotFoundError as error:
        raise OSError(f"soak needs {error.name}; pip install 'kvist[testing]'") from error
    from kvist.tier_config import POLICY_NAMES

    chosen: dict[str, Any] = {}
    if policy is not None:
        if policy not in POLICY_NAMES:
            raise ArgumentError(f"--policy is {policy!r}, must be one of {', '.join(POLICY_NAMES)}")
        chosen["policies"] = [policy]
    if block_size is not None:
        chosen["block_sizes"] = [block_size]
    if kinds is not None:
        chosen["kinds"] = [each.strip() for each in kinds.split(",")]
    if minutes is None and examples is None:
        minutes = DEFAULT_MINUTES
    return Plan(seed, minutes, examples, steps, shrinks=shrinks, **chosen)


def _run(plan: Plan, journal: Path) -> tuple[Tally, Fault | None, bool]:
    """Run with a line on stderr that says how far it is; returns whether Ctrl-C ended it, too."""
    from kvist.testing.soak import Soak

    with _line(plan) as watch:
        soak = Soak(plan, journal, watch=watch)
        try:
            return soak.tally, soak.run(), False
        except KeyboardInterrupt:
            return soak.tally, None, True


@contextmanager
def _line(plan: Plan) -> Iterator[Callable[[Tally], None]]:
    """Return what shows a tally, on a terminal only; elsewhere the seed is said once."""
    console = Console(stderr=True)
    print(f"kvist: seed {plan.seed}", file=sys.stderr, flush=True)
    if not console.is_terminal:
        yield lambda tally: None
        return
    latest: list[Tally] = []
    shown = Live(console=console, transient=True, get_renderable=lambda: Text(progress(plan, latest)))
    with shown:
        yield lambda tally: latest.__setitem__(slice(None), [tally])


def progress(plan: Plan, latest: list[Tally]) -> str:
    """Return the line that says how far a soak is: rate, examples, steps, seed and time left."""
    if not latest:
        return "starting"
    tally = latest[0]
    rate = tally.num_steps / tally.elapsed_s if tally.elapsed_s else 0.0
    parts = [
        f"{tally.num_examples:,} examples",
        f"{tally.num_steps:,} steps",
        f"{rate:,.0f} steps/s",
        f"seed {tally.seed}",
    ]
    if tally.is_shrinking:
        return ", ".join([*parts, "a fault was found: shrinking it"])
    if plan.minutes is not None:
        left = max(60 * plan.minutes - tally.elapsed_s, 0)
        parts.append(f"{int(left // 60)}:{int(left % 60):02} left")
    if plan.examples is not None:
        parts.append(f"{max(plan.examples - tally.num_examples, 0):,} examples left")
    return ", ".join(parts)


def _told(tally: Tally, fault: Fault | None, seed: int, *, is_interrupted: bool) -> dict[str, Any]:
    told: dict[str, Any] = {
        "seed": seed,
        "examples": tally.num_examples,
        "steps": tally.num_steps,
        "seconds": round(tally.elapsed_s, 1),
        "interrupted": is_interrupted,
        "fault": None,
    }
    if fault is not None:
        told["fault"] = {
            "seed": fault.seed,
            "shape": fault.shape,
            "error": fault.error,
            "steps": fault.steps.splitlines(),
            "journal": str(fault.journal),
            "calls": fault.num_calls,
        }
    return told


def _as_text(told: dict[str, Any]) -> str:
    done = f"{told['examples']} examples, {told['steps']} steps, {told['seconds']} s, seed {told['seed']}"
    fault = told["fault"]
    if fault is None:
        return f"{done}: {'interrupted, ' if told['interrupted'] else ''}nothing wrong"
    return "\n".join(
        [
            f"{done}: a fault, in the round with seed {fault['seed']} ({fault['shape']})",
            *fault["steps"],
            fault["error"],
            f"journal: {fault['journal']} (call {fault['calls']} is the last; kvist replay makes them again)",
        ]
    )
