"""Two tiers small enough to compare byte by byte, and what moves do to them one by one."""

import numpy as np
import torch

from kvist.config import AttentionSpec, CacheConfig, StateSpec
from kvist.memory import TorchMemory
from kvist.memory.transfers import TransferManager, columns_of

BLOCK_SIZE, NUM_DEVICE, NUM_HOST = 4, 8, 6

FULL = AttentionSpec(2, 8, dtype="float16")
MIXED = [
    FULL,
    AttentionSpec(1, 24, dtype="bfloat16", value_head_dim=0),
    AttentionSpec(2, 6, dtype="int8", value_head_dim=4),
]
SLIDING = AttentionSpec(2, 8, dtype="float16", sliding_window=6)
STATES = StateSpec([(3, 5), (7,)], dtype=["float32", "bfloat16"])


def configured(layers, **settings):
    return CacheConfig(layers, num_blocks=NUM_DEVICE, block_size=BLOCK_SIZE, **settings)


class Rig:
    """Device and host planes full of different bytes, and a manager of moves between them."""

    def __init__(self, config, device=None, seed=0):
        self.config = config
        self.memory = TorchMemory(config)
        self.layouts = self.memory.layouts
        num_pools = len(config.pool_num_blocks)
        sizes = [
            max(own.num_bytes for own, p in zip(self.layouts, config.pool_of, strict=True) if p == pool)
            for pool in range(num_pools)
        ]
        self.rows = [torch.zeros((NUM_HOST, size), dtype=torch.uint8) for size in sizes]
        groups = range(len(self.layouts))
        self.planes = {
            "device": [self.memory.plane_bytes(group) for group in groups],
            "host": [columns_of(self.rows[config.pool_of[group]], self.layouts[group]) for group in groups],
        }
        generator = torch.Generator().manual_seed(seed)
        for rows in (*self.device_bytes(), *self.rows):
            rows.copy_(torch.randint(0, 256, rows.shape, generator=generator, dtype=torch.uint8))
        if device is not None:
            pools = dict.fromkeys(("device", "host"), config.pool_of)
            self.manager = TransferManager(device, self.layouts, self.planes, pools)

    def device_bytes(self):
        return [plane for planes in self.planes["device"] for plane in planes]

    def contents(self, tier, group, block):
        """The bytes of a block, plane after plane."""
        return b"".join(plane[block].numpy().tobytes() for plane in self.planes[tier][group])

    def fill(self, group, block, value):
        """Do as the forward pass does: write all of a block on the device."""
        for plane in self.planes["device"][group]:
            plane[block] = value

    def apply(self, move):
        """Make one move, plainly."""
        layout = self.layouts[move.group]
        sides = self.planes[move.source_tier][move.group], self.planes[move.destination_tier][move.group]
        whole = layout.moves_whole and not (move.source_offset or move.destination_offset)
        for plane, source, destination in zip(layout.planes, *sides, strict=True):
            token_bytes = plane.num_bytes // BLOCK_SIZE
            size = plane.num_bytes if whole else move.num_tokens * token_bytes
            size *= bool(move.num_tokens)
            read, written = move.source_offset * token_bytes, move.destination_offset * token_bytes
            destination[move.destination, written : written + size] = source[move.source, read : read + size].clone()

    def everything(self):
        """All blocks of all groups, by where they are."""
        return {
            (tier, group, block): self.contents(tier, group, block)
            for tier, groups in self.planes.items()
            for group in range(len(groups))
            for block in range(NUM_DEVICE if tier == "device" else NUM_HOST)
        }


def int64(*ids):
    return np.array(ids, np.int64)
