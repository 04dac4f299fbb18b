import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.edge.models import PAIRS, bits, cache, contents, fill, planes, pool_config

from kvist import AttentionSpec, CacheConfig, KVCacheManager
from kvist.edge import HybridCache, HybridConfig, LayerConfig
from kvist.edge.paged import quantized, rows_at
from kvist.errors import ArgumentError, LayoutError
from kvist.memory import TorchMemory


def tokens(*shape, dtype=torch.float16, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def ints(*numbers):
    return torch.tensor(numbers, dtype=torch.int32)


@pytest.mark.parametrize("order", [[0, 1, 2, 3], [3, 2, 1, 0]], ids=["identity", "reversed"])
def test_E11_six_tokens_at_126_and_50_are_written_across_the_edge_of_a_page(order):
    kept = cache([LayerConfig(4, 64)], max_batch_size=2, max_sequence_length=200, page_size=128)
    kept.page_table.set_rows([(0, order[:2]), (1, order[2:])])
    kept.lengths.reset([126, 50])
    keys, values = tokens(2, 6, 4, 64), tokens(2, 6, 4, 64, seed=1)
    kept.write(0, keys, values)
    for half, new in zip(kept.pool(0), (keys, values), strict=True):
        assert torch.equal(half[order[0], 126:], new[0, :2])
        assert torch.equal(half[order[1], :4], new[0, 2:])
        assert torch.equal(half[order[2], 50:56], new[1])
        assert torch.count_nonzero(half.any(-1).any(-1)) == 12
    gathered = kept.gather(0, 200)
    assert torch.equal(gathered[0][0, 126:132], keys[0])
    assert torch.equal(gathered[1][1, 50:56], values[1])


def test_E11_a_page_that_is_not_mapped_skips_the_write():
    kept = cache([LayerConfig(4, 64)], max_batch_size=2, max_sequence_length=200, page_size=128)
    kept.page_table.set_rows([(0, [0]), (1, [])])
    kept.lengths.reset([126, 50])
    keys = tokens(2, 6, 4, 64)
    kept.write(0, keys, keys)
    assert torch.equal(kept.pool(0)[:, 0, 126:], torch.stack([keys[0, :2]] * 2))
    assert torch.count_nonzero(kept.pool(0)[0].any(-1).any(-1)) == 2
    gathered, _ = kept.gather(0, 200)
    assert torch.equal(gathered[0, 126:128], keys[0, :2])
    assert not gathered[0, 128:].any()
    assert not gathered[1].any()


def test_nothing_is_written_past_the_capacity_of_a_slot():
    kept = cache(max_batch_size=2, max_sequence_length=8)
    kept.lengths.reset([7, 0])
    keys = tokens(2, 3, 2, 4)
    kept.write(0, keys, keys)
    assert torch.equal(kept.slots(0)[0, 0, 7], keys[0, 0])
    assert torch.equal(kept.slots(0)[0, 1, :3], keys[1])
    assert torch.count_nonzero(kept.slots(0)[0].any(-1).any(-1)) == 4


def test_tokens_are_written_where_starts_say():
    kept = cache(max_batch_size=2, max_sequence_length=8)
    kept.lengths.reset([7, 0])
    keys = tokens(2, 2, 2, 4)
    kept.write(0, keys, -keys, starts=ints(2, 6))
    assert torch.equal(kept.slots(0)[1, 0, 2:4], -keys[0])
    assert torch.equal(kept.slots(0)[0, 1, 6:8], keys[1])
    with pytest.raises(LayoutError, match=r"starts must be \[2\]"):
        kept.write(0, keys, keys, starts=ints(2))


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_fp8_is_stored_divided_by_the_scales_of_its_layer(dtype):
    kept = cache([LayerConfig(1, 4, scales=(1.0, 0.5, 4.0))], max_batch_size=1, max_sequence_length=4, dtype=dtype)
    kept.lengths.reset([0])
    keys = torch.tensor([1.0, -2.0, 0.25, 1e6]).view(1, 1, 1, 4)
    kept.write(0, keys, keys)
    largest = torch.finfo(getattr(torch, dtype)).max
    got = [half[0, 0, 0].float() for half in kept.keys_and_values(0)]
    assert got[0].tolist() == [2.0, -4.0, 0.5, largest]
    assert got[1].tolist()[:3] == [0.25, -0.5, 0.0625]
    stored = keys.to(getattr(torch, dtype))
    kept.write(0, stored, stored)
    assert torch.equal(bits(kept.slots(0)[0, 0, 0]), bits(stored[0, 0]))


@pytest.mark.parametrize(("dtype", "scale"), [(torch.float8_e4m3fn, 3.5 / 448), (torch.float8_e4m3fn, 1.0)])
def test_fp8_is_within_its_precision_of_what_was_written(dtype, scale):
    numbers = tokens(1000, dtype=torch.float32).clamp(-3.5, 3.5)
    errors = (quantized(numbers, dtype, scale).float() * scale - numbers).abs()
    assert (errors <= numbers.abs() / 16 + scale * 2**-10).all()


@pytest.mark.parametrize(
    "keys",
    [tokens(2, 3, 2, 5), tokens(1, 3, 2, 4), tokens(2, 3, 2, 4, dtype=torch.float32), tokens(2, 2, 4)],
)
def test_tokens_that_do_not_fit_are_not_written(keys):
    kept = cache(max_batch_size=2)
    kept.lengths.reset([0, 0])
    with pytest.raises(LayoutError, match="keys of layer 0 must be"):
        kept.write(0, keys, keys)
    with pytest.raises(LayoutError, match="values of layer 0 must be"):
        kept.write(0, tokens(2, 3, 2, 4), tokens(2, 4, 2, 4))
    assert not kept.pool(0).any()


def test_a_layer_that_shares_another_reads_it_and_writes_nothing():
    kept = cache([LayerConfig(2, 4), LayerConfig(2, 4, shares_layer=0)], max_batch_size=1)
    kept.lengths.reset([0])
    keys = tokens(1, 3, 2, 4)
    with pytest.raises(LayoutError, match="layer 1 reads the pool of attention layer 0"):
        kept.write(1, keys, keys)
    kept.write(0, keys, keys)
    assert torch.equal(kept.gather(1, 3)[0], keys)


def test_a_layer_with_a_window_goes_through_its_own_table():
    kept = cache([LayerConfig(2, 4), LayerConfig(2, 4, capacity=5)], max_batch_size=1)
    kept.lengths.reset([9])
    kept.sliding_table.set_entry(0, 2, 6)
    keys = tokens(1, 4, 2, 4)
    kept.write(1, keys, keys)
    assert torch.equal(kept.pool(1)[0, 6, 1:], keys[0, :3])
    gathered, _ = kept.gather(1, 13)
    assert torch.equal(gathered[0, 9:12], keys[0, :3])
    assert not gathered[0, :8].any()
    assert not gathered[0, 12:].any()
    assert not kept.pool(0).any()
    assert kept.table_of(1) is kept.sliding_table
    assert kept.table_of(0) is kept.page_table


def test_rows_are_nowhere_outside_the_table():
    table = ints(5, 6, 9, 10).view(1, 2, 2)
    assert rows_at(table, torch.tensor([[-1, 0, 7, 8]]), 4).tolist() == [[-1, 20, 27, -1]]


def test_kvists_manager_decides_and_the_cache_reads_what_its_arena_holds():
    specs = [AttentionSpec(2, 4, "float16"), AttentionSpec(1, 8, "float16")]
    config = CacheConfig(specs, num_blocks=40, block_size=4, max_sequence_length=32)
    memory = TorchMemory(config)
    manager = KVCacheManager(config, memory=memory)
    sequences = [manager.add_sequence([number] * length) for number, length in ((1, 10), (2, 5))]
    attention = pool_config(PAIRS, 2, 32, page_size=4, num_pages=40)
    kept = HybridCache(
        HybridConfig(["attention"] * 2, attention, max_batch_size=2), storage=[memory.kv(0), memory.kv(1)]
    )
    blocks = [manager.tables([sequence]).block_table[0] for sequence in sequences]
    kept.page_table.set_rows(list(enumerate(blocks)))
    assert (kept.page_table.host[:, :, :2] == manager.tables(sequences).edge(40)[:, :, :2]).all()
    kept.lengths.reset([0, 0])
    keys = tokens(2, 5, 2, 4)
    kept.write(0, keys, -keys)
    for row, table in enumerate(blocks):
        got, _ = memory.gather(0, torch.as_tensor(table.copy())[None], 5)
        assert torch.equal(got[0], keys[row])


# -- trees of drafts --------------------------------------------------------------------------------------------------


def test_the_nodes_of_an_accepted_path_move_behind_the_tokens_there_are():
    kept = cache(max_batch_size=2, max_sequence_length=16)
    fill(kept)
    kept.lengths.reset([6, 2])
    before = contents(kept)
    kept.accept(torch.tensor([[0, 2, 5, 4], [0, 3, 4, 1]], dtype=torch.int32), ints(3, 1))
    assert kept.lengths.tensor.tolist() == [9, 3]
    for layer, pool in enumerate(before):
        expected = pool.view(2, 2, 16, *pool.shape[3:])
        expected[:, 0, [7, 8]] = expected[:, 0, [8, 11]]
        assert torch.equal(kept.slots(layer), expected)


def test_all_nodes_are_read_before_any_is_written():
    kept = cache(max_batch_size=1, max_sequence_length=16)
    fill(kept)
    kept.lengths.reset([3])
    before = kept.slots(0).clone()
    kept.accept(ints(0, 2, 1, 3).view(1, 4), ints(4))
    assert torch.equal(kept.slots(0)[:, 0, 3:7], before[:, 0, [3, 5, 4, 6]])


def test_paths_go_through_the_page_table_and_no_page_gives_zeros_or_takes_nothing():
    kept = cache(max_batch_size=2, max_sequence_length=16)
    fill(kept)
    kept.page_table.set_rows([(0, [5, 1]), (1, [7])])
    kept.lengths.reset([2, 2])
    before = kept.pool(0).clone()
    kept.accept(torch.tensor([[0, 4, 7], [0, 1, 9]], dtype=torch.int32), ints(3, 3))
    before[:, 5, 3] = before[:, 1, 2]
    before[:, 1, 0] = 0  # position 2 + 7 has no page, position 4 is in page 1
    assert torch.equal(kept.pool(0), before)  # and of slot 1, node 1 stays where it is, position 4 has no page
    assert kept.lengths.tensor.tolist() == [5, 5]


def test_a_node_beyond_the_capacity_is_zeros():
    kept = cache(max_batch_size=1, max_sequence_length=8)
    fill(kept)
    kept.lengths.reset([4])
    kept.accept(ints(0, 30, -1).view(1, 3), ints(3))
    assert not kept.slots(0)[:, 0, 5:7].any()
    assert kept.slots(0)[:, 0, 7].all()


@pytest.mark.parametrize(
    ("nodes", "accepted"),
    [
        (ints(0, 1).view(1, 2), ints(1, 1)),
        (ints(0, 1, 0, 1).view(2, 2), ints(1, 3)),
        (ints(0, 1, 0, 1).view(2, 2), ints(-1, 1)),
        (ints(0, 1, 0, 1).view(2, 2), ints(1, 1).long()),
        (ints(0, 1), ints(1, 1)),
        (torch.zeros(2, 0, dtype=torch.int32), ints(0, 0)),
        (ints(0, 1, 0, 1).view(2, 2), ints(1, 2)),
    ],
)
def test_a_path_that_cannot_be_changes_nothing(nodes, accepted):
    kept = cache(max_batch_size=2, max_sequence_length=8)
    fill(kept)
    kept.lengths.reset([1, 7])
    before = contents(kept)
    with pytest.raises(ArgumentError):
        kept.accept(nodes, accepted)
    assert all(torch.equal(*pair) for pair in zip(planes(kept), before, strict=True))
    assert kept.lengths.tensor.tolist() == [1, 7]


@st.composite
def paths(draw):
    length, depth = draw(st.integers(0, 8)), draw(st.integers(1, 5))
    nodes = [0, *draw(st.lists(st.integers(1, 9), min_size=depth - 1, max_size=depth - 1))]
    return length, nodes, draw(st.integers(0, depth))


@given(st.lists(paths(), min_size=3, max_size=3), st.permutations(range(15)))
def test_any_paths_give_what_lists_of_tokens_give(batch, pages):
    kept = cache(PAIRS, max_batch_size=3, max_sequence_length=20)
    fill(kept)
    kept.page_table.set_rows([(row, pages[5 * row : 5 * row + 5]) for row in range(3)])
    kept.lengths.reset([length for length, _, _ in batch])
    before = [kept.gather(layer, 20) for layer in (0, 1)]
    width = max(len(nodes) for _, nodes, _ in batch)
    padded = [nodes + [-1] * (width - len(nodes)) for _, nodes, _ in batch]
    kept.accept(torch.tensor(padded, dtype=torch.int32), ints(*[accepted for _, _, accepted in batch]))
    for layer, parts in enumerate(before):
        for part, old in zip(kept.gather(layer, 20), parts, strict=True):
            for row, (length, nodes, accepted) in enumerate(batch):
                order = list(range(20))
                order[length + 1 : length + accepted] = [length + node for node in nodes[1:accepted]]
                assert torch.equal(part[row], old[row, order])


# -- layers -----------------------------------------------------------------------------------------------------------


def test_layers_are_named_by_their_number_in_the_model():
    kept = cache(num_recurrent=2)
    assert [kept.layer_type(layer) for layer in range(4)] == ["attention", "attention", "mamba", "mamba"]
    assert kept.pool(1).data_ptr() == kept.kv.keys_pointer(1)
    assert kept.strided_slots(1).shape == kept.slots(1).shape == (2, 8, 32, 1, 8)
    assert kept.recurrent_state(3).data_ptr() == kept.states.recurrent(1).data_ptr()
    assert kept.conv_state(2).data_ptr() == kept.states.conv(0).data_ptr()


def test_a_layer_of_the_other_type_or_none_is_refused():
    kept = cache(num_recurrent=1)
    for ask in (kept.pool, kept.slots, kept.strided_slots, kept.keys_and_values, kept.table_of):
        with pytest.raises(LayoutError, match="layer 2 is of type mamba, not attention"):
            ask(2)
        with pytest.raises(ArgumentError, match=r"layer must be in \[0, 3\), got 3"):
            ask(3)
    for ask in (kept.recurrent_state, kept.conv_state):
        with pytest.raises(LayoutError, match="layer 0 is of type attention, not mamba"):
            ask(0)
        with pytest.raises(ArgumentError, match="got -1"):
            ask(-1)


def test_layers_are_grouped_by_the_size_of_their_heads():
    kept = cache([LayerConfig(2, 8), LayerConfig(1, 4), LayerConfig(6, 8)])
    groups = kept.head_dim_groups
    assert [(group.head_dim, group.layers, group.max_kv_heads) for group in groups] == [(8, (0, 2), 6), (4, (1,), 1)]


def test_the_page_table_is_identity_and_uploaded_unless_pages_are_few():
    kept = cache(max_batch_size=2, max_sequence_length=8)
    assert kept.page_table.is_identity
    assert kept.page_table.device_table[:, 0].tolist() == [[0, 1], [2, 3]]
    few = cache(max_batch_size=2, max_sequence_length=8, num_pages=3, allow_undercommit=True)
    assert few.page_table.device_table.eq(-1).all()


def test_a_model_without_attention_keeps_states_and_lengths():
    kept = cache([], num_recurrent=2)
    kept.lengths.reset([0] * 8)
    kept.accept(torch.zeros(8, 1, dtype=torch.int32), ints(*[1] * 8))
    kept.compact([-1, 0] + [-1] * 6, 1)
    assert kept.lengths.tensor.tolist() == [1]
    assert kept.head_dim_groups == []
