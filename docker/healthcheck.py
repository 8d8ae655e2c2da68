"""Whether every process of the container's node runs: exit 0, or 1 with one line. For a HEALTHCHECK; the standard library alone.

What the node is called and which role it has stands on the command line of process 1. Each of a node's processes holds a lock
in its state directory for as long as it lives (grailnode/node_process.py), so nobody has to be asked and nothing is written.
"""

import fcntl
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path

PROCESSES = {
    "trainer": ("training", "upload", "download"),
    "miner": ("miner",),
    "validator": ("validator",),
}
"""The processes that every node of a role has."""


def option(arguments: Sequence[str], name: str) -> str:
    """What follows a flag; empty where the flag is missing."""
    for place, argument in enumerate(arguments):
        if argument == name and place + 1 < len(arguments):
            return arguments[place + 1]
        if argument.startswith(f"{name}="):
            return argument.partition("=")[2]
    return ""


def missing(arguments: Sequence[str], directory: Path) -> list[str]:
    """Names of the processes that do not run.

    Args:
        arguments: of process 1; directory: its working directory.
    """
    role = option(arguments, "--role")
    name = option(arguments, "--name") or ("miner-1" if role == "miner" else role)
    state = _state(option(arguments, "--run"), directory) / name
    return [f"{name}/{kind}" for kind in PROCESSES[role] if not held(state / f".{kind}.lock")]


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


def _state(run: str, directory: Path) -> Path:
    """The state directory of a run.toml; of a run that is named by its URL, the one here."""
    if run.startswith(("https://", "http://")):
        return directory / "state"
    file = directory / run
    return file.parent / tomllib.loads(file.read_text(encoding="utf-8")).get("node", {}).get("state", "state")


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
