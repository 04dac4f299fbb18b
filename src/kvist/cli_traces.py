"""The commands that write traces, `kvist lab make` and `record`, and how all commands of the lab read them."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from kvist.cli_errors import errors_told
from kvist.cli_models import default_num_blocks, import_serve, load, read_prompts, run_prompts, tokenize
from kvist.errors import ArgumentError, TraceError

if TYPE_CHECKING:
    from kvist.lab.recording import TraceRecorder
    from kvist.lab.traces import FileTrace, Problems, Request

__all__ = [
    "AsJson", "AtOnce", "BlockSize", "Limit", "OnError", "Seed", "Tokenizer", "TraceSpec", "add_trace_commands",
    "check_writable", "numbers", "opened", "tell_problems", "writing",
]  # fmt: skip

MAKE_EXAMPLES = """
\b
Examples:
  kvist lab make mixed --requests 10000 --out mixed.jsonl.gz
  kvist lab make agents --requests 2000 --seed 7 --form tokens --out agents.jsonl
  kvist lab make --from sharegpt.jsonl --block-size 512 --out sharegpt-mooncake.jsonl.zst
  kvist lab make --from openai:log.jsonl --tokenizer ./my-model --form tokens --out log-tokens.jsonl.gz

Exit status: 0 done; 1 a trace cannot be read or written; 2 wrong arguments; 130 interrupted.
"""

RECORD_EXAMPLES = """
\b
Examples:
  kvist lab record --model ./my-model --prompts questions.txt --out day.jsonl.zst
  kvist lab record --model ./my-model --prompts questions.txt --out day.jsonl --steps steps.jsonl
  kvist lab record --from journal:calls.jsonl --out day.jsonl.gz
  kvist lab record --from openai:log.jsonl --tokenizer ./my-model --out day.jsonl.gz

Exit status: 0 done; 1 the model or the trace cannot be used; 2 wrong arguments; 130 interrupted.
"""


MAX_BLOCK_SIZE = 2**20
"""That of traces, which are imported only where they are read."""


class OnErrorChoice(StrEnum):
    """What becomes of malformed lines."""

    SKIP = "skip"
    FATAL = "fatal"


class FormChoice(StrEnum):
    """The forms that traces are written in."""

    MOONCAKE = "mooncake"
    TOKENS = "tokens"


TraceSpec = Annotated[str, typer.Argument(metavar="TRACE", help="A trace file, or kind:path; gz and zst as they are.")]
OnError = Annotated[OnErrorChoice, typer.Option("--on-error", help="Malformed lines: skip and count, or stop.")]
Tokenizer = Annotated[
    Path | None, typer.Option(metavar="FILE", help="A tokenizer.json, or its folder, for traces of text.")
]
Limit = Annotated[int | None, typer.Option(min=1, help="Read only so many requests.", show_default=False)]
AtOnce = Annotated[int, typer.Option(min=1, help="Sessions that go on side by side, where a trace has no clock.")]
BlockSize = Annotated[
    int | None,
    typer.Option(min=1, max=MAX_BLOCK_SIZE, help="Tokens in a block; that of the trace, or 16.", show_default=False),
]
Seed = Annotated[int, typer.Option(min=0, help="The same seed, the same bytes.")]
Out = Annotated[Path, typer.Option("--out", "-o", metavar="FILE", help="The trace to write; .gz and .zst are packed.")]
From = Annotated[str | None, typer.Option("--from", metavar="TRACE", help="Write another trace in this form.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


def add_trace_commands(app: typer.Typer) -> None:
    """Add the commands to those of the lab."""
    app.command(epilog=MAKE_EXAMPLES)(make)
    app.command(epilog=RECORD_EXAMPLES)(record)


def opened(
    spec: str, on_error: OnErrorChoice, tokenizer: Path | None, limit: int | None, at_once: int = 16
) -> FileTrace:
    """Open a trace as the options say."""
    from kvist.lab.traces import open_trace

    return open_trace(spec, on_error=on_error.value, tokenizer=tokenizer, limit=limit, at_once=at_once)


def numbers(name: str, text: str, *, least: int = 1) -> list[int]:
    """Return the numbers of an option such as `1000,2000`."""
    try:
        found = [int(each) for each in text.split(",")]
    except ValueError:
        raise ArgumentError(f"{name} is {text!r}, must be numbers with commas between them") from None
    if min(found) < least:
        raise ArgumentError(f"{name} has {min(found)}, must be {least} or more")
    return found


def tell_problems(problems: Problems) -> None:
    """Say on stderr what was skipped, and what else is worth knowing."""
    for note in problems.notes:
        print(f"kvist: {note}", file=sys.stderr)
    if problems.num_skipped:
        counts = ", ".join(f"{count:,} {reason}" for reason, count in problems.counts.most_common())
        print(f"kvist: skipped {problems.num_skipped:,}: {counts}", file=sys.stderr)
        for each in problems.first[:5]:
            print(f"kvist:   {each}", file=sys.stderr)


def make(
    out: Out,
    workload: Annotated[
        str | None, typer.Argument(help="What to make up: shared, chat, rag, agents or mixed.", show_default=False)
    ] = None,
    source: From = None,
    requests: Annotated[int, typer.Option(min=1, help="How many to make up.")] = 10_000,
    rate: Annotated[
        float | None, typer.Option(help="Sessions that begin in a second; the workload's own if not given.")
    ] = None,
    seed: Seed = 0,
    form: Annotated[FormChoice, typer.Option(help="Ids of blocks, as Mooncake has them, or token ids.")] = (
        FormChoice.MOONCAKE
    ),
    block_size: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=MAX_BLOCK_SIZE,
            help="Tokens of a block in the mooncake form; 512, or that of another trace.",
            show_default=False,
        ),
    ] = None,
    on_error: OnError = OnErrorChoice.FATAL,
    tokenizer: Tokenizer = None,
    limit: Limit = None,
    at_once: AtOnce = 16,
    as_json: AsJson = False,
) -> None:
    """Make up a workload, or bring a trace into another form."""
    with errors_told(status=2):
        if (workload is None) == (source is None):
            raise ArgumentError("name either a workload or, with --from, a trace")
        made = None if workload is None else _synthetic(workload, requests, rate, seed, form, block_size)
    with errors_told(status=1):
        read = opened(source, on_error, tokenizer, limit, at_once) if source is not None else None
        num_written = _write(read if made is None else made, out, form, block_size)
        if read is not None:
            tell_problems(read.problems)
    _say_written(num_written, out, as_json)


def record(
    out: Out,
    model: Annotated[
        str | None, typer.Option(help="A folder, a .gguf file, or a name on a hub, to run prompts with.")
    ] = None,
    prompts: Annotated[
        str | None, typer.Option(metavar="FILE", help="A file with one prompt a line, in UTF-8; - reads stdin.")
    ] = None,
    source: Annotated[
        str | None, typer.Option("--from", metavar="TRACE", help="Or take the requests of another trace.")
    ] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Use the model's chat template.")] = False,
    max_tokens: Annotated[int, typer.Option(min=1, help="New tokens of each prompt, at most.")] = 64,
    max_running: Annotated[int, typer.Option(min=1, help="Prompts that run at once, at most.")] = 8,
    steps: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Also write how long the engine's steps took, for replay --fit."),
    ] = None,
    block_size: BlockSize = None,
    on_error: OnError = OnErrorChoice.FATAL,
    tokenizer: Tokenizer = None,
    limit: Limit = None,
    at_once: AtOnce = 16,
    as_json: AsJson = False,
) -> None:
    """Record requests as a trace of hashes, without text or tokens: of a model that runs, or of another trace."""
    with errors_told(status=2):
        if (model is None) == (source is None) or (model is None) != (prompts is None):
            raise ArgumentError("give either --model and --prompts, or --from")
        texts = [] if model is None else read_prompts(None, prompts)
    with errors_told(status=1):
        if source is not None:
            from kvist.lab.recording import record as record_trace

            read = opened(source, on_error, tokenizer, limit, at_once)
            with writing(out) as path:
                num_written = record_trace(_counted(read, "recorded"), path, block_size=block_size)
            tell_problems(read.problems)
        else:
            assert model is not None
            with writing(out) as path:
                num_written = _run_recorded(model, texts, path, steps, block_size or 16, max_tokens, max_running, chat)
    _say_written(num_written, out, as_json)


def _synthetic(
    workload: str, num_requests: int, rate: float | None, seed: int, form: FormChoice, block_size: int | None
) -> Iterable[Request]:
    from dataclasses import replace

    from kvist.lab.synthetic import WORKLOADS, SyntheticTrace
    from kvist.lab.traces import mooncake

    if workload not in WORKLOADS:
        raise ArgumentError(f"there is no workload {workload!r}; it is one of {', '.join(WORKLOADS)}")
    chosen = WORKLOADS[workload] if rate is None else replace(WORKLOADS[workload], sessions_per_s=rate)
    size = (block_size or mooncake.BLOCK_SIZE) if form is FormChoice.MOONCAKE else None
    return SyntheticTrace(chosen, num_requests, seed=seed, block_size=size)


def _write(requests: Iterable[Request] | None, out: Path, form: FormChoice, block_size: int | None) -> int:
    from kvist.lab.traces import mooncake, tokens

    assert requests is not None
    counted = _counted(requests, "written")
    with writing(out) as path:
        if form is FormChoice.TOKENS:
            return tokens.write(counted, path)
        return mooncake.write(counted, path, block_size=block_size)


def check_writable(out: Path) -> None:
    """Raise ArgumentError for a file that cannot be written, before what it is to have is computed."""
    if not out.parent.is_dir():
        raise ArgumentError(f"{out} cannot be written: there is no folder {out.parent}")
    if out.is_dir():
        raise ArgumentError(f"{out} cannot be written: it is a folder")
    if not os.access(out.parent if not out.exists() or out.is_file() else out, os.W_OK):
        raise ArgumentError(f"{out} cannot be written: no permission")


@contextmanager
def writing(out: Path) -> Iterator[Path]:
    """Give a file to write, which takes the place of `out` when it is whole; pipes are written directly."""
    check_writable(out)
    if out.exists() and not out.is_file():
        yield out
        return
    begun = out.with_name(f".begun-{out.name}")
    try:
        yield begun
        begun.replace(out)
    finally:
        begun.unlink(missing_ok=True)


def _counted(requests: Iterable[Request], what: str) -> Iterator[Request]:
    """Yield requests, with their number on stderr where that is a terminal; raises TraceError where there are none."""
    console = Console(stderr=True)
    columns = (SpinnerColumn(), TextColumn("{task.completed:,.0f} requests {task.description}"), TimeElapsedColumn())
    num_requests = 0
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(what, total=None)
        for request in requests:
            num_requests += 1
            yield request
            if not num_requests % 100:
                progress.update(task, completed=num_requests)
    if not num_requests:
        raise TraceError("has no requests", file=str(getattr(requests, "path", "the trace")))


def _run_recorded(
    model: str, texts: list[str], out: Path, steps: Path | None, block_size: int, max_tokens: int, max_running: int,
    chat: bool,
) -> int:  # fmt: skip
    from kvist.lab.recording import TraceRecorder
    from kvist.lab.replay import StepTimer

    serve: Any = import_serve()
    decoder, tokenizer = load(model, None)
    prompts = [tokenize(tokenizer, text, chat=chat) for text in texts]
    num_blocks = default_num_blocks(decoder, prompts, block_size, max_tokens)
    config = serve.cache_config(decoder, num_blocks=num_blocks, block_size=block_size, max_sequences=max_running)
    sampling = serve.SamplingParams(max_new_tokens=max_tokens)
    with serve.Engine(decoder, config) as engine, TraceRecorder(out, block_size=block_size) as recorder:
        recorder.attach(engine)
        with StepTimer(engine.scheduler) as timer:
            run_prompts(engine, prompts, sampling)
        if steps is not None:
            _write_steps(steps, timer.steps)
        return _closed(recorder)


def _closed(recorder: TraceRecorder) -> int:
    recorder.close()
    return recorder.num_recorded


def _write_steps(path: Path, steps: Iterable[Any]) -> None:
    from dataclasses import asdict

    path.write_text("".join(json.dumps(asdict(step)) + "\n" for step in steps), encoding="utf-8")


def _say_written(num_written: int, out: Path, as_json: bool) -> None:
    num_bytes = out.stat().st_size
    if as_json:
        print(json.dumps({"file": str(out), "num_requests": num_written, "num_bytes": num_bytes}))
    else:
        print(f"kvist: {num_written:,} requests in {out}, {num_bytes:,} bytes", file=sys.stderr)
