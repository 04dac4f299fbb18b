import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.edge.models import PAIRS, alike, bits, cache, contents, fill, planes

from kvist import AttentionSpec, CacheConfig, KVCacheManager
from kvist.edge import LayerConfig, PromptReuse, reuse_of
from kvist.errors import ArgumentError, LayoutError

DTYPES = ["float16", "bfloat16", "float32", "float8_e4m3fn", "float8_e5m2"]


def filled(**settings):
    kept = cache(**settings)
    for plane in planes(kept):
        plane.view(torch.uint8).copy_(torch.randint(0, 256, plane.view(torch.uint8).shape, dtype=torch.uint8))
    return kept


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_prefix_of_a_slot_is_saved_and_restored_bit_by_bit(dtype):
    kept = filled(dtype=dtype, num_recurrent=1)
    saved = kept.capture(1, 6)
    assert [tuple(tensor.shape) for tensor in saved.kv] == [(2, 6, 2, 4), (2, 6, 1, 8)]
    assert {tensor.dtype for tensor in saved.kv} == {getattr(torch, dtype)}
    expected = contents(kept)
    for pool in expected[:2]:
        whole = pool.view(torch.uint8)
        slots = whole.view(2, 8, 32, *whole.shape[3:])
        slots[:, 5, :6] = slots[:, 1, :6]
    for state in expected[2:]:
        state[5] = state[1]
    kept.restore(saved, 5)
    assert alike(planes(kept), expected)


def test_what_is_saved_is_a_copy():
    kept = filled()
    saved = kept.capture(0, 5)
    before = saved.kv[0].clone()
    kept.pool(0).zero_()
    assert torch.equal(bits(saved.kv[0]), bits(before))


def test_a_prefix_goes_through_the_page_table():
    kept = filled()
    kept.page_table.set_rows([(0, [9, 4]), (3, [20, 2, 7])])
    kept.lengths.reset([8, 0, 0, 8])
    saved = kept.capture(0, 7)
    assert torch.equal(bits(saved.kv[0][1, 4]), bits(kept.pool(0)[1, 4, 0]))
    kept.restore(saved, 3)
    for part in kept.gather(0, 7):
        assert torch.equal(bits(part[3]), bits(part[0]))
    for act in (lambda: kept.capture(0, 9), lambda: kept.restore(kept.capture(3, 12), 0)):
        with pytest.raises(ArgumentError, match="slot 0 has 2 of 4 tokens"):
            act()


@pytest.mark.parametrize("num_tokens", [0, -1, 33])
def test_tokens_that_a_slot_cannot_have_are_not_saved(num_tokens):
    with pytest.raises(ArgumentError):
        filled().capture(0, num_tokens)
    with pytest.raises(ArgumentError):
        filled(num_recurrent=1).capture(8, 3)


def test_what_was_saved_of_another_model_is_not_restored():
    kept = filled(dtype="float8_e4m3fn")
    scaled = [LayerConfig(2, 4, scales=(1.0, 0.5, 1.0)), LayerConfig(1, 8)]
    others = [
        filled(dtype="float16"),
        filled(layers=PAIRS[::-1], dtype="float8_e4m3fn"),
        filled(layers=PAIRS[:1], dtype="float8_e4m3fn"),
        filled(layers=scaled, dtype="float8_e4m3fn"),
        filled(dtype="float8_e4m3fn", num_recurrent=1),
    ]
    before = contents(kept)
    for other in others:
        with pytest.raises(LayoutError):
            kept.restore(other.capture(0, 3), 1)
    assert alike(planes(kept), before)


def test_a_layer_that_shares_another_is_saved_once():
    kept = filled(layers=[LayerConfig(2, 4), LayerConfig(2, 4, shares_layer=0)])
    saved = kept.capture(0, 3)
    assert saved.kv[0] is saved.kv[1]
    kept.restore(saved, 1)
    assert torch.equal(bits(kept.slots(1)[:, 1, :3]), bits(kept.slots(0)[:, 0, :3]))


def test_layers_with_windows_have_no_prefix_to_save():
    kept = cache([LayerConfig(1, 4), LayerConfig(1, 4, capacity=5)])
    with pytest.raises(LayoutError, match="keep a window"):
        kept.capture(0, 1)


@given(st.integers(1, 32), st.integers(0, 7), st.integers(0, 7), st.sampled_from(["float16", "float8_e4m3fn"]))
def test_any_prefix_comes_back_in_any_slot_and_nothing_else_changes(num_tokens, source, destination, dtype):
    kept = cache(dtype=dtype)
    fill(kept)
    expected = [bits(plane).view(2, 8, 32, -1).clone() for plane in planes(kept)]
    for slots in expected:
        slots[:, destination, :num_tokens] = slots[:, source, :num_tokens]
    kept.restore(kept.capture(source, num_tokens), destination)
    assert all(torch.equal(bits(p).view(2, 8, 32, -1), slots) for p, slots in zip(planes(kept), expected, strict=True))


# -- what a saved system prompt spares --------------------------------------------------------------------------------


def test_all_but_the_last_of_the_saved_tokens_are_reused():
    assert reuse_of(8, 20) == PromptReuse(num_reused_tokens=7, num_prefill_tokens=13)
    assert reuse_of(19, 20) == PromptReuse(18, 2)
    prompt = list(range(20))
    assert prompt[reuse_of(8, 20).num_reused_tokens :][0] == 7


@pytest.mark.parametrize(("num_saved", "num_tokens"), [(20, 20), (21, 20), (0, 20), (-1, 20)])
def test_a_saved_prompt_has_tokens_and_fewer_than_the_prompt(num_saved, num_tokens):
    with pytest.raises(ArgumentError):
        reuse_of(num_saved, num_tokens)


@pytest.mark.parametrize("layers", [PAIRS, []], ids=["attention", "no attention"])
def test_a_prompt_goes_on_from_a_saved_one(layers):
    kept = filled(layers=layers, num_recurrent=1)
    if not layers:
        kept.page_table.set_row(0, [])  # which only layers with K and V need
    reuse = reuse_of(8, 20)
    saved = kept.capture(0, reuse.num_reused_tokens)
    kept.restore(saved, 1)
    kept.lengths.reset([8, reuse.num_reused_tokens])
    assert not kept.lengths.all_empty
    kept.lengths.commit(torch.tensor([0, reuse.num_prefill_tokens], dtype=torch.int32))
    assert kept.lengths.tensor.tolist() == [8, 20]
    assert torch.equal(bits(kept.states.conv(0)[1]), bits(kept.states.conv(0)[0]))


# -- what Kvist's own manager reuses in pages of 128 ------------------------------------------------------------------


def with_cached(*prompts):
    """A manager that has computed these prompts, and the blocks that they took."""
    config = CacheConfig(
        [AttentionSpec(1, 8)], block_size=128, num_blocks=16, max_sequence_length=512, partial_reuse=False
    )
    manager, blocks = KVCacheManager(config), []
    for prompt in prompts:
        sequence = manager.add_sequence(prompt)
        manager.commit([sequence])
        blocks += blocks_of(manager, sequence)
        manager.free(sequence)
    return manager, blocks


def blocks_of(manager, sequence):
    return manager.tables([sequence]).block_table[0].tolist()


A, B, C = [[token] * 128 for token in (1, 2, 3)]


@pytest.mark.parametrize(
    ("cached", "prompt", "num_reused", "num_new"),
    [
        ([A + B], A + B + [9], 256, 1),
        ([A + B], A + B, 128, 1),
        ([A + B + C], A + [8] * 128 + C[:1], 128, 2),
        ([], A + B + [9], 0, 3),
    ],
    ids=["257", "256 give a page back", "hole", "miss"],
)
def test_E12_a_prompt_reuses_whole_pages_and_computes_at_least_its_last_token(cached, prompt, num_reused, num_new):
    manager, blocks = with_cached(*cached)
    sequence = manager.add_sequence(prompt)
    taken = blocks_of(manager, sequence)
    num_shared = num_reused // 128
    assert sequence.num_cached_tokens == num_reused
    assert taken[:num_shared] == blocks[:num_shared]
    assert len(set(taken) - set(blocks)) == len(taken) - num_shared == num_new
