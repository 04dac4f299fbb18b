"""Random calls over everything that a rig's manager can do, with all proofs after each."""

from random import Random

from tests.torture.rig import some_tokens

from kvist import OutOfBlocks


class Traffic:
    """Random calls on a rig, at most 5 sequences at once; `live` run, `asleep` are suspended."""

    def __init__(self, rig, seed, tenants=((),)):
        self.rig, self.chance, self.tenants = rig, Random(seed), tenants
        self.live, self.asleep, self.pins = [], [], []
        self.acts = [self.admit] * 6 + [self.grow] * 4 + [self.end] * 5
        self.acts += [
            self.fork,
            self.step_back,
            self.sleep,
            self.wake,
            self.pin,
            self.unpin,
            self.evict,
            self.pass_time,
        ]
        self.acts += [self.drop] * (len(tenants) > 1)

    def step(self):
        try:
            self.chance.choice(self.acts)()
        except OutOfBlocks:
            self.relieve()
        self.rig.check()

    def often(self):
        return self.chance.random() < 0.85

    def tenant(self):
        return {"namespace": self.chance.choice(self.tenants)}

    def admit(self):
        if len(self.live) < 5:
            tokens = some_tokens(self.chance)
            self.live.append(self.rig.add(tokens, publish=self.often(), reuse=self.often(), **self.tenant()))
            self.rig.compute(self.live[-1])

    def grow(self):
        if self.live:
            one = self.chance.choice(self.live)
            self.rig.manager.append([one], [some_tokens(self.chance, most=4)])
            self.rig.compute(one)
            self.rig.memory.verify(one)

    def end(self):
        if self.live:
            self.rig.manager.free(self.live.pop(self.chance.randrange(len(self.live))), publish=self.often())

    def fork(self):
        if 0 < len(self.live) < 5:
            self.live += self.rig.manager.fork(self.chance.choice(self.live))
            self.rig.memory.verify(self.live[-1])

    def step_back(self):
        if self.live and self.live[-1].num_tokens > 3:
            self.rig.manager.rewind(self.live[-1], self.chance.randrange(1, 4))
            self.rig.compute(self.live[-1])

    def sleep(self):
        if self.live:
            self.asleep.append(self.live.pop(self.chance.randrange(len(self.live))))
            self.rig.manager.suspend(self.asleep[-1])

    def wake(self):
        if self.asleep and len(self.live) < 5:
            self.rig.manager.resume(self.asleep[-1])
            self.live.append(self.asleep.pop())
            self.rig.compute(self.live[-1])

    def pin(self):
        if len(self.pins) < 2:
            match = self.rig.manager.match_prefix(some_tokens(self.chance), **self.tenant())
            self.pins.append(self.rig.manager.pin(match, lifetime_s=self.chance.choice((None, 5.0))))

    def unpin(self):
        if self.pins:
            self.pins.pop().release()

    def evict(self):
        self.rig.manager.evict(self.chance.randrange(6))

    def drop(self):
        self.rig.manager.drop(**self.tenant())

    def pass_time(self):
        self.rig.clock.advance(self.chance.random())
        self.rig.manager.prefetch(some_tokens(self.chance), **self.tenant())

    def relieve(self):
        """Make room: only one goes on."""
        while self.pins:
            self.pins.pop().release()
        for one in self.live[1:]:
            self.rig.manager.free(one)
        del self.live[1:]

    def finish(self):
        for one in (*self.live, *self.asleep):
            self.rig.manager.free(one)
        for pin in self.pins:
            pin.release()
