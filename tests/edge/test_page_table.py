import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvist.edge import KVPageTable, SparsePageTable
from kvist.edge.geometry import MAX_POOL_PAGES
from kvist.edge.page_table import Upload
from kvist.errors import ArgumentError, InvariantError


def three_by_four(num_pages=12):
    return KVPageTable(max_batch_size=3, max_pages=4, num_pages=num_pages)


def uploaded(num_pages=12):
    table = three_by_four(num_pages)
    table.set_identity()
    table.upload()
    return table


@pytest.mark.parametrize("num_pages", [12, 17])
def test_E5_identity_gives_each_slot_its_pages_in_order(num_pages):
    table = three_by_four(num_pages)
    assert (table.host == -1).all()
    table.set_identity()
    for slot in range(3):
        assert table.host[slot, 0].tolist() == [4 * slot + column for column in range(4)]
        assert table.host[slot, 1].tolist() == [4 * slot + column + num_pages for column in range(4)]


def test_E5_a_row_of_two_pages_is_filled_up():
    table = KVPageTable(3, 4, 10)
    table.set_row(1, [3, 7])
    assert table.host[1].tolist() == [[3, 7, -1, -1], [13, 17, -1, -1]]
    assert table.pages(1).tolist() == [3, 7]
    assert table.pages(0).tolist() == []


def test_only_set_identity_makes_a_table_identity():
    table = three_by_four()
    assert not table.is_identity
    table.set_identity()
    assert table.is_identity
    table.set_row(1, [4, 5, 6, 7])
    assert not table.is_identity
    table.set_identity()
    table.compact([0, 1, 2], 3)
    assert not table.is_identity
    with pytest.raises(ArgumentError, match="identity takes 12 pages, but there are 11"):
        three_by_four(11).set_identity()


@pytest.mark.parametrize("sizes", [(0, 4, 12), (3, 0, 12), (3, 4, 0), (3, 4, -1), (3, 4, MAX_POOL_PAGES + 1)])
def test_a_table_that_cannot_be_is_refused(sizes):
    with pytest.raises(ArgumentError):
        KVPageTable(*sizes)


def test_the_last_page_that_int32_can_name_has_a_v_id():
    table = KVPageTable(1, 1, MAX_POOL_PAGES)
    table.set_row(0, [MAX_POOL_PAGES - 1])
    assert table.host[0].tolist() == [[MAX_POOL_PAGES - 1], [2 * MAX_POOL_PAGES - 1]]
    assert table.upload()


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([(0, [1]), (3, [2])], r"slot must be in \[0, 3\), got 3"),
        ([(0, [1]), (-1, [2])], "slot is -1"),
        ([(0, [1]), (1, [2]), (0, [])], "slot 0 is named twice"),
        ([(0, [1]), (1, [0, 1, 2, 3, 4])], "at most 4 ids"),
        ([(0, [1]), (1, [12])], r"pages of slot 1 hold 12, must be in \[0, 12\)"),
        ([(0, [1]), (1, [2, -1])], "pages of slot 1 hold -1"),
        ([(0, [1]), (1, [2**40])], "hold 1099511627776"),
        ([(0, [1]), (1, [0.5])], "must hold ints"),
        ([(0, [1]), (1, [[2]])], "at most 4 ids"),
        ([(0, [1]), (True, [2])], "slot is True"),
    ],
)
def test_rows_are_set_all_or_none(rows, message):
    table = uploaded()
    before = table.host.copy()
    with pytest.raises(ArgumentError, match=message):
        table.set_rows(rows)
    assert (table.host == before).all()
    assert table.is_identity
    assert not table.upload()


def test_an_empty_row_clears_a_slot_and_slots_may_share_pages():
    table = uploaded()
    table.set_rows([(0, []), (1, [5, 6]), (2, np.array([5, 6, 7]))])
    assert [table.pages(slot).tolist() for slot in range(3)] == [[], [5, 6], [5, 6, 7]]
    table.set_rows([])
    assert table.pages(1).tolist() == [5, 6]


def test_the_host_table_cannot_be_written():
    with pytest.raises(ValueError, match="read-only"):
        three_by_four().host[0, 0, 0] = 3


def test_compaction_moves_rows_and_clears_the_others():
    table = three_by_four()
    table.set_rows([(0, [9]), (1, [1, 2]), (2, [7, 8, 3])])
    table.compact([1, -1, 0], 2)
    assert [table.pages(slot).tolist() for slot in range(3)] == [[7, 8, 3], [9], []]
    table.compact([0], 1)
    assert [table.pages(slot).tolist() for slot in range(3)] == [[7, 8, 3], [], []]
    table.check()


@pytest.mark.parametrize(
    ("mapping", "num_new"),
    [([0, 0], 1), ([0, 2], 2), ([0, 1], 1), ([-1, -1], 1), ([0, -2], 1), ([0, 1, 2, 3], 4), ([[0]], 1), ([0.0], 1)],
)
def test_a_mapping_that_is_none_changes_nothing(mapping, num_new):
    table = uploaded()
    before = table.host.copy()
    with pytest.raises(ArgumentError, match="old_to_new"):
        table.compact(mapping, num_new)
    assert (table.host == before).all()
    assert table.is_identity


# -- uploads ----------------------------------------------------------------------------------------------------------


def test_the_first_upload_brings_all_and_the_next_what_changed():
    table = three_by_four()
    address = table.device_table.data_ptr()
    assert (table.device_table == -1).all()
    assert table.upload()
    assert table.last_upload == Upload(num_entries=24, num_runs=1)
    assert not table.upload()
    table.set_rows([(0, [3]), (1, [4])])
    assert table.device_table[0, 0, 0] == -1
    assert table.upload()
    assert table.last_upload == Upload(16, 1)
    table.set_rows([(0, [5]), (2, [6])])
    assert table.upload()
    assert table.last_upload == Upload(16, 2)
    assert (table.device_table.numpy() == table.host).all()
    assert table.device_table.data_ptr() == address
    assert table.device_table.dtype == torch.int32


def test_a_row_set_to_what_it_is_stays_clean():
    table = uploaded()
    table.set_row(1, [4, 5, 6, 7])
    assert not table.upload()
    table.set_rows([(0, [0, 1, 2, 3]), (2, [8, 9, 10])])
    assert table.upload()
    assert table.last_upload == Upload(8, 1)


def test_a_table_that_is_wrong_is_not_uploaded():
    table = uploaded()
    before = table.device_table.clone()
    table.set_rows([(0, [3]), (1, [4])])
    table._entries[0, :, 2] = 5, 17
    table._entries[1, 1, 0] = 4
    table._entries[2, 1, 0] = 4  # not among what goes over
    with pytest.raises(InvariantError) as raised:
        table.upload()
    assert raised.value.problems == [
        "slots [1] have V ids that are not those of K plus num_pages",
        "slots [0] have pages behind a hole",
    ]
    assert torch.equal(table.device_table, before)
    table._entries[0, 0, 0] = 12
    with pytest.raises(InvariantError, match=r"slots \[0, 1, 2\] have V ids"):
        table.check()
    with pytest.raises(InvariantError, match=r"slots \[0\] have ids outside \[0, 12\)"):
        table.check()


def test_rows_of_resident_slots_are_gathered_for_a_batch():
    table = uploaded()
    out = torch.empty(2, 2, 4, dtype=torch.int32)
    slots = torch.tensor([2, 0], dtype=torch.int32)
    assert torch.equal(table.gather_rows(slots, out), table.device_table[[2, 0]])
    assert torch.equal(out, table.gather_rows(slots))


# -- sparse tables ----------------------------------------------------------------------------------------------------


def test_a_sparse_table_has_holes():
    table = SparsePageTable(2, 6, 10)
    table.set_entry(0, 2, 5)
    table.set_entry(0, 3, 7)
    table.set_entry(1, 0, 5)
    assert table.host[0].tolist() == [[-1, -1, 5, 7, -1, -1], [-1, -1, 15, 17, -1, -1]]
    assert table.pages(0).tolist() == [-1, -1, 5, 7]
    table.clear_entry(0, 2)
    table.clear_entry(0, 2)
    table.set_row(1, [-1, 3, -1, 4])
    assert table.pages(0).tolist() == [-1, -1, -1, 7]
    assert table.pages(1).tolist() == [-1, 3, -1, 4]
    table.check()


def test_single_entries_of_a_sparse_table_go_over():
    table = SparsePageTable(2, 6, 10)
    assert not table.upload()
    table.set_entry(0, 2, 5)
    table.set_entry(0, 3, 7)
    table.set_entry(1, 0, 5)
    assert table.upload()
    assert table.last_upload == Upload(num_entries=6, num_runs=4)
    table.set_entry(0, 3, 7)
    assert not table.upload()
    table.clear_entry(0, 2)
    table.set_entry(0, 4, 1)
    assert table.upload()
    assert table.last_upload == Upload(4, 4)
    assert (table.device_table.numpy() == table.host).all()


@pytest.mark.parametrize(
    "act",
    [
        lambda table: table.set_entry(0, 1, 5),
        lambda table: table.set_entry(0, 6, 1),
        lambda table: table.set_entry(0, -1, 1),
        lambda table: table.set_entry(2, 0, 1),
        lambda table: table.set_entry(0, 0, 10),
        lambda table: table.set_entry(0, 0, True),
        lambda table: table.clear_entry(0, 6),
        lambda table: table.set_row(1, [4, -1, 4]),
        lambda table: table.set_rows([(1, [4]), (0, [10])]),
    ],
)
def test_what_a_sparse_table_refuses_changes_nothing(act):
    table = SparsePageTable(2, 6, 10)
    table.set_entry(0, 2, 5)
    table.upload()
    before = table.host.copy()
    with pytest.raises(ArgumentError):
        act(table)
    assert (table.host == before).all()
    assert not table.upload()


def test_a_slot_with_a_page_twice_is_found():
    table = SparsePageTable(1, 4, 10)
    table.set_entry(0, 0, 3)
    table._entries[0, :, 2] = 3, 13
    with pytest.raises(InvariantError, match=r"slots \[0\] have a page twice"):
        table.check()


# -- random histories -------------------------------------------------------------------------------------------------

SLOTS, COLUMNS, PAGES = 4, 3, 6
a_row = st.lists(st.integers(-1, PAGES), max_size=COLUMNS + 1)
rows = st.lists(st.tuples(st.integers(-1, SLOTS), a_row), max_size=4)
mappings = st.lists(st.integers(-1, SLOTS), max_size=SLOTS + 1)
acts = st.one_of(
    st.tuples(st.just("set_rows"), rows),
    st.tuples(st.just("compact"), mappings),
    st.just(("upload",)),
)


def rows_are_legal(new):
    slots = [slot for slot, _ in new]
    ids = [page for _, row in new for page in row]
    return (
        len(set(slots)) == len(slots)
        and all(0 <= slot < SLOTS for slot in slots)
        and all(len(row) <= COLUMNS for _, row in new)
        and all(0 <= page < PAGES for page in ids)
    )


def mapping_is_legal(mapping, num_new):
    return len(mapping) <= SLOTS and sorted(new for new in mapping if new >= 0) == list(range(num_new))


def kept(mapping, model):
    """The rows of the model after a compaction."""
    moved = {new: model[old] for old, new in enumerate(mapping) if new >= 0}
    return [moved.get(slot, []) for slot in range(SLOTS)]


@given(st.lists(acts, max_size=8))
def test_any_history_gives_what_plain_lists_give(history):
    table, model = KVPageTable(SLOTS, COLUMNS, PAGES), [[] for _ in range(SLOTS)]
    for act, *arguments in history:
        if act == "upload":
            table.upload()
            assert (table.device_table.numpy() == table.host).all()
            assert not table.upload()
        elif act == "set_rows":
            legal = rows_are_legal(*arguments)
            check(legal, table.set_rows, *arguments)
            model = [dict(arguments[0]).get(slot, row) for slot, row in enumerate(model)] if legal else model
        else:
            num_new = len([new for new in arguments[0] if new >= 0])
            legal = mapping_is_legal(*arguments, num_new)
            check(legal, table.compact, *arguments, num_new)
            model = kept(*arguments, model) if legal else model
        table.check()
        assert [table.pages(slot).tolist() for slot in range(SLOTS)] == model


def check(legal, act, *arguments):
    if legal:
        act(*arguments)
    else:
        with pytest.raises(ArgumentError):
            act(*arguments)
