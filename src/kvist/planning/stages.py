"""A model cut into stages of layers: which layers each stage has, and what it caches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from kvist.config import AttentionSpec, CacheConfig, GroupSpec, LayerSpec
from kvist.errors import ConfigError
from kvist.planning.loads import check_count

__all__ = ["stage_config", "stages_of"]


def stages_of(num_layers: int, pipeline_parallel: int) -> tuple[range, ...]:
    """Return the layers of each stage: as many in each, and one more in those before the last if they do not divide.

    The last stage has the head of the model, so it is the last to get another layer, after the first.

    >>> stages_of(10, 4)
    (range(0, 2), range(2, 5), range(5, 8), range(8, 10))
    """
    check_count(pipeline_parallel, "pipeline_parallel", at_least=1)
    if pipeline_parallel > num_layers:
        raise ConfigError([f"pipeline_parallel is {pipeline_parallel}, more than the {num_layers} layers of the model"])
    sizes = [num_layers // pipeline_parallel] * pipeline_parallel
    for back in range(num_layers % pipeline_parallel):
        sizes[(pipeline_parallel - 2 - back) % pipeline_parallel] += 1
    ends = [sum(sizes[: number + 1]) for number in range(pipeline_parallel)]
    return tuple(range(end - size, end) for end, size in zip(ends, sizes, strict=True))


def stage_config(whole: CacheConfig, numbers: Sequence[int], stage: range) -> CacheConfig:
    """Return the configuration of the ranks of one stage, with as many blocks of each group as the whole model has.

    `numbers` are the layers of the model that `whole.layers` are or are parts of. Raises `ConfigError` where a layer of
    the stage reads the cache of a layer of another one.

    >>> layers = [AttentionSpec(1, 8, sliding_window=64), AttentionSpec(1, 8)]
    >>> config = stage_config(CacheConfig(layers, num_blocks=[100, 7]), [0, 1], range(0, 1))
    >>> len(config.layers), config.num_blocks
    (1, (7,))
    """
    members = [index for index, number in enumerate(numbers) if number in stage]
    places = {index: place for place, index in enumerate(members)}
    layers = [_moved(whole.layers[index], places, index) for index in members]
    part = replace(whole, layers=layers, num_blocks=1, memory=None)
    sizes = {_span(group): size for group, size in zip(whole.groups, whole.group_num_blocks, strict=True)}
    return replace(part, num_blocks=tuple(sizes[_span(group)] for group in part.groups))


def _moved(layer: LayerSpec, places: dict[int, int], index: int) -> LayerSpec:
    if not isinstance(layer, AttentionSpec) or layer.shares_layer is None:
        return layer
    if layer.shares_layer not in places:
        raise ConfigError(
            [f"layer {index} reads the cache of layer {layer.shares_layer}, which pipeline_parallel puts elsewhere"]
        )
    return replace(layer, shares_layer=places[layer.shares_layer])


def _span(group: GroupSpec) -> tuple[str, int, int, int, int]:
    return group.kind, group.window, group.sink_tokens, group.chunk_tokens, group.checkpoint_tokens
