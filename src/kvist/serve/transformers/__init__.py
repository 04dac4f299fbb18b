"""Prefix reuse for plain `model.generate(...)` of transformers: a cache over the blocks of a `KVCacheManager`."""

from kvist.serve.transformers.cache import PagedCache

__all__ = ["PagedCache"]
