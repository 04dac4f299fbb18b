"""T04: two prompts are the same only if all that they depend on is: namespace, media, extra ids, each by its place."""

from itertools import combinations

import pytest
from tests.core.small import refused
from tests.torture.over import EVERYWHERE, over
from tests.torture.rig import Rig

from kvist import ArgumentError, Media
from kvist.errors import KvistError

TOKENS = [7, 9, 9, 9, 9, 9, 9, 8, 6, 5, 4, 3]
IMAGE = (1, 6)

IDENTITIES = {
    "plain": {},
    "salt X": {"namespace": ("salt", "X")},
    "adapter X": {"namespace": ("lora", "X")},
    "X alone": {"namespace": ("X",)},
    "X as bytes": {"namespace": (b"X",)},
    "adapter X, revision 1": {"namespace": ("lora", "X", 1)},
    "adapter X, revision 2": {"namespace": ("lora", "X", 2)},
    "adapter X, revision 1 as text": {"namespace": ("lora", "X", "1")},
    "X split otherwise": {"namespace": ("lo", "raX")},
    "image X": {"media": [Media(*IMAGE, "X")]},
    "image X as bytes": {"media": [Media(*IMAGE, b"X")]},
    "image Y": {"media": [Media(*IMAGE, "Y")]},
    "image X, one later": {"media": [Media(2, 6, "X")]},
    "image X, one shorter": {"media": [Media(1, 5, "X")]},
    "image X in two parts": {"media": [Media(1, 3, "X"), Media(4, 3, "X")]},
    "images X and Y": {"media": [Media(1, 3, "X"), Media(4, 3, "Y")]},
    "images Y and X": {"media": [Media(1, 3, "Y"), Media(4, 3, "X")]},
    "embeddings 5 at 1": {"extra_ids": [0, 5, *[0] * 10]},
    "embeddings 5 at 2": {"extra_ids": [0, 0, 5, *[0] * 9]},
    "embeddings 6 at 1": {"extra_ids": [0, 6, *[0] * 10]},
    "embeddings 5 at 1 and 2": {"extra_ids": [0, 5, 5, *[0] * 9]},
    "salt X with image X": {"namespace": ("salt", "X"), "media": [Media(*IMAGE, "X")]},
}
"""The same tokens, and what else they depend on."""


def symbols_of(tokens=TOKENS, media=(), extra_ids=None, **_):
    """What the oracle takes for the tokens: each with what it depends on besides."""
    symbols = [(token, 0 if extra_ids is None else extra_ids[at]) for at, token in enumerate(tokens)]
    for span in media:
        for at in range(span.offset, span.offset + span.length):
            symbols[at] = (*symbols[at], span.key, span.length, at - span.offset)
    return symbols


def in_common(one, other):
    """How many tokens two identities share from the start on."""
    if one.get("namespace", ()) != other.get("namespace", ()):
        return 0
    pairs = zip(symbols_of(**one), symbols_of(**other), strict=True)
    return next((at for at, (first, second) in enumerate(pairs) if first != second), len(TOKENS))


def serve(rig, **options):
    """Compute one identity, each slot that is read being the right one; how much of it was there."""
    sequence, symbols = rig.manager.add_sequence(TOKENS, **options), symbols_of(**options)
    rig.memory.verify(sequence, tokens=symbols)
    while (start := sequence.num_computed_tokens) < len(TOKENS):
        stop = start + rig.manager.chunk_limit(sequence, len(TOKENS) - start)
        rig.memory.write(sequence, start, stop, tokens=symbols)
        rig.manager.commit([sequence], stop)
    rig.free(sequence)
    return sequence.num_cached_tokens


@over(EVERYWHERE, num_blocks=80)
def test_B049_B053_B057_B058_B059_B061_B062_B063_no_two_identities_are_taken_for_one(rig):
    """22 identities of the same tokens: each finds its own in every tier, and of others what they have in common."""
    done = []
    for options in IDENTITIES.values():
        most = max((in_common(options, other) for other in done), default=0)
        assert serve(rig, **options) <= (most if rig.partial else most // 4 * 4), options
        done.append(options)
    rig.manager.stats()
    found = [rig.manager.match_prefix(TOKENS, **options).num_tokens for options in IDENTITIES.values()]
    assert min(found) >= 8
    if rig.tiers != "no tiers":
        rig.send_down()
    for options in IDENTITIES.values():
        serve(rig, **options)
    rig.require_all_back()


@pytest.mark.parametrize(("one", "other"), list(combinations(IDENTITIES, 2)))
def test_B049_B054_B057_of_each_pair_alone_in_a_cache_one_finds_of_the_other_what_is_the_same(one, other):
    """That is nothing, but for pairs whose first image is the same."""
    rig = Rig("full", partial=False)
    serve(rig, **IDENTITIES[one])
    same = in_common(IDENTITIES[one], IDENTITIES[other]) // 4 * 4
    assert same <= 4 * ("image" in one and "image" in other)
    assert rig.manager.match_prefix(TOKENS, **IDENTITIES[other]).num_tokens == same
    assert rig.manager.match_prefix(TOKENS, **IDENTITIES[one]).num_tokens == 8


@over(EVERYWHERE)
def test_B053_B055_media_that_cannot_be_are_refused_and_never_cached(rig):
    """Past the end, over each other, of no length, with no key: an error, and nothing of it is found by anybody."""
    for media in (
        [Media(8, 6, "X")],
        [Media(12, 1, "X")],
        [Media(1, 4, "X"), Media(3, 4, "Y")],
        [Media(1, 3, "X"), Media(1, 3, "X")],
        ["X"],
        7,
    ):
        with refused(rig.manager, KvistError):
            rig.manager.add_sequence(TOKENS, media=media)
        with refused(rig.manager, KvistError):
            rig.manager.match_prefix(TOKENS, media=media)
    for extra in ([1] * 11, [1] * 13, [-1] * 12, [2**64] * 12, ["X"] * 12, [0.5] * 12):
        with refused(rig.manager, KvistError):
            rig.manager.add_sequence(TOKENS, extra_ids=extra)
    for offset, length, key in ((0, 0, "X"), (-1, 2, "X"), (0, -2, "X"), (0, 2, None), (0, 2, 1.5), (0, True, "X")):
        with pytest.raises(KvistError):
            Media(offset, length, key)
    assert rig.manager.match_prefix(TOKENS).num_tokens == 0
    rig.require_all_back()


@over(EVERYWHERE)
def test_B046_namespaces_are_made_of_what_compares_exactly_or_are_refused(rig):
    """1, True and 1.0 are equal in Python: two of them are refused. -1 and -2 have one hash, and are not equal."""
    for namespace in (("a", True), (1.0,), (None,), (("a",),), ["a"], "a", {"a": 1}, (1, [2])):
        with refused(rig.manager, KvistError):
            rig.manager.add_sequence(TOKENS, namespace=namespace)
    alike = [(-1,), (-2,), (5,), (5 + 2**61 - 1,), ("5",), (b"5",), (0,), (), ("",), (b"",), ("", ""), (0, 0)]
    for namespace in alike:
        assert rig.leave(TOKENS, namespace=namespace) == 0
        rig.manager.evict(rig.manager.num_blocks) if rig.tiers == "no tiers" else rig.send_down()
    rig.require_all_back()


@over(EVERYWHERE)
def test_B059_B066_a_namespace_that_was_dropped_is_gone_from_every_tier(rig):
    """As weights or an adapter change: what runs goes on, and leaves nothing."""
    old, new = ("weights", 1), ("weights", 2)
    rig.leave(TOKENS, namespace=old)
    rig.leave(TOKENS, namespace=new)
    rig.send_down()
    running = rig.serve(TOKENS, namespace=old)
    rig.manager.drop(namespace=old)
    rig.decode([running], [[1]])
    rig.free(running)
    for _ in range(2):
        assert rig.leave(TOKENS, namespace=old, publish=False) == 0
        if rig.tiers == "no tiers":
            break
        rig.send_down()
    if rig.tiers != "no tiers" and not rig.has_states:
        assert rig.leave(TOKENS, namespace=new) >= 8
    rig.require_all_back()


@pytest.mark.parametrize("bad", [-1, 2**31, 2**63, 1.5, "a", None])
def test_B051_tokens_that_are_none_are_refused(bad):
    rig = Rig("full")
    with refused(rig.manager, KvistError):
        rig.manager.add_sequence([1, 2, bad])
    with refused(rig.manager, ArgumentError):
        rig.manager.add_sequence([])
