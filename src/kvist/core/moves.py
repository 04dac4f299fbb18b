"""The copies that decisions of the core need; whoever holds the bytes performs them, in order."""

from dataclasses import dataclass

__all__ = ["Move"]


@dataclass(frozen=True, slots=True)
class Move:
    """Copy the first `num_tokens` token rows of block `source` into block `destination`, in all layers of `group`.

    Moves are performed in the order given, before anything that the next forward pass reads or writes.
    """

    source: int
    destination: int
    num_tokens: int
    group: int = 0
    source_tier: str = "device"
    destination_tier: str = "device"
