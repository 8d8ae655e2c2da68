"""Whether every process of the container's node runs: exit 0, or 1 with one line. For a HEALTHCHECK; the standard
library alone.

What the node is called and which role it has stands on the command line of process 1. Each of a node's processes holds
a lock in its state directory for as long as it lives (grailnode/node/processes.py). Where run.toml gives a
metrics_port, each must also answer /health there, which a process that hangs does not.
"""

import fcntl
import sys
import tomllib
from collections.abc import Sequence
from http.client import HTTPConnection, HTTPException
from pathlib import Path

PROCESSES = {
    "trainer": {"training": 1, "upload": 2, "download": 3},
    "miner": {"miner": 0},
    "validator": {"validator": 0},
}
"""The processes that every node of a role has, and how far behind metrics_port each one's port is."""

_PATIENCE_SECONDS = 3.0


def option(arguments: Sequence[str], name: str) -> str:
    """What follows a flag; empty where the flag is missing."""
    for place, argument in enumerate(arguments):
        if argument == name and place + 1 < len(arguments):
            return arguments[place + 1]
        if argument.startswith(f"{name}="):
            return argument.partition("=")[2]
    return ""


def missing(arguments: Sequence[str], directory: Path) -> list[str]:
    """Names of the processes that do not run, or do not answer.

    Args:
        arguments: of process 1; directory: its working directory.
    """
    role = option(arguments, "--role")
    name = option(arguments, "--name") or ("miner-1" if role == "miner" else role)
    states, port = _node(option(arguments, "--run"), directory)
    return [
        f"{name}/{kind}"
        for kind, offset in PROCESSES[role].items()
        if not held(states / name / f".{kind}.lock") or (port and not answers(port + offset))
    ]


def held(lock: Path) -> bool:
    """Whether a process holds a lock."""
    try:
        with lock.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except FileNotFoundError:
        return False
    return False


def answers(port: int) -> bool:
    """Whether a process serves /health at a port of this machine."""
    connection = HTTPConnection("127.0.0.1", port, timeout=_PATIENCE_SECONDS)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except (OSError, HTTPException):
        return False
    finally:
        connection.close()


def _node(run: str, directory: Path) -> tuple[Path, int]:
    """The states' directory and the metrics_port of a run.toml; of a run that is named by its URL, the one here and
    none.
    """
    if run.startswith(("https://", "http://")):
        return directory / "state", 0
    file = directory / run
    section = tomllib.loads(file.read_text(encoding="utf-8")).get("node", {})
    return file.parent / section.get("state", "state"), section.get("metrics_port", 0)


def main() -> int:
    """The check on process 1 of this container."""
    arguments = Path("/proc/1/cmdline").read_bytes().decode(errors="replace").split("\0")
    if not option(arguments, "--role"):
        return 0  # a command, not a node
    absent = missing(arguments, Path.cwd())
    if absent:
        sys.stderr.write(f"not running: {', '.join(absent)}\n")
    return 1 if absent else 0


if __name__ == "__main__":
    sys.exit(main())
