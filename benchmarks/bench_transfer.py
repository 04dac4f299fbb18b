"""How close do scattered moves between tiers come to one `memcpy` of the same bytes?

Blocks go to blocks of the other tier, both in random order over all of it, through `TransferManager` on CPU. A piece is
what is one run of bytes on both sides: in block-major order a whole block, in layer-major order one plane of it, of
which a block has 16. A turn moves an eighth of the blocks, the next turn another one, of tiers that are larger than the
caches and whose pages have been touched. The reference is one thread's `memcpy` of as many bytes, in turns as well. The
clock is the one on the wall, since copies use all cores; the best turn of each counts, since on a shared machine any
turn may be disturbed.

For information: all blocks to neighbouring ones, as into an empty pool; the same through torch's `index_select` and
`index_copy_`; and what one `memcpy` of the whole tier would take for so many bytes: from some size on it bypasses the
caches, which no copy of pieces does.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from ctypes import memmove
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from harness import paused_collector
from kvist import AttentionSpec, CacheConfig
from kvist.core.moves import BlockMoves
from kvist.memory.layout import layouts
from kvist.memory.transfers import CpuDevice, TransferManager, columns_of
from report import Options, Row, main

TIER_BYTES, QUICK_BYTES = 512 << 20, 8 << 20
NUM_PARTS = 8
KIB = 1 << 10
SIZES = (4 * KIB, 32 * KIB, 256 * KIB, 4096 * KIB)
QUICK_SIZES = (4 * KIB, 32 * KIB)
NUM_LAYERS, BLOCK_SIZE, HEAD_DIM = 8, 16, 128
NUM_TURNS = 48

AT_ONCE = "one memcpy of the whole tier"

Parts = list[Callable[[], object]]
"""What is done in each turn, again from the first after the last."""
Works = dict[str, Parts]


@dataclass(frozen=True, slots=True)
class PartOfSpeed:
    """At least so great a part of the reference's speed; the ratio is value's speed to reference's."""

    part: float

    def holds(self, value: float, reference: float) -> bool:
        return value * self.part <= reference

    def ratio(self, value: float, reference: float) -> float:
        return reference / value

    def __str__(self) -> str:
        return f"at least {self.part:.0%} of the speed"


class Tiers:
    """A device tier of planes and a host tier of rows, all of which are written once, and moves of all blocks."""

    def __init__(self, memory: tuple[Tensor, Tensor], piece_bytes: int, num_planes: int) -> None:
        config = CacheConfig(
            [_layer(piece_bytes, num_planes)] * max(1, num_planes // 2), block_size=BLOCK_SIZE, num_blocks=1
        )
        [layout] = layouts(config)
        self.num_blocks = len(memory[0]) // layout.num_bytes
        used = self.num_blocks * layout.num_bytes
        device = memory[0][:used].view(num_planes, self.num_blocks, piece_bytes)
        host = columns_of(memory[1][:used].view(self.num_blocks, layout.num_bytes), layout)
        self.num_bytes = used
        self.manager = TransferManager(
            CpuDevice(), [layout], {"device": [list(device)], "host": [host]}, {"device": [0], "host": [0]}
        )

    def moves(self, direction: str, sources: NDArray[np.int32], destinations: NDArray[np.int32]) -> Parts:
        """Return the calls that move blocks to the host, or back."""
        tiers = ("device", "host") if direction == "demote" else ("host", "device")
        ids = zip(np.array_split(sources, NUM_PARTS), np.array_split(destinations, NUM_PARTS), strict=True)
        moves = [BlockMoves(*both, BLOCK_SIZE, 0, *tiers) for both in ids]
        return [partial(self.manager.perform, [each]) for each in moves]


def _layer(piece_bytes: int, num_planes: int) -> AttentionSpec:
    """Return a layer whose planes are of that size; one plane is that of a layer with keys only."""
    num_kv_heads = piece_bytes // (BLOCK_SIZE * HEAD_DIM * 2)
    return AttentionSpec(num_kv_heads, HEAD_DIM, dtype="float16", value_head_dim=None if num_planes > 1 else 0)


def measure(options: Options) -> list[Row]:
    """Each size, both storage orders and both directions."""
    total, sizes = (QUICK_BYTES, QUICK_SIZES) if options.quick else (TIER_BYTES, SIZES)
    memory = touched(total), touched(total)
    return [row for size in sizes for row in rows(memory, size, NUM_PARTS if options.quick else NUM_TURNS)]


def touched(num_bytes: int) -> Tensor:
    """Return memory whose pages are all there."""
    return torch.full((num_bytes,), 7, dtype=torch.uint8)


def rows(memory: tuple[Tensor, Tensor], piece_bytes: int, num_turns: int) -> Iterator[Row]:
    """Rows of one size of pieces."""
    measured = best_us(contestants(memory, piece_bytes), num_turns)
    measured[AT_ONCE] /= NUM_PARTS
    reference = measured.pop("memcpy")
    target = PartOfSpeed(0.35 if piece_bytes < 32 * KIB else 0.7)
    for name, value in measured.items():
        aimed = target if name.endswith("scattered") else None
        yield Row(
            name=f"{piece_bytes // KIB} KiB, {name}",
            value=value,
            unit="µs",
            reference=reference,
            reference_name="memcpy",
            target=aimed,
            ratio_as=target,
        )


def contestants(memory: tuple[Tensor, Tensor], piece_bytes: int) -> Works:
    """Everything that copies an eighth of the bytes of a tier, in each turn another."""
    device, host = memory
    works: Works = {"memcpy": whole(host, device, NUM_PARTS)}
    for order, num_planes in (("block-major", 1), ("layer-major", 2 * NUM_LAYERS)):
        tiers = Tiers(memory, piece_bytes, num_planes)
        random = np.random.default_rng(piece_bytes)
        sources, destinations = (random.permutation(tiers.num_blocks).astype(np.int32) for _ in range(2))
        for direction in ("demote", "promote"):
            works[f"{order}, {direction}, scattered"] = tiers.moves(direction, sources, destinations)
        works[f"{order}, demote, to neighbours"] = tiers.moves("demote", sources, np.sort(sources))
    works["through torch"] = through_torch(device.view(-1, piece_bytes), host.view(-1, piece_bytes))
    works[AT_ONCE] = whole(host, device, 1)
    return works


def whole(destination: Tensor, source: Tensor, num_parts: int) -> Parts:
    """Return calls that each copy a part as it is."""
    size = len(source) // num_parts
    starts = range(0, num_parts * size, size)
    return [partial(memmove, destination.data_ptr() + start, source.data_ptr() + start, size) for start in starts]


def through_torch(source: Tensor, destination: Tensor) -> Parts:
    """Return calls that copy rows as torch does by index."""
    generator = torch.Generator().manual_seed(0)
    ids = [torch.randperm(len(source), generator=generator).chunk(NUM_PARTS) for _ in range(2)]
    return [partial(copy_indexed, source, destination, *both) for both in zip(*ids, strict=True)]


def copy_indexed(source: Tensor, destination: Tensor, read: Tensor, written: Tensor) -> None:
    destination.index_copy_(0, written, source.index_select(0, read))


def best_us(works: Works, num_turns: int) -> dict[str, float]:
    """Microseconds on the wall of the best of each one's turns, after two rounds that do not count."""
    samples: dict[str, list[int]] = {name: [] for name in works}
    with paused_collector():
        for turn in range(num_turns + 2):
            for name, parts in works.items():
                work = parts[turn % len(parts)]
                start = time.perf_counter_ns()
                work()
                samples[name].append(time.perf_counter_ns() - start)
    return {name: min(taken[2:]) / 1e3 for name, taken in samples.items()}


if __name__ == "__main__":
    main("transfer", measure, __doc__)
