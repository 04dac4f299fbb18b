"""Tiny decoders with random weights: what layers see and keep differs as in real ones, and any test can afford them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import transformers

if TYPE_CHECKING:
    from transformers import PreTrainedModel

TINY_KINDS = ("llama", "qwen2", "qwen3", "mistral", "smollm3")
"""Plain full attention with GQA; qwen2 biases its projections, qwen3 norms Q and K, smollm3 has layers without RoPE."""

HYBRID_KINDS = (
    "windowed mistral", "gemma3_text", "gemma2", "gpt_oss", "cohere2", "olmo3", "gemma3n_text", "llama4_text",
    "deepseek_v3",
)  # fmt: skip
"""More than plain full attention: windows of 13 tokens in all layers or most, learned sinks (gpt_oss), soft-capped
scores (gemma2), layers that read the K and V of others (gemma3n), chunks of 13 tokens and queries scaled by their
position (llama4), latent K and V (deepseek_v3)."""

STATE_KINDS = ("qwen3_next", "falcon_h1", "lfm2")
"""Recurrent layers: between ones of full attention, in each layer beside its attention (falcon_h1), or only the inputs
of a short convolution (lfm2)."""

WINDOW = 13
VOCAB_SIZE = 512
NUM_LAYERS = 4

_SLIDING = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"] * 2}

_KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "mistral": ("mistral", {"sliding_window": None}),
    "windowed mistral": ("mistral", {"sliding_window": WINDOW}),
    "gemma3_text": ("gemma3_text", _SLIDING | {"query_pre_attn_scalar": 16}),
    "gemma2": ("gemma2", _SLIDING | {"query_pre_attn_scalar": 16, "attn_logit_softcapping": 5.0}),
    "gpt_oss": ("gpt_oss", _SLIDING | {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "cohere2": ("cohere2", _SLIDING),
    "olmo3": ("olmo3", _SLIDING),
    "gemma3n_text": (
        "gemma3n_text",
        _SLIDING | {
            "layer_types": ["sliding_attention", "full_attention"] * 3, "num_hidden_layers": 6,
            "num_kv_shared_layers": 3, "vocab_size_per_layer_input": VOCAB_SIZE, "hidden_size_per_layer_input": 16,
            "laurel_rank": 8, "altup_num_inputs": 2, "activation_sparsity_pattern": [0.5, 0.0] * 3,
            "intermediate_size": [128] * 6,
        },
    ),
    "llama4_text": (
        "llama4_text",
        {
            "attention_chunk_size": WINDOW, "layer_types": ["chunked_attention", "full_attention"] * 2,
            "no_rope_layers": [1, 0, 1, 0], "floor_scale": 16, "attn_temperature_tuning": True,
            "num_local_experts": 4, "intermediate_size_mlp": 128,
        },
    ),
    "deepseek_v3": (
        "deepseek_v3",
        {
            "kv_lora_rank": 24, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 12,
            "head_dim": 8, "num_key_value_heads": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2,
            "topk_group": 1, "first_k_dense_replace": 1, "moe_intermediate_size": 32,
        },
    ),
    "qwen3_next": (
        "qwen3_next",
        {
            "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8,
            "linear_value_head_dim": 8, "linear_conv_kernel_dim": 4, "num_experts": 4, "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 32,
        },
    ),
    "falcon_h1": (
        "falcon_h1",
        {
            "mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 1,
            "mamba_d_conv": 4, "mamba_chunk_size": 16,
        },
    ),
    "lfm2": ("lfm2", {"layer_types": ["conv", "full_attention"] * 2, "block_ff_dim": 128}),
}  # fmt: skip


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
    model_type, own = _KINDS.get(kind, (kind, {}))
    return transformers.AutoConfig.for_model(model_type, **(settings | own | changes))


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
