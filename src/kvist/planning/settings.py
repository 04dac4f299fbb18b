"""What the settings in a model's config.json must look like before anything is made of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

__all__ = ["Settings", "form_problems", "is_size"]

Settings = Mapping[str, Any]
"""The contents of a config.json, or of a part of it."""

# Settings that are ints of at least 0, where they are given; what is 0 counts as not given.
_SIZES = (
    "num_hidden_layers", "n_layer", "num_attention_heads", "n_head", "hidden_size", "n_embd", "num_key_value_heads",
    "num_kv_heads", "head_dim", "sliding_window", "sliding_window_pattern", "attention_chunk_size", "kv_lora_rank",
    "qk_rope_head_dim", "global_head_dim", "num_global_key_value_heads", "num_kv_shared_layers", "max_window_layers",
    "full_attention_interval", "linear_num_value_heads", "linear_num_key_heads", "linear_key_head_dim",
    "linear_value_head_dim", "linear_conv_kernel_dim", "mamba_n_heads", "mamba_d_head", "mamba_d_state",
    "mamba_n_groups", "mamba_d_conv", "mamba_d_ssm", "mamba_expand", "conv_L_cache", "vocab_size", "n_inner",
    "intermediate_size_mlp", "moe_intermediate_size", "shared_expert_intermediate_size", "n_routed_experts",
    "num_local_experts", "num_experts", "num_experts_per_tok", "top_k_experts", "n_shared_experts", "q_lora_rank",
    "qk_nope_head_dim", "v_head_dim", "first_k_dense_replace", "decoder_sparse_step", "interleave_moe_layer_step",
    "block_multiple_of", "vocab_size_per_layer_input", "hidden_size_per_layer_input", "max_position_embeddings",
)  # fmt: skip
_LISTS = (
    "layer_types", "layers_block_type", "attn_layer_indices", "full_attn_idxs", "no_rope_layers", "moe_layers",
    "mlp_only_layers",
)  # fmt: skip

_NAMES = ("layer_types", "layers_block_type")


def form_problems(settings: Settings) -> Iterator[str]:
    """Yield what is of another type than it should be, so that nothing after this meets any.

    >>> list(form_problems({"num_hidden_layers": 32, "head_dim": "128"}))
    ["the model's config has head_dim='128', which must be an int of at least 0"]
    """
    for name in _SIZES:
        value = settings.get(name)
        if value is not None and not is_size(value) and (value != 0 or isinstance(value, bool | float)):
            yield f"the model's config has {name}={value!r}, which must be an int of at least 0"
    for name in _LISTS:
        value = settings.get(name)
        if value is not None and not isinstance(value, list | tuple):
            yield f"the model's config has {name}={value!r}, which must be a list"
        elif value and name in _NAMES and not all(isinstance(each, str) for each in value):
            yield f"the model's config has {name}={value!r}, which must be a list of names"
    if not isinstance(settings.get("model_type", ""), str):
        yield f"the model's config has model_type={settings['model_type']!r}, which must be a name"
    yield from _width_problems(settings.get("intermediate_size", 1))
    yield from _exception_problems(settings.get("per_layer_config") or {})


def is_size(value: object) -> bool:
    """Say whether a value is a positive int."""
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _width_problems(width: object) -> Iterator[str]:
    if not all(map(is_size, width)) if isinstance(width, list) else not is_size(width):
        yield f"the model's config has intermediate_size={width!r}, which must be a positive int, or one for each layer"


def _exception_problems(exceptions: object) -> Iterator[str]:
    """Yield what is wrong with settings that some layers have of their own."""
    if not isinstance(exceptions, Mapping) or not all(isinstance(each, Mapping) for each in exceptions.values()):
        yield f"the model's config has per_layer_config={exceptions!r}, which must have settings for each layer"
        return
    for own in exceptions.values():
        yield from form_problems(own)
