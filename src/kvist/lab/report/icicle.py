"""The prefix tree of a trace as boxes under boxes: runs of blocks, and how many requests begin with each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvist.errors import ArgumentError
from kvist.lab.curves import References

__all__ = ["IcicleNode", "PrefixIcicle"]

Ints = NDArray[np.int64]
PIECE = 1 << 20
"""References that are looked at together."""


@dataclass(frozen=True, slots=True)
class IcicleNode:
    """A run of `num_blocks` blocks, from the `first_block`th of a prompt on, that `num_requests` prompts begin with.

    `parent` is the index of the run before it, or of the node for a label or all requests; these have no blocks.
    `first_request` is the first of them, 0 the first of the trace. Of what follows it, `num_hidden` runs, of
    `num_hidden_requests` requests, were left out.
    """

    parent: int
    label: str
    first_block: int
    num_blocks: int
    num_requests: int
    first_request: int
    num_hidden: int
    num_hidden_requests: int


@dataclass(frozen=True, slots=True)
class PrefixIcicle:
    """The runs of a trace's prefix tree that most requests begin with; `num_runs` are all there are.

    `nodes` begins with one for all requests; parents come before their children. With labels, the next ones are those
    of each label.
    """

    name: str
    block_size: int
    num_runs: int
    nodes: tuple[IcicleNode, ...]

    @property
    def num_shown(self) -> int:
        """Runs that are here."""
        return sum(node.num_blocks > 0 for node in self.nodes)

    @classmethod
    def of(cls, references: References, labels: Sequence[str] | None = None, *, max_nodes: int = 4000) -> PrefixIcicle:
        """Make it of references; `labels` has a name for each request, such as its namespace, or None.

        Requests of equal prefixes should have equal labels, as they do where labels are namespaces: a run counts for
        the label of the first request that has it. At most `max_nodes` runs are kept, those of most requests first.

        Raises `ArgumentError` for a sample, whose prefixes have holes, and where labels and requests differ in number.

        >>> asked = References(np.array([0, 1, 2, 0, 1, 3, 4]), np.array([0, 3, 6, 7]), block_size=16)
        >>> for node in PrefixIcicle.of(asked).nodes:
        ...     print(node.parent, node.first_block, node.num_blocks, node.num_requests)
        -1 0 0 3
        0 0 2 2
        1 2 1 1
        1 2 1 1
        0 0 1 1
        """
        if references.rate < 1:
            raise ArgumentError(f"references are a sample of {references.rate:g} of all blocks: prefixes have holes")
        if labels is not None and len(labels) != references.num_requests:
            raise ArgumentError(f"labels has {len(labels)} entries for {references.num_requests} requests")
        if max_nodes < 1:
            raise ArgumentError(f"max_nodes is {max_nodes}, must be at least 1")
        runs = _Runs.of(references)
        nodes = tuple(_nodes(runs, labels, references.num_requests, max_nodes))
        return cls(references.name, references.block_size, len(runs.heads), nodes)


@dataclass(frozen=True, slots=True)
class _Runs:
    """Runs in the order of their first references: the number of the run before (-1: none), and numbers of each."""

    heads: Ints
    parents: Ints
    first_blocks: Ints
    num_blocks: Ints
    num_requests: Ints
    first_requests: Ints

    @classmethod
    def of(cls, references: References) -> _Runs:
        """Join blocks that always follow one another."""
        ids, starts = references.ids, references.starts
        firsts = _first_places(ids)
        requests = np.searchsorted(starts, firsts, side="right") - 1
        depths = firsts - starts[requests]
        parents = np.where(depths > 0, ids[firsts - 1], -1)
        visits = np.bincount(ids, minlength=len(firsts))
        num_children = np.bincount(parents[parents >= 0], minlength=len(firsts))
        is_joined = (parents >= 0) & (num_children[parents] == 1) & (visits[parents] == visits)
        head_of = _first_of_chain(np.where(is_joined, parents, np.arange(len(firsts))))
        heads, sizes = np.unique(head_of, return_counts=True)
        number = np.full(len(firsts) + 1, -1, np.int64)
        number[heads] = np.arange(len(heads))
        above = np.where(parents[heads] >= 0, head_of[parents[heads]], len(firsts))
        return cls(heads, number[above], depths[heads], sizes, visits[heads], requests[heads])


def _first_places(ids: Ints) -> Ints:
    """Return where each id is first, `[num_unique]`. Ids are numbered in that order: where they grow beyond all before.

    A piece at a time, since traces of 80 million references would take twice their memory else.
    """
    found, largest = [np.zeros(0, np.int64)], -1
    for begin in range(0, len(ids), PIECE):
        grown = np.maximum.accumulate(ids[begin : begin + PIECE])
        found.append(begin + np.flatnonzero(np.diff(np.maximum(grown, largest), prepend=largest)))
        largest = max(largest, int(grown[-1]))
    return np.concatenate(found)


def _first_of_chain(before: Ints) -> Ints:
    """Follow each block's pointer to the block before in its run, up to the first one, which points at itself."""
    while True:
        further = before[before]
        if np.array_equal(further, before):
            return before
        before = further


def _nodes(runs: _Runs, labels: Sequence[str] | None, num_requests: int, max_nodes: int) -> Iterator[IcicleNode]:
    """Yield the node of all requests, those of labels, and the runs of most requests.

    A run has no more requests than the one before it, and comes later: so what is before a kept run is kept, too.
    """
    ranked = np.argsort(-runs.num_requests, kind="stable")
    kept, dropped = np.sort(ranked[:max_nodes]), ranked[max_nodes:]
    place_of_name = {name: place for place, name in enumerate(dict.fromkeys(labels or ()), start=1)}
    names = list(place_of_name)
    place_of = np.full(len(runs.heads) + 1, -1, np.int64)
    place_of[kept] = np.arange(len(kept)) + 1 + len(names)
    tops = np.array([place_of_name[label] for label in labels or ()], np.int64)
    above = np.where(runs.parents >= 0, place_of[runs.parents], 0)
    if labels is not None:
        above = np.where(runs.parents >= 0, above, tops[runs.first_requests])
    is_hidden = above[dropped] >= 0
    num_places = 1 + len(names) + len(kept)
    hidden = np.bincount(above[dropped][is_hidden], minlength=num_places)
    hidden_requests = np.bincount(
        above[dropped][is_hidden], weights=runs.num_requests[dropped][is_hidden], minlength=num_places
    ).astype(np.int64)

    def node(place: int, parent: int, label: str, numbers: tuple[int, int, int, int]) -> IcicleNode:
        return IcicleNode(parent, label, *numbers, int(hidden[place]), int(hidden_requests[place]))

    yield node(0, -1, "all requests", (0, 0, num_requests, 0))
    for place, name in enumerate(names, start=1):
        of_name = np.flatnonzero(tops == place)
        yield node(place, 0, name, (0, 0, len(of_name), int(of_name[0])))
    columns = (runs.first_blocks, runs.num_blocks, runs.num_requests, runs.first_requests)
    for run in kept.tolist():
        first_block, num_blocks, requests, first_request = (int(column[run]) for column in columns)
        numbers = (first_block, num_blocks, requests, first_request)
        yield node(int(place_of[run]), int(above[run]), "", numbers)
