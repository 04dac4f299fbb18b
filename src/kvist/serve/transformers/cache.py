"""`PagedCache`: a transformers `Cache` whose K and V lie in the blocks of a `KVCacheManager` and outlive the call."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor
from transformers import Cache, GenerationMixin, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin

from kvist import KVCacheManager
from kvist.config import CacheConfig
from kvist.errors import NeverFits, OutOfBlocks, OutOfRows, SequenceError
from kvist.memory import TorchMemory
from kvist.serve.transformers.batch import Batch, Step
from kvist.serve.transformers.inputs import Inputs
from kvist.serve.transformers.model import attention_specs, weight_stamps

__all__ = ["PagedCache"]


class PagedCache(Cache):
    """The cache of successive `generate` calls of one model, over one pool of blocks.

    Pass the same object to every call: `model.generate(**inputs, cache=cache)` (`past_key_values=cache` before
    transformers 5.24). Each call begins with its own prompts, finds the longest prefixes that earlier calls left in the
    pool, and computes only what is missing: a next turn, a second question about one document and a shared system
    prompt all start late. Tokens equal those of the default cache.

    `num_blocks` or `memory` ("4 GiB") sets the size, 1 GiB if neither is given. `namespace` is what must be equal
    besides tokens, such as the adapter in use; it may be assigned between calls. Other keywords (`block_size`,
    `policy`, `max_sequences`, ...) go to `CacheConfig`. One token is run through the model to see what it caches.

    Raises `ConfigError` for a model whose prefixes can't be reused. A call that doesn't fit raises `OutOfBlocks` or
    `NeverFits`, and one that a prefix cache can't serve rightly (embeddings instead of ids, right padding, positions of
    one's own) raises `SequenceError`; the cache stays usable after each of them.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        num_blocks: int | None = None,
        memory: int | str | None = None,
        namespace: tuple[Any, ...] = (),
        **settings: Any,
    ) -> None:
        specs, self._device = attention_specs(model)
        if num_blocks is None and memory is None:
            memory = _DEFAULT_MEMORY
        settings.setdefault("max_sequence_length", _max_positions(model))
        config = CacheConfig(specs, num_blocks=num_blocks, memory=memory, **settings)
        self.memory = TorchMemory(config, device=self._device)
        self.manager = KVCacheManager(config, memory=self.memory)
        self._namespace = namespace
        self._weights = weight_stamps(model)
        self._namespaces: set[tuple[Any, ...]] = set()
        self._batch = Batch(self.manager, self.memory.block_size)
        self._step: Step | None = None
        self._layers_written: set[int] = set()
        self._num_skipped_tokens: list[int] = []
        self._starting = False
        self._failed = False
        super().__init__(layers=[_PagedLayer(self, index) for index in range(len(specs))])
        self._hooks = [
            model.register_forward_pre_hook(_hook(self, PagedCache._before_forward), with_kwargs=True),
            model.register_forward_hook(_hook(self, PagedCache._after_forward), with_kwargs=True),
        ]

    @property
    def namespace(self) -> tuple[Any, ...]:
        """What must be equal besides tokens for K and V to be reused; strings, ints, bytes. A new one ends the rows."""
        return self._namespace

    @namespace.setter
    def namespace(self, namespace: tuple[Any, ...]) -> None:
        if namespace != self._namespace:
            self.reset()
            self._namespace = namespace

    # ---- what happened ----------------------------------------------------------------------------------------------

    @property
    def num_cached_tokens(self) -> list[int]:
        """Prompt tokens of the last call that were found in the pool, by row."""
        return list(self._batch.num_cached_tokens)

    @property
    def num_skipped_tokens(self) -> list[int]:
        """Prompt tokens of the last call that the model did not compute again, by row.

        Rows of a batch start together, so a row that has more in the pool than the others computes the difference anew.
        """
        return self._num_skipped_tokens.copy()

    # ---- one call after the other -----------------------------------------------------------------------------------

    def reset(self) -> None:
        """End the rows of the last call and free their blocks; their content stays reusable until it is evicted."""
        self._step = None
        self._starting = self._failed = False
        self._batch.free()

    def close(self) -> None:
        """Reset, and take the hooks off the model; the cache can't be used after that."""
        self.reset()
        for hook in self._hooks:
            hook.remove()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def _is_user_defined(self) -> bool:
        """True. `generate` sets this on the cache it is given as every call begins, before it asks for any length."""
        return True

    @_is_user_defined.setter
    def _is_user_defined(self, _: bool) -> None:
        # The old rows stay until the first forward shows whether the call goes on with them.
        self._starting = True

    # ---- one forward ------------------------------------------------------------------------------------------------

    def _before_forward(
        self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[()], dict[str, Any]]:
        """Take the tokens in, and cut what is cached in every row off the model's inputs."""
        inputs = Inputs.of(model, args, kwargs)
        if self._begins_anew(inputs):
            num_skipped = num_past = self._admit(model, inputs)
        else:
            num_skipped, num_past = 0, self._batch.num_columns
            self._extend(inputs)
        self._starting = False
        self._layers_written = set()
        self._step = self._batch.step(num_past, self._device)
        self.memory.sync()
        return (), inputs.without(num_skipped)

    def _begins_anew(self, inputs: Inputs) -> bool:
        """Whether these are the first tokens of new prompts; if not, they are the next ones of the rows there are.

        Raises `SequenceError` for tokens that are neither.
        """
        if self._failed and not self._starting:
            raise SequenceError("the last forward failed half way: begin a new generate call, or reset() the cache")
        first, rows, columns = inputs.first_column, self._batch.num_rows, self._batch.num_columns
        if (self._starting or rows == 0) and not first:
            return True
        if self._failed or inputs.num_rows != rows or first not in {None, columns}:
            raise SequenceError(
                f"{inputs.num_rows} rows would go on at column {first}, but the cache holds {rows} rows of {columns} "
                "columns; pass whole prompts (what is cached of them is not computed again), or reset() the cache first"
            )
        return False

    def _admit(self, model: Any, inputs: Inputs) -> int:
        """Begin a new batch and return how many of its leading columns need not be computed."""
        padding = inputs.padding()
        inputs.check(0, padding)
        self._failed = True
        self._batch.free()
        self._forget_other_weights(model)
        with self._advice():
            self._batch.admit(inputs.token_ids, padding, self._namespace)
        self._namespaces.add(self._namespace)
        num_skipped = min(self._batch.num_cached_columns, inputs.max_skipped(model))
        self._num_skipped_tokens = [int(n) for n in np.maximum(num_skipped - padding, 0)]
        return num_skipped

    def _forget_other_weights(self, model: Any) -> None:
        stamps = weight_stamps(model)
        if stamps != self._weights:
            for namespace in self._namespaces:
                self.manager.drop(namespace=namespace)
            self._namespaces = set()
            self._weights = stamps

    def _extend(self, inputs: Inputs) -> None:
        inputs.check(self._batch.num_columns, self._batch.padding)
        self._failed = True
        with self._advice():
            self._batch.extend(inputs.token_ids)

    @contextmanager
    def _advice(self) -> Iterator[None]:
        """Where room is lacking, end the rows of the call and say what to do."""
        try:
            yield
        except (OutOfBlocks, NeverFits) as error:
            self._failed = True
            self._batch.free()
            lacking = "num_blocks, max_sequences or max_sequence_length"
            if isinstance(error, OutOfBlocks):
                lacking = "max_sequences" if isinstance(error, OutOfRows) else "num_blocks"
            advice = (
                f"make the PagedCache with more {lacking}, or pass fewer or shorter rows: all rows of a call, beams, "
                f"prompts and new tokens, share {self.manager.num_blocks} blocks of {self.memory.block_size} tokens. "
                "The rows of this call were ended; what they had computed stays reusable"
            )
            error.args = (f"{error}; {advice}",)
            raise

    def _after_forward(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """Commit what the forward has written."""
        if len(self._layers_written) != len(self.layers):
            raise SequenceError(
                f"{len(self._layers_written)} of {len(self.layers)} layers handed their keys and values to the cache; "
                "nothing of this forward is kept"
            )
        self._batch.commit()
        self._step = None
        self._failed = False

    def _exchange(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Store the new K and V `[B, H, S, D]` of a layer, and return those of all columns `[B, H, num_columns, D]`."""
        step = self._step
        if step is None or layer in self._layers_written:
            raise SequenceError(
                "a PagedCache is filled by calls of the model that it was made for, once per layer and call: "
                "model(...) or model.generate(...), not model.forward(...) or another model"
            )
        new_keys, new_values = (x.detach().transpose(1, 2).flatten(0, 1) for x in (keys, values))
        if len(step.write_rows) < len(new_keys):
            new_keys, new_values = new_keys[step.write_rows], new_values[step.write_rows]
        self.memory.write(layer, new_keys, new_values, step.write_slots)
        self._layers_written.add(layer)
        return self._read(self.memory.keys(layer), step), self._read(self.memory.values(layer), step)

    def _read(self, plane: Tensor, step: Step) -> Tensor:
        rows = plane.flatten(0, 1).index_select(0, step.read_slots)
        return rows.view(self._batch.num_rows, step.num_columns, *plane.shape[2:]).transpose(1, 2)

    def _num_columns(self, layer: int) -> int:
        """Columns that a layer holds now, padding included; 0 when a call begins, whose prompts come whole."""
        if self._step is not None and not self._starting:
            return self._step.num_columns if layer in self._layers_written else self._step.num_past
        if self._starting:
            return 0
        if self._batch.num_rows and not _MARKS_CALLS:
            raise SequenceError(
                "this version of transformers does not tell a cache when a call begins: reset() it before each"
            )
        return self._batch.num_columns

    # ---- what transformers asks of a cache --------------------------------------------------------------------------

    def crop(self, tokens_to_remove: int) -> None:
        """Take the last `-tokens_to_remove` columns back; a positive number, as before transformers 5.14, is kept."""
        change = int(tokens_to_remove)  # a tensor in some versions
        num_removed = -change if change <= 0 else max(self._batch.num_columns - change, 0)
        with self._advice():
            self._batch.rewind(num_removed)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Let row i go on as row `beam_idx[i]`."""
        parents = beam_idx.cpu().numpy()
        if (parents != np.arange(len(parents))).any():
            with self._advice():
                self._batch.reorder(parents)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Let every row go on `repeats` times, side by side."""
        with self._advice():
            self._batch.select(np.repeat(np.arange(self._batch.num_rows), repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these rows, given by index or by a mask over the rows."""
        with self._advice():
            self._batch.select(np.arange(self._batch.num_rows)[indices.cpu().numpy()])


class _PagedLayer(CacheLayerMixin):
    """One layer's side of a `PagedCache`; what concerns all layers is done once, by the cache."""

    is_croppable = True
    is_sliding = False
    is_compileable = False
    supports_early_init = False

    def __init__(self, cache: PagedCache, index: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._cache = cache
        self._index = index
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Do nothing: the arena was made with the cache."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Store K and V `[B, H, S, D]` of the new columns and return those of all columns."""
        return self._cache._exchange(self._index, key_states, value_states)

    def get_seq_length(self) -> int:
        return self._cache._num_columns(self._index)

    def get_mask_sizes(self, query_length: int | Tensor) -> tuple[int, int]:
        """Return (columns after `query_length` new ones, 0); transformers before 5.4 passes the columns themselves."""
        num_query = query_length if isinstance(query_length, int) else len(query_length)
        return self.get_seq_length() + num_query, 0

    def get_max_length(self) -> int:
        """-1: the pool has a limit, a row has none of its own."""
        return -1

    get_max_cache_shape = get_max_length


def _hook(cache: PagedCache, act: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap an act of the cache as a hook that ignores calls with another cache, and that keeps the cache not alive."""
    reference = weakref.ref(cache)

    def run(model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *output: Any) -> Any:
        cache = reference()
        if cache is None or not any(argument is cache for argument in (*args, *kwargs.values())):
            return None
        return act(cache, model, args, kwargs, *output)

    return run


def _max_positions(model: PreTrainedModel) -> int:
    return int(getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None) or 32768)


_DEFAULT_MEMORY = "1 GiB"

# Whether `generate` marks the cache that it is given, as transformers does since 5.18. The mark is no public interface;
# should it go, a PagedCache asks to be reset before every call rather than take one prompt for the end of another.
_MARKS_CALLS = "_is_user_defined" in inspect.unwrap(GenerationMixin._prepare_cache_for_generation).__code__.co_names
