"""What other sizes and policies would have hit, live: small caches of ids that follow a running manager's prompts.

A shadow is a manager without bytes of its own kind, scaled down: of all blocks, `rate` are drawn by a hash of what they
are, and it has `rate` times the blocks of the cache that it stands for (miniature simulation: Waldspurger, Saemundsson,
Ahmad and Park, "Cache Modeling and Optimization using Miniature Simulations", USENIX ATC 2017). The drawn blocks of a
prompt follow one another in it as the prompt's blocks do, so every policy sees the prefixes that it would.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from threading import Lock
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from kvist.config import AttentionSpec, CacheConfig
from kvist.core.extents import Namespace
from kvist.core.tokens import MAX_TOKEN, as_token_array
from kvist.errors import ArgumentError, SequenceError
from kvist.lab.curves.keys import chained, content_keys, scope_key
from kvist.lab.curves.references import check_rate, sample_of
from kvist.manager import KVCacheManager

__all__ = ["Shadow", "ShadowCaches", "ShadowCollector", "ShadowStats"]

MAX_SCOPES = 4_096
"""Namespaces whose hash is remembered."""

MINI_TOKENS = 2
"""Tokens of a block of a miniature: 62 bits of the hash of the block that it stands for."""

_log = logging.getLogger("kvist.lab")


@dataclass(frozen=True, slots=True)
class Shadow:
    """A cache that is asked about: its size in blocks of the running manager's block size, and its policy."""

    num_blocks: int
    policy: str = "priority"


@dataclass(frozen=True, slots=True)
class ShadowStats:
    """What a shadow would have hit since it began: blocks, estimated from those that were drawn.

    Of `num_query_blocks`, the full blocks of prompts, `num_hit_blocks` would have been found. `num_sampled_blocks` were
    drawn: with few of them the estimate is rough.
    """

    shadow: Shadow
    num_query_blocks: int
    num_hit_blocks: int
    num_sampled_blocks: int

    @property
    def hit_rate(self) -> float:
        """Share of the blocks that would have been found, 0 to 1."""
        return self.num_hit_blocks / self.num_query_blocks if self.num_query_blocks else 0.0


class ShadowCaches:
    """Shadows beside a manager: they see each prompt that it has admitted, until they are closed.

    `rate` is the share of blocks that they follow; `max_prompt_blocks` bounds what one prompt costs: of a longer one
    only so many leading blocks count. Shadows of fewer than a hundred blocks times `rate` say little. Prompts with
    media, and those that are not to reuse anything, are left out; outputs and retention are not followed.

    Nothing that goes wrong in here reaches the manager or its caller: it is logged once and counted in `num_failures`.
    May be read from other threads.

    >>> manager = KVCacheManager(CacheConfig([AttentionSpec(1, 8)], block_size=2, num_blocks=4))
    >>> with ShadowCaches(manager, [Shadow(4), Shadow(100)], rate=1.0) as shadows:
    ...     for first in (0, 100, 200, 0):
    ...         manager.free(manager.add_sequence(list(range(first, first + 5))))
    ...     [stats.hit_rate for stats in shadows.stats()]
    [0.0, 0.25]
    """

    def __init__(
        self,
        manager: KVCacheManager,
        shadows: Sequence[Shadow],
        *,
        rate: float = 1 / 16,
        seed: int = 0,
        max_prompt_blocks: int = 65_536,
    ) -> None:
        check_rate(rate)
        if max_prompt_blocks < 1:
            raise ArgumentError(f"max_prompt_blocks is {max_prompt_blocks}, must be at least 1")
        self.rate = rate
        self.num_failures = 0
        self._seed, self._max_prompt_blocks = seed, max_prompt_blocks
        self._block_size = manager.config.block_size
        self._minis = [_Miniature(shadow, rate, max_prompt_blocks) for shadow in shadows]
        self._num_query_blocks = 0
        self._num_sampled_blocks = 0
        self._scopes: dict[Namespace, np.uint64] = {}
        self._lock = Lock()
        self._manager: KVCacheManager | None = manager
        self._attach(manager)

    def _attach(self, manager: KVCacheManager) -> None:
        if "add_sequence" in vars(manager):
            raise SequenceError("this manager has shadows already; close them first")

        def add_sequence(tokens: Any, **options: Any) -> Any:
            sequence = type(manager).add_sequence(manager, tokens, **options)  # a journal may change the type later
            self._observe(tokens, options)
            return sequence

        vars(manager)["add_sequence"] = add_sequence

    def close(self) -> None:
        """Follow the manager no longer, and leave it as it was; closing twice is fine. The numbers stay."""
        if self._manager is not None:
            del vars(self._manager)["add_sequence"]
            self._manager = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def stats(self) -> list[ShadowStats]:
        """Return the numbers of each shadow, in the order in which they were asked for."""
        with self._lock:
            return [self._stats_of(mini) for mini in self._minis]

    def _stats_of(self, mini: _Miniature) -> ShadowStats:
        """Scale what was drawn up; how far it is from its share of all blocks is put down to hits (SHARDS_adj)."""
        num_query = self._num_query_blocks
        expected = num_query * self.rate
        num_hits = min(max(mini.num_hits + expected - self._num_sampled_blocks, 0.0), expected)
        return ShadowStats(mini.shadow, num_query, round(num_hits / self.rate), self._num_sampled_blocks)

    def _observe(self, tokens: Any, options: dict[str, Any]) -> None:
        """Let the shadows see an admitted prompt; whatever is wrong with that stays here."""
        try:
            if not options.get("media") and options.get("extra_ids") is None and options.get("reuse", True):
                self._show(as_token_array(tokens), options.get("namespace", ()))
        except Exception as error:
            self.num_failures += 1
            if self.num_failures == 1:
                _log.warning("shadow caches left a prompt out: %r", error)

    def _show(self, tokens: NDArray[np.int32], namespace: Namespace) -> None:
        contents = content_keys(tokens[: self._max_prompt_blocks * self._block_size], self._block_size)
        scope = np.array([self._scope(namespace)], np.uint64)
        keys = chained(contents, np.array([len(contents)]), scope)
        drawn = keys[sample_of(keys, self.rate, self._seed)]
        named = np.stack([drawn, drawn >> np.uint64(32)], axis=1) & np.uint64(MAX_TOKEN)
        with self._lock:
            self._num_query_blocks += len(contents)
            self._num_sampled_blocks += len(drawn)
            if len(drawn):
                for mini in self._minis:
                    mini.see(named.astype(np.int32).ravel())

    def _scope(self, namespace: Namespace) -> np.uint64:
        found = self._scopes.get(namespace)
        if found is None:
            if len(self._scopes) >= MAX_SCOPES:
                self._scopes.clear()
            found = self._scopes[namespace] = scope_key(namespace)
        return found


class _Miniature:
    """A manager whose blocks, of two tokens, are the drawn blocks of prompts, and what it has hit.

    A prompt gets one token more, which is always computed and never kept, in a block of its own. A prompt longer than
    the cache leaves its leading blocks there, as it would in LRU.
    """

    def __init__(self, shadow: Shadow, rate: float, max_prompt_blocks: int) -> None:
        self.shadow = shadow
        self.num_hits = 0
        if shadow.num_blocks < 1:
            raise ArgumentError(f"a shadow has {shadow.num_blocks} blocks, must have at least 1")
        self._num_blocks = max(round(shadow.num_blocks * rate), 1)
        config = CacheConfig(
            [AttentionSpec(1, 1)],
            block_size=MINI_TOKENS,
            num_blocks=self._num_blocks + 1,
            max_sequences=1,
            max_sequence_length=MINI_TOKENS * min(self._num_blocks, max_prompt_blocks) + 1,
            partial_reuse=False,
            policy=shadow.policy,
        )
        self._manager = KVCacheManager(config, clock=_no_clock)

    def see(self, tokens: NDArray[np.int32]) -> None:
        """Serve a prompt of these blocks, two tokens each."""
        sequence = self._manager.add_sequence(np.append(tokens[: MINI_TOKENS * self._num_blocks], _LAST))
        self.num_hits += sequence.num_cached_tokens // MINI_TOKENS
        self._manager.commit([sequence])
        self._manager.free(sequence)


_LAST = np.zeros(1, np.int32)


def _no_clock() -> float:
    return 0.0


class ShadowCollector:
    """The numbers of shadows for Prometheus: `registry.register(ShadowCollector(shadows))`.

    | metric | labels | says |
    |---|---|---|
    | `kvist:shadow_query_blocks_total` | | full blocks of prompts that shadows have seen |
    | `kvist:shadow_hit_blocks` | `num_blocks`, `policy` | of these, those such a cache would have found, about |
    | `kvist:shadow_sampled_blocks_total` | | blocks that the estimates rest on |
    | `kvist:shadow_failures_total` | | prompts left out since something went wrong |

    Hits are a gauge, since an estimate may fall by a little as more is seen. Raises ModuleNotFoundError without
    prometheus_client.
    """

    def __init__(self, shadows: ShadowCaches) -> None:
        try:
            from prometheus_client import core
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                "ShadowCollector needs prometheus_client: pip install 'kvist[metrics]'", name=error.name
            ) from error
        self._metrics = core
        self._shadows = shadows

    def collect(self) -> Iterator[Any]:
        """Yield the metrics of now."""
        counter, gauge = self._metrics.CounterMetricFamily, self._metrics.GaugeMetricFamily
        stats = self._shadows.stats()
        hits = gauge(
            "kvist:shadow_hit_blocks",
            "Blocks of prompts that a cache of this size and policy would have found, estimated.",
            labels=["num_blocks", "policy"],
        )
        for each in stats:
            hits.add_metric([str(each.shadow.num_blocks), each.shadow.policy], each.num_hit_blocks)
        num_query = stats[0].num_query_blocks if stats else 0
        num_sampled = stats[0].num_sampled_blocks if stats else 0
        yield counter("kvist:shadow_query_blocks", "Full blocks of prompts that shadows have seen.", value=num_query)
        yield hits
        yield counter("kvist:shadow_sampled_blocks", "Blocks that the estimates rest on.", value=num_sampled)
        yield counter(
            "kvist:shadow_failures",
            "Prompts left out since something went wrong.",
            value=self._shadows.num_failures,
        )
