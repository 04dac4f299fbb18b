"""A forecast says exactly what the calls would do, and leaves the manager as it is."""

import random

import pytest
from tests.core.layers import FULL, grouped, sliding
from tests.core.small import books, computed, small

from kvist import ArgumentTypeError, KVCacheManager, NeverFits, OutOfBlocks, OutOfRows, SequenceError


def test_a_forecast_changes_nothing():
    manager = small(block_size=2, num_blocks=8)
    first, second = manager.add_sequence([1, 2, 3]), manager.add_sequence([7])
    before = books(manager)
    forecast = manager.forecast().release(first).add([1, 2, 3, 4, 5]).append(second, 3).add(2)
    assert forecast.free_blocks == 8 - 3 - 2 - 1
    assert books(manager) == before


def test_releasing_counts_blocks_that_others_share_only_with_the_last_of_them():
    manager = small(block_size=2, num_blocks=8)
    first = manager.add_sequence([1, 2, 3, 4, 5])
    manager.commit([first])
    second = manager.add_sequence([1, 2, 3, 4, 6])
    forecast = manager.forecast()
    assert forecast.free_blocks == 4
    assert forecast.release(first).free_blocks == 5
    assert forecast.release(second).free_blocks == 8
    with pytest.raises(SequenceError, match="released in this forecast already"):
        forecast.release(first)


def test_beams_that_wait_inherit_what_a_released_sequence_has():
    manager = small(block_size=2, num_blocks=4)
    leader, beam = manager.add_sequence([1, 2, 3, 4], num_beams=2).beams
    forecast = manager.forecast().release(leader)
    assert forecast.free_blocks == 2
    assert not forecast.fits([7] * 8)
    assert forecast.append(beam).free_blocks == 1
    assert forecast.release(beam).free_blocks == 4
    manager.perform(manager.forecast().release(beam).release(leader))
    assert manager.num_free_blocks == 4


@pytest.mark.parametrize("layers", [1, 2])
def test_a_suspended_sequence_is_released_once_and_has_nothing(layers):
    manager = grouped([FULL, sliding(2)][:layers], block_size=2, num_blocks=8)
    sequence = computed(manager, [1, 2, 3])
    manager.suspend(sequence)
    forecast = manager.forecast()
    assert forecast.release(sequence).free_blocks == manager.num_free_blocks
    with pytest.raises(SequenceError, match="released in this forecast already"):
        forecast.release(sequence)
    with pytest.raises(SequenceError, match="suspended"):
        manager.forecast().append(sequence)
    manager.perform(forecast)
    assert not manager.stats().num_suspended_now


def test_a_cached_prefix_that_nobody_holds_takes_as_much_room_as_a_cold_one():
    manager = small(block_size=2, num_blocks=4)
    first = manager.add_sequence([1, 2, 3, 4])
    manager.commit([first])
    manager.free(first)
    forecast = manager.forecast()
    assert forecast.add([1, 2, 3, 4, 5]).free_blocks == 1
    assert forecast.fits([1, 2, 3, 4, 6])
    assert not forecast.fits([9, 9, 9])
    with pytest.raises(OutOfBlocks, match="needs 2 blocks, but only 1"):
        forecast.add(3)
    assert forecast.add([1, 2, 3, 4, 6]).free_blocks == 0


def test_rows_and_what_never_fits_are_refused_as_by_the_real_calls():
    manager = small(block_size=2, num_blocks=4, max_sequences=1, max_sequence_length=7)
    manager.forecast().add(7)
    with pytest.raises(NeverFits):
        manager.forecast().add(8)
    with pytest.raises(OutOfRows):
        manager.forecast().add(1).add(1)
    assert not manager.forecast().fits(8)


@pytest.mark.parametrize(
    ("num_tokens", "lookahead", "drafts", "expected"),
    [(7, 1, 0, 0), (8, 1, 0, 1), (7, 2, 0, 1), (7, 1, 5, 1), (7, 2, 5, 2), (30, 1, 9, 0)],
)
def test_the_next_step_needs_blocks_for_the_tokens_it_adds(num_tokens, lookahead, drafts, expected):
    manager = small(block_size=8, num_blocks=8, max_sequence_length=32)
    sequence = manager.add_sequence(range(num_tokens))
    assert manager.blocks_needed_next_step(sequence, lookahead, num_draft_tokens=drafts) == expected


@pytest.mark.parametrize(
    ("prompt", "new", "block_size", "expected"), [(1024, 128, 64, 2), (1024, 128, 1, 128), (13, 20, 8, 3)]
)
def test_completion_needs_what_the_prompt_does_not_have_yet(prompt, new, block_size, expected):
    manager = small(block_size=block_size, num_blocks=2000, max_sequence_length=2000)
    sequence = manager.add_sequence(range(prompt))
    assert manager.blocks_needed_to_completion(sequence, new) == expected
    assert sequence.num_blocks + expected == -(-(prompt + new) // block_size)


@pytest.mark.parametrize("seed", range(300))
def test_what_fits_succeeds_and_what_does_not_raises(seed):
    chance = random.Random(seed)
    manager = small(
        block_size=chance.choice([1, 2, 4]),
        num_blocks=chance.choice([4, 7, 12]),
        max_sequences=chance.choice([2, 4]),
        partial_reuse=chance.random() < 0.7,
    )
    running = _some_running(manager, chance)
    forecast = manager.forecast()
    plan = [_planned(chance, running) for _ in range(8)]
    predicted = [_ending(_suppose, forecast, act) for act in plan]
    real = [_ending(_act, manager, act) for act in plan]
    assert predicted == real
    assert forecast.free_blocks == manager.num_free_blocks
    manager.check()


def _some_running(manager: KVCacheManager, chance: random.Random) -> list:
    running = []
    for _ in range(8):
        try:
            running.append(manager.add_sequence(_prompt(chance), publish=chance.random() < 0.8))
        except (OutOfBlocks, NeverFits):
            continue
        manager.commit([running[-1]], chance.randint(running[-1].num_computed_tokens, running[-1].num_tokens))
        if chance.random() < 0.4:
            manager.free(running.pop(chance.randrange(len(running))))
    return running


def _prompt(chance: random.Random) -> list[int]:
    return [chance.randrange(2) for _ in range(chance.randint(1, 12))]


def _planned(chance: random.Random, running: list) -> tuple:
    """Choose a sequence to be freed, or a prompt with its number of beams to be admitted."""
    if running and chance.random() < 0.3:
        return (running.pop(chance.randrange(len(running))),)
    return _prompt(chance), chance.choice([1, 1, 2])


def _suppose(forecast, act: tuple) -> None:
    if len(act) == 1:
        forecast.release(act[0])
        return
    fits = forecast.fits(act[0], num_beams=act[1])
    if not fits:
        with pytest.raises((OutOfBlocks, NeverFits)):
            forecast.add(act[0], num_beams=act[1])
    forecast.add(act[0], num_beams=act[1])


def _act(manager: KVCacheManager, act: tuple) -> None:
    if len(act) == 1:
        manager.free(act[0])
    else:
        manager.add_sequence(act[0], num_beams=act[1])


def _ending(call, *args) -> str:
    try:
        call(*args)
    except (OutOfBlocks, NeverFits) as error:
        return type(error).__name__
    return "done"


def test_what_was_supposed_is_done_in_one_step():
    manager = small(block_size=2, num_blocks=8)
    first, second = manager.add_sequence([1, 2, 3]), manager.add_sequence([7])
    manager.commit([first, second])
    forecast = manager.forecast().release(first).append(second, [8, 9]).add([1, 2, 3, 4], num_beams=2)
    free_blocks = forecast.free_blocks
    (third,) = manager.perform(forecast)
    assert (first.is_live, second.tokens.tolist(), third.tokens.tolist()) == (False, [7, 8, 9], [1, 2, 3, 4])
    assert third.num_cached_tokens == 3
    assert len(third.beams) == 2
    assert manager.num_free_blocks == free_blocks
    manager.check()


def test_a_batch_that_has_ceased_to_fit_changes_nothing():
    manager = small(block_size=2, num_blocks=4)
    forecast = manager.forecast().add([1, 2, 3]).add([4, 5, 6])
    manager.add_sequence([7])
    before = books(manager)
    with pytest.raises(OutOfBlocks, match="needs 2 blocks, but only 1"):
        manager.perform(forecast)
    assert books(manager) == before


def test_only_what_is_known_whole_can_be_done():
    manager = small(block_size=2, num_blocks=8)
    sequence = manager.add_sequence([1])
    for forecast in (manager.forecast().add(3), manager.forecast().append(sequence, 2)):
        with pytest.raises(SequenceError, match="their ids must be known"):
            manager.perform(forecast)
    with pytest.raises(ArgumentTypeError, match="expected a Forecast, got list"):
        manager.perform([])
