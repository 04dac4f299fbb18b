"""Names for the blocks of runs, in any chain, and what covers these blocks besides tokens."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from hashlib import sha256
from typing import Any

from kvist.core.events import Run
from kvist.core.extents import Namespace
from kvist.wire.hashes import HashChain, KvistChain, Scope, low_words
from kvist.wire.records import BlockMedia, Hash

__all__ = ["NO_SCOPE", "RunNames", "default_scope", "media_of"]

NO_SCOPE = Scope()
"""The scope of content that nothing keeps apart."""
MAX_NAMED_BLOCKS = 1_000_000


def default_scope(namespace: Namespace) -> Scope:
    """Return the scope of a namespace where nobody says better: none for (), else a salt of its own.

    >>> default_scope(()), default_scope(("tenant",)) == default_scope(("other",))
    (Scope(lora_id=None, lora_name=None, salt=None), False)
    """
    if not namespace:
        return NO_SCOPE
    parts = [f"{type(part).__name__}{len(str(part))}:{part!s}" for part in namespace]
    return Scope(salt=sha256("".join(parts).encode("utf-8", "surrogatepass")).hexdigest())


class RunNames:
    """What the blocks of runs are called in one chain; without a chain, by Kvist's digests.

    With `short` these are the last 8 bytes as an int, which is what vLLM sends by default. The names of at most
    `max_blocks` blocks are kept, those used last; others are computed again from the tokens of the run.
    """

    def __init__(
        self,
        chain: HashChain | None = None,
        *,
        short: bool = False,
        scope: Callable[[Namespace], Scope] = default_scope,
        max_blocks: int = MAX_NAMED_BLOCKS,
    ) -> None:
        self._chain = chain
        self._is_short = short
        self.scope = scope
        self._max_blocks = max_blocks
        self._num_blocks = 0
        self._links: OrderedDict[Run, list[Hash]] = OrderedDict()

    @property
    def hash_name(self) -> str:
        """What the chain is called."""
        return KvistChain.name if self._chain is None else self._chain.name

    def of(self, run: Run, first: int, end: int) -> tuple[Hash, ...]:
        """Return the names of blocks first .. end-1 of a run."""
        if self._chain is None:
            digests: Sequence[Hash] = run.digests()[first:end]
            return tuple(low_words(digests) if self._is_short else digests)
        return tuple(self._chain.names(self._of_run(run)[first:end]))

    def before(self, run: Run, first: int) -> Hash | None:
        """Return the name of the block before block `first` of a run; None where that begins the prefix."""
        if first:
            return self.of(run, first - 1, first)[0]
        return None if run.parent is None else self.of(run.parent, run.parent_end - 1, run.parent_end)[0]

    def _of_run(self, run: Run) -> list[Hash]:
        waiting: list[Run] = []
        node: Run | None = run
        while node is not None and len(self._links.get(node, ())) < node.num_blocks:
            waiting.append(node)
            node = node.parent
        for each in reversed(waiting):
            self._extend(each)
        self._links.move_to_end(run)
        found = self._links[run]
        while self._num_blocks > self._max_blocks and len(self._links) > 1:
            self._num_blocks -= len(self._links.popitem(last=False)[1])
        return found

    def _extend(self, run: Run) -> None:
        assert self._chain is not None
        links = self._links.setdefault(run, [])
        done, end = len(links), run.num_blocks
        link = links[-1] if links else None
        if not links and run.parent is not None:
            link = self._links[run.parent][run.parent_end - 1]
        tokens = run.ids(done, end).reshape(end - done, -1)
        media, extra_ids = media_of(run, done, end)
        links += self._chain.extend(link, self.scope(run.namespace), tokens, media, extra_ids)
        self._num_blocks += end - done


def media_of(run: Run, first: int, end: int) -> tuple[tuple[tuple[BlockMedia, ...], ...], tuple[int, ...]]:
    """Return the media that cover each of blocks first .. end-1 of a run, and the extra id of each of their tokens.

    Both are empty where there are none. Media that began in a block before count too.
    """
    spans = [(at, each) for at, each in _spans(run, first) if each.key is not None]
    marks = run.identities(first, end)
    if not spans and not marks:
        return (), ()
    num_tokens = run.ids(first, end).size
    size = num_tokens // (end - first)
    blocks: list[list[BlockMedia]] = [[] for _ in range(end - first)]
    extra_ids = [0] * num_tokens
    for at, each in [*spans, *marks]:
        if each.extra_id and at >= 0:  # a span may have begun before
            extra_ids[at] = each.extra_id
        if each.key is not None:
            for column in range(max(at, 0) // size, min(-(-(at + each.length) // size), end - first)):
                blocks[column].append(BlockMedia(each.key, at - column * size, each.length))
    media = tuple(map(tuple, blocks)) if any(blocks) else ()
    return media, tuple(extra_ids) if any(extra_ids) else ()


def _spans(run: Run, first: int) -> Iterable[tuple[int, Any]]:
    """Yield the last media span that begins before block `first`, by its place relative to it, if it reaches there."""
    if run.parent is None and not run.marks:
        return
    size = len(run.ids(first - 1, first)) if first else 0
    marks = [(at - first * size, each) for at, each in run.marks if at < first * size]
    node, back = run, first * size
    while not any(each.key is not None for _, each in marks) and node.parent is not None:
        parent, end = node.parent, node.parent_end
        width = len(parent.ids(end - 1, end)) * end
        marks = [(at - width - back, each) for at, each in parent.marks if at < width]
        node, back = parent, back + width
    for at, each in [pair for pair in marks if pair[1].key is not None][-1:]:
        if at + each.length > 0:
            yield at, each
