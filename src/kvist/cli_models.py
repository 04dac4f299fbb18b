"""What commands that run a model have in common: prompts from files, loading, and a bar of what is finished."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from kvist.errors import ArgumentError

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from kvist.serve import Engine, Generation, SamplingParams

__all__ = ["default_num_blocks", "import_serve", "load", "read_prompts", "run_prompts", "tokenize"]

# A cache that holds every prompt whole is made no larger than this unless --blocks asks for it.
DEFAULT_CACHE_BYTES = 2 * 2**30


def read_prompts(prompt: str | None, file: str | None) -> list[str]:
    """Return the one prompt, or the lines of a file ("-" for stdin) that are not blank."""
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


def import_serve() -> Any:
    """Import what needs torch, only when a command runs that does."""
    try:
        import kvist.serve.engine
    except ModuleNotFoundError as error:
        raise OSError(f"generate needs {error.name}; pip install 'kvist[serve]'") from error
    return kvist.serve


def load(model: str, cache_folder: Path | None) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a model and its tokenizer, from a folder, a file, or a hub."""
    from kvist.serve.model import is_hub_name, load_model, loading_quietly

    if is_hub_name(model):
        print(f"kvist: no folder is named {model}, trying the hub", file=sys.stderr)
    with loading_quietly():
        return load_model(model, cache_folder=cache_folder)


def tokenize(tokenizer: PreTrainedTokenizerBase, text: str, *, chat: bool) -> list[int]:
    """Return the token ids of a prompt, in the model's chat template if asked for."""
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


def default_num_blocks(
    decoder: PreTrainedModel, prompts: Sequence[Sequence[int]], block_size: int, max_tokens: int
) -> int:
    """Enough for all prompts at once, as far as `DEFAULT_CACHE_BYTES` go, and always for the longest."""
    from kvist.serve import cache_config

    each = [-(-(len(prompt) + max_tokens) // block_size) for prompt in prompts]
    block_bytes = cache_config(decoder, num_blocks=1, block_size=block_size).block_bytes
    return max(*each, min(sum(each), DEFAULT_CACHE_BYTES // block_bytes))


def run_prompts(engine: Engine, prompts: Sequence[Sequence[int]], sampling: SamplingParams) -> list[Generation]:
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
