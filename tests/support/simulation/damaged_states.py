"""A simulated network whose nodes have their state on a real disk, as the program has it, what may happen to a file of
a state, and how a node takes it: tests/roles/test_damaged_state.py and bench/state.py.
"""

import random
import shutil
import traceback
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import trio

from grailnode.node.state_care import repair_state
from grailnode.node.user_errors import explain, is_transient
from grailnode.observe.chain_check import verify_chain
from grailnode.observe.ledger_check import verify_ledger
from grailnode.run import authority_drafts
from grailnode.run.rules import Rules
from grailnode.store.state import envelope
from grailnode.store.state.draft import StateDraft
from grailnode.store.state.state_store import StateStore
from protocol import paths
from protocol.errors import ProtocolError
from roles.authority_updates import refresh_authority
from roles.ports import ObjectStore
from tests.support.faults.crash_trigger import CrashingStore, CrashTrigger, cancelling
from tests.support.simulation.faulty_network import RULES
from tests.support.simulation.network import Network, key
from tests.support.simulation.recording_store import RecordingStore
from tests.support.simulation.virtual_clock import TrioClock, running


@dataclass(frozen=True)
class Death:
    """The death of a node just before an operation on its state.

    Attributes:
        operation: "put" or "delete"; prefix: of the object's path.
        count: operations that happen before.
    """

    operation: str
    prefix: str
    count: int = 0

    def trigger(self, scope: trio.CancelScope) -> CrashTrigger:
        """Return a trigger that cancels a scope."""

        def matches(operation: str, path: str) -> bool:
            return operation == self.operation and path.startswith(self.prefix)

        return CrashTrigger(matches, self.count, False, cancelling(scope))


class DiskNetwork(Network):
    """A network with states below a directory.

    Args:
        root: the directory; each node has a directory of its name there.
    """

    def __init__(self, root: Path, rules: Rules, validators: int = 1) -> None:
        super().__init__(rules, validators)
        self.store: RecordingStore = RecordingStore()
        self.root = root
        self.end = 0.0
        """When `live` ended, in seconds since the Unix epoch."""
        self._triggers: dict[str, CrashTrigger] = {}

    def durable(self, name: str, process: str) -> ObjectStore:
        """A node's own state as one of its processes opens it."""
        state = StateStore(self.root / name, self.signed.digest, inline=True)
        return CrashingStore(state, self._triggers[name]) if name in self._triggers else state

    async def role(self, name: str, death: Death | None = None) -> None:
        """Run a node by its name, all of its processes, until one of them fails, or until its death."""
        with trio.CancelScope() as scope:
            if death is not None:
                self._triggers[name] = death.trigger(scope)
            if name == "trainer":
                await self.run_trainer()
            elif name.startswith("validator"):
                await self.run_validator(name)
            else:
                await self.run_miner(name)

    async def live(
        self, until_window: int, names: Sequence[str], deaths: Mapping[str, Death] | None = None, seconds: float = 0.0
    ) -> None:
        """Run the beacon and some nodes until a window has been open for some seconds, then kill them all."""
        async with running(self.run_beacon) as nursery:
            for name in names:
                nursery.start_soon(self.role, name, (deaths or {}).get(name))
            await self.until_window(until_window)
            await trio.sleep(seconds)
        self.end = self.clock.now()
        self._triggers = {}

    def copy(self, root: Path) -> "DiskNetwork":
        """Return a network that goes on where this one ended, with copies of its states and its store.

        It may be called in another run of trio.
        """
        other = DiskNetwork.__new__(DiskNetwork)
        other.__dict__.update(self.__dict__)
        other.root, other.logs, other.clock = root, {}, TrioClock(self.end)
        other.store = self.store.copy()
        shutil.copytree(self.root, root)
        return other


LEARNABLE: Final = RULES.changed(group_size=16)
"""Most groups have right and wrong rollouts, so a trainer makes steps within five windows."""

Damage = Callable[[Path], object]

NODES: Final = ("trainer", "validator-0", "miner-1")

MOMENTS: Final[dict[str, tuple[str, Death] | None]] = {
    "a stop after five windows": None,
    "a kill before a revealed window is forgotten": ("validator-0", Death("delete", "sealed/", 3)),
    "a kill before a manifest is recorded": ("trainer", Death("put", "chain/manifests/", 2)),
    "a kill before the outcomes of a window are logged": ("trainer", Death("put", "outcomes/", 3)),
    "a kill before an anchor is complete": ("trainer", Death("put", "chain/anchors/")),
}
"""When the nodes were stopped: together their states have an object of every kind."""


async def stopped_network(root: Path, moment: str) -> DiskNetwork:
    """Return a network whose nodes were stopped at a moment, with one revision of the authority behind them."""
    network = DiskNetwork(root, LEARNABLE)
    death = MOMENTS[moment]
    founder = network.node("founder", store=network.store)
    draft = authority_drafts.propose(founder.revisions, "a validator more is allowed", quorum=1)
    await network.store.put(paths.revision(founder.run_id, 1), draft.signed_by(key("root")).envelope())
    await network.live(5, NODES, dict([death]) if death else None, seconds=1.3)
    return network


@dataclass(frozen=True)
class StateFile:
    """One file of the state of one node, as it was when the node was stopped.

    Attributes:
        network: stopped at some moment.
        node: whose file it is; path: in its state.
    """

    network: DiskNetwork
    node: str
    path: str

    @property
    def kind(self) -> str:
        """What the file holds, for tables: the folder of the object, or its name."""
        folder = self.path.rpartition("/")[0] or self.path
        return folder.partition("/")[0] if folder.startswith(("weights/", "checkpoints/")) else folder


def files_by_kind(networks: Sequence[DiskNetwork]) -> list[StateFile]:
    """Return the newest file of each kind of each node."""
    files: dict[tuple[str, str], StateFile] = {}
    for network in networks:
        for node in NODES:
            for file in sorted((network.root / node).rglob("*")):
                if file.is_file() and not file.name.endswith(".lock"):
                    state_file = StateFile(network, node, str(file.relative_to(network.root / node)))
                    files[state_file.node, state_file.kind] = state_file
    return [files[place] for place in sorted(files)]


def data_of_file(contents: bytes) -> bytes:
    """Return the data of a whole file, checked against its envelope, whichever object it is."""
    head = envelope.decode(contents, len(contents))
    data = contents[len(contents) - head.length :]
    assert head.digest == envelope.data_digest(data)
    return data


def _without_envelope(file: Path) -> None:
    """As a program without envelopes wrote it."""
    try:
        file.write_bytes(data_of_file(file.read_bytes()))
    except envelope.DamageError:  # the list of names
        file.write_bytes(b"\n".join(line[9:] for line in file.read_bytes().splitlines()))


def _folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


def bend(place: int) -> Damage:
    """Bend one bit, at a place that follows from a number."""

    def bend_bit(file: Path) -> None:
        data = bytearray(file.read_bytes())
        bit = random.Random(f"{place} {file.name}").randrange(8 * len(data))
        data[bit // 8] ^= 1 << bit % 8
        file.write_bytes(data)

    return bend_bit


DAMAGES: Final[dict[str, Damage]] = {
    "cut in half": lambda file: file.write_bytes(file.read_bytes()[: file.stat().st_size // 2]),
    "empty": lambda file: file.write_bytes(b""),
    "zeros": lambda file: file.write_bytes(bytes(file.stat().st_size)),
    "old form": _without_envelope,
    "missing": Path.unlink,
    "a folder": _folder,
}
"""By name, beside bent bits."""


def forbid(file: Path) -> None:
    """Take all rights of a file. The user root may read it all the same."""
    file.chmod(0)


async def repair(network: DiskNetwork, name: str) -> list[str]:
    """Repair the state of a node of a network; return the lines.

    The beacon runs meanwhile, as it does for a real repair.
    """
    lines: list[str] = []
    draft = StateDraft(StateStore(network.root / name, network.signed.digest, inline=True, repairing=True))
    async with running(network.run_beacon):
        await repair_state(replace(network.node(name), state=draft), lines.append)
    return lines


@dataclass(frozen=True)
class Outcome:
    """How a node took it.

    Attributes:
        line: the line with which it ended; None if it went on, and what it published is right.
        fault: what must not happen: a traceback, a restart without end, or something wrong that was published.
    """

    line: str | None = None
    fault: str | None = None


async def outcome(network: DiskNetwork, name: str, windows: int = 2) -> Outcome:
    """Run a network in which the state of one node was damaged, and say how that node took it."""
    errors: list[BaseException] = []

    async def run_damaged() -> None:
        try:
            await network.role(name)
        except Exception as error:  # noqa: BLE001 - the outcome is what is tested
            errors.append(error)

    async with running(network.run_beacon) as nursery:
        nursery.start_soon(run_damaged)
        for other in NODES:
            if other != name:
                nursery.start_soon(network.role, other)
        first = network.run.window_at(network.clock.now())
        for window in range(first + 1, first + 2 + windows):
            await network.until_window(window)
            if errors:
                break
    if errors:
        line = explain(errors[0])
        if line is None:
            return Outcome(fault="".join(traceback.format_exception(errors[0])))
        if "\n" in line:
            return Outcome(fault=f"more than one line: {line}")
        return Outcome(fault=f"started again without end: {line}") if is_transient(errors[0]) else Outcome(line)
    wrong = [text async for text in _wrong(network)]
    return Outcome(fault="; ".join(wrong)) if wrong else Outcome()


async def _wrong(network: DiskNetwork) -> AsyncIterator[str]:
    """Yield what is wrong with what was published."""
    node = network.node("spectator")
    await refresh_authority(node)
    try:
        await verify_chain(node, lambda line: None)
    except ProtocolError as error:
        yield f"chain: {error}"
    try:
        await verify_ledger(node, key("validator-0").public, lambda line: None)
    except ProtocolError as error:
        yield f"ledger: {error}"
