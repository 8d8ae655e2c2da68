"""A small network of real processes that can be started, killed and watched one by one."""

import json
import multiprocessing
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any, Final, Self

from bench.crash_points import Trap, main
from grailnode.calibration import proof_file
from grailnode.config import Config, load
from grailnode.node.processes import Kind, Launch
from grailnode.run import workspace
from grailnode.run.creation import Choices
from tests.support.simulation import small_policy

CHOICES: Final = Choices(groups=4, group_size=4, max_tokens=4, seal_rounds=9, verdict_rounds=16)
PACE: Final = workspace.Pace(
    period_ms=150,
    groups_per_step=2,
    groups=4,
    evaluation_problems=0,
    anchor_interval=3,
    learning_rate=2e-5,
)
PROCESSES: Final[dict[str, tuple[str, Kind]]] = {
    "trainer/beacon": ("trainer", "beacon"),
    "trainer/training": ("trainer", "training"),
    "trainer/upload": ("trainer", "upload"),
    "trainer/download": ("trainer", "download"),
    "validator": ("validator", "validator"),
    "miner-1": ("miner-1", "miner"),
    "miner-2": ("miner-2", "miner"),
}
SIGNS: Final = {
    "trainer/training": "step",
    "trainer/upload": "published",
    "trainer/download": "collected",
    "validator": "verdict",
    "miner-1": "delivered",
    "miner-2": "delivered",
}
"""The event by which a process is known to be at work. The beacon's is everybody else's."""

_POLL_SECONDS: Final = 0.02


@dataclass
class Site:
    """A run's directory, and its processes. Several threads may use it, each for processes of its own."""

    directory: Path
    config: Config
    context: ForkServerContext
    processes: dict[str, ForkServerProcess] = field(default_factory=dict)
    _heard: dict[str, tuple[int, list[dict[str, Any]]]] = field(default_factory=dict)
    _lock: threading.RLock = field(default_factory=threading.RLock)

    @classmethod
    @contextmanager
    def open(cls, directory: Path) -> Iterator[Self]:
        """A network at work, made where there is none; stopped at the end of the block."""
        file = directory / "run.toml"
        if not file.exists():
            directory.mkdir(parents=True, exist_ok=True)
            proof = directory / proof_file.NAME
            proof.write_text(small_policy.proof(small_policy.DIRECTORY).to_json(), encoding="utf-8")
            workspace.create(directory, CHOICES, PACE, policy=small_policy.DIRECTORY, proof=proof, seed=1)
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["grailnode.node.fork_server", "torch", "bench.crash_points"])
        site = cls(directory, load(file, ["trainer.keep_patches=6"]), context)
        try:
            for process in PROCESSES:
                site.start(process)
            site.revive([], 120.0)
            yield site
        finally:
            for process in PROCESSES:
                site.kill(process)

    @property
    def validators(self) -> tuple[str, ...]:
        """Those that judge."""
        return ("validator",)

    def objects(self, kind: str) -> list[Path]:
        """The files of all whole objects of a kind."""
        return whole(self.directory / "store", f"*/{kind}/*")

    def accounts(self) -> list[Path]:
        """The trainer's accounts of windows."""
        return whole(self.directory / "state" / "trainer" / "objects", "outcomes/*")

    def log(self, process: str) -> Path:
        """Where a process writes its events."""
        return self.directory / "logs" / f"{process.replace('/', '-')}.jsonl"

    def now(self) -> float:
        """Seconds on a clock that nobody sets."""
        return time.monotonic()

    def wait(self, seconds: float) -> None:
        """Let the network live for some seconds."""
        time.sleep(seconds)

    def start(self, process: str, trap: Trap | None = None) -> None:
        """Start a process, with a trap or without."""
        name, kind = PROCESSES[process]
        self._run(process, main, Launch(self.config, kind, name, echo=False), trap or Trap())

    def _run(self, process: str, target: Callable[..., None], *arguments: object) -> None:
        with self._lock:
            child = self.context.Process(target=target, args=arguments, name=process, daemon=True)
            child.start()
            self.processes[process] = child

    def kill(self, process: str) -> None:
        """kill -9, and wait until it is gone."""
        child = self.processes[process]
        if child.is_alive():
            child.kill()
        child.join()

    def died(self, process: str, within: float) -> bool:
        """Whether a process that was trapped has died of it in time."""
        self.processes[process].join(within)
        return not self.processes[process].is_alive()

    def restart(self, process: str, trap: Trap | None, within: float) -> float:
        """Start a process that is dead; the seconds until it is at work, infinite where it is not in time."""
        began, mark = self.now(), len(self.events(process, SIGNS[process]))
        self.start(process, trap)
        while self.now() < began + within:
            if len(self.events(process, SIGNS[process])) > mark:
                return self.now() - began
            time.sleep(_POLL_SECONDS)
        return float("inf")

    def revive(self, processes: Sequence[str], within: float) -> float:
        """Start processes again; the seconds until every one of them, and with none named all, is at work."""
        began = self.now()
        marks = {process: len(self.events(process, SIGNS[process])) for process in SIGNS}
        for process in processes:
            self.start(process)
        waiting = {process for process in (processes or SIGNS) if process in SIGNS}
        if "trainer/beacon" in processes:
            waiting.add("miner-1")
        while waiting and self.now() < began + within:
            waiting -= {process for process in waiting if len(self.events(process, SIGNS[process])) > marks[process]}
            time.sleep(_POLL_SECONDS)
        return self.now() - began if not waiting else float("inf")

    def settle(self) -> None:
        """Let every window that was begun be judged and collected."""
        schedule = CHOICES.verdict_rounds + CHOICES.rounds
        self.wait(schedule * PACE.period_ms / 1000 + 1.0)

    def events(self, process: str, name: str = "") -> list[dict[str, Any]]:
        """What a process has said, of one name or in all; a line that a kill cut short is none."""
        with self._lock:
            self._heard[process] = read_on(self.log(process), *self._heard.get(process, (0, [])))
            return [event for event in self._heard[process][1] if not name or event["event"] == name]


def whole(root: Path, pattern: str) -> list[Path]:
    """Files below a directory that are not temporary ones."""
    return [file for file in sorted(root.glob(pattern)) if ".tmp" not in file.parts and file.suffix != ".partial"]


def read_on(file: Path, place: int, seen: list[dict[str, Any]]) -> tuple[int, list[dict[str, Any]]]:
    """A log's events so far, and the byte behind them: those of an earlier look, and what whole lines have come
    since.
    """
    if not file.exists():
        return place, seen
    with file.open("rb") as lines:
        lines.seek(place)
        text = lines.read()
    text = text[: text.rfind(b"\n") + 1]
    return place + len(text), seen + [event for event in map(_parsed, text.splitlines()) if event is not None]


def _parsed(line: bytes) -> dict[str, Any] | None:
    try:
        event: dict[str, Any] = json.loads(line)
    except ValueError:
        return None
    return event
