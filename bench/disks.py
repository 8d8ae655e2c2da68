"""Recovery of real processes from failing disks: `python -m bench.disks --seconds 20`.

In the network of bench/crash_site.py the trainer, the validator and the first miner each have a disk of their own for
state and logs. One disk after another is full, becomes read-only, or reports errors when it is written, or the node's
processes may open no more files. During a fault a process must log a clear line about it, and one that ends is started
again. After the fault all of the node's processes must work within --within seconds. At the end the command checks the
whole history (bench/crash_audit.py), and exits with 1 on any violation.

A full disk is a small tmpfs that a file fills, a read-only one is a mount, and prlimit limits the open files. The error
EIO is raised in the place of os.write and os.fsync, since no disk here can be made to report it. The twelve cases take
about --seconds and 5 seconds each, and 4 minutes with the defaults. The command needs a Linux kernel that lets it mount
in a namespace of its own.
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

from bench.crash_audit import find_violations
from bench.crash_points import KillPlan
from bench.crash_site import PROCESSES, READY_EVENTS, ProcessNetwork, complete_files
from grailnode.node import processes
from grailnode.node.process_launch import Launch

NODES: Final = ("trainer", "validator", "miner-1")
_DISK: Final = "size=128m,nr_inodes=20k"  # a node does not start with less than 65 MiB
_POLL_SECONDS: Final = 0.5
_NAMESPACE_VARIABLE: Final = "GRAILNODE_BENCH_DISKS"


@dataclass(frozen=True)
class DiskFault:
    """A fault of a node's disk.

    Attributes:
        inject: starts the fault, given the disk's directory and the node's process ids; returns a function that ends
            the fault.
        words: lower-case words that a log line about the fault contains.
    """

    inject: Callable[[Path, list[int]], Callable[[], None]]
    words: str


def _fill_disk(disk: Path, _pids: list[int]) -> Callable[[], None]:
    filler = disk / "filler"
    with filler.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(1 << 12))
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
    return filler.unlink


def _mount_read_only(disk: Path, _pids: list[int]) -> Callable[[], None]:
    _run("mount", "--bind", str(disk), str(disk))  # a second mount, through which no process has a file open
    _run("mount", "-o", "remount,bind,ro", str(disk))
    return lambda: _run("umount", "--lazy", str(disk))


def _exhaust_descriptors(_disk: Path, pids: list[int]) -> Callable[[], None]:
    """Limit the processes to the descriptors that they have open all the time."""
    original_limits = {}
    for pid in pids:
        original_limits[pid] = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (_lowest_free_descriptor(pid), original_limits[pid][1]))

    def end() -> None:
        for pid, limits in original_limits.items():
            with suppress(ProcessLookupError):  # the process has ended; its successor has no such limit
                resource.prlimit(pid, resource.RLIMIT_NOFILE, limits)

    return end


def _lowest_free_descriptor(pid: int) -> int:
    """Return the lowest descriptor that is free in a process at some time in half a second."""
    lowest = 1 << 20
    for _ in range(50):
        used_descriptors = {int(entry.name) for entry in Path(f"/proc/{pid}/fd").iterdir()}
        lowest = min(lowest, *(set(range(len(used_descriptors) + 1)) - used_descriptors))
        time.sleep(0.01)
    return lowest


def _report_errors(disk: Path, _pids: list[int]) -> Callable[[], None]:
    flag = disk.with_suffix(".fails")
    flag.touch()
    return flag.unlink


DISK_FAULTS: Final = {
    "ENOSPC": DiskFault(_fill_disk, "no space left"),
    "read-only": DiskFault(_mount_read_only, "read-only"),
    "EMFILE": DiskFault(_exhaust_descriptors, "too many open files"),
    "EIO": DiskFault(_report_errors, "input/output error"),
}


class NetworkWithDisks(ProcessNetwork):
    """The network of the crash benchmark with a disk for each node."""

    def start(self, process: str, plan: KillPlan | None = None) -> None:
        """Start a process whose node has its files on its own disk."""
        name, kind = PROCESSES[process]
        disk = self.disk(name)
        node = self.config.node.model_copy(update={"state": disk / "state", "logs": disk / "logs"})
        launch = Launch(self.config.model_copy(update={"node": node}), kind, name, echo=True)
        self._run(process, _run_process, launch, self.terminal(process), disk)

    def disk(self, name: str) -> Path:
        """Return the directory at which a node's disk is mounted."""
        return self.directory / "disks" / name

    def terminal(self, process: str) -> Path:
        """Return the file that gets a process's standard error; its disk has no faults."""
        return self.directory / f"{process.replace('/', '-')}.terminal"

    def log(self, process: str) -> Path:
        """Return the file to which a process logs its events."""
        return self.disk(PROCESSES[process][0]) / "logs" / f"{process.replace('/', '-')}.jsonl"

    def outcome_log_files(self) -> list[Path]:
        """Return the files in which the trainer records the outcomes of groups."""
        return complete_files(self.disk("trainer") / "state" / "trainer" / "objects", "outcomes/*")

    def stopped_processes(self, node: str) -> list[str]:
        """Return the names of a node's processes that are not running."""
        processes_of_node = [process for process, (name, _) in PROCESSES.items() if name == node]
        return [process for process in processes_of_node if not self.processes[process].is_alive()]

    def run_with_fault(
        self, node: str, fault: DiskFault, seconds: float, within: float
    ) -> tuple[int, list[str], float]:
        """Run a node with a fault for some seconds.

        Returns:
            How many times one of its processes has ended, all lines on standard error, and the seconds until all of its
            processes work again; infinity if they do not within `within` seconds.
        """
        processes_of_node = [process for process, (name, _) in PROCESSES.items() if name == node]
        offsets = {process: self.terminal(process).stat().st_size for process in processes_of_node}
        running = [self.processes[process] for process in processes_of_node if self.processes[process].is_alive()]
        pids = [process.pid for process in running if process.pid is not None]
        stop_fault = fault.inject(self.disk(node), pids)
        fault_end = self.now() + seconds
        end_count = 0
        while self.now() < fault_end:
            end_count += self._restart(node)
            self.wait(_POLL_SECONDS)
        stop_fault()
        recovery_start = self.now()
        counts = {
            process: len(self.events(process, READY_EVENTS[process]))
            for process in processes_of_node
            if process in READY_EVENTS
        }
        while counts and self.now() < recovery_start + within:
            end_count += self._restart(node)
            self.wait(_POLL_SECONDS)
            counts = {p: count for p, count in counts.items() if len(self.events(p, READY_EVENTS[p])) <= count}
        texts = [
            self.terminal(process).read_bytes()[offsets[process] :].decode(errors="replace")
            for process in processes_of_node
        ]
        lines = [line for text in texts for line in text.splitlines()]
        return end_count, lines, float("inf") if counts else self.now() - recovery_start

    def _restart(self, node: str) -> int:
        stopped_processes = self.stopped_processes(node)
        for process in stopped_processes:
            self.start(process)
        return len(stopped_processes)


def _run_process(launch: Launch, terminal: Path, disk: Path) -> None:
    """Run a node's process whose disk may report errors."""
    descriptor = os.open(terminal, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    for name in ("write", "fsync"):
        setattr(os, name, _with_errors(getattr(os, name), disk))
    processes.main(launch)


def _with_errors(function: Callable[..., Any], disk: Path) -> Callable[..., Any]:
    flag, below = disk.with_suffix(".fails"), f"{disk}/"

    def function_with_errors(descriptor: int, *arguments: Any) -> Any:
        if flag.exists() and str(Path(f"/proc/self/fd/{descriptor}").readlink()).startswith(below):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return function(descriptor, *arguments)

    return function_with_errors


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)


def main() -> None:
    """Run all cases, print, and exit with 1 on a violation."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=20.0, help="seconds that each fault lasts")
    parser.add_argument("--within", type=float, default=30.0, help="seconds in which a node must work again")
    parser.add_argument("--only", default="", help="run only the faults whose name contains this")
    parser.add_argument("--out", type=Path, default=None, help="directory of the network; the default is a new one")
    arguments = parser.parse_args()
    if _NAMESPACE_VARIABLE not in os.environ:
        unshare_options = ["--mount"] if os.geteuid() == 0 else ["--mount", "--user", "--map-root-user"]
        command = [sys.executable, "-m", "bench.disks", *sys.argv[1:]]
        os.execvpe("unshare", ["unshare", *unshare_options, *command], os.environ | {_NAMESPACE_VARIABLE: "1"})
    out = (arguments.out or Path(tempfile.mkdtemp(prefix="grailnode-disks-"))).absolute()
    for name in {node for node, _ in PROCESSES.values()}:
        disk = out / "disks" / name
        disk.mkdir(parents=True)
        _run("mount", "-t", "tmpfs", "-o", _DISK, "tmpfs", str(disk))
    with NetworkWithDisks.open(out) as network:
        problems = _table(network, arguments)
        network.wait_for_open_windows()
        problems += [f"violation: {line}" for line in sorted(set(find_violations(network)))]
    for line in problems:
        print(line)
    print(f"{len(problems)} problems; the network's files are in {out}, without its disks")
    sys.exit(1 if problems else 0)


def _table(network: NetworkWithDisks, arguments: argparse.Namespace) -> list[str]:
    """Run every case, print a row for each, and return a line for each problem."""
    problems = []
    print(f"{'fault':10} {'node':10} {'ends':>5} {'lines':>5} {'recovery s':>12}  first line", flush=True)
    for title, fault in DISK_FAULTS.items():
        for node in NODES if arguments.only in title else ():
            end_count, lines, seconds = network.run_with_fault(node, fault, arguments.seconds, arguments.within)
            messages = [line for line in lines if fault.words in line.lower()]
            example = messages[0].replace(str(network.directory), "DIR") if messages else ""
            print(f"{title:10} {node:10} {end_count:5} {len(messages):5} {seconds:12.1f}  {example}", flush=True)
            if not messages:
                problems.append(f"{title}, {node}: no process logs the fault")
            if seconds > arguments.within:
                problems.append(f"{title}, {node}: not at work within {arguments.within:g} s")
            problems += [f"{title}, {node}: {line}" for line in lines if line.startswith("Traceback")]
    return problems


if __name__ == "__main__":
    main()
