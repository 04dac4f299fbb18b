"""The commands on what a cache tells of itself: `kvist events convert`, `index` and `tail`, and `kvist replay`."""

from __future__ import annotations

import json
import sys
from base64 import b64encode
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import IO, Annotated, Any

import typer

from kvist.cli_errors import errors_told
from kvist.errors import ArgumentError, WireError

__all__ = ["add_commands"]

MAX_BATCH_BYTES = 1 << 28
"""A publisher that sends a longer frame is cut off."""

EXAMPLES = """
\b
Examples:
  kvist events tail tcp://localhost:5557 > events.vllm
  kvist events convert vllm kvist events.vllm
  kvist events index vllm worker-1.vllm worker-2.vllm
  kvist replay calls.journal --stop-at 1200 --state
"""

events = typer.Typer(help="Read, convert and index streams of KV cache events.", no_args_is_help=True, epilog=EXAMPLES)


def add_commands(app: typer.Typer) -> None:
    """Add the commands to the command line."""
    app.add_typer(events, name="events")
    app.command(epilog=EXAMPLES)(replay)


@events.command()
def convert(
    source: Annotated[str, typer.Argument(help="The format of the lines: kvist, vllm, sglang, trtllm, dynamo, ...")],
    target: Annotated[str, typer.Argument(help="The format to write; messages of binary formats are base64 lines.")],
    file: Annotated[Path | None, typer.Argument(help="The file to read; stdin if none.")] = None,
) -> None:
    """Write events of one format in another, line by line."""
    from kvist.wire import convert as convert_lines

    with errors_told(status=1), _opened(file) as lines:
        for line in convert_lines(lines, source, target):
            print(line, flush=True)


@events.command()
def index(
    source: Annotated[str, typer.Argument(help="The format of the files.")],
    files: Annotated[list[Path], typer.Argument(help="The events of one worker each, named as the file is.")],
    query: Annotated[
        str | None, typer.Option(metavar="HASH,...", help="Hashes of a prompt's blocks, hex or int.")
    ] = None,
) -> None:
    """Say what each worker has, by tier and group, or how much of a prompt; one JSON object a worker."""
    from kvist.wire import PrefixIndex, decode_line

    found = PrefixIndex()
    with errors_told(status=1):
        for file in files:
            with file.open(encoding="utf-8") as lines:
                for line in filter(str.strip, lines):
                    gap = found.apply(file.stem, decode_line(line, source, worker=file.stem))
                    if gap is not None:
                        print(f"kvist: {file}: {gap}", file=sys.stderr)
    if query is not None:
        with errors_told(status=2):
            hashes = [_hash_of(text) for text in query.split(",")]
        for each in found.query(hashes):
            print(json.dumps({"worker": each.worker, "num_blocks": each.num_blocks, "tiers": dict(each.per_tier)}))
        return
    for worker, rank in found.workers:
        blocks = found.blocks(worker, rank=rank)
        counts = [{"group": group, "tier": tier, "num_blocks": len(held)} for (group, tier), held in blocks.items()]
        print(json.dumps({"worker": worker, "rank": rank, "blocks": counts}))


@events.command()
def tail(
    endpoint: Annotated[str, typer.Argument(help="Where a publisher sends vLLM-style events, as tcp://host:5557.")],
    topic: Annotated[str, typer.Option(help="Only events of topics that begin with this.")] = "",
    target: Annotated[str, typer.Option("--to", help="The format to print; vllm prints base64 lines.")] = "vllm",
    count: Annotated[int | None, typer.Option(min=1, help="Stop after so many batches.")] = None,
) -> None:
    """Print the events that a publisher sends from now on."""
    from kvist.wire import Converter

    with errors_told(status=1):
        converter = None if target == "vllm" else Converter(target, remembers=target != "kvist")
        for batch in _received(endpoint, topic, count):
            try:
                print(b64encode(batch).decode() if converter is None else _converted(converter, batch), flush=True)
            except (WireError, ArgumentError) as error:  # of one batch; those that follow may be well
                print(f"kvist: {error}", file=sys.stderr, flush=True)


def replay(
    journal: Annotated[Path, typer.Argument(help="A file that a Journal has written.")],
    stop_at: Annotated[int | None, typer.Option(min=0, help="Make only so many calls.")] = None,
    state: Annotated[bool, typer.Option("--state", help="Show what runs, is held and is cached then.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Make the calls of a journal again, and say whether all comes out as it did; exit status 1 if not."""
    from kvist.journal import report
    from kvist.testing.odd_policies import ODD_POLICIES

    with errors_told(status=1):
        told = report(journal, stop_at=stop_at, state=state, policies=ODD_POLICIES)
    if as_json:
        print(json.dumps(told))
    else:
        for name, value in told.items():
            print(f"{name}: {value}" if not isinstance(value, dict | list) else f"{name}: {json.dumps(value)}")
    if told["problem"] is not None:
        raise typer.Exit(1)


def _opened(file: Path | None) -> AbstractContextManager[IO[str]]:
    return nullcontext(sys.stdin) if file is None else file.open(encoding="utf-8")


def _hash_of(text: str) -> bytes | int:
    text = text.strip()
    if text.isdecimal():
        return int(text)
    try:
        return bytes.fromhex(text)
    except ValueError:
        raise ArgumentError(f"--query: {text!r} is no hash, must be an int or hex digits") from None


def _received(endpoint: str, topic: str, count: int | None) -> Iterator[bytes]:
    """Yield the batches that come, for ever or so many."""
    try:
        import zmq
    except ModuleNotFoundError as error:
        raise OSError(f"tail needs {error.name}; pip install 'kvist[events]'") from error
    with zmq.Context() as context, context.socket(zmq.SUB) as socket:
        socket.setsockopt_string(zmq.SUBSCRIBE, topic)
        socket.linger = 0
        socket.maxmsgsize = MAX_BATCH_BYTES
        socket.connect(endpoint)
        num_received = 0
        while count is None or num_received < count:
            frames = socket.recv_multipart()
            num_received += 1
            yield frames[-1]


def _converted(converter: Any, batch: bytes) -> str:
    from kvist.wire import vllm

    message: bytes = converter.encode(vllm.decode(batch))
    return message.decode().rstrip("\n")
