"""Pins that end by themselves, that have a budget, and that hold windows and states."""

import pytest
from tests.core.layers import FULL, grouped, hit, sliding, state
from tests.core.small import cached, computed, refused, small

from kvist import ArgumentError, ArgumentTypeError, CacheConfig, ConfigError, KVCacheManager, OutOfBlocks, SequenceError


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self):
        self.now_s = 0.0

    def __call__(self):
        return self.now_s


def timed(**settings):
    """A small manager, and the clock that it reads."""
    clock = Clock()
    return KVCacheManager(small(**settings).config, clock=clock), clock


def pinned(manager, tokens, **options):
    return manager.pin(manager.match_prefix([*tokens, 10**6]), **options)


# -- lifetimes --------------------------------------------------------------------------------------------------------


def test_a_pin_ends_when_its_lifetime_does():
    manager, clock = timed(num_blocks=4)
    cached(manager, [1, 2, 3, 4])
    pin = pinned(manager, [1, 2, 3, 4], lifetime_s=5.0)
    assert pin.expires_at_s == 5.0
    clock.now_s = 4.9
    assert (manager.num_free_blocks, manager.stats().num_pins) == (2, 1)
    clock.now_s = 5.0
    assert (manager.num_free_blocks, manager.stats().num_pins) == (4, 0)
    manager.check()


def test_an_allocation_finds_the_room_of_a_pin_whose_time_is_over():
    manager, clock = timed(num_blocks=4)
    cached(manager, [1, 2, 3, 4])
    pinned(manager, [1, 2, 3, 4], lifetime_s=5.0)
    with refused(manager, OutOfBlocks, "1 pins"):
        manager.add_sequence([9] * 6)
    clock.now_s = 6.0
    sequence = manager.add_sequence([9] * 6)
    assert sequence.num_blocks == 3
    manager.check()


@pytest.mark.parametrize("call", ["append", "reserve", "fork", "resume", "evict", "forecast", "add of the same"])
def test_every_call_that_needs_room_sees_that_a_pin_has_ended(call):
    manager, clock = timed(num_blocks=4, max_sequences=2)
    cached(manager, [1, 2, 3, 4])
    pinned(manager, [1, 2, 3, 4], lifetime_s=1.0)
    sequence = computed(manager, [9] * 3)
    if call == "resume":
        manager.suspend(sequence)
        clock.now_s = 1.0
        manager.resume(sequence)
    else:
        clock.now_s = 1.0
    {
        "append": lambda: manager.append([sequence], [[8] * 4]),
        "reserve": lambda: manager.reserve([sequence], 4),
        "fork": lambda: manager.fork(sequence),
        "resume": lambda: manager.append([sequence], [[8] * 4]),
        "evict": lambda: manager.evict(2),
        "forecast": lambda: manager.forecast().append(sequence, 4),
        "add of the same": lambda: manager.add_sequence([1, 2, 3, 7]),
    }[call]()
    manager.check()
    assert manager.stats().num_pins == 0


def test_a_pin_that_has_ended_by_itself_may_still_be_released_once():
    manager, clock = timed()
    cached(manager, [1, 2, 3, 4])
    with pinned(manager, [1, 2, 3, 4], lifetime_s=1.0) as pin:
        clock.now_s = 2.0
        assert manager.stats().num_pins == 0
    assert pin.is_released
    with refused(manager, SequenceError, "the pin has been released"):
        pin.release()


def test_pins_end_one_by_one_in_the_order_of_their_lifetimes():
    manager, clock = timed(num_blocks=8)
    for start, lifetime_s in ((10, 3.0), (20, 1.0), (30, None), (40, 2.0)):
        cached(manager, [start, start + 1])
        pinned(manager, [start, start + 1], lifetime_s=lifetime_s)
    left = []
    for now_s in (0.5, 1.0, 2.5, 3.0, 1e9):
        clock.now_s = now_s
        left.append(manager.stats().num_pins)
    assert left == [4, 3, 2, 1, 1]


def test_a_lifetime_of_nothing_ends_at_once():
    manager, _ = timed()
    cached(manager, [1, 2])
    pinned(manager, [1, 2], lifetime_s=0)
    assert manager.stats().num_pins == 0


@pytest.mark.parametrize(
    ("lifetime_s", "error"),
    [
        (-1, ArgumentError),
        (float("nan"), ArgumentError),
        (float("inf"), ArgumentError),
        ("1", ArgumentTypeError),
        (True, ArgumentTypeError),
        (b"1", ArgumentTypeError),
    ],
)
def test_a_lifetime_that_cannot_be_is_refused(lifetime_s, error):
    manager, _ = timed()
    cached(manager, [1, 2])
    match = manager.match_prefix([1, 2, 3])
    with refused(manager, error, "lifetime_s"):
        manager.pin(match, lifetime_s=lifetime_s)


# -- budgets ----------------------------------------------------------------------------------------------------------


def test_a_pin_beyond_the_budget_is_refused_and_says_who_holds_what():
    manager = small(num_blocks=8, pin_budget=0.5)
    cached(manager, [1, 2, 3, 4])
    cached(manager, [5, 6, 7, 8, 9, 10])
    first = pinned(manager, [1, 2, 3, 4])
    with refused(manager, OutOfBlocks, "may hold 4 of the 8 blocks", "hold 2", "would hold 5", repr(first)) as caught:
        pinned(manager, [5, 6, 7, 8, 9, 10])
    error = caught.value
    assert (error.needed, error.free, error.held) == (3, 2, 2)
    first.release()
    assert pinned(manager, [5, 6, 7, 8, 9, 10]).num_tokens == 6


def test_what_is_pinned_twice_counts_once():
    manager = small(num_blocks=8, pin_budget=0.25)
    cached(manager, [1, 2, 3, 4])
    pins = [pinned(manager, [1, 2, 3, 4][:n]) for n in (4, 2, 4)]
    assert manager.stats().num_pinned_blocks == 2
    for pin in pins:
        pin.release()
    assert manager.stats().num_pinned_blocks == 0


def test_a_pin_whose_time_is_over_leaves_its_part_of_the_budget():
    manager, clock = timed(num_blocks=4, pin_budget=0.25)
    cached(manager, [1, 2])
    cached(manager, [3, 4])
    pinned(manager, [1, 2], lifetime_s=1.0)
    with refused(manager, OutOfBlocks, "may hold 1 of the 4"):
        pinned(manager, [3, 4])
    clock.now_s = 1.0
    assert pinned(manager, [3, 4]).num_tokens == 2


def test_without_a_budget_nothing_but_nothing_is_pinned():
    manager = small(pin_budget=0)
    cached(manager, [1, 2])
    with refused(manager, OutOfBlocks, "may hold 0 of the 8", "no other pins"):
        pinned(manager, [1, 2])
    assert pinned(manager, [5, 6]).num_tokens == 0


def test_the_budget_is_of_each_groups_own_pool():
    manager = grouped([FULL, sliding(4)], block_size=2, num_blocks=[8, 2], pin_budget=0.5)
    cached(manager, [1, 2])
    cached(manager, [3, 4, 5, 6])
    with refused(manager, OutOfBlocks, "may hold 1 of the 2 blocks of group 1") as caught:
        pinned(manager, [3, 4, 5, 6])
    assert caught.value.group == 1


def test_groups_that_draw_from_one_pool_have_one_budget():
    manager = grouped([FULL, sliding(8)], block_size=1, num_blocks=[4, 4], shared_pool=True, pin_budget=0.5)
    cached(manager, [1, 2, 3])
    with refused(manager, OutOfBlocks, "may hold 4 of the 8", "would hold 6"):
        pinned(manager, [1, 2, 3])
    assert pinned(manager, [1, 2]).num_tokens == 2


@pytest.mark.parametrize("budget", [-0.1, 1.1, "half", True, None])
def test_a_budget_that_is_no_fraction_is_refused(budget):
    with pytest.raises(ConfigError, match="pin_budget is"):
        CacheConfig([FULL], 2, 8, pin_budget=budget).validate()


# -- several groups ---------------------------------------------------------------------------------------------------


def test_a_pin_holds_what_is_in_span_and_no_more():
    manager = grouped([FULL, sliding(4)], block_size=2, num_blocks=[16, 16])
    cached(manager, range(12))
    pin = pinned(manager, range(12))
    stats = manager.stats()
    assert [group.num_pinned_blocks for group in stats.groups] == [6, 2]
    assert [group.num_held_blocks for group in stats.groups] == [6, 2]
    pin.release()
    assert manager.stats().num_held_blocks == 0
    manager.check()


def test_a_pin_holds_sinks():
    manager = grouped([FULL, sliding(2, 2)], block_size=2)
    cached(manager, range(12))
    pinned(manager, range(12))
    assert manager.stats().groups[1].num_pinned_blocks == 2


def test_a_pinned_prefix_is_found_after_any_pressure_on_windows():
    manager = grouped([FULL, sliding(4)], block_size=2, num_blocks=[32, 6])
    cached(manager, range(8))
    pinned(manager, range(8))
    for start in range(100, 1000, 100):
        cached(manager, range(start, start + 8))
        assert hit(manager, [*range(8), 99]) == 8
    manager.evict(100)
    assert hit(manager, [*range(8), 99]) == 8
    manager.check()


def test_a_pin_outlives_the_drop_of_its_namespace_and_then_gives_everything_back():
    manager = grouped([FULL, sliding(4)], block_size=2, num_blocks=8)
    cached(manager, range(8), namespace=("a",))
    pin = manager.pin(manager.match_prefix(range(9), namespace=("a",)))
    manager.drop(namespace=("a",))
    assert [group.num_pinned_blocks for group in manager.stats().groups] == [4, 2]
    manager.check()
    pin.release()
    assert manager.num_free_blocks == 16
    manager.check()


def test_a_pin_of_a_state_model_holds_positions_and_lets_the_state_go():
    manager = grouped([FULL, state()], block_size=2)
    sequence = manager.add_sequence(range(5))
    manager.commit([sequence], 4)
    manager.free(sequence)
    pin = pinned(manager, range(4))
    assert pin.num_tokens == 4
    assert manager.stats().groups[0].num_pinned_blocks == 2
    pin.release()
    manager.check()
