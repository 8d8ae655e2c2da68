"""An hour of a network of real processes, with storage faults and kills: `python -m bench.soak --minutes 60 --out DIR`.

A trainer, two miners and two validators, each with a bucket of its own, use `rclone serve s3` behind
bench/fault_proxy.py, which injects a fault into one request of twenty. Every two minutes SIGKILL
ends one of the trainer's processes, or a whole node with its supervisor; the benchmark starts such a node again, as an
init system would. Every --bend seconds a bit of a file of a killed node's state is bent (bench/bent_states.py): the
node must go on rightly, or end with one line, after which `grailnode repair` repairs it. The second miner and the
second validator are never killed, so that their memory can be observed over the whole time. The command prints memory,
descriptors and threads (bench/resources.py), counts of the work done, and all violations of
invariants (bench/crash_audit.py), and exits with 1 if there are any. The samples stay in DIR/samples.jsonl. It takes
--minutes and one more, and needs rclone (the `test` extra) on Linux.
"""

import argparse
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from bench import crash_site
from bench.bent_states import BentStates
from bench.crash_audit import find_violations
from bench.resources import ProcessMonitor, table
from grailnode.calibration import proof_file
from grailnode.config import Config, load
from grailnode.run import workspace
from grailnode.run.run_toml import Recipe
from protocol import paths
from tests.support.processes.programs import eventually, members
from tests.support.processes.separate_buckets import MEETING_BUCKET, Machines, serving_buckets
from tests.support.simulation import small_policy

ROLES: Final = {
    "trainer": "trainer",
    "validator": "validator",
    "validator-2": "validator",
    "miner-1": "miner",
    "miner-2": "miner",
}
BENT_NODES: Final = ("trainer", "validator", "miner-1")
RULES: Final = crash_site.RECIPE.rules.changed(validators=2)

SETTINGS: Final = """
[trainer]
policy = "{policy}"
groups_per_step = 2
anchor_interval = 10
keep_patches = 20
learning_rate = 2e-5
poll_seconds = 1.0

[miner]
groups = 4
poll_seconds = 1.0

[validator]
evaluate = false
poll_seconds = 1.0
"""
TIMEOUTS: Final = "silence_seconds = 5.0\nconnect_seconds = 5.0"
_TRAINER: Final = ("training", "upload", "download", "beacon")
_SAMPLE_SECONDS: Final = 10.0


def recipe(window: float) -> Recipe:
    """Return the recipe of a run with windows of `window` seconds."""
    return crash_site.RECIPE.model_copy(update={"rules": RULES.changed(window=window)})


@dataclass
class NodeNetwork:
    """The network at work, with what `find_violations` reads of it.

    Attributes:
        machines: the programs and directories of the nodes.
        config: configuration of a spectator of the run.
        repaired_windows: windows whose groups a repair of the trainer's state has given up.
        processes: names of all processes that log events.
        validators: names of the validators' processes.
    """

    machines: Machines
    config: Config
    repaired_windows: set[int] = field(default_factory=set)
    _events: dict[str, tuple[int, list[dict[str, Any]]]] = field(default_factory=dict)

    processes = (*(f"trainer/{kind}" for kind in _TRAINER), *(name for name in ROLES if name != "trainer"))
    validators = ("validator", "validator-2")

    def events(self, process: str, name: str = "") -> list[dict[str, Any]]:
        """Return the events that a process has logged, those of one name or all."""
        folder = self.machines.directory / process.partition("/")[0] / "logs"
        file = folder / f"{process.replace('/', '-')}.jsonl"
        self._events[process] = crash_site.read_new_events(file, *self._events.get(process, (0, [])))
        return [event for event in self._events[process][1] if not name or event["event"] == name]

    def objects(self, kind: str) -> list[Path]:
        """Return the files of all complete objects of a kind."""
        return crash_site.complete_files(self.machines.directory / "buckets", f"*/*/{kind}/*")

    def outcome_log_files(self) -> list[Path]:
        """Return the files in which the trainer records the outcomes of groups."""
        state = self.machines.directory / "trainer" / "state"
        return crash_site.complete_files(state / "trainer" / "objects", "outcomes/*")


@contextmanager
def fault_proxy(
    ports: Sequence[int], servers: Sequence[str], share: float, out: Path
) -> Iterator["subprocess.Popen[bytes]"]:
    """Start the fault proxy with a port for each server, and stop it at the end of the block.

    Args:
        ports: ports of this machine.
        servers: URL of the server behind each port.
        share: share of the requests that get a fault.
        out: file that has the proxy's counts after the block.
    """
    command = [sys.executable, "-m", "bench.fault_proxy", "--share", str(share)]
    for port, server in zip(ports, servers, strict=True):
        command += ["--port", f"{port}={urlsplit(server).netloc}"]
    with out.open("w") as output:
        process = subprocess.Popen(command, stdout=output)
    try:
        eventually(lambda: all(map(listens, ports)), "the fault proxy listens")
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(20)


def free_port() -> int:
    """Return a port of this machine at which no process listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def listens(port: int) -> bool:
    """Return whether a process listens at a port of this machine."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def start_all(machines: Machines) -> None:
    """Start every node, the trainer first, because the others fetch the run manifest that it publishes."""
    machines.start("trainer")
    manifest_file = machines.directory / "buckets" / MEETING_BUCKET / paths.run(machines.workspace.run_id)
    eventually(
        manifest_file.is_file, f"the trainer publishes the run manifest; see {machines.directory}/trainer.terminal"
    )
    for name in ROLES:
        if name != "trainer":
            machines.start(name)


def kill_at_random(machines: Machines, rng: random.Random) -> str:
    """Kill one process or one node with SIGKILL and return its name.

    The supervisor starts a process again, and `restart_stopped_nodes` a node.
    """
    target = rng.choice(["trainer", *(f"trainer/{kind}" for kind in _TRAINER), *("miner-1", "validator") * 2])
    session = machines.programs[target.partition("/")[0]].session
    for pid in members(session):
        with suppress(OSError):  # the process may have ended by now
            if "/" not in target or Path(f"/proc/{pid}/comm").read_text().strip() == target[:15]:
                os.kill(pid, signal.SIGKILL)
    return target


def restart_stopped_nodes(bent_states: BentStates) -> int:
    """Start the nodes whose supervisor has ended; return how many ended neither by a kill nor by a bent file."""
    machines, unexpected_ends = bent_states.machines, 0
    for name in [name for name, program in machines.programs.items() if program.process.poll() is not None]:
        refusal_count = bent_states.refusal_count
        report = bent_states.take_end(name)
        if report:
            print(report, flush=True)
            unexpected_ends += bent_states.refusal_count == refusal_count
        machines.programs[name].end()
        machines.start(name)
    return unexpected_ends


def run_with_kills(
    bent_states: BentStates, seconds: float, every: float, bend_every: float, file: Path
) -> ProcessMonitor:
    """Run the network with kills and bent states, and return samples of its resources.

    Args:
        seconds: how long the network runs.
        every: seconds between two kills; bend_every: between two bent files, 0 for none.
        file: file that gets the samples, one JSON object a line.
    """
    machines, monitor, rng = bent_states.machines, ProcessMonitor(), random.Random(1)
    start_time = time.monotonic()
    next_kill, next_bend = every, bend_every or float("inf")
    kills = sample_count = unexpected_ends = 0
    with file.open("w") as out:
        while (now := time.monotonic() - start_time) < seconds:
            unexpected_ends += restart_stopped_nodes(bent_states)
            for name, program in machines.programs.items():
                monitor.take_samples(now, name, program.session)
            for sample in monitor.samples[sample_count:]:
                out.write(json.dumps(asdict(sample)) + "\n")
            out.flush()
            sample_count = len(monitor.samples)
            if now >= next_kill:
                print(f"{now / 60:.1f} min: killed {kill_at_random(machines, rng)}", flush=True)
                next_kill += every
                kills += 1
            if now >= next_bend:
                name = BENT_NODES[bent_states.bit_count % len(BENT_NODES)]
                print(f"{now / 60:.1f} min: bent a bit of {name}'s {bent_states.bend_one(name, rng)}", flush=True)
                next_bend += bend_every
            time.sleep(_SAMPLE_SECONDS)
    print(f"{kills} kills; {unexpected_ends} times a node ended by itself")
    print(
        f"{bent_states.bit_count} bits were bent; "
        f"{bent_states.refusal_count} times the node named the file and was repaired"
    )
    return monitor


def main() -> None:
    """Run the network, print, and exit with 1 on a violation."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0, help="how long the network runs")
    parser.add_argument("--share", type=float, default=0.05, help="share of requests that get a fault")
    parser.add_argument("--every", type=float, default=120.0, help="seconds between two kills")
    parser.add_argument("--bend", type=float, default=150.0, help="seconds between two bent state files; 0 for none")
    parser.add_argument("--window", type=float, default=10.0, help="seconds of a window")
    parser.add_argument(
        "--warm-up", type=float, default=180.0, help="seconds at a process's start that its slope leaves out"
    )
    parser.add_argument("--out", type=Path, default=None, help="directory of the network; the default is a new one")
    arguments = parser.parse_args()
    out = (arguments.out or Path(tempfile.mkdtemp(prefix="grailnode-soak-"))).absolute()
    out.mkdir(parents=True, exist_ok=True)
    proof = out / proof_file.NAME
    proof.write_text(small_policy.proof_of(small_policy.DIRECTORY).to_json(), encoding="utf-8")
    workspace_of_run = workspace.create(
        out / "creator", recipe(arguments.window), policy=small_policy.DIRECTORY, proof=proof, seed=1
    )
    ports = free_port(), free_port()
    proxy_log = out / "proxy.json"
    with ExitStack() as stack:
        servers = stack.enter_context(serving_buckets(out / "buckets", ROLES))
        proxy = stack.enter_context(fault_proxy(ports, servers, arguments.share, proxy_log))
        settings = SETTINGS.format(policy=small_policy.DIRECTORY.absolute())
        urls = (f"http://127.0.0.1:{port}" for port in ports)
        machines = Machines(out, workspace_of_run, ROLES, *urls, settings=settings, patience=TIMEOUTS)
        stack.callback(machines.end)
        bent_states = BentStates(machines)
        network = NodeNetwork(machines, load(out / "trainer" / "run.toml"), bent_states.repaired_windows)
        start_all(machines)
        samples = out / "samples.jsonl"
        monitor = run_with_kills(bent_states, 60 * arguments.minutes, arguments.every, arguments.bend, samples)
        proxy.send_signal(signal.SIGUSR1)
        restart_stopped_nodes(bent_states)
        time.sleep((RULES.verdict_rounds / RULES.rounds + 2) * arguments.window)
        restart_stopped_nodes(bent_states)
        bent_states.harmless_outcomes()
        violations = bent_states.problems + find_violations(network)  # the wait lets all open windows end
    print(proxy_log.read_text(), end="")
    print(table(monitor.samples, arguments.warm_up))
    print(progress(network))
    for line in sorted(set(violations)):
        print(f"violation: {line}")
    print(f"{len(set(violations))} violations; all files are in {out}")
    sys.exit(1 if violations else 0)


def progress(network: NodeNetwork) -> str:
    """Return a line with the counts of what the network has done."""
    verdicts = [event for validator in network.validators for event in network.events(validator, "verdict")]
    return (
        f"{len({event['window'] for event in verdicts})} windows judged, {sum(event['accepted'] for event in verdicts)}"
        f" groups accepted and {sum(event['rejected'] for event in verdicts)} rejected in {len(verdicts)} verdicts,"
        f" {len(network.events('trainer/training', 'step'))} steps,"
        f" {len(network.events('trainer/upload', 'published'))} versions"
    )


if __name__ == "__main__":
    main()
