"""What does a stored block cost those who tell others of it, and those who are told?

Encoding: 1,000,000 blocks of 16 tokens, 64 of them an event, in vLLM's form. The reference does for each block what the
field does, SHA-256 over a pickle, and encodes the same events from Python lists; the leanest form hashes bytes.
Steps: an engine whose subscriber does not read, in another process, against one that nobody subscribes to.
The index: 64 workers with 100,000 blocks each, a quarter of them shared. The reference keeps a set for each worker and
tier, and looks blocks up in them one by one.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from pathlib import Path

import msgspec
import numpy as np

from harness import Prepare, Work, again, elapsed_ns_per_unit, interleave, paused_collector
from kvist.core.chain import Chain
from kvist.core.events import Run, Stored
from kvist.core.identity import IdentityTable
from kvist.wire import Encoder, PrefixIndex, Recorder, RunNames
from kvist.wire.records import StoredBlocks
from report import LEANEST, AtMost, AtMostTimes, Options, Row, main
from stalling import Turns, step_times_us

BLOCK_SIZE = 16
EVENT_BLOCKS = 64
SHORT_EVENT_BLOCKS = 8
BATCH_EVENTS = 16
QUERY_BLOCKS = 512
PAGE_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much is measured."""

    num_blocks: int
    repeats: int
    num_workers: int
    worker_blocks: int
    times: int
    turns: Turns


FULL = Sizes(100_000, 10, 64, 100_000, 200, Turns(40, 50))
QUICK = Sizes(1_280, 2, 4, 2_000, 2, Turns(2, 5))


def measure(options: Options) -> list[Row]:
    """W6: encode what is stored; then take it in, look it up, and weigh it."""
    sizes = QUICK if options.quick else FULL
    return [*encoding_rows(sizes), stalled_row(sizes), *index_rows(sizes)]


class Log:
    """Events of runs with random tokens."""

    def __init__(self, num_blocks: int, event_blocks: int) -> None:
        self._chain = Chain(b"model", BLOCK_SIZE, IdentityTable())
        self._rng = np.random.default_rng(1)
        self._num_events, self._event_blocks = num_blocks // event_blocks, event_blocks
        self._next_id = 0

    @property
    def num_blocks(self) -> int:
        return self._num_events * self._event_blocks

    def events(self) -> list[Stored]:
        return [self._stored() for _ in range(self._num_events)]

    def _stored(self) -> Stored:
        run = Run(self._chain, (), None, 0, 0)
        tokens = self._rng.integers(0, 128_000, self._event_blocks * BLOCK_SIZE).astype(np.int32)
        run.append(tokens.tobytes())
        self._next_id += 1
        return Stored(self._next_id - 1, 1, 0, "device", run, 0, self._event_blocks, 35, "computed")


def encoding_rows(sizes: Sizes) -> list[Row]:
    """All stored blocks at once by each contestant, in turns."""
    log = Log(sizes.num_blocks, EVENT_BLOCKS)
    short_log = Log(sizes.num_blocks // 4, SHORT_EVENT_BLOCKS)
    contestants = {
        "kvist": encoding(log, vllm_encoder(), knows_digests=False),
        "kvist, known": encoding(log, vllm_encoder(), knows_digests=True),
        "kvist, short": encoding(short_log, vllm_encoder(), knows_digests=False),
        "kvist, short, known": encoding(short_log, vllm_encoder(), knows_digests=True),
        "field": encoding(log, partial(field_batch, pickled), knows_digests=True),
        "lean": encoding(log, partial(field_batch, hashed), knows_digests=True),
        "field, known": encoding(log, partial(field_batch, None), knows_digests=True),
    }
    us = {name: each.median_us for name, each in interleave(contestants, repeats=sizes.repeats, warmup=1).items()}
    row = partial(Row, unit="µs per block")
    field = partial(row, reference=us["field"], reference_name="hashes of pickles, lists")
    lean = partial(row, reference=us["lean"], reference_name="hashes of bytes, lists")
    known = partial(row, reference=us["field, known"], reference_name="lists, digests known")
    name = "store blocks, encoded for vLLM"
    return [
        field(name=name, value=us["kvist"], target=AtMost(1.5, "µs per block"), goal=0.6),
        lean(name=LEANEST, value=us["kvist"]),
        known(name=f"{name}, digests known", value=us["kvist, known"]),
        field(name=f"{name}, {SHORT_EVENT_BLOCKS} an event", value=us["kvist, short"]),
        known(name=f"{name}, {SHORT_EVENT_BLOCKS} an event, digests known", value=us["kvist, short, known"]),
    ]


def stalled_row(sizes: Sizes) -> Row:
    """An admission, an append to 64 rows and a commit, with everything published."""
    stalled, alone, num_lost = step_times_us(sizes.turns)
    return Row(
        name="a step, events published to a subscriber that does not read",
        value=stalled,
        reference=alone,
        reference_name="nobody subscribes",
        unit="µs",
        target=AtMostTimes(1.1),
        note=f"which lost {num_lost:,} batches",
    )


def vllm_encoder() -> Encoder:
    return Encoder("vllm", Recorder(RunNames(short=True)))


def encoding(log: Log, encode: Callable[[list[Stored]], bytes], *, knows_digests: bool) -> Prepare:
    """Encode fresh events, batch after batch."""

    def prepare(_: int) -> Work:
        events = log.events()
        if knows_digests:
            for event in events:
                event.run.digests()
        batches = [events[at : at + BATCH_EVENTS] for at in range(0, len(events), BATCH_EVENTS)]

        def run() -> None:
            for batch in batches:
                encode(batch)

        return Work(run, log.num_blocks)

    return prepare


class BlockStored(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None


_pack = msgspec.msgpack.Encoder().encode


def field_batch(hashes: Callable[[list[int]], list[bytes]] | None, events: list[Stored]) -> bytes:
    """One struct an event, its hashes computed from the token ids, or known."""
    told = []
    for event in events:
        tokens = event.tokens.tolist()
        digests = event.digests if hashes is None else hashes(tokens)
        names = [int.from_bytes(digest[-8:], "big") for digest in digests]
        told.append(BlockStored(names, None, tokens, BLOCK_SIZE, None, "GPU", None, 0, "full_attention"))
    return _pack([0.0, told, None])


def pickled(tokens: list[int]) -> list[bytes]:
    """SHA-256 over the pickle of the digest before, the tokens and the extra keys."""
    digest, digests = bytes(32), []
    for at in range(0, len(tokens), BLOCK_SIZE):
        content = (digest, tuple(tokens[at : at + BLOCK_SIZE]), None)
        digest = sha256(pickle.dumps(content, protocol=5)).digest()
        digests.append(digest)
    return digests


def hashed(tokens: list[int]) -> list[bytes]:
    """SHA-256 over the digest before and the bytes of the tokens."""
    content, size = np.array(tokens, np.int32).tobytes(), 4 * BLOCK_SIZE
    digest, digests = bytes(32), []
    for at in range(0, len(content), size):
        digest = sha256(digest + content[at : at + size]).digest()
        digests.append(digest)
    return digests


class Sets:
    """A set of names for each worker and tier."""

    def __init__(self) -> None:
        self.held: dict[str, dict[str, set[int]]] = {}

    def apply(self, worker: str, records: list[StoredBlocks]) -> None:
        places = self.held.setdefault(worker, {})
        for record in records:
            places.setdefault(record.tier or "", set()).update(record.hashes)  # type: ignore[arg-type]  # ints here

    def query(self, hashes: list[int]) -> dict[str, int]:
        return {worker: leading(places, hashes) for worker, places in self.held.items()}


def leading(places: dict[str, set[int]], hashes: list[int]) -> int:
    for count, name in enumerate(hashes):
        if not any(name in held for held in places.values()):
            return count
    return len(hashes)


def index_rows(sizes: Sizes) -> list[Row]:
    """Both are filled worker by worker, in turns; then the same prompt is looked up, in turns."""
    index, sets = PrefixIndex(), Sets()
    before = resident_bytes()
    prompt, ingest = filled(sizes, index)
    ours = resident_bytes() - before
    _, theirs = filled(sizes, sets)
    timings = interleave(
        {
            "index": lambda _: again(partial(index.query, prompt), sizes.times),
            "sets": lambda _: again(partial(sets.query, prompt), max(sizes.times // 50, 1)),
        },
        repeats=max(sizes.repeats, 3),
    )
    us = {name: each.median_us for name, each in timings.items()}
    blocks = f"{sizes.num_workers} workers with {sizes.worker_blocks:,} blocks each"
    row = partial(Row, reference_name="a set a worker and tier")
    rows = [
        row(
            name=f"{blocks}: ingest",
            value=ingest,
            reference=theirs,
            unit="µs per block",
            target=AtMost(2, "µs per block"),
        ),
        row(
            name=f"{blocks}: {QUERY_BLOCKS} blocks looked up",
            value=us["index"],
            reference=us["sets"],
            unit="µs",
            target=AtMost(1_000, "µs"),
        ),
    ]
    if ours > 0:
        entries = index.stats.num_entries
        each = row(name=f"{blocks}: memory a name", value=ours / entries, reference=8.0, unit="bytes")
        rows.append(
            Row(**{name: getattr(each, name) for name in each.__slots__} | {"reference_name": "the name alone"})
        )
    return rows


def filled(sizes: Sizes, index: PrefixIndex | Sets) -> tuple[list[int], float]:
    """Give an index what all workers have; return a prompt that all have, and the µs a block took."""
    elapsed = []
    shared: list[int] = []
    with paused_collector():
        for worker, names in enumerate(names_of_workers(sizes)):
            shared = names[:QUERY_BLOCKS]
            records = [
                StoredBlocks(hashes=tuple(names[at : at + EVENT_BLOCKS]), tier="host" if at % 7 == 0 else "device")
                for at in range(0, len(names), EVENT_BLOCKS)
            ]
            elapsed.append(elapsed_ns_per_unit(Work(partial(index.apply, str(worker), records), len(names))))
            del records, names
    return shared, sum(elapsed) / len(elapsed) / 1e3


def names_of_workers(sizes: Sizes) -> Iterator[list[int]]:
    """Names of 64 bits for each worker; the first quarter is that of all."""
    rng = np.random.default_rng(2)
    common = rng.integers(0, 2**63, sizes.worker_blocks // 4).tolist()
    for _ in range(sizes.num_workers):
        yield common + rng.integers(0, 2**63, sizes.worker_blocks - len(common)).tolist()


def resident_bytes() -> int:
    """Resident memory of this process, 0 where the system does not tell."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE_BYTES
    except OSError:
        return 0


if __name__ == "__main__":
    main("events", measure, __doc__)
