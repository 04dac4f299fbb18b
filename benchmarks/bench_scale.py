"""Does a pool of 1,000,000 blocks cost more than one of 10,000: to build, per block, and per request?

W4: requests from a Zipf prefix tree, with as many documents per block in the small pool as in the large one. W5: a
request trace at 10,000 blocks, one id a block. References: the small pool; one object per block with a hash chain.
"""

from __future__ import annotations

import gc
import resource
import tracemalloc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from harness import Prepare, Work, interleave
from references import ObjectPerBlockManager
from report import AtMost, AtMostTimes, Options, Row, main
from subjects import BLOCK_SIZE, fill, kvist_manager, serve, serve_objects
from workloads import PrefixForest, Tokens, expand_ids, read_trace, synthetic_trace

BLOCKS_PER_DOCUMENT = 50
TOKEN_BYTES = 4 * BLOCK_SIZE


@dataclass(frozen=True, slots=True)
class Sizes:
    """How large the pools are, and how much is served."""

    num_blocks: int = 1_000_000
    num_few_blocks: int = 10_000
    batch: int = 1_000
    repeats: int = 60
    num_builds: int = 5
    num_trace_requests: int = 12_031


QUICK = Sizes(num_blocks=30_000, num_few_blocks=3_000, batch=100, repeats=3, num_builds=1, num_trace_requests=300)


def measure(options: Options) -> list[Row]:
    """W4 first, while the process has no freed memory that would hide growth; then what stands alone."""
    sizes = QUICK if options.quick else Sizes()
    return [*zipf_rows(sizes), build_row(sizes), metadata_row(sizes), trace_row(options.trace, sizes)]


class ZipfPool:
    """A pool, its requests, and what was found in the cache: W4 with documents in proportion to the blocks."""

    def __init__(self, num_blocks: int, serve_prompts: Callable[[Sequence[Tokens]], int], batch: int) -> None:
        self.serve_prompts, self.batch = serve_prompts, batch
        self.num_tokens = self.num_cached = 0
        self.forest = PrefixForest(num_blocks // BLOCKS_PER_DOCUMENT, seed=4)
        before = resident_bytes()
        fill(serve_prompts, partial(self.forest.batch, batch), num_blocks)
        self.growth_bytes = resident_bytes() - before

    def prepare(self, _: int) -> Work:
        """The next batch of requests."""
        prompts = self.forest.batch(self.batch)
        self.num_tokens += sum(len(tokens) for tokens in prompts)
        return Work(partial(self.count, prompts), len(prompts))

    def count(self, prompts: Sequence[Tokens]) -> None:
        """Serve requests and count the tokens found."""
        self.num_cached += self.serve_prompts(prompts)

    @property
    def cached_share(self) -> float:
        return self.num_cached / self.num_tokens


def zipf_rows(sizes: Sizes) -> list[Row]:
    """W4: Kvist on many blocks and on few, and objects on many, all full, in turns."""
    pools = {
        "many": ZipfPool(sizes.num_blocks, partial(serve, kvist_manager(sizes.num_blocks)), sizes.batch),
        "few": ZipfPool(sizes.num_few_blocks, partial(serve, kvist_manager(sizes.num_few_blocks)), sizes.batch),
        "objects": ZipfPool(
            sizes.num_blocks, partial(serve_objects, ObjectPerBlockManager(sizes.num_blocks, BLOCK_SIZE)), sizes.batch
        ),
    }
    timings = interleave({name: pool.prepare for name, pool in pools.items()}, repeats=sizes.repeats)
    us = {name: timing.median_us for name, timing in timings.items()}
    cached = ", ".join(f"{pool.cached_share:.1%} ({name})" for name, pool in pools.items())
    row = partial(Row, value=us["many"], unit="µs", note=f"tokens found in the cache: {cached}")
    name = f"W4, {sizes.num_blocks:,} blocks, per request"
    return [
        row(
            name=name,
            reference=us["few"],
            reference_name=f"{sizes.num_few_blocks:,} blocks",
            target=AtMostTimes(1.3),
        ),
        row(name=name, reference=us["objects"], reference_name="object per block", goal=25),
        *resident_rows(pools, sizes),
    ]


def resident_rows(pools: dict[str, ZipfPool], sizes: Sizes) -> list[Row]:
    """Growth of resident memory per block while the large pools filled up; nothing where it is unknown."""
    kvist, objects = (pools[name].growth_bytes / sizes.num_blocks for name in ("many", "objects"))
    if kvist <= 0 or objects <= 0:
        return []
    return [
        Row(
            name=f"resident memory per block, {sizes.num_blocks:,} blocks full",
            value=kvist,
            unit="B",
            reference=objects,
            reference_name="object per block",
            goal=100,
            note="growth while filling, 64 B of tokens per block included; the objects hold digests and no tokens",
        )
    ]


def resident_bytes() -> int:
    """Resident memory of this process, 0 where the system does not tell."""
    try:
        pages = Path("/proc/self/statm").read_text().split()[1]
    except OSError:
        return 0
    return int(pages) * resource.getpagesize()


def build_row(sizes: Sizes) -> Row:
    """Time until a pool can be used."""
    contestants = {"kvist": building(kvist_manager, sizes), "objects": building(ObjectPerBlockManager, sizes)}
    timings = interleave(contestants, repeats=sizes.num_builds, warmup=1)
    return Row(
        name=f"build a pool of {sizes.num_blocks:,} blocks",
        value=timings["kvist"].median_us / 1e6,
        unit="s",
        reference=timings["objects"].median_us / 1e6,
        reference_name="object per block",
        target=AtMost(0.5, "s"),
    )


def building(build: Callable[[int], object], sizes: Sizes) -> Prepare:
    """Build a manager; the one before is collected outside the timed part."""

    def prepare(_: int) -> Work:
        gc.collect()
        return Work(partial(build, sizes.num_blocks))

    return prepare


def metadata_row(sizes: Sizes) -> Row:
    """Bytes that Python and NumPy hold for a full pool, by tracemalloc; for the objects, of the small pool."""
    kvist = traced_bytes_per_block(lambda num_blocks: partial(serve, kvist_manager(num_blocks)), sizes.num_blocks)
    objects = traced_bytes_per_block(
        lambda num_blocks: partial(serve_objects, ObjectPerBlockManager(num_blocks, BLOCK_SIZE)), sizes.num_few_blocks
    )
    return Row(
        name=f"metadata per block, {sizes.num_blocks:,} blocks full",
        value=kvist - TOKEN_BYTES,
        unit="B",
        reference=objects,
        reference_name="object per block",
        target=AtMost(64, "B"),
        note="by tracemalloc, with 64 B of tokens per block taken off; the objects hold digests and no tokens",
    )


def traced_bytes_per_block(make: Callable[[int], Callable[[Sequence[Tokens]], int]], num_blocks: int) -> float:
    """Build a pool, fill it with W4, and see what is held then."""
    forest = PrefixForest(num_blocks // BLOCKS_PER_DOCUMENT, seed=4)
    gc.collect()
    tracemalloc.start()
    try:
        serve_prompts = make(num_blocks)
        fill(serve_prompts, partial(forest.batch, 1_000), num_blocks)
        gc.collect()
        return tracemalloc.get_traced_memory()[0] / num_blocks
    finally:
        tracemalloc.stop()


def trace_row(trace: Path | None, sizes: Sizes) -> Row:
    """W5: serve a whole trace, from an empty pool on."""
    requests = read_trace(trace) if trace else synthetic_trace(sizes.num_trace_requests)
    prompts = [expand_ids(ids, BLOCK_SIZE) for ids in requests]
    found: dict[str, int] = {}

    def replay(name: str, make: Callable[[], Callable[[Sequence[Tokens]], int]]) -> Prepare:
        def prepare(_: int) -> Work:
            gc.collect()
            serve_prompts = make()
            return Work(lambda: found.update({name: serve_prompts(prompts)}), len(prompts))

        return prepare

    blocks = sizes.num_few_blocks
    contestants = {
        "kvist": replay("kvist", lambda: partial(serve, kvist_manager(blocks))),
        "objects": replay("objects", lambda: partial(serve_objects, ObjectPerBlockManager(blocks, BLOCK_SIZE))),
    }
    timings = interleave(contestants, repeats=sizes.num_builds, warmup=1)
    num_tokens = sum(len(tokens) for tokens in prompts)
    cached = ", ".join(f"{num_cached / num_tokens:.1%} ({name})" for name, num_cached in found.items())
    source = trace.name if trace else "a synthetic trace"
    return Row(
        name=f"W5, {len(prompts):,} requests at {blocks:,} blocks, per request",
        value=timings["kvist"].median_us,
        unit="µs",
        reference=timings["objects"].median_us,
        reference_name="object per block",
        goal=5,
        note=f"{source}; tokens found in the cache: {cached}",
    )


if __name__ == "__main__":
    main("scale", measure, __doc__)
