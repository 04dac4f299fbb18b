from dataclasses import replace

import numpy as np
import pytest
from tests.core.small import label

from kvist import AttentionSpec, CacheConfig, ConfigError, KVCacheManager
from kvist.config import DTYPE_BYTES, DTYPES, StateSpec, parse_bytes
from kvist.tier_config import POLICY_NAMES

LAYER = AttentionSpec(num_kv_heads=2, head_dim=4, dtype="float16")
STATE = StateSpec([(2, 4)], "float16")


def attention(**changes):
    """A layer of one head."""
    return AttentionSpec(**({"num_kv_heads": 1, "head_dim": 4, "dtype": "int8"} | changes))


def groups(*layers, **settings):
    """What the groups of these layers are: (kind, layers)."""
    return [(group.kind, group.layers) for group in CacheConfig(layers, **settings).groups]


def problems(layers=(LAYER,), **settings):
    """What is wrong with these settings."""
    with pytest.raises(ConfigError) as caught:
        CacheConfig(layers, **({"num_blocks": 8} | settings)).validate()
    assert str(caught.value) == "; ".join(caught.value.problems)
    return caught.value.problems


# -- sizes ------------------------------------------------------------------------------------------------------------


def test_a_token_takes_its_k_and_v():
    assert LAYER.token_bytes == 2 * (4 + 4) * 2
    assert AttentionSpec(2, 4, "float16", value_head_dim=3).token_bytes == 2 * (4 + 3) * 2
    assert AttentionSpec(1, 1).token_bytes == 4


@pytest.mark.parametrize(("dtype", "size"), DTYPE_BYTES.items())
def test_every_dtype_has_its_size(dtype, size):
    assert AttentionSpec(1, 1, dtype).token_bytes == 2 * size
    CacheConfig([AttentionSpec(1, 1, dtype)], num_blocks=1).validate()


def test_a_block_takes_its_tokens_in_all_layers():
    config = CacheConfig([LAYER, AttentionSpec(1, 8, "float32")], block_size=4, num_blocks=8)
    assert config.block_bytes == 4 * (32 + 64)


@pytest.mark.parametrize(("memory", "num_blocks"), [(128, 1), (255, 1), (256, 2), ("1 KiB", 8), ("1 kB", 7)])
def test_memory_is_as_many_whole_blocks_as_fit(memory, num_blocks):
    config = CacheConfig([LAYER], block_size=4, memory=memory)
    config.validate()
    assert (config.block_bytes, config.group_num_blocks[0]) == (128, num_blocks)
    assert KVCacheManager(config).num_blocks == num_blocks


def test_the_table_has_columns_for_the_longest_sequence():
    assert CacheConfig([LAYER], block_size=4, num_blocks=1, max_sequence_length=8).max_blocks_per_sequence == 2
    assert CacheConfig([LAYER], block_size=4, num_blocks=1, max_sequence_length=9).max_blocks_per_sequence == 3


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1", 1),
        ("20 GiB", 20 * 2**30),
        ("1.5 KiB", 1536),
        ("0.5KiB", 512),
        ("  2 MB ", 2_000_000),
        ("3 kB", 3000),
        ("1 TiB", 2**40),
        ("1 TB", 10**12),
        ("7 B", 7),
        ("8 MiB", 2**23),
        ("1 GB", 10**9),
        (5, 5),
    ],
)
def test_sizes_are_read_with_their_units(text, size):
    assert parse_bytes(text) == size


@pytest.mark.parametrize(
    "text",
    [
        *("", "GiB", "1 XB", "1 gib", "-1 GiB", "1e9", "1,5 GiB", "1 GiB 2", "٣ GiB", "nan", "0", "0 GiB", "0.0001 B"),
        *(0, -1, True, 1.5, None, b"1 GiB", [1]),
    ],
    ids=label,
)
def test_what_is_no_size_is_refused(text):
    with pytest.raises(ConfigError):
        parse_bytes(text)
    if text is not None:
        (problem,) = problems(num_blocks=None, memory=text)
        assert problem.startswith("memory: ")
        assert str(text) in problem


# -- problems ---------------------------------------------------------------------------------------------------------


def test_the_least_settings_are_enough():
    config = CacheConfig([LAYER], num_blocks=1)
    config.validate()
    assert (config.block_size, config.max_sequences, config.max_sequence_length) == (16, 256, 32768)
    assert (config.reuse, config.partial_reuse, config.policy) == (True, True, "priority")


def test_every_problem_is_told_at_once():
    found = problems(
        [AttentionSpec(0, 4), LAYER, "layer", AttentionSpec(1, -1, "float99", value_head_dim=-1, sink_tokens=4)],
        block_size=0,
        num_blocks=-3,
        max_sequences=1.5,
        max_sequence_length=None,
        policy="mru",
        max_beams=0,
        max_chunk_tokens="all",
        ring=1,
        pin_budget=1.5,
    )
    assert found == [
        "layers[0]: num_kv_heads is 0, must be a positive int",
        "layers[2] is a str, must be an AttentionSpec or StateSpec",
        "layers[3]: head_dim is -1, must be a positive int",
        "layers[3]: value_head_dim is -1, must be an int of at least 0, or None",
        "layers[3]: sink_tokens is 4 without a sliding_window, which alone has sinks",
        f"layers[3]: dtype is 'float99', must be one of {', '.join(DTYPES)}",
        "block_size is 0, must be a positive int",
        "max_sequences is 1.5, must be a positive int",
        "max_sequence_length is None, must be a positive int",
        "max_beams is 0, must be a positive int",
        "max_chunk_tokens is 'all', must be a positive int or None",
        "policy is 'mru', must be one of cost, fifo, lfu, lru, priority, s3fifo, slru or a callable",
        "ring is 1, must be True or False",
        "pin_budget is 1.5, must be a number from 0 to 1",
        "num_blocks is -3, must be a positive int",
    ]


def test_a_manager_is_not_made_of_settings_that_are_wrong():
    with pytest.raises(ConfigError, match="block_size is 0"):
        KVCacheManager(CacheConfig([LAYER], block_size=0, num_blocks=1))
    with pytest.raises(ValueError, match="give either"):
        KVCacheManager(CacheConfig([LAYER]))


@pytest.mark.parametrize("size", [0, -1, 1.0, "4", None, True, [4]], ids=label)
@pytest.mark.parametrize("name", ["block_size", "max_sequences", "max_sequence_length", "max_beams"])
def test_sizes_are_positive_ints(name, size):
    assert f"{name} is {size!r}, must be a positive int" in problems(**{name: size})


@pytest.mark.parametrize("size", [0, -1, 1.0, "4", True, [], {1}], ids=label)
def test_a_number_of_blocks_is_a_positive_int(size):
    (problem,) = problems(num_blocks=size)
    assert problem.startswith(f"num_blocks is {size!r}, must be a positive int")


@pytest.mark.parametrize("size", [0, -1, 1.0, "4", True], ids=label)
@pytest.mark.parametrize("name", ["typical_length", "max_chunk_tokens"])
def test_lengths_are_positive_ints_or_none(name, size):
    assert problems(**{name: size}) == [f"{name} is {size!r}, must be a positive int or None"]


@pytest.mark.parametrize("value", [0, 1, None, "yes", np.bool_(True)], ids=label)
@pytest.mark.parametrize("name", ["reuse", "partial_reuse", "shared_pool", "ring"])
def test_switches_are_bools(name, value):
    assert problems(**{name: value}) == [f"{name} is {value!r}, must be True or False"]


@pytest.mark.parametrize("budget", [-0.1, 1.1, float("nan"), "1", None, True], ids=label)
def test_a_pin_budget_is_a_part_of_the_pool(budget):
    assert problems(pin_budget=budget) == [f"pin_budget is {budget!r}, must be a number from 0 to 1"]
    CacheConfig([LAYER], num_blocks=1, pin_budget=0).validate()


@pytest.mark.parametrize("size", [0, -1, 1.0, "4", None, True], ids=label)
@pytest.mark.parametrize("name", ["num_kv_heads", "head_dim"])
def test_heads_are_positive_ints(name, size):
    layer = AttentionSpec(**({"num_kv_heads": 1, "head_dim": 1} | {name: size}))
    assert f"layers[0]: {name} is {size!r}, must be a positive int" in problems([layer])


@pytest.mark.parametrize(
    "layers", [[], (), None, "layers", LAYER, 3, {LAYER}, iter([LAYER])], ids=lambda value: type(value).__name__
)
def test_layers_are_a_list_of_at_least_one(layers):
    (problem,) = problems(layers)
    assert problem.endswith("must be a list of at least one AttentionSpec or StateSpec")


@pytest.mark.parametrize(
    "dtype", ["float64", "", None, 4, ["float32"], float, np.float32, np.dtype("float32")], ids=label
)
def test_a_dtype_is_named_as_torch_names_it(dtype):
    (problem,) = problems([AttentionSpec(1, 1, dtype)])
    assert problem.startswith(f"layers[0]: dtype is {dtype!r}, must be one of float32, float16")


@pytest.mark.parametrize("size", [0, -1, 1.0, "4", True], ids=label)
@pytest.mark.parametrize("name", ["sliding_window", "chunk_tokens"])
def test_spans_are_positive_ints_or_none(name, size):
    assert f"layers[0]: {name} is {size!r}, must be a positive int or None" in problems([attention(**{name: size})])


@pytest.mark.parametrize("change", [{"sink_tokens": -1}, {"sink_tokens": True}, {"cross": 1}, {"shares_layer": -1}])
def test_what_else_a_layer_is_told_has_the_right_type(change):
    ((name, value),) = change.items()
    assert problems([attention(**change)])[0].startswith(f"layers[0]: {name} is {value!r}, must be ")


def test_a_layer_has_one_span():
    for spans in ({"sliding_window": 4, "chunk_tokens": 4}, {"sliding_window": 4, "cross": True}):
        assert problems([attention(**spans)]) == [
            "layers[0]: sliding_window, chunk_tokens and cross exclude each other"
        ]


def test_sinks_leave_room_in_a_ring():
    layers = [attention(sliding_window=4, sink_tokens=4)]
    CacheConfig(layers, num_blocks=1).validate()
    assert problems(layers, ring=True) == ["ring=True with 4 sink tokens in a window of 4 leaves nothing to write"]
    CacheConfig([attention(sliding_window=4, sink_tokens=3)], num_blocks=1, ring=True).validate()


@pytest.mark.parametrize("donor", [1, 2, 3, 9], ids=["itself", "a reader", "a state", "none"])
def test_a_layer_reads_the_cache_of_one_that_has_its_own(donor):
    layers = [LAYER, AttentionSpec(2, 4, "float16", shares_layer=donor), replace(LAYER, shares_layer=0), STATE]
    assert problems(layers) == [
        f"layers[1]: shares_layer is {donor}, must be an attention layer with a cache of its own"
    ]


def test_a_layer_reads_the_cache_of_one_like_it():
    assert problems([LAYER, AttentionSpec(2, 8, "float16", shares_layer=0)]) == [
        "layers[1]: differs from layers[0], whose cache it shares"
    ]
    CacheConfig([LAYER, replace(LAYER, shares_layer=0)], num_blocks=1).validate()


def test_a_decoder_keeps_something_of_its_own():
    assert problems([attention(cross=True)]) == [
        "layers has cross attention only: a decoder keeps something of its own tokens, too"
    ]
    CacheConfig([attention(cross=True), STATE], num_blocks=1).validate()


@pytest.mark.parametrize("shapes", [(), [], None, "44", [()], [4], [(4, 0)], [(4, -1)], [(4.0,)], [(True,)]], ids=label)
def test_a_state_has_shapes(shapes):
    assert problems([StateSpec(shapes)]) == [
        f"layers[0]: shapes is {shapes!r}, must be a list of tuples of positive ints"
    ]


@pytest.mark.parametrize("dtype", [None, 4, [], ["float32"], ["float32"] * 3], ids=label)
def test_a_state_has_a_dtype_for_each_shape_or_one_for_all(dtype):
    assert problems([StateSpec([(2,), (3,)], dtype)]) == [
        f"layers[0]: dtype is {dtype!r}, must be a dtype's name, or one for each of 2 shapes"
    ]


def test_the_dtypes_of_a_state_are_named_as_torch_names_them():
    (problem,) = problems([StateSpec([(2,), (3,)], ["float32", "complex64"])])
    assert problem.startswith("layers[0]: dtype is 'complex64', must be one of float32, float16")
    assert len(problems([StateSpec([(2,), (3,)], "complex64")])) == 1
    assert problems([StateSpec([(2,)], [[]])])[0].startswith("layers[0]: dtype is [], must be one of float32")


def test_checkpoints_are_whole_blocks_apart():
    for tokens in (0, -4, 4.0, "4", True):
        assert problems([StateSpec([(2,)], checkpoint_tokens=tokens)]) == [
            f"layers[0]: checkpoint_tokens is {tokens!r}, must be a positive int or None"
        ]
    states = [LAYER, StateSpec([(2,)], checkpoint_tokens=6)]
    assert problems(states, block_size=4) == ["layers[1]: checkpoint_tokens is 6, not a multiple of block_size=4"]
    CacheConfig(states, block_size=3, num_blocks=1).validate()


@pytest.mark.parametrize("policy", [None, 3, "", "LRU", ["lru"], b"lru"], ids=label)
def test_a_policy_is_a_name_or_a_callable(policy):
    assert problems(policy=policy) == [f"policy is {policy!r}, must be one of {', '.join(POLICY_NAMES)} or a callable"]


@pytest.mark.parametrize("policy", [*POLICY_NAMES, len, lambda extent: 0])
def test_every_policy_is_accepted(policy):
    CacheConfig([LAYER], num_blocks=1, policy=policy).validate()


def test_either_blocks_or_memory_are_given():
    assert problems(num_blocks=None) == ["give either num_blocks or memory, not neither"]
    assert problems(num_blocks=1, memory="1 GiB") == ["give either num_blocks or memory, not both"]


def test_memory_holds_at_least_one_block():
    assert problems(num_blocks=None, block_size=4, memory=127) == [
        "memory is 127 bytes, less than one block of 128 bytes"
    ]


def test_no_more_blocks_than_int32_can_name():
    assert problems(num_blocks=2**31) == [
        "num_blocks is 2147483648, more than the 2147483647 that int32 block ids can name"
    ]
    (problem,) = problems(num_blocks=None, block_size=1, memory="1000 TiB")
    assert problem.startswith("memory / block bytes is 34359738368000")
    CacheConfig([LAYER], num_blocks=2**31 - 1).validate()


def test_a_memory_without_end_is_refused():
    (problem,) = problems(num_blocks=None, memory="9" * 400 + " GiB")
    assert problem.startswith("memory")


def test_settings_cannot_be_changed():
    with pytest.raises(AttributeError):
        CacheConfig([LAYER], num_blocks=1).num_blocks = 2
    with pytest.raises(AttributeError):
        LAYER.head_dim = 2


# -- groups -----------------------------------------------------------------------------------------------------------


def test_layers_with_equal_spans_are_one_group():
    sliding, full = attention(sliding_window=8), attention()
    assert groups(sliding, full, sliding, attention(head_dim=64)) == [("full", (1, 3)), ("sliding", (0, 2))]
    assert groups(full, full) == [("full", (0, 1))]


def test_groups_come_in_one_order_and_the_widest_first():
    layers = [
        attention(cross=True), STATE, attention(chunk_tokens=4), attention(chunk_tokens=8), attention(sliding_window=4),
        attention(sliding_window=8, sink_tokens=2), attention(sliding_window=8), attention(),
    ]  # fmt: skip
    kinds = ["full", "sliding", "sliding", "sliding", "chunked", "chunked", "state", "cross"]
    members = [(7,), (6,), (5,), (4,), (3,), (2,), (1,), (0,)]
    assert groups(*layers) == list(zip(kinds, members, strict=True))
    assert [kind for kind, _ in groups(*layers, ring=True)] == [kind.replace("sliding", "ring") for kind in kinds]


def test_states_with_checkpoints_at_other_places_are_groups_of_their_own():
    every, eighth = StateSpec([(2,)]), StateSpec([(2,)], checkpoint_tokens=8)
    config = CacheConfig([eighth, every, eighth])
    assert [(group.layers, group.checkpoint_tokens) for group in config.groups] == [((1,), 0), ((0, 2), 8)]


def test_a_group_knows_its_span_and_the_bytes_of_its_blocks():
    layers = [attention(sliding_window=6, sink_tokens=1), attention(chunk_tokens=8), STATE, attention(value_head_dim=0)]
    full, sliding, chunked, state = CacheConfig(layers, block_size=4).groups
    assert (full.block_bytes, sliding.block_bytes, chunked.block_bytes, state.block_bytes) == (16, 32, 32, 16)
    assert (sliding.window, sliding.sink_tokens, chunked.chunk_tokens, full.window) == (6, 1, 8, 0)
    assert [group.num_span_tokens(100) for group in (full, sliding, chunked, state)] == [100, 7, 8, 1]
    assert [group.num_span_tokens(5) for group in (full, sliding, chunked, state)] == [5, 5, 5, 1]


def test_a_ring_keeps_its_sinks_within_the_window():
    (ring,) = CacheConfig([attention(sliding_window=6, sink_tokens=1)], ring=True).groups
    assert (ring.kind, ring.num_span_tokens(100)) == ("ring", 6)


def test_a_layer_that_reads_the_cache_of_another_takes_no_memory():
    config = CacheConfig([LAYER, replace(LAYER, shares_layer=0), LAYER], block_size=4)
    assert config.block_bytes == 2 * 4 * LAYER.token_bytes
    assert groups(*config.layers) == [("full", (0, 1, 2))]


def test_keys_alone_are_half_of_keys_and_values():
    assert attention(value_head_dim=0).token_bytes * 2 == attention().token_bytes == 8


def test_a_state_takes_its_tensors_in_their_dtypes():
    assert StateSpec([(2, 3), (5,)], ["float16", "float32"]).state_bytes == 2 * 6 + 4 * 5
    assert (STATE.state_bytes, STATE.token_bytes, LAYER.state_bytes) == (16, 0, 0)


def test_E15_states_and_blocks_take_these_bytes():
    """Two recurrent layers of 2 heads, 3x4 values and 5x6 inputs; K and V of 2x4 and 1x8 in blocks of 128 tokens."""
    states = CacheConfig([StateSpec([(2, 3, 4), (5, 6)], "float16")] * 2, block_size=128)
    assert states.block_bytes == 216
    layers = [AttentionSpec(2, 4, "float16"), AttentionSpec(1, 8, "float16")]
    assert CacheConfig(layers, block_size=128).block_bytes == 8192


# -- sizes of groups --------------------------------------------------------------------------------------------------

SLIDING = attention(sliding_window=8)


def test_blocks_are_given_for_every_group_or_for_each():
    assert CacheConfig([attention(), SLIDING], num_blocks=5).group_num_blocks == (5, 5)
    assert CacheConfig([attention(), SLIDING], num_blocks=[7, 3]).group_num_blocks == (7, 3)
    assert problems([attention(), SLIDING], num_blocks=[7]) == ["num_blocks has 1 entries, there are 2 groups"]
    assert problems([attention(), SLIDING], num_blocks=(7, 0)) == ["num_blocks[1] is 0, must be a positive int"]


def test_groups_have_pools_of_their_own_if_nothing_else_is_said():
    config = CacheConfig([attention(), SLIDING], num_blocks=5)
    assert (config.pool_of, config.pool_num_blocks) == ((0, 1), (5, 5))


def test_groups_of_equal_blocks_can_share_a_pool():
    layers = [attention(), SLIDING, attention(chunk_tokens=8, head_dim=8)]
    each = CacheConfig(layers, num_blocks=[7, 3, 2], shared_pool=True)
    assert (each.pool_of, each.pool_num_blocks, each.group_num_blocks) == ((0, 0, 1), (10, 2), (10, 10, 2))
    assert CacheConfig(layers, num_blocks=5, shared_pool=True).pool_num_blocks == (5, 5)
    most = 2**31 - 1
    assert problems(layers, num_blocks=[most, 1, 1], shared_pool=True) == [
        f"num_blocks of one pool is {most + 1}, more than the {most} that int32 block ids can name"
    ]


def test_memory_is_shared_out_by_what_a_typical_sequence_keeps():
    layers = [attention(), SLIDING]  # 8 bytes a token each
    settings = {"block_size": 4, "memory": 3200}
    typical = CacheConfig(layers, typical_length=24, **settings)
    assert (typical.memory_shares, typical.group_num_blocks) == ((0.75, 0.25), (75, 25))
    assert CacheConfig(layers, typical_length=8, **settings).memory_shares == (0.5, 0.5)
    assert CacheConfig(layers, max_sequence_length=24, **settings).memory_shares == (0.75, 0.25)


def test_a_state_counts_twice_in_what_a_sequence_keeps():
    config = CacheConfig([attention(), STATE], block_size=4, memory=3200, typical_length=12)
    assert config.memory_shares == (0.75, 0.25)  # 12 x 8 bytes, and two states of 16
    assert config.group_num_blocks == (75, 50)


def test_groups_that_share_a_pool_add_up_their_memory():
    config = CacheConfig([attention(), SLIDING], block_size=4, memory=3216, typical_length=24, shared_pool=True)
    assert config.group_num_blocks == (100, 100)


def test_B219_pools_take_no_more_than_the_memory_and_each_has_a_block():
    layers = [AttentionSpec(8, 128), StateSpec([(2**20,)])]  # 64 KiB a block, 4 MiB a state
    config = CacheConfig(layers, memory="1 GiB", typical_length=8192)
    config.validate()
    attending, states = config.group_num_blocks
    assert (attending, states) == (13107, 51)
    assert attending * 2**16 + states * 2**22 <= 2**30
    assert problems(layers, num_blocks=None, memory="16 MiB", typical_length=8192) == [
        "memory is 16777216 bytes, of which the state layers get 3355443, less than one block of 4194304 bytes"
    ]
