"""The device tier's storage on torch: a contiguous K and V pool per layer, written by slot and read by block table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvist.config import AttentionSpec, CacheConfig
from kvist.core.moves import Move
from kvist.errors import ArgumentError, LayoutError

IntArray = npt.NDArray[np.integer] | Tensor

__all__ = ["TorchMemory"]


@dataclass(frozen=True, slots=True)
class _LayerPool:
    """K and V of one layer, in the shapes that writes, gathers and kernels want; all of them views of one storage each.

    `pool` is `[2, num_blocks, block_size, heads, dim]`, or None where K and V rows differ in size and so are kept
    apart.
    """

    pool: Tensor | None
    keys: Tensor
    values: Tensor

    @property
    def key_rows(self) -> Tensor:
        """Keys by slot, `[num_blocks * block_size, heads, dim]`."""
        return _bits(self.keys).flatten(0, 1)

    @property
    def value_rows(self) -> Tensor:
        """Values by slot, `[num_blocks * block_size, heads, value_dim]`."""
        return _bits(self.values).flatten(0, 1)


class TorchMemory:
    """K and V of every block, layer by layer, on one torch device.

    Each layer has one contiguous tensor `[2, num_blocks, block_size, num_kv_heads, head_dim]` of its own dtype, K
    before V. It starts as zeros. Moves run in the order given; on CUDA they run on a stream of their own, and `write`
    and `gather` make the current stream wait for them. Whoever hands `kv`, `keys` or `values` to a kernel calls `sync`
    before it.
    """

    def __init__(self, config: CacheConfig, device: str | torch.device = "cpu") -> None:
        config.validate()
        self.device = torch.device(device)
        self.num_blocks = config.resolved_num_blocks
        self.block_size = config.block_size
        with torch.inference_mode(mode=False):  # storage made in that mode could not be written outside of it
            self._layers = [self._allocate(spec) for spec in config.layers]
        self._moves_stream: torch.cuda.Stream | None = None
        self._moves_done: torch.cuda.Event | None = None
        if self.device.type == "cuda":
            self._open_stream()

    def _allocate(self, spec: AttentionSpec) -> _LayerPool:
        dtype = getattr(torch, spec.dtype)
        rows = (self.num_blocks, self.block_size, spec.num_kv_heads)
        value_dim = spec.value_head_dim or spec.head_dim
        if value_dim == spec.head_dim:
            # Zeros, not whatever was there: a kernel that reads padding and multiplies it by 0 must not meet a NaN.
            pool = torch.zeros((2, *rows, spec.head_dim), dtype=dtype, device=self.device)
            return _LayerPool(pool, pool[0], pool[1])
        keys = torch.zeros((*rows, spec.head_dim), dtype=dtype, device=self.device)
        values = torch.zeros((*rows, value_dim), dtype=dtype, device=self.device)
        return _LayerPool(None, keys, values)

    def _open_stream(self) -> None:
        self._moves_stream = torch.cuda.Stream(self.device)
        # The zeros were written on the current stream, and the storage must outlive copies that are still under way.
        self._moves_stream.wait_stream(torch.cuda.current_stream(self.device))
        for layer in self._layers:
            layer.keys.record_stream(self._moves_stream)
            layer.values.record_stream(self._moves_stream)

    @property
    def num_layers(self) -> int:
        """Layers that the arena holds."""
        return len(self._layers)

    @property
    def num_bytes(self) -> int:
        """Bytes of K and V in all layers, used or not."""
        return sum(layer.keys.nbytes + layer.values.nbytes for layer in self._layers)

    def kv(self, layer: int) -> Tensor:
        """Return a layer's whole pool, `[2, num_blocks, block_size, num_kv_heads, head_dim]`, as a view.

        Raises `LayoutError` where the layer's keys and values differ in size; `keys` and `values` work there.
        """
        pool = self._layer(layer).pool
        if pool is None:
            raise LayoutError(
                f"layer {layer} has keys of {self._layers[layer].keys.shape[-1]} and values of "
                f"{self._layers[layer].values.shape[-1]} elements a head, so no single tensor holds both; "
                "use keys(layer) and values(layer)"
            )
        return pool

    def keys(self, layer: int) -> Tensor:
        """Return a layer's keys, `[num_blocks, block_size, num_kv_heads, head_dim]`, as a view."""
        return self._layer(layer).keys

    def values(self, layer: int) -> Tensor:
        """Return a layer's values, `[num_blocks, block_size, num_kv_heads, value_head_dim]`, as a view."""
        return self._layer(layer).values

    def write(self, layer: int, keys: Tensor, values: Tensor, slot_mapping: IntArray) -> None:
        """Store K and V of T tokens in their slots; tokens whose slot is negative are skipped.

        `keys` is `[T, num_kv_heads, head_dim]`, `values` `[T, num_kv_heads, value_head_dim]`, `slot_mapping` int64
        `[T]`. Slots on the host are checked before anything is written. Slots on an accelerator are not looked at,
        since the host would have to wait for them; one out of range trips the device's own assertion.

        Raises `LayoutError` for tensors that do not fit the layer, `ArgumentError` for a slot outside the arena.
        """
        pool = self._layer(layer)
        slots = _as_tensor(slot_mapping)
        self._check_rows(layer, "keys", keys, pool.keys, slots)
        self._check_rows(layer, "values", values, pool.values, slots)
        keys, values = _bits(keys), _bits(values)
        if slots.device.type == "cpu":
            slots, keys, values = self._drop_skipped(slots, keys, values)
            slots = slots.to(self.device, non_blocking=True)
            self.sync()
            pool.key_rows.index_copy_(0, slots, keys)
            pool.value_rows.index_copy_(0, slots, values)
        else:
            self.sync()
            _scatter_rows(pool.key_rows, slots, keys)
            _scatter_rows(pool.value_rows, slots, values)

    def gather(self, layer: int, block_table: IntArray, max_len: int) -> tuple[Tensor, Tensor]:
        """Copy the first `max_len` token positions of each sequence out of the arena.

        `block_table` is `[B, M]` with `M * block_size >= max_len`. Its padding may be any number: ids outside the arena
        are read as its nearest block, so positions past a sequence's own length hold other tokens' contents and must be
        masked. Returns keys `[B, max_len, num_kv_heads, head_dim]` and values `[B, max_len, num_kv_heads,
        value_head_dim]`.

        Raises `LayoutError` when the table is not two-dimensional, `ArgumentError` when it is too narrow.
        """
        pool = self._layer(layer)
        table = _as_tensor(block_table)
        if table.ndim != 2:
            raise LayoutError(f"block_table must be [B, M], got shape {tuple(table.shape)}")
        width = -(-max_len // self.block_size)
        if max_len < 0 or width > table.shape[1]:
            raise ArgumentError(
                f"max_len {max_len} needs {width} blocks a sequence, but block_table has {table.shape[1]} of "
                f"{self.block_size} tokens"
            )
        ids = table[:, :width].to(self.device, torch.int64, non_blocking=True).clamp(0, self.num_blocks - 1)
        self.sync()
        return (
            self._gather_plane(pool.keys, ids, max_len),
            self._gather_plane(pool.values, ids, max_len),
        )

    def perform(self, moves: Sequence[Move]) -> None:
        """Copy the first `num_tokens` token rows of each source block into its destination, in all layers, in order.

        Returns without waiting on CUDA. Raises `ArgumentError`, before anything is copied, for a move that names
        another tier, group, block or token count than this arena has.
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
        for sources, destinations, num_tokens in _batches(moves):
            pairs = torch.tensor([sources, destinations], dtype=torch.int64)
            if self.device.type == "cuda":
                pairs = pairs.pin_memory()
            source_ids, destination_ids = pairs.to(self.device, non_blocking=True)
            for layer in self._layers:
                for plane in (layer.keys, layer.values):
                    head = _bits(plane)[:, :num_tokens]
                    head.index_copy_(0, destination_ids, head.index_select(0, source_ids))

    def _gather_plane(self, plane: Tensor, ids: Tensor, max_len: int) -> Tensor:
        num_sequences, width = ids.shape
        # One index_select of whole blocks: many times faster on CPU than indexing K and V at once.
        rows = _bits(plane).index_select(0, ids.flatten()).view(plane.dtype)
        return rows.view(num_sequences, width * self.block_size, *plane.shape[2:])[:, :max_len]

    def _layer(self, layer: int) -> _LayerPool:
        if not 0 <= layer < len(self._layers):
            raise ArgumentError(f"layer must be in [0, {len(self._layers)}), got {layer}")
        return self._layers[layer]

    def _check_rows(self, layer: int, name: str, rows: Tensor, plane: Tensor, slots: Tensor) -> None:
        if slots.ndim != 1 or slots.dtype != torch.int64:
            raise LayoutError(f"slot_mapping must be int64 [T], got {slots.dtype} {list(slots.shape)}")
        expected = (slots.shape[0], *plane.shape[2:])
        if tuple(rows.shape) != expected:
            raise LayoutError(
                f"{name} of layer {layer} must be {list(expected)} for {expected[0]} slots, got {list(rows.shape)}"
            )
        if rows.dtype != plane.dtype or rows.device != plane.device:
            raise LayoutError(
                f"{name} of layer {layer} are kept as {plane.dtype} on {plane.device}, "
                f"got {rows.dtype} on {rows.device}"
            )

    def _drop_skipped(self, slots: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Check slots that lie on the host, and leave out the tokens that are to be skipped."""
        if slots.numel() == 0:
            return slots, keys, values
        lowest, highest = (int(bound) for bound in slots.aminmax())
        num_slots = self.num_blocks * self.block_size
        if highest >= num_slots:
            raise ArgumentError(f"slot {highest} is outside the arena's {num_slots} slots")
        if lowest >= 0:
            return slots, keys, values
        kept = (slots >= 0).nonzero().flatten()
        rows = kept.to(self.device)
        return slots[kept], keys.index_select(0, rows), values.index_select(0, rows)

    def _check_move(self, move: Move) -> None:
        if (move.source_tier, move.destination_tier) != ("device", "device") or move.group != 0:
            raise ArgumentError(f"{move} leaves this arena, which holds group 0 of the device tier")
        for block in (move.source, move.destination):
            if not 0 <= block < self.num_blocks:
                raise ArgumentError(f"{move} names block {block}, but this arena has blocks 0 to {self.num_blocks - 1}")
        if not 0 <= move.num_tokens <= self.block_size:
            raise ArgumentError(f"{move} copies {move.num_tokens} tokens of a block of {self.block_size}")


def _as_tensor(values: IntArray) -> Tensor:
    """Take integers as a tensor; read-only arrays, as the manager's block tables may be, are copied: torch has none."""
    if isinstance(values, np.ndarray) and not values.flags.writeable:
        values = values.copy()
    return torch.as_tensor(values)


def _bits(tensor: Tensor) -> Tensor:
    """View 8-bit floats as bytes, since torch cannot index them; other tensors are returned as they are."""
    return tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor


def _scatter_rows(plane: Tensor, slots: Tensor, rows: Tensor) -> None:
    """Write `rows` at `slots` without asking the device how many slots are negative.

    A skipped token writes again what the first kept token writes, or, if none is kept, what slot 0 holds already.
    """
    if slots.numel() == 0:
        return
    kept = slots >= 0
    first = kept.int().argmax().unsqueeze(0)
    anchor = slots[first].clamp(min=0)
    anchor_row = torch.where(kept.any(), rows[first], plane[anchor])
    shape = (-1,) + (1,) * (rows.ndim - 1)
    plane.index_copy_(0, torch.where(kept, slots, anchor), torch.where(kept.view(shape), rows, anchor_row))


def _batches(moves: Sequence[Move]) -> Iterator[tuple[list[int], list[int], int]]:
    """Yield (sources, destinations, num_tokens), each to be copied at once; one after the other they equal the moves.

    Moves share a batch as long as none reads or writes a block that another one of them writes: such moves may change
    places, so those of equal length go together.
    """
    read: set[int] = set()
    written: set[int] = set()
    by_length: dict[int, tuple[list[int], list[int]]] = {}
    for move in moves:
        if move.source in written or move.destination in written or move.destination in read:
            yield from ((*pairs, length) for length, pairs in by_length.items())
            read, written, by_length = set(), set(), {}
        sources, destinations = by_length.setdefault(move.num_tokens, ([], []))
        sources.append(move.source)
        destinations.append(move.destination)
        read.add(move.source)
        written.add(move.destination)
    yield from ((*pairs, length) for length, pairs in by_length.items())
