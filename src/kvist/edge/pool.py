"""The pages of all attention layers: one pool a layer, and the ways of reading it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NoReturn

import torch
from torch import Tensor

from kvist.edge.config import LayerConfig, PoolConfig
from kvist.errors import ArgumentError, ArgumentTypeError, LayoutError
from kvist.memory.rows import Rows

__all__ = ["KVPagePool", "LayerStorage", "copy_prefix"]


@dataclass(frozen=True, slots=True)
class LayerStorage:
    """What one layer's pool is; Edge-LLM's layer storage metadata.

    `kind` is "full", or "sliding" where the layer keeps a window only; `num_pages` there are, `pages_per_sequence` are
    the columns of its page table.
    """

    kind: Literal["full", "sliding"]
    num_pages: int
    pages_per_sequence: int
    num_kv_heads: int
    head_dim: int


class KVPagePool:
    """K and V of all attention layers in pages; Edge-LLM's `KVCacheManager`.

    Each layer has one contiguous pool `[2, num_pages, page_size, num_kv_heads, head_dim]` of its own sizes, K before V.
    Where there are no more pages than a full batch takes, the same bytes are slots
    `[2, max_batch_size, padded_capacity, num_kv_heads, head_dim]`: slot b is pages b * M to (b + 1) * M - 1, M being
    `padded_capacity / page_size`. All views are of this storage, which is allocated once and never again, all zeros.

    `storage` may be given: a pool for each layer, such as `TorchMemory.kv(layer)`, so that Kvist's block tables and
    Edge-LLM's kernels meet in the same bytes. Without a config the pool is empty.

    Raises `ConfigError` for a config that makes no sense, `LayoutError` for a storage that does not fit it.

    >>> pool = KVPagePool(PoolConfig(1, max_batch_size=2, max_sequence_length=200, layers=[LayerConfig(4, 64)]))
    >>> list(pool.pool(0).shape), list(pool.slots(0).shape)
    ([2, 4, 128, 4, 64], [2, 2, 256, 4, 64])
    """

    def __init__(
        self,
        config: PoolConfig | None = None,
        device: str | torch.device = "cpu",
        storage: Sequence[Tensor] | None = None,
    ) -> None:
        if config is not None:
            config.validate()
        self._config = config or PoolConfig()
        self._pools: list[Tensor] = []
        self.device = torch.device(device)
        if config is None or not config.layers:
            return
        own = self._allocated() if storage is None else self._fitting(storage)
        self._pools = [own[self.owner(index)] for index in range(len(config.layers))]
        self.device = self._pools[0].device
        self._rows = [(Rows(pool[0].flatten(0, 1)), Rows(pool[1].flatten(0, 1))) for pool in self._pools]

    def _allocated(self) -> dict[int, Tensor]:
        dtype = getattr(torch, self._config.dtype)
        with torch.inference_mode(mode=False):  # storage made in that mode could not be written outside of it
            return {index: torch.zeros(self._shape(index), dtype=dtype, device=self.device) for index in self.owners}

    def _fitting(self, storage: Sequence[Tensor]) -> dict[int, Tensor]:
        if len(storage) != len(self._config.layers):
            raise LayoutError(f"storage has {len(storage)} pools, but there are {len(self._config.layers)} layers")
        dtype = getattr(torch, self._config.dtype)
        for index in self.owners:
            given, shape = storage[index], self._shape(index)
            if tuple(given.shape) != shape or given.dtype != dtype or not given.is_contiguous():
                raise LayoutError(
                    f"storage of layer {index} must be contiguous {dtype} {list(shape)}, "
                    f"got {given.dtype} {list(given.shape)}{'' if given.is_contiguous() else ', not contiguous'}"
                )
            if given.device != storage[self.owners[0]].device:
                raise LayoutError(f"storage of layer {index} is on {given.device}, other layers' elsewhere")
        return {index: storage[index] for index in self.owners}

    def _shape(self, index: int) -> tuple[int, ...]:
        layer = self._config.layers[index]
        return 2, self._config.pages_of(layer), self._config.page_size, layer.num_kv_heads, layer.head_dim

    # ---- what there is ----------------------------------------------------------------------------------------------

    @property
    def config(self) -> PoolConfig:
        """What the pool was made with; `getConfig`."""
        return self._config

    @property
    def num_layers(self) -> int:
        """Attention layers, those that share another's pool included; `numLayers`."""
        return len(self._pools)

    @property
    def num_pages(self) -> int:
        """Pages of each layer that keeps all tokens; `numPages()`."""
        return self._config.total_pages

    @property
    def padded_capacity(self) -> int:
        """Tokens of a slot, whole pages; `maxCapPadded()`."""
        return self._config.padded_capacity

    @property
    def is_uniform(self) -> bool:
        """Whether all layers have as many heads, of the same size; so do none; `isUniform`."""
        return self._config.is_uniform

    @property
    def sliding_capacity(self) -> int | None:
        """Tokens kept by layers with a pool for windows, None without such layers.

        `reducedKVCacheCapacity`, and `hasReducedKVCache` where it is not None.
        """
        return self._config.sliding_capacity

    @property
    def num_bytes(self) -> int:
        """Bytes of all pools, used or not."""
        return sum(pool.nbytes for index, pool in enumerate(self._pools) if self.owner(index) == index)

    @property
    def owners(self) -> list[int]:
        """Layers that have a pool of their own."""
        return [index for index, layer in enumerate(self._config.layers) if layer.shares_layer is None]

    def owner(self, layer: int) -> int:
        """Return the layer whose pool this one reads: its own, or that which it shares."""
        donor = self.layer_config(layer).shares_layer
        return layer if donor is None else donor

    def layer_config(self, layer: int) -> LayerConfig:
        """Return what a layer was made with; `getLayerConfig`."""
        layers = self._config.layers
        if not 0 <= layer < len(layers):
            raise ArgumentError(f"layer must be in [0, {len(layers)}), got {layer}")
        return layers[layer]

    def storage_of(self, layer: int) -> LayerStorage:
        """Say what a layer's pool is; `getLayerStorageMetadata`, `numPages(i)`."""
        config = self.layer_config(layer)
        kind: Literal["full", "sliding"] = "sliding" if self._config.is_sliding(config) else "full"
        num_pages, per_sequence = self._config.pages_of(config), self._config.pages_per_sequence
        return LayerStorage(kind, num_pages, per_sequence, config.num_kv_heads, config.head_dim)

    def scales(self, layer: int) -> tuple[float, float, float]:
        """Return what stored numbers of Q, K and V are multiplied by; of a shared pool, K's and V's are its owner's."""
        own, owners = self.layer_config(layer).scales, self.layer_config(self.owner(layer)).scales
        return own[0], owners[1], owners[2]

    def rows(self, layer: int) -> tuple[Rows, Rows]:
        """Return K and V as rows of tokens by slot, `page * page_size + offset`."""
        self.layer_config(layer)
        return self._rows[layer]

    # ---- views ------------------------------------------------------------------------------------------------------

    def pool(self, layer: int) -> Tensor:
        """Return a layer's pool, `[2, num_pages, page_size, num_kv_heads, head_dim]`: what is bound to an engine.

        `getCombinedKVCachePoolView`; after 0.10 `getCombinedKVCache`.
        """
        self.layer_config(layer)
        return self._pools[layer]

    def slots(self, layer: int) -> Tensor:
        """Return a layer's slots, `[2, max_batch_size, padded_capacity, num_kv_heads, head_dim]`, contiguous.

        `getCombinedKVCache` of 0.10. Raises `LayoutError` where pages are retained beyond those of a full batch: V
        begins behind them, which no contiguous tensor of this shape says.
        """
        pool, minimum = self._slotted(layer), self._config.minimum_pages
        if self.num_pages != minimum:
            raise LayoutError(
                f"layer {layer} has {self.num_pages} pages, {self.num_pages - minimum} more than the {minimum} of a "
                "full batch, so slots are not contiguous; use strided_slots(layer), keys_and_values(layer) or "
                "pool(layer)"
            )
        return pool.view(2, self._config.max_batch_size, self.padded_capacity, *pool.shape[3:])

    def strided_slots(self, layer: int) -> Tensor:
        """Return a layer's slots as `slots` does, whatever pages are retained: K and V are `num_pages` pages apart."""
        pool = self._slotted(layer)
        batch, per_slot = self._config.max_batch_size, self._config.pages_per_sequence
        view: Tensor = pool[:, : batch * per_slot].unflatten(1, (batch, per_slot)).flatten(2, 3)
        return view

    def keys_and_values(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return K and V apart, `[max_batch_size, padded_capacity, num_kv_heads, head_dim]`, contiguous.

        They show the pages of slots, not those retained. Of a layer with a pool for windows they are
        `[num_pages, page_size, num_kv_heads, head_dim]`. `getSeparateKVCache`.
        """
        if self.storage_of(layer).kind == "sliding":
            keys, values = self._pools[layer]
        else:
            keys, values = self.strided_slots(layer)
        return keys, values

    def keys_pointer(self, layer: int) -> int:
        """Return the address of a layer's first K page; `kPoolPtr`."""
        return self.pool(layer).data_ptr()

    def values_pointer(self, layer: int) -> int:
        """Return the address of a layer's first V page, `num_pages` pages behind K; `vPoolPtr`."""
        return self.pool(layer)[1].data_ptr()

    def _slotted(self, layer: int) -> Tensor:
        storage, minimum = self.storage_of(layer), self._config.minimum_pages
        if storage.kind == "sliding":
            raise LayoutError(f"layer {layer} keeps a window in pages and has no slots; use pool(layer)")
        if storage.num_pages < minimum:
            raise LayoutError(
                f"layer {layer} has {storage.num_pages} pages, slots of a full batch take {minimum}; use pool(layer)"
            )
        return self._pools[layer]

    # ---- contents ---------------------------------------------------------------------------------------------------

    def copy_page(self, source: int, destination: int, num_tokens: int) -> None:
        """Copy the first `num_tokens` of a page, K and V, in all layers that keep all tokens; no other byte is touched.

        Raises `ArgumentError`, before anything is copied, for pages and tokens that there are not.
        """
        for page in (source, destination):
            if not 0 <= page < self.num_pages:
                raise ArgumentError(f"page must be in [0, {self.num_pages}), got {page}")
        if not 0 <= num_tokens <= self._config.page_size:
            raise ArgumentError(f"num_tokens is {num_tokens}, a page has {self._config.page_size}")
        for layer in self.owners:
            if self.storage_of(layer).kind == "full":
                copy_prefix(self._pools[layer], source, destination, num_tokens)

    # ---- ownership --------------------------------------------------------------------------------------------------

    def move(self) -> KVPagePool:
        """Hand everything to a new pool and leave this one empty, as one made without a config.

        What a move of Edge-LLM's class does. A second owner of the same pages there is not: copies are refused.
        """
        moved = KVPagePool()
        moved.__dict__.update(self.__dict__)
        self.__dict__ = KVPagePool(device=self.device).__dict__
        return moved

    def __copy__(self) -> NoReturn:
        raise ArgumentTypeError("a pool has one owner and cannot be copied: move() hands it over")

    def __deepcopy__(self, memo: dict[int, object]) -> NoReturn:
        self.__copy__()


def copy_prefix(halves: Tensor, source: int, destination: int, num_tokens: int) -> None:
    """Copy the first tokens of K and V from one page to another, or from one slot to another.

    `halves` is `[2, num, num_tokens or more, ...]`; the two are different ones or the same.
    """
    halves[:, destination, :num_tokens].copy_(halves[:, source, :num_tokens])
