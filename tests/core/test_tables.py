import numpy as np
import pytest
from tests.core.small import computed, ids, label, refused, small

from kvist import ArgumentError, ArgumentTypeError, BatchTables, SequenceError


def three(manager):
    """Rows 0, 1, 2: 3 of 5, 0 of 1 and 2 of 2 tokens computed; blocks [0, 1, 2], [3], [4]."""
    sequences = [manager.add_sequence(tokens) for tokens in ([1, 2, 3, 4, 5], [6], [7, 8])]
    manager.commit(sequences, [3, 0, 2])
    return sequences


def lists(tables):
    return [
        getattr(tables, name).tolist()
        for name in ("block_table", "slot_mapping", "seq_lens", "cu_seqlens", "query_lens")
    ]


# -- what they say ----------------------------------------------------------------------------------------------------


def test_a_batch_of_prefills_and_decodes_in_numbers():
    manager = small()
    tables = manager.tables(three(manager))
    assert tables.block_table.tolist() == [[0, 1, 2], [3, 0, 0], [4, 0, 0]]
    assert tables.slot_mapping.tolist() == [3, 4, 6]
    assert tables.seq_lens.tolist() == [5, 1, 2]
    assert tables.cu_seqlens.tolist() == [0, 2, 3, 3]
    assert tables.query_lens.tolist() == [2, 1, 0]


def test_dtypes_are_those_that_kernels_read():
    manager = small()
    for out in (None, BatchTables.buffers(3, 4, 8)):
        tables = manager.tables(three(small()) and [manager.add_sequence([1, 2, 3])], out=out)
        dtypes = [tables.block_table.dtype, tables.slot_mapping.dtype, tables.seq_lens.dtype, tables.cu_seqlens.dtype]
        assert dtypes == [np.int32, np.int64, np.int32, np.int32]
        assert tables.query_lens.dtype == np.int32


def test_sequences_come_in_the_order_they_are_named_in():
    manager = small()
    first, second, third = three(manager)
    by_name = manager.tables([third, first, second])
    assert by_name.block_table.tolist() == [[4, 0, 0], [0, 1, 2], [3, 0, 0]]
    assert by_name.slot_mapping.tolist() == [3, 4, 6]
    assert by_name.cu_seqlens.tolist() == [0, 0, 2, 3]
    assert lists(manager.tables(np.array([2, 0, 1]))) == lists(by_name)


def test_slots_go_from_block_to_block():
    manager = small(block_size=4)
    manager.add_sequence([9])
    sequence = manager.add_sequence([1, 2, 3, 4, 5, 6])
    assert manager.tables([sequence]).slot_mapping.tolist() == [4, 5, 6, 7, 8, 9]


def test_a_decode_step_has_one_slot_each():
    manager = small()
    sequences = [computed(manager, tokens) for tokens in ([1], [2, 3], [4, 5, 6])]
    manager.append(sequences, [7, 8, 9])
    tables = manager.tables(sequences)
    assert [ids(sequence) for sequence in sequences] == [[0], [1, 4], [2, 3]]
    assert tables.slot_mapping.tolist() == [1, 8, 7]
    assert tables.seq_lens.tolist() == [2, 3, 4]


def test_a_chunk_of_a_prefill_is_so_many_query_tokens():
    manager = small()
    sequences = three(manager)
    tables = manager.tables(sequences, [1, 1, 0])
    assert (tables.slot_mapping.tolist(), tables.seq_lens.tolist()) == ([3, 6], [4, 1, 2])
    tables = manager.tables(sequences[:2], 1)
    assert (tables.slot_mapping.tolist(), tables.seq_lens.tolist()) == ([3, 6], [4, 1])
    tables = manager.tables(sequences, 0)
    assert (tables.slot_mapping.tolist(), tables.seq_lens.tolist()) == ([], [3, 0, 2])
    tables = manager.tables(sequences, np.array([2, 0, 0], np.uint8))
    assert tables.slot_mapping.tolist() == [3, 4]


def test_query_tokens_may_reach_into_reserved_capacity():
    manager = small()
    sequence = computed(manager, [1, 2, 3])
    manager.reserve([sequence], 3)
    tables = manager.tables([sequence], 3)
    assert (tables.slot_mapping.tolist(), tables.seq_lens.tolist()) == ([3, 4, 5], [6])


def test_no_sequences_make_empty_tables():
    manager = small()
    for named in ([], np.array([], np.int64)):
        tables = manager.tables(named)
        assert tables.block_table.shape == (0, 0)
        assert lists(tables) == [[], [], [], [0], []]
    assert manager.tables([], max_blocks=3).block_table.shape == (0, 3)


# -- width and padding ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("padding", [-1, 7, 2**31 - 1, -(2**31)])
def test_entries_past_a_sequences_blocks_are_padding(padding):
    manager = small()
    tables = manager.tables(three(manager), padding=padding)
    assert tables.block_table.tolist() == [[0, 1, 2], [3, padding, padding], [4, padding, padding]]


@pytest.mark.parametrize("padding", [0, -1])
@pytest.mark.parametrize("width", [3, 5, 32, 40])
def test_a_table_is_as_wide_as_asked_for_even_beyond_the_longest_sequence(padding, width):
    manager = small()
    sequences = three(manager)
    for named in (sequences, sequences[::-1]):
        table = manager.tables(named, padding=padding, max_blocks=width).block_table
        assert table.shape == (3, width)
        for sequence, row in zip(named, table.tolist(), strict=True):
            assert row == ids(sequence) + [padding] * (width - sequence.num_blocks)


def test_the_width_is_that_of_the_longest_sequence_reserved_blocks_included():
    manager = small()
    sequences = three(manager)
    assert manager.tables(sequences[1:]).block_table.shape == (2, 1)
    manager.reserve(sequences[1:2], 5)
    assert manager.tables(sequences[1:]).block_table.shape == (2, 3)


# -- views and buffers ------------------------------------------------------------------------------------------------


def test_neighbouring_rows_are_a_view_that_shows_later_changes_and_cannot_be_written():
    manager = small()
    sequences = three(manager)
    table = manager.tables(sequences[:2]).block_table
    assert np.shares_memory(table, manager._state.rows.block_table)
    manager.append([sequences[1]], [[1, 2]])
    assert table.tolist() == [[0, 1, 2], [3, 5, 0]]
    with pytest.raises(ValueError, match="read-only"):
        table[0, 0] = 7


@pytest.mark.parametrize("how", ["order", "gap", "padding", "width"])
def test_else_a_table_is_the_callers_own(how):
    manager = small()
    first, second, third = three(manager)
    tables = {
        "order": lambda: manager.tables([second, first]),
        "gap": lambda: manager.tables([first, third]),
        "padding": lambda: manager.tables([first, second], padding=-1),
        "width": lambda: manager.tables([first, second], max_blocks=50),
    }[how]()
    assert not np.shares_memory(tables.block_table, manager._state.rows.block_table)
    tables.block_table[:] = 7
    tables.seq_lens[:] = 7
    manager.check()


@pytest.mark.parametrize("padding", [0, -1])
@pytest.mark.parametrize("width", [None, 4])
def test_buffers_hold_the_same_as_fresh_arrays(padding, width):
    manager = small()
    sequences = three(manager)
    out = BatchTables.buffers(5, 6, 9)
    for array in (out.block_table, out.slot_mapping, out.seq_lens, out.cu_seqlens):
        array[:] = 99
    for named in (sequences, sequences[::2], sequences[:1], sequences[::-1], []):
        tables = manager.tables(named, padding=padding, max_blocks=width, out=out)
        fresh = manager.tables(named, padding=padding, max_blocks=width or 6)
        assert lists(tables) == lists(fresh)
        assert tables.block_table.shape == (len(named), width or 6)
        for name in ("block_table", "slot_mapping", "seq_lens", "cu_seqlens"):
            part = getattr(tables, name)
            assert not part.size or np.shares_memory(part, getattr(out, name))


def test_buffers_are_written_in_their_leading_parts_only():
    manager = small()
    out = BatchTables.buffers(5, 6, 9)
    out.block_table[:] = out.seq_lens[:] = out.slot_mapping[:] = out.cu_seqlens[:] = 99
    manager.tables(three(manager), max_blocks=3, out=out)
    assert (out.block_table[3:] == 99).all()
    assert (out.block_table[:, 3:] == 99).all()
    assert (out.seq_lens[3:] == 99).all()
    assert (out.slot_mapping[3:] == 99).all()
    assert (out.cu_seqlens[4:] == 99).all()


def buffers(**changed):
    arrays = {
        "block_table": np.full((4, 4), 99, np.int32),
        "slot_mapping": np.full(8, 99, np.int64),
        "seq_lens": np.full(4, 99, np.int32),
        "cu_seqlens": np.full(5, 99, np.int32),
    }
    return BatchTables(**(arrays | changed))


@pytest.mark.parametrize(
    ("changed", "error", "part"),
    [
        ({"block_table": np.full((2, 4), 99, np.int32)}, ArgumentError, "out.block_table has shape (2, 4)"),
        ({"block_table": np.full((4, 2), 99, np.int32)}, ArgumentError, "block"),
        (
            {"slot_mapping": np.full(2, 99, np.int64)},
            ArgumentError,
            "out.slot_mapping has shape (2,), this batch needs (3,)",
        ),
        ({"seq_lens": np.full(2, 99, np.int32)}, ArgumentError, "out.seq_lens has shape (2,), this batch needs (3,)"),
        (
            {"cu_seqlens": np.full(3, 99, np.int32)},
            ArgumentError,
            "out.cu_seqlens has shape (3,), this batch needs (4,)",
        ),
        ({"block_table": np.full((4, 4), 99, np.int64)}, ArgumentTypeError, "out.block_table is int64"),
        ({"slot_mapping": np.full(8, 99, np.int32)}, ArgumentTypeError, "out.slot_mapping is int32"),
        ({"seq_lens": np.full(4, 99, np.float32)}, ArgumentTypeError, "out.seq_lens is float32"),
        ({"block_table": np.full(16, 99, np.int32)}, ArgumentTypeError, "must be int32 with 2 dimensions"),
        ({"cu_seqlens": np.full((5, 1), 99, np.int32)}, ArgumentTypeError, "must be int32 with 1 dimensions"),
    ],
    ids=label,
)
def test_buffers_that_do_not_suit_are_refused_and_not_written(changed, error, part):
    manager = small()
    sequences, out = three(manager), buffers(**changed)
    with refused(manager, error, "tables: ", part):
        manager.tables(sequences, out=out)
    for array in (out.block_table, out.slot_mapping, out.seq_lens, out.cu_seqlens):
        assert (array == 99).all()


def test_a_buffer_narrower_than_a_sequence_is_refused_whatever_width_is_asked_for():
    manager = small()
    sequences = three(manager)
    for width in (None, 3, 4):
        with refused(manager, ArgumentError, "block"):
            manager.tables(sequences, max_blocks=width, out=BatchTables.buffers(3, 2, 8))
    assert manager.tables(sequences[1:], out=BatchTables.buffers(3, 2, 8)).block_table.tolist() == [[3, 0], [4, 0]]


# -- refused ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("query", "error", "part", "other"),
    [
        ([4, 0, 0], SequenceError, "row 0 cannot have 4 query tokens: 3 of its 5 tokens are computed", "for 6"),
        ([0, 0, 1], SequenceError, "row 2 cannot have 1 query tokens", "for 2"),
        (-1, (SequenceError, ArgumentError), "-1", ""),
        ([1, 1], ArgumentError, "num_query_tokens has shape (2,), must be one int or one for each of 3 sequences", ""),
        ([[1, 1, 0]], ArgumentError, "num_query_tokens has shape (1, 3)", ""),
        (1.0, ArgumentTypeError, "num_query_tokens must hold ints, not float64", ""),
        (True, ArgumentTypeError, "num_query_tokens must hold ints, not bool", ""),
        ("1", ArgumentTypeError, "num_query_tokens must hold ints", ""),
        ([[1], [1, 2], [1]], ArgumentError, "num_query_tokens", ""),
        (2**63 - 1, SequenceError, "row 0 cannot have", ""),
        ([0, 0, 2**63 - 1], SequenceError, "row 2 cannot have", ""),
        (2**64 - 1, (SequenceError, ArgumentError), "", ""),
        (2**64, (SequenceError, ArgumentError), "", ""),
    ],
    ids=label,
)
def test_query_tokens_that_cannot_be_are_refused(query, error, part, other):
    manager = small()
    sequences = three(manager)
    with refused(manager, error, part, other):
        manager.tables(sequences, query)


def test_query_tokens_end_at_max_sequence_length_though_the_last_block_goes_on():
    manager = small(block_size=4, max_sequence_length=6)
    sequence = computed(manager, [1, 2, 3, 4, 5])
    assert manager.tables([sequence], 1).slot_mapping.tolist() == [5]
    with refused(manager, SequenceError, "row 0 cannot have 2 query tokens", "for 6"):
        manager.tables([sequence], 2)


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ({"padding": 0.5}, "padding is 0.5"),
        ({"padding": None}, "padding is None"),
        ({"padding": "a"}, "padding is 'a'"),
        ({"padding": 2**31}, "padding is 2147483648"),
        ({"max_blocks": 2}, "max_blocks is 2, a sequence has 3 blocks"),
        ({"max_blocks": -1}, "max_blocks is -1"),
        ({"max_blocks": 3.5}, "max_blocks is 3.5"),
        ({"max_blocks": "3"}, "max_blocks is '3'"),
        ({"out": 3}, "out is a int"),
        ({"out": np.zeros((3, 4), np.int32)}, "out is a ndarray"),
    ],
    ids=label,
)
def test_options_that_cannot_be_are_refused(options, part):
    manager = small()
    sequences = three(manager)
    with refused(manager, ArgumentError, part):
        manager.tables(sequences, **options)
