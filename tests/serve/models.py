"""Tiny decoders with random weights: what attention sees differs as in real ones, and every test can afford them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import transformers

if TYPE_CHECKING:
    from transformers import PreTrainedModel

TINY_KINDS = ("llama", "qwen2", "qwen3", "mistral", "smollm3")
"""Plain full attention with GQA; qwen2 biases its projections, qwen3 norms Q and K, smollm3 has layers without RoPE."""

VOCAB_SIZE = 512
NUM_LAYERS = 4

_CONFIGS: dict[str, type[Any]] = {
    "llama": transformers.LlamaConfig,
    "qwen2": transformers.Qwen2Config,
    "qwen3": transformers.Qwen3Config,
    "mistral": transformers.MistralConfig,
    "smollm3": transformers.SmolLM3Config,
}


def tiny_config(kind: str, **changes: Any) -> Any:
    """Return the configuration of a tiny decoder of `kind`, with `changes` laid over it."""
    settings: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": NUM_LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 4096,
        # Weights this large keep greedy text from settling on one token, which would prove nothing.
        "initializer_range": 0.3,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    if kind == "mistral":
        settings["sliding_window"] = None
    return _CONFIGS[kind](**(settings | changes))


def tiny_model(kind: str, *, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """Return a tiny float32 decoder of `kind` in eval mode; the same weights for the same seed.

    Its end-of-sequence token is left out of the generation config, so `generate` runs to its token limit
    unless the test names one.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: PreTrainedModel = transformers.AutoModelForCausalLM.from_config(
            tiny_config(kind, **changes), dtype=torch.float32
        )
    model.generation_config.eos_token_id = None
    return model.eval()
