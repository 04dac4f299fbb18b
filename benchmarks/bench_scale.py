"""Does a pool of 1,000,000 blocks cost more than one of 10,000: to build, per block, and per request?

W4: requests from a Zipf prefix tree, with as many documents per block in the small pool as in the large one. W5: a
request trace at 10,000 blocks, one id a block. References: the small pool; the field's Python managers, one object per
block and a hash chain; the leanest form of that.
"""

from __future__ import annotations

import gc
import resource
import tracemalloc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Generic

from harness import Prepare, Work, interleave
from report import LEANEST, AtMost, AtMostTimes, Options, Row, main
from subjects import (
    BLOCK_SIZE,
    Prompt,
    field_manager,
    fill,
    kvist_manager,
    lean_manager,
    serve,
    serve_field,
    serve_lean,
)
from workloads import PrefixForest, Tokens, as_lists, expand_ids, read_trace, synthetic_trace

BLOCKS_PER_DOCUMENT = 50
TOKEN_BYTES = 4 * BLOCK_SIZE
FILL_BATCH = 100  # so few that the prompts themselves do not count as growth


@dataclass(frozen=True, slots=True)
class Sizes:
    """How large the pools are, and how much is served."""

    num_blocks: int = 1_000_000
    num_few_blocks: int = 10_000
    batch: int = 1_000
    repeats: int = 20
    num_builds: int = 5
    num_trace_requests: int = 12_031


QUICK = Sizes(num_blocks=30_000, num_few_blocks=3_000, batch=100, repeats=3, num_builds=1, num_trace_requests=300)


def measure(options: Options) -> list[Row]:
    """W4 first, while the process has no freed memory that would hide growth; then what stands alone."""
    sizes = QUICK if options.quick else Sizes()
    return [*zipf_rows(sizes), *build_rows(sizes), *metadata_rows(sizes), *trace_rows(options.trace, sizes)]


class ZipfPool(Generic[Prompt]):
    """A pool, its requests, and what was found in the cache: W4 with documents in proportion to the blocks.

    Args:
        num_blocks: blocks of the pool.
        serve_prompts: serves requests, and returns the tokens found in the cache.
        own_kind: makes of int32 arrays the prompts that it takes.
        batch: requests a repetition.
    """

    def __init__(
        self,
        num_blocks: int,
        serve_prompts: Callable[[Sequence[Prompt]], int],
        own_kind: Callable[[list[Tokens]], list[Prompt]],
        batch: int,
    ) -> None:
        self.serve_prompts, self.own_kind, self.batch = serve_prompts, own_kind, batch
        self.num_tokens = self.num_cached = 0
        self.forest = PrefixForest(num_blocks // BLOCKS_PER_DOCUMENT, seed=4)
        before = resident_bytes()
        fill(serve_prompts, partial(self.prompts, FILL_BATCH), num_blocks)
        self.growth_bytes = resident_bytes() - before

    def prompts(self, n: int) -> list[Prompt]:
        """The next requests."""
        return self.own_kind(self.forest.batch(n))

    def prepare(self, _: int) -> Work:
        """The next batch of requests."""
        prompts = self.prompts(self.batch)
        self.num_tokens += sum(len(tokens) for tokens in prompts)
        return Work(partial(self.count, prompts), len(prompts))

    def count(self, prompts: Sequence[Prompt]) -> None:
        """Serve requests and count the tokens found."""
        self.num_cached += self.serve_prompts(prompts)

    @property
    def cached_share(self) -> float:
        return self.num_cached / self.num_tokens


def arrays(prompts: list[Tokens]) -> list[Tokens]:
    """Leave int32 arrays as they are."""
    return prompts


@dataclass(frozen=True, slots=True)
class ZipfPools:
    """W4: Kvist on many blocks and on few, and the references on many."""

    many: ZipfPool[Tokens]
    few: ZipfPool[Tokens]
    field: ZipfPool[list[int]]
    lean: ZipfPool[Tokens]

    @classmethod
    def filled(cls, sizes: Sizes) -> ZipfPools:
        """Build all pools and fill them."""
        many, few, batch = sizes.num_blocks, sizes.num_few_blocks, sizes.batch
        return cls(
            many=ZipfPool(many, partial(serve, kvist_manager(many)), arrays, batch),
            few=ZipfPool(few, partial(serve, kvist_manager(few)), arrays, batch),
            field=ZipfPool(many, partial(serve_field, field_manager(many)), as_lists, batch),
            lean=ZipfPool(many, partial(serve_lean, lean_manager(many)), arrays, batch),
        )

    def contestants(self) -> dict[str, Prepare]:
        """All of them, to take turns."""
        return {
            "many": self.many.prepare,
            "few": self.few.prepare,
            "field": self.field.prepare,
            "lean": self.lean.prepare,
        }

    def shares(self) -> str:
        """What each has found, in words."""
        kvist = f"{self.many.cached_share:.1%} (kvist), {self.few.cached_share:.1%} (kvist, few blocks)"
        return f"{kvist}, {self.field.cached_share:.1%} (field), {self.lean.cached_share:.1%} (lean)"


def zipf_rows(sizes: Sizes) -> list[Row]:
    """W4, all pools full, in turns."""
    pools = ZipfPools.filled(sizes)
    timings = interleave(pools.contestants(), repeats=sizes.repeats)
    us = {name: timing.median_us for name, timing in timings.items()}
    row = partial(Row, value=us["many"], unit="µs")
    name, few = f"W4, {sizes.num_blocks:,} blocks, per request", f"{sizes.num_few_blocks:,} blocks"
    found = f"tokens found in the cache: {pools.shares()}"
    return [
        row(name=name, reference=us["few"], reference_name=few, target=AtMostTimes(1.3), note=found),
        row(name=name, reference=us["field"], reference_name="field", goal=25),
        row(name=LEANEST, reference=us["lean"], reference_name="lean"),
        *resident_rows(pools, sizes),
    ]


def resident_rows(pools: ZipfPools, sizes: Sizes) -> list[Row]:
    """Growth of resident memory per block while the large pools filled up; nothing where it is unknown."""
    grown = {"field": pools.field.growth_bytes, "lean": pools.lean.growth_bytes}
    if min(pools.many.growth_bytes, *grown.values()) <= 0:
        return []
    row = partial(Row, value=pools.many.growth_bytes / sizes.num_blocks, unit="B")
    name = f"resident memory per block, {sizes.num_blocks:,} blocks full"
    note = "growth while filling, 64 B of tokens per block included; the references hold hashes and no tokens"
    field, lean = (partial(row, reference=grown[kind] / sizes.num_blocks, reference_name=kind) for kind in grown)
    return [field(name=name, goal=100, note=note), lean(name=LEANEST)]


def resident_bytes() -> int:
    """Resident memory of this process, 0 where the system does not tell."""
    try:
        pages = Path("/proc/self/statm").read_text().split()[1]
    except OSError:
        return 0
    return int(pages) * resource.getpagesize()


def build_rows(sizes: Sizes) -> list[Row]:
    """Time until a pool can be used."""
    builds: dict[str, Callable[[int], object]] = {"kvist": kvist_manager, "field": field_manager, "lean": lean_manager}
    contestants = {name: building(build, sizes) for name, build in builds.items()}
    timings = interleave(contestants, repeats=sizes.num_builds, warmup=1)
    seconds = {name: timing.median_us / 1e6 for name, timing in timings.items()}
    field, lean = (
        partial(Row, value=seconds["kvist"], unit="s", reference=seconds[name], reference_name=name)
        for name in ("field", "lean")
    )
    return [field(name=f"build a pool of {sizes.num_blocks:,} blocks", target=AtMost(0.5, "s")), lean(name=LEANEST)]


def building(build: Callable[[int], object], sizes: Sizes) -> Prepare:
    """Build a manager; the one before is collected outside the timed part."""

    def prepare(_: int) -> Work:
        gc.collect()
        return Work(partial(build, sizes.num_blocks))

    return prepare


def metadata_rows(sizes: Sizes) -> list[Row]:
    """Bytes that Python and NumPy hold for a full pool, by tracemalloc; for the references, of the small pool."""
    few = sizes.num_few_blocks
    kvist = traced_bytes_per_block(lambda n: partial(serve, kvist_manager(n)), arrays, sizes.num_blocks)
    field = traced_bytes_per_block(lambda n: partial(serve_field, field_manager(n)), as_lists, few)
    lean = traced_bytes_per_block(lambda n: partial(serve_lean, lean_manager(n)), arrays, few)
    row = partial(Row, value=kvist - TOKEN_BYTES, unit="B")
    name = f"metadata per block, {sizes.num_blocks:,} blocks full"
    note = "by tracemalloc, with 64 B of tokens per block taken off; the references hold hashes and no tokens"
    return [
        row(name=name, reference=field, reference_name="field", target=AtMost(64, "B"), note=note),
        row(name=LEANEST, reference=lean, reference_name="lean"),
    ]


def traced_bytes_per_block(
    make: Callable[[int], Callable[[Sequence[Prompt]], int]],
    own_kind: Callable[[list[Tokens]], list[Prompt]],
    num_blocks: int,
) -> float:
    """Build a pool, fill it with W4, and see what is held then."""
    forest = PrefixForest(num_blocks // BLOCKS_PER_DOCUMENT, seed=4)
    gc.collect()
    tracemalloc.start()
    try:
        serve_prompts = make(num_blocks)
        fill(serve_prompts, lambda: own_kind(forest.batch(FILL_BATCH)), num_blocks)
        gc.collect()
        return tracemalloc.get_traced_memory()[0] / num_blocks
    finally:
        tracemalloc.stop()


def trace_rows(trace: Path | None, sizes: Sizes) -> list[Row]:
    """W5: serve a whole trace, from an empty pool on."""
    requests = read_trace(trace) if trace else synthetic_trace(sizes.num_trace_requests)
    prompts = [expand_ids(ids, BLOCK_SIZE) for ids in requests]
    lists, blocks = as_lists(prompts), sizes.num_few_blocks
    found: dict[str, int] = {}
    contestants = {
        "kvist": replaying("kvist", prompts, lambda: partial(serve, kvist_manager(blocks)), found),
        "field": replaying("field", lists, lambda: partial(serve_field, field_manager(blocks)), found),
        "lean": replaying("lean", prompts, lambda: partial(serve_lean, lean_manager(blocks)), found),
    }
    timings = interleave(contestants, repeats=sizes.num_builds, warmup=1)
    us = {name: timing.median_us for name, timing in timings.items()}
    num_tokens = sum(len(tokens) for tokens in prompts)
    cached = ", ".join(f"{num_cached / num_tokens:.1%} ({name})" for name, num_cached in found.items())
    note = f"{trace.name if trace else 'a synthetic trace'}; tokens found in the cache: {cached}"
    name = f"W5, {len(prompts):,} requests at {blocks:,} blocks, per request"
    row = partial(Row, value=us["kvist"], unit="µs")
    return [
        row(name=name, reference=us["field"], reference_name="field", goal=5),
        row(name=LEANEST, reference=us["lean"], reference_name="lean", note=note),
    ]


def replaying(
    name: str,
    prompts: Sequence[Prompt],
    make: Callable[[], Callable[[Sequence[Prompt]], int]],
    found: dict[str, int],
) -> Prepare:
    """Serve a whole trace with a new manager, and note under the name how many tokens were found in the cache."""

    def prepare(_: int) -> Work:
        gc.collect()
        serve_prompts = make()
        return Work(lambda: found.update({name: serve_prompts(prompts)}), len(prompts))

    return prepare


if __name__ == "__main__":
    main("scale", measure, __doc__)
