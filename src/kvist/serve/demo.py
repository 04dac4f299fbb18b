"""Three questions about one long document: the document is prefilled once, and the text is `transformers`' own.

Run it as `python -m kvist.serve.demo`. Exits with status 1 if any token differs from what `transformers` alone
generates, or if the time to first token with the document cached is more than a fifth of the time without.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console
from rich.table import Table

from kvist.serve.engine import Engine, Generation
from kvist.serve.model import SMOLLM2, ModelNotFound, cache_config, load_model, loading_quietly
from kvist.serve.sampling import SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

__all__ = ["main"]

DOCUMENT = ("context-managers", "with", "exceptions", "try")
QUESTIONS = (
    "What is a context manager?",
    "What can the with statement be used for?",
    "What does the finally clause do?",
)
INSTRUCTION = "Answer the question in one sentence."
NUM_DOCUMENT_TOKENS = 2400
MAX_NEW_TOKENS = 40
NUM_BLOCKS = 512
BLOCK_SIZE = 16
MAX_WARM_SHARE = 0.2


@dataclass(frozen=True, slots=True)
class Answer:
    """One question's text: with reuse off, with the document cached (not for the first), and by `transformers`."""

    question: str
    cold: Generation
    warm: Generation | None
    reference: list[int]

    @property
    def is_equal(self) -> bool:
        """Whether every token is the same in all of them."""
        generations = [self.cold, self.warm] if self.warm else [self.cold]
        return all(generation.token_ids == self.reference for generation in generations)

    @property
    def warm_share(self) -> float | None:
        """Time to first token with the document cached, as a share of the time without."""
        return _first_token_s(self.warm) / _first_token_s(self.cold) if self.warm else None


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demo; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m kvist.serve.demo", description=__doc__)
    parser.add_argument(
        "--cache-folder", type=Path, default=Path(".cache/kvist"), help="where the converted model is kept (538 MB)"
    )
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    try:
        model, tokenizer = _load(options.cache_folder)
    except (ModelNotFound, ImportError) as error:
        _tell(f"demo: {error}")
        return 1
    answers = _ask(model, _prompts(tokenizer))
    _print_answers(answers, tokenizer)
    return _verdict(answers)


def _load(cache_folder: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    _tell(f"loading {SMOLLM2}; converted once, from GGUF into {cache_folder}, which takes about a minute")
    with loading_quietly():
        return load_model(SMOLLM2, device="cpu", cache_folder=cache_folder)


def _prompts(tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    """Return each question's tokens: the document, then the question, in the model's chat template."""
    text = "\n\n".join(topics[topic] for topic in DOCUMENT)
    document = tokenizer.decode(tokenizer(text, add_special_tokens=False).input_ids[:NUM_DOCUMENT_TOKENS])
    return [_prompt(tokenizer, f"{document}\n\n{INSTRUCTION} {question}") for question in QUESTIONS]


def _prompt(tokenizer: PreTrainedTokenizerBase, message: str) -> list[int]:
    written = tokenizer.apply_chat_template(
        [{"role": "user", "content": message}], tokenize=False, add_generation_prompt=True
    )
    token_ids: list[int] = tokenizer(written, add_special_tokens=False).input_ids
    return token_ids


def _ask(model: PreTrainedModel, prompts: list[list[int]]) -> list[Answer]:
    engine = Engine(model, cache_config(model, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, max_sequences=1))
    # Weights are read from disk when first used, which is not what is measured here.
    engine.generate([prompts[0][:BLOCK_SIZE]], SamplingParams(max_new_tokens=1))
    answers: list[Answer] = []
    for question, prompt in zip(QUESTIONS, prompts, strict=True):
        _tell(f"{question} ({len(prompt)} tokens)")
        # The warm one goes first: the cold one leaves the question in the cache, too.
        warm = _generate(engine, prompt, reuse=True) if answers else None
        cold = _generate(engine, prompt, reuse=False)
        _tell("  transformers alone")
        answers.append(Answer(question, cold, warm, _reference(model, prompt)))
    return answers


def _generate(engine: Engine, prompt: list[int], *, reuse: bool) -> Generation:
    _tell("  Kvist, with what is cached" if reuse else "  Kvist, with reuse off")
    generation = engine.submit(prompt, SamplingParams(max_new_tokens=MAX_NEW_TOKENS), reuse=reuse)
    while not generation.is_finished:
        engine.step()
    return generation


def _reference(model: PreTrainedModel, prompt: list[int]) -> list[int]:
    inputs = torch.tensor([prompt], device=model.device)
    generate: Any = model.generate
    output = generate(inputs, attention_mask=torch.ones_like(inputs), max_new_tokens=MAX_NEW_TOKENS, do_sample=False)
    tokens: list[int] = output[0, len(prompt) :].tolist()
    return tokens


def _print_answers(answers: list[Answer], tokenizer: PreTrainedTokenizerBase) -> None:
    table = Table("question", title=f"{SMOLLM2}, float32, one thread, a document of {NUM_DOCUMENT_TOKENS} tokens")
    for heading in ("prompt tokens", "cached tokens", "first token cold", "first token warm"):
        table.add_column(heading, justify="right")
    for answer in answers:
        table.add_row(answer.question, *_numbers(answer))
    console = Console(width=None if sys.stdout.isatty() else 110)
    console.print(table)
    print("cold: reuse off; warm: whatever earlier questions left in the cache, nothing for the first")
    for answer in answers:
        text = str(tokenizer.decode(answer.cold.token_ids, skip_special_tokens=True))
        print(f"\n{answer.question}\n  {' '.join(text.split())}")
    print()


def _numbers(answer: Answer) -> list[str]:
    cold_s = _first_token_s(answer.cold)
    counts = [str(answer.cold.stats.num_prompt_tokens)]
    if answer.warm is None:
        return [*counts, str(answer.cold.stats.num_cached_tokens), f"{cold_s:.2f} s", "-"]
    share = f"{_first_token_s(answer.warm):.2f} s ({answer.warm_share:.0%})"
    return [*counts, str(answer.warm.stats.num_cached_tokens), f"{cold_s:.2f} s", share]


def _verdict(answers: list[Answer]) -> int:
    """Say whether the demo shows what it promises; returns the exit status."""
    num_tokens = sum(len(answer.reference) for answer in answers)
    differing = [answer.question for answer in answers if not answer.is_equal]
    shares = [share for answer in answers if (share := answer.warm_share) is not None]
    if differing:
        print(f"FAILED: tokens differ from what transformers generates: {'; '.join(differing)}")
    else:
        print(f"all {num_tokens} tokens equal what transformers alone generates, cold and warm")
    if max(shares) > MAX_WARM_SHARE:
        print(
            f"FAILED: the first token took {max(shares):.0%} of its cold time, at most {MAX_WARM_SHARE:.0%} is promised"
        )
    return int(bool(differing) or max(shares) > MAX_WARM_SHARE)


def _first_token_s(generation: Generation) -> float:
    taken = generation.stats.time_to_first_token_s
    assert taken is not None, "a finished generation has a first token"
    return taken


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
