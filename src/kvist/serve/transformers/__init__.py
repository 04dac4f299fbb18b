"""Prefix reuse for plain `model.generate(...)` of transformers: a cache over the blocks of a `KVCacheManager`."""

try:
    from kvist.serve.transformers.cache import PagedCache
except ModuleNotFoundError as error:
    if error.name not in ("torch", "transformers"):
        raise
    raise ModuleNotFoundError(f"PagedCache needs {error.name}: pip install 'kvist[serve]'", name=error.name) from error

__all__ = ["PagedCache"]
