"""An hour of real processes over storage that fails: `python -m bench.soak --minutes 60 --out DIR`.

A trainer, two miners and two validators, each with a bucket of its own, on `rclone serve s3` behind
tests/support/faults/stream_fault_proxy.py: one request in twenty meets a fault. Every two minutes something is killed
with SIGKILL: one of the trainer's processes, or a whole node with its supervisor, which is then started again as an
init system would. The second miner and the second validator are never killed, so that their lives are as long as the
bench.

Prints memory, descriptors and threads (tests/support/measuring/resources.py) and what bench/crash_audit.py finds; exits
with 1 where that is anything. The samples stay in DIR/samples.jsonl.
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
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from bench import crash_site
from bench.crash_audit import audit
from grailnode.calibration import proof_file
from grailnode.config import Config, load
from grailnode.run import workspace
from protocol import paths
from tests.support.measuring.resources import Watch, table
from tests.support.processes.programs import eventually, members
from tests.support.processes.separate_buckets import MEETING, Machines, serving_buckets
from tests.support.simulation import small_policy

ROLES: Final = {
    "trainer": "trainer",
    "validator": "validator",
    "validator-2": "validator",
    "miner-1": "miner",
    "miner-2": "miner",
}
CHOICES: Final = replace(crash_site.CHOICES, validators=2)
SPARED: Final = {"validator-2", "miner-2"}
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
evaluation_problems = 0
poll_seconds = 1.0
"""
PATIENCE: Final = "silence_seconds = 5.0\nconnect_seconds = 5.0"
_TRAINER: Final = ("training", "upload", "download", "beacon")
_SAMPLE_SECONDS: Final = 10.0


@dataclass
class Site:
    """The network at work, as its auditor sees it."""

    machines: Machines
    config: Config
    began: float = field(default_factory=time.monotonic)
    _heard: dict[str, tuple[int, list[dict[str, Any]]]] = field(default_factory=dict)

    processes = (*(f"trainer/{kind}" for kind in _TRAINER), *(name for name in ROLES if name != "trainer"))
    validators = ("validator", "validator-2")

    def events(self, process: str, name: str = "") -> list[dict[str, Any]]:
        """What a process has said, of one name or in all."""
        folder = self.machines.directory / process.partition("/")[0] / "logs"
        file = folder / f"{process.replace('/', '-')}.jsonl"
        self._heard[process] = crash_site.read_on(file, *self._heard.get(process, (0, [])))
        return [event for event in self._heard[process][1] if not name or event["event"] == name]

    def objects(self, kind: str) -> list[Path]:
        """The files of all whole objects of a kind."""
        return crash_site.whole(self.machines.directory / "buckets", f"*/*/{kind}/*")

    def accounts(self) -> list[Path]:
        """The trainer's accounts of windows."""
        return crash_site.whole(self.machines.directory / "trainer" / "state" / "trainer" / "objects", "outcomes/*")


@contextmanager
def proxy(ports: Sequence[int], servers: Sequence[str], share: float, out: Path) -> Iterator["subprocess.Popen[bytes]"]:
    """The bad wire, with a port before each server; what it counted is in a file after the block."""
    command = [sys.executable, "-m", "tests.support.faults.stream_fault_proxy", "--share", str(share)]
    for port, server in zip(ports, servers, strict=True):
        command += ["--port", f"{port}={urlsplit(server).netloc}"]
    with out.open("w") as told:
        process = subprocess.Popen(command, stdout=told)
    try:
        eventually(lambda: all(map(listens, ports)), "the bad wire is there")
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(20)


def free_port() -> int:
    """A port of this machine that nobody listens to."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def listens(port: int) -> bool:
    """Whether somebody listens to a port of this machine."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def start_all(machines: Machines) -> None:
    """Start every node; the trainer's first, which publishes the rules that the others fetch."""
    machines.start("trainer")
    rules = machines.directory / "buckets" / MEETING / paths.run(machines.made.run_id)
    eventually(rules.is_file, f"the trainer publishes the rules of the run; see {machines.directory}/trainer.terminal")
    for name in ROLES:
        if name != "trainer":
            machines.start(name)


def kill(machines: Machines, chance: random.Random) -> str:
    """kill -9 of one thing; what it was. A process is started again by its supervisor, a node by `revive`."""
    victim = chance.choice(["trainer", *(f"trainer/{kind}" for kind in _TRAINER), *("miner-1", "validator") * 2])
    session = machines.programs[victim.partition("/")[0]].session
    for pid in members(session):
        with suppress(OSError):  # it may just have ended
            if "/" not in victim or Path(f"/proc/{pid}/comm").read_text().strip() == victim[:15]:
                os.kill(pid, signal.SIGKILL)
    return victim


def revive(machines: Machines) -> list[str]:
    """Start the nodes whose supervisor has ended; their names."""
    ended = [name for name, program in machines.programs.items() if program.process.poll() is not None]
    for name in ended:
        machines.programs[name].end()
        machines.start(name)
    return ended


def live(machines: Machines, seconds: float, every: float, file: Path) -> Watch:
    """Let the network live while it is sampled and killed; the samples."""
    watch, chance = Watch(), random.Random(1)
    killed: list[str] = []
    began = time.monotonic()
    next_kill = every
    written = unasked = 0
    with file.open("w") as out:
        while (now := time.monotonic() - began) < seconds:
            dead = revive(machines)
            unasked += len([name for name in dead if not killed or name != killed[-1]])
            for name, program in machines.programs.items():
                watch.look(now, name, program.session)
            for sample in watch.samples[written:]:
                out.write(json.dumps(asdict(sample)) + "\n")
            out.flush()
            written = len(watch.samples)
            if now >= next_kill:
                killed.append(kill(machines, chance))
                print(f"{now / 60:.1f} min: killed {killed[-1]}", flush=True)
                next_kill += every
            time.sleep(_SAMPLE_SECONDS)
    print(f"{len(killed)} kills; {unasked} times a node ended by itself")
    return watch


def main() -> None:
    """Run, print, and fail on any violation."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--share", type=float, default=0.05, help="of requests that meet a fault")
    parser.add_argument("--every", type=float, default=120.0, help="seconds between two kills")
    parser.add_argument("--window", type=float, default=10.0, help="seconds")
    parser.add_argument(
        "--warm-up", type=float, default=180.0, help="seconds of a process's life that count for nothing"
    )
    parser.add_argument("--out", type=Path, default=None)
    arguments = parser.parse_args()
    out = (arguments.out or Path(tempfile.mkdtemp(prefix="grailnode-soak-"))).absolute()
    pace = replace(crash_site.PACE, period_ms=round(1000 * arguments.window / CHOICES.rounds))
    out.mkdir(parents=True, exist_ok=True)
    proof = out / proof_file.NAME
    proof.write_text(small_policy.proof(small_policy.DIRECTORY).to_json(), encoding="utf-8")
    made = workspace.create(out / "founder", CHOICES, pace, policy=small_policy.DIRECTORY, proof=proof, seed=1)
    ports = free_port(), free_port()
    met = out / "proxy.json"
    with ExitStack() as stack:
        servers = stack.enter_context(serving_buckets(out / "buckets", ROLES))
        fates = stack.enter_context(proxy(ports, servers, arguments.share, met))
        settings = SETTINGS.format(policy=small_policy.DIRECTORY.absolute())
        urls = (f"http://127.0.0.1:{port}" for port in ports)
        machines = Machines(out, made, ROLES, *urls, settings=settings, patience=PATIENCE)
        stack.callback(machines.end)
        site = Site(machines, load(out / "trainer" / "run.toml"))
        start_all(machines)
        watch = live(machines, 60 * arguments.minutes, arguments.every, out / "samples.jsonl")
        fates.send_signal(signal.SIGUSR1)
        revive(machines)
        time.sleep((CHOICES.verdict_rounds + 2 * CHOICES.rounds) * pace.period_ms / 1000)
        found = audit(site)  # what was under way has come to its end
    print(met.read_text(), end="")
    print(table(watch.samples, arguments.warm_up))
    print(progress(site))
    for line in sorted(set(found)):
        print(f"violated: {line}")
    print(f"{len(set(found))} violations; everything lies in {out}")
    sys.exit(1 if found else 0)


def progress(site: Site) -> str:
    """What the network has done."""
    verdicts = [event for validator in site.validators for event in site.events(validator, "verdict")]
    return (
        f"{len({event['window'] for event in verdicts})} windows judged, {sum(event['accepted'] for event in verdicts)}"
        f" groups accepted and {sum(event['rejected'] for event in verdicts)} rejected in {len(verdicts)} verdicts,"
        f" {len(site.events('trainer/training', 'step'))} steps,"
        f" {len(site.events('trainer/upload', 'published'))} versions"
    )


if __name__ == "__main__":
    main()
