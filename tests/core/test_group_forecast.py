"""Forecasts over several groups are exact: what they say fits succeeds, what they say does not is refused."""

import random

import numpy as np
import pytest
from tests.core.layers import CROSS, FULL, chunked, grouped, sliding, state
from tests.core.small import books, cached, computed, refused

from kvist import KVCacheManager, Media, NeverFits, OutOfBlocks, OutOfRows, Retention, SequenceError
from kvist.core.admission import match_prompt

LAYERS = {
    "window": [FULL, sliding(3)],
    "window alone": [sliding(5)],
    "sinks": [FULL, sliding(2, 3)],
    "two windows": [sliding(6), sliding(1)],
    "chunks": [FULL, chunked(3)],
    "state": [FULL, state()],
    "state alone": [state()],
    "all": [FULL, sliding(4), chunked(4), state(), CROSS],
}


@pytest.mark.parametrize("layers", LAYERS.values(), ids=LAYERS)
def test_a_forecast_changes_nothing(layers):
    manager = grouped(layers, block_size=2, num_blocks=24)
    first, second = computed(manager, range(5)), manager.add_sequence([50, 51, 52])
    cached(manager, range(20, 26))
    manager.stats()
    before = books(manager)
    forecast = manager.forecast()
    assert forecast.fits(range(8))
    forecast.release(first).add(range(9)).append(second, 3).add(2).append(second)
    assert books(manager) == before
    manager.check()


def test_free_blocks_are_those_of_all_groups():
    manager = grouped([FULL, sliding(4)], block_size=2, num_blocks=[8, 6])
    forecast = manager.forecast()
    assert forecast.free_blocks == 14
    assert forecast.add(5).free_blocks == 14 - 6
    assert forecast.free_rows == 7


def test_the_group_that_is_short_decides_and_is_named():
    manager = grouped([FULL, sliding(4)], block_size=2, num_blocks=[8, 3])
    assert manager.forecast().fits(6)
    assert not manager.forecast().fits(8)
    forecast = manager.forecast().add(4)
    with pytest.raises(OutOfBlocks, match="group 1 needs 2 blocks, but only 1"):
        forecast.add(4)
    with pytest.raises(NeverFits, match="group 1 has 3"):
        forecast.add(8)
    assert forecast.add(2).free_blocks == 11 - 6


def test_releasing_gives_back_what_is_own_and_what_nobody_else_has_in_span():
    manager = grouped([FULL, sliding(2)], block_size=2, num_blocks=8)
    first = computed(manager, range(9))
    manager.stats()
    second = manager.add_sequence([*range(8), 50])
    assert second.num_cached_tokens == 8
    forecast = manager.forecast()
    assert forecast.free_blocks == 16 - (5 + 1) - (1 + 2)
    assert forecast.release(second).free_blocks == 16 - (5 + 1)
    assert forecast.release(first).free_blocks == 16


def test_a_released_sequence_is_released_once_and_takes_no_more_tokens():
    manager = grouped([FULL, sliding(2)], block_size=2)
    sequence = computed(manager, range(5))
    forecast = manager.forecast().release(sequence)
    for call in (forecast.release, forecast.append):
        with pytest.raises(SequenceError, match="released in this forecast"):
            call(sequence)
    manager.append([sequence], [9])


def test_rows_count():
    manager = grouped([FULL, sliding(2)], block_size=2, max_sequences=2)
    forecast = manager.forecast().add(3, num_beams=2)
    assert forecast.free_rows == 0
    with pytest.raises(OutOfRows):
        forecast.add(1)


def test_encoders_media_and_extra_ids_count():
    manager = grouped([FULL, CROSS], block_size=2, num_blocks=[8, 2])
    cached(manager, [1, 9, 9, 2, 3], media=[Media(1, 2, "cat")])
    other = manager.add_sequence([50] * 8)
    fits = manager.forecast().fits
    assert fits([1, 9, 9, 2, 3, 4], encoder_tokens=4)
    assert not fits([1], encoder_tokens=5)
    manager.free(other)
    held = manager.add_sequence([1, 9, 9, 2, 7], media=[Media(1, 2, "cat")])
    before = manager.forecast().free_blocks
    for options, taken in (({"media": [Media(1, 2, "cat")]}, 1), ({"media": [Media(1, 2, "dog")]}, 3), ({}, 3)):
        assert before - manager.forecast().add([1, 9, 9, 2, 6], **options).free_blocks == taken
    manager.free(held)


# -- what is said to fit does -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(15))
@pytest.mark.parametrize("layers", LAYERS.values(), ids=LAYERS)
def test_what_fits_succeeds_and_what_does_not_raises(layers, seed):
    chance = random.Random(seed)
    block_size = chance.choice([1, 2, 4])
    manager = grouped(
        layers,
        block_size=block_size,
        num_blocks=[chance.choice([4, 7, 12]) for _ in layers],
        max_sequences=chance.choice([3, 5]),
        max_sequence_length=24,
        partial_reuse=chance.random() < 0.7,
        shared_pool=chance.random() < 0.3,
    )
    running = some_running(manager, chance)
    for _ in range(6):
        forecast, free_to_go = manager.forecast(), list(running)
        plan = [planned(chance, free_to_go) for _ in range(chance.randint(1, 5))]
        predicted = [ending(act.suppose, forecast) for act in plan]
        real = [ending(act.perform, manager) for act in plan]
        assert predicted == real
        assert (forecast.free_blocks, forecast.free_rows) == (manager.num_free_blocks, manager._state.rows.num_free)
        running = [sequence for sequence in manager._state.rows.running() if sequence.leader is None]
        for sequence in running:
            waiting = sequence._waiting_beams()
            manager.commit([sequence], waiting[0].num_tokens if waiting else sequence.num_tokens)
        manager.check()


def some_running(manager, chance):
    """Sequences that run, after others have left content."""
    running = []
    for _ in range(6):
        try:
            running.append(manager.add_sequence(prompt(chance), publish=chance.random() < 0.8))
        except (OutOfBlocks, NeverFits):
            continue
        block_size = manager.config.block_size
        for stop in range(block_size, running[-1].num_tokens + 1, block_size):
            manager.commit([running[-1]], max(stop, running[-1].num_computed_tokens))
        if chance.random() < 0.5:
            manager.free(running.pop(chance.randrange(len(running))))
    return running


def prompt(chance):
    return [chance.randrange(2) for _ in range(chance.randint(1, 12))]


def planned(chance, running):
    """Choose an admission, an append or a release."""
    kind = chance.choice(["add", "add", "append", "release"])
    alone = [sequence for sequence in running if len(sequence.beams) == 1]
    if kind == "release" and alone:
        running.remove(sequence := chance.choice(alone))
        return Release(sequence)
    if kind == "append" and running:
        return Append(chance.choice(running), chance.randint(1, 5))
    retention = Retention([(0, 4, chance.randrange(101), None)]) if chance.random() < 0.3 else None
    return Add(prompt(chance), chance.choice([1, 1, 2]), chance.random() < 0.8, retention)


class Add:
    def __init__(self, tokens, num_beams, reuse, retention):
        self.tokens = tokens
        self.options = {"num_beams": num_beams, "reuse": reuse, "retention": retention}

    def suppose(self, forecast):
        forecast.add(self.tokens, **self.options)

    def perform(self, manager):
        manager.add_sequence(self.tokens, **self.options)


class Append:
    def __init__(self, sequence, num_tokens):
        self.sequence, self.num_tokens = sequence, num_tokens

    def suppose(self, forecast):
        forecast.append(self.sequence, self.num_tokens)

    def perform(self, manager):
        manager.append([self.sequence], [[0] * self.num_tokens])


class Release:
    def __init__(self, sequence):
        self.sequence = sequence

    def suppose(self, forecast):
        forecast.release(self.sequence)

    def perform(self, manager):
        manager.free(self.sequence)


def ending(call, target):
    try:
        call(target)
    except (OutOfBlocks, NeverFits) as error:
        return type(error).__name__
    return "done"


# -- whole batches ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layers", LAYERS.values(), ids=LAYERS)
def test_a_batch_that_was_tried_out_is_done_in_one_step(layers):
    manager = grouped(layers, block_size=2, num_blocks=24)
    first, second = computed(manager, range(5)), computed(manager, [50, 51, 52])
    forecast = manager.forecast().release(first).add([*range(4), 60]).append(second, [1, 2, 3]).add([70], num_beams=2)
    free = forecast.free_blocks
    third, fourth = manager.perform(forecast)
    assert (first.is_live, second.tokens.tolist()) == (False, [50, 51, 52, 1, 2, 3])
    assert (third.tokens.tolist(), len(fourth.beams)) == ([*range(4), 60], 2)
    assert manager.num_free_blocks == free
    manager.check()


def test_a_batch_of_which_one_does_not_fit_any_more_changes_nothing():
    manager = grouped([FULL, sliding(4)], block_size=2, num_blocks=8)
    first = manager.add_sequence(range(6))
    forecast = manager.forecast().release(first).add(range(50, 62)).add([70, 71, 72])
    manager.add_sequence([80])
    with refused(manager, OutOfBlocks):
        manager.perform(forecast)
    assert first.is_live
    manager.check()


def test_a_batch_is_what_it_was_when_it_was_tried_out():
    manager = grouped([FULL], block_size=2)
    tokens, extra_ids = [1, 9, 9, 2, 3], np.array([0, 0, 0, 5, 0])
    forecast = manager.forecast().add(tokens, extra_ids=extra_ids)
    tokens[0], extra_ids[3] = 8, 6
    [sequence] = manager.perform(forecast)
    assert sequence.tokens.tolist() == [1, 9, 9, 2, 3]
    manager.commit([sequence])
    assert manager.match_prefix([1, 9, 9, 2, 3], extra_ids=[0, 0, 0, 5, 0]).num_tokens == 4


def test_media_of_a_batch_may_come_from_any_iterable():
    manager = grouped([FULL], block_size=2)
    forecast = manager.forecast().add([1, 9, 9, 2, 3], media=iter([Media(1, 2, "cat")]))
    [sequence] = manager.perform(forecast)
    manager.commit([sequence])
    assert manager.match_prefix([1, 9, 9, 2, 3], media=[Media(1, 2, "cat")]).num_tokens == 4
    assert manager.match_prefix([1, 9, 9, 2, 3]).num_tokens == 0


# -- what schedulers ask of one sequence ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layers", "expected"),
    [([FULL, sliding(4)], 2), ([sliding(4)], 1), ([FULL, state()], 1), ([state()], 0), ([FULL, sliding(4), CROSS], 2)],
)
def test_the_next_step_needs_a_block_of_every_group_whose_table_grows(layers, expected):
    manager = grouped(layers, block_size=2)
    sequence = computed(manager, range(4))
    assert manager.blocks_needed_next_step(sequence) == expected
    assert manager.blocks_needed_next_step(sequence, 3, num_draft_tokens=1) == 3 * expected
    before = sum(len(sequence.group_blocks(group)) for group in range(len(layers)))
    manager.reserve([sequence], 6)
    after = sum(len(sequence.group_blocks(group)) for group in range(len(layers)))
    assert after - before == 3 * expected


def test_completion_needs_what_no_table_has_yet_in_any_group():
    manager = grouped([FULL, sliding(4), state()], block_size=2)
    sequence = computed(manager, range(5))
    assert manager.blocks_needed_to_completion(sequence, 1) == 0
    assert manager.blocks_needed_to_completion(sequence, 6) == 2 * 3


def test_completion_counts_what_windows_get_chunk_by_chunk():
    manager = grouped([FULL, sliding(3)], block_size=2, num_blocks=16, max_chunk_tokens=2)
    sequence = manager.add_sequence(range(8))
    told = manager.blocks_needed_to_completion(sequence, 0)
    before = sum(each.num_allocated_blocks for each in manager.stats().groups)
    while sequence.num_computed_tokens < 8:
        chunk = manager.chunk_limit(sequence, 8)
        if chunk:
            manager.commit([sequence], sequence.num_computed_tokens + chunk)
        else:
            manager.reserve([sequence], 0)
    assert told == sum(each.num_allocated_blocks for each in manager.stats().groups) - before == 3


def test_a_forecast_of_a_long_chain_takes_no_deep_recursion():
    manager = KVCacheManager(
        grouped([FULL, sliding(2)], block_size=1, num_blocks=4000, max_sequence_length=4000).config
    )
    retention = Retention([(n, n + 1, n % 2, None) for n in range(2000)])
    cached(manager, range(2000), retention=retention)
    assert manager.stats().num_extents > 1500
    assert manager.forecast().add(range(2001)).free_blocks < 8000
    manager.check()


def test_a_forecast_copies_from_the_same_sibling_as_the_call():
    manager = grouped([FULL, sliding(8)], block_size=4, num_blocks=32, partial_reuse=True)
    for token in range(4, 10):
        cached(manager, [1, token, 2, 3])
    prompt = np.array([1, 100, 100, 100, 100], np.int32).tobytes()
    real = manager._state
    chosen = [match_prompt(each, prompt, ()) for each in (real, real.copied(), real)]
    assert [(match.num_partial_tokens, match.source.key) for match in chosen] == [(1, chosen[0].source.key)] * 3
    manager.evict(4)
    chosen = [match_prompt(each, prompt, ()) for each in (real, real.copied())]
    assert chosen[0].source.key == chosen[1].source.key
