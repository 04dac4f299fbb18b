import doctest

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvist.errors import ArgumentError
from kvist.tiers import envelope as module
from kvist.tiers.envelope import ENVELOPE_BYTES, Envelope
from kvist.tiers.protocol import StoreFormat

FORMAT = StoreFormat("a model", block_size=2, block_bytes=(8, 3))
KEY = b"namespace tag 16" + bytes(range(32))


def unsealed(sealed, key=KEY, num_bytes=8, format=FORMAT):
    buffer = bytearray(num_bytes)
    is_whole = Envelope(format).unseal(key, sealed, memoryview(buffer))
    return bytes(buffer) if is_whole else None


def sealed(contents=b"contents", key=KEY, format=FORMAT):
    return Envelope(format).seal(key, memoryview(contents))


def test_the_example_in_the_docstring_runs():
    assert doctest.testmod(module).failed == 0


def test_what_was_sealed_is_unsealed():
    assert len(sealed()) == ENVELOPE_BYTES + 8
    assert unsealed(sealed()) == b"contents"
    assert unsealed(sealed(b"abc"), num_bytes=3) == b"abc"


def test_the_golden_bytes_of_an_entry():
    fingerprint = "f1578b83d5ee49568172845f456c9e02"
    head = "4b767374" + "0100" + "3000" + "0300000000000000" + fingerprint + KEY.hex() + "00" * 16
    assert sealed(b"abc").hex() == head + "2514229a" + b"abc".hex()


def test_every_flipped_bit_is_found():
    entry = sealed()
    for bit in range(8 * len(entry)):
        flipped = bytearray(entry)
        flipped[bit // 8] ^= 1 << bit % 8
        assert unsealed(flipped) is None


def test_every_missing_end_is_found():
    entry = sealed()
    assert [unsealed(entry[:length]) for length in range(len(entry))] == [None] * len(entry)
    assert unsealed(entry + b"\0") is None


def test_an_entry_of_another_key_format_or_length_is_foreign():
    assert unsealed(sealed(), key=KEY[:-1]) is None
    assert unsealed(sealed(), key=KEY + b"\0") is None
    assert unsealed(sealed(), format=StoreFormat("another model", 2, (8, 3))) is None
    assert unsealed(sealed(b"abc"), num_bytes=8) is None


@given(st.binary(max_size=200))
def test_nothing_random_is_an_entry(entry):
    assert unsealed(entry) is None


@pytest.mark.parametrize("key", [b"", bytes(16), bytes(65)])
def test_what_cannot_be_a_key_is_refused(key):
    with pytest.raises(ArgumentError, match=f"a key of {len(key)} bytes, but keys have 17 to 64 bytes"):
        sealed(key=key)


def test_contents_of_no_group_are_refused():
    with pytest.raises(ArgumentError, match="contents of 4 bytes, but blocks of this format have 3 or 8"):
        sealed(b"four")
