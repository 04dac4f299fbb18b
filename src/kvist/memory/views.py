"""One layer's K and V in the shapes that kernels read: views of the storage, never copies."""

from __future__ import annotations

from typing import Literal, NoReturn

import torch
from torch import Tensor

from kvist.errors import ArgumentError, LayoutError
from kvist.memory.dialects import PoolOffsets

__all__ = ["KVViews"]

HeadOrder = Literal["NHD", "HND"]
"""Whether a page is `[page_size, num_kv_heads, head_dim]` or `[num_kv_heads, page_size, head_dim]`."""

_ELSEWHERE = "storage_order='layer_major', in a pool that is shared with no layers of other sizes, has it"


class KVViews:
    """K and V of one layer, in every shape that the bytes allow; N pages of P tokens, H heads of D elements.

    Every view has the address of the storage and shows what is written later. What the storage cannot show without a
    copy is refused with `LayoutError`, which says what can. In layer-major storage `[2, N, P, H, D]` each layer is in
    one piece and has all of them but those for which heads would have to come before tokens. These are in heads-first
    storage `[2, N, H, P, D]`, which lacks those that cut or join pages. In block-major storage
    other layers lie between a layer's pages, so it has those in which pages keep an axis of their own. Where two 4-bit
    elements lie in a byte, D is half as long. Pairs are K and V; V is None where a layer keeps keys only.
    """

    def __init__(self, keys: Tensor, values: Tensor | None = None, name: str = "layer 0") -> None:
        self._keys = keys
        self._values = values
        self._name = name

    def __repr__(self) -> str:
        return f"KVViews({self._name}: {list(self._keys.shape)} {self._keys.dtype}, strides {self._keys.stride()})"

    @property
    def num_pages(self) -> int:
        """Pages of the pool."""
        return self._keys.shape[0]

    @property
    def page_size(self) -> int:
        """Tokens of a page."""
        return self._keys.shape[1]

    # ---- pages ------------------------------------------------------------------------------------------------------

    def keys(self) -> Tensor:
        """Return K, `[N, P, H, D]`; block tables name its pages. FlashAttention, FlashInfer's pairs, torch's varlen."""
        return self._keys

    def values(self) -> Tensor:
        """Return V, `[N, P, H, D]`. Raises `LayoutError` where the layer keeps keys only."""
        if self._values is None:
            raise LayoutError(f"{self._name} keeps keys only, there are no values; use keys(layer)")
        return self._values

    def pool(self) -> Tensor:
        """Return K and V as one, `[2, N, P, H, D]`: TensorRT Edge-LLM, vLLM.

        Raises `LayoutError` where V are none, or of another size than K.
        """
        keys, values = self._keys, self._values
        if values is None or values.shape != keys.shape:
            dim = 0 if values is None else values.shape[-1]
            raise LayoutError(
                f"{self._name} has keys of {keys.shape[-1]} and values of {dim} elements a head, "
                f"so no single tensor holds both; use keys(layer){' and values(layer)' if dim else ''}"
            )
        start = keys.storage_offset()
        return keys.as_strided((2, *keys.shape), (values.storage_offset() - start, *keys.stride()), start)

    def flat_pool(self) -> Tensor:
        """Return pages of K, then of V, `[2N, P, H, D]`: V of page b is page b + N, as `BatchTables.edge(N)` says."""
        return self._as("a flat pool", self.pool(), (2 * self.num_pages, *self._keys.shape[1:]))

    def paged(self, head_order: HeadOrder = "NHD") -> Tensor:
        """Return K and V page by page, `[N, 2, P, H, D]`, or `[N, 2, H, P, D]`: FlashInfer's one tensor, vLLM."""
        pages = self.pool().transpose(0, 1)
        if head_order == "NHD":
            return pages
        if head_order == "HND":
            return pages.transpose(2, 3)
        raise ArgumentError(f"head_order is {head_order!r}, must be 'NHD' or 'HND'")

    def heads_first(self) -> tuple[Tensor, Tensor | None]:
        """Return K and V with heads before tokens, `[N, H, P, D]` each: FlashInfer's HND, trtllm-gen.

        They are strided, but in heads-first storage, where each is in one piece.
        """
        return self._keys.transpose(1, 2), None if self._values is None else self._values.transpose(1, 2)

    def tensorrt(self) -> tuple[Tensor, PoolOffsets]:
        """Return the places that TensorRT-LLM's offsets count, `[places, H, P, D]`, and how they count them.

        The rule is for `BatchTables.tensorrt`: `PoolOffsets.split(N)` where a layer is in one piece, in block-major
        storage `PoolOffsets.interleaved(n)` of n layers alike. Raises `LayoutError` where heads would have to come
        before tokens in memory.
        """
        pool = (self._keys[None] if self._values is None else self.pool()).transpose(2, 3)
        self._require_heads_first(pool[0, 0])
        size = pool[0, 0].numel()
        value_stride = 0 if self._values is None else pool.stride(0)
        if value_stride % size or pool.stride(1) % size:
            raise LayoutError(f"{self._name} has planes that do not begin at whole pages of others; {_ELSEWHERE}")
        rule = PoolOffsets(pool.stride(1) // size, value_stride // size)
        num_places = rule.value_stride + (self.num_pages - 1) * rule.block_stride + 1
        places = pool.as_strided((num_places, *pool.shape[2:]), (size, *pool.stride()[2:]), pool.storage_offset())
        return places, rule

    def _require_heads_first(self, page: Tensor) -> None:
        if not page.is_contiguous():
            raise LayoutError(
                f"{self._name} keeps the heads of a token together, and TensorRT-LLM reads pages {list(page.shape)} "
                "with the tokens of a head together: storage_order='heads_first' has them so, and layers of one head, "
                "and pages of one token, are both; heads_first() and paged('HND') are strided views for kernels that "
                "take strides"
            )

    def refined(self, page_size: int) -> KVViews:
        """Return the same with pages of `page_size` tokens, a divisor of P: page j of block b is b * (P / size) + j.

        So number `BatchTables.refined` and `finer_table` them.
        """
        if page_size <= 0 or self.page_size % page_size:
            raise LayoutError(f"{self._name} has pages of {self.page_size} tokens, which {page_size} does not divide")
        return self._repaged(self.num_pages * (self.page_size // page_size), page_size)

    def coarsened(self, page_size: int) -> KVViews:
        """Return the same with pages of `page_size` tokens, a multiple of P, of whose c blocks the first is page * c.

        So number `BatchTables.coarsened` and `coarser_table` them, where sequences have blocks that lie so.
        """
        factor = page_size // self.page_size
        if page_size <= 0 or page_size % self.page_size or self.num_pages % factor:
            raise LayoutError(
                f"{self._name} has {self.num_pages} pages of {self.page_size} tokens, "
                f"which do not make whole pages of {page_size}"
            )
        return self._repaged(self.num_pages // factor, page_size)

    def as_dtype(self, dtype: torch.dtype) -> KVViews:
        """Return the same bytes as elements of another dtype of the same size, such as uint8 of 8-bit floats."""
        if dtype.itemsize != self._keys.dtype.itemsize:
            raise LayoutError(f"{self._name} has elements of {self._keys.dtype}, whose size is not that of {dtype}")
        values = None if self._values is None else self._values.view(dtype)
        return KVViews(self._keys.view(dtype), values, self._name)

    # ---- tokens -----------------------------------------------------------------------------------------------------

    def token_rows(self) -> tuple[Tensor, Tensor | None]:
        """Return K and V by slot, `[N * P, H, D]` each: slot mappings name its rows."""
        return self._each("token rows", (self.num_pages * self.page_size,))

    def xformers(self) -> tuple[Tensor, Tensor | None]:
        """Return K and V by slot, in a batch of one, `[1, N * P, H, D]` each: xFormers' paged biases."""
        keys, values = self.token_rows()
        return keys[None], None if values is None else values[None]

    def flex(self) -> tuple[Tensor, Tensor | None]:
        """Return K and V by slot with heads first, `[1, H, N * P, D]` each, strided: FlexAttention."""
        keys, values = self.xformers()
        return keys.transpose(1, 2), None if values is None else values.transpose(1, 2)

    # ---- slots ------------------------------------------------------------------------------------------------------

    def slots(self, max_batch: int, capacity: int) -> Tensor:
        """Return K and V of sequences in place, `[2, max_batch, capacity, H, D]` in one piece.

        Sequence b has pages `b * M` to `(b + 1) * M - 1`, `capacity` is M whole pages. Raises `LayoutError` where the
        pool has more pages than that: V begin behind all of them, so no dense tensor shows both.
        """
        num_needed = self._num_slot_pages(max_batch, capacity)
        if num_needed != self.num_pages:
            raise LayoutError(
                f"{self._name} has {self.num_pages} pages, and V begin behind all of them: slots of K and V in one "
                f"piece are of {num_needed}; use strided_slots, or separate_slots"
            )
        return self.strided_slots(max_batch, capacity)

    def strided_slots(self, max_batch: int, capacity: int) -> Tensor:
        """Return `slots` of a pool that may have more pages, which are not shown: K and V are further apart then."""
        num_needed = self._num_slot_pages(max_batch, capacity)
        shape = (2, max_batch, capacity, *self._keys.shape[2:])
        return self._as("slots", self.pool()[:, :num_needed], shape)

    def separate_slots(self, max_batch: int, capacity: int) -> tuple[Tensor, Tensor | None]:
        """Return K and V of sequences in place, `[max_batch, capacity, H, D]` each; the pool may have more pages."""
        num_needed = self._num_slot_pages(max_batch, capacity)
        values = None if self._values is None else self._values[:num_needed]
        return KVViews(self._keys[:num_needed], values, self._name)._each("slots", (max_batch, capacity))

    def transformers(self, max_batch: int, capacity: int, num_tokens: int) -> tuple[Tensor, Tensor | None]:
        """Return the first tokens of slots as `transformers` has K and V, `[max_batch, H, num_tokens, D]` each."""
        if not 0 <= num_tokens <= capacity:
            raise ArgumentError(f"num_tokens is {num_tokens}, must be from 0 to the capacity of {capacity}")
        keys, values = (
            None if plane is None else plane.transpose(1, 2)[:, :, :num_tokens]
            for plane in self.separate_slots(max_batch, capacity)
        )
        assert keys is not None
        return keys, values

    # ---- making views -----------------------------------------------------------------------------------------------

    def _num_slot_pages(self, max_batch: int, capacity: int) -> int:
        if max_batch <= 0 or capacity <= 0 or capacity % self.page_size:
            whole = -(-max(capacity, 1) // self.page_size) * self.page_size
            raise LayoutError(
                f"slots of {max_batch} sequences of {capacity} tokens are no whole pages of {self.page_size}; "
                f"{max(max_batch, 1)} of {whole} would be"
            )
        num_needed = max_batch * (capacity // self.page_size)
        if num_needed > self.num_pages:
            raise LayoutError(f"slots of {max_batch} x {capacity} take {num_needed} pages, there are {self.num_pages}")
        return num_needed

    def _repaged(self, num_pages: int, page_size: int) -> KVViews:
        keys, values = self._each(f"pages of {page_size} tokens", (num_pages, page_size))
        return KVViews(keys, values, self._name)

    def _each(self, what: str, axes: tuple[int, ...]) -> tuple[Tensor, Tensor | None]:
        """View K and V with these axes instead of pages and tokens."""
        keys, values = self._keys, self._values
        return (
            self._as(what, keys, (*axes, *keys.shape[2:])),
            None if values is None else self._as(what, values, (*axes, *values.shape[2:])),
        )

    def _as(self, what: str, tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
        try:
            return tensor.view(shape)
        except RuntimeError:
            self._refuse(what, tensor)

    def _refuse(self, what: str, tensor: Tensor) -> NoReturn:
        _, token_stride, head_stride, _ = self._keys.stride()
        is_heads_first = self._keys.shape[2] > 1 and head_stride > token_stride
        why = "has the tokens of a head together" if is_heads_first else "has other layers' bytes between its pages"
        raise LayoutError(
            f"{self._name} {why}, strides {tensor.stride()} for "
            f"{list(tensor.shape)}, so {what} cannot be shown without a copy; {_ELSEWHERE}"
        ) from None
