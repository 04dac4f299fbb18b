"""Holds the ranks of a tensor-parallel job to one another: fed the same calls, their managers must stay equal."""

from __future__ import annotations

from collections import deque
from hashlib import blake2b
from json import loads
from typing import Any, Protocol

from kvist.errors import ArgumentError, KvistError
from kvist.journal.recording import made_by
from kvist.journal.taps import taps_of
from kvist.journal.values import Names, Values, compact
from kvist.manager import KVCacheManager

__all__ = ["Exchange", "Lockstep", "LockstepError"]

DIGEST_BYTES = 16
MAX_SHOWN = 300


class LockstepError(KvistError, RuntimeError):
    """Ranks that must be equal are not."""


class Exchange(Protocol):
    """What `Lockstep` needs of a transport; those of `kvist.wire` have it."""

    @property
    def rank(self) -> int:
        """Which rank this is."""

    @property
    def size(self) -> int:
        """How many ranks there are."""

    def all_gather(self, message: bytes, timeout_s: float) -> list[bytes]:
        """Return what each rank gives to the same call, by rank; raises TransferError after the time."""


class Lockstep:
    """Compares the managers of all ranks every n steps, and names the first call in which they differ.

    Each rank makes one, with a manager on which nothing runs, and calls `step` once a step of its engine. What is
    compared are the digests of the managers, and a chain of digests over all calls, with their arguments and what they
    returned or raised. The last `num_remembered` calls are kept to say which was the first that differed.

    >>> from kvist import AttentionSpec, CacheConfig
    >>> from kvist.wire.gather_local import local_transports
    >>> manager = KVCacheManager(CacheConfig([AttentionSpec(2, 64)], block_size=4, num_blocks=8))
    >>> lockstep = Lockstep(manager, local_transports(1)[0], every_n_steps=2)
    >>> sequence = manager.add_sequence([1, 2, 3])
    >>> lockstep.step(), lockstep.step()
    (False, True)
    """

    def __init__(
        self,
        manager: KVCacheManager,
        transport: Exchange,
        every_n_steps: int = 100,
        *,
        num_remembered: int = 4096,
        timeout_s: float = 10.0,
    ) -> None:
        for name, value in (("every_n_steps", every_n_steps), ("num_remembered", num_remembered)):
            if type(value) is not int or value < 1:
                raise ArgumentError(f"{name} is {value!r}, must be an int above 0")
        self._manager, self._transport, self._every, self._timeout_s = manager, transport, every_n_steps, timeout_s
        self._values = Values(Names())
        self._chain = bytes(DIGEST_BYTES)
        self._calls: deque[tuple[bytes, str]] = deque(maxlen=num_remembered)
        self._begun = ""
        self.num_calls = self.num_steps = 0
        taps_of(manager).add(self)

    def step(self) -> bool:
        """Count a step; every n-th compares, and waits for the other ranks. Returns whether it has compared.

        Raises LockstepError on all ranks, with the same text, if any differ; TransferError if a rank does not come.
        """
        self.num_steps += 1
        if self.num_steps % self._every:
            return False
        self.compare()
        return True

    def compare(self) -> None:
        """Compare now; raises as `step` does."""
        digest = self._manager.digest()  # a call of its own, on all ranks
        told = compact([self.num_calls, self._chain.hex(), digest]).encode()
        answers = self._transport.all_gather(told, self._timeout_s)
        if len(set(answers)) > 1:
            raise LockstepError(self._difference(digest))

    def close(self) -> None:
        """Compare no more."""
        taps_of(self._manager).remove(self)

    # -- what the taps tell -------------------------------------------------------------------------------------------

    def begin(self, call: str, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        """Write a call down."""
        write = self._values.write
        told = {name: write(options[name]) for name in sorted(options)}
        self._begun = compact([call, list(map(write, arguments)), told])

    def note(self, what: str, value: Any) -> None:
        """Leave out what differs between machines: a reading of the clock, or which copies failed."""

    def end(self, call: str, result: Any, error: BaseException | None) -> None:
        """Add a call to the chain, with what it returned."""
        if call == "take_moves":  # each rank makes its own copies, whenever it likes
            return
        for made in made_by(result):
            self._values.names.add(made)
        told = f"{self._begun} -> {self._told(result) if error is None else type(error).__name__}"
        self._chain = blake2b(self._chain + told.encode(), digest_size=DIGEST_BYTES).digest()
        self._calls.append((self._chain, told))
        self.num_calls += 1

    def rest(self) -> None:
        """Do nothing."""

    def _told(self, result: Any) -> str:
        """Return what of a result can be compared."""
        made = made_by(result)
        if made:
            places = [getattr(each, "row", None) for each in made]
            return compact([places, [getattr(each, "num_cached_tokens", each.num_tokens) for each in made]])
        return compact(result) if result is None or isinstance(result, bool | int | str) else ""

    # -- who differs --------------------------------------------------------------------------------------------------

    def _difference(self, digest: str) -> str:
        """Return what all ranks say of where they differ."""
        first = self.num_calls - len(self._calls)
        chains = b"".join(chain for chain, _ in self._calls)
        heads = self._transport.all_gather(first.to_bytes(8, "little") + chains, self._timeout_s)
        number = _first_difference(heads)
        index = -1 if number is None else number - first
        call = self._calls[index][1] if 0 <= index < len(self._calls) else "no call"
        shown = call if len(call) <= MAX_SHOWN else f"{call[:MAX_SHOWN]}..."
        answers = self._transport.all_gather(compact([shown, digest]).encode(), self._timeout_s)
        return _text_of(number, max(int.from_bytes(head[:8], "little") for head in heads), answers)


def _first_difference(heads: list[bytes]) -> int | None:
    """Return the number, from 0, of the first call whose chain is not that of all ranks; None if all are equal.

    Chains that are equal at a call are equal at all calls before, so it is found by halving.
    """
    firsts = [int.from_bytes(head[:8], "little") for head in heads]
    ends = [first + (len(head) - 8) // DIGEST_BYTES for first, head in zip(firsts, heads, strict=True)]

    def is_equal(number: int) -> bool:
        found = set()
        for first, end, head in zip(firsts, ends, heads, strict=True):
            start = 8 + (number - first) * DIGEST_BYTES
            found.add(head[start : start + DIGEST_BYTES] if number < end else None)
        return len(found) == 1

    low, high = max(firsts), max(ends)
    if low >= high or is_equal(high - 1):
        return None
    high -= 1
    while low < high:
        middle = (low + high) // 2
        if is_equal(middle):
            low = middle + 1
        else:
            high = middle
    return low


def _text_of(number: int | None, oldest: int, answers: list[bytes]) -> str:
    told = [loads(answer) for answer in answers]
    if number is None:
        digests = ", ".join(f"rank {rank}: {digest[:12]}" for rank, (_, digest) in enumerate(told))
        return f"all calls were equal, and returned the same, but the states differ: {digests}"
    ranks: dict[str, list[int]] = {}
    for rank, (call, _) in enumerate(told):
        ranks.setdefault(call, []).append(rank)
    lines = [f"  rank {', '.join(map(str, members))}: {call}" for call, members in ranks.items()]
    if number == oldest and oldest and len(ranks) == 1:
        return f"the ranks differ since before call {number + 1}, the oldest that is remembered:\n{lines[0]}"
    return "\n".join([f"call {number + 1} was the first that differed:", *lines])
