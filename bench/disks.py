"""Disks that fail under real processes: `python -m bench.disks --seconds 20`.

The network of bench/crash_site.py, in which the trainer, the validator and the first miner each have a disk of their
own for state, keys' neighbours and logs. One disk after another is full, becomes read-only, or reports errors when it
is written; or the node's processes may open no more files. As long as that lasts, they may do what they can, and say in
a clear line what is wrong; what ends is started again. When it is over, all of the node's processes have to be at work
within --within seconds; at last the whole history is judged (bench/crash_audit.py).

A full disk is a small tmpfs, a read-only one a mount, open files are limited from outside (prlimit); errors (EIO) are
raised in the place of os.write and os.fsync, as no disk here can be made to fail in that way. Runs in a mount namespace
of its own.
"""

import argparse
import errno
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from bench.crash_audit import audit
from bench.crash_points import Trap
from bench.crash_site import PROCESSES, SIGNS, Site, whole
from grailnode.node import processes
from grailnode.node.processes import Launch

NODES: Final = ("trainer", "validator", "miner-1")
_DISK: Final = "size=64m,nr_inodes=20k"
_LOOK_SECONDS: Final = 0.5
_INSIDE: Final = "GRAILNODE_BENCH_DISKS"


@dataclass(frozen=True)
class Trouble:
    """What may be wrong with a node's disk.

    Attributes:
        begin: makes it so, given the disk's directory and the node's process ids; a function that ends it.
        words: of the line that says so.
    """

    begin: Callable[[Path, list[int]], Callable[[], None]]
    words: str


def _full(disk: Path, _pids: list[int]) -> Callable[[], None]:
    filler = disk / "filler"
    with filler.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(1 << 12))
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
    return filler.unlink


def _read_only(disk: Path, _pids: list[int]) -> Callable[[], None]:
    _run("mount", "--bind", str(disk), str(disk))  # one more, as nobody has a file open through it
    _run("mount", "-o", "remount,bind,ro", str(disk))
    return lambda: _run("umount", "--lazy", str(disk))


def _no_files(_disk: Path, pids: list[int]) -> Callable[[], None]:
    """As many files as are open for good, and not one more."""
    before = {}
    for pid in pids:
        before[pid] = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (_first_free(pid), before[pid][1]))

    def end() -> None:
        for pid, limits in before.items():
            with suppress(ProcessLookupError):  # it ended, and was started again without the limit
                resource.prlimit(pid, resource.RLIMIT_NOFILE, limits)

    return end


def _first_free(pid: int) -> int:
    """The lowest descriptor that a process has free at some time in half a second."""
    lowest = 1 << 20
    for _ in range(50):
        taken = {int(entry.name) for entry in Path(f"/proc/{pid}/fd").iterdir()}
        lowest = min(lowest, *(set(range(len(taken) + 1)) - taken))
        time.sleep(0.01)
    return lowest


def _errors(disk: Path, _pids: list[int]) -> Callable[[], None]:
    flag = disk.with_suffix(".fails")
    flag.touch()
    return flag.unlink


TROUBLES: Final = {
    "ENOSPC": Trouble(_full, "no space left"),
    "read-only": Trouble(_read_only, "read-only"),
    "EMFILE": Trouble(_no_files, "too many open files"),
    "EIO": Trouble(_errors, "input/output error"),
}


class Disks(Site):
    """The network of the crash bench with a disk for each node."""

    def start(self, process: str, trap: Trap | None = None) -> None:
        """Start a process, its node's files on its own disk."""
        name, kind = PROCESSES[process]
        disk = self.disk(name)
        node = self.config.node.model_copy(update={"state": disk / "state", "logs": disk / "logs"})
        launch = Launch(self.config.model_copy(update={"node": node}), kind, name, echo=True)
        self._run(process, _live, launch, self.terminal(process), disk)

    def disk(self, name: str) -> Path:
        """Where a node's disk is mounted."""
        return self.directory / "disks" / name

    def terminal(self, process: str) -> Path:
        """What a process has said on its terminal, on a disk without trouble."""
        return self.directory / f"{process.replace('/', '-')}.terminal"

    def log(self, process: str) -> Path:
        """Where a process writes its events."""
        return self.disk(PROCESSES[process][0]) / "logs" / f"{process.replace('/', '-')}.jsonl"

    def accounts(self) -> list[Path]:
        """The trainer's accounts of windows."""
        return whole(self.disk("trainer") / "state" / "trainer" / "objects", "outcomes/*")

    def ended(self, node: str) -> list[str]:
        """The processes of a node that are not running."""
        own = [process for process, (name, _) in PROCESSES.items() if name == node]
        return [process for process in own if not self.processes[process].is_alive()]

    def suffer(self, node: str, trouble: Trouble, seconds: float, within: float) -> tuple[int, list[str], float]:
        """Let a node have a trouble for some seconds.

        Returns:
            How many times one of its processes ended, what all said on their terminals, and the seconds until all were
            at work.
        """
        own = [process for process, (name, _) in PROCESSES.items() if name == node]
        begins = {process: self.terminal(process).stat().st_size for process in own}
        pids = [pid for process in own if (pid := self.processes[process].pid) is not None]
        end = trouble.begin(self.disk(node), pids)
        over = self.now() + seconds
        ends = 0
        while self.now() < over:
            ends += self._restart(node)
            self.wait(_LOOK_SECONDS)
        end()
        began = self.now()
        waiting = {process: len(self.events(process, SIGNS[process])) for process in own if process in SIGNS}
        while waiting and self.now() < began + within:
            ends += self._restart(node)
            self.wait(_LOOK_SECONDS)
            waiting = {p: mark for p, mark in waiting.items() if len(self.events(p, SIGNS[p])) <= mark}
        said = [self.terminal(process).read_bytes()[begins[process] :].decode(errors="replace") for process in own]
        lines = [line for text in said for line in text.splitlines()]
        return ends, lines, float("inf") if waiting else self.now() - began

    def _restart(self, node: str) -> int:
        ended = self.ended(node)
        for process in ended:
            self.start(process)
        return len(ended)


def _live(launch: Launch, terminal: Path, disk: Path) -> None:
    """A node's process whose disk may report errors."""
    descriptor = os.open(terminal, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    for name in ("write", "fsync"):
        setattr(os, name, _failing(getattr(os, name), disk))
    processes.main(launch)


def _failing(function: Callable[..., Any], disk: Path) -> Callable[..., Any]:
    flag, below = disk.with_suffix(".fails"), f"{disk}/"

    def called(descriptor: int, *arguments: Any) -> Any:
        if flag.exists() and str(Path(f"/proc/self/fd/{descriptor}").readlink()).startswith(below):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return function(descriptor, *arguments)

    return called


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)


def main() -> None:
    """Run, print, and fail on any violation."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=20.0, help="how long each trouble lasts")
    parser.add_argument("--within", type=float, default=30.0, help="seconds in which a node must be back at work")
    parser.add_argument("--only", default="", help="troubles whose name holds this")
    parser.add_argument("--out", type=Path, default=None)
    arguments = parser.parse_args()
    if _INSIDE not in os.environ:
        own = ["--mount"] if os.geteuid() == 0 else ["--mount", "--user", "--map-root-user"]
        again = [sys.executable, "-m", "bench.disks", *sys.argv[1:]]
        os.execvpe("unshare", ["unshare", *own, *again], os.environ | {_INSIDE: "1"})
    out = (arguments.out or Path(tempfile.mkdtemp(prefix="grailnode-disks-"))).absolute()
    for name in {node for node, _ in PROCESSES.values()}:
        disk = out / "disks" / name
        disk.mkdir(parents=True)
        _run("mount", "-t", "tmpfs", "-o", _DISK, "tmpfs", str(disk))
    with Disks.open(out) as site:
        wrong = _table(site, arguments)
        site.settle()
        wrong += [f"violated: {line}" for line in sorted(set(audit(site)))]
    for line in wrong:
        print(line)
    print(f"{len(wrong)} things wrong; the network lies in {out}, without its disks")
    sys.exit(1 if wrong else 0)


def _table(site: Disks, arguments: argparse.Namespace) -> list[str]:
    """Try everything, a printed row each; what must not be."""
    wrong = []
    print(f"{'trouble':10} {'node':10} {'ended':>5} {'said':>5} {'back after s':>12}  in these words", flush=True)
    for title, trouble in TROUBLES.items():
        for node in NODES if arguments.only in title else ():
            ends, lines, seconds = site.suffer(node, trouble, arguments.seconds, arguments.within)
            told = [line for line in lines if trouble.words in line.lower()]
            example = told[0].replace(str(site.directory), "DIR") if told else ""
            print(f"{title:10} {node:10} {ends:5} {len(told):5} {seconds:12.1f}  {example}", flush=True)
            if not told:
                wrong.append(f"{title}, {node}: nobody says so")
            if seconds > arguments.within:
                wrong.append(f"{title}, {node}: not back within {arguments.within:g} s")
            wrong += [f"{title}, {node}: {line}" for line in lines if line.startswith("Traceback")]
    return wrong


if __name__ == "__main__":
    main()
