"""Bent bits in the states of killed nodes, for bench/soak.py: a node goes on, or ends with one line and is repaired."""

import random
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from grailnode.store.checks import is_path
from protocol import paths
from protocol.errors import MalformedError
from tests.support.processes.programs import ENVIRONMENT, PATIENCE
from tests.support.processes.separate_buckets import Machines
from tests.support.simulation.damaged_states import bend

_REPAIR_ATTEMPTS: Final = 5  # storage has faults as well
_PAUSE_SECONDS: Final = 5.0
_OPEN_WINDOWS: Final = 8  # of which a repair of the collector gives up the groups


@dataclass
class BentStates:
    """The states in which a bit was bent.

    Attributes:
        machines: the nodes.
        bent_files: by node, the file in which a bit was bent and that the node has not noticed yet, and the length of
            the node's terminal output before.
        counts: how many bits were bent, in files that a node named in its last line; the others did no harm.
        problems: a line for each node that ended otherwise, and for each state that could not be repaired.
        repaired_windows: windows whose groups a repair of the trainer's state has given up.
    """

    machines: Machines
    bent_files: dict[str, tuple[Path, int]] = field(default_factory=dict)
    bit_count: int = 0
    refusal_count: int = 0
    problems: list[str] = field(default_factory=list)
    repaired_windows: set[int] = field(default_factory=set)
    _place: int = 0

    def bend_one(self, name: str, rng: random.Random) -> str:
        """Kill a node, bend a bit of one of its files, and start it again; return the file's path in the state."""
        self.machines.programs[name].end()
        objects = self.machines.directory / name / "state" / name / "objects"
        by_kind: dict[str, list[Path]] = {}
        for file in sorted(objects.rglob("*")):
            path = str(file.relative_to(objects))
            if file.is_file() and (is_path(path) or path == ".names"):
                by_kind.setdefault(path.rpartition("/")[0] or path, []).append(file)
        file = rng.choice(by_kind[rng.choice(sorted(by_kind))])
        self._place += 1
        bend(self._place)(file)
        self.bit_count += 1
        self.bent_files[name] = file, self._terminal(name).stat().st_size
        self.machines.start(name)
        return str(file.relative_to(objects))

    def take_end(self, name: str) -> str:
        """Say what the end of a node has to do with its bent file, and repair its state if it named the file."""
        code = self.machines.programs[name].process.returncode
        if name not in self.bent_files or code == -signal.SIGKILL:
            return "" if code == -signal.SIGKILL else f"{name} ended by itself (exit code {code})"
        file, size = self.bent_files[name]
        output = self._terminal(name).read_bytes()[size:].decode(errors="replace")
        lines = [line for line in output.splitlines() if str(file) in line]
        if "Traceback" in output:
            self.problems.append(f"{name}, {file}: a traceback")
        if not lines or code != 1:
            return f"{name} ended by itself (exit code {code}), not because of {file.name}"
        if "`grailnode repair`" not in lines[0] or "starting it again" in output:
            self.problems.append(f"{name}, {file}: {lines[0]}")
        del self.bent_files[name]
        self.refusal_count += 1
        return self._repair(name, file)

    def _repair(self, name: str, file: Path) -> str:
        run = str(self.machines.directory / name / "run.toml")
        command = [sys.executable, "-m", "grailnode", "repair", "--run", run, "--name", name]
        for _ in range(_REPAIR_ATTEMPTS):
            result = subprocess.run(
                command, capture_output=True, text=True, timeout=PATIENCE, env=ENVIRONMENT, check=False
            )
            if result.returncode == 0:
                self._note_windows(result.stdout)
                return f"{name} named {file.name} and was repaired: " + "; ".join(result.stdout.splitlines()[:-1])
            time.sleep(_PAUSE_SECONDS)
        self.problems.append(f"{name}, {file}: not repaired: {result.stderr.strip()}")
        return self.problems[-1]

    def _note_windows(self, output: str) -> None:
        """Note the windows of which the trainer does not train on the groups any more."""
        for line in output.splitlines():
            match = re.search(r"verdicts count from window (\d+) on", line)
            if match:
                self.repaired_windows |= set(range(int(match[1]) - _OPEN_WINDOWS, int(match[1])))
            elif line.startswith(("outcomes/", "intents/")):
                self.repaired_windows.add(paths.window_of(line.partition(":")[0]))

    def harmless_outcomes(self) -> None:
        """Leave windows out of the check of outcomes whose outcome log is bent and is not read any more."""
        for file, _ in self.bent_files.values():
            try:
                self.repaired_windows.add(paths.window_of(file.name))
            except MalformedError:
                continue

    def _terminal(self, name: str) -> Path:
        return self.machines.directory / f"{name}.terminal"
