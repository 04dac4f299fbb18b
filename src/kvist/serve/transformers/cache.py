"""`PagedCache`: a transformers `Cache` whose K and V lie in the blocks of a `KVCacheManager` and outlive the call."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor
from transformers import Cache, GenerationMixin, PreTrainedModel

from kvist import KVCacheManager
from kvist.config import CacheConfig
from kvist.errors import ConfigError, NeverFits, OutOfBlocks, OutOfRows, SequenceError
from kvist.memory import TorchMemory
from kvist.serve.fingerprint import model_fingerprint
from kvist.serve.layers import kept_as
from kvist.serve.model import named
from kvist.serve.transformers.batch import Batch, Part
from kvist.serve.transformers.inputs import Inputs
from kvist.serve.transformers.layers import AttentionLayer, StateLayer, paged_layers
from kvist.serve.transformers.model import max_length, reusable_layers, sizes, weight_stamps
from kvist.serve.transformers.step import Step, plan_step

__all__ = ["PagedCache"]


class PagedCache(Cache):
    """The cache of successive `generate` calls of one model, over one pool of blocks.

    Pass the same object to every call: `model.generate(**inputs, cache=cache)` (`past_key_values=cache` before
    transformers 5.24). Each call begins with its own prompts, finds the longest prefixes that earlier calls left in the
    pool, and computes only what is missing: a next turn, a second question about one document and a shared system
    prompt all start late. Tokens equal those of the default cache.

    `num_blocks`, for each group of layers or one number for all, or `memory` ("4 GiB") sets the size, 1 GiB if neither
    is given. `namespace` is what must be equal besides tokens, such as the adapter in use; it may be assigned between
    calls. `checkpoint_tokens` says after how many tokens each a recurrent model's states are kept; by default they are
    after every block that ends while text is generated, and of a prompt after its last whole block. `kv_dtype` keeps K
    and V in 8 or 4 bits, which may change the text. Other keywords (`block_size`, `policy`, `tiers`, ...) go to
    `CacheConfig`; with tiers that outlive the process, what they keep is found by `model`, by default what
    `model_fingerprint` says, and the cache is to be closed. One token is run through the model to see what it caches.

    Raises `ConfigError` for a model whose prefixes can't be reused. A call that doesn't fit raises `OutOfBlocks` or
    `NeverFits`, and one that a prefix cache can't serve rightly (embeddings instead of ids, right padding, positions of
    one's own) raises `SequenceError`; the cache stays usable after each of them.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        /,
        *,
        num_blocks: int | Sequence[int] | None = None,
        memory: int | str | None = None,
        namespace: tuple[Any, ...] = (),
        checkpoint_tokens: int | None = None,
        kv_dtype: str | None = None,
        **settings: Any,
    ) -> None:
        layers = reusable_layers(model, checkpoint_tokens)
        if num_blocks is None and memory is None:
            memory = _DEFAULT_MEMORY
        settings.setdefault("max_sequence_length", max_length(model))
        settings.setdefault("typical_length", _TYPICAL_LENGTH)
        specs = kept_as(layers.specs, kv_dtype)
        config = named(model, CacheConfig(specs, num_blocks=num_blocks, memory=memory, **settings))
        self.memory = TorchMemory(config, device=layers.device)
        self.manager = KVCacheManager(config, memory=self.memory)
        if any(group.kind == "ring" for group in config.groups):
            raise ConfigError(["ring is True, but a PagedCache needs windows whose blocks are not written again"])
        self._namespace = namespace
        self._depends_on_padding = layers.asks_for_positions
        has_windows = any(group.kind in ("sliding", "chunked") for group in config.groups)
        self._needs_chunks = has_windows and config.max_chunk_tokens is None
        self._weights = weight_stamps(model)
        self._weights_name: tuple[str, ...] = ()
        self._namespaces: set[tuple[Any, ...]] = set()
        self._batch = Batch(self.manager)
        self._step: Step | None = None
        self._pending: Step | None = None
        self._is_recording = self._is_catching_up = False
        self._num_skipped_tokens: list[int] = []
        self._starting = False
        self._failed = False
        super().__init__(layers=paged_layers(self, layers))
        self._attention_layers = [layer for layer in self.layers if isinstance(layer, AttentionLayer)]
        self._state_layers = [layer for layer in self.layers if isinstance(layer, StateLayer)]
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

        Where all layers attend to everything, the rows of a batch start together, and one that has more in the pool
        than the others computes the difference anew. Otherwise, the others catch up with it first.
        """
        return self._num_skipped_tokens.copy()

    # ---- one call after the other -----------------------------------------------------------------------------------

    def reset(self) -> None:
        """End the rows of the last call and free their blocks; their content stays reusable until it is evicted."""
        self._settle()
        self._step = None
        self._starting = self._failed = self._is_recording = False
        self._batch.free()

    def close(self) -> None:
        """Reset, take the hooks off the model, and close the tiers; the cache can't be used after that."""
        self.reset()
        for hook in self._hooks:
            hook.remove()
        self.manager.close()

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
        self._is_recording = False

    # ---- one forward ------------------------------------------------------------------------------------------------

    def _before_forward(
        self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Take the tokens in, and cut what is cached in every row off the model's inputs."""
        if self._is_catching_up:
            return args, kwargs
        inputs = Inputs.of(model, args, kwargs)
        self._settle()
        num_skippable = inputs.max_skipped(model)
        inputs.check_length(num_skippable, self.manager.config.max_chunk_tokens)
        first = 0
        if is_new := self._begins_anew(inputs):
            self._admit(model, inputs, num_skippable)
        else:
            first = self._batch.num_columns
            self._extend(inputs)
        self._starting = False
        self._catch_up(model, inputs, first, first + num_skippable)
        part = self._batch.last_part(first + num_skippable)
        self._begin(part)
        if is_new:
            self._num_skipped_tokens = self._batch.num_skipped_tokens
        return (), inputs.without(part.first - first)

    def _catch_up(self, model: Any, inputs: Inputs, first: int, goal: int) -> None:
        """Compute, of rows that are behind and for states to be kept, what must be before all rows are, together."""
        while (part := self._batch.next_part(first, goal)) is not None:
            self._begin(part)
            self._is_catching_up = True
            try:
                with torch.no_grad():
                    model(**inputs.of_part(part, self._batch.tokens(part), self._batch.padding[part.rows]))
            finally:
                self._is_catching_up = False
            self._store(self._end_of_forward())

    def _begin(self, part: Part) -> None:
        self._batch.note_start(part)
        self._step = plan_step(self.manager, self._batch, part, self.memory.device)
        for attention in self._attention_layers:
            attention.is_updated = False
        for state in self._state_layers:
            state.load(self._step)

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

    def _admit(self, model: Any, inputs: Inputs, goal: int) -> None:
        """Begin a new batch, whose columns from `goal` on are to be computed by this forward."""
        padding = inputs.padding()
        inputs.check(0, padding)
        self._failed = True
        self._batch.free()
        self._forget_other_weights(model)
        namespace = (*self._namespace, *self._weights_name)
        namespaces = [namespace] * len(padding)
        if self._depends_on_padding:
            namespaces = [(*namespace, "padding", int(pad)) for pad in padding]
        with self._advice():
            self._batch.admit(inputs.token_ids, padding, namespaces, goal)
        self._namespaces |= set(namespaces)

    def _forget_other_weights(self, model: Any) -> None:
        stamps = weight_stamps(model)
        if stamps == self._weights:
            return
        self._weights = stamps
        if self.manager.config.stores:
            # Others may share the stores, with the weights as they were: what is there stays, and is not found here.
            self._weights_name = ("weights", model_fingerprint(model))
            return
        for namespace in self._namespaces:
            self.manager.drop(namespace=namespace)
        self._namespaces = set()

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
            self._pending = None
            self._batch.free()
            lacking = "num_blocks, max_sequences or max_sequence_length"
            if isinstance(error, OutOfBlocks):
                lacking = "max_sequences" if isinstance(error, OutOfRows) else "num_blocks"
            chunks = ""
            if self._needs_chunks:
                chunks = " A window holds a whole prompt while that is computed, unless you set max_chunk_tokens."
            advice = (
                f"make the PagedCache with more {lacking}, or pass fewer or shorter rows: all rows of a call, beams, "
                f"prompts and new tokens, share {sizes(self.manager.config)}. "
                f"The rows of this call were ended; what they had computed stays reusable.{chunks}"
            )
            error.args = (f"{error}; {advice}",)
            raise

    def _after_forward(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """Commit what the forward has written, or wait with that until `crop` tells how much of it stays."""
        if self._is_catching_up:
            return
        step = self._end_of_forward()
        if self._is_recording and not self._batch.has_waiting_rows:
            self._pending = step
        else:
            self._store(step)
        self._failed = False

    def _end_of_forward(self) -> Step:
        num_updated = sum(layer.is_updated for layer in self._attention_layers)
        if self._step is None or num_updated < len(self._attention_layers):
            raise SequenceError(
                f"{num_updated} of {len(self._attention_layers)} layers handed their keys and values to the cache; "
                "nothing of this forward is kept"
            )
        step, self._step = self._step, None
        return step

    def _store(self, step: Step) -> None:
        for layer in self._state_layers:
            layer.store(step)
        self._batch.commit(step.part)

    def _settle(self) -> None:
        """Commit the last forward if that still waits for `crop`."""
        step, self._pending = self._pending, None
        if step is not None:
            self._store(step)

    def step(self, layer: AttentionLayer) -> Step:
        """Return the forward that a layer takes part in. Raises `SequenceError` if it has no business in one."""
        if self._step is None or layer.is_updated:
            raise SequenceError(
                "a PagedCache is filled by calls of the model that it was made for, once per layer and call: "
                "model(...) or model.generate(...), not model.forward(...) or another model"
            )
        return self._step

    def num_columns(self, layer: AttentionLayer) -> int:
        """Return the columns that a layer has seen, padding included; 0 when a call begins, whose prompts come whole.

        Raises `SequenceError` where a call may have begun, unmarked.
        """
        if self._step is not None and not self._starting:
            return self._step.part.end if layer.is_updated else self._step.part.first
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
        if not num_removed:
            self._settle()
            return
        step, self._pending = self._pending, None
        with self._advice():
            self._batch.rewind(num_removed)
        # States can't be taken back: those from before the last forward are still in the arena, and what stays of it is
        # computed again when the next one comes.
        if step is not None and not self._state_layers and step.part.first < self._batch.num_columns:
            self._batch.commit(replace(step.part, end=self._batch.num_columns))

    def activate_past_recording(self) -> None:
        """Expect a `crop` after every forward, and let go of nothing before."""
        self._is_recording = True

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Let row i go on as row `beam_idx[i]`."""
        self._settle()
        parents = beam_idx.cpu().numpy()
        if (parents != np.arange(len(parents))).any():
            with self._advice():
                self._batch.reorder(parents)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Let every row go on `repeats` times, side by side."""
        self._settle()
        with self._advice():
            self._batch.select(np.repeat(np.arange(self._batch.num_rows), repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these rows, given by index or by a mask over the rows."""
        self._settle()
        with self._advice():
            self._batch.select(np.arange(self._batch.num_rows)[indices.cpu().numpy()])


def _hook(cache: PagedCache, act: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap an act of the cache as a hook that ignores calls with another cache, and that keeps the cache not alive."""
    reference = weakref.ref(cache)

    def run(model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *output: Any) -> Any:
        cache = reference()
        if cache is None or not any(argument is cache for argument in (*args, *kwargs.values())):
            return None
        return act(cache, model, args, kwargs, *output)

    return run


_DEFAULT_MEMORY = "1 GiB"

# Tokens of a typical sequence, by which memory is shared out among windows, states and full attention. Were it the most
# that the model has positions for, windows and states would get so little that no usual prompt fits.
_TYPICAL_LENGTH = 4096

# Whether `generate` marks the cache that it is given, as transformers does since 5.18. The mark is no public interface;
# should it go, a PagedCache asks to be reset before every call rather than take one prompt for the end of another.
_MARKS_CALLS = "_is_user_defined" in inspect.unwrap(GenerationMixin._prepare_cache_for_generation).__code__.co_names
