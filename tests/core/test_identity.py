from array import array
from dataclasses import FrozenInstanceError

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tests.core.small import label

from kvist.core.identity import FIRST_ID, LAST_ID, MIN_SWEPT, UNKNOWN, Identity, IdentityTable, Media
from kvist.errors import ArgumentError, ArgumentTypeError, NeverFits, StaleMatch

CAT = Media(1, 4, "cat")


def packed(*tokens):
    return np.array(tokens, np.int32).tobytes()


def ids(run):
    return np.frombuffer(run, np.int32).tolist()


def state(table):
    """All that a call which is refused, or only looks, must leave as it was."""
    return dict(table._ids), dict(table._identities), table._next_id, table.needs_sweep


def agreed(ours, theirs):
    """In how many leading positions two prompts agree."""
    differing = (at for at, (mine, other) in enumerate(zip(ours, theirs, strict=False)) if mine != other)
    return next(differing, min(len(ours), len(theirs)))


# -- what the ids say --------------------------------------------------------------------------------------------------


def test_a_span_is_marked_at_its_first_position_and_an_extra_id_at_its_own():
    table = IdentityTable()
    media = [Media(1, 4, "cat"), Media(5, 2, "dog")]
    extra_ids = [0, 0, 0, 0, 0, 0, 0, 8]
    run = table.identify(packed(5, 9, 9, 9, 9, 9, 9, 7), media, extra_ids)
    assert ids(run) == [5, -3, 9, 9, 9, -4, 9, -2]
    assert table.identities(run) == [
        (1, Identity(9, 0, "cat", 4)),
        (5, Identity(9, 0, "dog", 2)),
        (7, Identity(7, 8)),
    ]


def test_the_same_content_has_the_same_ids_in_every_call():
    table = IdentityTable()
    first = table.identify(packed(5, 9, 9, 9, 9), [CAT], [3, 0, 0, 0, 0])
    assert table.identify(packed(5, 9, 9, 9, 9), [CAT], [3, 0, 0, 0, 0]) == first
    assert table.look(packed(5, 9, 9, 9, 9), (CAT,), np.array([3, 0, 0, 0, 0])) == first
    assert len(table) == 2


def test_ids_are_given_out_downwards_in_the_order_of_the_calls():
    table = IdentityTable()
    assert ids(table.identify(packed(9), [Media(0, 1, "cat")])) == [-2]
    assert ids(table.identify(packed(9), [Media(0, 1, "dog")])) == [-3]
    assert ids(table.identify(packed(4, 4), extra_ids=[2, 1])) == [-5, -4]


def test_an_image_at_two_places_has_one_id():
    table = IdentityTable()
    assert ids(table.identify(packed(9, 9, 5, 9, 9), [Media(0, 2, "cat"), Media(3, 2, "cat")])) == [-2, 9, 5, -2, 9]


def test_two_spans_side_by_side_are_not_one_of_their_length():
    table = IdentityTable()
    tokens = packed(*[9] * 8)
    two = table.identify(tokens, [Media(0, 4, "cat"), Media(4, 4, "cat")])
    one = table.identify(tokens, [Media(0, 8, "cat")])
    assert ids(two) == [-2, 9, 9, 9, -2, 9, 9, 9]
    assert ids(one) == [-3, 9, 9, 9, 9, 9, 9, 9]


def test_keys_of_other_types_are_other_keys():
    table = IdentityTable()
    runs = [table.identify(packed(9), [Media(0, 1, key)]) for key in ("1", 1, b"1", "", 0, b"", "١")]
    assert len(set(runs)) == 7
    assert [table.identities(run)[0][1].key for run in runs] == ["1", 1, b"1", "", 0, b"", "١"]


def test_the_token_and_the_extra_id_at_the_head_of_a_span_belong_to_its_id():
    table = IdentityTable()
    heads = [table.identify(packed(token), [Media(0, 1, "cat")], [extra]) for token in (8, 9) for extra in (0, 1)]
    assert (len(set(heads)), len(table)) == (4, 4)
    assert table.identify(packed(9), extra_ids=[1]) not in heads


def test_extra_ids_inside_a_span_are_told_apart():
    table = IdentityTable()
    run = table.identify(packed(9, 9, 9), [Media(0, 3, "cat")], [0, 0, 6])
    assert table.identities(run) == [(0, Identity(9, 0, "cat", 3)), (2, Identity(9, 6))]


def test_a_token_with_an_extra_id_is_unique_to_both():
    table = IdentityTable()
    run = table.identify(packed(1, 2, 1, 2, 1, 1), extra_ids=[7, 7, 8, 7, 7, 0])
    assert ids(run) == [-2, -3, -4, -3, -2, 1]
    assert table.tokens(run).tolist() == [1, 2, 1, 2, 1, 1]


@pytest.mark.parametrize("tokens", [packed(), packed(0, 2**31 - 1)], ids=len)
def test_tokens_without_media_and_extra_ids_stay_as_they_are(tokens):
    table = IdentityTable()
    none = [0] * (len(tokens) // 4)
    assert table.identify(tokens) == table.identify(tokens, (), none) == table.look(memoryview(tokens)) == tokens
    assert type(table.identify(memoryview(tokens))) is bytes
    assert len(table) == 0


def test_the_greatest_token_and_the_greatest_extra_id_are_kept():
    table = IdentityTable()
    run = table.identify(packed(2**31 - 1, 0), extra_ids=[2**64 - 1, 2**63])
    assert table.identities(run) == [(0, Identity(2**31 - 1, 2**64 - 1)), (1, Identity(0, 2**63))]
    assert table.tokens(run).tolist() == [2**31 - 1, 0]


def test_many_extra_ids_are_read_back_as_they_were():
    table = IdentityTable()
    chance = np.random.default_rng(0)
    tokens, extra_ids = chance.integers(0, 50, 3000, np.int32), chance.integers(0, 2**64, 3000, np.uint64)
    extra_ids[chance.random(3000) < 0.5] = 0
    run = table.identify(tokens.tobytes(), extra_ids=extra_ids)
    assert np.array_equal(table.tokens(run), tokens)
    expected = [(at, Identity(int(tokens[at]), int(extra_ids[at]))) for at in np.flatnonzero(extra_ids)]
    assert table.identities(run) == expected
    assert np.count_nonzero(extra_ids == 0) == sum(each >= 0 for each in ids(run))


# -- looking -----------------------------------------------------------------------------------------------------------


def test_a_look_changes_nothing_and_matches_nothing_that_is_unknown():
    table = IdentityTable()
    table.identify(packed(9, 9), [Media(0, 2, "cat")])
    before = state(table)
    assert ids(table.look(packed(9, 9, 4), [Media(0, 2, "dog")], [0, 0, 5])) == [UNKNOWN, 9, UNKNOWN]
    assert ids(table.look(packed(9, 9), [Media(0, 2, "cat")])) == [-2, 9]
    assert state(table) == before


# -- the other way -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", [bytes, bytearray, memoryview, lambda run: np.frombuffer(run, np.int32)], ids=label)
def test_packed_ids_are_read_from_every_form_they_are_kept_in(form):
    table = IdentityTable()
    run = form(table.identify(packed(5, 9, 9, 9, 9), [CAT]))
    assert table.tokens(run).tolist() == [5, 9, 9, 9, 9]
    assert table.identities(run) == [(1, Identity(9, 0, "cat", 4))]
    assert table.num_open_tokens(run) == 0


def test_the_tokens_are_a_new_array_so_that_a_run_can_grow():
    run = bytearray(packed(1, 2))
    tokens = IdentityTable().tokens(run)
    run += packed(3)
    tokens[0] = 7
    assert (tokens.tolist(), tokens.dtype, ids(run)) == ([7, 2], np.int32, [1, 2, 3])


def test_no_tokens_are_read_as_none():
    table = IdentityTable()
    assert (table.tokens(b"").tolist(), table.identities(b""), table.num_open_tokens(b"")) == ([], [], 0)


@pytest.mark.parametrize("key", ["cat", "", 0, b""])
def test_a_run_that_was_cut_off_inside_a_span_says_how_much_of_it_is_missing(key):
    table = IdentityTable()
    media = [Media(1, 4, key), Media(5, 2, "dog")]
    run = table.identify(packed(5, 9, 9, 9, 9, 9, 9, 7), media, [0, 0, 6, 0, 0, 0, 0, 6])
    assert [table.num_open_tokens(run[: 4 * n]) for n in range(9)] == [0, 0, 3, 2, 1, 0, 1, 0, 0]


# -- sweeping ----------------------------------------------------------------------------------------------------------


def test_a_sweep_forgets_what_is_in_no_run_and_its_ids_do_not_come_back():
    table = IdentityTable()
    cat, dog, _ = (table.identify(packed(9, 9), [Media(0, 2, key)]) for key in ("cat", "dog", "cow"))
    table.sweep([b"", packed(1, 2), bytearray(dog), memoryview(dog)])
    assert len(table) == 1
    assert ids(table.look(packed(9, 9), [Media(0, 2, "dog")])) == [-3, 9]
    assert ids(table.look(packed(9, 9), [Media(0, 2, "cat")])) == [UNKNOWN, 9]
    assert ids(table.identify(packed(9, 9), [Media(0, 2, "cat")])) == [-5, 9]
    with pytest.raises(StaleMatch, match="id -2 stands for nothing any more"):
        table.tokens(cat)
    with pytest.raises(StaleMatch, match="evicted"):
        table.identities(cat)


def test_a_sweep_leaves_runs_free_to_grow():
    table = IdentityTable()
    run = bytearray(table.identify(packed(9), [Media(0, 1, "cat")]))
    table.sweep([run])
    run += packed(3)
    assert table.tokens(run).tolist() == [9, 3]


def test_a_sweep_that_fails_forgets_nothing():
    table = IdentityTable()
    table.identify(packed(9), [Media(0, 1, "cat")])
    before = state(table)
    with pytest.raises(ValueError, match="buffer size"):
        table.sweep([b"", b"abc"])
    assert state(table) == before


def test_a_table_needs_a_sweep_each_time_it_has_doubled():
    table = IdentityTable()
    tokens, extra_ids = np.zeros(MIN_SWEPT + 1, np.int32), np.arange(1, MIN_SWEPT + 2)
    kept = table.identify(tokens[1:].tobytes(), extra_ids=extra_ids[1:])
    assert not table.needs_sweep
    table.identify(tokens.tobytes(), extra_ids=extra_ids)
    assert table.needs_sweep
    table.sweep([kept])
    assert (len(table), table.needs_sweep) == (MIN_SWEPT, False)
    table.identify(np.zeros(2 * MIN_SWEPT, np.int32).tobytes(), extra_ids=np.arange(1, 2 * MIN_SWEPT + 1) + 10**6)
    assert (len(table), table.needs_sweep) == (3 * MIN_SWEPT, False)
    table.identify(packed(1), extra_ids=[1])
    assert table.needs_sweep


def test_memory_is_bounded_by_what_is_in_use():
    table = IdentityTable()
    for key in range(10 * MIN_SWEPT):
        run = table.identify(packed(9), [Media(0, 1, key)])
        if table.needs_sweep:
            table.sweep([run])
    assert len(table) <= 2 * MIN_SWEPT


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", [True, None, 1.0, ("cat",), np.int64(1), np.str_("cat"), bytearray(b"cat"), object()])
def test_a_key_is_a_string_an_int_or_bytes(key):
    with pytest.raises(ArgumentTypeError, match=r"media: key is .*, must be a string, an int or bytes"):
        Media(0, 1, key)


@pytest.mark.parametrize("value", [True, None, 1.0, "1", np.float32(1), np.bool_(True), np.array(1)], ids=label)
@pytest.mark.parametrize("name", ["offset", "length"])
def test_the_place_of_a_span_is_given_in_ints(name, value):
    with pytest.raises(ArgumentTypeError, match=f"media: {name} is .*, must be an int"):
        Media(**{"offset": 0, "length": 1, "key": "cat", name: value})


def test_a_span_is_not_empty_and_does_not_begin_before_the_tokens():
    with pytest.raises(ArgumentError, match="media: offset is -1, must be at least 0"):
        Media(-1, 4, "cat")
    with pytest.raises(ArgumentError, match="media: length is 0, must be at least 1"):
        Media(0, 0, "cat")


def test_ints_of_numpy_are_taken_without_overflow():
    table = IdentityTable()
    run = table.identify(packed(*[9] * 300), [Media(np.uint8(250), np.uint8(50), "cat")])
    assert table.identities(run) == [(250, Identity(9, 0, "cat", 50))]
    with pytest.raises(ArgumentError, match=r"spans tokens 250 \.\. 299, but there are only 299 tokens"):
        table.identify(packed(*[9] * 299), [Media(np.uint8(250), np.uint8(50), "cat")])


def test_media_cannot_be_changed_and_equal_media_are_equal():
    with pytest.raises(FrozenInstanceError):
        CAT.key = "dog"
    assert Media(1, 4, "cat") == CAT != Media(1, 4, b"cat")


def refused(kind, match, media=(), extra_ids=None, num_tokens=8):
    """Both ways in must refuse, and change nothing."""
    table = IdentityTable()
    table.identify(packed(9), [Media(0, 1, "known")])
    before = state(table)
    for call in (table.identify, table.look):
        with pytest.raises(kind, match=match) as caught:
            call(packed(*[9] * num_tokens), media, extra_ids)
        assert type(caught.value) is kind
        assert state(table) == before


@pytest.mark.parametrize(("media", "match"), [
    ([Media(0, 2, "cat"), Media(6, 3, "dog")], r"media\[1\] spans tokens 6 \.\. 8, but there are only 8 tokens"),
    ([Media(8, 1, "cat")], r"media\[0\] spans tokens 8 \.\. 8, .*must lie inside the tokens"),
    ([Media(10**30, 1, "cat")], "there are only 8 tokens"),
    ([Media(0, 3, "cat"), Media(2, 2, "dog")], "Media.*'dog'.* begins before Media.*'cat'.* ends; spans must not"),
    ([Media(4, 1, "cat"), Media(0, 5, "dog")], "Media.*'cat'.* begins before Media.*'dog'"),
    ([Media(1, 2, "cat"), Media(1, 2, "cat")], "spans must not overlap"),
])  # fmt: skip
def test_spans_that_lie_wrong_are_refused(media, match):
    refused(ArgumentError, match, media)


@pytest.mark.parametrize(("media", "match"), [
    (CAT, "media is a Media, must be a list or tuple of Media"),
    (None, "media is a NoneType, must be"),
    ([CAT, (5, 1, "dog")], r"media\[1\] is a tuple, must be a Media"),
    ("cat", r"media\[0\] is a str, must be a Media"),
])  # fmt: skip
def test_what_is_no_media_is_refused(media, match):
    refused(ArgumentTypeError, match, media)


def test_media_are_taken_in_any_order_and_from_any_iterable():
    table = IdentityTable()
    media = [Media(4, 2, "dog"), Media(1, 3, "cat")]
    run = table.identify(packed(*[9] * 6), iter(media))
    assert run == table.identify(packed(*[9] * 6), media) == table.identify(packed(*[9] * 6), tuple(media[::-1]))
    assert [at for at, _ in table.identities(run)] == [1, 4]


@pytest.mark.parametrize(
    "form",
    [list, tuple, lambda each: array("Q", each), lambda each: memoryview(array("b", each)), np.array]
    + [lambda each, dtype=dtype: np.array(each, dtype) for dtype in ("uint8", "int16", ">i4", "uint64")],
)
def test_extra_ids_are_read_from_every_form(form):
    table = IdentityTable()
    given = form([0, 3, 0, 120])
    assert ids(table.identify(packed(1, 1, 1, 1), extra_ids=given)) == [1, -2, 1, -3]
    assert list(given) == [0, 3, 0, 120]


def test_the_callers_extra_ids_are_left_alone():
    extra_ids = np.array([4, 0, 5], np.uint64)
    extra_ids.flags.writeable = False
    IdentityTable().identify(packed(9, 9, 9), [Media(0, 2, "cat")], extra_ids)
    assert extra_ids.tolist() == [4, 0, 5]


@pytest.mark.parametrize(("extra_ids", "match"), [
    ([0, -1], r"extra_ids\[1\] is -1; extra ids are 0 \.\. 18446744073709551615"),
    ((2**64, 0), r"extra_ids\[0\] is 18446744073709551616"),
    (np.array([0, -7], np.int8), r"extra_ids\[1\] is -7"),
    ([0], r"extra_ids has shape \(1,\), must be one int for each of 2 tokens"),
    ([], r"extra_ids has shape \(0,\)"),
    (range(3), r"extra_ids has shape \(3,\)"),
    (5, r"extra_ids has shape \(\)"),
    (np.array([[0, 1]]), r"extra_ids has shape \(1, 2\)"),
], ids=label)  # fmt: skip
def test_extra_ids_that_cannot_be_are_refused(extra_ids, match):
    refused(ArgumentError, match, extra_ids=extra_ids, num_tokens=2)


@pytest.mark.parametrize(("extra_ids", "match"), [
    ([0, 1.0], r"extra_ids\[1\] is a float, not an int"),
    ([None, 1], r"extra_ids\[0\] is a NoneType, not an int"),
    ([[0, 1], [0, 1]], r"extra_ids\[0\] is a list, not an int"),
    (np.array([0.0, 1.0]), "extra_ids must hold ints, not float64"),
    (np.array([True, False]), "extra_ids must hold ints, not bool"),
    ("ab", "extra_ids must hold ints, not <U2"),
    (b"ab", "extra_ids must hold ints"),
    ({1, 2}, "extra_ids must hold ints, not object"),
], ids=label)  # fmt: skip
def test_extra_ids_of_other_types_are_refused(extra_ids, match):
    refused(ArgumentTypeError, match, extra_ids=extra_ids, num_tokens=2)


def test_the_last_id_is_given_out_and_then_a_prompt_never_fits():
    table = IdentityTable()
    table._next_id = LAST_ID + 1
    assert ids(table.identify(packed(9, 9), [Media(0, 1, "cat"), Media(1, 1, "cat")])) == [LAST_ID + 1, LAST_ID + 1]
    before = state(table)
    with pytest.raises(NeverFits, match=r"2 new ids needed .* but only 1 of 2147483647 were never used"):
        table.identify(packed(9, 9, 9), [Media(0, 2, "dog")], [0, 0, 4])
    assert state(table) == before
    media = [Media(0, 1, "cat"), Media(1, 1, "cat"), Media(2, 1, "dog")]
    assert ids(table.identify(packed(9, 9, 9), media)) == [LAST_ID + 1, LAST_ID + 1, LAST_ID]
    assert ids(table.identify(packed(9), [Media(0, 1, "dog")])) == [LAST_ID]
    with pytest.raises(NeverFits, match=r"1 new ids needed .* but only 0"):
        table.identify(packed(9), [Media(0, 1, "cow")])


# -- prefixes are equal exactly where their content is -----------------------------------------------------------------

LETTERS = st.tuples(st.sampled_from([0, 1]), st.sampled_from([0, 0, 0, 1, 2**64 - 1]))
PIECES = st.tuples(
    st.sampled_from([None, None, "1", 1, b"1"]), st.lists(LETTERS, min_size=1, max_size=3).map(tuple)
)  # fmt: skip
PROMPTS = st.lists(PIECES, max_size=4)


class Prompt:
    """A prompt of pieces, plain or media, each with its tokens and extra ids; `content` is what a position holds."""

    def __init__(self, pieces):
        self.tokens, self.extra_ids, self.media, self.content = [], [], [], []
        for key, letters in pieces:
            if key is not None:
                self.media.append(Media(len(self.tokens), len(letters), key))
            for place, (token, extra_id) in enumerate(letters):
                cover = None if key is None else (type(key), key, place, len(letters))
                self.content.append((token, extra_id, cover))
            self.tokens += [token for token, _ in letters]
            self.extra_ids += [extra_id for _, extra_id in letters]

    @property
    def arguments(self):
        return packed(*self.tokens), self.media[::-1], self.extra_ids


def cat(*lengths):
    """Pieces of that many equal letters, all of one medium."""
    return [("cat", ((0, 0),) * length) for length in lengths]


@given(PROMPTS, PROMPTS, PROMPTS)
@example([], cat(2, 2), cat(4))
@example([], cat(1, 3), cat(1, 2))
@example(cat(2), cat(2), [(None, ((0, 0),) * 2)])
def test_packed_ids_agree_exactly_as_far_as_tokens_media_and_extra_ids(start, ours, theirs):
    table = IdentityTable()
    stored, asked = Prompt(start + ours), Prompt(start + theirs)
    stored_ids = ids(table.identify(*stored.arguments))
    expected = agreed(stored.content, asked.content)
    assert agreed(stored_ids, ids(table.look(*asked.arguments))) == expected
    asked_run = table.identify(*asked.arguments)
    assert agreed(stored_ids, ids(asked_run)) == expected
    assert asked_run == table.look(*asked.arguments)
    table.sweep([asked_run])
    assert table.tokens(asked_run).tolist() == asked.tokens
    assert table.look(*asked.arguments) == asked_run
    assert agreed(stored_ids, ids(table.look(*stored.arguments))) >= expected


@given(PROMPTS)
def test_every_prefix_says_how_much_of_its_last_span_is_missing(pieces):
    table, prompt = IdentityTable(), Prompt(pieces)
    run = table.identify(*prompt.arguments)
    for end in range(len(prompt.tokens) + 1):
        cover = prompt.content[end - 1][2] if end else None
        assert table.num_open_tokens(run[: 4 * end]) == (0 if cover is None else cover[3] - cover[2] - 1)


@given(st.lists(PROMPTS, max_size=5))
def test_two_tables_that_were_asked_alike_give_the_same_ids(prompts):
    ours, theirs = IdentityTable(), IdentityTable()
    for pieces in prompts:
        prompt = Prompt(pieces)
        theirs.look(*prompt.arguments)
        assert ours.identify(*prompt.arguments) == theirs.identify(*prompt.arguments)
    assert state(ours) == state(theirs)
    assert ours._next_id == FIRST_ID - len(ours)
