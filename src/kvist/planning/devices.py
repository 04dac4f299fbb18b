"""What a model can cache on accelerators of some memory: weights and activations taken off, by rank and stage."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from kvist.config import CacheConfig, LayerSpec, StateSpec, parse_bytes
from kvist.errors import ArgumentError, NeverFits
from kvist.planning.blocks import blocks_needed
from kvist.planning.capacity import max_concurrency, pool_bytes
from kvist.planning.loads import Load, ceil_div, check_count
from kvist.planning.models import decoder_settings, dtype_of_model, model_setting, numbered_layers
from kvist.planning.report import Plan, aligned, plan
from kvist.planning.settings import Settings
from kvist.planning.stages import stage_config, stages_of
from kvist.planning.weights import Weights, weights_of_model

__all__ = ["Demand", "Deployment", "DevicePlan", "StagePlan", "plan_devices", "stage_configs"]

PROCESS_BYTES = 512 * 2**20
"""Taken by a process for the accelerator's context, its libraries and communication."""
CHUNK_TOKENS = 8192
"""Tokens of one forward pass where nothing else is said."""


@dataclass(frozen=True, slots=True)
class Deployment:
    """Accelerators that a model is to run on: the memory of each, and how the model is spread over them.

    Of `gpu_memory`, the part `utilisation` may be used. `weights` are the bytes of the whole model, estimated where
    None; `reserved` those of each accelerator for activations and everything else that is no cache.
    """

    gpu_memory: int | str
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    utilisation: float = 0.9
    weights: int | str | None = None
    reserved: int | str | None = None

    def __post_init__(self) -> None:
        check_count(self.tensor_parallel, "tensor_parallel", at_least=1)
        check_count(self.pipeline_parallel, "pipeline_parallel", at_least=1)
        given: object = self.utilisation
        if isinstance(given, bool) or not isinstance(given, int | float) or not 0 < given <= 1:
            raise ArgumentError(f"utilisation is {given!r}, must be more than 0 and at most 1")

    @property
    def usable_bytes(self) -> int:
        """Bytes of one accelerator that may be used."""
        return int(parse_bytes(self.gpu_memory) * self.utilisation)


@dataclass(frozen=True, slots=True)
class Demand:
    """What is to be cached: sequences of up to `max_len` tokens, of which `num_prompt_tokens` are prompt, all if None.

    `concurrency` of them run at the same time, up to 256 where nobody asks. `dtype` is that of K and V, the model's own
    where None. A pass computes up to `max_chunk_tokens` of a prompt, or 8192.
    """

    max_len: int = 8192
    num_prompt_tokens: int | None = None
    concurrency: int | None = None
    dtype: str | None = None
    block_size: int = 16
    max_chunk_tokens: int | None = None

    def __post_init__(self) -> None:
        check_count(self.max_len, "max_len", at_least=1)
        for name in ("concurrency", "max_chunk_tokens"):
            if getattr(self, name) is not None:
                check_count(getattr(self, name), name, at_least=1)

    @property
    def load(self) -> Load:
        """One such sequence at its longest."""
        return Load(self.max_len, self.num_prompt_tokens)


@dataclass(frozen=True, slots=True)
class StagePlan:
    """One accelerator of a stage, where the model's layers `first_layer` up to, without it, `end_layer` are.

    The four numbers of bytes add up to what may be used of its memory.
    """

    first_layer: int
    end_layer: int
    weights_bytes: int
    reserved_bytes: int
    cache_bytes: int
    unused_bytes: int


@dataclass(frozen=True, slots=True)
class DevicePlan:
    """What fits on accelerators; as text, tables for people.

    `cache` is the plan of all layers on one rank of each stage. `num_sequences_at` are pairs of a length in tokens and
    how many sequences of it fit. Where somebody asked for `num_together`, each of them can be `longest_together` tokens
    long. `assumptions` are sentences on what was not given.
    """

    cache: Plan
    stages: tuple[StagePlan, ...]
    num_parameters: int
    num_active_parameters: int
    num_sequences_at: tuple[tuple[int, float], ...]
    num_together: int | None
    longest_together: int | None
    assumptions: tuple[str, ...]

    def __str__(self) -> str:
        lines = [str(self.cache), "", *aligned(_stage_rows(self)), "", *aligned(_length_rows(self)), ""]
        if self.longest_together is not None:
            lines += [
                f"each of {self.num_together:,} sequences can be up to {self.longest_together:,} tokens long",
                "",
            ]
        return "\n".join([*lines, "assumed:", *(f"- {line}" for line in self.assumptions)])


def plan_devices(
    model_config: Settings, deployment: Deployment, demand: Demand, *, tiers: Mapping[str, int | str] | None = None
) -> DevicePlan:
    """Return what a model, by the contents of its config.json, can cache on these accelerators.

    The groups share the memory so that all of them run out at the same number of sequences of `max_len` tokens; each
    stage has the same number of blocks, that of the fullest. `tiers` are the sizes of slower tiers for one rank of all
    stages, by name. Raises `ConfigError` for what cannot be read, and `NeverFits` where weights and activations leave
    too little for blocks of every group.
    """
    fitted = _Fitted.of(model_config, deployment, demand)
    whole, max_len = fitted.whole, demand.max_len
    return DevicePlan(
        cache=plan(whole, demand.load, tiers=tiers),
        stages=tuple(map(fitted.stage_plan, range(len(fitted.stages)))),
        num_parameters=fitted.weights.num_parameters,
        num_active_parameters=fitted.weights.num_active,
        num_sequences_at=tuple((length, max_concurrency(whole, length)) for length in _lengths(max_len)),
        num_together=demand.concurrency,
        longest_together=None if demand.concurrency is None else _longest_together(whole, demand.concurrency),
        assumptions=tuple(_assumptions(fitted)),
    )


def stage_configs(model_config: Settings, deployment: Deployment, demand: Demand) -> list[CacheConfig]:
    """Return the configuration of the cache of a rank of each stage, as `plan_devices` has it."""
    fitted = _Fitted.of(model_config, deployment, demand)
    return [stage_config(fitted.whole, fitted.numbers, stage) for stage in fitted.stages]


@dataclass(frozen=True, slots=True)
class _Fitted:
    """A model spread over accelerators, and the configuration, with blocks, of all of its layers on one rank."""

    model_config: Settings
    deployment: Deployment
    demand: Demand
    weights: Weights
    stages: tuple[range, ...]
    numbers: tuple[int, ...]
    whole: CacheConfig

    @classmethod
    def of(cls, model_config: Settings, deployment: Deployment, demand: Demand) -> _Fitted:
        numbered = numbered_layers(model_config, dtype=demand.dtype, tensor_parallel=deployment.tensor_parallel)
        weights = weights_of_model(model_config)
        stages = stages_of(len(weights.layers), deployment.pipeline_parallel)
        numbers = tuple(number for number, _ in numbered)
        config = _config(model_config, [layer for _, layer in numbered], demand)
        one = replace(config, num_blocks=_needs(config, demand.load))
        alone = cls(model_config, deployment, demand, weights, stages, numbers, one)
        return replace(alone, whole=replace(one, num_blocks=alone.num_blocks()))

    def num_blocks(self) -> tuple[int, ...]:
        """Return as many times the blocks of each group as fit into every stage, rounded down."""
        budgets = [self.budget(stage) for stage in range(len(self.stages))]
        sizes = [self.cache_bytes(stage) for stage in range(len(self.stages))]
        budget, size = min(zip(budgets, sizes, strict=True), key=lambda pair: pair[0] / pair[1])
        if budget <= 0:
            raise NeverFits(
                f"weights and activations take {-budget:,} bytes more than the {self.deployment.usable_bytes:,} of an "
                "accelerator that may be used: spread the model over more, or give --weights and --reserve"
            )
        num_blocks = tuple(need * budget // size for need in self.whole.group_num_blocks)
        if not all(num_blocks):
            raise NeverFits(f"{budget:,} bytes are left for the cache, less than a block of every group takes")
        return num_blocks

    def stage_plan(self, number: int) -> StagePlan:
        stage, cache_bytes = self.stages[number], self.cache_bytes(number)
        unused = self.budget(number) - cache_bytes
        return StagePlan(stage.start, stage.stop, self.weights_bytes(number), self.reserved, cache_bytes, unused)

    def budget(self, number: int) -> int:
        return self.deployment.usable_bytes - self.weights_bytes(number) - self.reserved

    def cache_bytes(self, number: int) -> int:
        config = stage_config(self.whole, self.numbers, self.stages[number])
        return sum(pool_bytes(config))

    def weights_bytes(self, number: int) -> int:
        of_stage, given = self.weights.stage_bytes(self.stages[number]), self.deployment.weights
        scale = 1.0 if given is None else parse_bytes(given) / sum(map(self.weights.stage_bytes, self.stages))
        return math.ceil(of_stage * scale / self.deployment.tensor_parallel)

    @property
    def reserved(self) -> int:
        """Bytes of an accelerator for activations of a pass, logits and the process itself."""
        if self.deployment.reserved is not None:
            return parse_bytes(self.deployment.reserved)
        settings, ranks = decoder_settings(self.model_config), self.deployment.tensor_parallel
        width: object = settings.get("intermediate_size") or settings.get("moe_intermediate_size")
        widest = max(width) if isinstance(width, list) else width if isinstance(width, int) else 0
        hidden = int(model_setting(settings, "hidden_size"))
        of_token = 4 * hidden + 2 * ceil_div(widest or 4 * hidden, ranks)
        logits = 2 * 4 * self.whole.max_sequences * ceil_div(settings["vocab_size"], ranks)
        return 2 * (self.whole.max_chunk_tokens or 1) * of_token + logits + PROCESS_BYTES


def _config(model_config: Settings, layers: list[LayerSpec], demand: Demand) -> CacheConfig:
    config = CacheConfig(
        layers,
        demand.block_size,
        num_blocks=1,
        max_sequences=demand.concurrency or 256,
        max_sequence_length=max(demand.max_len, _num_positions(model_config)),
        typical_length=demand.max_len,
        max_chunk_tokens=demand.max_chunk_tokens or min(CHUNK_TOKENS, demand.max_len),
    )
    config.validate()
    return config


def _needs(config: CacheConfig, load: Load) -> tuple[int, ...]:
    """Return the blocks of each group that a sequence needs, a state twice: in use, and to be found again."""
    needs = zip(blocks_needed(config, load), config.groups, strict=True)
    return tuple(need * 2 if group.kind == "state" else max(need, 1) for need, group in needs)


def _num_positions(model_config: Settings) -> int:
    positions = decoder_settings(model_config).get("max_position_embeddings")
    return positions if isinstance(positions, int) else 0


def _lengths(max_len: int) -> list[int]:
    powers = [2**power for power in range(10, 31, 2) if 2**power < max_len]
    return [*powers, max_len]


def _longest_together(config: CacheConfig, concurrency: int) -> int:
    low, high = 0, config.max_sequence_length
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if max_concurrency(config, middle) >= concurrency else (low, middle - 1)
    return low


# -- for people -------------------------------------------------------------------------------------------------------


def _assumptions(fitted: _Fitted) -> Iterator[str]:
    deployment, demand, config = fitted.deployment, fitted.demand, fitted.whole
    memory = parse_bytes(deployment.gpu_memory)
    yield f"{deployment.utilisation:.0%} of {memory:,} bytes may be used on each accelerator"
    if deployment.weights is None:
        yield (
            f"{fitted.weights.num_parameters:,} parameters of the decoder by its config, {fitted.weights.source}; "
            "norms, biases, and what else the checkpoint has (pictures, drafts) not counted"
        )
    if deployment.tensor_parallel > 1:
        yield f"weights divide evenly over {deployment.tensor_parallel} ranks"
        yield from _head_assumptions(decoder_settings(fitted.model_config), deployment.tensor_parallel)
    if demand.dtype is None:
        yield f"K and V are kept in {dtype_of_model(fitted.model_config)}, as the weights are"
    if deployment.reserved is None:
        yield (
            f"activations: {config.max_chunk_tokens:,} tokens a pass, four times the hidden numbers and twice the "
            f"MLP's in 2 bytes; float32 logits twice for {config.max_sequences} sequences; "
            f"{PROCESS_BYTES // 2**20} MiB for the process"
        )
    if demand.max_chunk_tokens is None:
        yield f"at most {config.max_chunk_tokens:,} tokens of a prompt in a pass"
    if any(group.kind in ("sliding", "chunked") for group in config.groups):
        yield "windows have room for a pass of every sequence at the same time: shorter ones (--chunk) need less"
    if any(isinstance(layer, StateSpec) for layer in config.layers):
        yield "two states of each sequence: the one in use, and one to be found again"
    if 0 < (positions := _num_positions(fitted.model_config)) < demand.max_len:
        yield f"sequences longer than the {positions:,} positions that the model's config tells of"
    yield "sequences share nothing; what they share makes room for more"


def _head_assumptions(settings: Settings, ranks: int) -> Iterator[str]:
    if settings.get("kv_lora_rank"):
        yield f"each of {ranks} ranks keeps the whole latent, as all heads read it"
        return
    heads = settings.get("num_key_value_heads") or settings.get("num_kv_heads") or 0
    if heads and heads % ranks:
        each = -(-heads // ranks)
        yield f"{heads} heads of K and V do not divide over {ranks} ranks: each keeps {each}, so some are kept twice"


def _stage_rows(made: DevicePlan) -> Iterator[list[str]]:
    yield ["each accelerator", "layers", "weights", "activations", "cache", "left over"]
    for number, stage in enumerate(made.stages):
        counts = (stage.weights_bytes, stage.reserved_bytes, stage.cache_bytes, stage.unused_bytes)
        layers = f"{stage.first_layer}-{stage.end_layer - 1}"
        yield [f"stage {number}", layers, *(f"{count / 2**30:,.2f} GiB" for count in counts)]


def _length_rows(made: DevicePlan) -> Iterator[list[str]]:
    yield ["tokens of each sequence", "sequences at the same time"]
    for length, concurrency in made.num_sequences_at:
        yield [f"{length:,}", f"{concurrency:,.1f}"]
