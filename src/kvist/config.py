"""What is to be cached and in how much memory: the settings of one manager, checked all at once."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kvist.errors import ConfigError

__all__ = ["DTYPE_BYTES", "AttentionSpec", "CacheConfig", "parse_bytes"]

DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1, "int8": 1, "uint8": 1}
"""Bytes of one element, by the name torch gives the dtype."""

MAX_BLOCK_IDS = 2**31 - 1
POLICY_NAMES = ("fifo", "lfu", "lru", "priority")
SIZE_UNITS = {
    "": 1,
    "B": 1,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
    "kB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
}


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """The K and V that one attention layer keeps of each token.

    K is `[num_kv_heads, head_dim]`, V `[num_kv_heads, value_head_dim]` (`head_dim` where None), both of `dtype`, a
    torch dtype's name. Only full self-attention can be cached by this version: `sliding_window`, `sink_tokens` and
    `cross` must be left as they are, and anything else is refused by `CacheConfig.validate`.
    """

    num_kv_heads: int
    head_dim: int
    dtype: str = "bfloat16"
    sliding_window: int | None = None
    sink_tokens: int = 0
    value_head_dim: int | None = None
    cross: bool = False

    @property
    def token_bytes(self) -> int:
        """Bytes of K and V of one token.

        >>> AttentionSpec(num_kv_heads=3, head_dim=64, dtype="float32").token_bytes
        1536
        """
        return self.num_kv_heads * (self.head_dim + (self.value_head_dim or self.head_dim)) * DTYPE_BYTES[self.dtype]

    def problems(self, name: str) -> list[str]:
        """List what is wrong with this layer, `name`d in each line."""
        value_head_dim = self.head_dim if self.value_head_dim is None else self.value_head_dim
        sizes = {"num_kv_heads": self.num_kv_heads, "head_dim": self.head_dim, "value_head_dim": value_head_dim}
        found = [f"{name}: {field} is {n!r}, must be a positive int" for field, n in sizes.items() if not _positive(n)]
        if self.sliding_window is not None or self.sink_tokens or self.cross:
            found.append(f"{name}: sliding windows, sink tokens and cross attention cannot be cached by this version")
        if type(self.dtype) is not str or self.dtype not in DTYPE_BYTES:
            found.append(f"{name}: dtype is {self.dtype!r}, must be one of {', '.join(DTYPE_BYTES)}")
        return found


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """The settings of one manager.

    `layers` share one block table. Memory is given as `num_blocks` or as `memory`, bytes or text such as `"20 GiB"`, of
    which as many whole blocks are made as fit. `policy` names an eviction policy, or is a callable that gives an
    extent its sort key (the least goes first); what it raises is counted in `Stats.num_policy_failures`. `reuse=False`
    keeps nothing after `free`; `partial_reuse=False` reuses whole blocks only.

    >>> CacheConfig([AttentionSpec(8, 128)] * 32, memory="1 GiB").resolved_num_blocks
    512
    """

    layers: Sequence[AttentionSpec]
    block_size: int = 16
    num_blocks: int | None = None
    memory: int | str | None = None
    max_sequences: int = 256
    max_sequence_length: int = 32768
    reuse: bool = True
    partial_reuse: bool = True
    policy: str | Callable[[Any], Any] = "priority"

    @property
    def block_bytes(self) -> int:
        """Bytes of one block in all layers."""
        return self.block_size * sum(layer.token_bytes for layer in self.layers)

    @property
    def resolved_num_blocks(self) -> int:
        """Blocks of the pool: `num_blocks`, or as many as fit in `memory`, rounded down."""
        if self.num_blocks is not None:
            return self.num_blocks
        assert self.memory is not None
        return parse_bytes(self.memory) // self.block_bytes

    @property
    def max_blocks_per_sequence(self) -> int:
        """Columns of the block table."""
        return -(-self.max_sequence_length // self.block_size)

    def validate(self) -> None:
        """Raise ConfigError with every problem at once."""
        problems = _layers_problems(self.layers)
        problems += [
            f"{name} is {value!r}, must be a positive int"
            for name in ("block_size", "max_sequences", "max_sequence_length")
            if not _positive(value := getattr(self, name))
        ]
        if self.policy not in POLICY_NAMES if isinstance(self.policy, str) else not callable(self.policy):
            problems.append(f"policy is {self.policy!r}, must be one of {', '.join(POLICY_NAMES)} or a callable")
        problems += [
            f"{name} is {value!r}, must be True or False"
            for name in ("reuse", "partial_reuse")
            if type(value := getattr(self, name)) is not bool
        ]
        problems += self._size_problems(sizes_known=not problems)
        if problems:
            raise ConfigError(problems)

    def _size_problems(self, *, sizes_known: bool) -> list[str]:
        if (self.num_blocks is None) == (self.memory is None):
            return [f"give either num_blocks or memory, not {'both' if self.memory is not None else 'neither'}"]
        return (
            self._memory_problems(sizes_known=sizes_known) if self.num_blocks is None else self._num_blocks_problems()
        )

    def _num_blocks_problems(self) -> list[str]:
        if self.num_blocks is None or not _positive(self.num_blocks):
            return [f"num_blocks is {self.num_blocks!r}, must be a positive int"]
        return _id_problems(self.num_blocks, "num_blocks")

    def _memory_problems(self, *, sizes_known: bool) -> list[str]:
        assert self.memory is not None
        try:
            size = parse_bytes(self.memory)
        except (ValueError, OverflowError) as error:
            return [f"memory: {error}"]
        if not sizes_known:
            return []
        if size < self.block_bytes:
            return [f"memory is {size} bytes, less than one block of {self.block_bytes} bytes"]
        return _id_problems(size // self.block_bytes, "memory / block bytes")


def parse_bytes(size: int | str) -> int:
    """Return a number of bytes; text is a number with a unit of KiB, MiB, GiB, TiB (or kB, MB, GB, TB, powers of ten).

    >>> parse_bytes("1.5 GiB")
    1610612736
    """
    if isinstance(size, int) and not isinstance(size, bool):
        if size <= 0:
            raise ConfigError([f"{size} is not a positive number of bytes"])
        return size
    found = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", size) if isinstance(size, str) else None
    if not found or found[2] not in SIZE_UNITS:
        raise ConfigError([f"{size!r} is not a size such as 1073741824 or '20 GiB'"])
    number = int(float(found[1]) * SIZE_UNITS[found[2]])
    if number <= 0:
        raise ConfigError([f"{size!r} is not a positive number of bytes"])
    return number


def _layers_problems(layers: Any) -> list[str]:
    if not isinstance(layers, Sequence) or isinstance(layers, str) or not layers:
        return [f"layers is {layers!r}, must be a list of at least one AttentionSpec"]
    return [line for index, layer in enumerate(layers) for line in _layer_problems(index, layer)]


def _layer_problems(index: int, layer: Any) -> list[str]:
    if not isinstance(layer, AttentionSpec):
        return [f"layers[{index}] is a {type(layer).__name__}, must be an AttentionSpec"]
    return layer.problems(f"layers[{index}]")


def _id_problems(num_blocks: int, name: str) -> list[str]:
    return (
        [f"{name} is {num_blocks}, more than the {MAX_BLOCK_IDS} that int32 block ids can name"]
        if num_blocks > MAX_BLOCK_IDS
        else []
    )


def _positive(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
