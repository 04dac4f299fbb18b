"""The copies that decisions of the core need; whoever holds the bytes performs them, in order."""

from dataclasses import dataclass

__all__ = ["Move"]


@dataclass(frozen=True, slots=True)
class Move:
    """Copy `num_tokens` token rows of block `source` into block `destination`, in all layers of `group`.

    The rows copied are those from `source_offset` on, and they go to `destination_offset` on; both are 0 but where
    single tokens change places. A block of a "state" group is one state, copied whole: `num_tokens` is the block size.
    Moves are performed in the order given, before anything that the next forward pass reads or writes.
    """

    source: int
    destination: int
    num_tokens: int
    group: int = 0
    source_tier: str = "device"
    destination_tier: str = "device"
    source_offset: int = 0
    destination_offset: int = 0
