"""Calls that are wrong in any state or in the present one: what each must raise."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from kvist.errors import ArgumentError, ArgumentTypeError, KvistError, NeverFits, SequenceError
from kvist.manager import KVCacheManager

if TYPE_CHECKING:
    from kvist.testing.stage import Stage

__all__ = ["REFUSALS", "Refusal"]

Call = Callable[[], object]
Refusal = tuple[type[KvistError], Callable[["Stage", int], Call | None]]
"""What is raised, and what makes the call from a stage and a number; None where the present state has no such call."""


# Managers and sequences are Any below: the point is to give them what their types forbid.


def _always(wrong: Callable[[Any], object]) -> Callable[[Stage, int], Call | None]:
    return lambda stage, pick: lambda: wrong(stage.manager)


def _of_running(wrong: Callable[[Any, Any], object]) -> Callable[[Stage, int], Call | None]:
    return lambda stage, pick: _with(stage, wrong, [shadow.sequence for shadow in stage.running()], pick)


def _of_ended(wrong: Callable[[Any, Any], object]) -> Callable[[Stage, int], Call | None]:
    return lambda stage, pick: _with(stage, wrong, stage.ended, pick)


def _of_waiting(wrong: Callable[[Any, Any], object]) -> Callable[[Stage, int], Call | None]:
    return lambda stage, pick: _with(stage, wrong, [beam.sequence for beam in stage.live if beam.leader], pick)


def _with(stage: Stage, wrong: Callable[[Any, Any], object], sequences: list[Any], pick: int) -> Call | None:
    if not sequences:
        return None
    chosen = sequences[pick % len(sequences)]
    return lambda: wrong(stage.manager, chosen)


def _one_fine_one_ended(stage: Stage, pick: int) -> Call | None:
    if not stage.running() or not stage.ended:
        return None
    batch = [stage.running()[0].sequence, stage.ended[-1]]
    return lambda: stage.manager.append(batch, np.array([1, 1]))


def _free_row(stage: Stage, pick: int) -> Call | None:
    taken = {shadow.sequence.row for shadow in stage.live}
    free = [row for row in range(stage.config.max_sequences) if row not in taken]
    return (lambda: stage.manager.append(np.array(free[:1]), np.array([1]))) if free else None


def _foreign(stage: Stage, pick: int) -> Call:
    stranger = KVCacheManager(stage.config).add_sequence([1])
    return lambda: stage.manager.free(stranger)


def _released(stage: Stage, pick: int) -> Call:
    pin = stage.manager.pin(stage.manager.match_prefix([1]))
    pin.release()
    return pin.release


def _reset(stage: Stage, pick: int) -> Call | None:
    return stage.manager.reset if stage.live or stage.pins else None


def _commit_less(manager: Any, sequence: Any) -> None:
    manager.commit([sequence], sequence.num_computed_tokens - 1 if sequence.num_computed_tokens else 10**6)


NO_TOKENS = np.array([], np.int32)
ONE, TWO = np.array([1]), np.array([1, 1])

REFUSALS: dict[str, Refusal] = {
    "add no tokens": (ArgumentError, _always(lambda manager: manager.add_sequence([]))),
    "add a negative token": (ArgumentError, _always(lambda manager: manager.add_sequence([1, -1]))),
    "add a token past int32": (ArgumentError, _always(lambda manager: manager.add_sequence(np.array([2**31])))),
    "add real numbers": (ArgumentTypeError, _always(lambda manager: manager.add_sequence(np.array([1.0])))),
    "add text": (ArgumentTypeError, _always(lambda manager: manager.add_sequence("12"))),
    "add two dimensions": (ArgumentError, _always(lambda manager: manager.add_sequence(np.ones((2, 2), np.int32)))),
    "add to a list": (ArgumentTypeError, _always(lambda manager: manager.add_sequence([1], namespace=["a"]))),
    "add no beams": (ArgumentError, _always(lambda manager: manager.add_sequence([1], num_beams=0))),
    "add beams that never fit": (NeverFits, _always(lambda manager: manager.add_sequence([1], num_beams=10**6))),
    "add a prompt that never fits": (NeverFits, _always(lambda manager: manager.add_sequence([1] * 1000))),
    "append to an ended one": (SequenceError, _of_ended(lambda manager, ended: manager.append([ended], ONE))),
    "append to a running and an ended one": (SequenceError, _one_fine_one_ended),
    "append to a free row": (SequenceError, _free_row),
    "append to no row": (SequenceError, _always(lambda manager: manager.append(np.array([-1]), ONE))),
    "append twice": (SequenceError, _of_running(lambda manager, one: manager.append([one, one], TWO))),
    "append to a row twice": (SequenceError, _of_running(lambda manager, one: manager.append(TWO * one.row, TWO))),
    "append too few tokens": (ArgumentError, _of_running(lambda manager, one: manager.append([one], NO_TOKENS))),
    "append a negative token": (ArgumentError, _of_running(lambda manager, one: manager.append([one], -ONE))),
    "append a bad list": (ArgumentError, _of_running(lambda manager, one: manager.append([one], [np.array([1, -1])]))),
    "append to a waiting beam": (SequenceError, _of_waiting(lambda manager, beam: manager.append([beam], ONE))),
    "commit a waiting beam": (SequenceError, _of_waiting(lambda manager, beam: manager.commit([beam]))),
    "fork what beams wait for": (SequenceError, _of_waiting(lambda manager, beam: manager.fork(beam.leader))),
    "rewind what beams wait for": (SequenceError, _of_waiting(lambda manager, beam: manager.rewind(beam.leader, 0))),
    "reserve less than nothing": (ArgumentError, _of_running(lambda manager, one: manager.reserve([one], -1))),
    "commit too much": (SequenceError, _of_running(lambda manager, one: manager.commit([one], one.num_tokens + 1))),
    "commit less than before": (SequenceError, _of_running(_commit_less)),
    "rewind too much": (SequenceError, _of_running(lambda manager, one: manager.rewind(one, one.num_tokens + 1))),
    "rewind less than nothing": (KvistError, _of_running(lambda manager, one: manager.rewind(one, -1))),
    "free twice": (SequenceError, _of_ended(lambda manager, ended: manager.free(ended))),
    "fork an ended one": (SequenceError, _of_ended(lambda manager, ended: manager.fork(ended))),
    "free a stranger": (SequenceError, _foreign),
    "reorder twice": (SequenceError, _of_running(lambda manager, one: manager.reorder([one, one], [0, 1]))),
    "reorder from no parent": (KvistError, _of_running(lambda manager, one: manager.reorder([one], [1]))),
    "reorder with too few parents": (KvistError, _of_running(lambda manager, one: manager.reorder([one], []))),
    "evict less than nothing": (ArgumentError, _always(lambda manager: manager.evict(-1))),
    "release a pin twice": (SequenceError, _released),
    "reset while in use": (SequenceError, _reset),
}
