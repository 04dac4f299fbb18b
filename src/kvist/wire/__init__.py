"""Events in everyone's format, to and from those who listen: codecs, publishers, ranks, and the index of a router.

Nothing is imported here but what needs NumPy alone; codecs and publishers are modules of their own, and say which extra
brings what they need.
"""

from kvist.wire.conversion import FORMATS, Converter, Encoder, convert, decode_line
from kvist.wire.hashes import Scope
from kvist.wire.index import Coverage, Gap, IndexStats, PrefixIndex
from kvist.wire.naming import RunNames
from kvist.wire.recording import Recorder

__all__ = [
    "FORMATS",
    "Converter",
    "Coverage",
    "Encoder",
    "Gap",
    "IndexStats",
    "PrefixIndex",
    "Recorder",
    "RunNames",
    "Scope",
    "convert",
    "decode_line",
]
