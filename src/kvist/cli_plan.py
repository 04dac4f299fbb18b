"""The command `kvist plan`: what a cache in some memory is good for, from a model's config.json and a trace."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from kvist import planning
from kvist.cli_errors import errors_told
from kvist.config import CacheConfig, parse_bytes
from kvist.errors import ArgumentError

__all__ = ["add_commands"]

EXAMPLES = """
\b
Examples:
  kvist plan ./my-model --gpu-memory "80 GiB"
  kvist plan ./my-model --gpu-memory "80 GiB" --tp 4 --dtype fp8 --max-len 32768 --concurrency 64
  kvist plan ./my-model --gpu-memory "80 GiB" --weights "16 GiB" --trace mooncake:conversation.jsonl.gz
  kvist plan ./my-model/config.json --memory "20 GiB" --length 8192
  kvist plan ./my-model --sequences 32 --length 8192 --prompt 6000 --chunk 2048
  kvist plan ./my-model --memory "20 GiB" --host "64 GiB" --json

Exit status: 0 done; 1 the model's config or the trace cannot be read, or memory is too little; 2 wrong arguments.
"""

# What a plan cannot do without; a Gemma's heads are not what hidden_size and num_attention_heads would make them.
_NEEDED = ("num_hidden_layers", "num_attention_heads", "hidden_size", "vocab_size")
_NEEDED_OF_GEMMA = ("num_key_value_heads", "head_dim")


def add_commands(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command(epilog=EXAMPLES)(plan)


def plan(
    model: Annotated[Path, typer.Argument(help="A model's config.json, or the folder that it is in.")],
    gpu_memory: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE", help='Memory of an accelerator, such as "80 GiB"; weights and activations are taken off.'
        ),
    ] = None,
    memory: Annotated[
        str | None, typer.Option(metavar="SIZE", help='Or memory of the cache alone, such as "20 GiB".')
    ] = None,
    sequences: Annotated[
        int | None, typer.Option(min=1, help="Or how many sequences are to fit at the same time.")
    ] = None,
    length: Annotated[int, typer.Option("--length", "--max-len", min=1, help="Tokens of each sequence.")] = 8192,
    prompt: Annotated[
        int | None, typer.Option(min=1, help="How many of them are prompt; all, if not given.", show_default=False)
    ] = None,
    chunk: Annotated[
        int | None,
        typer.Option(
            min=1, help="Tokens of a prompt in one forward pass; all, or 8192 with --gpu-memory.", show_default=False
        ),
    ] = None,
    block_size: Annotated[int, typer.Option(min=1, help="Tokens in a block.")] = 16,
    dtype: Annotated[
        str | None, typer.Option(help="That of K and V, such as fp8; the model's own, if not given.")
    ] = None,
    host: Annotated[str | None, typer.Option(metavar="SIZE", help="Memory of a tier on the host.")] = None,
    disk: Annotated[str | None, typer.Option(metavar="SIZE", help="Size of a tier on disk.")] = None,
    tp: Annotated[int, typer.Option(min=1, help="Accelerators that the heads are divided over.")] = 1,
    pp: Annotated[int, typer.Option(min=1, help="Stages that the layers are divided into.")] = 1,
    concurrency: Annotated[
        int | None, typer.Option(min=1, help="Sequences that run at the same time: how long can each be?")
    ] = None,
    weights: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Of the whole model; estimated, if not given.")
    ] = None,
    reserve: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Of each accelerator for activations; estimated, if not given."),
    ] = None,
    utilisation: Annotated[
        float | None, typer.Option(help="The part of the accelerator's memory that may be used; 0.9, if not given.")
    ] = None,
    trace: Annotated[
        str | None, typer.Option(metavar="[KIND:]FILE", help="What would these requests hit, and which tiers pay?")
    ] = None,
    prefill_rate: Annotated[
        float | None,
        typer.Option(metavar="TOKENS/S", help="Prompt tokens computed in a second; estimated, if not given."),
    ] = None,
    host_bandwidth: Annotated[
        str, typer.Option(metavar="SIZE", help="Bytes a second from host memory to each accelerator.")
    ] = "25 GB",
    disk_bandwidth: Annotated[
        str, typer.Option(metavar="SIZE", help="Bytes a second from disk to each accelerator.")
    ] = "5 GB",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Say what fits on accelerators or in memory, or what so many sequences need, without loading the model."""
    tiers = {name: size for name, size in {"host": host, "disk": disk}.items() if size is not None}
    with errors_told(status=2):
        if sum(given is not None for given in (gpu_memory, memory, sequences)) != 1:
            raise ArgumentError("give either --memory or --sequences, or --gpu-memory")
        demand = planning.Demand(length, prompt, concurrency, dtype, block_size, chunk)
        load = demand.load
        if gpu_memory is None:
            only_with_gpu: dict[str, object] = {
                "--tp": tp != 1, "--pp": pp != 1, "--concurrency": concurrency, "--weights": weights,
                "--reserve": reserve, "--utilisation": utilisation, "--trace": trace, "--prefill-rate": prefill_rate,
            }  # fmt: skip
            _refuse_without_gpu(only_with_gpu)
        part = 0.9 if utilisation is None else utilisation
        deployment = planning.Deployment(gpu_memory or 1, tp, pp, part, weights, reserve)
        bandwidths = parse_bytes(host_bandwidth), parse_bytes(disk_bandwidth)
    with errors_told(status=1):
        settings, filled = _completed(_read_config(model))
        made: planning.Plan | _OnDevices
        if gpu_memory is None:
            made = planning.plan(_config(settings, demand, memory, sequences), load, tiers=tiers)
        else:
            made = _OnDevices(planning.plan_devices(settings, deployment, demand, tiers=tiers), filled)
            if trace is not None:
                made = _with_trace(made, deployment, trace, prefill_rate, bandwidths)
    print(json.dumps(asdict(made) if isinstance(made, planning.Plan) else made.as_dict()) if as_json else made)


@dataclass(frozen=True, slots=True)
class _OnDevices:
    """A plan for accelerators, what was filled in of the config, and what a trace would find."""

    plan: planning.DevicePlan
    filled: tuple[str, ...]
    value: planning.TraceValue | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return the plan as JSON has it: that of the cache, as without accelerators, and what else there is."""
        told = asdict(self.plan)
        return {**told.pop("cache"), **told, "filled_settings": self.filled, "trace": _value_as_dict(self.value)}

    def __str__(self) -> str:
        lines = [str(self.plan)]
        if self.filled:
            lines.append(f"- {', '.join(self.filled)} are not in the config: the defaults of its model_type")
        if self.value is not None:
            lines += [
                "- tiers take what accelerators evict; requests come one at a time, so what running ones hold is not "
                "taken off (kvist lab replay does)",
                "",
                str(self.value),
            ]
        return "\n".join(lines)


def _value_as_dict(value: planning.TraceValue | None) -> dict[str, Any] | None:
    if value is None:
        return None
    return {**asdict(value), "tiers": [{**asdict(tier), "pays": tier.pays} for tier in value.tiers]}


def _refuse_without_gpu(given: dict[str, object]) -> None:
    if names := [name for name, value in given.items() if value not in (None, False)]:
        raise ArgumentError(f"{', '.join(names)}: only with --gpu-memory")


def _config(
    settings: dict[str, Any], demand: planning.Demand, memory: str | None, sequences: int | None
) -> CacheConfig:
    config = CacheConfig(
        planning.layers_of_model(settings, dtype=demand.dtype),
        demand.block_size,
        memory=memory,
        max_sequence_length=max(demand.max_len, _num_positions(settings)),
        typical_length=demand.max_len,
        max_chunk_tokens=demand.max_chunk_tokens,
    )
    return config if sequences is None else planning.sized_for(config, demand.load, sequences)


def _with_trace(
    made: _OnDevices,
    deployment: planning.Deployment,
    trace: str,
    prefill_rate: float | None,
    bandwidths: tuple[int, int],
) -> _OnDevices:
    """Add what LRU would find of a trace, exactly for every size."""
    from kvist.lab.curves import lru_curve, references_of
    from kvist.lab.traces import open_trace

    typical = planning.rates_of(made.plan, deployment, prefill_tokens_s=prefill_rate)
    requests = open_trace(trace)
    references = references_of(requests, requests.block_size or made.plan.cache.block_size)
    curve, size = lru_curve(references), references.block_size
    value = planning.value_of_tiers(
        made.plan,
        planning.Rates(typical.prefill_tokens_s, *bandwidths),
        requests.name,
        lambda num_tokens: float(curve.at(num_tokens // size)),
        references.num_unique * size,
    )
    return replace(made, value=value)


def _read_config(model: Path) -> dict[str, Any]:
    file = model / "config.json" if model.is_dir() else model
    try:
        settings = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ArgumentError(f"{file} is not JSON: {error}") from error
    if not isinstance(settings, dict):
        raise ArgumentError(f"{file} is not the config of a model: it holds a {type(settings).__name__}")
    return settings


def _completed(settings: dict[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Fill in what the config leaves to the defaults of its model_type, as published ones of Gemma 3 do.

    Returns the settings and the names of those that were filled in. Without `transformers`, which knows the defaults,
    the settings are as they were.
    """
    decoder = planning.decoder_settings(settings)
    is_gemma = str(decoder.get("model_type")).startswith("gemma")
    needed = _NEEDED + _NEEDED_OF_GEMMA * is_gemma
    if "model_type" not in decoder or all(planning.model_setting(decoder, name) for name in needed):
        return settings, ()
    try:
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING

        defaults = CONFIG_MAPPING[decoder["model_type"]](**decoder).to_dict()
    except (ImportError, KeyError):
        return settings, ()
    filled = {name: value for name, value in defaults.items() if decoder.get(name) is None and value is not None}
    told = tuple(name for name in _NEEDED + _NEEDED_OF_GEMMA if name in filled)
    return {**settings, "text_config": {**decoder, **filled}}, told


def _num_positions(settings: dict[str, Any]) -> int:
    positions = planning.decoder_settings(settings).get("max_position_embeddings")
    return positions if isinstance(positions, int) else 0
