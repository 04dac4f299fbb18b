"""What ranks tell one another while events are gathered: a head of 20 bytes, the lengths of the events, the events."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Self

from kvist.errors import WireError

__all__ = ["Kind", "Message"]

HEAD = struct.Struct("<3sBQQ")
MAGIC = b"kg1"


class Kind(IntEnum):
    """What a message is: the first two go to rank 0, the others are its answers."""

    EVENTS = 1
    """Events, and more to come."""
    LAST = 2
    """The last events of a rank."""
    GO_ON = 3
    """All is well."""
    FINISH = 4
    """Some rank stops: say what is left."""
    DONE = 5
    """The last events have come."""
    FAILED = 6
    """Some rank is gone; the only event is the text that says which."""


@dataclass(frozen=True, slots=True)
class Message:
    """Events of one rank, and how many it has lost so far; answers have neither."""

    kind: Kind
    events: Sequence[bytes] = ()
    num_lost: int = 0

    def pack(self) -> bytes:
        """Return it as bytes: magic, kind, events lost, events, their lengths as uint32, and the events.

        >>> Message(Kind.LAST, [b"ab", b"c"], num_lost=3).pack().hex(" ", -4)
        '6b673102 03000000 00000000 02000000 00000000 02000000 01000000 616263'
        """
        lengths = struct.pack(f"<{len(self.events)}I", *map(len, self.events))
        return b"".join((HEAD.pack(MAGIC, self.kind, self.num_lost, len(self.events)), lengths, *self.events))

    @classmethod
    def unpack(cls, packed: bytes) -> Self:
        """Return the message that was packed; raises WireError for anything else."""
        if len(packed) < HEAD.size:
            raise WireError(f"head: expected {HEAD.size} bytes, got {len(packed)}")
        magic, kind, num_lost, num_events = HEAD.unpack_from(packed)
        if magic != MAGIC:
            raise WireError(f"magic: expected {MAGIC!r}, got {magic!r}")
        if kind not in tuple(Kind):
            raise WireError(f"kind: expected 1 to {len(Kind)}, got {kind}")
        start = HEAD.size + 4 * num_events
        if start > len(packed):
            raise WireError(f"lengths: expected {num_events} of 4 bytes, got {len(packed) - HEAD.size} bytes")
        lengths = struct.unpack_from(f"<{num_events}I", packed, HEAD.size)
        if start + sum(lengths) != len(packed):
            raise WireError(f"events: expected {sum(lengths)} bytes, got {len(packed) - start}")
        events = []
        for length in lengths:
            events.append(packed[start : start + length])
            start += length
        return cls(Kind(kind), events, num_lost)
