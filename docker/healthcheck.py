"""The HEALTHCHECK of the images: checks that every process of the container's node runs. Imports the standard library
only.

The exit code is 0, or 1 with one line that names the processes that do not run. The name and the role of the node are
on the command line of process 1. Each process of a node locks a file in the state directory while it lives
(grailnode/node/processes.py). If run.toml sets metrics_port, each process must also answer /health on its port, which a
process that hangs does not.
"""

import fcntl
import sys
import tomllib
from collections.abc import Sequence
from http.client import HTTPConnection, HTTPException
from pathlib import Path

PROCESSES = {
    "trainer": {"training": 1, "upload": 2, "download": 3},
    "worker": {"site": 0},
    "miner": {"miner": 0},
    "validator": {"validator": 0},
}
"""The processes of each role's nodes, and what to add to metrics_port for the port of each."""

COORDINATOR = {"coordinator": 6}
"""The same for a trainer whose sites train."""

_ANSWER_SECONDS = 3.0


def option(arguments: Sequence[str], name: str) -> str:
    """Return the value of an option; empty when the option is missing."""
    for place, argument in enumerate(arguments):
        if argument == name and place + 1 < len(arguments):
            return arguments[place + 1]
        if argument.startswith(f"{name}="):
            return argument.partition("=")[2]
    return ""


def absent_processes(arguments: Sequence[str], directory: Path) -> list[str]:
    """Return the names of the node's processes that do not run or do not answer.

    Args:
        arguments: the command line of process 1.
        directory: its working directory.
    """
    role = option(arguments, "--role")
    name = option(arguments, "--name") or (f"{role}-1" if role in ("miner", "worker") else role)
    states, port, has_sites = _node_settings(option(arguments, "--run"), directory)
    processes = COORDINATOR if role == "trainer" and has_sites else PROCESSES[role]
    return [
        f"{name}/{kind}"
        for kind, offset in processes.items()
        if not is_locked(states / name / f".{kind}.lock") or (port and not answers(port + offset))
    ]


def is_locked(lock: Path) -> bool:
    """Return whether a process has locked a file."""
    try:
        with lock.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except FileNotFoundError:
        return False
    return False


def answers(port: int) -> bool:
    """Return whether a process of this machine answers /health on a port."""
    connection = HTTPConnection("127.0.0.1", port, timeout=_ANSWER_SECONDS)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except (OSError, HTTPException):
        return False
    finally:
        connection.close()


def _node_settings(run: str, directory: Path) -> tuple[Path, int, bool]:
    """Return the directory of the nodes' states, the metrics_port (0 for none), and whether the run has sites.

    Args:
        run: a run.toml, or the URL of a run, which is joined without a run.toml.
    """
    if run.startswith(("https://", "http://")):
        return directory / "state", 0, False
    file = directory / run
    sections = tomllib.loads(file.read_text(encoding="utf-8"))
    section = sections.get("node", {})
    has_sites = "outer" in sections.get("trainer", {})
    return file.parent / section.get("state", "state"), section.get("metrics_port", 0), has_sites


def main() -> int:
    """Check process 1 of this container, and return the exit code."""
    arguments = Path("/proc/1/cmdline").read_bytes().decode(errors="replace").split("\0")
    if not option(arguments, "--role"):
        return 0  # process 1 is a command, not a node
    absent = absent_processes(arguments, Path.cwd())
    if absent:
        sys.stderr.write(f"not running: {', '.join(absent)}\n")
    return 1 if absent else 0


if __name__ == "__main__":
    sys.exit(main())
