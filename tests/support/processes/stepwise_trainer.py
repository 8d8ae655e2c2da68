"""A trainer of real processes that gets the next groups when it has published the version before.

The groups of a step do not depend on time, so each version must have the same weights whatever kills the processes.
"""

import os
import random
import signal
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import trio

from grailnode.config import load
from grailnode.run import workspace
from grailnode.store.state.state_store import StateStore
from protocol.chain.manifest import Head, Manifest
from protocol.identity.signing import open_announced
from tests.support.builders.recipes import demo_recipe
from tests.support.builders.verified_batches import GROUPS, put_batch
from tests.support.processes.programs import Program, eventually, members

TRAINER = {"groups_per_step": GROUPS, "anchor_interval": 3, "learning_rate": 1e-4, "warmup_steps": 1}
_MAX_KILLS = 3  # for a version at most, since a trainer that is killed at every start publishes nothing


def make_run(directory: Path) -> Path:
    """Make a run for a trainer alone, and return its directory, which may be copied."""
    return workspace.create(directory, demo_recipe({"trainer": TRAINER})).directory


def trainer_state(directory: Path) -> StateStore:
    """Open the state of the trainer of a run's directory."""
    config = load(directory / "run.toml")
    return StateStore(config.at(config.node.state) / "trainer" / "objects", bytes.fromhex(config.run.id))


class StepwiseTrainer:
    """The trainer of a run's directory.

    Args:
        kills: how many processes to kill with SIGKILL, one after another.
        within: a command that starts it in another environment, and becomes it.
    """

    def __init__(self, directory: Path, seed: int = 0, kills: int = 0, within: tuple[str, ...] = ()) -> None:
        self._within = within
        self._directory = directory
        self._state = trainer_state(directory)
        self._rng = random.Random(seed)
        self._remaining_kills = kills
        self._program = self._start()
        self.kill_counts: Counter[str] = Counter()
        """Numbers of killed processes by title."""

    def publish_versions(
        self,
        versions: int,
        first: int = 0,
        when_published: Callable[[int], object] = lambda number: None,
        anchor: int | None = None,
    ) -> dict[int, str]:
        """Learn and publish versions, and return the digest of each one's weights.

        Args:
            versions: the last version; first: the one that is published already.
            when_published: called with each version but the last, before there are groups for the next.
            anchor: a version whose anchor the last head has to name; anchors are uploaded behind their versions.
        """
        try:
            for number in range(first, versions):
                self._until_published(number)
                when_published(number)
                trio.run(put_batch, self._state, number, number)
            self._until_published(versions, anchor)
            return self._weights()
        finally:
            self._program.end()

    def _start(self) -> Program:
        run = str(self._directory / "run.toml")
        return Program("--role", "trainer", "--run", run, log=self._directory / "trainer.terminal", within=self._within)

    def end(self) -> None:
        self._program.end()

    def kill(self, title: str) -> None:
        """Kill the processes whose titles begin like this."""
        for pid in members(self._program.session):
            if _title(pid).startswith(title):
                os.kill(pid, signal.SIGKILL)

    def _until_published(self, version: int, anchor: int | None = None) -> None:
        kills_for_later_versions = max(0, self._remaining_kills - _MAX_KILLS)

        def is_published() -> bool:
            self._kill_at_random(kills_for_later_versions)
            head = self._head()
            return head is not None and head.version >= version and (anchor is None or anchor in head.anchors)

        eventually(is_published, f"version {version}")

    def _kill_at_random(self, kills_for_later_versions: int) -> None:
        """Kill one of the trainer's processes at random, and restart a killed supervisor, as an init system does."""
        if self._remaining_kills > kills_for_later_versions and self._rng.random() < 0.2:
            self._remaining_kills -= 1
            pid = self._rng.choice(sorted(members(self._program.session)) or [self._program.session])
            self.kill_counts["supervisor" if pid == self._program.session else _title(pid)] += 1
            with suppress(ProcessLookupError):  # it has just ended by itself
                os.kill(pid, signal.SIGKILL)
        if self._program.process.poll() is not None:
            eventually(lambda: not members(self._program.session), "the processes of a dead supervisor end")
            self._program = self._start()

    def _head(self) -> Head | None:
        heads = list((self._directory / "store").glob("*/head"))
        return open_announced(heads[0].read_bytes(), Head).record if heads else None

    def _weights(self) -> dict[int, str]:
        files = (self._directory / "store").glob("*/manifests/*")
        records = [open_announced(file.read_bytes(), Manifest).record for file in files]
        digests = {record.version: record.weights.hex() for record in records}
        assert len(digests) == len(records), "two manifests of one version"
        return digests


def _title(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return "gone"
