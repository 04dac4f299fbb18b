from dataclasses import replace
from itertools import product
from math import isclose

import pytest
from tests.core.small import label

from kvist import ArgumentError, AttentionSpec, CacheConfig, ConfigError, KVCacheManager, NeverFits
from kvist.config import StateSpec
from kvist.core.groups import RingGeometry, spans_of
from kvist.planning import (
    LayerBytes,
    Load,
    balanced_shares,
    blocks_held,
    blocks_needed,
    common_num_blocks,
    largest_window,
    layer_bytes,
    layers_of_model,
    longest_sequence,
    max_concurrency,
    memory_budget,
    plan,
    pool_bytes,
    sequence_bytes,
    sized_for,
    with_shares,
)


def attention(**changes):
    """A layer whose tokens take 8 bytes."""
    return AttentionSpec(**({"num_kv_heads": 1, "head_dim": 4, "dtype": "int8"} | changes))


def sliding(window, **changes):
    return attention(sliding_window=window, **changes)


def kinds_of(layers):
    return [group.kind for group in CacheConfig(layers).groups]


FULL = attention()
STATE = StateSpec([(4, 4)], "int8")


# -- bytes ------------------------------------------------------------------------------------------------------------


def test_every_layer_says_what_it_keeps():
    layers = [
        sliding(8),
        AttentionSpec(2, 64, "float16", value_head_dim=32),
        STATE,
        AttentionSpec(2, 64, "float16", value_head_dim=32, shares_layer=1),
        AttentionSpec(1, 576, value_head_dim=0),
    ]
    assert layer_bytes(CacheConfig(layers)) == (
        LayerBytes(0, 1, "sliding", 4, 4, 0),
        LayerBytes(1, 0, "full", 256, 128, 0),
        LayerBytes(2, 2, "state", 0, 0, 16),
        LayerBytes(3, 0, "full", 0, 0, 0),
        LayerBytes(4, 0, "full", 1152, 0, 0),
    )


def test_a_sequence_takes_the_bytes_of_its_blocks():
    config = CacheConfig([FULL, sliding(10), STATE, attention(cross=True)], block_size=4)
    assert blocks_held(config, 13, encoder_tokens=5) == (4, 3, 1, 2)
    assert sequence_bytes(config, 13, encoder_tokens=5) == (4 + 3 + 2) * 32 + 16


def test_SmolLM2_takes_45_KiB_a_token_in_float32():
    config = CacheConfig([AttentionSpec(3, 64, "float32")] * 30, block_size=16)
    assert sum(layer.key_bytes + layer.value_bytes for layer in layer_bytes(config)) == 46080
    assert sequence_bytes(config, 16) == 720 * 1024


# -- blocks of one sequence -------------------------------------------------------------------------------------------


def test_TRT124_a_window_with_sinks_lets_these_blocks_go():
    """Blocks of 32, a window of 128 with a sink token or none: the first block kept behind those of the sinks."""
    config = CacheConfig([FULL, sliding(128, sink_tokens=1), sliding(128)], block_size=32)
    full, without, with_sinks = spans_of(config)
    assert [span.num_sink_blocks for span in (full, with_sinks, without)] == [0, 1, 0]
    for history, first in {127: 0, 159: 1, 320: 6, 704: 18}.items():
        assert (full.first_block(history), without.first_block(history)) == (0, first)
        whole = -(-history // 32)
        assert blocks_held(config, history) == (whole, whole - first, whole - max(first - 1, 0))


def test_V37_blocks_leave_a_window_as_it_moves_on():
    config = CacheConfig([sliding(4)], block_size=2)
    lost = {n: -(-n // 2) - blocks_held(config, n)[0] for n in (0, 4, 5, 6, 7, 11)}
    assert lost == {0: 0, 4: 0, 5: 1, 6: 1, 7: 2, 11: 4}


def test_V59_a_window_holds_what_is_seen_and_what_is_computed():
    config = CacheConfig([FULL, sliding(64)], block_size=16, max_chunk_tokens=128, num_blocks=77, shared_pool=True)
    assert blocks_needed(config, 512) == (32, 13)
    assert max_concurrency(config, 512) >= 1
    assert blocks_needed(config, 256) == (16, 13)
    assert max_concurrency(replace(config, num_blocks=4), 256) < 1


def test_V74_an_encoder_takes_the_blocks_of_its_tokens():
    config = CacheConfig([FULL, attention(cross=True)], block_size=16)
    tokens = (500, 1000, 200, 1, 15, 16, 17, 160, 161, 1500, 0)
    blocks = [blocks_needed(config, Load(1, encoder_tokens=n))[1] for n in tokens]
    assert blocks == [32, 63, 13, 1, 1, 1, 2, 10, 11, 94, 0]


def test_E12_the_longest_prompt_that_int32_can_count_takes_16777216_pages():
    assert blocks_needed(CacheConfig([FULL], block_size=128), 2**31 - 1) == (16777216,)


def test_E16_a_window_of_129_tokens_lies_in_two_pages_of_128_and_needs_no_second_set():
    """Edge-LLM reserves 7 pages for each sequence; here out-of-span pages go back before new ones are taken."""
    config = CacheConfig([sliding(129)], block_size=128, max_chunk_tokens=1)
    assert blocks_needed(config, 5000) == (2,)
    assert blocks_held(config, 385) == (2,)
    assert blocks_needed(replace(config, max_chunk_tokens=128), 5000) == (3,)


def test_a_window_without_chunks_holds_the_whole_prompt():
    config = CacheConfig([FULL, sliding(64)], block_size=16)
    assert blocks_needed(config, 512) == (32, 32)
    assert blocks_needed(config, Load(512, num_prompt_tokens=160)) == (32, 10)
    assert blocks_needed(config, Load(512, num_prompt_tokens=16)) == (32, 5)
    assert blocks_needed(config, Load(512, num_prompt_tokens=16, step_tokens=9)) == (32, 6)


def test_chunks_of_local_attention_are_held_from_their_first_block_on():
    config = CacheConfig([attention(chunk_tokens=64)], block_size=16, max_chunk_tokens=1)
    assert blocks_needed(config, 1000) == (4,)
    assert blocks_needed(replace(config, max_chunk_tokens=100), 1000) == (11,)
    assert (blocks_held(config, 63), blocks_held(config, 64), blocks_held(config, 65)) == ((4,), (0,), (1,))
    uneven = CacheConfig([attention(chunk_tokens=10)], block_size=4, max_chunk_tokens=1)
    assert blocks_needed(uneven, 1000) == (3,)  # tokens 10 to 19 lie in blocks 2 to 4, and no ten begin later in one


def held_in_a_pass(span, num_computed, num_new):
    """The columns that a pass over `num_new` tokens after `num_computed` others needs."""
    stop = -(-(num_computed + num_new) // span.block_size)
    return len({*range(min(span.num_sink_blocks, stop)), *range(span.first_block(num_computed), stop)})


def most_held(span, load, chunk):
    """The most columns that any pass can need, over all ways to cut a prompt into chunks."""
    prompt, total = load.prompt_tokens, load.num_tokens
    passes = [(n, min(c, prompt - n)) for n in range(prompt) for c in range(1, chunk + 1)]
    passes += [(n, min(c, total - n)) for n in range(prompt, total) for c in range(1, load.step_tokens + 1)]
    return max(held_in_a_pass(span, *one) for one in passes)


LOADS = [Load(40), Load(11), Load(40, num_prompt_tokens=9), Load(23, num_prompt_tokens=22), Load(40, 5, step_tokens=4)]


@pytest.mark.parametrize("load", LOADS, ids=str)
@pytest.mark.parametrize("chunk", [1, 3, 4, 9])
@pytest.mark.parametrize(
    "layer",
    [
        *(sliding(window, sink_tokens=sinks) for window, sinks in product((1, 2, 4, 5, 8, 11), (0, 1, 6))),
        *(attention(chunk_tokens=tokens) for tokens in (1, 2, 4, 6, 7, 8, 12)),
        FULL,
    ],
    ids=lambda layer: f"{layer.sliding_window}+{layer.sink_tokens}, {layer.chunk_tokens}",
)
def test_the_blocks_needed_are_the_most_that_any_pass_needs(layer, chunk, load):
    config = CacheConfig([layer], block_size=4, max_chunk_tokens=chunk)
    (span,) = spans_of(config)
    (num_blocks,) = blocks_needed(config, load)
    # Chunks that begin inside blocks may need one less where few of them fit in the sequence.
    assert 0 <= num_blocks - most_held(span, load, chunk) <= bool((layer.chunk_tokens or 0) % 4)


def test_a_sequence_keeps_the_blocks_that_its_next_token_needs():
    layers = [FULL, sliding(10), sliding(7, sink_tokens=6), attention(chunk_tokens=6), attention(chunk_tokens=8)]
    config = CacheConfig(layers, block_size=4)
    for num_tokens in range(60):
        stop = -(-num_tokens // 4)
        expected = [
            len({*range(min(span.num_sink_blocks, stop)), *range(span.first_block(num_tokens), stop)})
            for span in spans_of(config)
        ]
        assert list(blocks_held(config, num_tokens)) == expected


def test_a_state_is_one_block_of_each_beam():
    config = CacheConfig([STATE], max_beams=4)
    assert (blocks_needed(config, 5000), blocks_held(config, 5000)) == ((1,), (1,))
    assert blocks_needed(config, Load(5000, num_beams=4)) == (4,)


# -- beams ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("load", "blocks"),
    [
        (Load(16, num_beams=4), 2),
        (Load(17, num_beams=4), 2 + 4),
        (Load(33, num_prompt_tokens=13, num_beams=4), 1 + 4 * 4),
        (Load(24, num_prompt_tokens=16, num_beams=4), 2 + 4),
        (Load(33, num_prompt_tokens=13), 5),
    ],
    ids=str,
)
def test_beams_share_the_whole_blocks_of_the_prompt(load, blocks):
    assert blocks_needed(CacheConfig([FULL], block_size=8, max_beams=4), load) == (blocks,)


def test_beams_over_a_window_share_what_it_still_sees_of_the_prompt():
    config = CacheConfig([sliding(8)], block_size=4, max_beams=3, max_chunk_tokens=4)
    assert blocks_needed(config, Load(20, 16, num_beams=3)) == (3 + 2,)  # the third block is written by each beam
    assert blocks_needed(config, Load(40, 16, num_beams=3)) == (3 * 3,)
    kept = CacheConfig([sliding(8, sink_tokens=2)], block_size=4, max_beams=3, max_chunk_tokens=4)
    assert blocks_needed(kept, Load(40, 16, num_beams=3)) == (1 + 3 * 3,)


def test_more_beams_than_the_configuration_has_are_refused():
    with pytest.raises(ArgumentError, match="num_beams is 2, more than max_beams=1"):
        blocks_needed(CacheConfig([FULL]), Load(5, num_beams=2))


# -- rings ------------------------------------------------------------------------------------------------------------


def ring(window, sink_tokens=0, block_size=64, **settings):
    return CacheConfig([sliding(window, sink_tokens=sink_tokens)], block_size=block_size, ring=True, **settings)


@pytest.mark.parametrize(
    ("num_tokens", "sink_tokens", "window", "blocks"),
    [
        *[(512, 0, 1024, 8), (513, 0, 1024, 9), (512, 0, 256, 4), (512, 0, 257, 5)],
        *[(512, 64, 1024, 8), (513, 64, 1024, 9), (512, 64, 256, 4), (512, 64, 257, 5)],
        *[(512, 65, 1024, 9), (513, 65, 1024, 9), (512, 65, 256, 5), (512, 65, 257, 5)],
    ],
)
def test_TRT101_a_ring_takes_these_blocks(num_tokens, sink_tokens, window, blocks):
    assert blocks_needed(ring(window, sink_tokens), num_tokens) == (blocks,)
    assert blocks_held(ring(window, sink_tokens), num_tokens) == (blocks,)


@pytest.mark.parametrize(
    ("load", "window", "blocks"),
    [
        (Load(60, 40), 60, 15),  # one beam: every block once
        (Load(60, 40, num_beams=2), 60, 10 + 5 * 2),
        (Load(60, 38, num_beams=2), 60, 9 + 6 * 2),
        (Load(60, 40, num_beams=3), 16, 5 * 3),  # what is generated fills the window: nothing is shared
    ],
    ids=str,
)
def test_a_request_over_a_ring_takes_its_own_blocks_for_what_its_beams_write(load, window, blocks):
    settings = {"max_beams": load.num_beams, "max_sequence_length": 60}
    assert blocks_needed(ring(window, block_size=4, **settings), load) == (blocks,)


def test_TRT5_TRT24_TRT25_beams_over_rings_take_these_blocks():
    """Those of the core's tests, counted beforehand."""
    assert blocks_needed(ring(640, max_beams=4, max_sequence_length=640), Load(575, num_beams=4)) == (8 + 4,)
    sinks = ring(515, 4, max_beams=4, max_sequence_length=640)
    assert blocks_needed(sinks, Load(579, num_beams=4)) == (9 + 4,)
    assert blocks_needed(sinks, Load(580, 579, num_beams=4)) == (13 + 4 - 1,)


@pytest.mark.parametrize("num_beams", [1, 3])
@pytest.mark.parametrize("sink_tokens", [0, 3, 4])
def test_the_blocks_of_a_ring_are_those_in_which_its_tokens_lie(sink_tokens, num_beams):
    for window, prompt, num_new in product((5, 8, 11), (1, 3, 4, 7, 8, 17, 30), (0, 1, 2, 3, 6, 9, 20)):
        config = ring(window, sink_tokens, 4, max_beams=num_beams, max_sequence_length=100)
        geometry = RingGeometry(4, window, sink_tokens, has_extra_block=num_beams > 1)
        columns = [geometry.position(token) // 4 for token in range(prompt + num_new)]
        starts_block = (geometry.position(prompt - 1) + 1) % 4 == 0
        written = {*columns[prompt if starts_block else prompt - 1 :]}
        load = Load(prompt + num_new, prompt, num_beams=num_beams)
        assert blocks_needed(config, load) == (len({*columns}) + len(written) * (num_beams - 1),)
        assert blocks_held(config, load.num_tokens) == (geometry.num_blocks_for(load.num_tokens),)


def test_the_largest_window_is_the_last_that_fits():
    for num_blocks, block_size, sink_tokens, num_beams in product((3, 7, 12), (1, 4), (0, 2), (1, 2, 3)):
        load = Load(40, 29, num_beams=num_beams)
        settings = {"max_beams": num_beams, "max_sequence_length": 40, "block_size": block_size}
        fitting = [
            window
            for window in range(sink_tokens + 1, 41)
            if blocks_needed(ring(window, sink_tokens, **settings), load)[0] <= num_blocks
        ]
        if fitting:
            assert largest_window(num_blocks, load, block_size=block_size, sink_tokens=sink_tokens) == max(fitting)
        else:
            with pytest.raises(NeverFits, match=f"{num_blocks} blocks of {block_size} tokens hold no window"):
                largest_window(num_blocks, load, block_size=block_size, sink_tokens=sink_tokens)


def test_the_largest_window_for_a_budget_of_blocks():
    """As TensorRT-LLM plans: 3 blocks for what is generated, the others for the prompt, and no more than there is."""
    assert largest_window(5, Load(110, 100), block_size=4) == 20
    assert largest_window(100, Load(110, 100), block_size=4) == 110
    assert largest_window(2, Load(110, 100), block_size=4) == 8
    with pytest.raises(NeverFits):
        largest_window(1, Load(110, 100, num_beams=2), block_size=4)


# -- against a manager ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "load",
    [Load(29), Load(28, num_prompt_tokens=9), Load(33, 13, num_beams=3), Load(16, 8, num_beams=3)],
    ids=str,
)
@pytest.mark.parametrize(
    "layers",
    [
        [FULL],
        [sliding(5)],
        [FULL, sliding(6), sliding(9, sink_tokens=3)],
        [attention(chunk_tokens=8), FULL],
        [attention(chunk_tokens=6)],
        [FULL, attention(cross=True)],
        [FULL, STATE],
    ],
    ids=lambda layers: " ".join(kinds_of(layers)),
)
def test_a_sequence_runs_in_a_cache_that_is_sized_for_it(layers, load):
    config = CacheConfig(layers, block_size=4, max_sequences=3, max_sequence_length=64, max_beams=3)
    load = replace(load, encoder_tokens=9 if "cross" in kinds_of(layers) else 0)
    manager = KVCacheManager(sized_for(config, load, num_sequences=1))
    sequence = manager.add_sequence(
        list(range(load.prompt_tokens)), num_beams=load.num_beams, encoder_tokens=load.encoder_tokens
    )
    beams = sequence.beams if load.num_beams > 1 else [sequence]
    manager.commit([sequence])
    for step in range(load.num_tokens - load.prompt_tokens):
        manager.commit(beams)
        manager.append(beams, [1000 * step + beam for beam in range(load.num_beams)])
    manager.commit(beams)
    manager.check()


# -- what fits --------------------------------------------------------------------------------------------------------


def test_V61_so_many_sequences_of_16384_tokens_fit_at_the_same_time():
    full, window = attention(), sliding(1024)
    settings = {"block_size": 16, "max_chunk_tokens": 1024, "max_sequence_length": 16384}
    assert max_concurrency(CacheConfig([full], num_blocks=1536, **settings)) == 1.5
    assert max_concurrency(CacheConfig([window], num_blocks=387, **settings)) == 3
    hybrid = CacheConfig([full, window], num_blocks=3459, shared_pool=True, **settings)
    assert max_concurrency(hybrid) == 3
    assert max_concurrency(replace(hybrid, num_blocks=(3072, 387), shared_pool=False)) == 3


def test_V61_the_longest_sequence_in_8_GiB_has_16384_tokens():
    layers = [AttentionSpec(32, 128, "float16")] * 32
    config = CacheConfig(layers, memory="8 GiB", max_sequence_length=16385)
    assert longest_sequence(config) == 16384
    assert longest_sequence(replace(config, max_sequence_length=9000)) == 9000


def test_V62_groups_of_one_layer_share_a_buffer_of_twice_the_blocks():
    layers, memory = [FULL, sliding(64)], 2 * 32 * 16 * 8
    assert CacheConfig(layers, memory=memory, shared_pool=True).pool_num_blocks == (64,)
    assert CacheConfig([FULL, FULL], memory=memory).pool_num_blocks == (32,)


def test_V62_groups_of_two_and_four_layers_stay_whole_and_have_a_pool_each():
    """Splitting the four in two, as vLLM does to share a buffer, needs a block table more."""
    layers = [sliding(64), FULL, sliding(64), sliding(64), FULL, sliding(64)]
    config = CacheConfig(layers, memory=2**20, shared_pool=True, typical_length=128)
    assert [group.layers for group in config.groups] == [(1, 4), (0, 2, 3, 5)]
    assert config.pool_num_blocks == (2048, 1024)


def test_V64_blocks_that_are_given_are_the_blocks():
    assert CacheConfig([FULL], num_blocks=16).group_num_blocks == (16,)


def test_V64_a_model_that_keeps_nothing_needs_no_manager():
    with pytest.raises(ConfigError, match="layers is \\[\\], must be a list of at least one"):
        plan(CacheConfig([], num_blocks=1))


def test_V64_B206_B207_workers_agree_on_the_least():
    assert common_num_blocks([(10,), (20,)]) == (10,)
    assert common_num_blocks([(2111,), (2055,)]) == (2055,)
    assert common_num_blocks([(8, 4), (7, 9), (9, 5)]) == (7, 4)
    host = CacheConfig([FULL], num_blocks=8)
    sizes = [replace(host, num_blocks=None, memory=n * host.block_bytes).group_num_blocks for n in (4, 2)]
    assert common_num_blocks(sizes) == (2,)


def test_B209_workers_that_cannot_agree_are_told_what_each_has():
    with pytest.raises(ArgumentError, match=r"rank 0: \[8\]; rank 1: \[8, 4\]"):
        common_num_blocks([(8,), (8, 4)])
    with pytest.raises(ArgumentError, match=r"rank 0: \[8\]; rank 1: \[0\]"):
        common_num_blocks([(8,), (0,)])
    with pytest.raises(ArgumentError, match="got no ranks"):
        common_num_blocks([])


def test_TRT107_a_prompt_of_1024_and_128_more_take_these_blocks():
    """TensorRT-LLM counts 18 for a window of 128, too: as if all that is generated were held beside the prompt."""
    load = Load(1152, num_prompt_tokens=1024)
    assert blocks_needed(CacheConfig([FULL], block_size=1), load) == (1152,)
    assert blocks_needed(CacheConfig([FULL], block_size=64), load) == (18,)
    assert blocks_needed(CacheConfig([sliding(128)], block_size=64), load) == (16,)
    assert blocks_needed(CacheConfig([sliding(128)], block_size=64, max_chunk_tokens=128), load) == (5,)


def test_TRT120_32_MiB_hold_one_sequence_of_22_blocks():
    """18 layers with a window of 128 and a sink token, 18 full ones; 32 tokens of one layer's keys are 32768 bytes."""
    layers = [AttentionSpec(8, 64), AttentionSpec(8, 64, sliding_window=128, sink_tokens=1)] * 18
    config = CacheConfig(layers, block_size=32, memory="32 MiB", shared_pool=True)
    assert (config.groups[0].block_bytes, config.pool_num_blocks) == (1179648, (28,))
    one_by_one = Load(22 * 32, num_prompt_tokens=1)
    assert blocks_needed(config, one_by_one) == (22, 1 + 5)
    assert sum(blocks_needed(config, one_by_one)) * 1179648 == 33030144
    assert longest_sequence(config, one_by_one) == 22 * 32


def test_the_longest_sequence_is_none_where_not_even_the_prompt_fits():
    config = CacheConfig([FULL], block_size=4, num_blocks=4)
    assert longest_sequence(config) == 16
    assert longest_sequence(config, Load(20, num_prompt_tokens=16)) == 16
    assert longest_sequence(config, Load(20, num_prompt_tokens=17)) == 0
    assert longest_sequence(replace(config, max_sequence_length=10), Load(20, num_prompt_tokens=12)) == 0
    assert longest_sequence(CacheConfig([STATE], num_blocks=1, max_beams=2), Load(1, num_beams=2)) == 0


def test_the_longest_sequence_of_a_window_is_as_long_as_sequences_may_be():
    config = CacheConfig([sliding(8)], block_size=4, num_blocks=4, max_sequence_length=1000)
    assert longest_sequence(config) == 16
    assert longest_sequence(replace(config, max_chunk_tokens=5)) == 1000


def test_B106_a_cache_is_sized_for_so_many_sequences_in_every_pool():
    """A window shorter than a block still lies in two, so 4 sequences need 8 of them and the tightest pool decides."""
    config = CacheConfig([FULL, sliding(12)], block_size=16, max_chunk_tokens=1, max_sequence_length=400)
    sized = sized_for(config, 400, num_sequences=4)
    assert sized.num_blocks == (100, 8)
    assert max_concurrency(sized, 400) == 4
    assert max_concurrency(replace(sized, num_blocks=(100, 1)), 400) == 0.5


def test_a_cache_that_is_sized_for_sequences_holds_no_more():
    config = CacheConfig([FULL, sliding(12), STATE, attention(cross=True)], block_size=4, shared_pool=True)
    sized = sized_for(config, Load(100, encoder_tokens=9), num_sequences=3)
    sized.validate()
    assert (sized.pool_of, sized.pool_num_blocks) == ((0, 0, 1, 0), (25 * 3 * 2 + 3 * 3, 3))
    assert max_concurrency(sized, Load(100, encoder_tokens=9)) == 3
    assert sized_for(config, 100, num_sequences=3).num_blocks == (75, 75, 3, 3)


# -- memory -----------------------------------------------------------------------------------------------------------


def test_TRT30_memory_goes_to_windows_by_their_tokens_and_layers():
    layers = [sliding(1024), *[sliding(4096)] * 3, *[sliding(8192)] * 2]
    config = CacheConfig(layers, memory="1 GiB", typical_length=8192)
    widest_first = config.memory_shares
    assert [round(share, 4) for share in widest_first] == [0.5517, 0.4138, 0.0345]
    assert [round(16384 * share) for share in widest_first] == [9039, 6780, 565]


def test_TRT32_windows_that_keep_as_many_bytes_have_equal_parts():
    layers = [sliding(1024, head_dim=32), sliding(4096, head_dim=8), sliding(8192)]
    config = CacheConfig(layers, memory="1 GiB")
    assert all(isclose(share, 1 / 3) for share in config.memory_shares)
    assert CacheConfig(layers[:1], memory="1 GiB").memory_shares == (1.0,)


def test_B210_B211_a_fraction_of_free_memory_is_rounded_down_to_whole_blocks_and_multiplies_back():
    layers, block = [AttentionSpec(32, 128)] * 32, 8 * 2**20
    config = CacheConfig(layers, block_size=16, memory=memory_budget("10 GiB"))
    assert (config.block_bytes, config.group_num_blocks) == (block, (1152,))
    config = CacheConfig(layers, block_size=64, memory=memory_budget("21.89 GiB", fraction=0.9))
    made = plan(config)
    assert made.pools[0].num_blocks == 630
    assert 630 * 4 * block + made.unused_bytes == config.memory


def test_B213_a_plan_depends_on_the_bytes_it_is_given_and_nothing_else():
    assert [memory_budget(free, fraction=0.5) for free in ("188.29 GiB", "188.75 GiB")] == [101087424020, 101334384640]


def test_what_others_need_is_taken_off_before_the_fraction():
    assert memory_budget("10 GiB", fraction=0.5, reserved="2 GiB") == 4 * 2**30
    with pytest.raises(ArgumentError, match="reserved is '10 GiB', which leaves nothing of free='10 GiB'"):
        memory_budget("10 GiB", reserved="10 GiB")


@pytest.mark.parametrize("fraction", [0, 1, 1.5, -0.5, float("nan"), True, "0.9", None], ids=label)
def test_a_fraction_is_between_nothing_and_all(fraction):
    with pytest.raises(ArgumentError, match=r"fraction is .*, must be more than 0 and less than 1"):
        memory_budget("10 GiB", fraction=fraction)


def test_balanced_shares_let_every_pool_run_out_at_the_same_number():
    config = CacheConfig([FULL, sliding(12)], block_size=16, memory=2**20, max_chunk_tokens=32, typical_length=400)
    by_tokens = [config.pool_num_blocks[pool] / blocks_needed(config, 400)[pool] for pool in (0, 1)]
    balanced = with_shares(config, balanced_shares(config, 400))
    by_blocks = [balanced.pool_num_blocks[pool] / blocks_needed(config, 400)[pool] for pool in (0, 1)]
    assert by_tokens[1] < by_tokens[0] / 2
    assert abs(by_blocks[0] - by_blocks[1]) < 1
    assert max_concurrency(balanced, 400) > 2 * max_concurrency(config, 400)


def test_shares_can_be_fixed():
    config = CacheConfig([FULL, sliding(8)], block_size=4, memory=3200)
    fixed = with_shares(config, (0.9, 0.1))
    assert (fixed.group_num_blocks, fixed.memory, pool_bytes(fixed)) == ((90, 10), None, (2880, 320))
    pooled = with_shares(replace(config, shared_pool=True), (0.9, 0.1))
    assert pooled.group_num_blocks == (100, 100)


@pytest.mark.parametrize("shares", [(0.5, 0.4), (0.5, 0.6), (1.5, -0.5), (1, 0), (float("nan"), 0.5)], ids=label)
def test_shares_are_parts_of_the_whole(shares):
    with pytest.raises(ArgumentError, match="must be positive numbers that add up to 1"):
        with_shares(CacheConfig([FULL, sliding(8)], memory=3200), shares)


def test_shares_that_give_a_group_nothing_are_refused():
    config = CacheConfig([FULL, sliding(8)], block_size=4, memory=3200)
    with pytest.raises(ConfigError, match=r"num_blocks\[1\] is 0"):
        with_shares(config, (0.999, 0.001))
    with pytest.raises(ArgumentError, match="shares has 1 entries, there are 2 groups"):
        with_shares(config, [1.0])
    with pytest.raises(ArgumentError, match="config has no memory to share out"):
        with_shares(replace(config, memory=None, num_blocks=4), (0.5, 0.5))


# -- plans ------------------------------------------------------------------------------------------------------------


def test_a_plan_says_what_its_numbers_are_made_of():
    config = CacheConfig([FULL, sliding(8), FULL], block_size=4, memory=4000, typical_length=40, max_chunk_tokens=4)
    made = plan(config, tiers={"host": 40000})
    full, window = made.groups
    assert (full.kind, full.layers, full.span_tokens, full.token_bytes, full.block_bytes) == ("full", (0, 2), 0, 16, 64)
    assert (window.span_tokens, window.token_bytes, window.blocks_per_sequence) == (8, 8, 4)
    assert (made.load, made.block_size, made.token_bytes) == (Load(40), 4, 24)
    assert [pool.num_blocks * pool.block_bytes for pool in made.pools] == [pool.memory_bytes for pool in made.pools]
    assert made.memory_bytes + made.unused_bytes == 4000
    assert made.sequence_bytes == 10 * 64 + 4 * 32
    assert (made.pools[0].concurrency, made.pools[1].concurrency) == (5.6, 2.75)
    assert (made.concurrency, made.num_sequences, made.tightest_pool) == (2.75, 2, 1)
    assert made.longest_sequence == 56 * 4
    assert made.balanced_shares == (640 / 768, 128 / 768)
    assert made.balanced_concurrency == 5  # 52 and 20 blocks
    (host,) = made.tiers
    assert (host.num_blocks, host.num_sequences) == ((568, 113), 113 / 2)


def test_a_plan_counts_rows_too():
    config = CacheConfig([FULL], block_size=4, num_blocks=100, max_sequences=3, max_sequence_length=40)
    made = plan(config)
    assert (made.num_sequences, made.concurrency, made.unused_bytes) == (3, 10, 0)
    assert (made.balanced_shares, made.balanced_concurrency) == (None, None)


def test_a_plan_is_written_for_people():
    config = CacheConfig(
        [FULL, sliding(8), STATE], block_size=4, num_blocks=[5000, 20, 9], max_chunk_tokens=4, typical_length=40
    )
    assert str(plan(config, 40, tiers={"host": 80000})).splitlines() == [
        "group    layers  span  bytes/token  bytes/block  blocks/sequence  pool",
        "full          1     -            8           32               10     0",
        "sliding       1     8            8           32                4     1",
        "state         1     -            0           16                1     2",
        "",
        "pool  blocks    bytes  blocks/sequence  sequences",
        "0      5,000  160,000               10     500.00",
        "1         20      640                4       5.00",
        "2          9      144                1       9.00",
        "",
        "160,784 bytes in blocks of 4 tokens, 0 left over",
        "5 sequences of 40 tokens at the same time, each up to 464 bytes; pool 1 is the first to run out",
        "20,000 tokens in the longest sequence",
        "host: 192.00 cached sequences of that length in 80,000 bytes",
    ]


def test_a_plan_tells_how_memory_could_be_shared_out_better():
    config = CacheConfig([FULL, sliding(8)], block_size=4, memory=32000, typical_length=40, max_chunk_tokens=4)
    assert "71.25 sequences with the memory shared out as 0.7143, 0.2857" in str(plan(config))
    assert "shared out" not in str(plan(replace(config, shared_pool=True)))
    assert "shared out" not in str(plan(replace(config, memory=200), 2000))  # too little for a block of the window


def test_a_plan_for_longer_sequences_than_there_may_be_is_refused():
    with pytest.raises(ArgumentError, match="num_tokens is 41, more than max_sequence_length=40"):
        plan(CacheConfig([FULL], num_blocks=4, max_sequence_length=40), 41)


# -- loads ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [0, -1, 1.0, "4", None, True], ids=label)
@pytest.mark.parametrize("name", ["num_tokens", "num_beams", "step_tokens"])
def test_counts_of_a_load_are_positive_ints(name, value):
    with pytest.raises(ArgumentError, match=f"{name} is .*, must be an int of at least 1"):
        Load(**({"num_tokens": 4} | {name: value}))


def test_a_prompt_is_part_of_its_sequence():
    assert (Load(9).prompt_tokens, Load(9, 4).prompt_tokens) == (9, 4)
    with pytest.raises(ArgumentError, match="num_prompt_tokens is 10, more than num_tokens=9"):
        Load(9, 10)
    with pytest.raises(ArgumentError, match="num_prompt_tokens is 0"):
        Load(9, 0)
    with pytest.raises(ArgumentError, match="encoder_tokens is -1"):
        Load(9, encoder_tokens=-1)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda config: blocks_needed(config, 0), "num_tokens is 0"),
        (lambda config: blocks_held(config, -1), "num_tokens is -1"),
        (lambda config: blocks_held(config, 1, encoder_tokens=-1), "encoder_tokens is -1"),
        (lambda config: sized_for(config, 8, num_sequences=0), "num_sequences is 0"),
        (lambda config: largest_window(0, 8, block_size=4), "num_blocks is 0"),
        (lambda config: largest_window(4, 8, block_size=0), "block_size is 0"),
        (lambda config: largest_window(4, 8, block_size=4, sink_tokens=-1), "sink_tokens is -1"),
    ],
)
def test_numbers_that_make_no_sense_are_refused(wrong, message):
    with pytest.raises(ArgumentError, match=message):
        wrong(CacheConfig([FULL], num_blocks=4))


# -- models -----------------------------------------------------------------------------------------------------------

SHAPE = {"num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2, "hidden_size": 64}


def windows(settings):
    return [layer.sliding_window for layer in layers_of_model(SHAPE | settings)]


def test_the_layers_of_a_model_are_those_of_its_config():
    assert layers_of_model(SHAPE) == [AttentionSpec(2, 8, "bfloat16")] * 4
    assert (
        layers_of_model(SHAPE | {"head_dim": 16, "torch_dtype": "torch.float16"})
        == [AttentionSpec(2, 16, "float16")] * 4
    )
    assert (
        layers_of_model({"n_layer": 2, "n_head": 4, "n_embd": 64}, dtype="int8") == [AttentionSpec(4, 16, "int8")] * 2
    )
    assert layers_of_model(SHAPE | {"multi_query": True})[0].num_kv_heads == 1


def test_the_layers_of_a_model_of_several_parts_are_those_of_its_decoder():
    whole = {"dtype": "float16", "text_config": SHAPE, "vision_config": {"num_hidden_layers": 9}}
    assert layers_of_model(whole) == [AttentionSpec(2, 8, "float16")] * 4


def test_windows_are_where_the_config_says_or_its_model_has_them():
    kinds = ["sliding_attention", "full_attention"] * 2
    assert windows({"sliding_window": 8, "layer_types": kinds}) == [8, None, 8, None]
    assert windows({"sliding_window": 8}) == [8] * 4
    assert windows({"sliding_window": 8, "use_sliding_window": False}) == [None] * 4
    assert windows({"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 3}) == [None, None, None, 8]
    assert windows({"sliding_window": 8, "sliding_window_pattern": 3}) == [8, 8, None, 8]
    assert windows({"sliding_window": 8, "model_type": "gemma2"}) == [8, None, 8, None]


def test_chunks_are_where_the_config_says_or_positions_are_rotated():
    chunks = [layer.chunk_tokens for layer in layers_of_model(SHAPE | {"attention_chunk_size": 8})]
    assert chunks == [8] * 4
    some = SHAPE | {"attention_chunk_size": 8, "no_rope_layers": [1, 1, 1, 0]}
    assert [layer.chunk_tokens for layer in layers_of_model(some)] == [8, 8, 8, None]


def test_latent_attention_keeps_one_latent_for_all_heads():
    (layer, *_) = layers_of_model(SHAPE | {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "head_dim": 64})
    assert layer.token_bytes == (512 + 64) * 2


def test_layers_that_read_the_cache_of_others_say_so():
    settings = {
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2,
    }
    layers = layers_of_model(SHAPE | settings)
    assert [layer.shares_layer for layer in layers] == [None, None, 0, 1]
    CacheConfig(layers, num_blocks=4).validate()


def test_recurrent_layers_keep_a_state():
    settings = {
        "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 6,
        "linear_conv_kernel_dim": 4, "full_attention_interval": 2,
    }  # fmt: skip
    state = StateSpec(((56, 4), (4, 8, 6)), ("bfloat16", "float32"))
    assert layers_of_model(SHAPE | settings) == [state, AttentionSpec(2, 8)] * 2


def test_a_layer_with_attention_and_a_state_is_two():
    settings = {
        "model_type": "falcon_h1", "mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8,
        "mamba_n_groups": 1, "mamba_d_conv": 4,
    }  # fmt: skip
    state = StateSpec(((80, 4), (4, 16, 8)), ("bfloat16", "float32"))
    assert layers_of_model(SHAPE | settings) == [AttentionSpec(2, 8), state] * 4


def test_some_layers_have_settings_of_their_own():
    layers = layers_of_model(SHAPE | {"head_dim": 16, "per_layer_config": {"3": {"head_dim": 64}}})
    assert [layer.head_dim for layer in layers] == [16, 16, 16, 64]


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"num_hidden_layers": None}, "the model's config has no num_hidden_layers"),
        ({"num_hidden_layers": 0, "hidden_size": None}, "the model's config has no num_hidden_layers, hidden_size"),
        (
            {"num_hidden_layers": "4"},
            "the model's config has num_hidden_layers='4', which must be an int of at least 0",
        ),
        ({"num_hidden_layers": 10**12}, "the model's config has 1,000,000,000,000 layers, which are more than 10,000"),
        (
            {"layer_types": [1, 2, 3, 4]},
            "the model's config has layer_types=[1, 2, 3, 4], which must be a list of names",
        ),
        ({"no_rope_layers": 1}, "the model's config has no_rope_layers=1, which must be a list"),
        ({"intermediate_size": [128]}, "intermediate_size has 1 entries for 4 layers"),
        ({"per_layer_config": {"1": {"head_dim": -1}}}, "the model's config has head_dim=-1, which must be an int"),
        ({"per_layer_config": ["x"]}, "the model's config has per_layer_config=['x'], which must have settings"),
        ({"model_type": []}, "the model's config has model_type=[], which must be a name"),
        ({"dtype": "float64"}, "dtype is 'float64', must be one of float32, float16"),
        ({"is_encoder_decoder": True}, "the model's config has is_encoder_decoder, that is an encoder, which"),
        ({"layer_types": ["full_attention"] * 3}, "layer_types has 3 entries for 4 layers"),
        ({"layer_types": ["full_attention", "magic"] * 2}, "the model's config has layers of magic, which"),
        ({"layer_types": ["sliding_attention"] * 4}, "the model's config has sliding layers and no sliding_window"),
        ({"layer_types": ["mamba"] * 4, "model_type": "new"}, "the states of model_type='new' cannot be read"),
    ],
)
def test_what_cannot_be_read_of_a_model_is_told(settings, problem):
    with pytest.raises(ConfigError) as caught:
        layers_of_model(SHAPE | settings)
    assert caught.value.problems[0].startswith(problem)
