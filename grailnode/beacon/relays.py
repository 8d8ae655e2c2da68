"""Implements the Beacon port over relays: stores that serve drand's paths and need not be trusted.

A relay is any object store with objects at `{chain hash}/public/{round}`: drand's HTTP relays through HttpsStore, a
local run's own storage, or a static file server. `protocol.beacon.open_round` checks every answer. A relay that gives a
false answer is logged, and is asked after all others from then on. The run pins a chain by its key
and its hash; `[beacon] relays` in run.toml replaces the relays below.
"""

import logging
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import trio

from protocol import limits
from protocol.beacon import ChainInfo, LocalKey, open_round, quicknet
from protocol.errors import ProtocolError
from roles.node.retries import Pause
from roles.ports import BeaconError, Clock, NotFoundError, ObjectStore, StoreError, Telemetry

log = logging.getLogger(__name__)

CHAINS: Final[Mapping[str, ChainInfo]] = {"quicknet": quicknet}
"""Chains by the names that `grailnode init --beacon` accepts."""

RELAYS: Final[Mapping[bytes, tuple[str, ...]]] = {
    quicknet.chain_hash: (
        "https://api.drand.sh",
        "https://drand.cloudflare.com",
        "https://api2.drand.sh",
        "https://api3.drand.sh",
    )
}
"""Relays of several operators by chain hash, in the order in which they are asked (docs.drand.love)."""

MIN_WINDOW_ROUNDS: Final = 3
"""Rounds of a window (protocol/window.py)."""


def rounds_of(chain: ChainInfo, window: float) -> int:
    """Return the number of rounds nearest to `window` seconds; ValueError if it is less than MIN_WINDOW_ROUNDS."""
    rounds = round(window * 1000 / chain.period_ms)
    if rounds < MIN_WINDOW_ROUNDS:
        raise ValueError(
            f"a window is at least {MIN_WINDOW_ROUNDS} rounds, {MIN_WINDOW_ROUNDS * chain.period_ms / 1000:g} s here"
        )
    return rounds


MAX_CACHED_ROUNDS: Final = 64
"""Verified rounds in memory; a node asks for the same few rounds repeatedly."""

_PAUSE: Final = Pause(first=0.02, longest=1.0, factor=1.5)


@dataclass(frozen=True)
class Relay:
    """A store that serves rounds, and its name in messages."""

    name: str
    store: ObjectStore


@dataclass(frozen=True)
class RelayTimeouts:
    """How long relays may take, in seconds."""

    # a call fails after this time, counted from when the round is due or, if later, from the call
    deadline: float = 60.0
    answer: float = 5.0
    head_start: float = 0.5  # before the next relay is asked as well
    pause: Pause = _PAUSE  # before all relays are asked again


class RelayBeacon:
    """Implements the Beacon port over several relays: the first valid answer counts.

    Relays, of which there is at least one, are asked in order, each with a head start on the next.
    """

    def __init__(
        self, relays: Sequence[Relay], chain: ChainInfo, clock: Clock, *, timeouts: RelayTimeouts | None = None
    ) -> None:
        if not relays:
            raise ValueError("a beacon needs at least one relay")
        self._relays = list(relays)
        self._chain = chain
        self._clock = clock
        self._timeouts = timeouts or RelayTimeouts()
        self._cache: OrderedDict[int, bytes] = OrderedDict()

    async def randomness(self, round_number: int) -> bytes:
        if round_number in self._cache:
            await trio.lowlevel.checkpoint()
            return self._cache[round_number]
        await self._clock.sleep_until(self._chain.round_time(round_number))
        randomness = await self._poll(round_number)
        self._cache[round_number] = randomness
        if len(self._cache) > MAX_CACHED_ROUNDS:
            self._cache.popitem(last=False)
        return randomness

    async def _poll(self, round_number: int) -> bytes:
        pause = 0.0
        failures: dict[str, str] = {}
        with trio.move_on_after(self._timeouts.deadline):
            while True:
                randomness = await self._ask_all(round_number, failures)
                if randomness is not None:
                    return randomness
                if self._clock.now() < self._chain.round_time(round_number):
                    raise BeaconError(f"beacon round {round_number} is not due: this machine's clock was ahead")
                pause = self._timeouts.pause.after(pause)
                await trio.sleep(pause)
        causes = "; ".join(f"{name}: {failure}" for name, failure in failures.items()) or "no relay answered"
        raise BeaconError(
            f"beacon round {round_number}: no valid answer within {self._timeouts.deadline:g} s ({causes})"
        )

    async def _ask_all(self, round_number: int, failures: dict[str, str]) -> bytes | None:
        """Ask every relay once, and return the first valid answer; None when there is none.

        A relay is asked when the relays before it have failed, or after the head start.
        """
        answers: list[bytes] = []

        async def ask(relay: Relay, failure: trio.Event) -> None:
            try:
                with trio.fail_after(self._timeouts.answer):
                    answer = await relay.store.get(self._chain.path(round_number), limits.MAX_BEACON_BYTES)
                answers.append(open_round(self._chain, round_number, answer))
                nursery.cancel_scope.cancel()
            except NotFoundError:
                failures.setdefault(relay.name, "no such round, or no longer")
            except StoreError as error:
                failures[relay.name] = str(error)
            except trio.TooSlowError:
                failures[relay.name] = f"no answer in {self._timeouts.answer:g} s"
            except ProtocolError as error:
                failures[relay.name] = f"false answer: {error}"
                log.warning("beacon relay %s gave a false answer and is asked last from now on: %s", relay.name, error)
                self._relays.remove(relay)
                self._relays.append(relay)
            failure.set()

        async with trio.open_nursery() as nursery:
            for relay in tuple(self._relays):
                failure = trio.Event()
                nursery.start_soon(ask, relay, failure)
                with trio.move_on_after(self._timeouts.head_start):
                    await failure.wait()
        return answers[0] if answers else None


class StoreBeacon(RelayBeacon):
    """Implements the Beacon port over the rounds that a local run publishes in its own store."""

    def __init__(self, store: ObjectStore, chain: ChainInfo, clock: Clock) -> None:
        super().__init__([Relay("store", store)], chain, clock)


async def publish_rounds(
    key: LocalKey, chain: ChainInfo, store: ObjectStore, clock: Clock, *, keep: int, telemetry: Telemetry | None = None
) -> None:
    """Write each round of a local chain when it is due, and remove rounds before the last `keep`, at least 2, until
    cancelled.

    After a restart the newest round is written first, then those of the last `keep` that the store lacks, newest first:
    older rounds could not open a window that still counts. A write that the store refuses is repeated. An event tells
    of each write that failed or took longer than a round lasts: all nodes wait for rounds and cannot see why they are
    late.
    """
    if key.public_key != chain.public_key:
        raise ValueError("the beacon key does not sign this chain")
    if keep < 2:
        raise ValueError("a beacon keeps at least its last two rounds")
    stored: set[int] | None = None  # until the store has been listed
    while True:
        newest = chain.round_at(clock.now())
        start = trio.current_time()
        try:
            if stored is None:
                if newest:  # nodes wait for it, also where the store cannot be listed
                    await store.put(chain.path(newest), key.answer(newest))
                names = [item.path.removeprefix(chain.rounds_prefix) async for item in store.list(chain.rounds_prefix)]
                stored = {int(name) for name in names if name.isdecimal() and str(int(name)) == name}
            kept = range(newest, max(0, newest - keep), -1)
            number = next((number for number in kept if number not in stored), None)
            stale = min(stored, default=newest)
            if number is not None:
                await store.put(chain.path(number), key.answer(number))
                stored.add(number)
            elif kept and stale < kept[-1]:
                await store.delete(chain.path(stale))
                stored.remove(stale)
            else:
                await clock.sleep_until(chain.round_time(newest + 1))
                continue
        except StoreError as error:
            if telemetry is not None:
                telemetry.event("round-unpublished", round=newest, error=str(error))
            await trio.sleep(min(1.0, chain.period_ms / 1000))
            continue
        seconds = trio.current_time() - start
        if telemetry is not None and seconds > chain.period_ms / 1000:
            report = f"storage took {seconds:.1f} s, where a round lasts {chain.period_ms / 1000:g} s: rounds come late"
            telemetry.event("round-late", round=newest, error=report)
