"""The suite that every store for a slower tier passes, those of this library and your own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from threading import Thread
from typing import ClassVar

from kvist.tiers.protocol import Store, StoreFormat

__all__ = ["StoreSuite", "contents_of", "key_of"]


def key_of(number: int, tag: bytes = b"namespace number") -> bytes:
    """Return a key of 48 bytes, as the cache makes them.

    >>> len(key_of(7)), key_of(7)[:16]
    (48, b'namespace number')
    """
    return tag + Random(number).randbytes(32)


def contents_of(key: bytes, num_bytes: int) -> bytes:
    """Return what is put under a key: bytes that depend on all of it."""
    return Random(key).randbytes(num_bytes)


class StoreSuite:
    """What a cache relies on in any store. Inherit it, say how yours is opened, and pytest proves it.

        class TestMine(StoreSuite):
            def open_store(self, format, place):
                return MyStore(place / "store", format)

    A store with a bound must have room for 64 blocks of each of `block_bytes`.
    """

    block_bytes: ClassVar[tuple[int, ...]] = (96, 40)
    """Bytes of a block of each group."""
    keeps: ClassVar[bool] = True
    """Whether a store that is closed and opened again at the same place still has its contents."""

    def open_store(self, format: StoreFormat, place: Path) -> Store:
        """Open a store at a place: an empty folder for each test, for those that need one."""
        raise NotImplementedError

    def settle(self, store: Store) -> None:
        """Wait until what was put can be got, in a store that writes behind its callers' backs."""

    def damage(self, store: Store, key: bytes, change: Callable[[bytes], bytes]) -> bool:
        """Replace what is kept of a key, and all around it, by `change` of it; False if that cannot be done."""
        return False

    # -- what the tests say -------------------------------------------------------------------------------------------

    def format(self, model: str = "a model") -> StoreFormat:
        """Return the format of the tests, of any model."""
        return StoreFormat(model, block_size=2, block_bytes=self.block_bytes)

    def opened(self, place: Path, model: str = "a model") -> Store:
        """Open a store and make it empty."""
        store = self.open_store(self.format(model), place)
        store.drop(b"")
        return store

    def put(self, store: Store, keys: Sequence[bytes], num_bytes: int = 0) -> int:
        """Put each key's contents, wait for them, and return how many the store says are there."""
        size = num_bytes or self.block_bytes[0]
        num_put = store.put([(key, memoryview(contents_of(key, size))) for key in keys])
        self.settle(store)
        return num_put

    def found(self, store: Store, keys: Sequence[bytes], num_bytes: int = 0) -> list[bool]:
        """Get each key's contents, and check that every one that is said to be there is right."""
        size = num_bytes or self.block_bytes[0]
        buffers = [bytearray(size) for _ in keys]
        found = store.get(keys, [memoryview(buffer) for buffer in buffers])
        for key, buffer, is_there in zip(keys, buffers, found, strict=True):
            assert not is_there or bytes(buffer) == contents_of(key, size), f"wrong contents under {key.hex()}"
        return found

    # -- the tests ----------------------------------------------------------------------------------------------------

    def test_it_has_all_calls_of_the_protocol(self, tmp_path: Path) -> None:
        """A store need not inherit anything."""
        store = self.opened(tmp_path)
        assert isinstance(store, Store)
        store.close()

    def test_what_was_put_comes_back_byte_for_byte(self, tmp_path: Path) -> None:
        """Each key has its own contents."""
        store, keys = self.opened(tmp_path), [key_of(number) for number in range(8)]
        assert self.put(store, keys) == 8
        assert self.found(store, keys) == [True] * 8
        assert self.found(store, keys[::-1]) == [True] * 8
        store.close()

    def test_what_was_not_put_is_a_miss_among_hits(self, tmp_path: Path) -> None:
        """Answers stand in the order of the keys, whatever is missing between them."""
        store, keys = self.opened(tmp_path), [key_of(number) for number in range(10)]
        assert self.found(store, keys) == [False] * 10
        self.put(store, keys[::2])
        there = [number % 2 == 0 for number in range(10)]
        assert self.found(store, keys) == there
        assert store.contains(keys) == there
        store.close()

    def test_blocks_of_all_groups_lie_side_by_side(self, tmp_path: Path) -> None:
        """Contents may have the length of any group."""
        store = self.opened(tmp_path)
        for group, num_bytes in enumerate(self.block_bytes):
            assert self.put(store, [key_of(group)], num_bytes) == 1
        for group, num_bytes in enumerate(self.block_bytes):
            assert self.found(store, [key_of(group)], num_bytes) == [True]
        store.close()

    def test_contents_of_another_length_are_a_miss(self, tmp_path: Path) -> None:
        """A buffer is filled whole or not at all."""
        store, key = self.opened(tmp_path), key_of(1)
        self.put(store, [key], self.block_bytes[0])
        for num_bytes in (self.block_bytes[0] - 1, self.block_bytes[0] + 1, self.block_bytes[-1]):
            if num_bytes != self.block_bytes[0]:
                assert store.get([key], [memoryview(bytearray(num_bytes))]) == [False]
        store.close()

    def test_keys_may_have_17_to_64_bytes_and_all_of_them_count(self, tmp_path: Path) -> None:
        """A key that begins as another is another key; zeros at the end count, too."""
        store = self.opened(tmp_path)
        keys = [bytes(17), bytes(18), bytes(64), bytes(16) + b"\n", bytes(16) + b"/", b"\xff" * 64, b"*" * 17]
        self.put(store, keys[::2])
        assert self.found(store, keys) == [True, False] * 3 + [True]
        self.put(store, keys)
        assert self.found(store, keys) == [True] * 7
        store.close()

    def test_nothing_asked_is_nothing_answered(self, tmp_path: Path) -> None:
        """Empty calls are calls."""
        store = self.opened(tmp_path)
        assert (store.contains([]), store.get([], []), store.put([])) == ([], [], 0)
        store.close()

    def test_putting_what_is_there_keeps_it(self, tmp_path: Path) -> None:
        """Equal keys have equal contents, so it does not matter which of them stays."""
        store, keys = self.opened(tmp_path), [key_of(1), key_of(2)]
        self.put(store, keys)
        assert self.put(store, keys) == 2
        assert self.found(store, keys) == [True, True]
        store.close()

    def test_contents_are_copied_both_ways(self, tmp_path: Path) -> None:
        """What a caller does with his memory after a call is of no matter to the store."""
        store, key, size = self.opened(tmp_path), key_of(1), self.block_bytes[0]
        memory = bytearray(contents_of(key, size))
        store.put([(key, memoryview(memory))])
        memory[:] = bytes(size)
        self.settle(store)
        assert store.get([key], [memoryview(memory)]) == [True]
        memory[:] = bytes(size)
        assert self.found(store, [key]) == [True]
        store.close()

    def test_only_the_dropped_namespace_is_forgotten(self, tmp_path: Path) -> None:
        """Tags are 16 bytes at the front of keys; an empty one stands for all."""
        store = self.opened(tmp_path)
        ours, others = ([key_of(number, tag) for number in range(5)] for tag in (b"*" * 16, b"another tenant's"))
        self.put(store, ours + others)
        store.drop(b"*" * 16)
        assert self.found(store, ours + others) == [False] * 5 + [True] * 5
        assert self.put(store, ours) == 5
        assert self.found(store, ours) == [True] * 5
        store.drop(b"")
        assert self.found(store, ours + others) == [False] * 10
        store.close()

    def test_another_format_shares_nothing(self, tmp_path: Path) -> None:
        """Contents of another model are not there, and cannot be taken for ours."""
        store, key = self.opened(tmp_path), key_of(1)
        self.put(store, [key])
        store.close()
        try:
            store = self.open_store(self.format("another model"), tmp_path)
        except Exception:
            return  # a place that refuses another format is as good
        assert self.found(store, [key]) == [False]
        store.close()

    def test_what_was_put_outlives_the_process_that_put_it(self, tmp_path: Path) -> None:
        """A store opened again with an equal format has it all, if it keeps anything."""
        store, keys = self.opened(tmp_path), [key_of(number) for number in range(5)]
        self.put(store, keys)
        store.close()
        again = self.open_store(self.format(), tmp_path)
        assert self.found(again, keys) == [self.keeps] * 5
        again.close()

    def test_hits_misses_and_puts_are_counted(self, tmp_path: Path) -> None:
        """What is held may be unknown, what was done is not."""
        store, keys = self.opened(tmp_path), [key_of(number) for number in range(4)]
        self.put(store, keys[:3])
        self.found(store, keys)
        stats = store.stats()
        assert (stats.num_put, stats.num_hits, stats.num_misses) == (3, 3, 1)
        assert (stats.num_corrupt, stats.num_refused, stats.num_errors, stats.num_timeouts) == (0, 0, 0, 0)
        store.close()

    def test_a_bounded_store_stays_within_its_bound(self, tmp_path: Path) -> None:
        """What does not fit is refused, or older contents make room; either way what is found is right."""
        store = self.opened(tmp_path)
        capacity = store.stats().capacity_bytes
        size = self.block_bytes[0]
        if capacity is None or capacity > 4096 * size:
            store.close()
            return
        keys = [key_of(number) for number in range(2 * capacity // size)]
        for at in range(0, len(keys), 8):
            self.put(store, keys[at : at + 8])
            assert store.stats().num_bytes <= capacity
        num_found = sum(self.found(store, keys))
        assert 0 < num_found < len(keys)
        stats = store.stats()
        assert stats.num_evicted + stats.num_refused >= len(keys) - num_found
        store.close()

    def test_damaged_contents_are_a_miss_until_they_are_put_again(self, tmp_path: Path) -> None:
        """Flipped bits, missing ends, zeros, and what belongs to another key: none of it is ever taken for contents."""
        store, keys = self.opened(tmp_path), [key_of(number) for number in range(2)]
        changes: list[Callable[[bytes], bytes]] = [
            lambda kept: kept[:-1] + bytes([kept[-1] ^ 1]),
            lambda kept: bytes([kept[0] ^ 128]) + kept[1:],
            lambda kept: kept[: len(kept) // 2],
            lambda kept: kept[:-1],
            lambda kept: kept + b"\0",
            lambda _: b"",
            lambda kept: bytes(len(kept)),
        ]
        for number, change in enumerate(changes, start=1):
            self.put(store, keys)
            if not self.damage(store, keys[0], change):
                break
            assert self.found(store, keys) == [False, True]
            assert store.stats().num_corrupt == number
            assert store.contains(keys) == [False, True]
        store.close()

    def test_contents_under_the_key_of_others_are_a_miss(self, tmp_path: Path) -> None:
        """An entry says whose it is."""
        store, keys, kept = self.opened(tmp_path), [key_of(1), key_of(2)], [b""]

        def remember(entry: bytes) -> bytes:
            kept[0] = entry
            return entry

        self.put(store, keys)
        if self.damage(store, keys[0], remember):
            self.damage(store, keys[1], lambda _: kept[0])
            assert self.found(store, keys) == [True, False]
        store.close()

    def test_many_threads_never_read_what_is_wrong(self, tmp_path: Path) -> None:
        """Puts, gets and drops of the same keys at the same time: hits are right, and nobody hangs."""
        store, wrong = self.opened(tmp_path), list[Exception]()

        def live(seed: int) -> None:
            chance = Random(seed)
            for _ in range(20):
                keys = [key_of(chance.randrange(12)) for _ in range(4)]
                try:
                    self.put(store, keys)
                    self.found(store, keys)
                    if chance.random() < 0.1:
                        store.drop(keys[0][:16])
                except Exception as error:
                    wrong.append(error)

        threads = [Thread(target=live, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert wrong == []
        store.close()

    def test_closing_twice_is_fine(self, tmp_path: Path) -> None:
        """Whoever closes need not know whether somebody has."""
        store = self.opened(tmp_path)
        store.close()
        store.close()
