"""How much of a prompt is there, for many workers at once, by what each of their groups needs of it.

A mask has a bit for each place that has a block: a tier of a rank of a worker, tiers of a rank side by side.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import lcm
from typing import Protocol

from kvist.wire.records import Hash

__all__ = ["Lookup", "Rule", "Table", "rule_of"]

Table = dict[Hash, int]


@dataclass(frozen=True, slots=True)
class Rule:
    """What of a prompt a group needs: all of it, or what a window or a chunk still sees, or the last block (a state).

    `step` is how many blocks of the rank's finest group one block of it is; its name is that of the last of them.
    """

    group: int
    kind: str = "full"
    window: int = 0
    block_size: int = 0
    step: int = 1

    def num_needed(self, num_blocks: int) -> int:
        """Return how many blocks at the end of so many the next token needs."""
        if self.kind == "state":
            return min(num_blocks, 1)
        tokens = num_blocks * self.block_size
        first = tokens // self.window * self.window if self.kind == "chunked" else max(tokens + 1 - self.window, 0)
        return num_blocks - first // self.block_size


class _Stretches:
    """What masks that follow one another have in common, any stretch of at most `longest` of them with one `&`.

    Level k has it for each stretch of 2**k: two of them cover any stretch that is less than twice as long.

    >>> _Stretches([0b11, 0b01, 0b11, 0b10], 3).common(0, 3)
    1
    """

    def __init__(self, masks: list[int], longest: int) -> None:
        self._levels, width = [masks], 1
        while 2 * width <= longest:
            before = self._levels[-1]
            self._levels.append([one & other for one, other in zip(before, before[width:], strict=False)])
            width *= 2

    def common(self, first: int, end: int) -> int:
        """Return the ones that all masks first .. end-1 have; all ones of no mask."""
        if first == end:
            return -1
        level = (end - first).bit_length() - 1
        masks = self._levels[level]
        return masks[first] & masks[end - (1 << level)]


class _Ranked(Protocol):
    """A rank of a worker: its bits begin at `shift`, and its groups have rules."""

    shift: int
    rules: dict[int, Rule]


class Lookup:
    """Looks prompts up in the tables of an index, one for each group, as the rules of these ranks want it."""

    def __init__(self, ranks: Iterable[_Ranked], num_tiers: int, num_bits: int) -> None:
        self._num_bits = num_bits
        self._steps: dict[int, int] = {}
        grouped: dict[Rule, int] = {}
        for each in ranks:
            bits = (1 << num_tiers) - 1 << each.shift
            for rule in _stepped(each.rules.values()):
                grouped[rule] = grouped.get(rule, 0) | bits
                if rule.step > 1:
                    self._steps |= {bit: lcm(rule.step, self._steps.get(bit, 1)) for bit in _ones(bits)}
        self._full = [(rule, bits) for rule, bits in grouped.items() if rule.kind == "full"]
        self._windowed = [(rule, bits) for rule, bits in grouped.items() if rule.kind != "full"]
        self._full_bits = {bit for _, bits in self._full for bit in _ones(bits)}
        self._windowed_bits = sorted({bit for _, bits in self._windowed for bit in _ones(bits)})
        ones = ((1 << num_bits) - 1) // ((1 << num_tiers) - 1)
        self._shifts = [(((1 << num_tiers - by) - 1) * ones, by) for by in _powers(num_tiers)]

    def reaches(self, tables: Mapping[int, Table], hashes: Sequence[Hash]) -> dict[int, int]:
        """Return how many leading blocks can be had, by the bit of a rank and tier: from it and all faster tiers."""
        reach: dict[int, int] = {}
        for rule, bits in self._full:
            for bit, count in self._full_reach(tables.get(rule.group, {}), rule.step, bits, hashes):
                reach[bit] = min(reach.get(bit, count), count)
        if self._windowed_bits:
            reach |= self._windowed_reach(tables, reach, hashes)
        for bit, step in self._steps.items():
            reach[bit] = reach.get(bit, 0) // step * step
        return reach

    def _full_reach(self, table: Table, step: int, bits: int, hashes: Sequence[Hash]) -> Iterator[tuple[int, int]]:
        """Yield, for each of the bits, how many leading blocks of a group that needs all of them are there."""
        get, spread = table.get, self._spread
        last, column = -1, 0
        for name in hashes[step - 1 :: step] if step > 1 else hashes:
            mask = get(name, 0)
            if mask != last:
                left = bits & spread(mask)
                for bit in _ones(bits ^ left):
                    yield bit, column * step
                bits, last = left, mask
                if not bits:
                    return
            column += 1
        for bit in _ones(bits):
            yield bit, column * step

    def _windowed_reach(
        self, tables: Mapping[int, Table], reach: dict[int, int], hashes: Sequence[Hash]
    ) -> dict[int, int]:
        """Return the longest part of the prompt, not longer than `reach`, of which windows have all they need."""
        rules = [
            (rule, ~bits, self._stretches(tables.get(rule.group, {}), rule, hashes)) for rule, bits in self._windowed
        ]
        beginning: dict[int, int] = {}
        for bit in self._windowed_bits:
            most = reach.get(bit, 0 if bit in self._full_bits else len(hashes))
            beginning[most] = beginning.get(most, 0) | 1 << bit
        found, waiting, num_waiting = dict.fromkeys(self._windowed_bits, 0), 0, len(self._windowed_bits)
        for length in range(len(hashes), 0, -1):
            waiting |= beginning.get(length, 0)
            fits = waiting
            for rule, others, stretches in rules:
                end, rest = divmod(length, rule.step)
                fits &= others if rest else others | stretches.common(end - rule.num_needed(end), end)
            for bit in _ones(fits):
                found[bit] = length
            waiting ^= fits
            num_waiting -= fits.bit_count()
            if not num_waiting:
                break
        return found

    def _stretches(self, table: Table, rule: Rule, hashes: Sequence[Hash]) -> _Stretches:
        get, spread = table.get, self._spread
        masks = [spread(get(name, 0)) for name in hashes[rule.step - 1 :: rule.step]]
        return _Stretches(masks, max(map(rule.num_needed, range(len(masks) + 1))))

    def _spread(self, mask: int) -> int:
        """Return a mask in which each tier has what faster ones have, too."""
        for keep, by in self._shifts:
            mask |= (mask & keep) << by
        return mask


_WINDOWED = {
    "sliding": "sliding", "sliding_window": "sliding", "sliding_window_mla": "sliding", "ring": "sliding",
    "chunked": "chunked", "chunked_local_attention": "chunked", "state": "state", "mamba": "state",
}  # fmt: skip
"""The kinds of groups that need only a part of the past, in words of Kvist and others."""


def rule_of(group: int, kind: str | None, window: int | None, block_size: int) -> Rule:
    """Return what a group needs, in the words that an event has for it; all of a prompt where it says too little."""
    known = _WINDOWED.get(kind or ("sliding" if window else "full"), "full")
    if known == "state":
        return Rule(group, known, 0, block_size)
    if known == "full" or not window or not block_size:
        return Rule(group, "full", 0, block_size)
    return Rule(group, known, window, block_size)


def _stepped(rules: Iterable[Rule]) -> Iterator[Rule]:
    """Yield the rules of a rank with their steps; of a group that needs everything the size of a block says no more."""
    rules = list(rules)
    least = min((rule.block_size for rule in rules if rule.block_size), default=0)
    for rule in rules:
        step = max(rule.block_size // least, 1) if rule.block_size else 1
        yield replace(rule, step=step, block_size=0 if rule.kind == "full" else rule.block_size)


def _ones(mask: int) -> Iterator[int]:
    """Yield the places of the ones of a mask.

    >>> list(_ones(0b1010))
    [1, 3]
    """
    while mask:
        bit = mask & -mask
        yield bit.bit_length() - 1
        mask ^= bit


def _powers(width: int) -> list[int]:
    """List 1, 2, 4, ... below a width."""
    return [1 << exponent for exponent in range(max(width - 1, 0).bit_length())]
