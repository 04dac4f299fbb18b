"""All that a model keeps of its sequences: pools, page tables, lengths and states, by the model's own layer numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from numpy.typing import ArrayLike
from torch import Tensor

from kvist.edge.config import HybridConfig, LayerConfig
from kvist.edge.geometry import pages_per_sequence
from kvist.edge.lengths import SequenceLengths
from kvist.edge.mappings import Survivors, check_slot, survivors_of
from kvist.edge.page_table import KVPageTable, SparsePageTable
from kvist.edge.paged import move_rows, prefix_runs, quantized, read_rows, rows_at
from kvist.edge.pool import KVPagePool, copy_prefix
from kvist.edge.saved import SavedPrefix
from kvist.edge.states import RecurrentStates
from kvist.errors import ArgumentError, LayoutError

__all__ = ["HeadDimGroup", "HybridCache"]


@dataclass(frozen=True, slots=True)
class HeadDimGroup:
    """Attention layers whose heads have one size, so that one launch of a kernel serves them; Edge-LLM's groups.

    `layers` are by index among the attention layers.
    """

    head_dim: int
    layers: tuple[int, ...]
    max_kv_heads: int


class HybridCache:
    """The cache of one model; Edge-LLM's `HybridCacheManager`, with the page table beside it.

    `kv` holds the pages of attention layers, `states` those of recurrent layers, `lengths` the tokens of each row of
    the batch. `page_table` is identity and uploaded at first, or empty where pages are fewer than a full batch takes;
    `sliding_table` is that of layers with a pool for windows, else None. Methods take a layer's number in the model.
    What reads and writes through a table uploads it first.

    Raises `ConfigError` for a config that makes no sense, `LayoutError` for a `storage` (see `KVPagePool`) that does
    not fit it.

    >>> from kvist.edge import HybridConfig, LayerConfig, PoolConfig
    >>> attention = PoolConfig(1, max_batch_size=2, max_sequence_length=6, layers=[LayerConfig(1, 4)], page_size=4)
    >>> cache = HybridCache(HybridConfig(["attention"], attention, max_batch_size=2))
    >>> list(cache.slots(0).shape), cache.page_table.pages(1).tolist()
    ([2, 2, 8, 1, 4], [2, 3])
    """

    def __init__(
        self, config: HybridConfig, device: str | torch.device = "cpu", storage: Sequence[Tensor] | None = None
    ) -> None:
        config.validate()
        self.config = config
        self.kv = KVPagePool(config.attention, device, storage)
        self.states = RecurrentStates(config.recurrent, self.kv.device)
        shape = config.max_batch_size, config.attention.pages_per_sequence
        self.lengths = SequenceLengths(config.max_batch_size, self.kv.padded_capacity, self.kv.device)
        self.page_table = KVPageTable(*shape, self.kv.num_pages, self.kv.device)
        self.sliding_table: SparsePageTable | None = None
        if self.kv.sliding_capacity is not None:
            self.sliding_table = SparsePageTable(*shape, config.attention.total_sliding_pages, self.kv.device)
        if self.kv.num_pages >= config.attention.minimum_pages:
            self.page_table.set_identity()
        self.page_table.upload()

    # ---- layers -----------------------------------------------------------------------------------------------------

    def layer_type(self, layer: int) -> str:
        """Say whether a layer is "attention" or "mamba"; `getLayerType`."""
        if not 0 <= layer < len(self.config.layer_types):
            raise ArgumentError(f"layer must be in [0, {len(self.config.layer_types)}), got {layer}")
        return self.config.layer_types[layer]

    def pool(self, layer: int) -> Tensor:
        """Return `KVPagePool.pool` of an attention layer. Raises `LayoutError` for a layer of the other type."""
        return self.kv.pool(self._attention(layer))

    def strided_slots(self, layer: int) -> Tensor:
        """Return those of an attention layer. Raises `LayoutError` for a layer of the other type."""
        return self.kv.strided_slots(self._attention(layer))

    def slots(self, layer: int) -> Tensor:
        """Return `KVPagePool.slots` of an attention layer. Raises `LayoutError` for a layer of the other type."""
        return self.kv.slots(self._attention(layer))

    def keys_and_values(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return those of an attention layer. Raises `LayoutError` for a layer of the other type."""
        return self.kv.keys_and_values(self._attention(layer))

    def recurrent_state(self, layer: int) -> Tensor:
        """Return `RecurrentStates.recurrent` of a recurrent layer. Raises `LayoutError` for one of the other type."""
        return self.states.recurrent(self._local(layer, "mamba"))

    def conv_state(self, layer: int) -> Tensor:
        """Return `RecurrentStates.conv` of a recurrent layer. Raises `LayoutError` for a layer of the other type."""
        return self.states.conv(self._local(layer, "mamba"))

    def table_of(self, layer: int) -> KVPageTable:
        """Return the page table of an attention layer."""
        return self._table(self._attention(layer))

    @property
    def head_dim_groups(self) -> list[HeadDimGroup]:
        """Attention layers by the size of their heads, in the order in which sizes first occur."""
        layers = self.config.attention.layers
        sizes = dict.fromkeys(layer.head_dim for layer in layers)
        return [self._group(size, [at for at, layer in enumerate(layers) if layer.head_dim == size]) for size in sizes]

    def _group(self, head_dim: int, members: list[int]) -> HeadDimGroup:
        layers = self.config.attention.layers
        return HeadDimGroup(head_dim, tuple(members), max(layers[at].num_kv_heads for at in members))

    def _local(self, layer: int, kind: str) -> int:
        """Return a layer's index among those of its type, which must be this one."""
        if (actual := self.layer_type(layer)) != kind:
            raise LayoutError(f"layer {layer} is of type {actual}, not {kind}")
        return self.config.local_index(layer)

    def _attention(self, layer: int) -> int:
        return self._local(layer, "attention")

    def _table(self, local: int) -> KVPageTable:
        if self.sliding_table is not None and self.kv.storage_of(local).kind == "sliding":
            return self.sliding_table
        return self.page_table

    # ---- tokens -----------------------------------------------------------------------------------------------------

    def write(self, layer: int, keys: Tensor, values: Tensor, starts: Tensor | None = None) -> None:
        """Store K and V of T tokens of each row of the batch, at `starts`, int32 `[B]`, and on; without it, at its end.

        Both are `[B, T, num_kv_heads, head_dim]` of the pool's dtype; for fp8 also of others, then divided by the
        layer's scales. Tokens without a mapped page are skipped. Lengths do not change, see `SequenceLengths.commit`.

        Raises `LayoutError` for tensors that do not fit, and for a layer that reads another one's pool.
        """
        local = self._attention(layer)
        if (owner := self.kv.owner(local)) != local:
            raise LayoutError(f"layer {layer} reads the pool of attention layer {owner} and has none of its own")
        config, num_rows = self.kv.layer_config(local), self.lengths.num_active
        for name, given in (("keys", keys), ("values", values)):
            self._check_new(f"{name} of layer {layer}", given, config, num_rows, keys.shape[1:2])
        positions = self._starts(starts)[:, None] + torch.arange(keys.shape[1], device=self.kv.device)
        index = self._rows_at(self._table(local), positions).flatten()
        for rows, new, scale in zip(self.kv.rows(local), (keys, values), config.scales[1:], strict=True):
            rows.write_kept(index, quantized(new, rows.dtype, scale).flatten(0, 1))

    def gather(self, layer: int, max_len: int) -> tuple[Tensor, Tensor]:
        """Copy K and V of the first `max_len` positions of each row of the batch out, zeros where no page is mapped.

        Both are `[B, max_len, num_kv_heads, head_dim]` as stored: fp8 numbers count `KVPagePool.scales` times.
        """
        local = self._attention(layer)
        positions = torch.arange(max_len, device=self.kv.device).expand(self.lengths.num_active, -1)
        index = self._rows_at(self._table(local), positions)
        keys, values = (read_rows(rows, index) for rows in self.kv.rows(local))
        return keys, values

    def accept(self, nodes: Tensor, num_accepted: Tensor) -> None:
        """Keep a path of a verified tree: K and V of its nodes move behind the tokens there are, and lengths grow.

        The tree's node i was written at position length + i. `nodes`, int32 `[B, max_depth]`, are the path's, the root
        first; `num_accepted`, int32 `[B]`, how many of them count, 0 for none. All are read before any is written;
        from no page come zeros, what has no page is skipped. Those on an accelerator are not looked at. States of
        recurrent layers are taken by `RecurrentStates.accept_tree`.

        A path 0, 2, 5 of a tree written behind 100 tokens::

            position  100 101 102 103 104 105        100 101 102
            node        0   1   2   3   4   5   ->     0   2   5
        """
        self._check_path(nodes, num_accepted)
        lengths = self._starts(None)[:, None]
        steps = torch.arange(1, nodes.shape[1], device=self.kv.device)
        chosen = nodes[:, 1:].to(torch.int64)
        sources = torch.where(chosen >= 0, lengths + chosen, -1)
        destinations = torch.where(steps < num_accepted[:, None], lengths + steps, -1)
        for table, members in self._members():
            moved = self._rows_at(table, sources), self._rows_at(table, destinations)
            for rows in (rows for local in members for rows in self.kv.rows(local)):
                move_rows(rows, *moved)
        self.lengths.commit(num_accepted)

    def _members(self) -> list[tuple[KVPageTable, list[int]]]:
        """Return each page table with the layers that have a pool of their own and are read through it."""
        tables = [self.page_table, *([] if self.sliding_table is None else [self.sliding_table])]
        return [(table, [local for local in self.kv.owners if self._table(local) is table]) for table in tables]

    def _rows_at(self, table: KVPageTable, positions: Tensor) -> Tensor:
        table.upload()
        return rows_at(table.device_table[: len(positions)], positions, self.config.attention.page_size)

    def _starts(self, starts: Tensor | None) -> Tensor:
        given = self.lengths.tensor if starts is None else starts
        if given.shape != (self.lengths.num_active,) or given.device != self.kv.device:
            expected = f"[{self.lengths.num_active}] on {self.kv.device}"
            raise LayoutError(f"starts must be {expected}, got {list(given.shape)} on {given.device}")
        return given.to(torch.int64)

    def _check_new(self, name: str, given: Tensor, config: LayerConfig, num_rows: int, num_tokens: torch.Size) -> None:
        expected = (num_rows, *num_tokens, config.num_kv_heads, config.head_dim)
        if tuple(given.shape) != expected:
            raise LayoutError(f"{name} must be {list(expected)}, got {list(given.shape)}")
        dtype: torch.dtype = getattr(torch, self.config.attention.dtype)
        fits = given.dtype == dtype or (dtype.itemsize == 1 and given.dtype.is_floating_point)
        if not fits or given.device != self.kv.device:
            raise LayoutError(f"{name} must be {dtype} on {self.kv.device}, got {given.dtype} on {given.device}")

    def _check_path(self, nodes: Tensor, num_accepted: Tensor) -> None:
        num_rows = self.lengths.num_active
        if nodes.ndim != 2 or nodes.shape[0] != num_rows or nodes.shape[1] < 1 or num_accepted.shape != (num_rows,):
            raise ArgumentError(
                f"nodes must be [{num_rows}, max_depth] and num_accepted [{num_rows}], "
                f"got {list(nodes.shape)} and {list(num_accepted.shape)}"
            )
        if num_accepted.device.type == "cpu" and num_rows and int(num_accepted.max()) > nodes.shape[1]:
            raise ArgumentError(f"num_accepted is {num_accepted.tolist()}, paths have {nodes.shape[1]} nodes")
        self.lengths.check_commit(num_accepted)

    # ---- the batch --------------------------------------------------------------------------------------------------

    def compact(self, old_to_new: ArrayLike | Tensor, num_new: int) -> None:
        """Move rows that go on to the front, with K and V of the tokens they have, lengths and states; `compactBatch`.

        `old_to_new`, ints `[num_active]`, says where each row goes, -1 for those that end; `num_new` are left. Only
        positions that have tokens are copied, so that what lies behind them in a slot stays. On an accelerator the host
        waits for the lengths. Raises, before anything changes, `ArgumentError` for a mapping that is none or changes
        the order, `LayoutError` unless the page table is identity, and for layers with a pool for windows.
        """
        survivors = self._survivors(old_to_new, num_new)
        survivors.require_order()
        if self.sliding_table is not None or not self.page_table.is_identity:
            which = "the page table is not identity" if self.sliding_table is None else "windows have no slots"
            raise LayoutError(f"K and V can only be moved between slots, but {which}; use remap()")
        lengths = self.lengths.tensor.tolist()
        for local in self.kv.owners:
            slots = self.kv.strided_slots(local)
            for old, new in survivors.moved:
                copy_prefix(slots, old, new, lengths[old])
        self._compact_states(survivors)

    def remap(self, old_to_new: ArrayLike | Tensor, num_new: int) -> None:
        """Move rows that go on to the front by their page tables, with lengths and states; no K and V are copied.

        Rows may change their order. Slots from `num_new` on have no pages then. `compactRows` and
        `compactBatchSlotState`. Raises `ArgumentError`, before anything changes, for a mapping that is none.
        """
        survivors = self._survivors(old_to_new, num_new)
        for table in (self.page_table, self.sliding_table):
            if table is not None:
                table.compact(old_to_new, num_new)
        self._compact_states(survivors)

    def swap(self, row: int, other: int) -> None:
        """Exchange the lengths of two rows; `swapSlotState`. Raises `LayoutError` for a model with recurrent layers."""
        if self.states.num_layers:
            raise LayoutError(f"states of {self.states.num_layers} recurrent layers are not exchanged; use remap()")
        self.lengths.swap(row, other)

    def clear(self, slot: int) -> None:
        """Set a slot's length and states to 0; its pages stay as they are; `clearResidentSlot`."""
        self.lengths.clear(slot)
        self.states.clear(slot)

    def _survivors(self, old_to_new: ArrayLike | Tensor, num_new: int) -> Survivors:
        return survivors_of(old_to_new, num_new, self.config.max_batch_size, num_old=self.lengths.num_active)

    def _compact_states(self, survivors: Survivors) -> None:
        self.lengths.compact(survivors)
        self.states.compact(survivors)

    # ---- saved prefixes ---------------------------------------------------------------------------------------------

    def capture(self, slot: int, num_tokens: int) -> SavedPrefix:
        """Copy the first `num_tokens` of a slot, every dtype, fp8 too, and its states as they are; `captureKVCache`.

        Raises `ArgumentError` where the slot has no pages for that many, `LayoutError` where a layer keeps a window.
        """
        runs = self._prefix_runs(slot, num_tokens)
        kv = {local: torch.cat([self._run(local, run) for run in runs], dim=1) for local in self.kv.owners}
        recurrent, conv = self.states.capture(slot)
        layers = range(self.kv.num_layers)
        scales = tuple(self.kv.scales(local)[1:] for local in layers)
        tensors = tuple(kv[self.kv.owner(local)] for local in layers)
        return SavedPrefix(num_tokens, tensors, scales, tuple(recurrent), tuple(conv))

    def restore(self, saved: SavedPrefix, slot: int) -> None:
        """Write a saved prefix to a slot; lengths are then told by `SequenceLengths.reset`; `restoreKVCache`.

        Raises, before anything is written, `LayoutError` for what was saved of other layers, dtypes or scales,
        `ArgumentError` where the slot has no pages for it.
        """
        self._check_saved(saved)
        runs = self._prefix_runs(slot, saved.num_tokens)
        for local in self.kv.owners:
            pieces = saved.kv[local].split([len(run) for run in runs], dim=1)
            for run, piece in zip(runs, pieces, strict=True):
                self._run(local, run).copy_(piece)
        self.states.restore(saved.recurrent, saved.conv, slot)

    def _run(self, local: int, rows: range) -> Tensor:
        """View tokens that lie one after the other in a layer's pool, `[2, len(rows), num_kv_heads, head_dim]`."""
        return self.kv.pool(local).flatten(1, 2)[:, rows.start : rows.stop]

    def _check_saved(self, saved: SavedPrefix) -> None:
        layers, dtype = self.config.attention.layers, self.config.attention.dtype
        expected = [(2, saved.num_tokens, layer.num_kv_heads, layer.head_dim) for layer in layers]
        got = [tuple(tensor.shape) for tensor in saved.kv]
        if got != expected or any(tensor.dtype != getattr(torch, dtype) for tensor in saved.kv):
            raise LayoutError(
                f"saved are {got} of {[tensor.dtype for tensor in saved.kv]}, layers are {expected}, {dtype}"
            )
        scales = tuple(self.kv.scales(local)[1:] for local in range(self.kv.num_layers))
        if saved.scales != scales:
            raise LayoutError(f"saved numbers have scales {saved.scales}, the layers' are {scales}")
        self.states.check_saved(saved.recurrent, saved.conv)

    def _prefix_runs(self, slot: int, num_tokens: int) -> list[range]:
        """Return the rows of a slot's first tokens, those of neighbouring pages as one run."""
        check_slot(slot, self.config.max_batch_size)
        if self.sliding_table is not None:
            raise LayoutError("layers that keep a window have no prefix to save")
        page_size = self.config.attention.page_size
        pages, capacity = self.page_table.pages(slot), self.kv.padded_capacity
        if not 0 < num_tokens <= capacity or (self.kv.num_layers and len(pages) * page_size < num_tokens):
            needed = pages_per_sequence(num_tokens, page_size)
            raise ArgumentError(
                f"{num_tokens} tokens take {needed} pages, but slot {slot} has {len(pages)} of {page_size} tokens, "
                f"and room for {capacity}"
            )
        return prefix_runs(pages, num_tokens, page_size) if self.kv.num_layers else []
