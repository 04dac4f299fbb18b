from types import SimpleNamespace

import numpy as np
import pytest
from tests.core.small import computed, ids, label, refused, small

from kvist import (
    ArgumentError,
    ArgumentTypeError,
    AttentionSpec,
    BatchTables,
    CacheConfig,
    KVCacheManager,
    SequenceError,
    StateSpec,
)
from kvist.core.groups import RingGeometry, Span
from kvist.memory.tables import build_tables


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


# -- groups -----------------------------------------------------------------------------------------------------------


def group_rows(span, block_table, num_tokens, num_computed, *, firsts=None, ends=None, num_encoder_tokens=()):
    """The manager's arrays with full attention as group 0 and a group of this span and table, holes 0, as group 1."""
    table = np.array(block_table, np.int32)
    num_rows, num_columns = table.shape
    num_blocks = -(-np.array(num_tokens) // span.block_size)
    return SimpleNamespace(
        spans=[Span("full", span.block_size), span],
        block_table=np.stack([np.arange(70, 70 + table.size, dtype=np.int32).reshape(table.shape), table]),
        firsts=np.array([[0] * num_rows, firsts or [0] * num_rows]),
        ends=np.array([num_blocks, num_blocks if ends is None else ends]),
        num_tokens=np.array(num_tokens),
        num_computed=np.array(num_computed),
        num_blocks=num_blocks,
        block_size=span.block_size,
        max_tokens=num_columns * span.block_size,
        capacity=lambda row: int(num_blocks[row]) * span.block_size,
        sequence_at=lambda row: SimpleNamespace(num_encoder_tokens=num_encoder_tokens[row]),
    )


def group_tables(rows, batch=None, query=None, **options):
    """The tables of group 1."""
    named = np.arange(len(rows.num_tokens)) if batch is None else np.array(batch)
    query = None if query is None else np.array(query)
    return build_tables(rows, named, query, **{"group": 1} | options)


def windowed(num_sink_blocks=0):
    """Windows of 8 over blocks of 4: 17 of 18 tokens computed, blocks 0 to 1 gone; and 5 of 6 computed, none gone."""
    span = Span("sliding", block_size=4, window=8, num_sink_blocks=num_sink_blocks)
    first = [6 if num_sink_blocks else 0, 0, 2, 3, 9]
    return group_rows(span, [first, [4, 1, 0, 0, 0]], [18, 6], [17, 5], firsts=[2, 0])


def test_a_group_has_its_own_table_and_slots():
    rows = windowed()
    full, sliding = group_tables(rows, group=0), group_tables(rows)
    assert full.block_table.tolist() == [[70, 71, 72, 73, 74], [75, 76, 77, 78, 79]]
    assert sliding.block_table.tolist() == [[0, 0, 2, 3, 9], [4, 1, 0, 0, 0]]
    assert (full.slot_mapping.tolist(), sliding.slot_mapping.tolist()) == ([74 * 4 + 1, 76 * 4 + 1], [37, 5])
    assert full.seq_lens.tolist() == sliding.seq_lens.tolist() == [18, 6]
    assert full.cu_seqlens.tolist() == sliding.cu_seqlens.tolist() == [0, 1, 2]


def test_a_groups_table_of_neighbouring_rows_is_a_view():
    rows = windowed()
    tables = group_tables(rows)
    assert np.shares_memory(tables.block_table, rows.block_table)
    assert not tables.block_table.flags.writeable
    assert tables.held.tolist() == [[False, False, True, True, True], [True, True, False, False, False]]


@pytest.mark.parametrize("num_sink_blocks", [0, 1])
def test_holes_and_padding_have_the_numbers_that_are_asked_for(num_sink_blocks):
    rows, sink = windowed(num_sink_blocks), 6 if num_sink_blocks else None

    def table(**options):
        return group_tables(rows, **options).block_table.tolist()

    def first(hole):
        return [hole if sink is None else sink, hole, 2, 3, 9]

    assert table() == [first(0), [4, 1, 0, 0, 0]]
    assert table(padding=-1) == [first(-1), [4, 1, -1, -1, -1]]
    assert table(holes=-7) == [first(-7), [4, 1, 0, 0, 0]]
    assert table(padding=-1, holes=0) == [first(0), [4, 1, -1, -1, -1]]
    assert table(padding=-1, holes=5, batch=[1, 0], max_blocks=7) == [
        [4, 1, -1, -1, -1, -1, -1],
        [*first(5), -1, -1],
    ]


def test_a_groups_tables_are_written_into_buffers():
    rows, out = windowed(1), BatchTables.buffers(3, 6, 4)
    for array in (out.block_table, out.slot_mapping, out.seq_lens, out.cu_seqlens):
        array[:] = 99
    tables = group_tables(rows, padding=-1, holes=5, out=out)
    assert tables.block_table.tolist() == [[6, 5, 2, 3, 9, -1], [4, 1, -1, -1, -1, -1]]
    assert lists(tables)[1:] == lists(group_tables(rows))[1:]
    assert np.shares_memory(tables.block_table, out.block_table)
    assert np.shares_memory(tables.slot_mapping, out.slot_mapping)
    assert (out.block_table[2:] == 99).all()
    assert tables.compacted().block_table.tolist() == [[6, 2, 3, 9], [4, 1, -1, -1]]


def test_query_tokens_whose_block_is_gone_have_no_slot():
    span = Span("sliding", block_size=4, window=6)
    rows = group_rows(span, [[0, 0, 5, 3]], [14], [0], firsts=[2])
    assert group_tables(rows).slot_mapping.tolist() == [-1] * 8 + [20, 21, 22, 23, 12, 13]
    sinks = group_rows(Span("sliding", 4, window=6, num_sink_blocks=1), [[7, 0, 5, 3]], [14], [0], firsts=[2])
    assert group_tables(sinks).slot_mapping.tolist() == [28, 29, 30, 31, *[-1] * 4, 20, 21, 22, 23, 12, 13]


def test_query_tokens_whose_block_is_not_there_yet_have_no_slot():
    span = Span("sliding", block_size=4, window=6)
    rows = group_rows(span, [[5, 3, 0, 0]], [14], [0], ends=[2])
    assert group_tables(rows).slot_mapping.tolist() == [20, 21, 22, 23, 12, 13, 14, 15] + [-1] * 6
    assert group_tables(rows, max_blocks=2).block_table.tolist() == [[5, 3]]


def test_a_chunk_that_has_ended_is_a_hole():
    span = Span("chunked", block_size=4, chunk_tokens=8)
    rows = group_rows(span, [[0, 0, 6, 1]], [14], [13], firsts=[2])
    tables = group_tables(rows, padding=-1)
    assert tables.block_table.tolist() == [[-1, -1, 6, 1]]
    assert tables.slot_mapping.tolist() == [5]
    assert tables.compacted().seq_lens.tolist() == [6]


def ring_rows(num_tokens, num_computed):
    """A window of 10 tokens, 2 of them sinks in a block of their own, in blocks 5, 2 and 7 of 4 tokens."""
    geometry = RingGeometry(block_size=4, window=10, sink_tokens=2, has_extra_block=False)
    return group_rows(
        Span("ring", 4, window=10, ring=geometry), [[5, 2, 7, 0, 0, 0]], [num_tokens], [num_computed], ends=[3]
    )


def test_a_ring_writes_where_its_tokens_lie():
    assert group_tables(ring_rows(10, 0)).slot_mapping.tolist() == [20, 21, 8, 9, 10, 11, 28, 29, 30, 31]
    tables = group_tables(ring_rows(12, 10))
    assert tables.block_table.tolist() == [[5, 2, 7]]
    assert tables.slot_mapping.tolist() == [8, 9]
    assert tables.seq_lens.tolist() == [12]


def test_a_token_that_the_same_pass_overwrites_has_no_slot():
    slots = group_tables(ring_rows(13, 0)).slot_mapping.tolist()
    assert slots == [20, 21, -1, -1, -1, 11, 28, 29, 30, 31, 8, 9, 10]


def test_a_state_group_names_one_block_and_has_no_slots():
    rows = group_rows(Span("state", block_size=4), [[8, 0, 0], [3, 0, 0]], [9, 5], [7, 4], ends=[1, 1])
    tables = group_tables(rows)
    assert tables.block_table.tolist() == [[8], [3]]
    assert tables.slot_mapping.tolist() == [-1, -1, -1]
    assert (tables.seq_lens.tolist(), tables.cu_seqlens.tolist()) == ([9, 5], [0, 2, 3])
    assert group_tables(rows, max_blocks=1).block_table.tolist() == [[8], [3]]
    assert group_tables(rows, batch=[1], out=BatchTables.buffers(2, 1, 3)).block_table.tolist() == [[3]]


def test_a_cross_group_has_the_encoders_tokens():
    encoder = {"ends": [2, 0, 1], "num_encoder_tokens": [6, 0, 4]}
    rows = group_rows(Span("cross", 4), [[4, 1], [0, 0], [2, 0]], [3, 2, 1], [2, 0, 0], **encoder)
    tables = group_tables(rows, padding=-1)
    assert tables.block_table.tolist() == [[4, 1], [-1, -1], [2, -1]]
    assert tables.seq_lens.tolist() == [6, 0, 4]
    assert tables.slot_mapping.tolist() == [16, 17, 18, 19, 4, 5, 8, 9, 10, 11]
    assert tables.cu_seqlens.tolist() == [0, 1, 3, 4]
    assert tables.flashinfer().indptr.tolist() == [0, 2, 2, 3]
    assert group_tables(rows, query=[1, 1, 1]).slot_mapping.tolist() == tables.slot_mapping.tolist()


def test_the_groups_of_a_manager_have_tables_of_their_own():
    layers = [
        AttentionSpec(1, 1),
        AttentionSpec(1, 1, sliding_window=10, sink_tokens=3),
        AttentionSpec(1, 1, sliding_window=6),
        AttentionSpec(1, 1, chunk_tokens=8),
        StateSpec([(2, 2)]),
        AttentionSpec(1, 1, cross=True),
    ]
    manager = KVCacheManager(CacheConfig(layers, block_size=4, num_blocks=32, max_sequences=4, max_sequence_length=64))
    sequences = [computed(manager, range(21), encoder_tokens=6), computed(manager, [1, 2, 3])]
    manager.append(sequences, [9, 9])
    assert manager.num_free_blocks > 0  # what is out of span is given back when the room is counted
    tables = [manager.tables(sequences, group=group, padding=-1) for group in range(6)]
    assert [table.block_table.tolist() for table in tables] == [
        [[0, 1, 2, 3, 4, 5], [6, -1, -1, -1, -1, -1]],
        [[0, -1, -1, 3, 4, 5], [6, -1, -1, -1, -1, -1]],
        [[-1, -1, -1, -1, 4, 5], [6, -1, -1, -1, -1, -1]],
        [[-1, -1, -1, -1, 4, 5], [6, -1, -1, -1, -1, -1]],
        [[0], [1]],
        [[0, 1], [-1, -1]],
    ]
    assert [table.slot_mapping.tolist() for table in tables] == [
        *[[21, 27]] * 4,
        [-1, -1],
        [0, 1, 2, 3, 4, 5],
    ]
    assert [table.seq_lens.tolist() for table in tables] == [*[[22, 4]] * 5, [6, 0]]
    assert [table.cu_seqlens.tolist() for table in tables] == [[0, 1, 2]] * 6
    for group, table in enumerate(tables):
        rows = [sequence.group_blocks(group).tolist() for sequence in sequences]
        assert [row[: len(blocks)] for row, blocks in zip(table.block_table.tolist(), rows, strict=True)] == rows
        assert np.array_equal(table.held, table.block_table >= 0)


def test_a_width_is_refused_where_a_row_of_the_group_has_more_blocks():
    with pytest.raises(ArgumentError, match="max_blocks is 4, a sequence has 5 blocks"):
        group_tables(windowed(), max_blocks=4)
    assert group_tables(windowed(), batch=[1], max_blocks=2).block_table.tolist() == [[4, 1]]


def test_a_group_of_no_rows_is_empty():
    tables = group_tables(windowed(), batch=np.zeros(0, np.int64))
    assert lists(tables) == [[], [], [], [0], []]
    assert tables.held.shape == (0, 0)


def test_B201_slots_of_large_blocks_are_exact():
    rows = group_rows(Span("full", block_size=16384), [[2**20]], [3], [0])
    assert group_tables(rows).slot_mapping.tolist() == [2**34, 2**34 + 1, 2**34 + 2]
    assert group_tables(rows).token_rows().tolist() == [2**34, 2**34 + 1, 2**34 + 2]


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
        ({"holes": 0.5}, "holes is 0.5"),
        ({"holes": -(2**31) - 1}, "holes is -2147483649"),
        ({"group": 1}, "group is 1, there are 1"),
        ({"group": -1}, "group is -1"),
        ({"group": 0.0}, "group is 0.0"),
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
