"""Records as Hypothesis draws them: those that each protocol can say whole, and any."""

from hypothesis import strategies as st

from kvist.wire.records import (
    TIERS,
    AllCleared,
    BlockMedia,
    CreatedPools,
    MovedBlocks,
    RemovedBlocks,
    StoredBlocks,
    UpdatedBlocks,
)

ints = st.integers(0, 2**64 - 1)
names = ints | st.binary(min_size=32, max_size=32)
texts = st.text("abc", min_size=1, max_size=4)
maybe_count = st.none() | st.integers(0, 2**31 - 1)
maybe_text = st.none() | texts
tiers = st.sampled_from(TIERS)
namespaces = st.none() | st.lists(texts | st.integers(0, 9) | st.binary(max_size=2), max_size=3).map(tuple)
media = st.builds(
    BlockMedia, texts | st.integers(0, 2**64 - 1) | st.binary(max_size=3), st.integers(-9, 3), maybe_count, maybe_text
)


@st.composite
def any_record(draw):
    """Any record, with as much or as little in it as the types let."""
    told = {
        "worker": draw(st.text("abc", max_size=2)), "rank": draw(maybe_count), "id": draw(maybe_count),
        "epoch": draw(maybe_count), "time_s": draw(st.none() | st.floats(0, 2e9)),
        "own": draw(st.none() | st.just({"vllm": {"x": (1, b"y", None)}, "z": {"bytes": "q", "map": 2}})),
    }  # fmt: skip
    kind = draw(st.sampled_from([StoredBlocks, MovedBlocks, RemovedBlocks, UpdatedBlocks, AllCleared, CreatedPools]))
    if kind is AllCleared:
        return AllCleared(**told, tier=draw(st.none() | tiers), namespace=draw(namespaces), reason=draw(maybe_text))
    if kind is CreatedPools:
        pools = draw(st.lists(st.tuples(tiers, st.integers(0, 99)), max_size=3).map(tuple))
        return CreatedPools(**told, num_blocks=pools, group=draw(maybe_count), kind=draw(maybe_text))
    told["hashes"] = draw(st.lists(names, max_size=3).map(tuple))
    told |= {"group": draw(maybe_count), "tier": draw(st.none() | tiers), "namespace": draw(namespaces)}
    if kind is RemovedBlocks:
        return RemovedBlocks(**told, locality=draw(maybe_text), window=draw(maybe_count))
    if kind is UpdatedBlocks:
        return UpdatedBlocks(**told, priority=draw(maybe_count), source_tier=draw(st.none() | tiers))
    told |= {
        "parent": draw(st.none() | names), "tokens": draw(st.lists(st.integers(0, 2**31 - 1), max_size=6).map(tuple)),
        "media": draw(st.lists(st.lists(media, max_size=2).map(tuple), max_size=2).map(tuple)),
        "extra_keys": draw(st.none() | st.just(((("m", 1), b"x", "s"), None))), "salt": draw(maybe_text),
        "priorities": draw(st.lists(st.integers(0, 100), max_size=2).map(tuple)), "start": draw(maybe_count),
        "lora_id": draw(maybe_count), "lora_name": draw(maybe_text), "hash_name": draw(maybe_text),
    }  # fmt: skip
    return kind(**told, **({"source_tier": draw(st.none() | tiers)} if kind is MovedBlocks else {}))


@st.composite
def stored_by_all(draw, block_size=2):
    """A record of stored blocks in which all is set that several protocols have a word for."""
    num_blocks = draw(st.integers(1, 3))
    hashes = draw(st.lists(ints, min_size=num_blocks, max_size=num_blocks, unique=True).map(tuple))
    num_tokens = num_blocks * block_size
    return StoredBlocks(
        worker="", rank=draw(maybe_count), hashes=hashes, parent=draw(st.none() | ints),
        tokens=draw(st.lists(st.integers(0, 2**31 - 1), min_size=num_tokens, max_size=num_tokens).map(tuple)),
        block_size=block_size, group=draw(st.none() | st.integers(0, 3)), tier=draw(tiers),
        kind=draw(st.sampled_from([None, "full", "sliding", "state", "mla_attention"])),
        window=draw(st.none() | st.integers(1, 4096)), lora_id=draw(maybe_count), lora_name=draw(maybe_text),
        salt=draw(maybe_text), locality=draw(maybe_text), time_s=draw(st.floats(0, 2e9)),
    )  # fmt: skip
