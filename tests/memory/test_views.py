"""Every shape of a layer's K and V, by shape, strides, the address of each element, and what is read there."""

import numpy as np
import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from kvist.config import AttentionSpec, CacheConfig, StateSpec
from kvist.core.moves import Move
from kvist.errors import ArgumentError, LayoutError
from kvist.memory import TorchMemory
from kvist.memory.dialects import (
    PoolOffsets,
    coarser_table,
    edge_table,
    finer_table,
    flex_tables,
    tensorrt_offsets,
)

N, P, H, D = 6, 4, 2, 8
ORDERS = ["layer_major", "block_major", "heads_first"]
DTYPES = ["float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int8", "uint8", "int4", "uint4"]
LAYER = 1


def memory_of(order, dtype="float32", num_blocks=N, block_size=P, heads=H, **more):
    """Two layers of other numbers in every element of 16 bits and more."""
    layer = AttentionSpec(heads, D, dtype, **more)
    config = CacheConfig([layer, layer], num_blocks=num_blocks, block_size=block_size, storage_order=order)
    memory = TorchMemory(config)
    for index in range(2):
        planes = [memory.keys(index)] if more.get("value_head_dim") == 0 else [memory.keys(index), memory.values(index)]
        for number, plane in enumerate(planes):
            count = torch.arange(plane.numel()).view(plane.shape) + 5_000 * (2 * index + number)
            plane.copy_(count if plane.element_size() > 1 else (count % 251).to(torch.uint8).view(plane.dtype))
    return memory


def views_of(order, **more):
    return memory_of(order, **more).views(LAYER)


def addresses(tensor):
    """The address of every element."""
    found = np.full(tensor.shape, tensor.data_ptr(), np.int64)
    for axis, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        places = np.arange(size) * stride * tensor.element_size()
        found += places.reshape([-1 if other == axis else 1 for other in range(tensor.ndim)])
    return found


def expected_addresses(memory, order, width, element_size):
    """Where K and V of LAYER lie, `[2, N, P, H, width]`, counted from the start of the storage they are in."""
    start = memory.keys(0 if order == "block_major" else LAYER).data_ptr()
    kv, block, token, head, dim = np.ogrid[:2, :N, :P, :H, :width]
    row = head * P + token if order == "heads_first" else token * H + head
    in_block = (row * width + dim) * element_size
    plane_bytes = P * H * width * element_size
    if order != "block_major":
        return start + (kv * N + block) * plane_bytes + in_block
    return start + block * 4 * plane_bytes + (2 * LAYER + kv) * plane_bytes + in_block


def assert_shows(view, places, strides, memory):
    """The view has these strides, and each element the address given; and its numbers are those at the address."""
    assert view.shape == places.shape
    assert view.stride() == strides
    assert np.array_equal(addresses(view), places)
    held = {}
    for plane in (memory.keys(LAYER), memory.values(LAYER)):
        bits = (plane.view(torch.uint8) if plane.element_size() == 1 else plane).float()
        held |= dict(zip(addresses(plane).ravel().tolist(), bits.flatten().tolist(), strict=True))
    found = (view.view(torch.uint8) if view.element_size() == 1 else view).float().flatten().tolist()
    assert found == [held[place] for place in places.ravel().tolist()]


PHD, HD, ND = P * H * D, H * D, N * P * D
# Shape of each view, and its strides in layer-major, block-major and heads-first storage; None where that has no such
# view. In block-major storage a page is 4 planes (two layers, K and V) from the next.
ROW, PD = 4 * PHD, P * D
PAIRS = {
    "keys and values": (
        lambda v: (v.keys(), v.values()),
        "pages",
        [(PHD, HD, D, 1), (ROW, HD, D, 1), (PHD, D, PD, 1)],
    ),
    "heads first": (
        lambda v: v.heads_first(),
        "heads first",
        [(PHD, D, HD, 1), (ROW, D, HD, 1), (PHD, PD, D, 1)],
    ),
    "token rows": (lambda v: v.token_rows(), "tokens", [(HD, D, 1), None, None]),
    "xformers": (lambda v: v.xformers(), "xformers", [(N * PHD, HD, D, 1), None, None]),
    "flex": (lambda v: v.flex(), "flex", [(N * PHD, D, HD, 1), None, None]),
    "separate slots": (lambda v: v.separate_slots(2, 3 * P), "slots", [(3 * PHD, HD, D, 1), None, None]),
    "slots of one page": (
        lambda v: v.separate_slots(6, P),
        "pages",
        [(PHD, HD, D, 1), (ROW, HD, D, 1), (PHD, D, PD, 1)],
    ),
    "transformers": (lambda v: v.transformers(2, 3 * P, 7), "transformers", [(3 * PHD, D, HD, 1), None, None]),
    "transformers, slots of one page": (
        lambda v: v.transformers(6, P, 3),
        "short pages",
        [(PHD, D, HD, 1), (ROW, D, HD, 1), (PHD, PD, D, 1)],
    ),
    "finer pages": (
        lambda v: (v.refined(2).keys(), v.refined(2).values()),
        "finer",
        [(PHD // 2, HD, D, 1), None, None],
    ),
    "coarser pages": (
        lambda v: (v.coarsened(8).keys(), v.coarsened(8).values()),
        "coarser",
        [(2 * PHD, HD, D, 1), None, None],
    ),
}
JOINED = {
    "pool": (
        lambda v: v.pool(),
        "pool",
        [(N * PHD, PHD, HD, D, 1), (PHD, ROW, HD, D, 1), (N * PHD, PHD, D, PD, 1)],
    ),
    "flat pool": (lambda v: v.flat_pool(), "flat", [(PHD, HD, D, 1), None, (PHD, D, PD, 1)]),
    "paged": (
        lambda v: v.paged(),
        "paged",
        [(PHD, N * PHD, HD, D, 1), (ROW, PHD, HD, D, 1), (PHD, N * PHD, D, PD, 1)],
    ),
    "paged, heads first": (
        lambda v: v.paged("HND"),
        "paged HND",
        [(PHD, N * PHD, D, HD, 1), (ROW, PHD, D, HD, 1), (PHD, N * PHD, PD, D, 1)],
    ),
    "slots": (lambda v: v.slots(2, 3 * P), "both slots", [(N * PHD, 3 * PHD, HD, D, 1), None, None]),
    "some slots": (lambda v: v.strided_slots(2, 2 * P), "some slots", [(N * PHD, 2 * PHD, HD, D, 1), None, None]),
    "slots of a page": (
        lambda v: v.strided_slots(5, P),
        "some pages",
        [(N * PHD, PHD, HD, D, 1), (PHD, ROW, HD, D, 1), (N * PHD, PHD, D, PD, 1)],
    ),
}
REFUSED = r"layer 1 has (other layers' bytes between its pages|the tokens of a head together).*storage_order='layer"


def shaped(places, form):
    """Addresses `[..., N, P, H, D]` in the shape of a view; NumPy copies, so any shape can be made."""
    lead, width = places.shape[:-4], places.shape[-1]
    page = places.reshape(*lead, N * P, H, width)
    return {
        "pages": places,
        "heads first": places.swapaxes(-3, -2),
        "tokens": page,
        "xformers": page[None],
        "flex": page[None].swapaxes(1, 2),
        "slots": page.reshape(*lead, 2, 3 * P, H, width),
        "transformers": page.reshape(*lead, 2, 3 * P, H, width).swapaxes(-3, -2)[..., :7, :],
        "short pages": places.swapaxes(-3, -2)[..., :3, :],
        "finer": page.reshape(*lead, 2 * N, P // 2, H, width),
        "coarser": page.reshape(*lead, N // 2, 2 * P, H, width),
        "pool": places,
        "flat": places.reshape(-1, P, H, width),
        "paged": places.swapaxes(0, 1) if lead else places,
        "paged HND": places.swapaxes(0, 1).swapaxes(2, 3) if lead else places,
        "both slots": page.reshape(*lead, 2, 3 * P, H, width),
        "some slots": page[..., : 4 * P, :, :].reshape(*lead, 2, 2 * P, H, width),
        "some pages": places[..., :5, :, :, :],
    }[form]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", PAIRS)
def test_views_of_k_and_v_apart_show_the_storage(name, order, dtype):
    make, form, strides_of = PAIRS[name]
    memory = memory_of(order, dtype)
    strides = strides_of[ORDERS.index(order)]
    if strides is None:
        with pytest.raises(LayoutError, match=REFUSED):
            make(memory.views(LAYER))
        return
    places = expected_addresses(memory, order, D, torch.empty(0, dtype=getattr(torch, dtype)).element_size())
    for view, where in zip(make(memory.views(LAYER)), places, strict=True):
        assert_shows(view, shaped(where, form), strides, memory)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", JOINED)
def test_views_of_k_and_v_as_one_show_the_storage(name, order, dtype):
    make, form, strides_of = JOINED[name]
    memory = memory_of(order, dtype)
    strides = strides_of[ORDERS.index(order)]
    if strides is None:
        with pytest.raises(LayoutError, match=REFUSED):
            make(memory.views(LAYER))
        return
    places = expected_addresses(memory, order, D, torch.empty(0, dtype=getattr(torch, dtype)).element_size())
    assert_shows(make(memory.views(LAYER)), shaped(places, form), strides, memory)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", PAIRS)
def test_every_dtype_has_the_same_views_at_its_own_size(name, order, dtype):
    make, form, strides = PAIRS[name]
    memory = memory_of(order, dtype)
    if strides[ORDERS.index(order)] is None:
        with pytest.raises(LayoutError):
            make(memory.views(LAYER))
        return
    width = memory.keys(LAYER).shape[-1]
    assert width == (D // 2 if dtype in ("int4", "uint4") else D)
    places = expected_addresses(memory, order, width, memory.keys(LAYER).element_size())
    for view, where in zip(make(memory.views(LAYER)), places, strict=True):
        assert_shows(view, shaped(where, form), view.stride(), memory)


@pytest.mark.parametrize("order", ORDERS)
def test_what_is_written_through_any_view_is_seen_in_all(order):
    memory = memory_of(order)
    memory.views(LAYER).paged("HND")[3, 1, 1, 2, 5] = -1.0
    assert memory.values(LAYER)[3, 2, 1, 5] == -1
    assert memory.gather(LAYER, torch.tensor([[3]]), 4)[1][0, 2, 1, 5] == -1


# ---- pages of other sizes -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page_size", [1, 2, 4])
def test_finer_pages_are_those_that_the_finer_table_names(page_size):
    views = views_of("layer_major")
    table, held = np.array([[5, 0, 3]], np.int32), np.ones((1, 3), bool)
    pages = finer_table(table, held, P // page_size)[0]
    assert torch.equal(views.refined(page_size).keys()[pages].flatten(0, 1), views.keys()[table[0]].flatten(0, 1))
    assert views.refined(page_size).num_pages == N * P // page_size


@pytest.mark.parametrize("page_size", [4, 8, 12])
def test_coarser_pages_are_those_that_the_coarser_table_names(page_size):
    views, factor = views_of("layer_major"), page_size // P
    table = np.array([[*range(factor, 2 * factor), *range(factor)]], np.int32)
    pages = coarser_table(table, np.ones(table.shape, bool), P, page_size)[0]
    assert torch.equal(views.coarsened(page_size).values()[pages].flatten(0, 1), views.values()[table[0]].flatten(0, 1))


def test_pages_of_256_tokens_are_made_of_blocks_of_16_as_flash_attention_2_wants():
    coarse = views_of("layer_major", num_blocks=32, block_size=16).coarsened(256)
    assert (coarse.num_pages, coarse.page_size) == (2, 256)
    assert coarse.keys().shape == (2, 256, H, D)
    assert coarse.refined(16).keys().data_ptr() == coarse.keys().data_ptr()


@pytest.mark.parametrize("page_size", [3, 8, 0, -2])
def test_finer_pages_divide_a_block(page_size):
    with pytest.raises(LayoutError, match=f"pages of 4 tokens, which {page_size} does not divide"):
        views_of("layer_major").refined(page_size)


@pytest.mark.parametrize("page_size", [2, 6, 16, 0, -4])
def test_coarser_pages_leave_no_block_over(page_size):
    with pytest.raises(LayoutError, match=f"6 pages of 4 tokens, which do not make whole pages of {page_size}"):
        views_of("layer_major").coarsened(page_size)


def test_pages_as_they_are_need_no_other_storage():
    views = views_of("block_major")
    assert views.refined(P).keys().stride() == views.coarsened(P).keys().stride() == views.keys().stride()


# ---- slots ----------------------------------------------------------------------------------------------------------


def test_slots_in_one_piece_are_refused_where_the_pool_has_pages_to_keep():
    # Two sequences of 200 tokens are 4 pages of 128; 6 more are kept for reuse.
    config = CacheConfig([AttentionSpec(4, 64, "float16")], num_blocks=10, block_size=128)
    memory = TorchMemory(config)
    views, half = memory.views(0), 10 * 128 * 4 * 64
    with pytest.raises(LayoutError, match=r"10 pages.* are of 4; use strided_slots, or separate_slots"):
        views.slots(2, 256)
    assert views.pool().shape == (2, 10, 128, 4, 64)
    keys, values = views.separate_slots(2, 256)
    assert keys.shape == values.shape == (2, 256, 4, 64)
    assert keys.is_contiguous()
    assert values.is_contiguous()
    assert values.data_ptr() - keys.data_ptr() == half * 2
    strided = views.strided_slots(2, 256)
    assert strided.shape == (2, 2, 256, 4, 64)
    assert strided.stride() == (half, 256 * 4 * 64, 4 * 64, 64, 1)
    assert (strided[0].data_ptr(), strided[1].data_ptr()) == (keys.data_ptr(), values.data_ptr())


def test_slots_of_the_least_pages_are_in_one_piece():
    config = CacheConfig([AttentionSpec(2, 128, "float16")], num_blocks=4, block_size=128)
    slots = TorchMemory(config).views(0).slots(2, 256)
    assert slots.shape == (2, 2, 256, 2, 128)
    assert slots.is_contiguous()


@pytest.mark.parametrize(
    ("max_batch", "capacity", "message"),
    [
        (2, 10, "slots of 2 sequences of 10 tokens are no whole pages of 4; 2 of 12 would be"),
        (0, 4, "1 of 4 would be"),
        (2, 0, "2 of 4 would be"),
        (7, 4, "slots of 7 x 4 take 7 pages, there are 6"),
    ],
)
def test_slots_that_the_pool_does_not_have_are_refused(max_batch, capacity, message):
    views = views_of("layer_major")
    for make in (views.slots, views.strided_slots, views.separate_slots):
        with pytest.raises(LayoutError, match=message):
            make(max_batch, capacity)


@pytest.mark.parametrize("num_tokens", [-1, 13])
def test_transformers_sees_no_more_than_a_slot(num_tokens):
    with pytest.raises(ArgumentError, match=f"num_tokens is {num_tokens}, must be from 0 to the capacity of 12"):
        views_of("layer_major").transformers(2, 12, num_tokens)


# ---- what kernels' tables name --------------------------------------------------------------------------------------


def test_edge_llms_table_names_pages_of_the_flat_pool():
    views = views_of("layer_major")
    keys, values = edge_table(np.array([[5, 2]], np.int32), np.ones((1, 2), bool), N)[0]
    assert torch.equal(views.flat_pool()[keys], views.keys()[[5, 2]])
    assert torch.equal(views.flat_pool()[values], views.values()[[5, 2]])


@pytest.mark.parametrize(
    ("order", "rule"), [("layer_major", PoolOffsets.split(N)), ("block_major", PoolOffsets.interleaved(2))]
)
@pytest.mark.parametrize("shape", [{"heads": 1}, {"block_size": 1, "num_blocks": N}], ids=str)
def test_tensorrts_offsets_name_the_places_of_layers_whose_heads_come_first(order, rule, shape):
    views = views_of(order, **shape)
    places, found = views.tensorrt()
    assert found == rule
    table = np.array([[5, 0, 3]], np.int32)
    keys, values = tensorrt_offsets(table, np.ones((1, 3), bool), found)[0, 0]
    assert torch.equal(places[keys], views.heads_first()[0][[5, 0, 3]])
    assert torch.equal(places[values], views.heads_first()[1][[5, 0, 3]])
    assert places[0].is_contiguous()


@pytest.mark.parametrize("dtype", ["float16", "int4"])
def test_heads_first_storage_is_a_pool_of_tensorrts_blocks(dtype):
    """`[2, N, H, P, D]`: K of block b at place b, V at b + N, each a page of a head after the other in one piece."""
    memory = memory_of("heads_first", dtype)
    places, rule = memory.views(LAYER).tensorrt()
    assert rule == PoolOffsets.split(N)
    assert places.shape == (2 * N, H, P, D // 2 if dtype == "int4" else D)
    assert places.is_contiguous()
    assert places.data_ptr() == memory.keys(LAYER).data_ptr()
    table = np.array([[5, 0, 3]], np.int32)
    keys, values = tensorrt_offsets(table, np.ones((1, 3), bool), rule)[0, 0]
    assert torch.equal(places[keys], memory.keys(LAYER)[[5, 0, 3]].transpose(1, 2))
    assert torch.equal(places[values], memory.values(LAYER)[[5, 0, 3]].transpose(1, 2))


def test_in_heads_first_storage_a_part_of_a_block_moves_with_the_rest_and_single_tokens_move_alone():
    memory = memory_of("heads_first")
    before = memory.keys(LAYER).clone()
    memory.perform([Move(1, 3, 2), Move(0, 4, 1, source_offset=2, destination_offset=1)])
    assert torch.equal(memory.keys(LAYER)[3], before[1])
    assert torch.equal(memory.keys(LAYER)[4, 1], before[0, 2])
    assert torch.equal(memory.keys(LAYER)[4, [0, 2, 3]], before[4, [0, 2, 3]])


def test_blocks_of_heads_first_storage_are_read_and_written_as_the_layout_says():
    """So that what one storage order has stored, another reads."""
    one, other = memory_of("heads_first"), memory_of("layer_major")
    blocks = np.array([5, 2], np.int32)
    assert torch.equal(one.read_blocks(0, blocks), other.read_blocks(0, blocks))
    other.keys(LAYER).neg_()
    one.write_blocks(0, blocks, other.read_blocks(0, blocks))
    assert torch.equal(one.keys(LAYER)[[5, 2]], other.keys(LAYER)[[5, 2]])
    assert one.block_format() == other.block_format()


@pytest.mark.parametrize("order", ["layer_major", "block_major"])
def test_where_tensorrts_blocks_are_is_said_by_storage_that_has_none(order):
    with pytest.raises(LayoutError, match="storage_order='heads_first' has them so"):
        views_of(order).tensorrt()


@pytest.mark.parametrize(
    ("order", "rule"), [("layer_major", PoolOffsets.keys_only(1)), ("block_major", PoolOffsets.keys_only(2))]
)
def test_tensorrts_offsets_of_latents_name_one_place(order, rule):
    views = views_of(order, heads=1, value_head_dim=0)
    places, found = views.tensorrt()
    assert found == rule
    keys, values = tensorrt_offsets(np.array([[4]], np.int32), np.ones((1, 1), bool), found)[0, 0]
    assert torch.equal(places[keys], views.heads_first()[0][[4]])
    assert keys == values


@pytest.mark.parametrize("order", ORDERS[:2])
def test_tensorrt_is_told_that_tokens_come_before_heads(order):
    with pytest.raises(LayoutError, match=r"keeps the heads of a token together.*pages \[2, 4, 8\].*heads_first\(\)"):
        views_of(order).tensorrt()


def test_tensorrt_is_told_where_layers_are_no_whole_pages_apart():
    layers = [AttentionSpec(1, 8, "float32"), AttentionSpec(1, 10, "float32")]
    memory = TorchMemory(CacheConfig(layers, num_blocks=N, block_size=P, storage_order="block_major"))
    with pytest.raises(LayoutError, match="do not begin at whole pages of others; storage_order='layer_major'"):
        memory.views(0).tensorrt()


@pytest.mark.parametrize("head_order", ["NHD", "HND"])
@pytest.mark.parametrize("order", ORDERS)
def test_flashinfer_finds_k_and_v_of_the_same_strides_and_heads_in_one_piece(order, head_order):
    keys, values = views_of(order).paged(head_order).unbind(1)
    assert keys.stride() == values.stride()
    assert keys.stride(-1) == 1
    pair = views_of(order).heads_first() if head_order == "HND" else (views_of(order).keys(), views_of(order).values())
    assert [plane.stride() for plane in pair] == [keys.stride()] * 2


def test_edge_llm_finds_v_as_many_pages_behind_k_as_the_pool_has_whatever_it_keeps():
    for num_pages in (4, 10):
        views = views_of("layer_major", num_blocks=num_pages, block_size=128)
        flat = views.flat_pool()
        assert flat.is_contiguous()
        assert flat[num_pages].data_ptr() == views.values().data_ptr()
        assert views.values().data_ptr() - views.keys().data_ptr() == num_pages * 128 * H * D * 4


def test_flex_reads_the_tokens_that_its_page_table_names():
    views = views_of("layer_major")
    tables = flex_tables(np.array([[4, 1]], np.int32), np.ones((1, 2), bool), np.array([2]), N)
    positions = torch.arange(2 * P)
    physical = torch.from_numpy(tables.page_table[0])[positions // P] * P + positions % P
    keys, _ = views.flex()
    assert torch.equal(keys[0, :, physical], views.keys()[[4, 1]].flatten(0, 1).transpose(0, 1))


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_on_the_view_equals_attention_over_the_tokens():
    views, length = views_of("layer_major", block_size=16, num_blocks=N), 27
    views.pool().normal_()
    tables = flex_tables(np.array([[4, 1]], np.int32), np.ones((1, 2), bool), np.array([2]), N)
    page_of = torch.from_numpy(tables.physical_to_logical)

    def is_seen(batch, head, query, slot):
        page = page_of[batch, slot // 16]
        return (page >= 0) & (page * 16 + slot % 16 < length)

    mask = create_block_mask(is_seen, 1, None, 3, N * 16, device="cpu", BLOCK_SIZE=16)
    query = torch.randn(1, H, 3, D)
    tokens = [plane[[4, 1]].flatten(0, 1)[:length].transpose(0, 1)[None] for plane in (views.keys(), views.values())]
    expected = torch.nn.functional.scaled_dot_product_attention(query, *tokens)
    assert torch.allclose(flex_attention(query, *views.flex(), block_mask=mask), expected, atol=1e-6)


# ---- layers of other kinds ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ORDERS)
def test_keys_only_have_views_of_keys(order):
    views = views_of(order, value_head_dim=0)
    assert views.heads_first()[1] is None
    with pytest.raises(LayoutError, match=r"keeps keys only, there are no values; use keys\(layer\)"):
        views.values()
    for make in (views.pool, views.paged):
        with pytest.raises(LayoutError, match=r"keys of 8 and values of 0 .* use keys\(layer\)$"):
            make()
    if order == "layer_major":
        pairs = [views.token_rows(), views.xformers(), views.flex(), views.separate_slots(2, 12)]
        assert [values for _, values in pairs] == [None] * 4
        assert views.transformers(2, 12, 5)[1] is None


def test_k_and_v_of_other_size_have_views_apart():
    views = views_of("layer_major", value_head_dim=4)
    keys, values = views.token_rows()
    assert (keys.shape, values.shape) == ((N * P, H, 8), (N * P, H, 4))
    with pytest.raises(LayoutError, match="keys of 8 and values of 4"):
        views.flat_pool()


def test_a_layer_that_shares_a_cache_has_the_views_of_its_donor():
    layers = [AttentionSpec(H, D), AttentionSpec(H, D, shares_layer=0)]
    memory = TorchMemory(CacheConfig(layers, num_blocks=N, block_size=P))
    assert memory.views(1).paged().data_ptr() == memory.views(0).paged().data_ptr()


def test_states_have_no_views_of_k_and_v():
    memory = TorchMemory(CacheConfig([AttentionSpec(H, D), StateSpec([(2, 3)])], num_blocks=N, block_size=P))
    with pytest.raises(LayoutError, match=r"layer 1 keeps states, not K and V; use states\(layer\)"):
        memory.views(1)


def test_a_pool_shared_with_layers_of_other_sizes_has_pages_but_no_token_rows():
    layers = [AttentionSpec(2, 4), AttentionSpec(2, 4), AttentionSpec(4, 4, sliding_window=6)]
    memory = TorchMemory(CacheConfig(layers, num_blocks=N, block_size=P, shared_pool=True))
    assert memory.views(2).paged().shape == (N, 2, P, 4, 4)
    with pytest.raises(LayoutError, match="in a pool that is shared with no layers of other sizes, has it"):
        memory.views(2).token_rows()


def test_the_only_layer_of_block_major_storage_has_token_rows_where_it_has_keys_only():
    config = CacheConfig([AttentionSpec(1, 8, value_head_dim=0)], num_blocks=N, block_size=P, storage_order=ORDERS[1])
    assert TorchMemory(config).views(0).token_rows()[0].shape == (N * P, 1, 8)


# ---- bytes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ORDERS)
def test_8_bit_floats_are_seen_as_bytes_and_back(order):
    memory = memory_of(order, "float8_e4m3fn")
    seen = memory.views(LAYER).as_dtype(torch.uint8)
    assert seen.pool().dtype == torch.uint8
    assert np.array_equal(addresses(seen.paged()), addresses(memory.views(LAYER).paged()))
    assert seen.as_dtype(torch.float8_e4m3fn).keys().dtype == torch.float8_e4m3fn
    with pytest.raises(LayoutError, match=r"elements of torch.float8_e4m3fn, whose size is not that of torch.float16"):
        memory.views(LAYER).as_dtype(torch.float16)


def test_a_head_order_that_is_none_is_refused():
    with pytest.raises(ArgumentError, match="head_order is 'NDH', must be 'NHD' or 'HND'"):
        views_of("layer_major").paged("NDH")


def test_views_say_what_they_are_of():
    assert repr(views_of("block_major")) == ("KVViews(layer 1: [6, 4, 2, 8] torch.float32, strides (256, 16, 8, 1))")
