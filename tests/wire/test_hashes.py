"""Names of blocks as engines compute them, against golden values and by hand."""

import hashlib
import pickle
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.wire.blocks import Log, Media

from kvist.errors import ArgumentError
from kvist.wire.hashes import (
    KvistChain,
    Scope,
    SglangChain,
    TensorRTChain1,
    TensorRTChain2,
    VllmChain,
    extra_keys_of,
    hash_query,
    low_words,
    salt_id,
)
from kvist.wire.naming import RunNames, media_of
from kvist.wire.records import BlockMedia

PLAIN = Scope()
FIRST = 733356887393045


def rows(*tokens):
    return np.array([tokens], np.int32).reshape(1, -1)


def sha(data):
    return hashlib.sha256(data).digest()


@pytest.mark.parametrize(
    ("tokens", "parent", "scope", "extra_ids", "name"),
    [
        ((0, 1, 2, 3), None, PLAIN, (), FIRST),
        ((4, 5, 6, 7), FIRST, PLAIN, (), 6310903394565074474),
        ((8,), 6310903394565074474, PLAIN, (), 6312598008296577065),
        ((1000, 1001, 1002, 1003), None, PLAIN, (), 639116666879492),
        ((0, 1, 2, 3), None, Scope(lora_id=42), (), 12106754553835128565),
        ((4, 5, 6, 7), FIRST, Scope(lora_id=42), (), 17717364884457901007),
        ((), None, PLAIN, (), 0),
        ((1,), None, PLAIN, (), 0xCF5C95A1),
        ((1,), None, Scope(lora_id=0), (), 0x34666892C0),
        ((0, 1, 2, 3), None, Scope(salt=7), (), 0x7623BB1E2C31F49F),
        ((100, 101, 102, 103), None, PLAIN, (1, 1, 2, 2), 0x9866676AB84E5085),
    ],
)
def test_the_first_chain_of_tensorrt_gives_its_golden_values(tokens, parent, scope, extra_ids, name):
    assert TensorRTChain1().extend(parent, scope, rows(*tokens), (), extra_ids) == [name]


def test_the_first_chain_goes_on_within_one_call():
    both = TensorRTChain1().extend(None, PLAIN, np.arange(8, dtype=np.int32).reshape(2, 4))
    assert both == [FIRST, 6310903394565074474]


def test_the_first_chain_mixes_media_in_by_their_words_and_the_offset_inside():
    chain, digest = TensorRTChain1(), bytes(range(32))
    names = {tuple(chain.extend(None, PLAIN, rows(1, 2), [[BlockMedia(digest, offset)]])) for offset in (1, 0, -1, -2)}
    assert len(names) == 3, "where it begins in the block is nothing; how much of it came before is"


def test_the_second_chain_of_tensorrt_gives_its_golden_values():
    chain = TensorRTChain2()
    assert chain.root(PLAIN).hex() == "6e340b9cffb37a989ca544e6bb780a2c78901d3fb33738768511a30617afa01d"
    lora = chain.root(Scope(lora_id=42)).hex()
    assert lora == "2eb771db5a5d2bfc8539b068d8dbcebaa0b1028fc9369e12c50f00462437d0b4"
    assert salt_id("tenant-a") == 16248643848220682112
    salted = chain.root(Scope(salt="tenant-a")).hex()
    assert salted == "ceb640ee7c220334c7d84519e6d26f378de1afb061d8427adbcd3d1891662359"
    first, second = chain.extend(None, PLAIN, np.arange(8, dtype=np.int32).reshape(2, 4))
    assert first.hex() == "7b894451a88bc03088bd0c44f01139922b089a1ab691d157c273185c78ca83b2"
    assert second.hex() == "181684b4f09a9fc1689624a565bc5c9ed96cede3e0863cf373463b1a93c45369"
    assert TensorRTChain2(short=True).names([first]) == [8901721255985266736]


def test_the_second_chain_has_the_bytes_of_media_in_place_of_their_first_token():
    digest = bytes(range(32))
    (name,) = TensorRTChain2().extend(None, PLAIN, rows(1, 2, 3), [[BlockMedia(digest, 1)]])
    by_hand = sha(TensorRTChain2.root(PLAIN) + struct.pack("<i", 1) + digest + struct.pack("<i", 3))
    assert name == by_hand
    (inside,) = TensorRTChain2().extend(None, PLAIN, rows(1, 2, 3), [[BlockMedia(digest, -2)]])
    assert inside == TensorRTChain2().extend(None, PLAIN, rows(1, 2, 3))[0]


def test_vllm_begins_cbor_chains_with_the_hash_of_its_seed():
    chain = VllmChain("sha256_cbor", seed="0", short=False)
    assert chain.none_hash.hex() == "4e1195df020de59e0d65a33a4279f1183e7ae4e5d980e309f8b55adff2e61c3e"
    (name,) = chain.extend(None, PLAIN, rows(1, 24, 256, 70_000))
    encoded = b"\x83\x58\x20" + chain.none_hash + b"\x84\x01\x18\x18\x19\x01\x00\x1a\x00\x01\x11\x70" + b"\xf6"
    assert name == sha(encoded)


def test_vllm_hashes_extra_keys_with_the_salt_in_the_first_block_only():
    chain = VllmChain("sha256_cbor", seed="0", short=False)
    first, second = chain.extend(None, Scope(salt="s"), np.arange(2, dtype=np.int32)[:, None])
    assert first == sha(b"\x83\x58\x20" + chain.none_hash + b"\x81\x00" + b"\x81\x61s")
    assert second == sha(b"\x83\x58\x20" + first + b"\x81\x01" + b"\xf6")


def test_vllm_sha256_is_over_the_pickle_of_parent_tokens_and_keys():
    """V31: 6 tokens in blocks of 3 give two names, each over the one before."""
    chain = VllmChain("sha256", none_hash=bytes(32), short=False)
    first, second = chain.extend(None, PLAIN, np.arange(6, dtype=np.int32).reshape(2, 3))
    assert first == sha(pickle.dumps((bytes(32), (0, 1, 2), None), protocol=5))
    assert second == sha(pickle.dumps((first, (3, 4, 5), None), protocol=5))
    assert VllmChain("sha256", none_hash=bytes(32)).names([first]) == [int.from_bytes(first[-8:], "big")]


def test_extra_keys_are_adapter_media_and_salt_in_this_order():
    """V27 and V28: offsets count from the block, below 0 where media began before; the salt is the first block's."""
    media = [BlockMedia("hash1", 0), BlockMedia("hash2", 10)]
    assert extra_keys_of(PLAIN, media, is_first=True) == (("hash1", 0), ("hash2", 10))
    assert extra_keys_of(Scope(salt="salt"), [], is_first=True) == ("salt",)
    assert extra_keys_of(Scope(salt="salt"), [], is_first=False) is None
    assert extra_keys_of(Scope(lora_name="a", salt="s"), [BlockMedia("m", -3)], is_first=True) == ("a", ("m", -3), "s")


def test_vllm_needs_to_know_where_its_chain_begins():
    with pytest.raises(ArgumentError, match="PYTHONHASHSEED"):
        VllmChain("sha256")
    with pytest.raises(ArgumentError, match="sha256_cbor"):
        VllmChain("md5", seed="0")


def test_what_cbor_cannot_say_is_refused():
    chain = VllmChain("sha256_cbor", seed="0")
    with pytest.raises(ArgumentError, match="cannot be hashed"):
        chain.extend(None, Scope(lora_name="a", salt=1.5), rows(1))


def test_sglang_hashes_tokens_after_the_digest_before():
    chain = SglangChain()
    first, second = chain.extend(None, PLAIN, np.array([[1, 2], [3, 4]], np.int32))
    assert first == sha(struct.pack("<2I", 1, 2))
    assert second == sha(first + struct.pack("<2I", 3, 4))
    assert chain.names([first]) == [int(first.hex()[:16], 16)]


def test_kvists_chain_names_a_prompt_as_the_events_of_its_cache_do():
    log = Log()
    run = log.run(range(8))
    assert hash_query(KvistChain(b"fingerprint", 4), range(9), 4) == run.digests()
    assert hash_query(KvistChain(b"fingerprint", 4, short=True), range(9), 4) == low_words(run.digests())


@given(st.lists(st.integers(0, 2**31 - 1), max_size=24), st.integers(0, 5))
def test_chains_can_be_cut_anywhere(tokens, cut):
    whole = np.array(tokens[: len(tokens) // 4 * 4], np.int32).reshape(-1, 4)
    for chain in (TensorRTChain1(), TensorRTChain2(), SglangChain(), VllmChain("sha256_cbor", seed="0")):
        links = chain.extend(None, PLAIN, whole)
        head = chain.extend(None, PLAIN, whole[:cut])
        assert head == links[:cut]
        assert chain.extend(head[-1] if head else None, PLAIN, whole[cut:]) == links[cut:]


@pytest.mark.parametrize("chain", [None, TensorRTChain1(), VllmChain("sha256", seed="0", short=False)])
def test_runs_have_the_names_of_their_whole_prefix(chain):
    log = Log()
    parent = log.run(range(12))
    child = log.run(range(100, 108), parent=parent, parent_end=2)
    names = RunNames(chain, max_blocks=1)
    whole = log.run([*range(8), *range(100, 108)])
    expected = RunNames(chain).of(whole, 0, 4)
    assert names.of(child, 0, 2) == expected[2:]
    assert (names.before(child, 0), names.before(child, 1)) == expected[1:3]
    assert names.before(parent, 0) is None


def test_names_are_kept_for_a_bounded_number_of_blocks_and_computed_again():
    log, calls = Log(), []

    class Counting(TensorRTChain1):
        def extend(self, *arguments):
            calls.append(1)
            return super().extend(*arguments)

    names = RunNames(Counting(), max_blocks=2)
    runs = [log.run(range(at, at + 8)) for at in (0, 100)]
    wanted = [names.of(run, 0, 2) for run in runs]
    assert len(calls) == 2
    assert [names.of(run, 0, 2) for run in reversed(runs)] == wanted[::-1]
    assert len(calls) == 3, "the last one used was still there, the other was not"


def test_a_run_that_has_grown_keeps_its_names():
    log = Log()
    run, names = log.run(range(4)), RunNames(TensorRTChain1())
    assert names.of(run, 0, 1) == (FIRST,)
    run.append(np.arange(4, 8, dtype=np.int32).tobytes())
    assert names.of(run, 0, 2) == (FIRST, 6310903394565074474)


def test_media_are_told_for_every_block_that_they_cover_also_from_a_run_before():
    log = Log()
    run = log.run(range(12), media=[Media(2, 7, "cat")])
    media, extra_ids = media_of(run, 1, 3)
    assert media == ((BlockMedia("cat", -2, 7),), (BlockMedia("cat", -6, 7),))
    assert extra_ids == ()
    tail = log.run(range(50, 58), parent=run, parent_end=2)
    assert media_of(tail, 0, 2)[0] == ((BlockMedia("cat", -6, 7),), ())
    between = log.run(range(4), parent=run, parent_end=1)
    assert media_of(log.run(range(8), parent=between), 0, 2)[0] == ((BlockMedia("cat", -6, 7),), ())
    assert media_of(log.run(range(8), parent=run), 0, 2) == ((), ())


def test_extra_ids_are_told_for_each_token():
    log = Log()
    run = log.run(range(8), extra_ids=[0] * 5 + [9, 0, 0])
    assert media_of(run, 1, 2) == ((), (0, 9, 0, 0))
    assert media_of(run, 0, 1) == ((), ())
