"""T03: a call that fails has changed nothing, however far it could have got: in any group, in any row of a batch."""

from contextlib import suppress
from random import Random

import numpy as np
import pytest
from tests.core.small import books, refused
from tests.torture.over import EVERYWHERE, over, without_groups
from tests.torture.rig import GROUPS, Rig, some_tokens

from kvist import ArgumentError, NeverFits, OutOfBlocks, SequenceError, TransferError
from kvist.errors import KvistError


def filled(rig):
    """Prompts of 4 tokens, until another finds no room."""
    live = []
    while len(live) < 8 and rig.manager.forecast().fits(prompt := range(1000 + 10 * len(live), 1004 + 10 * len(live))):
        live.append(rig.serve(prompt))
    return live


@over(EVERYWHERE, num_blocks=10)
def test_B003_B009_less_than_nothing_and_more_than_all_are_refused(rig):
    sequence = rig.serve(range(9))
    for error, call in (
        (ArgumentError, lambda: rig.manager.reserve([sequence], -4)),
        (KvistError, lambda: rig.manager.rewind(sequence, -1)),
        (SequenceError, lambda: rig.manager.rewind(sequence, 10)),
        (ArgumentError, lambda: rig.manager.evict(-1)),
        (KvistError, lambda: rig.manager.append([sequence], [list(range(88))])),
        (KvistError, lambda: rig.manager.reserve([sequence], 80)),
        (KvistError, lambda: rig.manager.add_sequence(range(100, 190))),
        (NeverFits, lambda: rig.manager.add_sequence(range(97))),
        (SequenceError, lambda: rig.manager.commit([sequence], 10)),
        (SequenceError, lambda: rig.manager.commit([sequence], 8)),
    ):
        with refused(rig.manager, error):
            call()
    rig.free(sequence)
    rig.require_all_back()


@over(EVERYWHERE, num_blocks=10)
def test_B023_B022_an_admission_without_room_holds_nothing_of_what_it_found(rig):
    """It finds 8 tokens, and then no room: nothing is held, nothing counted, nothing used more recently."""
    rig.leave(range(8))
    others = filled(rig)
    prompt = [*range(8), *range(500, 516)]
    for _ in range(3):
        with refused(rig.manager, OutOfBlocks):
            rig.manager.add_sequence(prompt)
    for other in others:
        rig.free(other)
    rig.free(rig.serve(prompt))
    rig.require_all_back()


STARVED = [
    (name, at) for name, (layers, needs) in GROUPS.items() for at in range(len(layers)) if "shared_pool" not in needs
]


@pytest.mark.parametrize(("groups", "starved"), STARVED)
def test_B023_whichever_pool_has_too_little_the_others_give_all_back(groups, starved):
    """One group has 3 blocks, the others 40: whatever asks for more of it finds all others as they were."""
    layers, _ = GROUPS[groups]
    sizes = [3 if group == starved else 40 for group in range(len(layers))]
    rig, chance, refusals = Rig(groups, num_blocks=sizes), Random(starved), 0
    live = []
    for _ in range(60):
        before = books(rig.manager)
        try:
            if chance.random() < 0.6 or not live:
                options = {"encoder_tokens": 9} if groups == "cross" and chance.random() < 0.5 else {}
                live.append(rig.add(some_tokens(chance), **options))
                rig.compute(live[-1])
            elif chance.random() < 0.5:
                rig.decode(live, [1] * len(live))
            else:
                live += rig.manager.fork(chance.choice(live))
        except (OutOfBlocks, NeverFits):
            refusals += 1
            assert books(rig.manager) == before
        rig.check()
        if chance.random() < 0.3 and live:
            rig.free(live.pop(chance.randrange(len(live))))
    for sequence in live:
        rig.free(sequence)
    rig.require_all_back()
    assert refusals > 0


@over(EVERYWHERE, num_blocks=9)
def test_B009_in_a_batch_the_last_that_does_not_fit_stops_all(rig):
    live = filled(rig)
    batch = [np.arange(3)] * (len(live) - 1) + [np.arange(40)]
    with refused(rig.manager, KvistError):
        rig.manager.append(live, batch)
    with refused(rig.manager, KvistError):
        rig.manager.reserve(live, [0] * (len(live) - 1) + [60])
    for sequence in live:
        assert sequence.num_tokens == 4
        rig.free(sequence)
    rig.require_all_back()


@over(without_groups(EVERYWHERE, "cross"), num_blocks=12)
def test_B023_forks_and_beams_without_room_leave_the_leader_as_it_was(rig):
    sequence = rig.serve(range(10))
    with refused(rig.manager, KvistError):
        rig.manager.fork(sequence, 40)
    with refused(rig.manager, KvistError):
        rig.manager.add_sequence(range(50, 60), num_beams=40)
    with refused(rig.manager, KvistError):
        rig.manager.reorder([sequence], [3])
    rig.decode([sequence], [[5]])
    rig.memory.verify(sequence)
    rig.free(sequence)
    rig.require_all_back()


@over(EVERYWHERE, num_blocks=8)
def test_B022_a_suspended_sequence_that_finds_no_room_stays_suspended(rig):
    first = rig.serve(range(15))
    rig.manager.suspend(first)
    others = filled(rig)
    with refused(rig.manager, OutOfBlocks):
        rig.manager.resume(first)
    for other in others:
        rig.free(other)
    rig.manager.resume(first)
    rig.compute(first)
    rig.memory.verify(first)
    rig.free(first)
    rig.require_all_back()


@over(EVERYWHERE, num_blocks=8)
def test_B023_an_admission_whose_copies_fail_is_ended_again(rig):
    """Nothing is lost, and what was cached is there the next time."""
    rig.leave(range(10))
    rig.send_down()
    for _ in range(3):
        rig.memory.fail_next()
        with suppress(TransferError):
            rig.manager.free(rig.manager.add_sequence(range(10)), publish=False)
        rig.memory.work_again()
        rig.require_all_back()
    rig.leave(range(10))
    rig.require_all_back()
