"""Real programs: started in a session of their own, so that everything they leave behind can be found."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

ROOT = Path(__file__).parents[3]
PATIENCE: Final = 300.0
"""Seconds to wait for anything that takes a few seconds on an idle machine; a busy one may be many times slower."""
# As at a user's: unbuffered streams hide what a full one keeps.
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"} | {
    "OMP_NUM_THREADS": "1"
}


class Program:
    """One `grailnode` command as a process group of its own; `within` is a command that starts it elsewhere, and
    becomes it.
    """

    def __init__(self, *arguments: str, log: Path, within: tuple[str, ...] = ()) -> None:
        self.log = log
        with log.open("ab") as output:
            self.process = subprocess.Popen(
                [*within, sys.executable, "-m", "grailnode", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                env=ENVIRONMENT,
            )

    @property
    def session(self) -> int:
        return self.process.pid

    def kill(self) -> None:
        """kill -9, of the program itself and of nothing that it started."""
        self.process.kill()
        self.process.wait()

    def interrupt(self) -> None:
        """Ctrl-C: SIGINT to the whole foreground group, as a terminal sends it."""
        os.killpg(self.session, signal.SIGINT)

    def wait(self, seconds: float = PATIENCE) -> int:
        """Wait for the program's end, and return its exit code."""
        return self.process.wait(seconds)

    def end(self) -> None:
        """Whatever state it is in: leave nothing of it behind."""
        for pid in members(self.session):
            os.kill(pid, signal.SIGKILL)
        self.process.wait()


def members(session: int) -> list[int]:
    """Process ids of a session that are alive, the newest last: ids begin anew when they have run out."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue  # it has just ended
            if int(fields[3]) == session and fields[0] != "Z":
                found.append((int(fields[19]), int(entry.name)))  # ticks since the machine started
    return [pid for _, pid in sorted(found)]


def eventually(condition: Callable[[], bool], description: str, *, seconds: float = PATIENCE) -> None:
    """Wait until a condition holds.

    Raises:
        AssertionError: the condition did not hold within so many seconds.
    """
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"not within {seconds} s: {description}"
        time.sleep(0.1)


def run_program(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """A short command, to its end."""
    return subprocess.run(
        [sys.executable, "-m", "grailnode", *arguments],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=2 * PATIENCE,
        env=ENVIRONMENT | ({"PYTHONPATH": str(ROOT)} if cwd else {}),
        check=False,
        cwd=cwd,
    )
