"""A simulated network with faults that a seed decides: faults of storage, cut links, and crashes of processes.

Faults occur in the first windows only, so that the network can recover in the last ones. The seed decides about
everything, including the order in which tasks run.
"""

import hashlib
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf
from typing import Final

import trio

from grailnode.beacon.relays import StoreBeacon
from grailnode.store.decorators.limiting import BoundedStore
from grailnode.store.decorators.retrying import RetryingStore, RetryPolicy, WaitingState
from protocol.limits import MAX_KEYS
from roles.node.identity import Node
from roles.node.retries import Pause
from roles.ports import Clock, ObjectStore, StoreError
from tests.support.builders.recipes import demo_rules
from tests.support.faults.crash_trigger import CrashingStore, CrashTrigger, cancelling
from tests.support.faults.faulty_store import Fault, FaultyStore, Link, PutHistory
from tests.support.faults.full_disk import DiskFill, DiskStore, NodeDisk
from tests.support.simulation import small_policy
from tests.support.simulation.network import BEACON_KEY, BEGIN, Log, Network
from tests.support.simulation.recording_store import AcknowledgementRecorder, RecordingStore

FAULTY_WINDOWS: Final = 3
WINDOWS: Final = 7
RULES: Final = demo_rules(groups=3, group_size=4, max_tokens=4, seal_rounds=9, verdict_rounds=14)
PATIENCE: Final = RetryPolicy(attempts=4, pause=Pause(0.05, 0.4), deadline=2.0)
MOST_LISTED: Final = 500
_NEVER: Final = 1 << 62
CHECKER: Final = "checker"
"""The name of a node that uses the store without faults."""

_RESTART_SECONDS: Final = 0.2
_JUMPS: Final = (3600.0, -3600.0, 4.0, -4.0, 0.3, -0.3)  # seconds
_BEACON_OUTAGE_START: Final = 3.0  # seconds
TRAINER: Final = ("trainer/training", "trainer/upload", "trainer/download")


@dataclass(frozen=True)
class LinkCut:
    """A link of a process that is cut for some seconds; `begin` counts from the first window."""

    process: str
    begin: float
    seconds: float
    link: Link


@dataclass(frozen=True)
class ProcessCrash:
    """A crash of a process before or after its n-th operation on its stores, and `outage` seconds until its restart."""

    process: str
    operation: int
    after: bool
    outage: float


@dataclass(frozen=True)
class ClockJump:
    """A change of a machine's clock by some seconds, until the end of the faults."""

    node: str
    begin: float
    seconds: float


@dataclass(frozen=True)
class FaultSchedule:
    """The participants of a network and its faults.

    Attributes:
        spares: to how many validators beyond the quorum a group is dealt.
        rates: probability of each fault of the shared store, for every process.
        state_rates: the same for the nodes' own disks.
        beacon_outage: seconds without published rounds, from the second window on.
        beacon_is_false: whether false rounds are published in the outage, until the right ones replace them.
    """

    seed: int = 1
    miners: int = 1
    validators: int = 1
    quorum: int = 1
    anchor_interval: int = 2
    keep_patches: int = 4
    rates: dict[Fault, float] = field(default_factory=dict)
    state_rates: dict[Fault, float] = field(default_factory=dict)
    cuts: tuple[LinkCut, ...] = ()
    crashes: tuple[ProcessCrash, ...] = ()
    jumps: tuple[ClockJump, ...] = ()
    fills: tuple[DiskFill, ...] = ()
    beacon_outage: float = 0.0
    beacon_is_false: bool = False
    spares: int = MAX_KEYS

    def __add__(self, other: "FaultSchedule") -> "FaultSchedule":
        """Return the schedule with the scenarios of both."""
        return replace(
            self,
            rates=self.rates | other.rates,
            state_rates=self.state_rates | other.state_rates,
            cuts=self.cuts + other.cuts,
            jumps=self.jumps + other.jumps,
            beacon_outage=max(self.beacon_outage, other.beacon_outage),
            beacon_is_false=self.beacon_is_false or other.beacon_is_false,
        )

    @classmethod
    def of(cls, seed: int, *, dealing: bool = False) -> "FaultSchedule":
        """Return the schedule that a seed decides.

        Args:
            dealing: whether R1 deals the groups to some of four validators.
        """
        rng = random.Random(f"weather {seed}")
        miners, validators = (2, 4) if dealing else rng.choice([(1, 1), (1, 1), (2, 1), (1, 2)])
        processes = [*TRAINER, *(f"miner-{n}" for n in range(1, miners + 1))]
        processes += [f"validator-{n}" for n in range(validators)]
        faults = rng.sample(list(Fault), rng.choice([0, 1, 1, 2, 3]))
        end = (FAULTY_WINDOWS - 0.5) * 2.0
        return cls(
            seed=seed,
            miners=miners,
            validators=validators,
            quorum=rng.randint(1, 2 if dealing else validators),
            anchor_interval=rng.choice([2, 3, 5]),
            keep_patches=rng.choice([2, 4, 100]),
            rates={fault: rng.choice([0.02, 0.1, 0.3]) for fault in faults},
            state_rates={Fault.ERROR: 0.02, Fault.LOST_ANSWER: 0.02} if rng.random() < 0.3 else {},
            cuts=tuple(
                LinkCut(
                    rng.choice(processes),
                    rng.uniform(0.0, end - 1.0),
                    rng.uniform(0.2, 3.0),
                    rng.choice([Link.NO_REQUESTS, Link.NO_ANSWERS]),
                )
                for _ in range(rng.choice([0, 0, 1, 2]))
            ),
            crashes=tuple(
                ProcessCrash(rng.choice(processes), rng.randrange(100), rng.random() < 0.5, rng.choice([0.1, 1.0, 3.0]))
                for _ in range(rng.choice([0, 1, 2, 4]))
            ),
            jumps=tuple(
                ClockJump(process.split("/", maxsplit=1)[0], rng.uniform(0.0, end - 1.0), rng.choice(_JUMPS))
                for process in rng.sample(processes, rng.choice([0, 0, 0, 1, 2]))
            ),
            beacon_outage=rng.choice([0.0, 0.0, 0.0, rng.uniform(0.2, 3.0)]),
            beacon_is_false=rng.random() < 0.5,
            spares=rng.choice([0, 1]) if dealing else MAX_KEYS,
        )


class WrongClock:
    """A machine's clock, which may be wrong. A sleeper reads it every quarter of a second, as with the real one."""

    def __init__(self, true_clock: Clock) -> None:
        self._true_clock = true_clock
        self.error_seconds = 0.0

    def now(self) -> float:
        return self._true_clock.now() + self.error_seconds

    async def sleep_until(self, moment: float) -> None:
        """Return at or after a moment of this clock."""
        while (remaining := moment - self.now()) > 0:
            await trio.sleep(min(remaining, 0.25))
        await trio.lowlevel.checkpoint()


@dataclass
class ProcessContext:
    """The stores and the crashes of one process: its view of the shared store, and of its node's state.

    Attributes:
        acknowledgements: by path, the virtual seconds at which the shared store first acknowledged a put.
    """

    shared_store: FaultyStore
    disk: FaultyStore
    state: DiskStore
    trigger: CrashTrigger | None = None
    crashes: list[ProcessCrash] = field(default_factory=list)
    acknowledgements: dict[str, float] = field(default_factory=dict)


class FaultyNetwork(Network):
    """A network with the faults of a schedule, which records all puts."""

    store: RecordingStore
    states: dict[str, RecordingStore]  # type: ignore[assignment]

    def __init__(self, fault_schedule: FaultSchedule) -> None:
        # The name gives each seed problems of its own: if all had the same, one draw would decide what they learn.
        rules = RULES.changed(title=f"seed {fault_schedule.seed}", spares=fault_schedule.spares)
        super().__init__(rules, fault_schedule.validators, fault_schedule.quorum, small_policy.DIRECTORY)
        self.fault_schedule = fault_schedule
        self.miners = [f"miner-{number}" for number in range(1, fault_schedule.miners + 1)]
        self.store = RecordingStore()
        self.states = {}
        self.contexts: dict[str, ProcessContext] = {}
        self.disks: dict[str, NodeDisk] = {}
        self.crashed_processes: list[str] = []
        self.failures: list[tuple[str, str]] = []
        self._put_history = PutHistory()
        self._clocks = {jump.node: WrongClock(self.clock) for jump in fault_schedule.jumps}

    def node(self, name: str, process: str = "", store: ObjectStore | None = None) -> Node:
        """Return a node with the clock of its machine."""
        node = super().node(name, process, store)
        if name not in self._clocks:
            return node
        clock = self._clocks[name]
        return replace(node, clock=clock, beacon=StoreBeacon(node.store, node.run.beacon, clock))

    async def run_beacon(self) -> None:
        """Run the local beacon with its outage."""
        outage, chain = self.fault_schedule.beacon_outage, self.run.beacon
        with trio.move_on_after(_BEACON_OUTAGE_START if outage else inf):
            await super().run_beacon()
        first = chain.round_at(self.clock.now()) + 1
        last = chain.round_at(self.clock.now() + outage)
        if self.fault_schedule.beacon_is_false:
            for number in range(first, last + 1):
                await self.clock.sleep_until(chain.round_time(number))
                await self.store.put(chain.path(number), BEACON_KEY.answer(number + 1))
        await self.clock.sleep_until(chain.round_time(last + 1))
        for number in range(first, last + 1):
            await self.store.put(chain.path(number), BEACON_KEY.answer(number))
        await super().run_beacon()

    def context(self, process: str) -> ProcessContext:
        """Return the context of a process, which remains the same over its restarts."""
        if process not in self.contexts:
            fault_schedule = self.fault_schedule
            rng = random.Random(f"{process} {fault_schedule.seed}")
            name = process.split("/", maxsplit=1)[0]
            state = DiskStore(
                self.states.setdefault(name, RecordingStore()),
                self.disks.setdefault(name, NodeDisk(self.clock)),
                [fill for fill in fault_schedule.fills if fill.process == process],
            )
            self.contexts[process] = ProcessContext(
                shared_store=FaultyStore(self.store, rng, fault_schedule.rates, delay=0.5, history=self._put_history),
                disk=FaultyStore(state, rng, fault_schedule.state_rates),
                state=state,
                crashes=[process_crash for process_crash in fault_schedule.crashes if process_crash.process == process],
            )
        return self.contexts[process]

    def medium(self, name: str, process: str) -> ObjectStore:
        """Return the shared store with faults, behind the retries of a real node."""
        if name == CHECKER:
            return self.store
        context = self.context(name + process)
        rng = random.Random(f"retries {name}{process} {self.fault_schedule.seed}")
        recorder = AcknowledgementRecorder(
            BoundedStore(RetryingStore(context.shared_store, rng, PATIENCE), MOST_LISTED), context.acknowledgements
        )
        return CrashingStore(recorder, context.trigger) if context.trigger else recorder

    def durable(self, name: str, process: str) -> ObjectStore:
        """Return a node's own state, on a disk that may fail but has no false answers."""
        context = self.context(name + process)
        state = WaitingState(context.disk, self.logs.setdefault(name + process, Log(name + process)))
        return CrashingStore(state, context.trigger) if context.trigger else state

    async def supervise(self, process: str, main: Callable[[], Awaitable[None]]) -> None:
        """Run a process as a supervisor does, and restart it after each crash or failure."""
        while True:
            context = self.context(process)
            self.logs.setdefault(process, Log(process)).event("started")
            outage = _RESTART_SECONDS
            with trio.CancelScope() as scope:
                if context.crashes:
                    process_crash = context.crashes.pop(0)
                    context.trigger = CrashTrigger(
                        lambda operation, path: True, process_crash.operation, process_crash.after, cancelling(scope)
                    )
                    outage += process_crash.outage
                try:
                    await main()
                except* StoreError as group:
                    self.failures.append((process, str(group.exceptions[0])))
            if scope.cancelled_caught:
                self.crashed_processes.append(process)
            context.trigger = None
            await trio.sleep(outage)

    def start_processes(self, nursery: trio.Nursery) -> None:
        """Start all processes, and the faults of the schedule."""
        fault_schedule = self.fault_schedule
        settings = self.trainer_settings(
            groups_per_step=2, anchor_interval=fault_schedule.anchor_interval, keep_patches=fault_schedule.keep_patches
        )
        nursery.start_soon(self.run_beacon)
        for process, main in self.trainer_processes(settings).items():
            nursery.start_soon(self.supervise, "trainer" + process, main)
        for name in self.validators:
            nursery.start_soon(self.supervise, name, partial(self.run_validator, name))
        for name in self.miners:
            nursery.start_soon(self.supervise, name, partial(self.run_miner, name, RULES.groups))
        for cut in fault_schedule.cuts:
            nursery.start_soon(self._cut, cut)
        for jump in fault_schedule.jumps:
            nursery.start_soon(self._jump, jump)

    async def _jump(self, jump: ClockJump) -> None:
        await self.clock.sleep_until(BEGIN + 1.0 + jump.begin)
        self._clocks[jump.node].error_seconds = jump.seconds

    async def _cut(self, cut: LinkCut) -> None:
        await self.clock.sleep_until(BEGIN + 1.0 + cut.begin)
        self.context(cut.process).shared_store.link = cut.link
        await trio.sleep(cut.seconds)
        self.context(cut.process).shared_store.link = Link.OPEN

    def end_faults(self) -> None:
        """End all faults: links are open, storage and clocks are right, and no process crashes."""
        for clock in self._clocks.values():
            clock.error_seconds = 0.0
        for disk in self.disks.values():
            disk.full_until = 0.0
        for context in self.contexts.values():
            context.crashes.clear()
            if context.trigger is not None:
                context.trigger.remaining = _NEVER
            context.shared_store.link = Link.OPEN
            context.shared_store.stop_faults()
            context.disk.stop_faults()

    def trace(self) -> str:
        """Return a digest of all events of all nodes, and of all puts with their times."""
        digest = hashlib.sha256(self.store.trace())
        for name, state in sorted(self.states.items()):
            digest.update(name.encode() + state.trace())
        for name, log in sorted(self.logs.items()):
            digest.update(repr((name, log.events)).encode())
        return digest.hexdigest()


async def run_network(fault_schedule: FaultSchedule) -> FaultyNetwork:
    """Run a network with the faults of a schedule, and return it after its last window."""
    network = FaultyNetwork(fault_schedule)
    async with trio.open_nursery() as nursery:
        network.start_processes(nursery)
        await network.until_window(FAULTY_WINDOWS)
        network.end_faults()
        await network.until_window(WINDOWS)
        nursery.cancel_scope.cancel()
    return network


_CUT_PROCESSES: Final = (*TRAINER, "miner-1", "validator-0")
_HOUR: Final = 3600.0
_CLOCKS: Final = {
    "the trainer's": ("trainer",),
    "the miner's": ("miner-1",),
    "the validator's": ("validator-0",),
    "everybody's": ("trainer", "miner-1", "validator-0"),
}


def _partition(link: Link) -> FaultSchedule:
    return FaultSchedule(cuts=tuple(LinkCut(process, 1.5, 2.5, link) for process in _CUT_PROCESSES))


def _jumps(seconds: float, *nodes: str) -> FaultSchedule:
    return FaultSchedule(jumps=tuple(ClockJump(node, 2.0, seconds) for node in nodes))


SCENARIOS: Final[dict[str, FaultSchedule]] = {
    **{
        f"storage: {fault.value}": FaultSchedule(rates={fault: 0.6 if fault.name.startswith("LIST_") else 0.2})
        for fault in Fault
    },
    "network: partition": _partition(Link.NO_REQUESTS),
    "network: one-way partition": _partition(Link.NO_ANSWERS),
    "disk: errors (ENOSPC, EIO, EMFILE, read-only)": FaultSchedule(state_rates={Fault.ERROR: 0.05}),
    "disk: done, and an error": FaultSchedule(state_rates={Fault.LOST_ANSWER: 0.05}),
    **{f"clock: {name} an hour fast": _jumps(_HOUR, *nodes) for name, nodes in _CLOCKS.items()},
    **{f"clock: {name} an hour slow": _jumps(-_HOUR, *nodes) for name, nodes in _CLOCKS.items()},
    "beacon: late": FaultSchedule(beacon_outage=2.5),
    "beacon: wrong": FaultSchedule(beacon_outage=2.5, beacon_is_false=True),
}
"""The scenarios by name, of a network with one miner and one validator. The adapters turn faults of HTTP into these
faults (tests/store).
"""
