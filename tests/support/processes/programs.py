"""Programs as real processes, each in a session of its own, so that all of its processes can be listed."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

ROOT = Path(__file__).parents[3]
PATIENCE: Final = 300.0
"""Seconds to wait for anything that takes a few seconds on an idle machine; a busy one may be many times slower."""
# As for a user, streams are buffered: unbuffered ones would hide an output that is never flushed.
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"} | {
    "OMP_NUM_THREADS": "1"
}


class Program:
    """A `grailnode` command in a session of its own.

    Args:
        module: another one that is run instead of `grailnode`.
        within: a command that starts it in another environment, and becomes it.
        cwd: its working directory; the current one without it.
    """

    def __init__(
        self,
        *arguments: str,
        log: Path,
        within: tuple[str, ...] = (),
        cwd: Path | None = None,
        module: str = "grailnode",
    ) -> None:
        self.log = log
        with log.open("ab") as output:
            self.process = subprocess.Popen(
                [*within, sys.executable, "-m", module, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                env=_environment(cwd),
                cwd=cwd,
            )

    @property
    def session(self) -> int:
        return self.process.pid

    def kill(self) -> None:
        """Kill the program itself with SIGKILL, and none of its children."""
        self.process.kill()
        self.process.wait()

    def interrupt(self) -> None:
        """Send SIGINT to the whole process group, as a terminal does for Ctrl-C."""
        os.killpg(self.session, signal.SIGINT)

    def wait(self, seconds: float = PATIENCE) -> int:
        """Wait for the program's end, and return its exit code."""
        return self.process.wait(seconds)

    def end(self) -> None:
        """Kill all processes of the session."""
        for pid in members(self.session):
            with suppress(ProcessLookupError):  # it may have ended by now
                os.kill(pid, signal.SIGKILL)
        self.process.wait()


def members(session: int) -> list[int]:
    """Return the ids of a session's live processes in the order of their start."""
    start_times_and_ids = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue  # it has just ended
            if int(fields[3]) == session and fields[0] != "Z":
                start_times_and_ids.append((int(fields[19]), int(entry.name)))  # ticks since the machine started
    return [pid for _, pid in sorted(start_times_and_ids)]


def _environment(cwd: Path | None) -> dict[str, str]:
    """Return the environment of a program: one in another directory finds this repository, too."""
    paths = (str(ROOT) if cwd else "", ENVIRONMENT.get("PYTHONPATH", ""))
    return ENVIRONMENT | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}


def eventually(condition: Callable[[], bool], description: str, *, seconds: float = PATIENCE) -> None:
    """Wait until a condition holds."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"not within {seconds} s: {description}"
        time.sleep(0.1)


def logged_events(file: Path, event: str) -> list[dict[str, Any]]:
    """Return the events of a name in a log, without a line that a kill has cut short."""
    lines = file.read_text().splitlines() if file.exists() else []
    events = [json.loads(line) for line in lines if line.endswith("}")]
    return [item for item in events if item["event"] == event]


def run_program(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a short command, and return its result."""
    return subprocess.run(
        [sys.executable, "-m", "grailnode", *arguments],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=2 * PATIENCE,
        env=ENVIRONMENT,
        check=False,
    )


def exit_with(counter: Path, codes: list[int]) -> None:
    """Count a start, and end this process with the exit code for it; the last one is for all later starts.

    It stands here, and not beside its tests, so that each process imports nothing else.
    """
    starts = counter.stat().st_size if counter.exists() else 0
    with counter.open("a") as file:
        file.write(".")
    sys.exit(codes[min(starts, len(codes) - 1)])
