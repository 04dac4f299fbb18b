"""What other managers make of images, embeddings and salts in a prompt, and what their users ran into, as facts here.

Others mix keys into the hash of each block that a span touches; here a span is part of what tokens are, from its first
one on, so that what follows it is told apart, too.
"""

import hashlib

import pytest
from tests.core.small import cached, refused, small

from kvist import ArgumentError, Media

IMAGE = 9


def blocks_of(block_size, **settings):
    return small(block_size=block_size, num_blocks=32, **({"partial_reuse": False} | settings))


def hit(manager, tokens, *spans, **options):
    return manager.match_prefix(tokens, media=[Media(*span) for span in spans], **options).num_tokens


def leave(manager, tokens, *spans, **options):
    cached(manager, tokens, media=[Media(*span) for span in spans], **options)


# -- which blocks depend on which media -------------------------------------------------------------------------------


def test_M24_blocks_depend_on_the_spans_that_begin_in_them_or_before():
    """Differs: they add a key to the blocks that a span of 6 from 2 on touches, the first two of three; here the third
    is told apart as well, by its past, and so are two spans that touch the first and the third block.
    """
    found = []
    for spans, other in (
        ([(2, 6, "cat")], [(2, 6, "dog")]),
        ([(0, 4, "cat"), (8, 4, "dog")], [(0, 4, "cat"), (8, 4, "cow")]),
        ([(0, 4, "cat"), (8, 4, "dog")], [(0, 4, "cow"), (8, 4, "dog")]),
    ):
        manager = blocks_of(4)
        leave(manager, range(12), *spans)
        found.append((hit(manager, range(13), *spans), hit(manager, range(13), *other)))
    assert found == [(12, 0), (12, 8), (12, 0)]


def test_M27_a_hit_says_which_spans_it_holds_whole():
    manager = blocks_of(4)
    spans = [(0, 4, "cat"), (6, 4, "dog")]
    leave(manager, range(10), *spans)
    found = hit(manager, range(12), *spans)
    assert found == 8
    assert [offset + length <= found for offset, length, _ in spans] == [True, False]


def test_V27_a_block_knows_each_media_and_where_in_it_it_begins():
    manager = blocks_of(5)
    tokens, one, two = [IMAGE] * 15, (0, 5, "hash1"), (10, 5, "hash2")
    leave(manager, tokens, one, two)
    prompt = [*tokens, 1]
    assert hit(manager, prompt, one, two) == 15
    assert hit(manager, prompt, one, (10, 5, "hash3")) == 10
    assert hit(manager, prompt, one, (9, 5, "hash2")) == 5
    assert hit(manager, prompt, (0, 5, "hash3"), two) == 0
    assert hit(manager, [1, *tokens], (1, 5, "hash1"), (11, 5, "hash2")) == 0
    # A block that begins inside a span of its own knows how far inside.
    leave(manager, [7, *[IMAGE] * 8, 7], (1, 8, "hash1"))
    assert hit(manager, [7, *[IMAGE] * 8, 7, 1], (1, 8, "hash1")) == 10
    assert hit(manager, [7, 7, *[IMAGE] * 8, 1], (2, 8, "hash1")) == 0


def test_V28_a_salt_and_an_image_count_both():
    """Differs: they mix the salt into the block at token 0 only, and the chain of hashes carries it on; here it is the
    namespace, and every block has it.
    """
    manager = blocks_of(5)
    leave(manager, range(10), (0, 5, "hash1"), namespace=("salt",))
    found = [
        hit(manager, range(11), (0, 5, key), namespace=salt)
        for salt in [("salt",), ("other",), ()]
        for key in ("hash1", "hash2")
    ]
    assert found == [10, 0, 0, 0, 0, 0]


def digest_of(*vectors):
    return hashlib.sha256(repr(vectors).encode()).digest()


def test_V32_B057_B058_embeddings_are_known_by_a_digest_and_by_where_they_are():
    """The ids under embeddings are all 0. What is embedded, and which positions are, must be equal; one of two prompts
    of the same digest with another mask finds nothing but what lies before the first difference.
    """
    manager = blocks_of(4)
    tokens, digest = [0] * 8, digest_of(0.5, 0.25)
    leave(manager, tokens, (0, 8, digest))
    prompt = [*tokens, 1]
    assert hit(manager, prompt, (0, 8, digest)) == 8
    assert hit(manager, prompt, (0, 8, digest_of(0.5, 0.125))) == 0
    assert hit(manager, prompt, (0, 7, digest)) == 0
    assert hit(manager, prompt, (0, 4, digest), (4, 4, digest)) == 0
    assert hit(manager, prompt, (4, 4, digest)) == 0
    assert hit(manager, prompt) == 0


def test_V32_an_image_before_embeddings_counts_as_well():
    manager = blocks_of(4)
    spans = (0, 4, "image"), (4, 4, digest_of(1.0))
    leave(manager, [0] * 8, *spans)
    assert hit(manager, [0] * 9, *spans) == 8
    assert hit(manager, [0] * 9, (0, 4, "other"), spans[1]) == 0
    assert hit(manager, [0] * 9, spans[0], (4, 4, digest_of(2.0))) == 4


# -- what users ran into ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("partial_reuse", "found"), [(False, [0, 4]), (True, [1, 7])])
def test_B053_B055_two_images_on_the_same_placeholders_are_not_the_same(partial_reuse, found):
    manager = blocks_of(4, partial_reuse=partial_reuse)
    prompt = [1, *[IMAGE] * 6, 2]
    leave(manager, prompt, (1, 6, "cat"))
    assert [hit(manager, prompt, (1, 6, key)) for key in ("dog", "cat")] == found


def test_B054_an_image_that_has_moved_is_not_found_nor_is_one_of_another_length():
    manager = blocks_of(4)
    leave(manager, [IMAGE] * 12, (0, 4, "cat"), (4, 4, "dog"))
    assert hit(manager, [IMAGE] * 13, (0, 4, "cat"), (4, 4, "dog")) == 12
    assert hit(manager, [IMAGE] * 13, (0, 4, "dog"), (4, 4, "cat")) == 0
    assert hit(manager, [IMAGE] * 13, (1, 4, "cat"), (5, 4, "dog")) == 0
    assert hit(manager, [IMAGE] * 13, (0, 4, "cat"), (5, 4, "dog")) == 4
    assert hit(manager, [IMAGE] * 13, (0, 4, "cat"), (4, 5, "dog")) == 4
    assert hit(manager, [IMAGE] * 13, (0, 8, "cat")) == 0


def test_B055_spans_that_do_not_fit_the_prompt_are_refused():
    manager = blocks_of(4)
    for spans, says in (
        ([(6, 4, "cat")], "only 8 tokens"),
        ([(0, 4, "cat"), (3, 2, "dog")], "must not overlap"),
    ):
        with refused(manager, ArgumentError, says):
            manager.add_sequence(range(8), media=[Media(*span) for span in spans])


@pytest.mark.parametrize(("offset", "length"), [(-1, 3), (2, 0), (2, -2)])
def test_B053_a_span_that_cannot_be_is_refused(offset, length):
    with pytest.raises(ArgumentError, match="must be at least"):
        Media(offset, length, "cat")
