"""The device tier's storage on torch: K and V of each layer, written by slot and read by block table, and states."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvist.config import CacheConfig
from kvist.core.lower import DEVICE, HOST
from kvist.core.moves import BlockMoves, Move
from kvist.errors import ArgumentError, LayoutError
from kvist.memory.allocation import allocate
from kvist.memory.head_order import as_laid_out, as_stored
from kvist.memory.host import host_planes
from kvist.memory.layout import BlockLayout, layouts, owner_of
from kvist.memory.rows import BlockBytes, store
from kvist.memory.storage import KVStorage, LayerStorage, StateStorage
from kvist.memory.transfers import Copier, CpuDevice, CudaDevice, MovesFailed, TransferManager
from kvist.memory.transfers.orders import Order
from kvist.memory.views import KVViews

IntArray = npt.NDArray[np.integer] | Tensor
Blocks = IntArray | Sequence[int]

__all__ = ["TorchMemory"]


class TorchMemory:
    """K and V of every block, layer by layer, and the states of recurrent layers, on one torch device.

    Each attention layer has one contiguous tensor `[2, num_blocks, block_size, num_kv_heads, head_dim]` of its own
    dtype, K before V; `num_blocks` is that of its group. With `storage_order="block_major"` a block of a group is one
    row of bytes instead, as its `BlockLayout` says, and the layers are strided views of the rows. With "heads_first" a
    layer is `[2, num_blocks, num_kv_heads, block_size, head_dim]` in memory, and all that is returned here is a view of
    it in the usual order of axes. Two elements of 4
    bits lie in one of uint8, so `head_dim` is halved. A layer that keeps keys only has no values, and one that shares
    another layer's cache shows that layer's. All starts as zeros. Moves run in the order given; on CUDA they run
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
        self._bytes = [
            BlockBytes(layout, [plane for layer in members for plane in self._layers[layer].planes])
            for layout, members in zip(layouts(config), self._members, strict=True)
        ]
        self._copier = Copier()
        self._host = host_planes(config, self.layouts, is_pinned=self.device.type == "cuda")
        self._untold: list[tuple[Order, str]] = []
        self._transfers = TransferManager(
            CudaDevice(self.device) if self.device.type == "cuda" else CpuDevice(self._copier),
            self.layouts,
            {DEVICE: [held.planes for held in self._bytes]} | ({HOST: self._host} if self._host else {}),
            {DEVICE: self._pool_of, HOST: self._pool_of},
        )

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
        return self.views(layer).pool()

    def keys(self, layer: int) -> Tensor:
        """Return a layer's keys, `[num_blocks, block_size, num_kv_heads, head_dim]`, as a view."""
        return self._attention(layer).keys

    def values(self, layer: int) -> Tensor:
        """Return a layer's values, `[num_blocks, block_size, num_kv_heads, value_head_dim]`, as a view.

        Raises `LayoutError` where the layer keeps keys only.
        """
        return self.views(layer).values()

    def states(self, layer: int) -> tuple[Tensor, ...]:
        """Return a recurrent layer's states, `[num_blocks, *shape]` for each of its shapes, as views."""
        return self._recurrent(layer).planes

    def views(self, layer: int) -> KVViews:
        """Return a layer's K and V in the shapes that kernels read, all of them views.

        Raises `LayoutError` for states.
        """
        storage = self._attention(layer)
        return KVViews(storage.keys, storage.values, f"layer {layer}")

    # ---- K and V ----------------------------------------------------------------------------------------------------

    def write(self, layer: int, keys: Tensor, values: Tensor | None, slot_mapping: IntArray) -> None:
        """Store K and V of T tokens in their slots; tokens whose slot is negative are skipped.

        `keys` is `[T, num_kv_heads, head_dim]`, `values` `[T, num_kv_heads, value_head_dim]` or, for a layer that keeps
        keys only, None; `slot_mapping` int64 `[T]`. Both are as the layer stores them; layers of 8 and 4 bits also take
        floats of 16 and 32 bits and quantise them (see `Encoding`). Slots on the host are checked before anything is
        written. Slots on an accelerator are not looked at, since the host would have to wait for them; one out of range
        trips the device's own assertion.

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
        store(storage.tokens, slots, storage.encoded(new), "slot")

    def read(
        self, layer: int, slot_mapping: IntArray, *, dtype: torch.dtype | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Copy K and V of single tokens out of their slots, ints `[T]`; slots outside the arena: the nearest one.

        They come as they are stored, or, with `dtype`, as numbers of these floats: quantised ones times their scale.
        Returns keys `[T, num_kv_heads, head_dim]` and values `[T, num_kv_heads, value_head_dim]`, None where the layer
        keeps keys only.
        """
        storage = self._attention(layer)
        slots = self._index(_as_tensor(slot_mapping), storage.keys.shape[0] * self.block_size)
        self.sync()
        return storage.decoded([rows.read(slots) for rows in storage.tokens], dtype)

    def gather(
        self, layer: int, block_table: IntArray, max_len: int, *, dtype: torch.dtype | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Copy the first `max_len` token positions of each row of a block table out of the arena.

        `block_table` is `[B, M]` with `M * block_size >= max_len`. Its columns may be any blocks of the layer's group:
        all of a sequence, or, where the first ones are out of a window's span, only those that are held. Its padding
        may be any number: ids outside the arena are read as its nearest block, so positions past a row's own length
        hold other tokens' contents and must be masked. `dtype` is as for `read`. Returns keys
        `[B, max_len, num_kv_heads, head_dim]` and values `[B, max_len, num_kv_heads, value_head_dim]`, None where the
        layer keeps keys only.

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
        shown = [plane.view(len(table), width * self.block_size, *plane.shape[2:])[:, :max_len] for plane in planes]
        return storage.decoded(shown, dtype)

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

    # ---- blocks -----------------------------------------------------------------------------------------------------

    @property
    def layouts(self) -> list[BlockLayout]:
        """For each group, which bytes of a block are whose."""
        return [held.layout for held in self._bytes]

    def plane_bytes(self, group: int) -> list[Tensor]:
        """Return a group's planes in the order of its layout, uint8 `[num_blocks, plane bytes]` each, as views.

        Each row is in one piece, as it is stored; in block-major storage rows lie as far apart as blocks.
        """
        return list(self._of_group(group).planes)

    def block_rows(self, group: int) -> Tensor:
        """Return a group's blocks as bytes, uint8 `[num_blocks, layouts[group].num_bytes]`, as a view.

        Raises `LayoutError` where the layers of a block do not follow one another.
        """
        rows = self._of_group(group).whole
        if rows is None:
            raise LayoutError(
                f"the layers of group {group} lie apart: a block is in one piece with storage_order='block_major'; "
                "use plane_bytes(group)"
            )
        return rows

    def block_format(self) -> tuple[tuple[int, ...], tuple[dict[str, Any], ...]]:
        """Return the bytes of a block of each group as `read_blocks` gives them, and what they are, by layer."""
        planes = [plane for layout in self.layouts for plane in layout.describe()["planes"]]
        return tuple(layout.num_bytes for layout in self.layouts), tuple(planes)

    def read_blocks(self, group: int, blocks: Blocks, tier: str = DEVICE) -> Tensor:
        """Copy blocks, ints `[n]`, out as bytes: uint8 `[n, layouts[group].num_bytes]`, contiguous, on the host.

        Bytes between planes are zeros. Waits for the device. Raises `ArgumentError` for a block outside the tier.
        """
        held = self._of_group(group)
        if tier == HOST:
            return self._read_host(group, _as_blocks(blocks))
        index = held.checked(_as_blocks(blocks))
        self.sync()
        self._require_written(DEVICE, group, index.numpy())
        if self.device.type != "cpu":
            return as_laid_out(held.read(index).cpu(), held.layout)
        rows = torch.zeros((len(index), held.layout.num_bytes), dtype=torch.uint8)
        self._copier.gather(list(held.planes), held.layout, index.numpy(), rows)
        return as_laid_out(rows, held.layout)

    def _read_host(self, group: int, index: Tensor) -> Tensor:
        layout = self.layouts[group]
        if not self._host or (len(index) and not 0 <= int(index.min()) <= int(index.max()) < len(self._host[group][0])):
            raise ArgumentError(f"host memory has no blocks {index.tolist()} of group {group}")
        self._require_written(HOST, group, index.numpy())
        rows = torch.zeros((len(index), layout.num_bytes), dtype=torch.uint8)
        self._copier.gather(self._host[group], layout, index.numpy(), rows)
        return as_laid_out(rows, layout)

    def write_blocks(self, group: int, blocks: Blocks, rows: Tensor | npt.NDArray[np.uint8]) -> None:
        """Fill blocks, ints `[n]`, all different, from bytes as `read_blocks` returns them, on any device.

        Raises `LayoutError` for bytes that do not fit, `ArgumentError` for a block outside the arena or named twice;
        nothing is written then.
        """
        held = self._of_group(group)
        index = held.checked(_as_blocks(blocks))
        given = torch.as_tensor(rows)
        held.check_rows(index, given)
        given = as_stored(given, held.layout)
        self.sync()
        is_apart = held.layout.is_dense or held.whole is None  # else what lies between planes would be written, too
        if is_apart and self.device.type == "cpu" and given.device.type == "cpu":
            self._copier.scatter(given, list(held.planes), held.layout, index.numpy())
        else:
            held.write(index, given)

    def _of_group(self, group: int) -> BlockBytes:
        if not 0 <= group < len(self._bytes):
            raise ArgumentError(f"group must be in [0, {len(self._bytes)}), got {group}")
        return self._bytes[group]

    # ---- moves ------------------------------------------------------------------------------------------------------

    takes_block_moves = True
    """`perform` takes copies of many blocks as one order."""

    def perform(self, moves: Sequence[Move | BlockMoves]) -> None:
        """Copy the first `num_tokens` of each source block into its destination, in all layers of a group, in order.

        Between the device and, where the configuration has a tier there, host memory. Of states, and of blocks with
        numbers of 4 bits, all is copied. Returns without waiting on CUDA. Raises `ArgumentError`, before anything is
        copied, for a move that names a tier, group, block or token that is not here, and `TransferError` for copies
        that failed.
        """
        untold, self._untold = self._untold, []
        try:
            self._transfers.perform(moves)
        except MovesFailed as error:
            raise MovesFailed([*untold, *error.failed]) from error
        if untold:
            raise MovesFailed(untold)

    def forget(self, moves: Iterable[Move]) -> None:
        """Take the destinations of moves that failed for free blocks: who takes them next writes before reading."""
        for move in moves:
            self._transfers.forget(move.destination_tier, move.group, [move.destination])

    def sync(self) -> None:
        """Make the current stream wait for the moves made so far; the host does not wait. Does nothing on CPU.

        Raises `TransferError` for copies that were found to have failed; the next `perform` names them again, for the
        manager, which suspends the sequences that had what is lost.
        """
        try:
            self._transfers.sync()
        except MovesFailed as error:
            self._untold += error.failed
            raise

    def _require_written(self, tier: str, group: int, blocks: npt.NDArray[np.int64]) -> None:
        """Wait for blocks that are to be read on the host; raises `TransferError` for those that hold nothing."""
        try:
            self._transfers.require_written(tier, group, blocks)
        except MovesFailed as error:
            self._untold += error.failed
            raise

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
