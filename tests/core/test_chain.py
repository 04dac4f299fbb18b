"""Digests of content are the same in every process, and those kept with extents are those that hashing anew gives."""

import os
import subprocess
import sys
from hashlib import sha256

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvist import AttentionSpec, CacheConfig, KVCacheManager, Media, RemoteTier
from kvist.core.chain import Chain
from kvist.core.extents import Root
from kvist.core.identity import IdentityTable
from kvist.testing import TokenMemory

FINGERPRINT = b"a model, its layers and block size"


def packed(*tokens):
    return np.array(tokens, np.int32).tobytes()


def chain(block_size=2, identities=None, fingerprint=FINGERPRINT):
    return Chain(fingerprint, block_size, IdentityTable() if identities is None else identities)


def digests(tokens, namespace=(), media=(), extra_ids=None, *, identities=None, block_size=2):
    """The digests of a prompt's whole blocks, as hex."""
    table = IdentityTable() if identities is None else identities
    of_table = chain(block_size, table)
    content = table.identify(packed(*tokens), media, extra_ids)
    return [digest.hex() for digest in of_table.extend(of_table.root(namespace), content)]


# -- golden values ----------------------------------------------------------------------------------------------------


def framed(*parts):
    return b"".join(len(part).to_bytes(8, "little") + part for part in parts)


def test_the_root_is_the_digest_of_version_fingerprint_and_namespace():
    expected = sha256(b"kvist chain 1" + framed(FINGERPRINT, b"stenant", b"i7", b"b\x00")).digest()
    assert chain().root(("tenant", 7, b"\x00")) == expected


def test_a_block_is_the_digest_of_the_one_before_and_of_its_ids_in_little_endian_order():
    root = chain().root(())
    first = sha256(root + b"\x01\0\0\0\x02\0\0\0").digest()
    second = sha256(first + b"\x03\0\0\0\x00\x01\0\0").digest()
    assert chain().extend(root, packed(1, 2, 3, 256)) == [first, second]


def test_a_key_is_tag_digest_and_group():
    keys = chain().keys(("a",), [bytes(32), b"\xff" * 32], 258)
    tag = sha256(b"tag" + chain().root(("a",))).digest()[:16]
    assert keys == [tag + bytes(32) + b"\x02\x01", tag + b"\xff" * 32 + b"\x02\x01"]


GOLDEN = {
    "plain": "af3ede31bf18a478f31a608f50aef5a3a76b091f720805277af5f040c848c260",
    "namespace": "b86962a7fced38ee89ca0d84c1deecd0abf2635a421beee0306d3d8740e31382",
    "media": "df04953f379dc4c54db32e54fb7a19b17c105bbba2fdc1bcd422fe2c00da3cce",
    "extra": "28fd38c1dd1dc0faa6300eda88bd0a7bead6e801afcca79f3a2bec09bdb69b73",
}

GOLDEN_PROGRAM = """
import numpy as np
from kvist import Media
from kvist.core.chain import Chain
from kvist.core.identity import IdentityTable

def last(namespace=(), media=(), extra_ids=None):
    table = IdentityTable()
    chain = Chain(b"golden", 4, table)
    content = table.identify(np.arange(1, 9, dtype=np.int32).tobytes(), media, extra_ids)
    return chain.extend(chain.root(namespace), content)[-1].hex()

print(last())
print(last(("model", 3, b"salt")))
print(last(media=[Media(2, 3, "cat")]))
print(last(extra_ids=[0, 0, 7, 0, 0, 0, 0, 2**64 - 1]))
"""


@pytest.mark.parametrize("seed", ["0", "1", "4242"])
def test_digests_are_these_in_every_process_whatever_its_hash_seed(seed):
    environment = os.environ | {"PYTHONHASHSEED": seed}
    told = subprocess.run(
        [sys.executable, "-c", GOLDEN_PROGRAM], env=environment, capture_output=True, text=True, check=True
    )
    assert told.stdout.split() == list(GOLDEN.values())


# -- what is told apart -----------------------------------------------------------------------------------------------


def test_parts_of_a_namespace_are_told_apart_by_type_and_by_where_they_end():
    namespaces = [
        (),
        ("",),
        ("", ""),
        ("1",),
        (1,),
        (b"1",),
        ("i1",),
        ("a", "b"),
        ("ab",),
        ("b", "a"),
        (b"a", "b"),
        ("a", b"b"),
        (-1,),
        (b"",),
        (0,),
        ("s", 1, b"1"),
        (10**30,),
        ("\ud800",),
    ]
    assert len({chain().root(each) for each in namespaces}) == len(namespaces)
    assert len({chain().tag(each) for each in namespaces}) == len(namespaces)


def test_models_and_block_sizes_of_other_fingerprints_share_no_digest():
    one, other = chain(), chain(fingerprint=b"another model")
    assert one.root(()) != other.root(())
    assert not set(one.extend(one.root(()), packed(1, 2, 3, 4))) & set(other.extend(other.root(()), packed(1, 2, 3, 4)))


def test_a_digest_depends_on_all_tokens_before_it():
    assert digests([1, 2, 3, 4])[1] != digests([9, 2, 3, 4])[1]
    assert digests([1, 2, 3, 4])[0] == digests([1, 2, 9, 9])[0]


def test_tokens_that_fill_no_block_have_no_digest():
    assert digests([1]) == []
    assert digests([1, 2, 3]) == digests([1, 2])


def test_media_are_told_apart_by_key_length_and_place():
    tokens = [1, 9, 9, 9]
    spans = [(), [Media(1, 3, "cat")], [Media(1, 3, b"cat")], [Media(1, 2, "cat")], [Media(2, 2, "cat")],
             [Media(1, 3, "dog")], [Media(1, 3, "")], [Media(1, 1, "cat"), Media(2, 2, "cat")], [Media(1, 3, 7)],
             [Media(1, 3, "7")]]  # fmt: skip
    assert len({digests(tokens, media=each)[-1] for each in spans}) == len(spans)


def test_extra_ids_are_told_apart_from_each_other_and_from_tokens():
    extras = [None, [1, 0, 0, 0], [0, 1, 0, 0], [2, 0, 0, 0], [0, 0, 0, 1], [2**64 - 1, 0, 0, 0], [1, 1, 0, 0]]
    assert len({digests([5, 5, 5, 5], extra_ids=each)[-1] for each in extras}) == len(extras)
    assert digests([5, 5, 5, 5], extra_ids=[0, 0, 0, 0]) == digests([5, 5, 5, 5])


def test_processes_that_met_media_and_extra_ids_in_other_orders_agree():
    prompt = {"tokens": [1, 9, 9, 9, 5, 6], "media": [Media(1, 3, "cat")], "extra_ids": [0, 0, 0, 0, 8, 0]}
    later = IdentityTable()
    later.identify(packed(7, 7, 7), [Media(0, 2, "dog")], [3, 0, 4])
    assert digests(**prompt, identities=later) == digests(**prompt)


def test_what_a_mark_stands_for_counts_by_its_block_not_by_the_position_in_the_piece():
    """Content hashed in one piece, or block by block, has the same digests."""
    table = IdentityTable()
    of_table = chain(2, table)
    content = table.identify(packed(1, 2, 3, 4, 5, 6), [Media(3, 3, "cat")], [0, 0, 5, 0, 0, 0])
    at_once = of_table.extend(of_table.root(()), content)
    digest, singly = of_table.root(()), []
    for at in range(0, len(content), 8):
        singly += of_table.extend(digest, content[at : at + 8])
        digest = singly[-1]
    assert singly == at_once


# -- digests kept with extents ----------------------------------------------------------------------------------------


def managed(block_size=2, num_blocks=8, **settings):
    """A manager with a store, so that it has a chain."""
    settings = {"max_sequences": 8, "max_sequence_length": 64, "model": "m"} | settings
    config = CacheConfig([AttentionSpec(1, 1)], block_size, num_blocks, tiers=[RemoteTier(url="memory://")], **settings)
    return KVCacheManager(config, TokenMemory(config))


def naive(manager, extent):
    """The digests of all whole blocks of the prefix that ends with an extent, by hashing all of it."""
    of_manager = manager._state.keeper.chain
    root = extent
    while root.parent is not None:
        root = root.parent
    assert isinstance(root, Root)
    content = b"".join(bytes(each.tokens) for each in extent.path())
    return of_manager.extend(of_manager.root(root.namespace), content)


def require_right_digests(manager, first=0):
    """Ask for the digests of every extent's blocks from one on, deepest extents first, and compare."""
    of_manager = manager._state.keeper.chain
    extents = list(manager._state.tree.extents())
    for extent in sorted(extents, key=lambda each: -each.start):
        end = extent.start + len(extent.tokens) // of_manager.block_bytes
        low = min(first, end)
        assert of_manager.of_path(extent, low, end) == naive(manager, extent)[low:end]


def cache(manager, tokens, **options):
    sequence = manager.add_sequence(tokens, **options)
    manager.commit([sequence])
    manager.free(sequence)
    manager.stats()


def test_an_extent_that_was_split_has_the_digests_of_its_own_blocks():
    with managed() as manager:
        cache(manager, [1, 2, 3, 4, 5, 6, 7, 8])
        require_right_digests(manager)
        cache(manager, [1, 2, 9, 9])
        require_right_digests(manager)


def test_an_extent_that_lost_its_tail_and_got_another_has_that_ones_digests():
    with managed(partial_reuse=False) as manager:
        cache(manager, [1, 2, 3, 4, 5, 6])
        require_right_digests(manager)
        assert manager.evict(2) == 2
        cache(manager, [1, 2, 7, 8, 5, 6], reuse=False)
        [extent] = manager._state.tree.extents()
        assert extent.num_blocks == 3, "it must have grown in place for this to say anything"
        require_right_digests(manager)


def test_what_is_below_an_extent_that_lost_its_tail_has_its_own_digests():
    with managed(partial_reuse=False) as manager:
        cache(manager, [1, 2, 3, 4, 5, 6])
        require_right_digests(manager)
        assert manager.evict(2) == 2
        cache(manager, [1, 2, 7, 8, 5, 6])
        require_right_digests(manager, first=2)
        require_right_digests(manager)


def test_a_path_of_a_thousand_extents_is_hashed_once_and_from_where_it_is_known():
    with managed(1, 1200, max_sequence_length=1100) as manager:
        tokens = list(range(1000))
        cache(manager, tokens)
        for end in range(999, 0, -1):
            root = manager._state.tree.roots[()]
            match = manager._state.tree.find(root, packed(*tokens[:end]), 4 * end, partial=False)
            if match.child is not None:
                manager._state.tree.split(match.child, match.child_blocks)
        assert manager.stats().num_extents == 1000
        require_right_digests(manager)


prompts = st.lists(st.sampled_from((1, 2)), min_size=1, max_size=12)
steps = st.lists(
    st.one_of(
        st.tuples(st.just("cache"), prompts, st.booleans()),
        st.tuples(st.just("evict"), st.integers(1, 4)),
        st.tuples(st.just("ask"), st.integers(0, 6)),
        st.tuples(st.just("drop")),
    ),
    max_size=25,
)


@settings(max_examples=200, deadline=None)
@given(steps, st.sampled_from((1, 2)), st.sampled_from(("through", "back")))
def test_digests_kept_are_those_of_hashing_anew_after_growth_shrinking_and_splits(calls, block_size, write):
    tiers = [RemoteTier(url="memory://", write=write)]
    config = CacheConfig([AttentionSpec(1, 1)], block_size, 14, model="m", max_sequence_length=64, tiers=tiers)
    with KVCacheManager(config, TokenMemory(config)) as manager:
        for name, *arguments in calls:
            if name == "cache":
                cache(manager, arguments[0], reuse=arguments[1])
            elif name == "evict":
                manager.evict(arguments[0])
            elif name == "ask":
                require_right_digests(manager, arguments[0])
            else:
                manager.drop(namespace=())
        require_right_digests(manager)
