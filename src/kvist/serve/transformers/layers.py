"""One layer's side of a `PagedCache`, with the interface that the caches of transformers have for its kind."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from torch import Tensor
from transformers.cache_utils import CacheLayerMixin, DummyLayer, LinearAttentionLayer

from kvist.config import AttentionSpec, GroupSpec, LayerSpec
from kvist.serve.layers import ModelLayers, StatePart, load_states, state_tensors
from kvist.serve.transformers.step import AttentionStep, StateStep, Step, first_column

if TYPE_CHECKING:
    from kvist.serve.transformers.cache import PagedCache

__all__ = ["AttentionLayer", "StateLayer", "paged_layers"]


def paged_layers(cache: PagedCache, layers: ModelLayers) -> list[Any]:
    """Return a cache layer for each layer of the model; those that keep nothing have one of transformers' own."""
    return [
        _paged_layer(cache, attention, state, parts)
        for attention, state, parts in zip(layers.attention, layers.states, layers.state_parts, strict=True)
    ]


def _paged_layer(
    cache: PagedCache, attention: int | None, state: int | None, parts: tuple[StatePart, ...]
) -> AttentionLayer | StateLayer | DummyLayer:
    if attention is not None and _shares(cache.manager.config.layers[attention]):
        attention = None
    if attention is not None and state is not None:
        return _AttentionAndStateLayer(cache, attention, state, parts)
    if attention is not None:
        return AttentionLayer(cache, attention)
    return DummyLayer() if state is None else StateLayer(cache, state, parts)


def _shares(spec: LayerSpec) -> bool:
    return isinstance(spec, AttentionSpec) and spec.shares_layer is not None


def _group_of(cache: PagedCache, spec: int) -> tuple[int, GroupSpec]:
    return next((index, group) for index, group in enumerate(cache.manager.config.groups) if spec in group.layers)


class AttentionLayer(CacheLayerMixin):
    """K and V of one layer: of all tokens, or of those in its window or chunk.

    What concerns all layers is done once, by the cache.
    """

    is_croppable = True
    is_compileable = False
    supports_early_init = False

    def __init__(self, cache: PagedCache, spec: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._cache = cache
        self._spec = spec
        self._group, self._span = _group_of(cache, spec)
        # So transformers calls layers that hand out less than all columns, chunks included.
        self.is_sliding = self._span.kind != "full"
        self.is_initialized = True
        self.is_updated = False

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Do nothing: the arena was made with the cache."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Store K and V `[n, H, S, D]` of the new columns; return those of the columns that `get_mask_sizes` says."""
        step, memory = self._cache.step(self), self._cache.memory
        where = cast("AttentionStep", step.groups[self._group])
        keys, values = (x.detach().transpose(1, 2).flatten(0, 1) for x in (key_states, value_states))
        if len(step.write_rows) < len(keys):
            keys, values = keys[step.write_rows], values[step.write_rows]
        memory.write(self._spec, keys, values, where.write_slots)
        self.is_updated = True
        all_keys, all_values = memory.read(self._spec, where.read_slots, dtype=keys.dtype)
        return _by_row(all_keys, step), _by_row(all_values, step)

    def get_seq_length(self) -> int:
        """Return the columns that are past, and with them the new ones once it has stored them."""
        return self._cache.num_columns(self)

    def get_mask_sizes(self, query_length: int | Tensor) -> tuple[int, int]:
        """Return how many columns `update` will hand out after `query_length` new ones, and the first of them."""
        num_query = query_length if isinstance(query_length, int) else len(query_length)
        num_past = self.get_seq_length()
        first = first_column(self._span, num_past)
        return num_past - first + num_query, first

    def get_max_length(self) -> int:
        """-1: the pool has a limit, a row has none of its own."""
        return -1

    get_max_cache_shape = get_max_length


class StateLayer(LinearAttentionLayer):
    """The recurrent states of one layer, which are in its own tensors while the model computes.

    transformers' code changes them there, partly in place. The arena has them before and after.
    """

    is_croppable = True
    is_compileable = False

    def __init__(self, cache: PagedCache, spec: int, parts: tuple[StatePart, ...]) -> None:
        super().__init__(number_of_states=len({key for _, key in parts}))
        self._memory = cache.memory
        self._state_spec = spec
        self._state_group, _ = _group_of(cache, spec)
        self._parts = parts

    def activate_past_recording(self) -> None:
        """Do nothing: the cache does not put states into the arena before it knows which tokens stay."""

    def load(self, step: Step) -> None:
        """Take the states out of the arena; none where no row has a past."""
        self._forget()
        if step.part.first > 0:
            where = cast("StateStep", step.groups[self._state_group])
            states = self._memory.read_states(self._state_spec, where.blocks)
            if where.is_new is not None:
                for tensor in states:
                    tensor[where.is_new] = 0
            load_states(self, self._parts, states)

    def store(self, step: Step) -> None:
        """Put the states into the arena."""
        where = cast("StateStep", step.groups[self._state_group])
        new = [tensor.detach()[where.write_rows] for tensor in state_tensors(self, self._parts)]
        self._memory.write_states(self._state_spec, where.write_blocks, new)

    def _forget(self) -> None:
        """Be as before the first forward, so that transformers begins anew."""
        for name in ("conv_states", "recurrent_states"):
            setattr(self, name, dict.fromkeys(range(self.number_of_states)))
            setattr(self, f"is_{name}_initialized", dict.fromkeys(range(self.number_of_states), False))
        self.has_previous_state = dict.fromkeys(range(self.number_of_states), False)


class _AttentionAndStateLayer(StateLayer, AttentionLayer):
    """A layer that has both: K and V of all tokens, and a recurrent state."""

    is_croppable = True
    is_compileable = False

    def __init__(self, cache: PagedCache, attention: int, state: int, parts: tuple[StatePart, ...]) -> None:
        AttentionLayer.__init__(self, cache, attention)
        StateLayer.__init__(self, cache, state, parts)


def _by_row(tokens: Tensor | None, step: Step) -> Tensor:
    """Shape what was read for all rows, `[n * C, H, D]`, as `[n, H, C, D]`."""
    assert tokens is not None, "transformers caches keys and values, never keys alone"
    return tokens.reshape(step.num_rows, -1, *tokens.shape[1:]).transpose(1, 2)
