"""How soon is the first token of a long document there when the document comes from host memory or disk?

The reference computes the document anew, with the same engine in the same run. The model has the shape of
SmolLM2-135M (30 layers, 46 KB of K and V a token in float32) and random weights, on which no time depends; it runs on
one thread. What is on the device is evicted before each turn; `disk cold` reads after the page cache was told to
forget. The document is fetched twice, and the second time counts: memory that lay idle while it was computed is slow to
come back on a virtual machine. All times are those on the wall, from `submit` to the first token.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from kvist import DiskTier, HostTier
from kvist.serve import Engine, SamplingParams, cache_config
from report import Options, Row, TimesFaster, main

BLOCK_SIZE = 16
PATIENT_S = 60.0
QUICK_SHAPE = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 2}
SHAPE = {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9}


@dataclass(frozen=True, slots=True)
class Contestant:
    """The first token of a document by one engine, after `prepare`; `seconds` are those of each turn."""

    name: str
    engine: Engine
    prepare: Callable[[], object] = lambda: None
    reuse: bool = True
    seconds: list[float] = field(default_factory=list)

    def take_turn(self, document: list[int]) -> None:
        """Measure once what is computed, and the second time what is found."""
        if self.reuse:
            self.seconds_to_first_token(document)
        self.seconds.append(self.seconds_to_first_token(document))

    def seconds_to_first_token(self, document: list[int]) -> float:
        """Raises RuntimeError unless the document is found, or, without reuse, computed."""
        self.engine.manager.evict(self.engine.manager.num_blocks)
        self.prepare()
        generation = self.engine.submit([*document, 7], SamplingParams(max_new_tokens=1), reuse=self.reuse)
        while self.engine.has_work:
            self.engine.step()
        stats = generation.stats
        if stats.num_cached_tokens != (len(document) if self.reuse else 0):
            raise RuntimeError(f"{self.name}: {stats.num_cached_tokens} tokens of {len(document)} were found")
        assert stats.time_to_first_token_s is not None
        return stats.time_to_first_token_s


def measure(options: Options) -> list[Row]:
    """Turns of all, one after the other."""
    torch.set_num_threads(1)
    num_tokens, repeats = (256, 1) if options.quick else (6000, 3)
    model = random_model(QUICK_SHAPE if options.quick else SHAPE)
    document = np.random.default_rng(0).integers(3, 1000, num_tokens).tolist()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(dir=".")))
        host, disk = (
            stack.enter_context(engine_with(model, num_tokens, tier))
            for tier in (
                HostTier(num_blocks=num_tokens // BLOCK_SIZE + 8),
                DiskTier(folder, "1 GiB", timeout_s=PATIENT_S),
            )
        )
        contestants = (
            Contestant("computed", host, reuse=False),
            Contestant("host", host),
            Contestant("disk warm", disk),
            Contestant("disk cold", disk, prepare=lambda: forget(folder)),
        )
        for engine in (host, disk):
            engine.generate([document], SamplingParams(max_new_tokens=1))
            if not engine.manager.flush(PATIENT_S):
                raise RuntimeError("the disk did not take the document in time")
        for _ in range(repeats):
            for contestant in contestants:
                contestant.take_turn(document)
    return rows(contestants, num_tokens)


def rows(contestants: tuple[Contestant, ...], num_tokens: int) -> list[Row]:
    """Return a row for each that finds the document, beside the one that computes it."""
    computed, *found = [(each.name, statistics.median(each.seconds)) for each in contestants]
    return [
        Row(
            name=f"first token, {num_tokens:,} tokens from {name}",
            value=seconds,
            unit="s",
            reference=computed[1],
            reference_name="computed",
            ratio_as=TimesFaster(1),
        )
        for name, seconds in found
    ]


def random_model(shape: dict[str, Any]) -> PreTrainedModel:
    """Return a Llama decoder of a shape, in float32."""
    torch.manual_seed(0)
    config = LlamaConfig(
        **shape,
        num_key_value_heads=max(shape["num_attention_heads"] // 3, 1),
        vocab_size=49152 if shape is SHAPE else 1024,
        max_position_embeddings=8192,
        eos_token_id=None,
    )
    model: PreTrainedModel = LlamaForCausalLM(config)
    model.eval()
    return model


def engine_with(model: PreTrainedModel, num_tokens: int, tier: HostTier | DiskTier) -> Engine:
    """Return an engine whose device holds one document."""
    num_blocks = num_tokens // BLOCK_SIZE + 8
    return Engine(
        model, cache_config(model, num_blocks=num_blocks, block_size=BLOCK_SIZE, max_sequences=1, tiers=[tier])
    )


def forget(folder: Path) -> None:
    """Have the page cache forget all files of a folder; only what is on disk can be."""
    for path in folder.iterdir():
        file = os.open(path, os.O_RDONLY)
        try:
            os.fsync(file)
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(file)


if __name__ == "__main__":
    main("tiers", measure, __doc__)
