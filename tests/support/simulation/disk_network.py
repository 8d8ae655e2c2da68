"""A simulated network whose nodes have their state on a real disk, as the program has it."""

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import trio

from grailnode.run.rules import Rules
from grailnode.store.state.state_store import StateStore
from roles.ports import ObjectStore
from tests.support.faults.crash_trigger import CrashingStore, CrashTrigger, cancelling
from tests.support.simulation.network import Network
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
