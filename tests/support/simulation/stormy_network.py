"""A short life of a network under everything that a seed brings: storage that lies, links that are cut, processes that
die.

The first windows are stormy, the last ones calm, so that what was broken has time to mend. All of it, the order in
which tasks run included, follows from the seed.
"""

import hashlib
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from math import inf
from typing import Final

import trio

from grailnode.beacon.relays import StoreBeacon
from grailnode.node.wiring import run_collector, run_publisher, run_training
from grailnode.run.creation import Choices
from grailnode.store.decorators.bounded import BoundedStore
from grailnode.store.decorators.retrying import RetryingStore, RetryPolicy
from roles.node.identity import Node
from roles.ports import Clock, ObjectStore, StoreError
from tests.support.faults.faulty_store import FaultyStore
from tests.support.faults.store_faults import Fault, Link, Past
from tests.support.faults.tripwire import TrippingStore, Tripwire
from tests.support.simulation import small_policy
from tests.support.simulation.network import BEACON_KEY, BEGIN, Log, Network
from tests.support.simulation.recording_store import HearsayStore, ReportedLines, Witness

STORMY_WINDOWS: Final = 3
WINDOWS: Final = 7
CHOICES: Final = Choices(groups=3, group_size=4, max_tokens=4, seal_rounds=9, verdict_rounds=14)
PATIENCE: Final = RetryPolicy(attempts=4, first_pause=0.05, longest_pause=0.4, deadline=2.0)
MOST_LISTED: Final = 500
_NEVER: Final = 1 << 62
CHECKER: Final = "checker"
"""The name of a node that sees the store as it is."""

_RESTART_SECONDS: Final = 0.2
_JUMPS: Final = (3600.0, -3600.0, 4.0, -4.0, 0.3, -0.3)  # seconds
_BEACON_AWAY_AT: Final = 3.0  # seconds
TRAINER: Final = ("trainer/training", "trainer/upload", "trainer/download")


@dataclass(frozen=True)
class Cut:
    """A link that is not there for a while."""

    process: str
    begin: float
    seconds: float
    link: Link


@dataclass(frozen=True)
class Death:
    """A process that dies at its n-th operation on its stores, just before or just after it takes effect."""

    process: str
    operation: int
    after: bool
    away: float


@dataclass(frozen=True)
class Jump:
    """Somebody sets a machine's clock wrong, by so many seconds; it is right again when the storm is over."""

    node: str
    begin: float
    seconds: float


@dataclass(frozen=True)
class Weather:
    """What a seed brings.

    Attributes:
        rates: of each fault, for every process; state_rates: of errors of the nodes' own disks.
        beacon_away: seconds for which no round is published, from the second window on.
        beacon_lies: whether false rounds lie there instead, until they are put right.
    """

    seed: int
    miners: int
    validators: int
    quorum: int
    anchor_interval: int
    keep_patches: int
    rates: dict[Fault, float]
    state_rates: dict[Fault, float]
    cuts: tuple[Cut, ...] = ()
    deaths: tuple[Death, ...] = ()
    jumps: tuple[Jump, ...] = ()
    beacon_away: float = 0.0
    beacon_lies: bool = False

    @classmethod
    def of(cls, seed: int) -> "Weather":
        """The weather of a seed."""
        chance = random.Random(f"weather {seed}")
        miners, validators = chance.choice([(1, 1), (1, 1), (2, 1), (1, 2)])
        processes = [*TRAINER, *(f"miner-{n}" for n in range(1, miners + 1)), *names(validators)]
        faults = chance.sample(list(Fault), chance.choice([0, 1, 1, 2, 3]))
        end = (STORMY_WINDOWS - 0.5) * 2.0
        return cls(
            seed=seed,
            miners=miners,
            validators=validators,
            quorum=chance.randint(1, validators),
            anchor_interval=chance.choice([2, 3, 5]),
            keep_patches=chance.choice([2, 4, 100]),
            rates={fault: chance.choice([0.02, 0.1, 0.3]) for fault in faults},
            state_rates={Fault.ERROR: 0.02, Fault.LOST_ANSWER: 0.02} if chance.random() < 0.3 else {},
            cuts=tuple(
                Cut(
                    chance.choice(processes),
                    chance.uniform(0.0, end - 1.0),
                    chance.uniform(0.2, 3.0),
                    chance.choice([Link.NO_REQUESTS, Link.NO_ANSWERS]),
                )
                for _ in range(chance.choice([0, 0, 1, 2]))
            ),
            deaths=tuple(
                Death(
                    chance.choice(processes),
                    chance.randrange(100),
                    chance.random() < 0.5,
                    chance.choice([0.1, 1.0, 3.0]),
                )
                for _ in range(chance.choice([0, 1, 2, 4]))
            ),
            jumps=tuple(
                Jump(process.split("/", maxsplit=1)[0], chance.uniform(0.0, end - 1.0), chance.choice(_JUMPS))
                for process in chance.sample(processes, chance.choice([0, 0, 0, 1, 2]))
            ),
            beacon_away=chance.choice([0.0, 0.0, 0.0, chance.uniform(0.2, 3.0)]),
            beacon_lies=chance.random() < 0.5,
        )


def names(validators: int) -> list[str]:
    """The validators' names."""
    return [f"validator-{number}" for number in range(validators)]


class WrongClock:
    """A machine's clock, which may be set wrong. It is asked again every quarter of a second, as the real one is."""

    def __init__(self, right: Clock) -> None:
        self._right = right
        self.wrong = 0.0

    def now(self) -> float:
        """Seconds since the Unix epoch, as this machine believes."""
        return self._right.now() + self.wrong

    async def sleep_until(self, moment: float) -> None:
        """Return at or after a moment of this clock."""
        while (left := moment - self.now()) > 0:
            await trio.sleep(min(left, 0.25))
        await trio.lowlevel.checkpoint()


@dataclass
class _Life:
    """What surrounds one process: its view of the store, its own disk, and how it ends."""

    told: ReportedLines
    storm: FaultyStore
    disk: FaultyStore
    wire: Tripwire | None = None
    deaths: list[Death] = field(default_factory=list)


class StormyNetwork(Network):
    """A network in the weather of a seed. Its store and states are witnesses."""

    store: Witness
    states: dict[str, Witness]  # type: ignore[assignment]

    def __init__(self, weather: Weather) -> None:
        super().__init__(CHOICES, weather.validators, weather.quorum, small_policy.DIRECTORY)
        self.weather = weather
        self.store = Witness()
        self.states = {}
        self.lives: dict[str, _Life] = {}
        self.died: list[str] = []
        self.failed: list[tuple[str, str]] = []
        self._past = Past()
        self._clocks = {jump.node: WrongClock(self.clock) for jump in weather.jumps}

    def node(self, name: str, process: str = "", store: ObjectStore | None = None) -> Node:
        """A node with the clock of its machine."""
        node = super().node(name, process, store)
        if name not in self._clocks:
            return node
        clock = self._clocks[name]
        return replace(node, clock=clock, beacon=StoreBeacon(node.store, node.run.beacon, clock))

    async def run_beacon(self) -> None:
        """The local beacon, which may be away for a while; false rounds may lie in its place."""
        away, chain = self.weather.beacon_away, self.run.beacon
        with trio.move_on_after(_BEACON_AWAY_AT if away else inf):
            await super().run_beacon()
        first = chain.round_at(self.clock.now()) + 1
        last = chain.round_at(self.clock.now() + away)
        if self.weather.beacon_lies:
            for number in range(first, last + 1):
                await self.clock.sleep_until(chain.round_time(number))
                await self.store.put(chain.path(number), BEACON_KEY.answer(number + 1))
        await self.clock.sleep_until(chain.round_time(last + 1))
        for number in range(first, last + 1):
            await self.store.put(chain.path(number), BEACON_KEY.answer(number))
        await super().run_beacon()

    def life(self, process: str) -> _Life:
        """The surroundings of a process; they outlive it."""
        if process not in self.lives:
            weather = self.weather
            chance = random.Random(f"{process} {weather.seed}")
            state = self.states.setdefault(process.split("/", maxsplit=1)[0], Witness())
            self.lives[process] = _Life(
                told=ReportedLines(),
                storm=FaultyStore(self.store, chance, weather.rates, delay=0.5, past=self._past),
                disk=FaultyStore(state, chance, weather.state_rates),
                deaths=[death for death in weather.deaths if death.process == process],
            )
        return self.lives[process]

    def medium(self, name: str, process: str) -> ObjectStore:
        """The shared store through the storm, with the retries of a real node in front."""
        if name == CHECKER:
            return self.store
        life = self.life(name + process)
        chance = random.Random(f"retries {name}{process} {self.weather.seed}")
        heard = HearsayStore(BoundedStore(RetryingStore(life.storm, chance, PATIENCE), MOST_LISTED), life.told)
        return TrippingStore(heard, life.wire) if life.wire else heard

    def durable(self, name: str, process: str) -> ObjectStore:
        """A node's own disk: it may fail, and it never lies."""
        life = self.life(name + process)
        return TrippingStore(life.disk, life.wire) if life.wire else life.disk

    async def keep(self, process: str, main: Callable[[], Awaitable[None]]) -> None:
        """Run a process as its supervisor does: what dies or fails is started again."""
        while True:
            life = self.life(process)
            self.logs.setdefault(process, Log(process)).event("started")
            away = _RESTART_SECONDS
            with trio.CancelScope() as scope:
                if life.deaths:
                    death = life.deaths.pop(0)
                    life.wire = _wire(death, scope)
                    away += death.away
                try:
                    await main()
                except* StoreError as group:
                    self.failed.append((process, str(group.exceptions[0])))
            if scope.cancelled_caught:
                self.died.append(process)
            life.wire = None
            await trio.sleep(away)

    def begin(self, nursery: trio.Nursery) -> None:
        """Start every process, and the weather."""
        weather = self.weather
        settings = self.trainer_settings(
            groups_per_step=2, anchor_interval=weather.anchor_interval, keep_patches=weather.keep_patches
        )
        trainer: dict[str, Callable[[], Awaitable[None]]] = {
            "trainer/training": lambda: run_training(
                self.node("trainer", "/training"), lambda: self.weights, self.compute, settings
            ),
            "trainer/upload": lambda: run_publisher(self.node("trainer", "/upload"), settings.publisher),
            "trainer/download": lambda: run_collector(self.node("trainer", "/download"), settings.collector),
        }
        nursery.start_soon(self.run_beacon)
        for process, main in trainer.items():
            nursery.start_soon(self.keep, process, main)
        for name in self.validators:
            nursery.start_soon(self.keep, name, _bound(self.run_validator, name))
        for number in range(1, weather.miners + 1):
            name = f"miner-{number}"
            nursery.start_soon(self.keep, name, _bound(self.run_miner, name, CHOICES.groups))
        for cut in weather.cuts:
            nursery.start_soon(self._cut, cut)
        for jump in weather.jumps:
            nursery.start_soon(self._jump, jump)

    async def _jump(self, jump: Jump) -> None:
        await self.clock.sleep_until(BEGIN + 1.0 + jump.begin)
        self._clocks[jump.node].wrong = jump.seconds

    async def _cut(self, cut: Cut) -> None:
        await self.clock.sleep_until(BEGIN + 1.0 + cut.begin)
        self.life(cut.process).storm.link = cut.link
        await trio.sleep(cut.seconds)
        self.life(cut.process).storm.link = Link.OPEN

    def calm_down(self) -> None:
        """The storm is over: links are open, storage is honest, and nobody dies any more."""
        for clock in self._clocks.values():
            clock.wrong = 0.0
        for life in self.lives.values():
            life.deaths.clear()
            if life.wire is not None:
                life.wire.left = _NEVER
            life.storm.link = Link.OPEN
            life.storm.calm()
            life.disk.calm()

    def trace(self) -> str:
        """A digest of everything that happened: every event of every node, every byte that was stored, and when."""
        digest = hashlib.sha256(self.store.trace())
        for name, state in sorted(self.states.items()):
            digest.update(name.encode() + state.trace())
        for name, log in sorted(self.logs.items()):
            digest.update(repr((name, log.events)).encode())
        return digest.hexdigest()


def _bound(function: Callable[..., Awaitable[None]], *arguments: object) -> Callable[[], Awaitable[None]]:
    return lambda: function(*arguments)


def _wire(death: Death, scope: trio.CancelScope) -> Tripwire:
    async def strike() -> None:
        scope.cancel()
        await trio.sleep_forever()

    return Tripwire(lambda operation, path: True, death.operation, death.after, strike)


async def live(weather: Weather) -> StormyNetwork:
    """The network in a weather, after its last window."""
    network = StormyNetwork(weather)
    async with trio.open_nursery() as nursery:
        network.begin(nursery)
        await network.until_window(STORMY_WINDOWS)
        network.calm_down()
        await network.until_window(WINDOWS)
        nursery.cancel_scope.cancel()
    return network
