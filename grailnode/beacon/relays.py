"""The beacon port over relays: stores that serve drand's paths, none of them trusted.

A relay is any object store that holds `{chain hash}/public/{round}`: drand's HTTP relays through HttpsStore, a local
run's own storage, or a static file server over either. All answers pass through `protocol.beacon.open_round`; a relay
that lies is named in the log and asked last from then on.
"""

import logging
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import trio

from protocol import limits
from protocol.beacon import ChainInfo, LocalKey, open_round
from protocol.errors import ProtocolError
from roles.ports import BeaconError, Clock, NotFoundError, ObjectStore, StoreError

log = logging.getLogger(__name__)

REMEMBERED_ROUNDS: Final = 64
"""Verified rounds kept in memory; a node asks for the same few again and again."""


@dataclass(frozen=True)
class Relay:
    """A place that serves rounds: its name in messages, and the store to ask."""

    name: str
    store: ObjectStore


@dataclass(frozen=True)
class Patience:
    """How long to ask for a round, in seconds; counted from the moment that the round is due or, later, from the call.

    Attributes:
        deadline: after which a call gives up.
        answer: for one relay's answer.
        head_start: before the next relay is asked as well.
        first_pause, longest_pause: between two passes over the relays, growing by half each time.
    """

    deadline: float = 60.0
    answer: float = 5.0
    head_start: float = 0.5
    first_pause: float = 0.02
    longest_pause: float = 1.0


class RelayBeacon:
    """Implements the Beacon port over several relays: the first true answer counts.

    Args:
        relays: asked in order, each with a head start on the next.
        chain: whose rounds are wanted.
        clock: says when a round is due.
        patience: deadlines and pauses.
    """

    def __init__(
        self, relays: Sequence[Relay], chain: ChainInfo, clock: Clock, *, patience: Patience | None = None
    ) -> None:
        if not relays:
            raise ValueError("a beacon needs at least one relay")
        self._relays = list(relays)
        self._chain = chain
        self._clock = clock
        self._patience = patience or Patience()
        self._known: OrderedDict[int, bytes] = OrderedDict()

    async def randomness(self, round_number: int) -> bytes:
        """Implements Beacon.randomness: the 32 bytes of a round, verified; waits until it is due.

        Raises:
            BeaconError: no relay gave a true answer before the deadline, or the clock was set back and the round is not
                due.
        """
        known = self._known.get(round_number)
        if known is not None:
            await trio.lowlevel.checkpoint()
            return known
        await self._clock.sleep_until(self._chain.round_time(round_number))
        randomness = await self._poll(round_number)
        self._known[round_number] = randomness
        if len(self._known) > REMEMBERED_ROUNDS:
            self._known.popitem(last=False)
        return randomness

    async def _poll(self, round_number: int) -> bytes:
        pause = self._patience.first_pause
        failures: dict[str, str] = {}
        with trio.move_on_after(self._patience.deadline):
            while True:
                found = await self._ask_all(round_number, failures)
                if found is not None:
                    return found
                if self._clock.now() < self._chain.round_time(round_number):
                    raise BeaconError(f"beacon round {round_number} is not due: this machine's clock was ahead")
                await trio.sleep(pause)
                pause = min(pause * 1.5, self._patience.longest_pause)
        said = "; ".join(f"{name}: {failure}" for name, failure in failures.items()) or "no relay answered"
        raise BeaconError(f"beacon round {round_number} not had in {self._patience.deadline:g} s ({said})")

    async def _ask_all(self, round_number: int, failures: dict[str, str]) -> bytes | None:
        """Ask every relay, each after a head start for those before it or when they have failed; the first true answer."""
        found: list[bytes] = []

        async def ask(relay: Relay, failed: trio.Event) -> None:
            try:
                with trio.fail_after(self._patience.answer):
                    found.append(await self._ask(relay, round_number))
                nursery.cancel_scope.cancel()
            except NotFoundError:
                failures.setdefault(relay.name, "round not there yet")
            except StoreError as error:
                failures[relay.name] = str(error)
            except trio.TooSlowError:
                failures[relay.name] = f"no answer in {self._patience.answer:g} s"
            except ProtocolError as error:
                failures[relay.name] = f"false answer: {error}"
                self._demote(relay, error)
            failed.set()

        async with trio.open_nursery() as nursery:
            for relay in tuple(self._relays):
                failed = trio.Event()
                nursery.start_soon(ask, relay, failed)
                with trio.move_on_after(self._patience.head_start):
                    await failed.wait()
        return found[0] if found else None

    async def _ask(self, relay: Relay, round_number: int) -> bytes:
        answer = await relay.store.get(self._chain.path(round_number), limits.MAX_BEACON_BYTES)
        return open_round(self._chain, round_number, answer)

    def _demote(self, relay: Relay, error: ProtocolError) -> None:
        log.warning("beacon relay %s gave a false answer and is asked last from now on: %s", relay.name, error)
        self._relays.remove(relay)
        self._relays.append(relay)


class StoreBeacon(RelayBeacon):
    """Implements the Beacon port over the rounds that a local run publishes into its own store."""

    def __init__(self, store: ObjectStore, chain: ChainInfo, clock: Clock, *, patience: Patience | None = None) -> None:
        super().__init__([Relay("store", store)], chain, clock, patience=patience)


async def publish_rounds(key: LocalKey, chain: ChainInfo, store: ObjectStore, clock: Clock, *, keep: int) -> None:
    """Write each round of a local chain when it is due, for ever; remove the rounds before the last `keep`.

    After a restart it first publishes the newest round, then those of the last `keep` that are missing, newest first:
    older ones could open no window that still counts. What the store refuses is written at the next opportunity.

    Args:
        key: signs the chain.
        keep: rounds held in the store, at least 2.

    Raises:
        ValueError: the key is not this chain's, or `keep` is too small.
    """
    if key.public_key != chain.public_key:
        raise ValueError("the beacon key does not sign this chain")
    if keep < 2:
        raise ValueError("a beacon keeps at least its last two rounds")
    publisher = _Publisher(key, chain, store, keep)
    while True:
        newest = chain.round_at(clock.now())
        try:
            caught_up = await publisher.step(newest)
        except StoreError as error:
            log.warning("beacon rounds up to %d could not be published: %s", newest, error)
            await trio.sleep(min(1.0, chain.period_ms / 1000))
            continue
        if caught_up:
            await clock.sleep_until(chain.round_time(newest + 1))


class _Publisher:
    """Which rounds the store holds, and the next thing to do about it."""

    def __init__(self, key: LocalKey, chain: ChainInfo, store: ObjectStore, keep: int) -> None:
        self._key = key
        self._chain = chain
        self._store = store
        self._keep = keep
        self._published: set[int] | None = None  # unknown until the store was listed

    async def step(self, newest: int) -> bool:
        """Publish or remove one round, most urgent first; True when there was nothing to do.

        Raises:
            StoreError: the store refused; the same step comes again.
        """
        if newest >= 1 and (self._published is None or newest not in self._published):
            # before anything else: a window may be waiting for it
            await self._store.put(self._chain.path(newest), self._key.answer(newest))
            if self._published is not None:
                self._published.add(newest)
                return False
        if self._published is None:
            self._published = await self._listed()
            return False
        oldest = max(1, newest - self._keep + 1)
        missing = next((number for number in range(newest, oldest - 1, -1) if number not in self._published), None)
        if missing is not None:
            await self._store.put(self._chain.path(missing), self._key.answer(missing))
            self._published.add(missing)
            return False
        stale = min(self._published, default=oldest)
        if stale < oldest:
            await self._store.delete(self._chain.path(stale))
            self._published.remove(stale)
            return False
        return True

    async def _listed(self) -> set[int]:
        prefix = self._chain.rounds_prefix
        numbers = set()
        async for info in self._store.list(prefix):
            number = info.path.removeprefix(prefix)
            if number.isdecimal() and str(int(number)) == number:
                numbers.add(int(number))
        return numbers
