"""Media and extra ids through every call: what differs in them is never shared, what agrees is."""

import itertools
import random

import numpy as np
import pytest
from tests.core.layers import FULL, grouped, sliding, state
from tests.core.small import cached, computed, refused, small

from kvist import ArgumentError, Media, NeverFits, OutOfBlocks, SequenceError, StaleMatch
from kvist.core import identity

CAT, DOG = Media(2, 3, "cat"), Media(2, 3, "dog")
TOKENS = [1, 2, 9, 9, 9, 3, 4, 5]


def found(manager, tokens, **options):
    return manager.match_prefix([*tokens, 77], **options).num_tokens


def longer(extra_ids):
    """Extra ids of a prompt with one plain token more."""
    return [*extra_ids, 0]


# -- admission and lookup ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block_size", [1, 2, 4])
def test_the_same_media_are_found_and_others_only_up_to_them(block_size):
    manager = small(block_size=block_size, num_blocks=16, partial_reuse=False)
    cached(manager, TOKENS, media=[CAT])
    before = 2 // block_size * block_size
    assert found(manager, TOKENS, media=[CAT]) == 8
    assert found(manager, TOKENS, media=[DOG]) == before
    assert found(manager, TOKENS) == before
    assert manager.add_sequence([*TOKENS, 77], media=[CAT]).num_cached_tokens == 8
    assert manager.add_sequence([*TOKENS, 77], media=[DOG]).num_cached_tokens == before


def test_a_block_is_found_in_part_only_up_to_the_media():
    manager = small(block_size=8)
    cached(manager, TOKENS, media=[CAT])
    assert [found(manager, TOKENS, media=media) for media in ([CAT], [DOG], [])] == [8, 2, 2]


def test_media_of_another_length_or_place_are_others():
    manager = small(block_size=1, num_blocks=32)
    cached(manager, TOKENS, media=[CAT])
    for other, n in (
        (Media(2, 2, "cat"), 2),
        (Media(3, 3, "cat"), 2),
        (Media(1, 3, "cat"), 1),
        (Media(2, 3, b"cat"), 2),
    ):
        assert found(manager, TOKENS, media=[other]) == n


def test_two_equal_media_side_by_side_are_not_one_of_their_length():
    manager = small(block_size=1, num_blocks=32)
    cached(manager, [9] * 6, media=[Media(0, 3, "cat"), Media(3, 3, "cat")])
    assert found(manager, [9] * 6, media=[Media(0, 6, "cat")]) == 0
    assert found(manager, [9] * 6, media=[Media(0, 3, "cat")]) == 3
    assert found(manager, [9] * 6, media=[Media(3, 3, "cat"), Media(0, 3, "cat")]) == 6


def test_tokens_are_read_as_they_were_given():
    manager = small(num_blocks=16)
    sequence = manager.add_sequence(TOKENS, media=[CAT], extra_ids=[0, 7, 0, 0, 5, 0, 0, 6])
    assert sequence.tokens.tolist() == TOKENS
    manager.append([sequence], [[11, 12]])
    assert sequence.tokens.tolist() == [*TOKENS, 11, 12]


def test_extra_ids_must_be_equal_too():
    manager = small(block_size=2, num_blocks=16)
    extra_ids = [0, 0, 5, 0, 0, 0, 0, 2**64 - 1]
    cached(manager, TOKENS, extra_ids=extra_ids)
    assert found(manager, TOKENS, extra_ids=longer(extra_ids)) == 8
    assert found(manager, TOKENS) == 2
    assert found(manager, TOKENS, extra_ids=[0, 0, 5, 0, 0, 0, 0, 1, 0]) == 7
    assert found(manager, TOKENS, extra_ids=np.array([0, 0, 6, 0, 0, 0, 0, 1, 0])) == 2


def test_extra_ids_of_nothing_but_zeros_are_plain_text():
    manager = small()
    cached(manager, TOKENS)
    assert found(manager, TOKENS, extra_ids=[0] * 9) == 8


def test_a_look_makes_nothing_known():
    manager = small()
    for n in range(50):
        manager.match_prefix(TOKENS, media=[Media(2, 3, n)], extra_ids=[n] * 8)
        manager.forecast().fits(TOKENS, media=[Media(2, 3, n)])
        manager.explain(TOKENS, media=[Media(2, 3, n)])
    assert len(manager._state.identities) == 0


def test_namespaces_and_media_count_both():
    manager = small(num_blocks=16)
    cached(manager, TOKENS, media=[CAT], namespace=("a",))
    assert found(manager, TOKENS, media=[CAT], namespace=("a",)) == 8
    assert found(manager, TOKENS, media=[CAT], namespace=("b",)) == 0


@pytest.mark.parametrize(
    ("media", "part"),
    [
        ([Media(6, 3, "cat")], "media[0] spans tokens 6 .. 8"),
        ([CAT, Media(4, 2, "dog")], "must not overlap"),
        ([CAT, CAT], "must not overlap"),
        ("cat", "media[0] is a str"),
        (7, "must be a list or tuple of Media"),
    ],
)
@pytest.mark.parametrize("call", ["add_sequence", "match_prefix", "explain", "fits"])
def test_media_that_do_not_fit_are_refused_by_every_call(call, media, part):
    manager = small()
    cached(manager, TOKENS)
    calls = {
        "add_sequence": manager.add_sequence,
        "match_prefix": manager.match_prefix,
        "explain": manager.explain,
        "fits": manager.forecast().fits,
    }
    with refused(manager, ArgumentError, part):
        calls[call](TOKENS, media=media)


@pytest.mark.parametrize("extra_ids", [[1], [0] * 9, [-1] * 8, [2**64] * 8, [0.5] * 8, "12345678", [[0]] * 8])
@pytest.mark.parametrize("call", ["add_sequence", "match_prefix", "explain"])
def test_extra_ids_that_do_not_fit_are_refused_by_every_call(call, extra_ids):
    manager = small()
    cached(manager, TOKENS)
    with refused(manager, ArgumentError, "extra_ids"):
        getattr(manager, call)(TOKENS, extra_ids=extra_ids)


def test_a_refused_prompt_with_media_changes_nothing():
    manager = small(num_blocks=4)
    computed(manager, TOKENS[:6], media=[CAT])
    with refused(manager, OutOfBlocks):
        manager.add_sequence(TOKENS, media=[DOG])
    assert found(manager, TOKENS[:6], media=[CAT]) == 6


# -- what others are told of it ---------------------------------------------------------------------------------------


def test_a_match_with_media_can_be_pinned():
    manager = small(num_blocks=8)
    cached(manager, TOKENS, media=[CAT])
    with manager.pin(manager.match_prefix([*TOKENS, 77], media=[CAT])) as pin:
        manager.evict(8)
        assert pin.num_tokens == found(manager, TOKENS, media=[CAT]) == 8
    manager.evict(8)
    assert found(manager, TOKENS, media=[CAT]) == 0


def test_a_match_whose_media_were_forgotten_is_stale(monkeypatch):
    monkeypatch.setattr(identity, "MIN_SWEPT", 2)
    manager = small(num_blocks=8)
    manager._state.identities = identity.IdentityTable()
    manager._state.rows.identities = manager._state.identities
    cached(manager, TOKENS, media=[CAT])
    match = manager.match_prefix([*TOKENS, 77], media=[CAT])
    manager.evict(8)
    for n in range(20):
        cached(manager, [1, 2, 3], media=[Media(0, 2, n)])
    with refused(manager, StaleMatch):
        manager.pin(match)
    cached(manager, TOKENS, media=[CAT])
    assert found(manager, TOKENS, media=[CAT]) == 8
    with pytest.raises(StaleMatch):
        manager.pin(match)


@pytest.mark.parametrize(("other", "outcome"), [(CAT, 8), (DOG, None)])
def test_a_match_from_before_a_reset_is_never_one_of_other_media(other, outcome):
    manager = small(num_blocks=8)
    cached(manager, TOKENS, media=[CAT])
    match = manager.match_prefix([*TOKENS, 77], media=[CAT])
    manager.reset()
    cached(manager, TOKENS, media=[other])
    if outcome is None:
        with refused(manager, StaleMatch):
            manager.pin(match)
    else:
        assert manager.pin(match).num_tokens == outcome


def test_media_of_what_only_a_pin_holds_are_kept(monkeypatch):
    monkeypatch.setattr(identity, "MIN_SWEPT", 2)
    manager = small(num_blocks=8)
    cached(manager, TOKENS, media=[CAT])
    pin = manager.pin(manager.match_prefix([*TOKENS, 77], media=[CAT]))
    manager.drop(namespace=())
    for n in range(1100):
        cached(manager, [1, 2, 3], media=[Media(0, 2, n)])
    manager.check()
    manager.digest()
    pin.release()


def test_media_that_nothing_refers_to_are_forgotten_and_all_others_kept(monkeypatch):
    monkeypatch.setattr(identity, "MIN_SWEPT", 4)
    manager = small(num_blocks=32, max_sequences=4)
    manager._state.identities = identity.IdentityTable()
    manager._state.rows.identities = manager._state.identities
    running = manager.add_sequence(TOKENS, media=[CAT])
    suspended = computed(manager, [7, 8, 9], media=[Media(0, 2, "suspended")])
    manager.suspend(suspended)
    cached(manager, [6, 6, 6], media=[Media(0, 2, "cached")])
    for n in range(100):
        cached(manager, [5, n, 5], media=[Media(0, 2, n)])
        manager.evict(2)
        running.tokens, manager.digest(), manager.check()
    assert len(manager._state.identities) < 30
    assert running.tokens.tolist() == TOKENS
    manager.resume(suspended)
    assert suspended.tokens.tolist() == [7, 8, 9]
    manager.commit([running])
    manager.free(running)
    assert found(manager, TOKENS, media=[CAT]) == 8


def test_digests_tell_media_and_extra_ids_apart():
    def digest(**options):
        manager = small(num_blocks=8)
        computed(manager, TOKENS, **options)
        return manager.digest()

    digests = [digest(), digest(media=[CAT]), digest(media=[DOG]), digest(extra_ids=[1] + [0] * 7)]
    assert len(set(digests)) == 4
    assert digest(media=[CAT]) == digests[1]


def test_digests_do_not_depend_on_media_that_are_gone():
    plain, other = small(num_blocks=8), small(num_blocks=8)
    other.match_prefix(TOKENS, media=[DOG])
    for manager in (plain, other):
        computed(manager, TOKENS, media=[CAT])
    assert plain.digest() == other.digest()


def test_an_explanation_counts_what_agrees_in_media_too():
    manager = small(num_blocks=8, partial_reuse=False)
    cached(manager, TOKENS, media=[CAT])
    assert "8 cached" in str(manager.explain([*TOKENS, 77], media=[CAT]))
    assert "2 cached" in str(manager.explain([*TOKENS, 77], media=[DOG]))


# -- the life of a sequence with media --------------------------------------------------------------------------------


def test_a_suspended_sequence_comes_back_with_its_media():
    manager = small(num_blocks=16)
    sequence = computed(manager, TOKENS, media=[CAT])
    manager.suspend(sequence)
    cached(manager, TOKENS, media=[DOG])
    assert manager.resume(sequence) == 0
    assert sequence.tokens.tolist() == TOKENS
    manager.append([sequence], [[50, 51]])
    manager.commit([sequence])
    assert found(manager, [*TOKENS, 50, 51], media=[CAT]) == 10
    assert found(manager, [*TOKENS, 50, 51], media=[DOG]) == 8


@pytest.mark.parametrize("left", [3, 4])
def test_a_sequence_cannot_end_inside_a_span(left):
    manager = small(num_blocks=16)
    sequence = computed(manager, TOKENS, media=[CAT])
    with refused(manager, SequenceError, f"{left} tokens end inside a media span, {5 - left} tokens before its end"):
        manager.rewind(sequence, 8 - left)


@pytest.mark.parametrize("left", [1, 2, 5, 6, 7, 8])
def test_a_sequence_may_end_before_or_after_a_span(left):
    manager = small(num_blocks=16)
    sequence = computed(manager, TOKENS, media=[CAT])
    manager.rewind(sequence, 8 - left)
    manager.append([sequence], [[60, 61, 62, 63, 64, 65]])
    manager.commit([sequence])
    tokens = [*TOKENS[:left], 60, 61, 62, 63, 64, 65]
    assert sequence.tokens.tolist() == tokens
    manager.free(sequence)
    assert found(manager, tokens, media=[CAT] if left >= 5 else []) == len(tokens)
    manager.check()


def test_forks_and_reordered_beams_take_media_along():
    manager = small(num_blocks=32)
    leader = manager.add_sequence(TOKENS, media=[CAT], num_beams=2)
    manager.commit([leader])
    beams = [*leader.beams, *manager.fork(leader)]
    manager.append(beams, [50, 51, 52])
    manager.reorder(beams, [1, 1, 0])
    manager.append(beams, [60, 61, 62])
    manager.commit(beams)
    for beam in beams:
        assert beam.tokens.tolist()[:8] == TOKENS
        assert found(manager, beam.tokens.tolist(), media=[CAT]) == 10
        assert found(manager, beam.tokens.tolist()) <= 2
    manager.check()


def test_a_sequence_with_media_that_grows_by_text_shares_with_a_prompt_that_has_both():
    manager = small(num_blocks=16)
    first = computed(manager, TOKENS, media=[CAT])
    manager.append([first], [[50, 51]])
    manager.commit([first])
    second = manager.add_sequence([*TOKENS, 50, 51, 52], media=[CAT])
    assert second.num_cached_tokens == 10


@pytest.mark.parametrize("layers", [[FULL, sliding(3)], [FULL, state()]], ids=["window", "state"])
def test_several_groups_tell_media_apart(layers):
    manager = grouped(layers, block_size=1)
    sequence = manager.add_sequence(TOKENS, media=[CAT])
    for stop in range(1, 9):
        manager.commit([sequence], stop)
    manager.free(sequence)
    assert [found(manager, TOKENS, media=media) for media in ([CAT], [DOG], [])] == [8, 2, 2]
    manager.check()


# -- namespaces never meet --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(25))
def test_no_block_ever_belongs_to_two_namespaces_or_two_media(seed):
    """Content is written as (namespace, media, tokens so far), copied by moves, and read before every step."""
    chance = random.Random(seed)
    manager = small(
        block_size=chance.choice([1, 2, 4]),
        num_blocks=chance.randint(8, 20),
        max_sequences=4,
        partial_reuse=chance.random() < 0.7,
    )
    texts = Texts(manager, chance)
    for _ in range(60):
        texts.act()
        for sequence in texts.of:
            texts.read_and_write(sequence)
        manager.check()


class Texts:
    """What the tokens of running sequences stand for, and what lies in every slot."""

    def __init__(self, manager, chance):
        self.manager, self.chance = manager, chance
        self.of, self.slots = {}, {}

    def act(self):
        """Do something at random, which may be refused."""
        sequence = self.chance.choice(list(self.of)) if self.of else None
        calls = [self.add] if sequence is None else [self.add, self.add, self.grow, self.end, self.rewind, self.fork]
        try:
            self.chance.choice([*calls, self.drop, self.pause])(sequence)
        except (OutOfBlocks, NeverFits, SequenceError):
            if sequence is not None and sequence.is_suspended:
                self.end(sequence)

    def add(self, _):
        tokens = [self.chance.randrange(2) for _ in range(self.chance.randint(2, 8))]
        key = self.chance.choice(["cat", "dog", 0])
        namespace = self.chance.choice([(), ("a",), ("b", 1)])
        sequence = self.manager.add_sequence(tokens, namespace=namespace, media=[Media(1, 1, key)] if key else [])
        self.of[sequence] = [(token, key if at == 1 else 0) for at, token in enumerate(tokens)]

    def grow(self, sequence):
        self.manager.append([sequence], [[self.chance.randrange(2)] * 3])
        self.of[sequence] += [(token, 0) for token in sequence.tokens[-3:].tolist()]

    def end(self, sequence):
        self.manager.free(sequence)
        del self.of[sequence]

    def rewind(self, sequence):
        self.manager.rewind(sequence, self.chance.randrange(sequence.num_tokens - 1))
        del self.of[sequence][sequence.num_tokens :]

    def fork(self, sequence):
        (child,) = self.manager.fork(sequence)
        self.of[child] = list(self.of[sequence])

    def drop(self, _):
        self.manager.drop(namespace=self.chance.choice([(), ("a",)]))

    def pause(self, sequence):
        if sequence is not None:
            self.manager.suspend(sequence)
            self.manager.resume(sequence)

    def read_and_write(self, sequence):
        """Read what is computed, and compute the rest."""
        for move in self.manager.take_moves():
            for n in range(move.num_tokens):
                self.slots[move.destination, n] = self.slots.get((move.source, n))
        block_size, blocks = self.manager.config.block_size, sequence.block_ids.tolist()
        places = [(blocks[at // block_size], at % block_size) for at in range(sequence.num_tokens)]
        needed = [(sequence.namespace, *text) for text in itertools.accumulate((each,) for each in self.of[sequence])]
        start = sequence.num_computed_tokens
        assert [self.slots.get(place) for place in places[:start]] == needed[:start]
        self.slots.update(zip(places[start:], needed[start:], strict=True))
        self.manager.commit([sequence])


def test_dropping_a_namespace_leaves_its_media_to_nobody():
    manager = small(num_blocks=16)
    held = computed(manager, TOKENS, media=[CAT], namespace=("a",))
    manager.drop(namespace=("a",))
    assert found(manager, TOKENS, media=[CAT], namespace=("a",)) == 0
    manager.free(held)
    assert found(manager, TOKENS, media=[CAT], namespace=("a",)) == 0
    assert manager.num_free_blocks == 16
