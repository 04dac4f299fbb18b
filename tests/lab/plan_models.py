"""The configs of five published models, as far as a plan reads them."""

LLAMA = {
    "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32,
    "num_hidden_layers": 32, "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 131072,
    "torch_dtype": "bfloat16", "tie_word_embeddings": False,
}  # fmt: skip
"""Llama 3.1 8B: full attention in all layers."""

GEMMA3 = {
    "model_type": "gemma3", "torch_dtype": "bfloat16", "vision_config": {"num_hidden_layers": 27, "hidden_size": 1152},
    "text_config": {
        "model_type": "gemma3_text", "hidden_size": 5376, "intermediate_size": 21504, "num_attention_heads": 32,
        "num_hidden_layers": 62, "num_key_value_heads": 16, "head_dim": 128, "sliding_window": 1024,
        "sliding_window_pattern": 6, "vocab_size": 262208, "max_position_embeddings": 131072,
    },
}  # fmt: skip
"""Gemma 3 27B: five windows, then full attention; the decoder is one of two parts."""

GPT_OSS = {
    "model_type": "gpt_oss", "hidden_size": 2880, "intermediate_size": 2880, "num_attention_heads": 64, "head_dim": 64,
    "num_hidden_layers": 24, "num_key_value_heads": 8, "num_local_experts": 32, "num_experts_per_tok": 4,
    "sliding_window": 128, "layer_types": ["sliding_attention", "full_attention"] * 12, "vocab_size": 201088,
    "max_position_embeddings": 131072, "tie_word_embeddings": False, "quantization_config": {"quant_method": "mxfp4"},
}  # fmt: skip
"""gpt-oss 20B: windows of 128 and full attention by turns, experts of 4 bits."""

DEEPSEEK_V3 = {
    "model_type": "deepseek_v3", "hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048,
    "num_attention_heads": 128, "num_key_value_heads": 128, "num_hidden_layers": 61, "first_k_dense_replace": 3,
    "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128,
    "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8, "vocab_size": 129280,
    "max_position_embeddings": 163840, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "quantization_config": {"quant_method": "fp8"},
}  # fmt: skip
"""DeepSeek V3: one latent of 576 numbers for all heads, weights of 8 bits."""

QWEN3_NEXT = {
    "model_type": "qwen3_next", "hidden_size": 2048, "intermediate_size": 5120, "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512, "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256,
    "num_hidden_layers": 48, "full_attention_interval": 4, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128,
    "linear_value_head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": 32, "num_experts": 512,
    "num_experts_per_tok": 10, "decoder_sparse_step": 1, "vocab_size": 151936, "max_position_embeddings": 262144,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16",
}  # fmt: skip
"""Qwen3-Next 80B: three recurrent layers, then full attention."""

MODELS = {"llama": LLAMA, "gemma3": GEMMA3, "gpt_oss": GPT_OSS, "deepseek_v3": DEEPSEEK_V3, "qwen3_next": QWEN3_NEXT}
