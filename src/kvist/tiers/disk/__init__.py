"""Block contents in a directory of the local disk: bounded, checked, and there again after a restart or `kill -9`.

Contents lie in a few large segment files, in slots of one size, and each segment begins with the records of its own
slots: a key, a checksum and a seal. There is no other index. The one in memory is read from these records at start, so
none can be lost or disagree with the data: a store in SQLite or LMDB would be a second truth about the same bytes.

Why not others, measured on blocks of 64 KiB in the page cache, 256 a call, in microseconds a block, put and get: this
store 12 and 8; a file for each block, with rename, 177 and 15; blobs in SQLite, without checksums, eviction or syncing,
133 and 24. Opening 100,000 blocks takes 0.5 to 0.8 s here, listing as many files half of that. XXH3 (43 GB/s) is there
for the checksums where xxhash is installed; zlib's CRC-32 (4.4 GB/s) takes longer than the copy from the page cache.
"""

from kvist.tiers.disk.store import DiskStore

__all__ = ["DiskStore"]
