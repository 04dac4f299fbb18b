import numpy as np
import pytest
from tests.core.small import label, small

from kvist import ArgumentError, ArgumentTypeError, BatchTables, LayoutError
from kvist.core.groups import RingGeometry, Span
from kvist.memory.dialects import (
    FlashInferTables,
    FlexTables,
    PoolOffsets,
    batch_indices_positions,
    split_offsets,
)

FILL = 2**31 - 1


def batch(blocks, lengths, *, span=None, block_size=4, query=None, first=None, padding=0):
    """Tables of rows with these blocks (None in holes), of which `lengths` tokens are attended to."""
    span = span or Span("full", block_size)
    width = max(map(len, blocks), default=0)
    padded = [[0 if block is None else block for block in row] + [padding] * (width - len(row)) for row in blocks]
    query_lens = lengths if query is None else query
    return BatchTables(
        np.array(padded, np.int32).reshape(len(blocks), width),
        np.zeros(0, np.int64),
        np.array(lengths, np.int32),
        np.cumsum([0, *query_lens]).astype(np.int32),
        np.array(first or [0] * len(blocks), np.int64),
        np.array([len(row) for row in blocks], np.int64),
        span,
        padding,
    )


def windowed(padding=0):
    """Two rows in blocks of 4 with one block of sinks; the first has lost its blocks 1 and 2."""
    span = Span("sliding", block_size=4, window=8, num_sink_blocks=1)
    return batch([[6, None, None, 3, 9], [1, 2]], [18, 7], span=span, first=[3, 0], query=[1, 2], padding=padding)


def ring(block_size=4, window=10, sink_tokens=2):
    """A ring of 8 tokens in two blocks, after 2 sinks and a bubble in the first."""
    geometry = RingGeometry(block_size, window, sink_tokens, has_extra_block=False)
    return Span("ring", block_size, window, ring=geometry)


def lists(tables):
    """FlashInfer's arrays as lists."""
    return [getattr(tables, name).tolist() for name in ("indptr", "indices", "last_page_len", "qo_indptr")]


# -- FlashInfer -------------------------------------------------------------------------------------------------------


def test_flashinfer_tables_of_the_example_of_four_appends():
    tables = batch([[0, 1, 2], [3], [4, 5], [6, 7]], [45, 8, 25, 22], block_size=16).flashinfer()
    assert np.diff(tables.indptr).tolist() == [3, 1, 2, 2]
    assert tables.indptr.tolist() == [0, 3, 4, 6, 8]
    assert tables.last_page_len.tolist() == [13, 8, 9, 6]
    assert tables.indices.tolist() == [0, 1, 2, 3, 4, 5, 6, 7]
    assert tables.qo_indptr.tolist() == [0, 45, 53, 78, 100]
    assert tables.seq_lens.tolist() == [45, 8, 25, 22]


def test_positions_of_appended_tokens_end_where_their_sequences_do():
    batch_indices, positions = batch_indices_positions(np.array([0, 1, 3, 6, 10]), np.array([5, 5, 5, 5]))
    assert positions.tolist() == [4, 3, 4, 2, 3, 4, 1, 2, 3, 4]
    assert batch_indices.tolist() == [0, 1, 1, 2, 2, 2, 3, 3, 3, 3]
    assert (batch_indices.dtype, positions.dtype) == (np.int32, np.int32)


def test_a_batch_of_fixed_size_is_filled_up_with_tokens_of_nobody():
    tables = batch([[0, 1], [2]], [6, 3], query=[2, 1]).flashinfer()
    batch_indices, positions = tables.batch_indices_positions(5)
    assert batch_indices.tolist() == [0, 0, 1, -1, -1]
    assert positions.tolist() == [4, 5, 2, 0, 0]
    with pytest.raises(ArgumentError, match="num_tokens is 2, the batch has 3"):
        tables.batch_indices_positions(2)


def test_flashinfer_tables_are_int32_and_those_of_the_batch():
    manager = small(block_size=4)
    sequences = [manager.add_sequence([1, 2, 3, 4, 5]), manager.add_sequence([6, 7, 8, 9])]
    tables = manager.tables(sequences)
    csr = tables.flashinfer()
    assert lists(csr) == [[0, 2, 3], [0, 1, 2], [1, 4], [0, 5, 9]]
    arrays = (csr.indptr, csr.indices, csr.last_page_len, csr.qo_indptr, csr.seq_lens, tables.start_lens)
    assert {array.dtype for array in arrays} == {np.dtype("int32")}
    assert [tables.indptr.tolist(), tables.indices.tolist(), tables.last_page_len.tolist()] == lists(csr)[:3]


def test_reserved_blocks_are_no_pages_yet():
    assert lists(batch([[4, 7, 2], [5, 8]], [5, 4]).flashinfer())[:3] == [[0, 2, 3], [4, 7, 5], [1, 4]]


def test_an_empty_request_has_no_page_and_no_last_page():
    tables = batch([[4], [5], []], [0, 3, 0]).flashinfer()
    assert lists(tables) == [[0, 0, 1, 1], [5], [0, 3, 0], [0, 0, 3, 3]]
    assert tables.seq_lens.tolist() == [0, 3, 0]
    assert lists(batch([], []).flashinfer()) == [[0], [], [], [0]]


def test_holes_are_listed_as_the_table_has_them_or_left_out():
    tables = windowed()
    assert lists(tables.flashinfer())[:3] == [[0, 5, 7], [6, 0, 0, 3, 9, 1, 2], [2, 3]]
    csr = tables.compacted().flashinfer()
    assert lists(csr)[:3] == [[0, 3, 5], [6, 3, 9, 1, 2], [2, 3]]
    assert csr.seq_lens.tolist() == [10, 7]
    assert [array.tolist() for array in csr.batch_indices_positions()] == [[0, 1, 1], [9, 5, 6]]


def test_flashinfer_buffers_are_written_in_their_leading_parts_only():
    out = FlashInferTables.buffers(4, 9)
    for array in (out.indptr, out.indices, out.last_page_len, out.qo_indptr):
        array[:] = 99
    tables = batch([[4, 7], [5]], [6, 3], query=[1, 3])
    written = tables.flashinfer(out=out)
    assert lists(written) == lists(tables.flashinfer())
    assert written.page_size == 4
    assert [out.indptr[3:].tolist(), out.indices[3:].tolist(), out.last_page_len[2:].tolist()] == [
        [99] * n for n in (2, 6, 2)
    ]
    for name in ("indptr", "indices", "last_page_len", "qo_indptr"):
        assert np.shares_memory(getattr(written, name), getattr(out, name))


def test_flashinfer_buffers_that_are_too_small_are_refused_and_not_written():
    out = FlashInferTables.buffers(2, 2)
    with pytest.raises(ArgumentError, match=r"flashinfer: out.indices has shape \(2,\), this batch needs \(3,\)"):
        batch([[4, 7], [5]], [6, 3]).flashinfer(out=out)
    assert out.indptr.tolist() == [0, 0, 0]


# -- TensorRT-LLM -----------------------------------------------------------------------------------------------------


def four_beams():
    """Four beams of 575 tokens in blocks of 64: 8 blocks shared, one each."""
    manager = small(block_size=64, num_blocks=128, max_sequence_length=640)
    beams = manager.add_sequence(list(range(575)), num_beams=4).beams
    manager.commit([beams[0]])
    return manager.tables(beams, max_blocks=10)


def test_TRT8_offsets_of_four_layers_in_one_pool():
    offsets = four_beams().tensorrt(4)
    assert (offsets.shape, offsets.dtype) == ((1, 4, 2, 10), np.int32)
    for beam in range(4):
        blocks = [*range(8), 8 + beam]
        assert offsets[0, beam, 0].tolist() == [8 * block for block in blocks] + [FILL]
        assert offsets[0, beam, 1].tolist() == [8 * block + 1 for block in blocks] + [FILL]


def test_TRT9_offsets_of_pools_by_number_of_heads():
    offsets = four_beams().tensorrt([1, 2, 1])
    assert offsets.shape == (3, 4, 2, 10)
    for pool, stride in enumerate((2, 4, 2)):
        for beam in range(4):
            blocks = [*range(8), 8 + beam]
            assert offsets[pool, beam, 0].tolist() == [stride * block for block in blocks] + [FILL]
            assert offsets[pool, beam, 1].tolist() == [stride * block + 1 for block in blocks] + [FILL]
    assert [heads * 64 * 64 for heads in (1, 2, 3)] == [4096, 8192, 12288]


def test_block_5_of_four_layers_is_at_40_and_41():
    assert batch([[5]], [4]).tensorrt(4).tolist() == [[[[40], [41]]]]


def test_keys_only_pools_name_one_block_in_both_rows():
    assert batch([[5, 2]], [8]).tensorrt(PoolOffsets.keys_only(4)).tolist() == [[[[20, 8], [20, 8]]]]


def test_pools_that_keep_all_keys_before_all_values():
    assert batch([[5, 2]], [8]).tensorrt(PoolOffsets.split(10)).tolist() == [[[[5, 2], [15, 12]]]]
    both = batch([[5]], [4]).tensorrt([PoolOffsets.split(10), 3])
    assert both.tolist() == [[[[5], [15]]], [[[30], [31]]]]


def test_holes_and_padding_have_the_fill_value():
    assert windowed().tensorrt(1)[0, :, 0].tolist() == [[12, FILL, FILL, 6, 18], [2, 4, FILL, FILL, FILL]]
    assert windowed().tensorrt(1, fill=-1)[0, :, 1].tolist() == [[13, -1, -1, 7, 19], [3, 5, -1, -1, -1]]
    with pytest.raises(ArgumentError, match="fill is 2147483648, must be an int32"):
        windowed().tensorrt(1, fill=2**31)


def test_the_sign_bit_says_that_a_block_is_in_the_secondary_pool():
    offsets = batch([[5, 3], [7]], [8, 4]).tensorrt(4, secondary=np.array([[False, True], [True, True]]))
    assert offsets[0, 0].tolist() == [[40, 24 - 2**31], [41, 25 - 2**31]]
    assert offsets[0, 1, 0].tolist() == [56 - 2**31, FILL]
    places, secondary = split_offsets(offsets)
    assert places[0, 0].tolist() == [[40, 24], [41, 25]]
    assert secondary[0, :, 0].tolist() == [[False, True], [True, False]]
    assert places.dtype == np.int32


@pytest.mark.parametrize(
    ("options", "error", "part"),
    [
        ({"pools": [4, -1]}, ArgumentError, "tensorrt: the number of layers of a pool is -1, must not be negative"),
        ({"pools": [True]}, ArgumentTypeError, "is True, must be an int"),
        ({"pools": "4"}, ArgumentTypeError, "is '4', must be an int"),
        ({"pools": 4.0}, ArgumentTypeError, "is 4.0, must be an int"),
        ({"pools": 4, "secondary": np.array([True])}, ArgumentError, r"secondary has shape \(1,\), must be \(1, 2\)"),
        ({"pools": 4, "out": np.zeros((1, 1, 2, 1), np.int32)}, ArgumentError, r"this batch needs \(1, 1, 2, 2\)"),
        ({"pools": 4, "out": np.zeros((1, 1, 2, 2), np.int64)}, ArgumentTypeError, "tensorrt: out is int64"),
        ({"pools": 4, "out": [[0]]}, ArgumentTypeError, "tensorrt: out is a list, must be a NumPy array"),
    ],
    ids=label,
)
def test_offsets_that_cannot_be_made_are_refused(options, error, part):
    with pytest.raises(error, match=part):
        batch([[5, 3]], [8]).tensorrt(**options)


def test_offsets_end_before_the_fill_value():
    tables = batch([[2**28 - 1]], [4])
    assert tables.tensorrt(PoolOffsets(8, 5))[0, 0, :, 0].tolist() == [2**31 - 8, 2**31 - 3]
    with pytest.raises(LayoutError, match=r"puts block 268435455 at 2147483647, more than the 2147483646"):
        tables.tensorrt(PoolOffsets(8, 7))
    with pytest.raises(LayoutError, match="puts block 268435456 at 2147483649"):
        batch([[2**28]], [4]).tensorrt(4)


# -- Edge-LLM ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_blocks", [12, 17])
def test_E5_the_identity_page_table(num_blocks):
    table = batch([[4 * row + page for page in range(4)] for row in range(3)], [16] * 3).edge(num_blocks)
    assert (table.shape, table.dtype) == ((3, 2, 4), np.int32)
    for row in range(3):
        assert table[row, 0].tolist() == [4 * row + page for page in range(4)]
        assert table[row, 1].tolist() == [4 * row + page + num_blocks for page in range(4)]


def test_E5_a_row_of_two_pages():
    table = batch([[0, 1, 2, 4], [3, 7]], [16, 8]).edge(10)
    assert table[1].tolist() == [[3, 7, -1, -1], [13, 17, -1, -1]]


def test_E8_rows_that_go_on_keep_their_pages_and_lengths():
    manager = small(block_size=4, num_blocks=20)
    sequences = [manager.add_sequence([7 + row] * length) for row, length in enumerate((11, 12, 13, 14))]
    before = manager.tables(sequences).edge(20)
    for ended in (0, 2):
        manager.free(sequences[ended])
    after = manager.tables([sequences[1], sequences[3]])
    assert after.seq_lens.tolist() == [12, 14]
    assert after.edge(20).tolist() == before[[1, 3]].tolist()


@pytest.mark.parametrize("order", [1, -1])
def test_E11_tokens_are_written_across_the_edge_of_a_page(order):
    manager = small(block_size=128, num_blocks=4, max_sequence_length=256)
    sequences = [manager.add_sequence([row] * length) for row, length in ((1, 126), (2, 50))]
    manager.commit(sequences)
    sequences = sequences[::order]
    manager.append(sequences, [np.arange(6)] * 2)
    tables = manager.tables(sequences)
    ids = {126: [0, 2], 50: [1]}
    slots = {start: [ids[start][at // 128] * 128 + at % 128 for at in range(start, start + 6)] for start in ids}
    assert tables.slot_mapping.tolist() == [slot for start in (126, 50)[::order] for slot in slots[start]]
    assert tables.start_lens.tolist() == [126, 50][::order]
    assert tables.edge(4)[:, 0].tolist() == [[0, 2], [1, -1]][::order]


def test_edge_tables_are_written_into_buffers_at_a_fixed_address():
    out = np.full((4, 2, 6), 99, np.int32)
    table = windowed().edge(10, out=out)
    assert np.shares_memory(table, out)
    assert table.tolist() == windowed().edge(10).tolist()
    assert table[0].tolist() == [[6, -1, -1, 3, 9], [16, -1, -1, 13, 19]]
    assert (out[2:] == 99).all()
    assert (out[:, :, 5:] == 99).all()
    out.flags.writeable = False
    with pytest.raises(ArgumentError, match="edge: out is read-only"):
        windowed().edge(10, out=out)


def test_a_pool_smaller_than_its_blocks_or_larger_than_int32_is_refused():
    tables = batch([[4, 7], [5]], [6, 3])
    for pool in (tables.edge, tables.flex):
        with pytest.raises(ArgumentError, match="num_blocks is 7, row 0 of the batch has block 7"):
            pool(7)
        for wrong in (-1, 8.0, True, None):
            with pytest.raises(ArgumentError, match=f"num_blocks is {wrong}, must "):
                pool(wrong)
    assert tables.edge(2**30 - 1)[0, 1].tolist() == [4 + 2**30 - 1, 7 + 2**30 - 1]
    with pytest.raises(ArgumentError, match="num_blocks is 1073741824, int32 has V ids for 1073741823"):
        tables.edge(2**30)


# -- FlexAttention ----------------------------------------------------------------------------------------------------


def test_flex_tables_and_their_inverse():
    tables = batch([[4, 1], [5, 2, 0]], [7, 4]).flex(6)
    assert tables.page_table.tolist() == [[4, 1, -1, -1, -1, -1], [5, 2, 0, -1, -1, -1]]
    assert tables.physical_to_logical.tolist() == [[-1, 1, -1, -1, 0, -1], [2, -1, 1, -1, -1, 0]]
    assert tables.kv_num_blocks.tolist() == [2, 1]
    assert tables.kv_indices.tolist() == [[4, 1, 0, 0, 0, 0], [5, 0, 0, 0, 0, 0]]
    names = ("page_table", "physical_to_logical", "kv_num_blocks", "kv_indices")
    assert [getattr(tables, name).dtype for name in names] == [np.int64, np.int64, np.int32, np.int32]


def test_flex_reads_no_holes_and_no_reserved_pages():
    tables = windowed().flex(10)
    assert tables.page_table[0].tolist() == [6, -1, -1, 3, 9, -1, -1, -1, -1, -1]
    assert tables.physical_to_logical[0].tolist() == [-1, -1, -1, 3, -1, -1, 0, -1, -1, 4]
    assert tables.kv_indices[0, :3].tolist() == [6, 3, 9]
    assert tables.kv_num_blocks.tolist() == [3, 2]


def test_a_flex_page_table_is_wider_where_pages_outnumber_blocks():
    span = Span("sliding", block_size=4, window=4)
    tables = batch([[None] * 5 + [2, 0]], [26], span=span, first=[5]).flex(3)
    assert tables.page_table.tolist() == [[-1, -1, -1, -1, -1, 2, 0]]
    assert tables.physical_to_logical.tolist() == [[6, -1, 5]]
    assert tables.kv_indices.tolist() == [[2, 0, 0]]


def test_flex_buffers_are_written_whatever_was_there():
    tables, out = batch([[4, 1], [5]], [7, 4]), FlexTables.buffers(3, 6)
    for array in (out.page_table, out.physical_to_logical, out.kv_num_blocks, out.kv_indices):
        array[:] = 99
    written, fresh = tables.flex(6, out=out), tables.flex(6)
    for name in ("page_table", "physical_to_logical", "kv_num_blocks", "kv_indices"):
        assert getattr(written, name).tolist() == getattr(fresh, name).tolist()
        assert np.shares_memory(getattr(written, name), getattr(out, name))
        assert (getattr(out, name)[2:] == 99).all()
    with pytest.raises(ArgumentError, match=r"flex: out.page_table has shape \(3, 6\), this batch needs \(2, 7\)"):
        tables.flex(7, out=out)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_over_the_pool_equals_attention_over_the_tokens():
    torch = pytest.importorskip("torch")
    flex = pytest.importorskip("torch.nn.attention.flex_attention")
    page_size, num_blocks, lengths, blocks = 16, 6, [20, 7], [[4, 1], [5]]
    tables = batch(blocks, lengths, block_size=page_size).flex(num_blocks)
    logical_pages, lens = torch.from_numpy(tables.physical_to_logical), torch.tensor(lengths)
    generator = torch.Generator().manual_seed(5)
    pool = torch.randn(2, num_blocks, page_size, 2, 8, generator=generator)
    queries = torch.randn(2, 2, 1, 8, generator=generator)

    def mask(b, h, q, kv):
        page = logical_pages[b, kv // page_size]
        return (page >= 0) & (page * page_size + kv % page_size < lens[b])

    block_mask = flex.BlockMask.from_kv_blocks(
        torch.from_numpy(tables.kv_num_blocks)[:, None, None],
        torch.from_numpy(tables.kv_indices)[:, None, None],
        BLOCK_SIZE=(1, page_size),
        mask_mod=mask,
        seq_lengths=(1, num_blocks * page_size),
    )
    keys, values = (plane.flatten(0, 1).transpose(0, 1)[None].expand(2, -1, -1, -1) for plane in pool)
    paged = flex.flex_attention(queries, keys, values, block_mask=block_mask)
    for row, length in enumerate(lengths):
        slots = [blocks[row][at // page_size] * page_size + at % page_size for at in range(length)]
        scores = queries[row] @ keys[row][:, slots].mT / 8**0.5
        torch.testing.assert_close(paged[row], scores.softmax(-1) @ values[row][:, slots])


# -- pages of other sizes ---------------------------------------------------------------------------------------------


def test_a_finer_page_is_a_part_of_its_block():
    tables = batch([[3, 5], [2]], [7, 4], block_size=4, padding=-1).refined(2)
    assert tables.block_table.tolist() == [[6, 7, 10, 11], [4, 5, -1, -1]]
    assert tables.block_table.dtype == np.int32
    assert tables.block_size == 2
    assert lists(tables.flashinfer())[:3] == [[0, 4, 6], [6, 7, 10, 11, 4, 5], [1, 2]]
    assert tables.edge(12)[1].tolist() == [[4, 5, -1, -1], [16, 17, -1, -1]]


def test_pages_of_one_token_are_slots():
    tables = batch([[3, 5]], [7])
    assert tables.refined(1).block_table.tolist() == [[12, 13, 14, 15, 20, 21, 22, 23]]
    assert tables.refined(1).flashinfer().indices.tolist() == tables.token_rows().tolist()


def test_finer_pages_have_the_holes_of_their_blocks():
    tables = windowed(padding=-1).refined(2)
    assert tables.block_table[0].tolist() == [12, 13, 0, 0, 0, 0, 6, 7, 18, 19]
    assert tables.block_table[1].tolist() == [2, 3, 4, 5, -1, -1, -1, -1, -1, -1]
    assert tables.held.tolist() == windowed().held.repeat(2, axis=1).tolist()
    assert tables.compacted().block_table.tolist() == [[12, 13, 6, 7, 18, 19], [2, 3, 4, 5, -1, -1]]


def test_a_coarser_page_is_a_run_of_blocks():
    tables = batch([[4, 5, 6, 7], [2, 3, 8]], [16, 9], block_size=4, padding=-1)
    assert tables.coarsened(8).block_table.tolist() == [[2, 3], [1, 4]]
    assert tables.coarsened(8).block_size == 8
    assert lists(tables.coarsened(8).flashinfer())[:3] == [[0, 2, 4], [2, 3, 1, 4], [8, 1]]
    assert batch([[4, 5, 6, 7]], [16]).coarsened(16).edge(3).tolist() == [[[1], [4]]]


def test_rows_that_are_one_page_are_slots_of_a_pool_read_as_sequences():
    manager = small(block_size=4, num_blocks=12, max_sequence_length=16)
    sequences = [manager.add_sequence([row] * 16) for row in range(3)]
    assert manager.tables(sequences[::-1]).coarsened(16).block_table.tolist() == [[2], [1], [0]]


def test_runs_that_do_not_fit_are_refused_with_what_does():
    tables = batch([[0, 1, 2, 3], [4, 5, 8, 9]], [16, 16])
    with pytest.raises(LayoutError) as caught:
        tables.coarsened(16)
    assert str(caught.value) == (
        "coarsened: pages of 16 tokens need 4 neighbouring blocks, the first at a multiple of 4; row 1 has "
        "[4, 5, 8, 9] from column 0 on, where column 2 does not fit; pages of 4 or 8 tokens work"
    )
    assert tables.coarsened(8).block_table.tolist() == [[0, 1], [2, 4]]


@pytest.mark.parametrize(
    ("blocks", "part"),
    [
        ([[1, 2]], r"row 0 has \[1, 2\] from column 0 on, where column 0 does not fit"),
        ([[5, 4]], r"row 0 has \[5, 4\] from column 0 on, where column 0 does not fit"),
        ([[4, 6]], r"row 0 has \[4, 6\] from column 0 on, where column 1 does not fit"),
        ([[4, 5, 7]], r"row 0 has \[7\] from column 2 on, where column 2 does not fit"),
    ],
)
def test_blocks_out_of_place_are_named(blocks, part):
    with pytest.raises(LayoutError, match=part + "; pages of 4 tokens work"):
        batch(blocks, [4 * len(blocks[0])]).coarsened(8)


def test_a_coarser_page_needs_only_the_blocks_that_are_held():
    span = Span("sliding", block_size=4, window=6)
    tables = batch([[None, None, None, 7, 2], [4, 5]], [18, 8], span=span, first=[3, 0], padding=-1).coarsened(8)
    assert tables.block_table.tolist() == [[0, 3, 1], [2, -1, -1]]
    assert tables.held.tolist() == [[False, True, True], [True, False, False]]
    assert tables.compacted().block_table.tolist() == [[3, 1], [2, -1]]
    assert tables.compacted().seq_lens.tolist() == [10, 8]


def test_sizes_that_do_not_divide_are_refused():
    tables = batch([[4, 5]], [8])
    for size in (3, 8, 0):
        with pytest.raises(LayoutError, match=f"a block of 4 tokens has no pages of {size}; divisors work"):
            tables.refined(size)
    for size in (2, 6, 0):
        with pytest.raises(LayoutError, match=f"blocks of 4 tokens make no pages of {size}; multiples work"):
            tables.coarsened(size)
    for call in (tables.refined, tables.coarsened):
        for size in (-4, 4.0, None):
            with pytest.raises(ArgumentError, match=f"page_size is {size}, must "):
                call(size)
    assert tables.refined(4).block_table.tolist() == tables.coarsened(4).block_table.tolist() == [[4, 5]]


def test_page_numbers_past_int32_are_refused():
    tables = batch([[2**29]], [4])
    assert tables.refined(2).block_table.tolist() == [[2**30, 2**30 + 1]]
    with pytest.raises(LayoutError, match="4 pages a block put the last of block 536870912 at 2147483651"):
        tables.refined(1)


@pytest.mark.parametrize(("change", "shape"), [("refined", (2, 4)), ("coarsened", (2, 1)), ("compacted", (2, 2))])
def test_tables_of_other_pages_are_written_into_buffers(change, shape):
    tables, out = batch([[4, 5], [6]], [7, 4], padding=-1), np.full((3, 6), 99, np.int32)
    call = {
        "refined": lambda out: tables.refined(2, out=out),
        "coarsened": lambda out: tables.coarsened(8, out=out),
        "compacted": lambda out: tables.compacted(out=out),
    }[change]
    written = call(out).block_table
    assert np.shares_memory(written, out)
    assert written.shape == shape
    assert written.tolist() == call(None).block_table.tolist()
    assert (out == 99).sum() == 18 - written.size
    with pytest.raises(ArgumentError, match=f"{change}: out has shape"):
        call(np.zeros((1, 1), np.int32))


def test_tables_without_rows_or_columns_have_other_pages_too():
    for tables in (batch([], []), batch([[], []], [0, 0])):
        num = len(tables.seq_lens)
        assert tables.refined(2).block_table.shape == tables.coarsened(8).block_table.shape == (num, 0)
        assert tables.compacted().block_table.shape == (num, 0)
        assert tables.edge(4).shape == (num, 2, 0)
        assert tables.tensorrt(4).shape == (1, num, 2, 0)
        assert tables.flex(4).page_table.tolist() == [[-1] * 4] * num
        assert tables.token_rows().tolist() == []
        assert tables.flashinfer().indptr.tolist() == [0] * (num + 1)


# -- windows, rings, states -------------------------------------------------------------------------------------------


def test_a_table_without_holes_has_the_tokens_that_are_left():
    tables = windowed(padding=-1).compacted()
    assert tables.block_table.tolist() == [[6, 3, 9], [1, 2, -1]]
    assert tables.seq_lens.tolist() == [10, 7]
    assert tables.start_lens.tolist() == [9, 5]
    assert tables.held.tolist() == [[True] * 3, [True, True, False]]
    assert tables.compacted().block_table.tolist() == tables.block_table.tolist()
    assert tables.seq_lens.dtype == np.int32


def test_a_table_without_holes_has_no_blocks_that_the_window_has_passed():
    span = Span("sliding", block_size=4, window=6)
    tables = batch([[8, 5, 2, 7, 3], [4, 6, 1]], [18, 9], span=span, query=[3, 1], padding=-1)
    assert tables.held.tolist()[0] == [True] * 5
    left = tables.compacted()
    assert left.block_table.tolist() == [[2, 7, 3], [4, 6, 1]]
    assert (left.seq_lens.tolist(), left.start_lens.tolist()) == ([10, 9], [7, 8])
    assert tables.refined(2).compacted().block_table.tolist() == [[5, 14, 15, 6, 7], [9, 12, 13, 2, 3]]


def test_a_table_without_holes_keeps_the_chunk_of_the_first_query_token():
    span = Span("chunked", block_size=4, chunk_tokens=6)
    left = batch([[8, 5, 2]], [12], span=span, query=[1]).compacted()
    assert left.block_table.tolist() == left.compacted().block_table.tolist() == [[5, 2]]
    assert left.seq_lens.tolist() == left.compacted().seq_lens.tolist() == [8]


def test_token_rows_say_where_every_token_is():
    assert batch([[3, 5], [2]], [6, 1]).token_rows().tolist() == [12, 13, 14, 15, 20, 21, 8]
    rows = windowed().token_rows()
    assert rows.tolist()[:18] == [24, 25, 26, 27, *[-1] * 8, 12, 13, 14, 15, 36, 37]
    assert rows.dtype == np.int64
    assert windowed().compacted().token_rows().tolist() == [row for row in rows.tolist() if row >= 0]


def test_a_ring_is_in_order_until_its_bubble():
    tables = batch([[5]], [2], span=ring())
    assert lists(tables.flashinfer())[:3] == [[0, 1], [5], [2]]
    tables = batch([[5, 2, 7]], [3], span=ring())
    for call in (tables.flashinfer, lambda: tables.flex(8)):
        with pytest.raises(LayoutError, match="row 0 of the batch has 3 tokens, which a ring holds in order up to 2"):
            call()
    assert tables.edge(8).tolist() == [[[5, 2, 7], [13, 10, 15]]]
    assert tables.tensorrt(1)[0, 0, 0].tolist() == [10, 4, 14]


def test_a_ring_without_a_bubble_is_in_order_until_it_wraps():
    span = ring(window=12, sink_tokens=4)
    assert batch([[5, 2, 7]], [12], span=span).flashinfer().indices.tolist() == [5, 2, 7]
    with pytest.raises(LayoutError, match="has 13 tokens, which a ring holds in order up to 12"):
        batch([[5, 2, 7]], [13], span=span).flashinfer()


def test_token_rows_of_a_ring_are_those_of_the_tokens_that_are_left():
    tables = batch([[5, 2, 7]], [12], span=ring())
    assert tables.token_rows().tolist() == [20, 21, -1, -1, 10, 11, 28, 29, 30, 31, 8, 9]
    for size in (2, 1):
        assert tables.refined(size).token_rows().tolist() == tables.token_rows().tolist()


def test_states_are_not_pages_of_tokens():
    tables = batch([[3], [5]], [9, 2], span=Span("state", block_size=4))
    calls = {
        "flashinfer": tables.flashinfer,
        "tensorrt": lambda: tables.tensorrt(4),
        "edge": lambda: tables.edge(8),
        "flex": lambda: tables.flex(8),
        "refined": lambda: tables.refined(2),
        "coarsened": lambda: tables.coarsened(8),
        "compacted": tables.compacted,
        "token_rows": tables.token_rows,
    }
    for name, call in calls.items():
        with pytest.raises(LayoutError, match=f"{name}: a block of this group is the state of a sequence"):
            call()


def test_a_table_narrower_than_its_tokens_is_refused():
    with pytest.raises(LayoutError, match="row 1 of the batch has tokens in 3 pages, the block table has 2 columns"):
        batch([[4, 5], [6]], [8, 9]).flashinfer()


# -- every dialect reads the same tokens ------------------------------------------------------------------------------


def scattered(seed):
    """Sequences in runs of two blocks here and there in a pool of 64 blocks of 4 tokens, `pool` `[2, 64, 4]`.

    K of token t of row r is 100 * (r + 1) + t, V the negative; of windows, `tokens` are those of the blocks held.
    """
    random = np.random.default_rng(seed)
    runs = iter(random.permutation(32).tolist())
    spans = [Span("full", 4), *(Span("sliding", 4, window=8, num_sink_blocks=sinks) for sinks in (0, 1, 2))]
    span = spans[seed % 4]
    blocks, lengths, firsts, tokens = [], [], [], []
    pool = np.zeros((2, 64, 4), np.int64)
    for row in range(int(random.integers(1, 5))):
        ids = [2 * run + half for run in (next(runs) for _ in range(int(random.integers(1, 5)))) for half in (0, 1)]
        length = int(random.integers(1, 4 * len(ids) + 1))
        first = max(length - 8, 0) // 4 if span.slides else 0
        held = [block if at < span.num_sink_blocks or at >= first else None for at, block in enumerate(ids)]
        kept = [at for at in range(length) if held[at // 4] is not None]
        for at in kept:
            pool[:, held[at // 4], at % 4] = 100 * (row + 1) + at, -(100 * (row + 1) + at)
        for books, entry in ((blocks, held), (lengths, length), (firsts, first)):
            books.append(entry)
        tokens.append([100 * (row + 1) + at for at in kept])
    return batch(blocks, lengths, span=span, first=firsts, padding=(0, -1, FILL)[seed // 4 % 3]), pool, tokens


@pytest.mark.parametrize("page_size", [1, 2, 4, 8])
@pytest.mark.parametrize("seed", range(24))
def test_every_dialect_reads_the_same_tokens_in_pages_of_any_size(seed, page_size):
    tables, pool, expected = scattered(seed)
    tables = tables.refined(page_size) if page_size <= 4 else tables.coarsened(page_size)
    num_pages = 256 // page_size
    left, pool = tables.compacted(), pool.reshape(2, num_pages, page_size)
    csr, edge, offsets = left.flashinfer(), left.edge(num_pages), left.tensorrt([3, PoolOffsets.split(num_pages)])
    # Three layers in a pool [num_pages, 3, 2, page_size], and one with all K before all V.
    interleaved = np.repeat(pool.transpose(1, 0, 2)[:, None], 3, axis=1).reshape(-1, page_size)
    split = pool.reshape(-1, page_size)
    for row, tokens in enumerate(expected):

        def read(storage, pages, row=row):
            found = np.abs(storage[pages[(pages >= 0) & (pages != FILL)]].reshape(-1)[: left.seq_lens[row]])
            # A page of two blocks may begin or go on in one that fell out of span, and is another's now.
            return (found if page_size <= 4 else found[found // 100 == row + 1]).tolist()

        assert read(pool[0], csr.indices[csr.indptr[row] : csr.indptr[row + 1]]) == tokens
        assert read(split, edge[row, 0]) == read(split, edge[row, 1]) == tokens
        assert read(split, offsets[1, row, 0]) == read(split, offsets[1, row, 1]) == tokens
        for layer in range(3):
            places = np.where(offsets[0, row] == FILL, FILL, offsets[0, row] + 2 * layer)
            assert read(interleaved, places[0]) == read(interleaved, places[1]) == tokens


@pytest.mark.parametrize("page_size", [1, 2, 4, 8])
@pytest.mark.parametrize("seed", range(24))
def test_flex_tables_and_token_rows_find_every_token_at_its_position(seed, page_size):
    tables, pool, expected = scattered(seed)
    tables = tables.refined(page_size) if page_size <= 4 else tables.coarsened(page_size)
    flex, slots = tables.flex(256 // page_size), np.arange(256)
    for row, tokens in enumerate(expected):
        logical = flex.physical_to_logical[row, slots // page_size]
        position = np.where(logical >= 0, logical * page_size + slots % page_size, -1)
        found = {int(at): int(token) for at, token in zip(position, pool[0].reshape(-1), strict=True) if at >= 0}
        assert [found[token % 100] for token in tokens] == tokens
        listed = flex.kv_indices[row, : flex.kv_num_blocks[row]]
        assert set(pool[0].reshape(-1, page_size)[listed].reshape(-1).tolist()) >= set(tokens)
        at = np.unique(np.array(tokens) % 100 // page_size)
        assert flex.page_table[row, at].tolist() == listed.tolist()
    rows = tables.token_rows()
    found = np.where(rows >= 0, pool[0].reshape(-1)[rows], 0)
    owners = np.repeat(np.arange(len(expected)) + 1, tables.seq_lens)
    assert found[found // 100 == owners].tolist() == [token for tokens in expected for token in tokens]
