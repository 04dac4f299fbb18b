"""The disk store passes the suite of all stores, through the page cache and past it."""

from tests.tiers.disks import UnsyncedFiles, segments

from kvist.testing.stores import StoreSuite
from kvist.tiers.disk import DiskStore


class TestBuffered(StoreSuite):
    io = "buffered"

    def open_store(self, format, place):
        self.place = place
        return DiskStore(place / format.model, 4 << 20, format, io=self.io, files=UnsyncedFiles())

    def damage(self, store, key, change):
        entry = next((queue[key] for queue in store._space.queues.values() if key in queue), None)
        if entry is None:
            return False
        (path,) = (path for path in self.place.glob(f"*/{entry.segment.name}"))
        data, geometry = bytearray(path.read_bytes()), entry.segment.geometry
        offset = geometry.slot_offset(entry.slot)
        kept = bytes(data[offset : offset + geometry.block_bytes])
        data[offset : offset + geometry.block_bytes] = change(kept)[-len(kept) :].ljust(len(kept), b"\0")
        path.write_bytes(data)
        return True


class TestDirect(TestBuffered):
    io = "direct"
    block_bytes = (4096, 100)


def test_the_suite_writes_to_disk(tmp_path):
    suite = TestBuffered()
    with suite.opened(tmp_path) as store:
        suite.put(store, [bytes(48)])
        assert segments(tmp_path / "a model")
