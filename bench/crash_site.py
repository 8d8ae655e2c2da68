"""A small network of real processes that can be started, killed and observed one by one."""

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

from bench.crash_points import KillPlan, main
from grailnode.calibration import proof_file
from grailnode.config import Config, load
from grailnode.node.process_launch import Kind, Launch
from grailnode.run import workspace
from tests.support.builders.recipes import demo_recipe
from tests.support.simulation import small_policy

RECIPE: Final = demo_recipe(
    {
        "trainer": {"groups_per_step": 2, "anchor_interval": 3, "learning_rate": 2e-5},
        "miner": {"groups": 4},
        "validator": {"evaluate": False},
    },
    groups=4, group_size=4, max_tokens=4, seal_rounds=9, verdict_rounds=16, deposit=0.0, window=1.2,
)  # fmt: skip
PROCESSES: Final[dict[str, tuple[str, Kind]]] = {
    "trainer/beacon": ("trainer", "beacon"),
    "trainer/training": ("trainer", "training"),
    "trainer/upload": ("trainer", "upload"),
    "trainer/download": ("trainer", "download"),
    "validator": ("validator", "validator"),
    "miner-1": ("miner-1", "miner"),
    "miner-2": ("miner-2", "miner"),
}
READY_EVENTS: Final = {
    "trainer/training": "step",
    "trainer/upload": "published",
    "trainer/download": "collected",
    "validator": "verdict",
    "miner-1": "delivered",
    "miner-2": "delivered",
}
"""The event that a process logs once it works. The beacon has none: it works if the other processes do."""

_POLL_SECONDS: Final = 0.02


@dataclass
class ProcessNetwork:
    """A run's directory and its processes. Several threads may use it, each for other processes."""

    directory: Path
    config: Config
    context: ForkServerContext
    processes: dict[str, ForkServerProcess] = field(default_factory=dict)
    _events: dict[str, tuple[int, list[dict[str, Any]]]] = field(default_factory=dict)
    _lock: threading.RLock = field(default_factory=threading.RLock)

    @classmethod
    @contextmanager
    def open(cls, directory: Path) -> Iterator[Self]:
        """Start the network of a directory and stop it at the end of the block.

        A new run is created if the directory has none.
        """
        file = directory / "run.toml"
        if not file.exists():
            directory.mkdir(parents=True, exist_ok=True)
            proof = directory / proof_file.NAME
            proof.write_text(small_policy.proof_of(small_policy.DIRECTORY).to_json(), encoding="utf-8")
            workspace.create(directory, RECIPE, policy=small_policy.DIRECTORY, proof=proof, seed=1)
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["grailnode.node.fork_server", "torch", "bench.crash_points"])
        network = cls(directory, load(file, ["trainer.keep_patches=6"]), context)
        try:
            for process in PROCESSES:
                network.start(process)
            network.start_and_wait([], 120.0)
            yield network
        finally:
            for process in PROCESSES:
                network.kill(process)

    @property
    def validators(self) -> tuple[str, ...]:
        """The names of the validators' processes."""
        return ("validator",)

    @property
    def repaired_windows(self) -> tuple[int, ...]:
        """No state is repaired here."""
        return ()

    def objects(self, kind: str) -> list[Path]:
        """Return the files of all complete objects of a kind."""
        return complete_files(self.directory / "store", f"*/{kind}/*")

    def outcome_log_files(self) -> list[Path]:
        """Return the files in which the trainer records the outcomes of groups."""
        return complete_files(self.directory / "state" / "trainer" / "objects", "outcomes/*")

    def log(self, process: str) -> Path:
        """Return the file to which a process logs its events."""
        return self.directory / "logs" / f"{process.replace('/', '-')}.jsonl"

    def now(self) -> float:
        """Return the time of a monotonic clock in seconds."""
        return time.monotonic()

    def wait(self, seconds: float) -> None:
        """Let the network run for some seconds."""
        time.sleep(seconds)

    def start(self, process: str, plan: KillPlan | None = None) -> None:
        """Start a process, with a plan to kill itself or without."""
        name, kind = PROCESSES[process]
        self._run(process, main, Launch(self.config, kind, name, echo=False), plan or KillPlan())

    def _run(self, process: str, target: Callable[..., None], *arguments: object) -> None:
        with self._lock:
            handle = self.context.Process(target=target, args=arguments, name=process, daemon=True)
            handle.start()
            self.processes[process] = handle

    def kill(self, process: str) -> None:
        """Kill a process with SIGKILL and wait until it has ended."""
        handle = self.processes[process]
        if handle.is_alive():
            handle.kill()
        handle.join()

    def wait_for_death(self, process: str, within: float) -> bool:
        """Wait for a process to kill itself, and return whether it did so within some seconds."""
        self.processes[process].join(within)
        return not self.processes[process].is_alive()

    def restart(self, process: str, plan: KillPlan | None, within: float) -> float:
        """Start a process that has ended.

        Returns:
            The seconds until it logs its ready event; infinity if it does not within `within` seconds.
        """
        start_time, count = self.now(), len(self.events(process, READY_EVENTS[process]))
        self.start(process, plan)
        while self.now() < start_time + within:
            if len(self.events(process, READY_EVENTS[process])) > count:
                return self.now() - start_time
            time.sleep(_POLL_SECONDS)
        return float("inf")

    def start_and_wait(self, processes: Sequence[str], within: float) -> float:
        """Start some processes and wait for their ready events; without any names, wait for those of all processes.

        Returns:
            The seconds until all of them have logged it; infinity if they have not within `within` seconds.
        """
        start_time = self.now()
        counts = {process: len(self.events(process, READY_EVENTS[process])) for process in READY_EVENTS}
        for process in processes:
            self.start(process)
        pending = {process for process in (processes or READY_EVENTS) if process in READY_EVENTS}
        if "trainer/beacon" in processes:
            pending.add("miner-1")
        while pending and self.now() < start_time + within:
            pending = {name for name in pending if len(self.events(name, READY_EVENTS[name])) <= counts[name]}
            time.sleep(_POLL_SECONDS)
        return self.now() - start_time if not pending else float("inf")

    def wait_for_open_windows(self) -> None:
        """Wait until every window that has begun is judged and collected."""
        rules = RECIPE.rules
        assert rules.window is not None
        self.wait((rules.verdict_rounds / rules.rounds + 1) * rules.window + 1.0)

    def events(self, process: str, name: str = "") -> list[dict[str, Any]]:
        """Return the events that a process has logged, those of one name or all.

        A line that a kill has cut short is skipped.
        """
        with self._lock:
            self._events[process] = read_new_events(self.log(process), *self._events.get(process, (0, [])))
            return [event for event in self._events[process][1] if not name or event["event"] == name]


def complete_files(root: Path, pattern: str) -> list[Path]:
    """Return the files below a directory that match a pattern, without temporary ones."""
    return [file for file in sorted(root.glob(pattern)) if ".tmp" not in file.parts and file.suffix != ".partial"]


def read_new_events(file: Path, offset: int, earlier_events: list[dict[str, Any]]) -> tuple[int, list[dict[str, Any]]]:
    """Read the complete lines that a log has got since an earlier call.

    Args:
        file: the log.
        offset: where the earlier call has stopped, in bytes.
        earlier_events: the events that it has returned.

    Returns:
        The offset behind the last complete line, and all events so far.
    """
    if not file.exists():
        return offset, earlier_events
    with file.open("rb") as lines:
        lines.seek(offset)
        text = lines.read()
    text = text[: text.rfind(b"\n") + 1]
    return offset + len(text), earlier_events + [event for event in map(_parse, text.splitlines()) if event is not None]


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        event: dict[str, Any] = json.loads(line)
    except ValueError:
        return None
    return event
