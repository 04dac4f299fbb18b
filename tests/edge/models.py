"""Small caches that the tests of this folder share, and numbers to fill them with."""

import torch

from kvist.edge import HybridCache, HybridConfig, LayerConfig, PoolConfig, RecurrentConfig

LAYERS = (LayerConfig(4, 64), LayerConfig(2, 128))
PAIRS = (LayerConfig(2, 4), LayerConfig(1, 8))


def pool_config(layers=LAYERS, max_batch_size=2, max_sequence_length=200, **settings):
    return PoolConfig(len(layers), max_batch_size, max_sequence_length, list(layers), **settings)


def recurrent_config(num_layers, max_batch_size, **settings):
    sizes = {"num_heads": 2, "head_dim": 3, "state_size": 4, "conv_dim": 5, "conv_kernel": 6} | settings
    return RecurrentConfig(num_layers, max_batch_size, **sizes)


def cache(layers=PAIRS, *, num_recurrent=0, max_batch_size=8, max_sequence_length=32, device="cpu", **settings):
    """Attention layers, recurrent layers behind them, pages of 4 tokens."""
    verify = settings.pop("max_verify_tokens", 0)
    settings = {"page_size": 4} | settings
    attention = pool_config(layers, max_batch_size, max_sequence_length, **settings)
    recurrent = recurrent_config(num_recurrent, max_batch_size, max_verify_tokens=verify)
    types = ["attention"] * len(layers) + ["mamba"] * num_recurrent
    return HybridCache(HybridConfig(types, attention, recurrent, max_batch_size), device)


def owned_pools(kept):
    return [kept.kv.pool(layer) for layer in kept.kv.owners]


def state_planes(kept):
    layers = range(kept.states.num_layers)
    return [plane for layer in layers for plane in (kept.states.recurrent(layer), kept.states.conv(layer))]


def planes(kept):
    return owned_pools(kept) + state_planes(kept)


def bits(tensor):
    """A tensor as bytes: torch cannot compare 8-bit floats."""
    return tensor.contiguous().view(torch.uint8)


def fill(kept, seed=0):
    """Fill pools and states with numbers."""
    generator = torch.Generator().manual_seed(seed)
    for plane in planes(kept):
        plane.copy_(torch.randn(plane.shape, generator=generator))


def contents(kept):
    return [plane.clone() for plane in planes(kept)]


def alike(some, others):
    return all(torch.equal(bits(one), bits(other)) for one, other in zip(some, others, strict=True))
