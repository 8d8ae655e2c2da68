"""A trainer of real processes that is fed by hand: the next groups come when the version before is published.

So what is learned from when does not depend on time, and whatever kills its processes, each version has to have the
same weights.
"""

import os
import random
import signal
from collections import Counter
from contextlib import suppress
from pathlib import Path

import trio

from grailnode.config import load
from grailnode.run import workspace
from grailnode.run.creation import Choices
from grailnode.store.local import LocalStore
from protocol.chain.manifest import Head, Manifest
from protocol.identity.signing import open_announced
from roles.trainer.spool import INBOX
from tests.support.builders.verified_batches import GROUPS, verified_batch
from tests.support.processes.programs import Program, eventually, members

PACE = workspace.Pace(groups_per_step=GROUPS, anchor_interval=3, learning_rate=1e-4, warmup_steps=1)
_DEATHS = 3  # for a version at most: who dies while it starts, again and again, comes to nothing


def make(directory: Path) -> Path:
    """A run for a trainer alone: its directory, which may be copied."""
    return workspace.create(directory, Choices(), PACE).directory


class FedTrainer:
    """The trainer of a run's directory.

    Args:
        kills: how many processes to kill with SIGKILL, one after another, while it lives.
    """

    def __init__(self, directory: Path, seed: int = 0, kills: int = 0) -> None:
        self._directory = directory
        self._config = load(directory / "run.toml")
        self._state = LocalStore(self._config.at(self._config.node.state) / "trainer" / "objects")
        self._chance = random.Random(seed)
        self._left = kills
        self._program = self._started()
        self.killed: Counter[str] = Counter()
        """Processes by what they were."""

    def live(self, versions: int) -> dict[int, str]:
        """Learn and publish so many versions; the digest of each one's weights."""
        try:
            for number in range(versions):
                self._until_published(number)
                trio.run(self._state.put, f"{INBOX}{number:010d}-x", verified_batch(number, version=number).to_bytes())
            self._until_published(versions)
            return self._weights()
        finally:
            self._program.end()

    def _started(self) -> Program:
        run = str(self._directory / "run.toml")
        return Program("--role", "trainer", "--run", run, log=self._directory / "trainer.terminal")

    def _until_published(self, version: int) -> None:
        enough = max(0, self._left - _DEATHS)

        def is_published() -> bool:
            self._strike(enough)
            return self._head() >= version

        eventually(is_published, f"version {version}")

    def _strike(self, enough: int) -> None:
        """Now and then, kill one of the trainer's processes; where that was the supervisor, start again as an init
        system would.
        """
        if self._left > enough and self._chance.random() < 0.2:
            self._left -= 1
            pid = self._chance.choice(sorted(members(self._program.session)) or [self._program.session])
            self.killed["supervisor" if pid == self._program.session else _title(pid)] += 1
            with suppress(ProcessLookupError):  # it has just ended by itself
                os.kill(pid, signal.SIGKILL)
        if self._program.process.poll() is not None:
            eventually(lambda: not members(self._program.session), "the processes of a dead supervisor end")
            self._program = self._started()

    def _head(self) -> int:
        heads = list((self._directory / "store").glob("*/head"))
        return open_announced(heads[0].read_bytes(), Head).record.version if heads else -1

    def _weights(self) -> dict[int, str]:
        files = (self._directory / "store").glob("*/manifests/*")
        records = [open_announced(file.read_bytes(), Manifest).record for file in files]
        digests = {record.version: record.weights.hex() for record in records}
        assert len(digests) == len(records), "two manifests of one version"
        return digests


def _title(pid: int) -> str:
    """What a process calls itself."""
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return "gone"
