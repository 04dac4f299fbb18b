"""What an Edge-LLM cache is to hold: attention layers, recurrent layers, and the model that they make up."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import isfinite, prod
from typing import Any

from kvist.config import DTYPE_BYTES
from kvist.edge.geometry import (
    MAX_POOL_PAGES,
    TOKENS_PER_PAGE,
    max_capacity,
    minimum_pool_pages,
    minimum_sliding_pages,
    padded_capacity,
    pages_per_sequence,
)
from kvist.errors import ConfigError

__all__ = ["HybridConfig", "LayerConfig", "PoolConfig", "RecurrentConfig"]

FP8_DTYPES = ("float8_e4m3fn", "float8_e5m2")
POOL_DTYPES = ("float16", "bfloat16", "float32", *FP8_DTYPES)
STATE_DTYPES = ("float16", "bfloat16", "float32")
LAYER_TYPES = ("attention", "mamba")
MAX_BYTES = 2**63 - 1


@dataclass(frozen=True, slots=True)
class LayerConfig:
    """One attention layer; `KVLayerConfig`.

    `capacity` is the tokens that a layer with a sliding window keeps, 0 where it keeps all (`kvCacheCapacity`).
    `scales` are what stored fp8 numbers of Q, K and V are multiplied by (`qkv_scales`). A layer that `shares_layer`,
    by its index among the attention layers, reads that layer's cache and writes none (`kvSharingDonors`).
    """

    num_kv_heads: int
    head_dim: int
    capacity: int = 0
    scales: tuple[float, float, float] = (1.0, 1.0, 1.0)
    shares_layer: int | None = None

    @property
    def token_elements(self) -> int:
        """Elements of K, and of V, of one token."""
        return self.num_kv_heads * self.head_dim


@dataclass(frozen=True, slots=True)
class PoolConfig:
    """The attention layers of a model and the pages they have; `KVCacheManager::Config`, in its order.

    `layers` are by index among the attention layers, not among all layers. `num_pages` is 0 for the fewest that hold a
    full batch, else all there are: more can be retained for later requests, and with `allow_undercommit` there may be
    fewer. With `bounded_sliding`, layers with a window have a pool of `num_sliding_pages` of their own (0: the fewest).
    A page has `page_size` tokens, a power of two.

    >>> config = PoolConfig(2, 2, 200, [LayerConfig(4, 64), LayerConfig(2, 128)])
    >>> config.padded_capacity, config.total_pages, config.is_uniform
    (256, 4, False)
    """

    num_attention_layers: int = 0
    max_batch_size: int = 0
    max_sequence_length: int = 0
    layers: Sequence[LayerConfig] = ()
    dtype: str = "float16"
    num_pages: int = 0
    num_sliding_pages: int = 0
    bounded_sliding: bool = True
    page_size: int = TOKENS_PER_PAGE
    allow_undercommit: bool = False

    @property
    def padded_capacity(self) -> int:
        """Tokens of a slot: `max_sequence_length` in whole pages."""
        return padded_capacity(self.max_sequence_length, self.page_size)

    @property
    def pages_per_sequence(self) -> int:
        """Pages of a slot, the columns of a page table."""
        return pages_per_sequence(self.max_sequence_length, self.page_size)

    @property
    def minimum_pages(self) -> int:
        """Pages of a full batch of full sequences."""
        return minimum_pool_pages(self.max_batch_size, self.max_sequence_length, self.page_size)

    @property
    def total_pages(self) -> int:
        """Pages of each layer that keeps all tokens."""
        return self.num_pages or self.minimum_pages

    @property
    def sliding_capacity(self) -> int | None:
        """Tokens that layers with a pool of their own for windows keep; None where there are no such layers."""
        windows = (layer.capacity for layer in self.layers if self.is_sliding(layer))
        return next(windows, None)

    @property
    def minimum_sliding_pages(self) -> int:
        """Pages of a full batch of windows, 0 where no layer has a pool for them."""
        window = self.sliding_capacity
        return 0 if window is None else minimum_sliding_pages(self.max_batch_size, window, self.page_size)

    @property
    def total_sliding_pages(self) -> int:
        """Pages of each layer that keeps windows, 0 where none does."""
        return self.num_sliding_pages or self.minimum_sliding_pages

    @property
    def is_uniform(self) -> bool:
        """Whether every layer has as many heads and as large ones as the first; so do none."""
        return len({(layer.num_kv_heads, layer.head_dim) for layer in self.layers}) < 2

    @property
    def page_bytes(self) -> int:
        """Bytes of one page, K and V, in all layers that have a cache of their own.

        >>> PoolConfig(2, 1, 128, [LayerConfig(2, 4), LayerConfig(1, 8)]).page_bytes
        8192
        """
        own = (layer.token_elements for layer in self.layers if layer.shares_layer is None)
        return 2 * self.page_size * sum(own) * DTYPE_BYTES[self.dtype]

    def is_sliding(self, layer: LayerConfig) -> bool:
        """Whether a layer keeps a window in a pool of its own; one as long as a sequence is no window."""
        return self.bounded_sliding and 0 < layer.capacity < self.max_sequence_length

    def pages_of(self, layer: LayerConfig) -> int:
        """Pages of a layer's pool."""
        return self.total_sliding_pages if self.is_sliding(layer) else self.total_pages

    def layer_bytes(self, layer: LayerConfig) -> int:
        """Bytes of a layer's pool, 0 where it shares another's."""
        own = layer.token_elements if layer.shares_layer is None else 0
        return 2 * self.pages_of(layer) * self.page_size * own * DTYPE_BYTES[self.dtype]

    def validate(self) -> None:
        """Raise `ConfigError` with all problems, the first of which is what Edge-LLM's constructor would name."""
        if problems := self.problems():
            raise ConfigError(problems)

    def problems(self) -> list[str]:
        """List what is wrong, in the order of Edge-LLM's checks; what cannot be judged for an earlier one is left out.

        The order: dtype, number of layers, batch, sequence length, its largest value, layers given, pages, each layer.
        """
        found = [*self._size_problems()]
        if not found:
            found = [*self._page_problems()]
            each = [problem for at in range(len(self.layers)) for problem in self._layer_problems(at)]
            found += each or self._window_problems()
        return found

    def _size_problems(self) -> Iterator[str]:
        if self.dtype not in POOL_DTYPES:
            yield f"dtype is {self.dtype!r}, must be one of {', '.join(POOL_DTYPES)}"
        if not _is_int(self.num_attention_layers, 0):
            yield f"num_attention_layers is {self.num_attention_layers!r}, must be an int of at least 0"
        if not _is_int(self.max_batch_size, 1):
            yield f"max_batch_size is {self.max_batch_size!r}, must be a positive int"
        page_is_right = _is_int(self.page_size, 1) and self.page_size & (self.page_size - 1) == 0
        if not _is_int(self.max_sequence_length, 1):
            yield f"max_sequence_length is {self.max_sequence_length!r}, must be a positive int"
        elif page_is_right and self.max_sequence_length > max_capacity(self.page_size):
            limit = max_capacity(self.page_size)
            yield f"max_sequence_length is {self.max_sequence_length}, must be at most {limit}: the last int32 page"
        if len(self.layers) != self.num_attention_layers:
            yield f"layers are {len(self.layers)}, but num_attention_layers is {self.num_attention_layers}"
        if not page_is_right:
            yield f"page_size is {self.page_size!r}, must be a power of two"

    def _page_problems(self) -> Iterator[str]:
        minimum, least = self.minimum_pages, 1 if self.allow_undercommit else self.minimum_pages
        if minimum > MAX_POOL_PAGES:
            yield f"a full batch takes {minimum} pages, int32 has V ids for {MAX_POOL_PAGES}"
        if not _is_int(self.num_pages) or (self.num_pages and self.num_pages < least):
            yield f"num_pages is {self.num_pages!r}, must be 0 or at least {least}: a full batch takes {minimum}"
        elif self.num_pages > MAX_POOL_PAGES:
            yield f"num_pages is {self.num_pages}, int32 has V ids for {MAX_POOL_PAGES}"

    def _layer_problems(self, index: int) -> Iterator[str]:
        layer, name = self.layers[index], f"layer {index}"
        for size in ("num_kv_heads", "head_dim"):
            if not _is_int(getattr(layer, size), 1):
                yield f"{name}: {size} is {getattr(layer, size)!r}, must be a positive int"
        if not _is_int(layer.capacity, 0) or layer.capacity > self.max_sequence_length:
            yield f"{name}: capacity is {layer.capacity!r}, must be in [0, {self.max_sequence_length}]"
        yield from self._scale_problems(name, layer.scales)
        if layer.shares_layer is not None:
            yield from self._sharing_problems(index, layer, layer.shares_layer)

    def _scale_problems(self, name: str, scales: Any) -> Iterator[str]:
        if not isinstance(scales, Sequence) or len(scales) != 3 or not all(map(_is_scale, scales)):
            yield f"{name}: scales is {scales!r}, must be three positive numbers, of Q, K and V"
        elif self.dtype not in FP8_DTYPES and set(scales) != {1.0}:
            yield f"{name}: scales is {scales!r}, must be 1.0 for {self.dtype}: only fp8 is scaled"

    def _sharing_problems(self, index: int, layer: LayerConfig, donor_index: Any) -> Iterator[str]:
        name = f"layer {index}: shares_layer is {donor_index!r}"
        if not _is_int(donor_index, 0) or donor_index >= len(self.layers) or donor_index == index:
            yield f"{name}, must be another of the {len(self.layers)} attention layers, or None"
            return
        donor = self.layers[donor_index]
        if donor.shares_layer is not None:
            yield f"{name}, which shares layer {donor.shares_layer} itself; name that one"
        own, others = _layout(layer), _layout(donor)
        if own != others:
            yield f"{name}, whose heads, their size and capacity are {others}; this layer's are {own}"
        if layer.scales[1:] not in ((1.0, 1.0), donor.scales[1:]):
            yield f"{name}, whose scales of K and V hold; leave this layer's at 1.0"

    def _window_problems(self) -> list[str]:
        windows = sorted({layer.capacity for layer in self.layers if self.is_sliding(layer)})
        found = []
        if len(windows) > 1:
            found.append(f"layers keep windows of {', '.join(map(str, windows))} tokens, must all be equal")
        if windows and self.dtype in FP8_DTYPES:
            found.append(f"layers with a pool for windows cannot be {self.dtype}: set bounded_sliding=False")
        least = self.minimum_sliding_pages
        if not _is_int(self.num_sliding_pages) or (self.num_sliding_pages and self.num_sliding_pages < least):
            found.append(f"num_sliding_pages is {self.num_sliding_pages!r}, must be 0 or at least {least}")
        elif self.total_sliding_pages > MAX_POOL_PAGES:
            found.append(f"windows take {self.total_sliding_pages} pages, int32 has V ids for {MAX_POOL_PAGES}")
        sizes = map(self.layer_bytes, self.layers)
        return found + [f"layer {at} would take {size} bytes" for at, size in enumerate(sizes) if size > MAX_BYTES]


@dataclass(frozen=True, slots=True)
class RecurrentConfig:
    """The recurrent layers of a model, all alike; `MambaCacheManager::Config`.

    Of each sequence a layer keeps a recurrent state `[num_heads, head_dim, state_size]` and the convolution's inputs
    `[conv_dim, conv_kernel]`. `max_verify_tokens` is how many tokens' states a verification of drafts keeps; 0: none.

    >>> RecurrentConfig(2, 1, num_heads=2, head_dim=3, state_size=4, conv_dim=5, conv_kernel=6).slot_bytes
    216
    """

    num_recurrent_layers: int = 0
    max_batch_size: int = 0
    num_heads: int = 0
    head_dim: int = 0
    state_size: int = 0
    conv_dim: int = 0
    conv_kernel: int = 0
    dtype: str = "float16"
    conv_dtype: str = "float16"
    max_verify_tokens: int = 0

    @property
    def state_shape(self) -> tuple[int, int, int]:
        """Axes of a layer's recurrent state of one sequence."""
        return self.num_heads, self.head_dim, self.state_size

    @property
    def conv_shape(self) -> tuple[int, int]:
        """Axes of a layer's inputs of the convolution of one sequence."""
        return self.conv_dim, self.conv_kernel

    @property
    def slot_bytes(self) -> int:
        """Bytes of one sequence's states in all layers."""
        state = prod(self.state_shape) * DTYPE_BYTES[self.dtype]
        return self.num_recurrent_layers * (state + prod(self.conv_shape) * DTYPE_BYTES[self.conv_dtype])

    def validate(self) -> None:
        """Raise `ConfigError` with all problems."""
        if problems := self.problems():
            raise ConfigError(problems)

    def problems(self) -> list[str]:
        """List what is wrong; without layers nothing else matters."""
        if not _is_int(self.num_recurrent_layers, 0):
            return [f"num_recurrent_layers is {self.num_recurrent_layers!r}, must be an int of at least 0"]
        if self.num_recurrent_layers == 0:
            return []
        sizes = ("max_batch_size", "num_heads", "head_dim", "state_size", "conv_dim", "conv_kernel")
        values = {name: getattr(self, name) for name in sizes}
        found = [f"{name} is {n!r}, must be a positive int" for name, n in values.items() if not _is_int(n, 1)]
        for name, dtype in {"dtype": self.dtype, "conv_dtype": self.conv_dtype}.items():
            if dtype not in STATE_DTYPES:
                found.append(f"{name} is {dtype!r}, must be one of {', '.join(STATE_DTYPES)}")
        if not _is_int(self.max_verify_tokens, 0):
            found.append(f"max_verify_tokens is {self.max_verify_tokens!r}, must be an int of at least 0")
        return found


@dataclass(frozen=True, slots=True)
class HybridConfig:
    """All layers of a model, by their index in it; `HybridCacheManager::Config`.

    `layer_types` says of each layer "attention" or "mamba"; `attention` and `recurrent` hold what those of each type
    keep, in the same order.
    """

    layer_types: Sequence[str]
    attention: PoolConfig
    recurrent: RecurrentConfig = field(default_factory=RecurrentConfig)
    max_batch_size: int = 0

    def local_index(self, layer: int) -> int:
        """Return the index of a layer among those of its type."""
        return list(self.layer_types[:layer]).count(self.layer_types[layer])

    def validate(self) -> None:
        """Raise `ConfigError` with all problems."""
        if problems := self.problems():
            raise ConfigError(problems)

    def problems(self) -> list[str]:
        """List what is wrong, in the order of Edge-LLM's checks, then what is wrong with either part."""
        found = [] if self.layer_types else ["layer_types is empty, must name the type of each layer"]
        if not _is_int(self.max_batch_size, 1):
            found.append(f"max_batch_size is {self.max_batch_size!r}, must be a positive int")
        unknown = [kind for kind in dict.fromkeys(self.layer_types) if kind not in LAYER_TYPES]
        found += [f"layer_types holds {kind!r}, must be attention or mamba" for kind in unknown]
        parts = {"attention": self.attention.num_attention_layers, "mamba": self.recurrent.num_recurrent_layers}
        for kind, expected in parts.items():
            if (count := list(self.layer_types).count(kind)) != expected:
                found.append(f"layer_types holds {kind} {count} times, but {expected} such layers are configured")
        found += self.attention.problems() + self.recurrent.problems()
        sizes = [self.attention.max_batch_size, *[self.recurrent.max_batch_size] * bool(parts["mamba"])]
        if not found and set(sizes) != {self.max_batch_size}:
            found.append(f"max_batch_size is {self.max_batch_size}, but that of its parts is {sizes}; must be equal")
        return found


def _layout(layer: LayerConfig) -> tuple[int, int, int]:
    return layer.num_kv_heads, layer.head_dim, layer.capacity


def _is_int(n: Any, least: int | None = None) -> bool:
    return isinstance(n, int) and not isinstance(n, bool) and (least is None or n >= least)


def _is_scale(scale: Any) -> bool:
    return isinstance(scale, int | float) and not isinstance(scale, bool) and isfinite(scale) and scale > 0
