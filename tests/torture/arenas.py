"""A manager over real arenas whose copies, and whose forward passes, end when and in which order a test says."""

import numpy as np
import torch

from kvist import AttentionSpec, CacheConfig, HostTier, KVCacheManager
from kvist.memory.arena import TorchMemory
from kvist.memory.transfers import TransferManager
from kvist.testing import FakeDevice, Prefixes

KV = AttentionSpec(1, 2, dtype="float32")
WINDOW = AttentionSpec(1, 2, dtype="float32", sliding_window=6)


class Arena:
    """K of each slot is a number for its position, tokens and namespace; the forward pass writes and compares it.

    Both are queued on the compute stream of a fake device, as kernels would be. `promises` counts what was compared.
    """

    def __init__(self, layers=(KV,), *, num_blocks=6, num_host_blocks=4, block_size=2, **settings):
        settings = {
            "max_sequences": 6,
            "max_sequence_length": 40,
            "tiers": [HostTier(num_blocks=num_host_blocks)],
        } | settings
        self.config = CacheConfig(list(layers), block_size, num_blocks, **settings)
        self.device, self.memory = FakeDevice(), TorchMemory(self.config)
        old = self.memory._transfers
        self.memory._transfers = TransferManager(self.device, old._layouts, old._planes, old._places.pool_of)
        self.manager = KVCacheManager(self.config, self.memory)
        self.prefixes, self.promises = Prefixes(), 0

    def admit(self, tokens, **options):
        """Admit a prompt, and have what is said to be there compared."""
        sequence = self.manager.add_sequence(tokens, **options)
        self.read(sequence)
        return sequence

    def serve(self, tokens, **options):
        sequence = self.admit(tokens, **options)
        self.compute(sequence)
        return sequence

    def compute(self, sequence):
        """Queue the pass that computes what is not computed yet, and commit it, as an engine does that runs ahead."""
        self.memory.sync()
        start, stop = sequence.num_computed_tokens, sequence.num_tokens
        for layer, slots, values in self._places(sequence, np.arange(start, stop)):
            self.device.compute(lambda layer=layer, slots=slots, values=values: self._put(layer, slots, values))
        self.manager.commit([sequence])

    def read(self, sequence):
        """Queue the pass that reads all that the next token needs."""
        self.memory.sync()
        end = sequence.num_computed_tokens
        for layer, slots, values in self._places(sequence, np.arange(end), end=end):
            self.promises += len(slots)
            self.device.compute(lambda layer=layer, slots=slots, values=values: self._compare(layer, slots, values))

    def finish(self, chance):
        """Let everything end, in a random order."""
        while ready := self.device.ready:
            self.device.complete(chance.choice(ready))

    def _places(self, sequence, positions, end=None):
        values = self.prefixes.along(sequence.namespace, sequence.tokens.tolist())
        for group, spec in enumerate(self.config.groups):
            seen = positions
            if end is not None and spec.window:
                seen = positions[positions >= end + 1 - spec.window]
            blocks = sequence.group_blocks(group)
            columns, offsets = np.divmod(seen, self.config.block_size)
            slots = blocks[columns].astype(np.int64) * self.config.block_size + offsets
            keep = blocks[columns] >= 0
            assert end is None or keep.all()
            yield spec.layers[0], slots[keep], values[seen][keep]

    def _put(self, layer, slots, values):
        self.memory.kv(layer)[0][*self._index(slots)] = torch.from_numpy(values).to(torch.float32)

    def _compare(self, layer, slots, values):
        found = self.memory.kv(layer)[0][*self._index(slots)].numpy().astype(np.int64)
        assert found.tolist() == values.tolist(), "the forward pass reads what is not this sequence's"

    def _index(self, slots):
        """Where slots are in the keys of a layer, `[num_blocks, block_size, heads, head_dim]`, however these lie."""
        blocks, offsets = np.divmod(slots, self.config.block_size)
        return torch.from_numpy(blocks), torch.from_numpy(offsets), 0, 0
