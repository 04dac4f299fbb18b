"""The state machine: admits, grows, commits and ends sequences, and says which copies that needs.

Every call first finds out whether it can be done, and only then changes anything. Nothing here knows bytes, devices or time.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvist.config import CacheConfig
from kvist.core import branches, explanation, invariants
from kvist.core.digest import state_digest
from kvist.core.eviction import policy_named
from kvist.core.explanation import Explanation
from kvist.core.extents import Extent, Match, Namespace, PrefixTree
from kvist.core.matching import Pin, PrefixMatch
from kvist.core.moves import Move
from kvist.core.pool import BlockPool
from kvist.core.sequences import Batch, Sequence, SequenceRows, Sequences
from kvist.core.statistics import Counters, Stats
from kvist.core.tokens import TOKEN_BYTES, Tokens, as_token_array, as_token_bytes
from kvist.errors import ArgumentError, ArgumentTypeError, NeverFits, OutOfBlocks, OutOfRows, SequenceError, StaleMatch

__all__ = ["CacheCore"]


class CacheCore:
    """Decides which blocks hold which tokens; one full-attention group, the device tier.

    Costs: a request costs what its extents cost, a decode step a few array operations, whatever the number of blocks.
    """

    def __init__(self, config: CacheConfig) -> None:
        config.validate()
        self.config = config
        self.block_size = config.block_size
        self._start()

    def _start(self) -> None:
        config = self.config
        self.pool = BlockPool(config.resolved_num_blocks)
        self.tree = PrefixTree([self.pool], config.block_size, policy_named(config.policy), partial=config.reuse and config.partial_reuse)
        self.rows = SequenceRows(config.max_sequences, config.max_sequence_length, config.block_size, num_groups=1)
        self.counters = Counters()
        self.pins: dict[Pin, Extent] = {}
        self._moves: list[Move] = []
        self._committed = False

    # -- admission ----------------------------------------------------------------------------------------------------

    def add_sequence(
        self,
        tokens: Tokens,
        *,
        namespace: Namespace = (),
        reuse: bool = True,
        publish: bool = True,
        num_beams: int = 1,
    ) -> Sequence:
        """Admit a prompt: find its longest reusable prefix and allocate every block it needs.

        `tokens`: 1-D int array, `array`, buffer or list of ids 0 .. 2**31-1, at least one. The first `num_cached_tokens` of the
        sequence returned, at most all but the last, are computed already. `namespace` separates content that must not be
        shared; `reuse=False` does not look for content, `publish=False` leaves none to others. With `num_beams`, `beams` lists that
        many sequences: they share the prompt's full blocks, only the first is to be computed, and the others may be used once it has
        committed the whole prompt.

        Raises NeverFits for a prompt longer than `max_sequence_length` or the whole pool, OutOfBlocks or OutOfRows if there
        is no room now, ArgumentError for tokens or a namespace that cannot be.
        """
        prompt = as_token_bytes(tokens)
        self._check_prompt(prompt, namespace, num_beams)
        num_tokens = len(prompt) // TOKEN_BYTES
        num_blocks = -(-num_tokens // self.block_size)
        num_private = num_blocks + (num_beams - 1 if num_tokens % self.block_size else 0)
        match = self._match(prompt, namespace) if reuse else None
        num_reused = match.position // self.tree.block_bytes if match else 0
        self.require_blocks(num_private - num_reused, match)

        source = int(match.source.blocks[0, match.source_block]) if match and match.source else None
        sequence = self._open(prompt, namespace, match, publishes=publish and self.config.reuse)
        self.fill(sequence.row, num_reused, num_blocks)
        if match and source is not None:
            self._copy_partial(sequence, source, num_reused, match.num_partial_tokens)
        self.rows.refresh_limits(sequence.row)
        if num_beams > 1:
            branches.add_beams(self, sequence, prompt, num_beams)
        self.counters.admit(num_tokens, sequence.num_cached_tokens, num_private, num_reused)
        return sequence

    def _check_prompt(self, prompt: bytes, namespace: Namespace, num_beams: int) -> None:
        num_tokens = len(prompt) // TOKEN_BYTES
        if not num_tokens:
            raise ArgumentError("tokens is empty; a prompt has at least one token")
        check_namespace(namespace)
        if type(num_beams) is not int or num_beams < 1:
            raise ArgumentError(f"num_beams is {num_beams!r}, must be an int of at least 1")
        if num_tokens > self.config.max_sequence_length:
            raise NeverFits(f"the prompt has {num_tokens} tokens, max_sequence_length is {self.config.max_sequence_length}")
        num_blocks, rest = divmod(num_tokens, self.block_size)
        needed = num_blocks + (num_beams if rest else 0)
        if needed > self.pool.num_blocks:
            raise NeverFits(f"the prompt needs {needed} blocks of {self.block_size} tokens, the whole pool has {self.pool.num_blocks}")
        self.require_rows(num_beams)

    def _match(self, prompt: bytes, namespace: Namespace) -> Match | None:
        """Find all of a prompt but its last token, which must be computed for its logits."""
        self.publish_committed()
        root = self.tree.roots.get(namespace)
        return self.tree.find(root, prompt, len(prompt) - TOKEN_BYTES, partial=self.tree.partial) if root else None

    def _open(self, prompt: bytes, namespace: Namespace, match: Match | None, *, publishes: bool) -> Sequence:
        """Give a prompt a row that holds what it matched."""
        tree = self.tree
        extent: Extent = self._extent_of(match) if match else tree.root(namespace)
        tree.hold(extent)
        sequence = self.rows.open(namespace, extent, publishes=publishes)
        self.rows.set_earlier(sequence, 0, prompt)
        num_reused = self._fill_from_tree(sequence)
        self.rows.num_computed[sequence.row] = sequence.num_cached_tokens = num_reused * self.block_size
        self.rows.num_blocks[sequence.row] = num_reused
        self.rows.set_published(sequence, num_reused)
        return sequence

    def _extent_of(self, match: Match) -> Extent:
        """Return the extent that ends where the whole blocks of a match do."""
        return self.tree.split(match.child, match.child_blocks) if match.child else match.extent

    def _fill_from_tree(self, sequence: Sequence) -> int:
        """Write the blocks of the sequence's extents into its row, counting a hit of each; returns their number."""
        extent = sequence._extent
        path = []
        while extent.parent is not None:
            extent.hits += 1
            path.append(extent.blocks)
            extent = extent.parent
        end = 0
        table = self.rows.block_table[:, sequence.row]
        for blocks in reversed(path):
            start, end = end, end + blocks.shape[1]
            table[:, start:end] = blocks
        return end

    def _copy_partial(self, sequence: Sequence, source: int, index: int, num_tokens: int) -> None:
        """Order a copy of the first tokens of a block that agrees in part into the sequence's block at position `index`.

        Making room may just have evicted the source, and may even have handed out its block: its content is still there
        when the copy is made, since moves come before anything that is written.
        """
        self.order_move(source, int(self.rows.block_table[0, sequence.row, index]), num_tokens)
        sequence.num_cached_tokens += num_tokens
        self.rows.num_computed[sequence.row] = sequence.num_cached_tokens

    # -- growth -------------------------------------------------------------------------------------------------------

    def append(self, sequences: Sequences, tokens: Any) -> None:
        """Add tokens, and the blocks they need: one token each as a 1-D int array, or a list of arrays.

        `sequences` is a list of Sequence or a 1-D int array of rows. Raises OutOfBlocks (nothing is added to any), NeverFits
        beyond `max_sequence_length`, SequenceError for rows that are not running or are named twice.
        """
        batch = self.rows.batch(sequences, "append")
        if _is_one_each(tokens):
            ids = as_token_array(tokens)
            if len(ids) != len(batch.rows):
                raise ArgumentError(f"append: {len(batch.rows)} sequences, but {len(ids)} tokens")
            self._append_one_each(batch, ids)
            return
        packed = [as_token_bytes(each, f"tokens[{index}]") for index, each in enumerate(tokens)]
        if len(packed) != len(batch.rows):
            raise ArgumentError(f"append: {len(batch.rows)} sequences, but {len(packed)} arrays of tokens")
        self._grow(batch, np.fromiter(map(len, packed), np.int64, len(packed)) // TOKEN_BYTES, "append")
        for row, added in zip(batch.rows.tolist(), packed, strict=True):
            self.rows.extend_earlier(self.rows.sequences[row], added)
        self.rows.refresh_limits(batch.rows)

    def _append_one_each(self, batch: Batch, ids: NDArray[np.int32]) -> None:
        rows, select = self.rows, batch.select
        num_tokens = rows.num_tokens[select]
        longer = num_tokens + 1
        if np.logical_or.reduce(longer > rows.limit[select]):
            crossing = Batch(batch.rows[longer > rows.limit[select]])
            self._grow(crossing, 1, "append")
            self._make_room_in_tails(crossing)
        rows.tail[rows.tail_origin[select] + num_tokens] = ids
        rows.num_tokens[select] = longer

    def _make_room_in_tails(self, batch: Batch) -> None:
        """Empty the tails that are full: once in `tail_tokens` steps of a row."""
        rows = self.rows
        used = rows.tail_origin[batch.rows] + rows.num_tokens[batch.rows] - batch.rows * rows.tail_tokens
        full = batch.rows[used >= rows.tail_tokens]
        for row in full.tolist():
            rows.empty_tail(rows.sequences[row])
        rows.refresh_limits(full)

    def reserve(self, sequences: Sequences, n: ArrayLike) -> None:
        """Give sequences capacity for n more tokens than they have (an int, or one for each), for drafts and multi-step decode."""
        batch = self.rows.batch(sequences, "reserve")
        self._grow(batch, _counts(n, len(batch.rows), "n"), "reserve")

    def _grow(self, batch: Batch, num_added: int | NDArray[np.int64], call: str) -> None:
        """Give each row the blocks that `num_added` more tokens need; all rows or none."""
        rows = self.rows
        if not len(batch.rows):
            return
        wanted = rows.num_tokens[batch.select] + num_added
        if (wanted > rows.max_tokens).any():
            at = int(np.flatnonzero(wanted > rows.max_tokens)[0])
            raise NeverFits(f"{call}: row {batch.rows[at]} would have {wanted[at]} tokens, max_sequence_length is {rows.max_tokens}")
        have = rows.num_blocks[batch.select].copy()
        extra = np.maximum((wanted + self.block_size - 1) // self.block_size - have, 0)
        total = int(extra.sum())
        if not total:
            return
        self.require_blocks(total)
        self._evict_for(total)
        at_rows = np.repeat(batch.rows, extra)
        firsts = np.cumsum(extra) - extra
        columns = np.repeat(have - firsts, extra) + np.arange(total)
        rows.block_table[0, at_rows, columns] = self.pool.take(total)
        rows.num_blocks[batch.select] = have + extra
        rows.refresh_limits(batch.rows)
        self.counters.num_allocated_blocks += total

    def commit(self, sequences: Sequences, num_computed_tokens: ArrayLike | None = None) -> None:
        """Say that K and V are written up to `num_computed_tokens` (one for all or one each; default: all tokens).

        Full blocks up to there become reusable. Raises SequenceError where the count is less than before or more than the tokens.
        """
        batch = self.rows.batch(sequences, "commit")
        rows, select = self.rows, batch.select
        if num_computed_tokens is None:
            rows.num_computed[select] = rows.num_tokens[select]
        else:
            counts = np.broadcast_to(_counts(num_computed_tokens, len(batch.rows), "num_computed_tokens"), len(batch.rows))
            self._check_commit(batch, counts)
            rows.num_computed[select] = counts
        self._committed = True
        if rows.num_waiting:
            for row in batch.rows.tolist():
                branches.start_beams(self, rows.sequences[row])

    def _check_commit(self, batch: Batch, counts: NDArray[np.int64]) -> None:
        rows = self.rows
        wrong = (counts < rows.num_computed[batch.rows]) | (counts > rows.num_tokens[batch.rows])
        if wrong.any():
            at = int(np.flatnonzero(wrong)[0])
            row = batch.rows[at]
            raise SequenceError(
                f"commit: row {row} cannot have {counts[at]} computed tokens: it has {rows.num_tokens[row]} tokens, and "
                f"{rows.num_computed[row]} of them are computed (rewind takes tokens back)"
            )

    # -- taking back and ending ---------------------------------------------------------------------------------------

    def rewind(self, sequence: Sequence, num_tokens: int) -> None:
        """Take the last `num_tokens` tokens back, and give back the blocks that are not needed any more.

        Published blocks stay readable by others and are never written again: where the sequence must go on inside one, it
        gets a copy (a Move). Raises SequenceError if it has fewer tokens, OutOfBlocks if there is no block for the copy.
        """
        self.rows.check_running(sequence, "rewind")
        branches.refuse_waiting(sequence, "rewind")
        row = sequence.row
        n = _count(num_tokens, "num_tokens")
        left = int(self.rows.num_tokens[row]) - n
        if left < 0:
            raise SequenceError(f"rewind: row {row} has {self.rows.num_tokens[row]} tokens, {n} cannot be taken back")
        if not self.pool.num_free:
            self.publish_committed()
        if left // self.block_size < self.rows.num_published[row]:
            self._rewind_published(sequence, left)
        else:
            self._truncate(sequence, left)
        self.rows.num_computed[row] = min(int(self.rows.num_computed[row]), left)
        self.rows.refresh_limits(row)

    def _truncate(self, sequence: Sequence, left: int) -> None:
        """Drop tokens that are not published, and the blocks past the last token."""
        rows, row = self.rows, sequence.row
        if left < rows.tail_start(row):
            kept = sequence._earlier[: (left - sequence._earlier_start) * TOKEN_BYTES]
            rows.set_earlier(sequence, sequence._earlier_start, kept)
        rows.num_tokens[row] = left
        self._give_row(row, -(-left // self.block_size))

    def _rewind_published(self, sequence: Sequence, left: int) -> None:
        """Step back to the extent that ends where the sequence goes on, with a private copy of a block it stops inside."""
        rows, row = self.rows, sequence.row
        boundary, inside = divmod(left, self.block_size)
        old, published = sequence._extent, int(rows.num_published[row])
        if inside and old.references > 1 and int(rows.num_blocks[row]) == published:
            self.require_blocks(1)
        source = int(rows.block_table[0, row, boundary])
        kept_tokens = sequence.tokens[left - inside : left].tobytes()
        extent = self.extent_ending_at(sequence, boundary)
        self.tree.hold(extent)
        self._give_row(row, published)
        self.tree.release(old)
        sequence._extent = extent
        rows.block_table[:, row, boundary:published] = 0
        rows.num_blocks[row] = boundary
        rows.set_earlier(sequence, boundary * self.block_size, kept_tokens)
        rows.set_published(sequence, boundary)
        rows.version[row] += 1
        if inside:
            self.fill(row, boundary, boundary + 1)
            self.order_move(source, int(rows.block_table[0, row, boundary]), inside)

    def extent_ending_at(self, sequence: Sequence, num_blocks: int) -> Extent:
        """Return the extent on the sequence's path that ends after `num_blocks` blocks, split off where needed."""
        extent, end = sequence._extent, int(self.rows.num_published[sequence.row])
        while extent.parent is not None and end - extent.num_blocks >= num_blocks:
            end -= extent.num_blocks
            extent = extent.parent
        return self.tree.split(extent, num_blocks - end + extent.num_blocks) if end > num_blocks else extent

    def free(self, sequence: Sequence, *, publish: bool = True) -> None:
        """End a sequence: what is computed stays reusable until evicted (what is not published yet only if `publish`)."""
        self.rows.check_live(sequence, "free")
        if sequence._beams is not None:
            branches.leave_beams(self, sequence)
        row = sequence.row
        if publish and sequence.publishes:
            self._publish_last(sequence)
        self._give_row(row, int(self.rows.num_published[row]))
        self.rows.close(sequence)
        self.tree.release(sequence._extent)

    # -- publishing ---------------------------------------------------------------------------------------------------

    def publish_committed(self) -> None:
        """Put every full committed block into the tree; done before anything looks there, so that a decode step need not."""
        if not self._committed:
            return
        self._committed = False
        for row in np.flatnonzero(self.rows.num_computed >= self.rows.publish_due).tolist():
            self.publish(self.rows.sequences[row])

    def publish(self, sequence: Sequence) -> None:
        """Put the sequence's full committed blocks into the tree; where the content is there already, share it."""
        rows, row = self.rows, sequence.row
        start, end = int(rows.num_published[row]), int(rows.num_computed[row]) // self.block_size
        if end <= start:
            return
        tokens = rows.token_bytes(sequence, start * self.block_size, end * self.block_size)
        blocks = rows.block_table[:, row, start:end]
        if sequence.publishes:
            sequence._extent, existing = self.tree.insert(sequence._extent, tokens, blocks)
        else:
            sequence._extent, existing = self.tree.insert_unlisted(sequence._extent, tokens, blocks), 0
        if existing:
            self._rebase(sequence, start, existing, end)
        rows.set_published(sequence, end)

    def _rebase(self, sequence: Sequence, start: int, existing: int, end: int) -> None:
        """Replace the row's blocks whose content was in the tree already by the tree's, and give its own back."""
        table = self.rows.block_table[:, sequence.row]
        own = table[:, start : start + existing].copy()
        extent = sequence._extent
        while end > start:
            first = end - extent.num_blocks
            table[:, max(first, start) : end] = extent.blocks[:, max(start - first, 0) :]
            assert extent.parent is not None
            extent, end = extent.parent, first
        self.pool.give(own[0])
        self.rows.version[sequence.row] += 1
        self.counters.num_shared_blocks += existing
        branches.follow(self, sequence)

    def _publish_last(self, sequence: Sequence) -> None:
        """Publish all that is computed, a partly filled last block too; the sequence ends right after."""
        rows, row = self.rows, sequence.row
        start, computed = int(rows.num_published[row]), int(rows.num_computed[row])
        if not self.tree.partial:
            computed -= computed % self.block_size
        end = -(-computed // self.block_size)
        if end <= start:
            return
        tokens = rows.token_bytes(sequence, start * self.block_size, computed)
        blocks = rows.block_table[:, row, start:end]
        sequence._extent, existing = self.tree.insert(sequence._extent, tokens, blocks)
        if existing:
            self.pool.give(blocks[0, :existing])
            self.counters.num_shared_blocks += existing
        rows.num_published[row] = end

    # -- prefixes without sequences -----------------------------------------------------------------------------------

    def match_prefix(self, tokens: Tokens, *, namespace: Namespace = ()) -> PrefixMatch:
        """Look how much of a prompt could be reused now, all tokens but the last; changes nothing."""
        prompt = as_token_bytes(tokens)
        if not prompt:
            raise ArgumentError("tokens is empty; a prompt has at least one token")
        check_namespace(namespace)
        match = self._match(prompt, namespace)
        if match is None:
            return PrefixMatch(prompt, namespace, 0, 0)
        return PrefixMatch(prompt, namespace, match.position // TOKEN_BYTES, match.num_partial_tokens)

    def pin(self, match: PrefixMatch) -> Pin:
        """Hold the whole blocks of a match without a sequence, until `release`; works as a context manager, too.

        Raises StaleMatch if they have been evicted since.
        """
        if not isinstance(match, PrefixMatch):
            raise ArgumentTypeError(f"pin: expected a PrefixMatch, got {type(match).__name__}")
        found = self._match(match.prompt, match.namespace)
        if match.num_block_tokens and (found is None or found.position // TOKEN_BYTES < match.num_block_tokens):
            now = found.position // TOKEN_BYTES if found else 0
            raise StaleMatch(f"pin: the match had {match.num_block_tokens} tokens in whole blocks, {now} are left; match again")
        extent: Extent = self._extent_of(found) if found else self.tree.root(match.namespace)
        self.tree.hold(extent)
        pin = Pin(self._release_pin, match.namespace, found.position // TOKEN_BYTES if found else 0)
        self.pins[pin] = extent
        return pin

    def _release_pin(self, pin: Pin) -> None:
        if pin not in self.pins:
            raise SequenceError("the pin has been released")
        self.tree.release(self.pins.pop(pin))

    def evict(self, num_blocks: int) -> int:
        """Evict up to that many cached blocks in the policy's order; returns how many were there to evict."""
        wanted = _count(num_blocks, "num_blocks")
        self.publish_committed()
        evicted = min(wanted, self.tree.num_evictable)
        self.tree.evict(evicted)
        return evicted

    def drop(self, *, namespace: Namespace) -> int:
        """Forget all content of a namespace; returns how many blocks became free at once.

        Running sequences and pins keep what they hold until they end; from now on nobody can hit it, and such sequences publish no more.
        """
        check_namespace(namespace)
        self.publish_committed()
        for sequence in self.rows.running():
            if sequence.namespace == namespace:
                sequence.publishes = False
                self.rows.publish_due[sequence.row] = np.iinfo(np.int64).max
        return self.tree.drop(namespace)

    def reset(self) -> None:
        """Forget everything cached, and the statistics. Raises SequenceError while sequences run or pins hold; says which."""
        running = self.rows.running()
        if running or self.pins:
            names = ", ".join(f"row {sequence.row} ({sequence.num_tokens} tokens)" for sequence in running[:8])
            raise SequenceError(f"reset: {len(running)} sequences run ({names}{', ...' if len(running) > 8 else ''}) and {len(self.pins)} pins hold")
        self.tree.clear()
        self._start()

    # -- branches -----------------------------------------------------------------------------------------------------

    def fork(self, sequence: Sequence, n: int = 1) -> list[Sequence]:
        """Return n copies of a sequence: they share its full committed blocks, and copy the block being written (a Move each).

        Raises SequenceError if more than one block with tokens is not committed, OutOfBlocks or OutOfRows without room.
        """
        return branches.fork(self, sequence, _count(n, "n"))

    def reorder(self, beams: list[Sequence], parents: ArrayLike) -> None:
        """Let `beams[i]` go on from what `beams[parents[i]]` is now; copies only blocks being written that several go on from."""
        branches.reorder(self, beams, parents)

    # -- numbers ------------------------------------------------------------------------------------------------------

    @property
    def num_blocks(self) -> int:
        """Blocks of the pool."""
        return self.pool.num_blocks

    @property
    def num_free_blocks(self) -> int:
        """Blocks that an allocation could take now: never used, given back, or cached and unreferenced."""
        self.publish_committed()
        return self.pool.num_free + self.tree.num_evictable

    @property
    def num_tokens(self) -> NDArray[np.int64]:
        """Tokens by row, a read-only view `[max_sequences]`; 0 where no sequence runs."""
        return _read_only(self.rows.num_tokens)

    @property
    def num_computed_tokens(self) -> NDArray[np.int64]:
        """Computed tokens by row, a read-only view `[max_sequences]`."""
        return _read_only(self.rows.num_computed)

    @property
    def row_version(self) -> NDArray[np.int64]:
        """Versions by row, a read-only view `[max_sequences]`: see `Sequence.version`."""
        return _read_only(self.rows.version)

    def stats(self) -> Stats:
        """Return the numbers of now and the counts since the start or the last `reset`."""
        self.publish_committed()
        return self.counters.stats(self)

    def explain(self, subject: Sequence | Tokens, *, namespace: Namespace = ()) -> Explanation:
        """Say who holds what of a sequence, or how far a prompt is cached and why not further."""
        if isinstance(subject, Sequence):
            self.rows.check_live(subject, "explain")
            return explanation.of_sequence(self, subject)
        return explanation.of_prompt(self, self.match_prefix(subject, namespace=namespace))

    def check(self) -> None:
        """Prove the books: every block has one owner, every reference a holder, ...; raises InvariantError naming the holders."""
        invariants.check(self)

    def digest(self) -> str:
        """Return SHA-256 in hex over what is cached, where, and who runs: equal in managers that were given the same calls."""
        self.publish_committed()
        return state_digest(self)

    def take_moves(self) -> list[Move]:
        """Return the copies still to be made, in order, once: before the next forward pass reads or writes."""
        moves, self._moves = self._moves, []
        return moves

    # -- blocks -------------------------------------------------------------------------------------------------------

    def order_move(self, source: int, destination: int, num_tokens: int) -> None:
        """Order a copy, unless the block already is where it should be."""
        if source != destination:
            self._moves.append(Move(source, destination, num_tokens))

    def require_rows(self, n: int) -> None:
        """Raise unless n rows are free."""
        rows = self.rows
        if n <= rows.num_free:
            return
        total = len(rows.sequences)
        if n > total:
            raise NeverFits(f"{n} sequences asked for, max_sequences is {total}")
        raise OutOfRows(f"{n} rows needed, but {rows.num_free} of max_sequences={total} are free", needed=n, free=rows.num_free, evictable=0, held=total - rows.num_free)

    def require_blocks(self, needed: int, match: Match | None = None) -> None:
        """Raise OutOfBlocks unless that many blocks could be had without what the match would hold."""
        if needed <= self.pool.num_free:
            return
        self.publish_committed()
        free, evictable = self.pool.num_free, self.tree.num_evictable
        held = self.pool.num_blocks - free - evictable
        if match is not None:
            evictable -= self.tree.num_evictable_on(match.extent)
            if match.child is not None and not match.child.references:
                evictable -= match.child_blocks
        if needed <= free + evictable:
            return
        holders = f"{len(self.rows.running())} sequences and {len(self.pins)} pins"
        raise OutOfBlocks(
            f"{needed} blocks needed, but only {free + evictable} are free or evictable ({held} held by {holders})",
            needed=needed,
            free=free,
            evictable=evictable,
            held=held,
        )

    def _evict_for(self, needed: int) -> None:
        if needed > self.pool.num_free:
            self.tree.evict(needed - self.pool.num_free)

    def fill(self, row: int, start: int, end: int) -> None:
        """Give the row new blocks at positions start .. end-1; there must be as many."""
        self._evict_for(end - start)
        self.rows.block_table[0, row, start:end] = self.pool.take(end - start)
        self.rows.num_blocks[row] = end

    def _give_row(self, row: int, keep: int) -> None:
        """Give back the row's blocks from position `keep` on; they must be its own."""
        have = int(self.rows.num_blocks[row])
        if have > keep:
            own = self.rows.block_table[:, row, keep:have]
            self.pool.give(own[0])
            own[:] = 0
            self.rows.num_blocks[row] = keep


def check_namespace(namespace: Namespace) -> None:
    """Raise ArgumentTypeError unless it is a tuple of strings, ints and bytes."""
    if type(namespace) is tuple and all(type(part) in (str, int, bytes) for part in namespace):
        return
    raise ArgumentTypeError(f"namespace is {namespace!r}, must be a tuple of strings, ints and bytes")


def _is_one_each(tokens: Any) -> bool:
    if isinstance(tokens, np.ndarray):
        return tokens.ndim == 1
    if isinstance(tokens, list | tuple):
        return not tokens or isinstance(tokens[0], int | np.integer)
    return not isinstance(tokens, Iterable) or isinstance(tokens, array | memoryview | bytes)


def _count(n: Any, name: str) -> int:
    if isinstance(n, bool) or not hasattr(n, "__index__"):
        raise ArgumentTypeError(f"{name} is {n!r}, must be an int")
    if (value := n.__index__()) < 0:
        raise ArgumentError(f"{name} is {value}, must not be negative")
    return int(value)


def _counts(n: ArrayLike, length: int, name: str) -> NDArray[np.int64]:
    counts = np.asarray(n)
    if counts.dtype.kind not in "iu":
        raise ArgumentTypeError(f"{name} must hold ints, not {counts.dtype}")
    if counts.ndim > 1 or (counts.ndim == 1 and len(counts) != length):
        raise ArgumentError(f"{name} has shape {counts.shape}, must be one int or one for each of {length} sequences")
    if counts.size and int(counts.min()) < 0:
        raise ArgumentError(f"{name} holds {int(counts.min())}, must not be negative")
    return counts.astype(np.int64)


def _read_only(array: NDArray[np.int64]) -> NDArray[np.int64]:
    view = array.view()
    view.flags.writeable = False
    return view
