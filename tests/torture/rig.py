"""A manager over any kind of groups and tiers, with all proofs made after each call that goes through here."""

from contextlib import ExitStack, contextmanager
from dataclasses import replace
from random import Random

from tests.core.layers import CROSS, FULL, chunked, sliding, state

from kvist import CacheConfig, HostTier, KVCacheManager, RemoteTier
from kvist.testing import FAULTY_URL, EventReplay, FaultyMemory, ManualClock, faulty_stores

BLOCK_SIZE = 4
PATIENT = 60.0

GROUPS = {
    "full": ([FULL], {}),
    "sliding": ([FULL, sliding(6)], {}),
    "sinks": ([FULL, sliding(9, sink_tokens=2)], {}),
    "chunked": ([FULL, chunked(8)], {}),
    "ring": ([FULL, sliding(26)], {"ring": True, "max_beams": 4}),
    "state": ([FULL, state()], {}),
    "cross": ([FULL, CROSS], {}),
    "windows alone": ([sliding(7)], {}),
    "mixed": ([FULL, sliding(6), chunked(8), state(8)], {}),
    "one pool": ([FULL, sliding(6)], {"shared_pool": True}),
}
"""Layers, and what else they need, by what they are called in the names of tests."""

TIERS = ("no tiers", "host", "store", "host and store")
EVERYWHERE = [(groups, tiers, partial) for groups in GROUPS for tiers in TIERS for partial in (False, True)]
WITHOUT_STORES = [each for each in EVERYWHERE if "store" not in each[1]]
WITH_STORES = [each for each in EVERYWHERE if "store" in each[1]]
WITH_HOST = [each for each in EVERYWHERE if each[1] == "host"]


class Rig:
    """One manager with an oracle for its memory; `check` proves books, events, gauges and counters."""

    def __init__(self, groups="full", tiers="no tiers", partial=True, *, num_blocks=16, stores=(), **settings):
        layers, needs = GROUPS[groups]
        self.groups, self.tiers, self.partial = groups, tiers, partial
        self.clock, self.stores = ManualClock(), stores
        num_blocks = 2 * num_blocks if "shared_pool" in needs else num_blocks
        settings = {"max_sequences": 8, "max_sequence_length": 96, "event_buffer": 1 << 14} | needs | settings
        self.config = CacheConfig(
            layers,
            BLOCK_SIZE,
            num_blocks,
            partial_reuse=partial,
            tiers=self._tiers(tiers),
            model="a model@1",
            **settings,
        )
        self.memory = FaultyMemory(self.config)
        self.manager = self.memory.attach(KVCacheManager(self.config, self.memory, clock=self.clock))
        self.replay = EventReplay(self.manager)
        self.has_states = any(group.kind == "state" for group in self.config.groups)
        self._counters = {}

    @classmethod
    def over_tiers(cls, tiers, config):
        """The same over tiers of a test's own, with whole blocks only."""
        rig = cls("full", "no tiers", False)
        rig.config = replace(config, tiers=tiers, partial_reuse=False)
        rig.memory = FaultyMemory(rig.config)
        rig.manager = rig.memory.attach(KVCacheManager(rig.config, rig.memory, clock=rig.clock))
        rig.replay = EventReplay(rig.manager)
        return rig

    @staticmethod
    def _tiers(tiers):
        host = [HostTier(num_blocks=12)] if "host" in tiers else []
        return host + ([RemoteTier(url=FAULTY_URL, timeout_s=PATIENT)] if "store" in tiers else [])

    # -- what an engine does ------------------------------------------------------------------------------------------

    def add(self, tokens, **options):
        """Admit a prompt, and prove that what is said to be there is."""
        sequence = self.manager.add_sequence(tokens, **options)
        assert sequence.num_cached_tokens <= len(tokens) - 1
        self.verify(sequence, **options)
        self.check()
        return sequence

    def verify(self, sequence, *, encoder_tokens=0, **_):
        if encoder_tokens and not sequence.num_computed_tokens:
            self.memory.encode(sequence)
        self.memory.verify(sequence)

    def compute(self, sequence, end=None):
        """Compute a sequence, up to some token, in as many passes as it takes."""
        end = sequence.num_tokens if end is None else end
        while (start := sequence.num_computed_tokens) < end:
            stop = start + self.manager.chunk_limit(sequence, end - start)
            self.memory.write(sequence, start, stop)
            self.manager.commit([sequence], stop)
        self.check()

    def serve(self, tokens, **options):
        """Admit a prompt and compute it."""
        sequence = self.add(tokens, **options)
        self.compute(sequence)
        return sequence

    def leave(self, tokens, **options):
        """Serve a prompt and end it; how much of it was there."""
        sequence = self.serve(tokens, **options)
        self.free(sequence)
        return sequence.num_cached_tokens

    def decode(self, sequences, tokens):
        """Let sequences go on with a token each."""
        self.manager.append(sequences, list(tokens))
        for sequence in sequences:
            self.memory.write(sequence)
        self.manager.commit(sequences)
        self.check()

    def free(self, sequence, **options):
        self.manager.free(sequence, **options)
        self.check()

    def send_down(self):
        """Let all that is cached leave the device, and stores have what they are to have."""
        if self.stores:
            assert self.manager.flush(PATIENT)
        self.manager.evict(self.manager.num_blocks)
        self.check()

    def reset(self):
        """Forget everything, and the statistics."""
        self.manager.reset()
        self._counters = {}

    # -- proofs -------------------------------------------------------------------------------------------------------

    def check(self):
        """Prove what must hold at any time."""
        self.manager.check()
        self.replay.check()
        stats = self.manager.stats()
        assert 0 <= stats.usage <= 1
        assert 0 <= stats.num_free_blocks <= stats.num_blocks
        for group in stats.groups:
            counts = group.num_free_blocks, group.num_evictable_blocks, group.num_held_blocks
            assert min(counts) >= 0
            assert max(counts) <= group.num_blocks
            assert group.num_free_blocks + group.num_held_blocks == group.num_blocks
        for tier in stats.tiers:
            assert 0 <= tier.num_free_blocks <= tier.num_blocks
        self._require_growth(stats)

    def _require_growth(self, stats):
        """Counters never fall."""
        names = ("num_admitted", "num_query_tokens", "num_hit_tokens", "num_suspended", "num_resumed")
        now = {name: getattr(stats, name) for name in names}
        now |= {("evicted", reason): count for reason, count in stats.evictions.items()}
        assert all(now.get(name, 0) >= count for name, count in self._counters.items())
        self._counters = now

    def require_all_back(self):
        """Nothing runs any more: all blocks can be had."""
        assert self.manager.num_free_blocks == self.manager.num_blocks
        stats = self.manager.stats()
        assert (stats.num_sequences, stats.num_suspended_now, stats.num_pins, stats.usage) == (0, 0, 0, 0.0)
        self.check()

    def close(self):
        self.manager.close()


@contextmanager
def opened(groups="full", tiers="no tiers", partial=True, **options):
    """A rig, and the store that it has, if any, for the length of a block."""
    with ExitStack() as stack:
        stores = stack.enter_context(faulty_stores()) if "store" in tiers else []
        rig = Rig(groups, tiers, partial, stores=stores, **options)
        stack.callback(rig.close)
        yield rig


def again(rig, **settings):
    """The same after a restart: what is in the device and in host memory is gone."""
    num_blocks = rig.config.num_blocks // 2 if rig.config.shared_pool else rig.config.num_blocks
    options = {"num_blocks": num_blocks, "stores": rig.stores} | settings
    fresh = Rig(rig.groups, rig.tiers, rig.partial, **options)
    fresh.memory.prefixes = rig.memory.prefixes
    return fresh


def names(combination):
    """What a combination of groups, tiers and partial reuse is called in the names of tests."""
    groups, tiers, partial = combination
    return f"{groups}, {tiers}, {'parts' if partial else 'whole'}".replace(" ", "_").replace(",_", "-")


def some_tokens(chance, most=22, kinds=2):
    """A prompt that meets others often."""
    chance = chance if isinstance(chance, Random) else Random(chance)
    return [chance.randrange(kinds) for _ in range(chance.randint(1, most))]
