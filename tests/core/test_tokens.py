import itertools
import random
from array import array

import numpy as np
import pytest
from tests.core.small import label

from kvist import ArgumentError, ArgumentTypeError
from kvist.core import tokens
from kvist.core.tokens import MAX_TOKEN, as_token_array, as_token_buffer, as_token_bytes, common_prefix

INTEGER_DTYPES = ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", ">i4", ">i8", "<u2"]
READERS = [as_token_bytes, as_token_array, as_token_buffer]


def read(reader, value, name="tokens"):
    """Token ids as read by any of the three readers, as a list."""
    return np.frombuffer(bytes(reader(value, name)), np.int32).tolist()


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize(
    "value",
    [
        [1, 0, 120],
        (1, 0, 120),
        [np.int64(1), np.uint8(0), 120],
        array("i", [1, 0, 120]),
        array("b", [1, 0, 120]),
        array("Q", [1, 0, 120]),
        memoryview(np.array([1, 0, 120], np.uint16)),
        memoryview(array("l", [1, 0, 120, 7, 7]))[:3],
        b"\x01\x00\x78",
        bytearray(b"\x01\x00\x78"),
        np.array([1, 9, 0, 9, 120], np.int32)[::2],
        np.array([120, 0, 1], np.int32)[::-1],
        np.array([[1, 5], [0, 5], [120, 5]], np.int32)[:, 0],
        *(np.array([1, 0, 120], dtype) for dtype in INTEGER_DTYPES),
    ],
    ids=lambda value: f"{type(value).__name__}-{getattr(value, 'dtype', '')}",
)
def test_every_form_of_the_same_ids_is_read_alike(reader, value):
    assert read(reader, value) == [1, 0, 120]


@pytest.mark.parametrize("reader", READERS)
def test_a_range_is_a_list_of_ids(reader):
    assert read(reader, range(3, 9, 2)) == [3, 5, 7]


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("value", [[], (), b"", array("i"), np.array([], np.int32), memoryview(b""), range(0)])
def test_no_ids_at_all_are_read_as_none(reader, value):
    assert read(reader, value) == []


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize(
    "form", [list, tuple, lambda ids: array("q", ids), np.array, lambda ids: np.array(ids, np.uint32)]
)
def test_the_greatest_id_is_accepted_and_the_next_one_is_not(reader, form):
    assert read(reader, form([0, MAX_TOKEN])) == [0, 2**31 - 1]
    with pytest.raises(ArgumentError, match=r"prompt\[1\] is 2147483648; token ids are 0 \.\. 2147483647"):
        reader(form([0, MAX_TOKEN + 1]), "prompt")


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize(
    "value",
    [
        [5, 6, -1],
        (5, 6, -1),
        [5, 6, -(2**40)],
        [5, 6, -(2**31)],
        range(5, -2, -6),
        array("b", [5, 6, -1]),
        array("i", [5, 6, -1]),
        array("q", [5, 6, -1]),
        memoryview(np.array([5, 6, -1], np.int16)),
        *(np.array([5, 6, -1], dtype) for dtype in ("int8", "int16", "int32", "int64", ">i4")),
        np.array([5, 0, 6, 0, -1], np.int32)[::2],
    ],
    ids=label,
)
def test_the_first_negative_id_is_named(reader, value):
    at = len(value) - 1
    with pytest.raises(ArgumentError, match=rf"prompt\[{at}\] is -\d+; token ids are 0 \.\. 2147483647"):
        reader(value, "prompt")


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize(
    "value",
    [
        [2**31],
        [2**63],
        [2**70],
        array("I", [2**31]),
        array("Q", [2**64 - 1]),
        np.array([2**31]),
        np.array([2**63], np.uint64),
    ],
    ids=label,
)
def test_an_id_that_is_too_great_is_named(reader, value):
    with pytest.raises(ArgumentError, match=rf"tokens\[0\] is {int(value[0])}; token ids are"):
        reader(value)


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize(
    "value",
    [
        None,
        3,
        1.5,
        "abc",
        "",
        {1, 2},
        {1: 2},
        iter([1, 2]),
        (n for n in (1, 2)),
        object(),
        [1.0],
        [1, None],
        ["1"],
        [[1, 2]],
        [np.float32(1)],
        [np.array([1, 2])],
        [np.array([1])],
        [np.array(1.0)],
        array("f", [1.0]),
        memoryview(b"ab").cast("c"),
        memoryview(b"\x00\x01").cast("?"),
        np.array([1.0]),
        np.array([1.0], np.float16),
        np.array([]),
        np.array([True]),
        np.array([1], object),
        np.array(["1"]),
        np.array([1j]),
        np.array([1], "m8[s]"),
        np.zeros(2, "i4,i4"),
    ],
    ids=lambda value: f"{type(value).__name__}-{getattr(value, 'dtype', '')}",
)
def test_what_holds_no_ints_is_refused_by_its_type(reader, value):
    with pytest.raises(ArgumentTypeError, match="tokens"):
        reader(value)


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize(
    "value", [np.array(1), np.int64(1), np.array([[1, 2]]), memoryview(b"abcd").cast("B", (2, 2))], ids=label
)
def test_ids_in_other_than_one_dimension_are_refused(reader, value):
    with pytest.raises(ArgumentError, match=r"tokens must have one dimension, not shape \("):
        reader(value)


def test_type_errors_are_type_errors_and_value_errors():
    with pytest.raises(TypeError, match="NoneType"):
        as_token_bytes(None)
    with pytest.raises(ValueError, match="NoneType"):
        as_token_bytes(None)


def test_an_int32_array_is_taken_as_it_is():
    given = np.array([1, 2], np.int32)
    assert as_token_array(given) is given


def test_a_long_int32_array_is_viewed_and_a_short_or_scattered_one_copied():
    long = np.arange(tokens.LONG_TOKENS, dtype=np.int32)
    assert np.shares_memory(np.frombuffer(as_token_buffer(long), np.int32), long)
    assert isinstance(as_token_buffer(long[:-1]), bytes)
    assert isinstance(as_token_buffer(np.repeat(long, 2)[::2]), bytes)
    assert as_token_buffer(long) == as_token_buffer(long.tolist()) == as_token_buffer(np.repeat(long, 2)[::2])


def test_a_read_only_array_can_be_viewed():
    long = np.arange(tokens.LONG_TOKENS, dtype=np.int32)
    long.flags.writeable = False
    assert as_token_buffer(long) == long.tobytes()


def packed(*values):
    return np.array(values, np.int32).tobytes()


def test_common_prefix_counts_whole_tokens_only():
    assert common_prefix(packed(1, 257), 0, packed(1, 1), 8) == 4
    assert common_prefix(packed(1, 2), 0, packed(1, 2), 8) == 8
    assert common_prefix(packed(2**31 - 1), 0, packed(2**31 - 2), 4) == 0
    assert common_prefix(packed(2**24), 0, packed(0), 4) == 0


def test_common_prefix_ends_at_the_length_asked_for():
    assert common_prefix(packed(1, 2, 3), 0, packed(1, 2, 3), 4) == 4
    assert common_prefix(packed(1), 0, packed(1), 0) == 0


def test_common_prefix_begins_at_a_position_of_the_query():
    assert common_prefix(packed(9, 9, 1, 2, 3), 8, packed(1, 2, 4), 12) == 8


@pytest.mark.parametrize("view", [bytes, memoryview])
@pytest.mark.parametrize("holder", [bytes, bytearray])
def test_common_prefix_agrees_with_counting_token_by_token(view, holder):
    chance = random.Random(0)
    for _ in range(400):
        length = chance.choice([1, 3, 31, 32, 33, 64, 65, 200, 1000])
        ours = [chance.choice([0, 1, 256, 2**31 - 1]) for _ in range(length)]
        theirs = list(ours)
        for at in chance.sample(range(length), chance.randrange(3)) if length > 2 else ():
            theirs[at] ^= chance.choice([1, 256, 2**24])
        before = chance.randrange(3)
        expected = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(ours, theirs, strict=True)))
        query = view(packed(*[7] * before, *ours, 5))
        assert common_prefix(query, 4 * before, holder(packed(*theirs, 6)), 4 * length) == 4 * expected
