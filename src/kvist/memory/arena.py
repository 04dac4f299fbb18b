"""The device tier's storage on torch: K and V of each layer, written by slot and read by block table, and states."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvist.config import CacheConfig
from kvist.core.moves import Move
from kvist.errors import ArgumentError, LayoutError
from kvist.memory.allocation import allocate, owner_of
from kvist.memory.copies import batched
from kvist.memory.rows import store
from kvist.memory.storage import KVStorage, LayerStorage, StateStorage

IntArray = npt.NDArray[np.integer] | Tensor
Blocks = IntArray | Sequence[int]

__all__ = ["TorchMemory"]


class TorchMemory:
    """K and V of every block, layer by layer, and the states of recurrent layers, on one torch device.

    Each attention layer has one contiguous tensor `[2, num_blocks, block_size, num_kv_heads, head_dim]` of its own
    dtype, K before V; `num_blocks` is that of its group. A layer that keeps keys only has no values, and one that
    shares another layer's cache shows that layer's. All starts as zeros. Moves run in the order given; on CUDA they run
    on a stream of their own, and what writes and reads here makes the current stream wait for them. Whoever hands `kv`,
    `keys`, `values` or `states` to a kernel calls `sync` before it.

    With `shared_pool`, groups that draw from one pool share its bytes: a block that another group had before holds what
    that group left there, numbers of another dtype perhaps, until it is written. Where the layers of such groups have
    no equal sizes, each block is one piece of memory with all its layers, and a layer's tensors are strided views.
    """

    def __init__(self, config: CacheConfig, device: str | torch.device = "cpu") -> None:
        config.validate()
        self.device = torch.device(device)
        self.block_size = config.block_size
        self.group_num_blocks = config.group_num_blocks
        with torch.inference_mode(mode=False):  # storage made in that mode could not be written outside of it
            self._layers = allocate(config, self.device)
        self._owners = [owner_of(config, layer) for layer in range(len(self._layers))]
        self._pool_of = config.pool_of
        self._kinds = [group.kind for group in config.groups]
        self._members = [[layer for layer in group.layers if self._owners[layer] == layer] for group in config.groups]
        self._moves_stream: torch.cuda.Stream | None = None
        self._moves_done: torch.cuda.Event | None = None
        if self.device.type == "cuda":
            self._open_stream()

    def _open_stream(self) -> None:
        self._moves_stream = torch.cuda.Stream(self.device)
        # The zeros were written on the current stream, and the storage must outlive copies that are still under way.
        self._moves_stream.wait_stream(torch.cuda.current_stream(self.device))
        for plane in self._planes():
            plane.record_stream(self._moves_stream)

    # ---- what there is ----------------------------------------------------------------------------------------------

    @property
    def num_layers(self) -> int:
        """Layers of the model, those that share another layer's cache included."""
        return len(self._layers)

    @property
    def num_bytes(self) -> int:
        """Bytes of all storage, used or not."""
        storages = {plane.untyped_storage().data_ptr(): plane.untyped_storage() for plane in self._planes()}
        return sum(storage.nbytes() for storage in storages.values())

    def kv(self, layer: int) -> Tensor:
        """Return a layer's whole pool, `[2, num_blocks, block_size, num_kv_heads, head_dim]`, as a view.

        Raises `LayoutError` where the layer has no values or they differ in size from its keys, and for states.
        """
        storage = self._attention(layer)
        pool = storage.pool
        if pool is None:
            values = 0 if storage.values is None else storage.values.shape[-1]
            raise LayoutError(
                f"layer {layer} has keys of {storage.keys.shape[-1]} and values of {values} elements a head, "
                f"so no single tensor holds both; use keys(layer){' and values(layer)' if values else ''}"
            )
        return pool

    def keys(self, layer: int) -> Tensor:
        """Return a layer's keys, `[num_blocks, block_size, num_kv_heads, head_dim]`, as a view."""
        return self._attention(layer).keys

    def values(self, layer: int) -> Tensor:
        """Return a layer's values, `[num_blocks, block_size, num_kv_heads, value_head_dim]`, as a view.

        Raises `LayoutError` where the layer keeps keys only.
        """
        values = self._attention(layer).values
        if values is None:
            raise LayoutError(f"layer {layer} keeps keys only, there are no values; use keys(layer)")
        return values

    def states(self, layer: int) -> tuple[Tensor, ...]:
        """Return a recurrent layer's states, `[num_blocks, *shape]` for each of its shapes, as views."""
        return self._recurrent(layer).planes

    # ---- K and V ----------------------------------------------------------------------------------------------------

    def write(self, layer: int, keys: Tensor, values: Tensor | None, slot_mapping: IntArray) -> None:
        """Store K and V of T tokens in their slots; tokens whose slot is negative are skipped.

        `keys` is `[T, num_kv_heads, head_dim]`, `values` `[T, num_kv_heads, value_head_dim]` or, for a layer that keeps
        keys only, None; `slot_mapping` int64 `[T]`. Slots on the host are checked before anything is written. Slots on
        an accelerator are not looked at, since the host would have to wait for them; one out of range trips the
        device's own assertion.

        Raises `LayoutError` for tensors that do not fit the layer, and for a layer that shares another one's cache;
        `ArgumentError` for a slot outside the arena.
        """
        storage = self._attention(layer)
        if self._owners[layer] != layer:
            raise LayoutError(
                f"layer {layer} reads the cache of layer {self._owners[layer]} and has none of its own: "
                f"only layer {self._owners[layer]} is written"
            )
        slots = _as_tensor(slot_mapping)
        if slots.ndim != 1 or slots.dtype != torch.int64:
            raise LayoutError(f"slot_mapping must be int64 [T], got {slots.dtype} {list(slots.shape)}")
        if storage.values is None and values is not None:
            raise LayoutError(f"layer {layer} keeps keys only: values must be None, got {list(values.shape)}")
        new: dict[str, Tensor | None] = {f"keys of layer {layer}": keys}
        if storage.values is not None:
            new[f"values of layer {layer}"] = values
        self.sync()
        store(storage.tokens, slots, new, "slot")

    def read(self, layer: int, slot_mapping: IntArray) -> tuple[Tensor, Tensor | None]:
        """Copy K and V of single tokens out of their slots, ints `[T]`; slots outside the arena: the nearest one.

        Returns keys `[T, num_kv_heads, head_dim]` and values `[T, num_kv_heads, value_head_dim]`, None where the layer
        keeps keys only.
        """
        storage = self._attention(layer)
        slots = self._index(_as_tensor(slot_mapping), storage.keys.shape[0] * self.block_size)
        self.sync()
        return _pair([rows.read(slots) for rows in storage.tokens])

    def gather(self, layer: int, block_table: IntArray, max_len: int) -> tuple[Tensor, Tensor | None]:
        """Copy the first `max_len` token positions of each row of a block table out of the arena.

        `block_table` is `[B, M]` with `M * block_size >= max_len`. Its columns may be any blocks of the layer's group:
        all of a sequence, or, where the first ones are out of a window's span, only those that are held. Its padding
        may be any number: ids outside the arena are read as its nearest block, so positions past a row's own length
        hold other tokens' contents and must be masked. Returns keys `[B, max_len, num_kv_heads, head_dim]` and values
        `[B, max_len, num_kv_heads, value_head_dim]`, None where the layer keeps keys only.

        Raises `LayoutError` when the table is not two-dimensional, `ArgumentError` when it is too narrow.
        """
        storage = self._attention(layer)
        table = _as_tensor(block_table)
        if table.ndim != 2:
            raise LayoutError(f"block_table must be [B, M], got shape {tuple(table.shape)}")
        width = -(-max_len // self.block_size)
        if max_len < 0 or width > table.shape[1]:
            raise ArgumentError(
                f"max_len {max_len} needs {width} blocks a sequence, but block_table has {table.shape[1]} of "
                f"{self.block_size} tokens"
            )
        blocks = self._index(table[:, :width], storage.keys.shape[0]).flatten()
        self.sync()
        # Whole blocks at once: many times faster on CPU than token rows.
        planes = [rows.read(blocks) for rows in storage.blocks]
        return _pair(
            [plane.view(len(table), width * self.block_size, *plane.shape[2:])[:, :max_len] for plane in planes]
        )

    # ---- states -----------------------------------------------------------------------------------------------------

    def read_states(self, layer: int, blocks: Blocks) -> tuple[Tensor, ...]:
        """Copy the states in `blocks`, ints `[B]`, out: `[B, *shape]` for each shape of the layer.

        Ids outside the arena are read as its nearest block.
        """
        storage = self._recurrent(layer)
        index = self._index(_as_blocks(blocks), storage.planes[0].shape[0])
        self.sync()
        return tuple(rows.read(index) for rows in storage.blocks)

    def write_states(self, layer: int, blocks: Blocks, states: Sequence[Tensor]) -> None:
        """Store states, `[B, *shape]` for each shape of the layer, in `blocks`, ints `[B]`; negative ones are skipped.

        Blocks on the host are checked before anything is written, those on an accelerator are not looked at.

        Raises `LayoutError` for tensors that do not fit the layer, `ArgumentError` for a block outside the arena.
        """
        storage = self._recurrent(layer)
        if len(states) != len(storage.planes):
            raise LayoutError(f"layer {layer} keeps {len(storage.planes)} tensors of each state, got {len(states)}")
        self.sync()
        store(storage.blocks, _as_blocks(blocks), _named(layer, states), "block")

    def clear_states(self, blocks: Blocks) -> None:
        """Fill the states in `blocks`, ints `[B]`, of all recurrent layers with zeros; negative ids are skipped.

        Raises `LayoutError` where no layer keeps states, `ArgumentError` for a block outside the arena.
        """
        index = _as_blocks(blocks)
        recurrent = [layer for layer, storage in enumerate(self._layers) if isinstance(storage, StateStorage)]
        if not recurrent:
            raise LayoutError("no layer keeps states")
        self.sync()
        for layer in recurrent:
            storage = self._recurrent(layer)
            zeros = [plane.new_zeros(()).expand(len(index), *plane.shape[1:]) for plane in storage.planes]
            store(storage.blocks, index, _named(layer, zeros), "block")

    # ---- moves ------------------------------------------------------------------------------------------------------

    def perform(self, moves: Sequence[Move]) -> None:
        """Copy `num_tokens` token rows of each source block into its destination, in all layers of its group, in order.

        Of a state group whole states are copied. Returns without waiting on CUDA. Raises `ArgumentError`, before
        anything is copied, for a move that names another tier, group, block or token than this arena has.
        """
        for move in moves:
            self._check_move(move)
        if self._moves_stream is None:
            self._copy(moves)
        elif moves:
            self._moves_stream.wait_stream(torch.cuda.current_stream(self.device))
            with torch.cuda.stream(self._moves_stream):
                self._copy(moves)
                self._moves_done = self._moves_stream.record_event()

    def sync(self) -> None:
        """Make the current stream wait for the moves made so far; the host does not wait. Does nothing on CPU."""
        if self._moves_done is not None:
            torch.cuda.current_stream(self.device).wait_event(self._moves_done)
            self._moves_done = None

    def _copy(self, moves: Sequence[Move]) -> None:
        for copies in batched(moves, self._pool_of, self.block_size):
            pairs = torch.tensor([copies.sources, copies.destinations], dtype=torch.int64)
            if self.device.type == "cuda":
                pairs = pairs.pin_memory()
            sources, destinations = pairs.to(self.device, non_blocking=True)
            for layer in self._members[copies.group]:
                self._layers[layer].copy(sources, destinations, copies.num_tokens)

    def _check_move(self, move: Move) -> None:
        num_groups, block_size = len(self.group_num_blocks), self.block_size
        if (move.source_tier, move.destination_tier) != ("device", "device") or not 0 <= move.group < num_groups:
            held = "group 0" if num_groups == 1 else f"groups 0 to {num_groups - 1}"
            raise ArgumentError(f"{move} leaves this arena, which holds {held} of the device tier")
        num_blocks = self.group_num_blocks[move.group]
        for block in (move.source, move.destination):
            if not 0 <= block < num_blocks:
                raise ArgumentError(
                    f"{move} names block {block}, but group {move.group} has blocks 0 to {num_blocks - 1}"
                )
        offsets = move.source_offset, move.destination_offset
        if min(*offsets, move.num_tokens) < 0 or max(offsets) + move.num_tokens > block_size:
            raise ArgumentError(
                f"{move} copies {move.num_tokens} tokens from {offsets[0]} to {offsets[1]} of a block of {block_size}"
            )
        if self._kinds[move.group] == "state" and move.num_tokens != block_size:
            raise ArgumentError(f"{move} copies a part of a state, which is copied whole: num_tokens is {block_size}")

    # ---- rows -------------------------------------------------------------------------------------------------------

    def _planes(self) -> list[Tensor]:
        return [plane for members in self._members for layer in members for plane in self._layers[layer].planes]

    def _storage(self, layer: int) -> LayerStorage:
        if not 0 <= layer < len(self._layers):
            raise ArgumentError(f"layer must be in [0, {len(self._layers)}), got {layer}")
        return self._layers[layer]

    def _attention(self, layer: int) -> KVStorage:
        storage = self._storage(layer)
        if not isinstance(storage, KVStorage):
            raise LayoutError(f"layer {layer} keeps states, not K and V; use states(layer)")
        return storage

    def _recurrent(self, layer: int) -> StateStorage:
        storage = self._storage(layer)
        if not isinstance(storage, StateStorage):
            raise LayoutError(f"layer {layer} keeps K and V, no states; use keys(layer)")
        return storage

    def _index(self, index: Tensor, num_rows: int) -> Tensor:
        """Bring ids to the device, those outside the arena as the nearest inside."""
        return index.to(self.device, torch.int64, non_blocking=True).clamp(0, num_rows - 1)


def _as_tensor(values: Blocks) -> Tensor:
    """Take integers as a tensor; read-only arrays, as the manager's block tables may be, are copied: torch has none."""
    if isinstance(values, np.ndarray) and not values.flags.writeable:
        values = values.copy()
    return torch.as_tensor(values)


def _as_blocks(blocks: Blocks) -> Tensor:
    index = _as_tensor(blocks)
    if index.ndim != 1 or (len(index) and index.dtype not in (torch.int32, torch.int64)):
        raise LayoutError(f"blocks must be int32 or int64 [B], got {index.dtype} {list(index.shape)}")
    return index.to(torch.int64)


def _named(layer: int, states: Sequence[Tensor]) -> dict[str, Tensor]:
    return {f"state {number} of layer {layer}": state for number, state in enumerate(states)}


def _pair(planes: list[Tensor]) -> tuple[Tensor, Tensor | None]:
    return planes[0], planes[1] if len(planes) == 2 else None
