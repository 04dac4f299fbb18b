"""What is to be cached and in how much memory: the settings of one manager, checked all at once."""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from math import prod
from typing import Any, Literal, TypeGuard

from kvist.errors import ConfigError
from kvist.sizes import parse_bytes
from kvist.tier_config import POLICY_NAMES, DiskTier, HostTier, RemoteTier, TierSpec, tier_problems

__all__ = [
    "DTYPES", "DTYPE_BYTES", "PACKED_DTYPES", "AttentionSpec", "CacheConfig", "GroupSpec", "LayerSpec", "StateSpec",
    "StorageOrder", "dtype_bytes", "is_quantised", "parse_bytes",
]  # fmt: skip

DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1, "int8": 1, "uint8": 1}
"""Bytes of one element, by the name torch gives the dtype."""
PACKED_DTYPES = ("int4", "uint4")
"""Dtypes of K and V that lie two to a byte, along a head."""
DTYPES = (*DTYPE_BYTES, *PACKED_DTYPES)
"""All dtypes of K and V."""

StorageOrder = Literal["layer_major", "block_major", "heads_first"]
STORAGE_ORDERS: tuple[StorageOrder, ...] = ("layer_major", "block_major", "heads_first")

MAX_BLOCK_IDS = 2**31 - 1
MAX_COUNT = 2**63 - 1
"""Larger numbers count nothing, and products of them no longer fit in a float."""


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """The K and V that one attention layer keeps of each token.

    K is `[num_kv_heads, head_dim]`, V `[num_kv_heads, value_head_dim]` (`head_dim` where None; 0 for caches that keep
    keys only, such as MLA's), both of `dtype`, a torch dtype's name. What of the past a token attends to: all of it;
    the last `sliding_window` tokens, itself included, and the first `sink_tokens` of the sequence; what lies in its own
    chunk of `chunk_tokens`; or, with `cross`, the encoder's tokens. A layer that `shares_layer` reads the cache of that
    layer, by index, and keeps none of its own.

    Dtypes of 8 and 4 bits keep each number divided by `k_scale` or `v_scale`; "int4" and "uint4" lie two to a byte
    along `head_dim`, which is even then.
    """

    num_kv_heads: int
    head_dim: int
    dtype: str = "bfloat16"
    sliding_window: int | None = None
    sink_tokens: int = 0
    value_head_dim: int | None = None
    cross: bool = False
    chunk_tokens: int | None = None
    shares_layer: int | None = None
    k_scale: float = 1.0
    v_scale: float = 1.0

    @property
    def head_dims(self) -> tuple[int, ...]:
        """Numbers of a head in K and, where V are kept, in V.

        >>> AttentionSpec(1, 512, value_head_dim=64).head_dims, AttentionSpec(1, 576, value_head_dim=0).head_dims
        ((512, 64), (576,))
        """
        value_head_dim = self.head_dim if self.value_head_dim is None else self.value_head_dim
        return (self.head_dim, value_head_dim) if value_head_dim else (self.head_dim,)

    @property
    def token_bytes(self) -> int:
        """Bytes of K and V of one token, 0 where the layer keeps none of its own.

        >>> AttentionSpec(num_kv_heads=3, head_dim=64, dtype="float32").token_bytes
        1536
        """
        if self.shares_layer is not None:
            return 0
        return self.num_kv_heads * sum(dtype_bytes(self.dtype, dim) for dim in self.head_dims)

    @property
    def state_bytes(self) -> int:
        """Bytes that it keeps of a sequence however long: none."""
        return 0

    def problems(self, name: str) -> list[str]:
        """List what is wrong with this layer, `name`d in each line."""
        sizes = {"num_kv_heads": self.num_kv_heads, "head_dim": self.head_dim}
        found = [f"{name}: {field} is {n!r}, must be a positive int" for field, n in sizes.items() if not _positive(n)]
        if self.value_head_dim is not None and not _natural(self.value_head_dim):
            found.append(f"{name}: value_head_dim is {self.value_head_dim!r}, must be an int of at least 0, or None")
        if type(self.cross) is not bool:
            found.append(f"{name}: cross is {self.cross!r}, must be True or False")
        if self.shares_layer is not None and not _natural(self.shares_layer):
            found.append(f"{name}: shares_layer is {self.shares_layer!r}, must be the index of a layer, or None")
        return found + self._span_problems(name) + self._dtype_problems(name)

    def _dtype_problems(self, name: str) -> list[str]:
        found = _dtype_problems(name, self.dtype, DTYPES)
        is_known = not found
        for field, dim in {"head_dim": self.head_dim, "value_head_dim": self.value_head_dim}.items():
            if is_known and self.dtype in PACKED_DTYPES and _natural(dim) and dim % 2:
                found.append(f"{name}: {field} is {dim}, must be even, since {self.dtype} lies two to a byte")
        for field, scale in {"k_scale": self.k_scale, "v_scale": self.v_scale}.items():
            if not _positive_number(scale):
                found.append(f"{name}: {field} is {scale!r}, must be a positive finite number")
            elif is_known and scale != 1 and not is_quantised(self.dtype):
                found.append(f"{name}: {field} is {scale!r}, but {self.dtype} is kept as it is, without a scale")
        return found

    def _span_problems(self, name: str) -> list[str]:
        found = [
            f"{name}: {field} is {n!r}, must be a positive int or None"
            for field, n in {"sliding_window": self.sliding_window, "chunk_tokens": self.chunk_tokens}.items()
            if n is not None and not _positive(n)
        ]
        if not _natural(self.sink_tokens):
            found.append(f"{name}: sink_tokens is {self.sink_tokens!r}, must be an int of at least 0")
        elif self.sink_tokens and self.sliding_window is None:
            found.append(f"{name}: sink_tokens is {self.sink_tokens} without a sliding_window, which alone has sinks")
        spans = [self.sliding_window is not None, self.chunk_tokens is not None, bool(self.cross)]
        if sum(spans) > 1:
            found.append(f"{name}: sliding_window, chunk_tokens and cross exclude each other")
        return found


@dataclass(frozen=True, slots=True)
class StateSpec:
    """The recurrent state that one layer keeps of a sequence, however long: tensors of these shapes.

    `dtype` is a torch dtype's name, or one for each shape. States after a block's last token are kept for reuse when a
    commit ends there: all of them, or with `checkpoint_tokens` only those after a multiple of that many tokens, and the
    last of a prompt.

    >>> StateSpec([(2, 3, 4), (5, 6)], "float16").state_bytes
    108
    """

    shapes: Sequence[tuple[int, ...]]
    dtype: str | Sequence[str] = "float32"
    checkpoint_tokens: int | None = None

    @property
    def dtypes(self) -> tuple[str, ...]:
        """The dtype of each shape."""
        return (self.dtype,) * len(self.shapes) if isinstance(self.dtype, str) else tuple(self.dtype)

    @property
    def token_bytes(self) -> int:
        """Bytes that it keeps of each token: none."""
        return 0

    @property
    def state_bytes(self) -> int:
        """Bytes of one state."""
        return sum(prod(shape) * DTYPE_BYTES[dtype] for shape, dtype in zip(self.shapes, self.dtypes, strict=True))

    def problems(self, name: str) -> list[str]:
        """List what is wrong with this layer, `name`d in each line."""
        shapes: Any = self.shapes
        if not isinstance(shapes, Sequence) or not shapes or not all(map(_is_shape, shapes)):
            return [f"{name}: shapes is {shapes!r}, must be a list of tuples of positive ints"]
        each: Any = self.dtype
        if not isinstance(each, str) and (not isinstance(each, Sequence) or len(each) != len(shapes)):
            return [f"{name}: dtype is {each!r}, must be a dtype's name, or one for each of {len(shapes)} shapes"]
        known = tuple(DTYPE_BYTES)
        told = [problem for dtype in self.dtypes for problem in _dtype_problems(name, dtype, known)]
        found = list(dict.fromkeys(told))
        if self.checkpoint_tokens is not None and not _positive(self.checkpoint_tokens):
            found.append(f"{name}: checkpoint_tokens is {self.checkpoint_tokens!r}, must be a positive int or None")
        return found


LayerSpec = AttentionSpec | StateSpec
Kind = Literal["full", "ring", "sliding", "chunked", "state", "cross"]
KINDS: tuple[Kind, ...] = ("full", "ring", "sliding", "chunked", "state", "cross")


@dataclass(frozen=True, slots=True)
class GroupSpec:
    """Layers that need the same part of the past, and so share one block table.

    `layers` are their indices. `window` and `sink_tokens` are those of a "ring" or "sliding" group, `chunk_tokens` of a
    "chunked" one, `checkpoint_tokens` of a "state" one; the others are 0. A block of the group takes `block_bytes` in
    all its layers; of a "state" group a block is one state.
    """

    kind: Kind
    layers: tuple[int, ...]
    block_bytes: int
    window: int = 0
    sink_tokens: int = 0
    chunk_tokens: int = 0
    checkpoint_tokens: int = 0

    def num_span_tokens(self, num_tokens: int) -> int:
        """Count the tokens of a sequence that the group keeps at most; 1 for a state."""
        if self.kind == "state":
            return min(num_tokens, 1)
        bound = self.chunk_tokens or self.window + (self.sink_tokens if self.kind == "sliding" else 0)
        return min(num_tokens, bound) if bound else num_tokens


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """The settings of one manager.

    `layers` with equal spans form a group with one block table: see `groups` for their order. Memory is given as
    `num_blocks`, for each group or one number for every group, or as `memory`, bytes or text such as `"20 GiB"`, shared
    out among the groups in proportion to what a sequence of `typical_length` tokens needs (default:
    `max_sequence_length`). With `shared_pool`, groups whose blocks have equal bytes take them from one pool.

    `ring` lets sliding windows write in place, in a bounded list of blocks; with `max_beams` over 1 that has one more
    block. `max_chunk_tokens` promises that no more tokens of a sequence are computed in one forward pass, so that
    windows need not hold a whole prompt. `policy` names an eviction policy, or is a callable that gives an extent its
    sort key (the least goes first); what it raises is counted in `Stats.num_policy_failures`. `reuse=False` keeps
    nothing after `free`; `partial_reuse=False` reuses whole blocks only. Pins may hold up to `pin_budget` of a pool.
    With `private_namespaces`, misses and explanations tell nothing of what other namespaces hold.

    `storage_order` says how a memory lays the blocks out: "layer_major", where each layer is one tensor, "block_major",
    where all layers of a block follow one another, so that a block moves in one piece, or "heads_first", which is
    layer-major with the tokens of a head together in each block, as TensorRT-LLM's kernels read it.

    `tiers` are slower places that blocks go to, faster ones first: host memory, a directory, a store in the network.
    What outlives the process or is shared with others is found again by what it depends on: `model` names that besides
    the tokens, such as a checkpoint and its revision. With an `event_buffer`, what changes is told as events, and so
    many of them wait for a reader.

    >>> CacheConfig([AttentionSpec(8, 128)] * 32, memory="1 GiB").group_num_blocks
    (512,)
    """

    layers: Sequence[LayerSpec]
    block_size: int = 16
    num_blocks: int | Sequence[int] | None = None
    memory: int | str | None = None
    max_sequences: int = 256
    max_sequence_length: int = 32768
    reuse: bool = True
    partial_reuse: bool = True
    policy: str | Callable[[Any], Any] = "priority"
    typical_length: int | None = None
    shared_pool: bool = False
    ring: bool = False
    max_beams: int = 1
    max_chunk_tokens: int | None = None
    pin_budget: float = 1.0
    tiers: Sequence[TierSpec] = ()
    model: str = ""
    event_buffer: int = 0
    storage_order: StorageOrder = "layer_major"
    private_namespaces: bool = False

    @property
    def block_bytes(self) -> int:
        """Bytes of one block of every group."""
        return sum(group.block_bytes for group in self.groups)

    @property
    def groups(self) -> tuple[GroupSpec, ...]:
        """The layers in groups: full attention first, then rings, sliding windows, chunks, states, cross attention.

        Within a kind the widest comes first.

        >>> sliding, full = AttentionSpec(1, 8, sliding_window=64), AttentionSpec(1, 8)
        >>> [(group.kind, group.layers) for group in CacheConfig([sliding, full, sliding]).groups]
        [('full', (1,)), ('sliding', (0, 2))]
        """
        members: dict[tuple[int, int, int, int], list[int]] = {}
        for index, layer in enumerate(self.layers):
            members.setdefault(self._span(layer), []).append(index)
        return tuple(self._group(span, members[span]) for span in sorted(members))

    @property
    def pool_of(self) -> tuple[int, ...]:
        """For each group, the index of the pool that it takes blocks from: pools are numbered by their first group."""
        if not self.shared_pool:
            return tuple(range(len(self.groups)))
        sizes = list(dict.fromkeys(group.block_bytes for group in self.groups))
        return tuple(sizes.index(group.block_bytes) for group in self.groups)

    @property
    def group_num_blocks(self) -> tuple[int, ...]:
        """For each group, the blocks of the pool that it takes its own from."""
        sizes = self.pool_num_blocks
        return tuple(sizes[pool] for pool in self.pool_of)

    @property
    def pool_num_blocks(self) -> tuple[int, ...]:
        """Blocks of each pool: `num_blocks`, or as many as fit in its part of `memory`, rounded down."""
        pools, groups = self.pool_of, self.groups
        if self.num_blocks is None:
            return self._pools_in_memory()
        if isinstance(self.num_blocks, int):
            return (self.num_blocks,) * (max(pools) + 1)
        return tuple(
            sum(self.num_blocks[group] for group in range(len(groups)) if pools[group] == pool)
            for pool in range(max(pools) + 1)
        )

    @property
    def fingerprint(self) -> bytes:
        """SHA-256 over all that stored contents depend on besides tokens: model, layers, block size, the groups."""
        layers = [f"{type(layer).__name__} {layer!r}" for layer in self.layers]
        groups = [f"{group.kind} {group.layers}" for group in self.groups]
        told = json.dumps([self.model, self.block_size, layers, groups], separators=(",", ":"))
        return sha256(told.encode()).digest()

    @property
    def host(self) -> HostTier | None:
        """The tier in host memory, if there is one."""
        return next((tier for tier in self.tiers if isinstance(tier, HostTier)), None)

    @property
    def stores(self) -> tuple[DiskTier | RemoteTier, ...]:
        """The tiers that keep blocks by what they hold, faster ones first."""
        return tuple(tier for tier in self.tiers if isinstance(tier, DiskTier | RemoteTier))

    @property
    def host_num_blocks(self) -> tuple[int, ...]:
        """Blocks of each pool of the host tier, in the order of `pool_num_blocks`; empty without one."""
        tier = self.host
        if tier is None:
            return ()
        at_home = replace(self, num_blocks=tier.num_blocks, memory=tier.capacity, tiers=())
        return at_home.pool_num_blocks

    @property
    def memory_shares(self) -> tuple[float, ...]:
        """For each group, its part of `memory`: what a sequence of `typical_length` tokens keeps in it, of all groups.

        A state group counts two states, the one in use and one to be found again.
        """
        length = self.typical_length or self.max_sequence_length
        needs = [
            2 * group.block_bytes
            if group.kind == "state"
            else group.num_span_tokens(length) * group.block_bytes // self.block_size
            for group in self.groups
        ]
        return tuple(need / sum(needs) for need in needs)

    @property
    def max_blocks_per_sequence(self) -> int:
        """Columns of the block table."""
        return -(-self.max_sequence_length // self.block_size)

    def _span(self, layer: LayerSpec) -> tuple[int, int, int, int]:
        """Return what decides the layer's group, in the order of groups: (kind, -size, sinks, checkpoints)."""
        if isinstance(layer, StateSpec):
            return KINDS.index("state"), 0, 0, layer.checkpoint_tokens or 0
        if layer.sliding_window is not None:
            return KINDS.index("ring" if self.ring else "sliding"), -layer.sliding_window, layer.sink_tokens, 0
        if layer.chunk_tokens is not None:
            return KINDS.index("chunked"), -layer.chunk_tokens, 0, 0
        return KINDS.index("cross" if layer.cross else "full"), 0, 0, 0

    def _group(self, span: tuple[int, int, int, int], members: list[int]) -> GroupSpec:
        kind, size, sink_tokens, checkpoint_tokens = KINDS[span[0]], -span[1], span[2], span[3]
        layers = [self.layers[index] for index in members]
        return GroupSpec(
            kind,
            tuple(members),
            self.block_size * sum(layer.token_bytes for layer in layers) + sum(layer.state_bytes for layer in layers),
            window=size if kind in ("ring", "sliding") else 0,
            sink_tokens=sink_tokens,
            chunk_tokens=size if kind == "chunked" else 0,
            checkpoint_tokens=checkpoint_tokens,
        )

    def _pools_in_memory(self) -> tuple[int, ...]:
        assert self.memory is not None
        size, pools, groups = parse_bytes(self.memory), self.pool_of, self.groups
        if len(groups) == 1:
            return (size // groups[0].block_bytes,)
        parts = [0.0] * (max(pools) + 1)
        for pool, share, group in zip(pools, self.memory_shares, groups, strict=True):
            parts[pool] += size * share / group.block_bytes
        return tuple(int(part + 1e-9) for part in parts)

    def validate(self) -> None:
        """Raise ConfigError with every problem at once."""
        problems = _layers_problems(self.layers)
        problems += [
            f"{name} is {value!r}, must be a positive int"
            for name in ("block_size", "max_sequences", "max_sequence_length", "max_beams")
            if not _positive(value := getattr(self, name))
        ]
        problems += [
            f"{name} is {value!r}, must be a positive int or None"
            for name in ("typical_length", "max_chunk_tokens")
            if (value := getattr(self, name)) is not None and not _positive(value)
        ]
        if self.policy not in POLICY_NAMES if isinstance(self.policy, str) else not callable(self.policy):
            problems.append(f"policy is {self.policy!r}, must be one of {', '.join(POLICY_NAMES)} or a callable")
        problems += [
            f"{name} is {value!r}, must be True or False"
            for name in ("reuse", "partial_reuse", "shared_pool", "ring", "private_namespaces")
            if type(value := getattr(self, name)) is not bool
        ]
        if self.storage_order not in STORAGE_ORDERS:
            problems.append(f"storage_order is {self.storage_order!r}, must be one of {', '.join(STORAGE_ORDERS)}")
        if not _natural(self.event_buffer):
            problems.append(f"event_buffer is {self.event_buffer!r}, must be an int of at least 0")
        budget: Any = self.pin_budget
        if isinstance(budget, bool) or not isinstance(budget, int | float) or not 0 <= budget <= 1:
            problems.append(f"pin_budget is {budget!r}, must be a number from 0 to 1")
        problems += tier_problems(self.tiers, self.model)
        if not problems:
            problems += self._group_problems()
        sizes_known = not problems
        problems += self._size_problems(sizes_known=sizes_known)
        if sizes_known and (tier := self.host) is not None:
            at_home = replace(self, num_blocks=tier.num_blocks, memory=tier.capacity, tiers=())
            problems += [f"tiers, HostTier: {line}" for line in at_home._size_problems(sizes_known=True)]
        if problems:
            raise ConfigError(problems)

    def _group_problems(self) -> list[str]:
        found = [
            f"layers[{index}]: checkpoint_tokens is {layer.checkpoint_tokens}, "
            f"not a multiple of block_size={self.block_size}"
            for index, layer in enumerate(self.layers)
            if isinstance(layer, StateSpec) and (layer.checkpoint_tokens or 0) % self.block_size
        ]
        if len({layer.checkpoint_tokens for layer in self.layers if isinstance(layer, StateSpec)}) > 1:
            found.append("layers: all recurrent layers must have the same checkpoint_tokens")
        for index, layer in enumerate(self.layers):
            if isinstance(layer, AttentionSpec) and layer.shares_layer is not None:
                found += self._sharing_problems(index, layer, layer.shares_layer)
        found += [
            f"ring=True with {group.sink_tokens} sink tokens in a window of {group.window} leaves nothing to write"
            for group in self.groups
            if group.kind == "ring" and group.sink_tokens >= group.window
        ]
        if not found and all(group.kind == "cross" for group in self.groups):
            found.append("layers has cross attention only: a decoder keeps something of its own tokens, too")
        return found

    def _sharing_problems(self, index: int, layer: AttentionSpec, donor_index: int) -> list[str]:
        donor = self.layers[donor_index] if donor_index < len(self.layers) else None
        if not isinstance(donor, AttentionSpec) or donor.shares_layer is not None or donor_index == index:
            return [
                f"layers[{index}]: shares_layer is {donor_index}, must be an attention layer with a cache of its own"
            ]
        if replace(layer, shares_layer=None) != donor:
            return [f"layers[{index}]: differs from layers[{donor_index}], whose cache it shares"]
        return []

    def _size_problems(self, *, sizes_known: bool) -> list[str]:
        if (self.num_blocks is None) == (self.memory is None):
            return [f"give either num_blocks or memory, not {'both' if self.memory is not None else 'neither'}"]
        if self.num_blocks is None:
            return self._memory_problems(sizes_known=sizes_known)
        each: Any = self.num_blocks
        if isinstance(each, int):
            return _num_blocks_problems(each, "num_blocks")
        if not isinstance(each, Sequence) or isinstance(each, str) or not each:
            return [f"num_blocks is {each!r}, must be a positive int, or a list of one for each group"]
        if sizes_known and len(each) != len(self.groups):
            return [f"num_blocks has {len(each)} entries, there are {len(self.groups)} groups"]
        found = [
            problem
            for group, num_blocks in enumerate(each)
            for problem in _num_blocks_problems(num_blocks, f"num_blocks[{group}]")
        ]
        if found or not sizes_known:
            return found
        return [problem for size in self.pool_num_blocks for problem in _id_problems(size, "num_blocks of one pool")]

    def _memory_problems(self, *, sizes_known: bool) -> list[str]:
        assert self.memory is not None
        try:
            size = parse_bytes(self.memory)
        except (ValueError, OverflowError) as error:
            return [f"memory: {error}"]
        if not sizes_known:
            return []
        sizes = self.pool_num_blocks
        if not all(sizes):
            return [self._shortage(size, sizes.index(0))]
        return [problem for num_blocks in sizes for problem in _id_problems(num_blocks, "memory / block bytes")]

    def _shortage(self, size: int, pool: int) -> str:
        if len(self.groups) == 1:
            return f"memory is {size} bytes, less than one block of {self.block_bytes} bytes"
        members = [
            (group, share)
            for group, share, own in zip(self.groups, self.memory_shares, self.pool_of, strict=True)
            if own == pool
        ]
        kinds = " and ".join(group.kind for group, _ in members)
        part = int(size * sum(share for _, share in members))
        return (
            f"memory is {size} bytes, of which the {kinds} layers get {part}, "
            f"less than one block of {members[0][0].block_bytes} bytes"
        )


def dtype_bytes(dtype: str, num_elements: int) -> int:
    """Return the bytes of so many elements in a row.

    >>> dtype_bytes("bfloat16", 128), dtype_bytes("int4", 128)
    (256, 64)
    """
    return -(-num_elements // 2) if dtype in PACKED_DTYPES else num_elements * DTYPE_BYTES[dtype]


def is_quantised(dtype: str) -> bool:
    """Say whether K and V of this dtype are kept divided by a scale.

    >>> is_quantised("float8_e4m3fn"), is_quantised("int4"), is_quantised("float16")
    (True, True, False)
    """
    return dtype in PACKED_DTYPES or DTYPE_BYTES[dtype] == 1


def _layers_problems(layers: Any) -> list[str]:
    if not isinstance(layers, Sequence) or isinstance(layers, str) or not layers:
        return [f"layers is {layers!r}, must be a list of at least one AttentionSpec or StateSpec"]
    return [line for index, layer in enumerate(layers) for line in _layer_problems(index, layer)]


def _layer_problems(index: int, layer: Any) -> list[str]:
    if not isinstance(layer, AttentionSpec | StateSpec):
        return [f"layers[{index}] is a {type(layer).__name__}, must be an AttentionSpec or StateSpec"]
    return layer.problems(f"layers[{index}]")


def _dtype_problems(name: str, dtype: Any, known: tuple[str, ...]) -> list[str]:
    if type(dtype) is str and dtype in known:
        return []
    return [f"{name}: dtype is {dtype!r}, must be one of {', '.join(known)}"]


def _num_blocks_problems(num_blocks: Any, name: str) -> list[str]:
    if not _positive(num_blocks):
        return [f"{name} is {num_blocks!r}, must be a positive int"]
    return _id_problems(num_blocks, name)


def _id_problems(num_blocks: int, name: str) -> list[str]:
    return (
        [f"{name} is {num_blocks}, more than the {MAX_BLOCK_IDS} that int32 block ids can name"]
        if num_blocks > MAX_BLOCK_IDS
        else []
    )


def _positive(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value <= MAX_COUNT


def _positive_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf


def _natural(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_COUNT


def _is_shape(shape: Any) -> bool:
    return isinstance(shape, Sequence) and not isinstance(shape, str) and bool(shape) and all(map(_positive, shape))
