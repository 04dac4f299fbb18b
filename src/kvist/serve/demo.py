"""Questions about one long document: the document is prefilled once, and the text is `transformers`' own.

Three are asked one after the other. Then another process reads the document and is killed, and two new ones find it: on
disk, and in Valkey, where a server can be started.

Run it as `python -m kvist.serve.demo`. Exits with status 1 if any token differs from what `transformers` alone
generates, if the time to first token with the document cached is more than a fifth of the time without, or if a new
process finds nothing.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console
from rich.table import Table

from kvist.serve.demo_tiers import Job, NoServer, Outcome, serve_elsewhere, valkey_server
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


@dataclass(frozen=True, slots=True)
class Found:
    """A question asked in a new process, with a tier that another process filled: what came of it, or why it was not.

    `asked` is the same question, asked before in this process.
    """

    tier: str
    asked: Answer
    outcome: Outcome | None
    why_not: str = ""

    @property
    def is_equal(self) -> bool:
        """Whether every token is the same as by `transformers`."""
        return self.outcome is None or self.outcome.token_ids == self.asked.reference

    @property
    def warm_share(self) -> float | None:
        """Time to first token with what the tier has, as a share of the time without."""
        return None if self.outcome is None else self.outcome.first_token_s / _first_token_s(self.asked.cold)


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
        prompts = _prompts(tokenizer)
        answers = _ask(model, prompts)
        found = _find_again(SMOLLM2, options.cache_folder, prompts, answers)
    except (ModelNotFound, ImportError, OSError) as error:
        _tell(f"demo: {error}")
        return 1
    _print_answers(answers, found, tokenizer)
    return _verdict(answers, found)


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


def _find_again(model: str, cache_folder: Path, prompts: list[list[int]], answers: list[Answer]) -> list[Found]:
    """Let a process read the document and kill it, and new ones find it: on disk, and in Valkey."""

    def job(prompt: list[int], directory: str | None, url: str | None, **settings: Any) -> Job:
        settings = {"max_new_tokens": MAX_NEW_TOKENS} | settings
        return Job(model, str(cache_folder), prompt, NUM_BLOCKS, BLOCK_SIZE, directory=directory, url=url, **settings)

    with ExitStack() as stack:
        cache_folder.mkdir(parents=True, exist_ok=True)
        directory = stack.enter_context(TemporaryDirectory(prefix="demo-", dir=cache_folder))
        url, why_not = None, ""
        try:
            url = stack.enter_context(valkey_server())
        except NoServer as error:
            why_not = str(error)
        _tell("another process reads the document, and is killed with SIGKILL")
        serve_elsewhere(job(prompts[0], directory, url, max_new_tokens=1, stays=True))
        _tell("a new process finds it on disk")
        found = [Found("disk", answers[1], serve_elsewhere(job(prompts[1], directory, None)))]
        _tell(f"no process finds it in Valkey: {why_not}" if why_not else "a new process finds it in Valkey")
        outcome = None if url is None else serve_elsewhere(job(prompts[2], None, url))
        return [*found, Found("Valkey", answers[2], outcome, why_not)]


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


def _print_answers(answers: list[Answer], found: list[Found], tokenizer: PreTrainedTokenizerBase) -> None:
    table = Table("question", title=f"{SMOLLM2}, float32, one thread, a document of {NUM_DOCUMENT_TOKENS} tokens")
    for heading in ("tokens", "cached", "first token cold", "first token warm"):
        table.add_column(heading, justify="right")
    for answer in answers:
        table.add_row(answer.question, *_numbers(answer))
    for each in found:
        table.add_row(f"{each.asked.question} ({each.tier})", *_numbers_found(each))
    console = Console(width=None if sys.stdout.isatty() else 120)
    console.print(table)
    print("cold: reuse off; warm: whatever earlier questions left in the cache, nothing for the first")
    print("disk, Valkey: by a new process, after the one that had read the document was killed with SIGKILL")
    for each in found:
        if each.why_not:
            print(f"{each.tier}: not asked, since {each.why_not}")
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


def _numbers_found(found: Found) -> list[str]:
    outcome, cold_s = found.outcome, f"{_first_token_s(found.asked.cold):.2f} s"
    if outcome is None:
        return [str(found.asked.cold.stats.num_prompt_tokens), "-", cold_s, "-"]
    share = f"{outcome.first_token_s:.2f} s ({found.warm_share:.0%})"
    return [str(outcome.num_prompt_tokens), str(outcome.num_cached_tokens), cold_s, share]


def _verdict(answers: list[Answer], found: list[Found]) -> int:
    """Say whether the demo shows what it promises; returns the exit status."""
    asked = [each for each in found if each.outcome is not None]
    texts = [(answer.question, answer.reference, answer.is_equal) for answer in answers]
    texts += [(f"{each.asked.question} ({each.tier})", each.asked.reference, each.is_equal) for each in asked]
    num_tokens = sum(len(reference) for _, reference, _ in texts)
    differing = [question for question, _, is_equal in texts if not is_equal]
    if differing:
        print(f"FAILED: tokens differ from what transformers generates: {'; '.join(differing)}")
    else:
        print(f"all {num_tokens} tokens equal what transformers alone generates, cold and warm")
    share = max(share for answer in answers if (share := answer.warm_share) is not None)
    if share > MAX_WARM_SHARE:
        print(f"FAILED: the first token took {share:.0%} of its cold time, at most {MAX_WARM_SHARE:.0%} is promised")
    missed = [each.tier for each in asked if each.outcome is not None and not each.outcome.num_cached_tokens]
    for tier in missed:
        print(f"FAILED: a new process found nothing in the tier {tier}")
    return int(bool(differing or missed) or share > MAX_WARM_SHARE)


def _first_token_s(generation: Generation) -> float:
    taken = generation.stats.time_to_first_token_s
    assert taken is not None, "a finished generation has a first token"
    return taken


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
