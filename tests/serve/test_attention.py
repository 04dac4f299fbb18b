from types import SimpleNamespace

import numpy as np
import pytest
import torch

from kvist import AttentionSpec, CacheConfig
from kvist.errors import ConfigError
from kvist.memory import TorchMemory
from kvist.memory.tables import BatchTables
from kvist.serve.attention import PackedBatch, paged_attention
from kvist.serve.layers import ModelLayers
from kvist.serve.spans import DecodeSpan, first_seen, lay_out

BLOCK_SIZE, NUM_BLOCKS, HEADS, KV_HEADS, DIM, VALUE_DIM = 4, 64, 6, 2, 8, 5
SPANS = {
    "full": {},
    "window of 1": {"sliding_window": 1},
    "window of 4": {"sliding_window": 4},
    "window of 10": {"sliding_window": 10},
    "chunk of 6": {"chunk_tokens": 6},
    "chunk of 8": {"chunk_tokens": 8},
}


class Stage:
    """Sequences `(tokens before, new tokens)` in an arena, and what a plain softmax over each token's span gives.

    Blocks that a window let go are not there, and all that is not theirs is NaN.
    """

    def __init__(self, *sequences, spec=None, seed=0):
        self.random = np.random.default_rng(seed)
        spec = spec or AttentionSpec(KV_HEADS, DIM, "float32", value_head_dim=VALUE_DIM)
        self.config = CacheConfig([spec], block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS)
        self.group = self.config.groups[0]
        self.memory = TorchMemory(self.config)
        self.memory.keys(0).fill_(float("nan"))
        self.memory.values(0).fill_(float("nan"))
        self.sequences = sequences
        self.keys, self.values, self.queries = (
            [self.numbers(before + new, heads, dim) for before, new in sequences]
            for heads, dim in ((KV_HEADS, DIM), (KV_HEADS, VALUE_DIM), (HEADS, DIM))
        )
        self.tables = self.place()
        layers = ModelLayers((spec,), (0,), (None,), ((),), frozenset(), False, torch.device("cpu"))
        group = lay_out(self.group, self.tables, BLOCK_SIZE, torch.float32, torch.device("cpu"))
        self.batch = PackedBatch(self.memory, layers, [0], [group])

    def numbers(self, *shape):
        return torch.from_numpy(self.random.standard_normal(shape)).float()

    def place(self):
        ids = iter(self.random.permutation(NUM_BLOCKS))
        width = max(-(-(before + new) // BLOCK_SIZE) for before, new in self.sequences)
        table = np.zeros((len(self.sequences), width), np.int32)
        slots = []
        for row, (before, new) in enumerate(self.sequences):
            first = int(first_seen(self.group, np.array([before]))[0])
            for column in range(first // BLOCK_SIZE, -(-(before + new) // BLOCK_SIZE)):
                table[row, column] = next(ids)
            positions = np.arange(before + new)
            places = table[row, positions // BLOCK_SIZE].astype(np.int64) * BLOCK_SIZE + positions % BLOCK_SIZE
            held = positions[first // BLOCK_SIZE * BLOCK_SIZE : before]
            self.memory.write(0, self.keys[row][held], self.values[row][held], places[held])
            slots.append(places[before:])
        lengths = np.array([before + new for before, new in self.sequences], np.int32)
        starts = np.cumsum([0, *(new for _, new in self.sequences)], dtype=np.int32)
        return BatchTables(table, np.concatenate(slots), lengths, starts)

    def attended(self, is_batch=False, **kwargs):
        """The function's output `[T, num_heads, value_dim]`; with `is_batch`, a sequence takes a row of its own."""
        new = [torch.cat([each[before:] for each, (before, _) in zip(of, self.sequences, strict=True)])
               for of in (self.queries, self.keys, self.values)]  # fmt: skip
        num_rows = len(self.sequences) if is_batch else 1
        rows = [each.unflatten(0, (num_rows, -1)).transpose(1, 2) for each in new]
        module = SimpleNamespace(layer_idx=0)
        output, weights = paged_attention(module, *rows, None, kvist_batch=self.batch, **kwargs)
        assert weights is None
        return output.flatten(0, 1)

    def expected(self, scaling=DIM**-0.5, softcap=None, s_aux=None):
        outputs = []
        for row, (before, new) in enumerate(self.sequences):
            for position in range(before, before + new):
                seen = slice(int(first_seen(self.group, np.array([position]))[0]), position + 1)
                keys, values = (
                    each[row][seen].repeat_interleave(HEADS // KV_HEADS, 1) for each in (self.keys, self.values)
                )
                scores = torch.einsum("hd,khd->hk", self.queries[row][position], keys) * scaling
                scores = scores if softcap is None else torch.tanh(scores / softcap) * softcap
                weights = scores.exp() / (
                    scores.exp().sum(1, keepdim=True) + (0 if s_aux is None else s_aux.exp()[:, None])
                )
                outputs.append(torch.einsum("hk,khd->hd", weights, values))
        return torch.stack(outputs)


MIXED = [(0, 1), (0, 3), (0, 25), (1, 1), (9, 1), (12, 1), (30, 1), (5, 7), (8, 20), (23, 2)]


@pytest.mark.parametrize("span", SPANS)
def test_each_token_sees_its_span_in_a_batch_of_decodes_and_chunks(span):
    spec = AttentionSpec(KV_HEADS, DIM, "float32", value_head_dim=VALUE_DIM, **SPANS[span])
    stage = Stage(*MIXED, spec=spec)
    torch.testing.assert_close(stage.attended(), stage.expected())


@pytest.mark.parametrize("span", SPANS)
@pytest.mark.parametrize("extra", ["sinks", "softcap", "both", "scaling"])
def test_sinks_soft_caps_and_scaling_join_in_every_span(span, extra):
    spec = AttentionSpec(KV_HEADS, DIM, "float32", value_head_dim=VALUE_DIM, **SPANS[span])
    stage = Stage(*MIXED, spec=spec)
    settings = {"scaling": 0.7} if extra == "scaling" else {}
    if extra in ("sinks", "both"):
        settings["s_aux"] = stage.numbers(HEADS)
    if extra in ("softcap", "both"):
        settings["softcap"] = 1.5
    torch.testing.assert_close(stage.attended(**settings), stage.expected(**settings))


@pytest.mark.parametrize("sequences", [[(3, 1), (9, 1), (0, 1)], [(8, 5), (2, 5)]])
def test_sequences_may_take_a_row_each(sequences):
    stage = Stage(*sequences)
    torch.testing.assert_close(stage.attended(is_batch=True), stage.expected())


def test_decodes_of_windows_look_at_their_windows_blocks_only():
    spec = AttentionSpec(KV_HEADS, DIM, "float32", value_head_dim=VALUE_DIM, sliding_window=6)
    decodes = Stage((31, 1), (100, 1), (57, 1), spec=spec).batch.groups[0].spans
    # Tokens 26 .. 31, 95 .. 100 and 52 .. 57: from the blocks that begin with 24, 92 and 52 on, 8, 9 and 6 tokens.
    assert [(type(span), span.length, len(span.rows)) for span in decodes] == [(DecodeSpan, 9, 3)]


def test_decodes_of_similar_lengths_go_together():
    lengths = [span.length for span in Stage((5, 1), (6, 1), (50, 1), (20, 1)).batch.groups[0].spans]
    assert lengths == [51, 21, 7]


@pytest.mark.parametrize(
    ("asked", "name"),
    [
        ({"position_bias": torch.zeros(1)}, "position_bias"),
        ({"sliding_window": 7}, "sliding_window=7"),
        ({"is_causal": False}, "is_causal=False"),
    ],
)
def test_what_a_layer_asks_for_beyond_what_is_cached_for_it_is_refused(asked, name):
    with pytest.raises(ConfigError, match=f"layer 0 asks for {name}, which is not"):
        Stage((0, 2)).attended(**asked)
