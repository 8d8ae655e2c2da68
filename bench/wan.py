"""A small internet on one machine: `python -m bench.wan --rates 1,10,100,400,1000`. As root, on Linux.

Storage (two `rclone serve s3`: one to write with credentials, one to read without), a trainer, two miners and two
validators, each in a network namespace of its own (bench/namespaces.py), each link limited to the rate both ways.
Between a node and its link stands tests/support/faults/stream_fault_proxy.py, for latency and faults. What the nodes
run is the trainer's real publisher and the real follower (bench/wan_nodes.py), each writing to its own bucket and
reading the others' over HTTP.

For each rate: everybody fetches the anchor of a policy whose size fits the rate; then patches follow one another, as
dense as workload A1 of bench/patches.py, each as soon as all hold the one before. *synced* is from the moment that the
head lies in storage until a follower holds the version, verified; *applied* is the part of it behind the download.
*wire alone* is the patch at the link's rate, and *7B* the 66 MB patch of a 7B policy at the rate at which the anchor
came.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from bench import crash_site
from bench.checkpoints import TARGETS, find_rate, simulate
from bench.namespaces import HUB, Internet
from bench.soak import CHOICES, ROLES
from bench.wan_nodes import weights_of
from grailnode.calibration import proof_file
from grailnode.run import creation, key_files, workspace
from protocol import paths
from protocol.chain import safetensors
from protocol.digest import digest_weights
from protocol.identity.signing import SigningKey
from tests.support.processes.programs import eventually
from tests.support.processes.separate_buckets import PUBLIC, SIGNED, Machines, make_buckets
from tests.support.servers.rclone import serving
from tests.support.simulation import small_policy

FOLLOWERS: Final = tuple(name for name in ROLES if name != "trainer")
ROWS, COLUMNS = 1024, 4096
TENSORS: Final = {1: 1, 10: 4, 100: 16, 400: 32, 1000: 32}
"""Tensors of 4,194,304 elements (8.4 MB) for each rate in Mbit/s; for another rate those of the next smaller one."""
_UNTAGGED: Final = (*PUBLIC, "--etag-hash", "")
"""rclone has no ETag at hand, as a bucket has: for each range it would digest the whole object, at 100 Mbit/s most of
the time.
"""
BIG_PATCH_BYTES: Final = 66e6
"""The patch of a 7B policy (docs/benchmarks/patches.md, workload A1, compact)."""
NEAR: Final = (9000, 9001)
"""Ports of 127.0.0.1 on every machine: of the way to the server that takes writes, and to the public one."""


@dataclass(frozen=True)
class Setup:
    """What is tried: the rate in Mbit/s, seconds of a round trip, share of requests that fail, and how many patches."""

    rate: float
    latency: float
    share: float
    patches: int

    @property
    def tensors(self) -> int:
        """Of the policy."""
        return TENSORS[max((rate for rate in TENSORS if rate <= self.rate), default=1)]


@dataclass(frozen=True)
class Step:
    """What one version took: seconds, by follower where there are several; bytes on each follower's link.

    Attributes:
        published: from the snapshot to the head in storage.
        synced: from the head in storage to a follower that holds the version; held: the part of it in which the patch,
            fetched and digested, is applied and verified (an anchor is fetched in it).
        received: bytes that came over a follower's link meanwhile, headers and polls included.
    """

    version: int
    size: int
    published: float
    synced: tuple[float, ...]
    held: tuple[float, ...]
    received: tuple[int, ...]

    @property
    def goodput(self) -> float:
        """Of the median follower, Mbit/s."""
        return self.size * 8e-6 / statistics.median(self.synced)


class Site:
    """The machines of one setup, at work."""

    def __init__(self, net: Internet, machines: Machines, setup: Setup) -> None:
        self._net, self._machines, self._setup = net, machines, setup
        key = machines.made.keys["trainer"]
        self._space = machines.directory / "buckets" / "trainer"
        self._head = self._space / paths.head(key)

    def start(self, stack: ExitStack, pair: Path) -> None:
        """Start publisher and followers."""
        node = (sys.executable, "-m", "bench.wan_nodes")
        trainer = (*node, "publish", str(self._home("trainer") / "run.toml"), "--pair", str(pair))
        self._spawn(stack, "trainer", *trainer, "--tensors", str(self._setup.tensors))
        made = self._machines.made
        rules = self._machines.directory / "buckets" / "square" / paths.run(made.run_id)
        eventually(rules.is_file, f"the rules of the run are published; see {self._home('trainer')}.terminal")
        for name in FOLLOWERS:
            self._spawn(stack, name, *node, "follow", str(self._home(name) / "run.toml"), "--name", name)

    def _home(self, name: str) -> Path:
        return self._machines.directory / name

    def _spawn(self, stack: ExitStack, name: str, *command: str) -> None:
        stack.enter_context(running(*self._net.within(name), *command, log=Path(f"{self._home(name)}.terminal")))

    def publish(self, version: int) -> Step:
        """Let the trainer publish a version, and wait until everybody holds it."""
        before = {name: self._net.passed(name)[1] for name in FOLLOWERS}
        (self._home("trainer") / f"go-{version}").touch()
        eventually(
            lambda: len(self._verified(version)) == len(FOLLOWERS), f"version {version} is held by all", seconds=1200
        )
        shown = self._head.stat().st_ctime
        (offered,) = [
            event for event in self._machines.events("trainer", "trainer", "offered") if event["version"] == version
        ]
        return Step(
            version,
            self._size(version),
            shown - offered["time"],
            tuple(event["time"] - shown for event in self._verified(version)),
            tuple(event["hold_seconds"] for event in self._verified(version)),
            tuple(self._net.passed(name)[1] - before[name] for name in FOLLOWERS),
        )

    def _verified(self, version: int) -> list[dict[str, Any]]:
        return [
            event
            for name in FOLLOWERS
            for event in self._machines.events(name, name, "verified")
            if event["version"] == version
        ]

    def _size(self, version: int) -> int:
        """Bytes of the version's objects: an anchor's shards, or the patch that was published last."""
        key = self._machines.made.keys["trainer"]
        if version == 0:
            return sum(file.stat().st_size for file in (self._space / paths.anchors(key)).iterdir())
        return max((self._space / paths.patches(key)).iterdir(), key=lambda file: file.stat().st_ctime).stat().st_size


@contextmanager
def running(*command: str, log: Path) -> Iterator["subprocess.Popen[bytes]"]:
    """A program, killed at the end of the block."""
    with log.open("ab") as output:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def open_links(
    stack: ExitStack, net: Internet, directory: Path, link: tuple[float, float, float]
) -> list["subprocess.Popen[bytes]"]:
    """Buckets below a directory, their servers at the hub, and each machine's way there; the proxies.

    Args:
        stack: ends them; link: Mbit/s, seconds of a round trip, and the share of requests that meet a fault.
    """
    rate, latency, share = link
    make_buckets(directory / "buckets", ROLES)
    servers = [
        stack.enter_context(serving(directory / "buckets", *options, address=HUB, within=net.within()))
        for options in (SIGNED, _UNTAGGED)
    ]
    proxy = [
        sys.executable,
        "-m",
        "tests.support.faults.stream_fault_proxy",
        "--latency",
        str(latency),
        "--share",
        str(share),
    ]
    for near, server in zip(NEAR, servers, strict=True):
        proxy += ["--port", f"{near}={server.removeprefix('http://')}"]
    for name in ROLES:
        net.limit(name, rate)
    return [stack.enter_context(running(*net.within(name), *proxy, log=directory / f"{name}.proxy")) for name in ROLES]


def found(directory: Path, pair: Path, tensors: int) -> workspace.Workspace:
    """A run whose genesis is the first of the versions that will be published, and not its packaged policy."""
    proof = directory / proof_file.NAME
    proof.write_text(small_policy.proof(small_policy.DIRECTORY).to_json(), encoding="utf-8")
    made = workspace.create(directory / "founder", CHOICES, crash_site.PACE, policy=small_policy.DIRECTORY, proof=proof)
    rules = creation.open_run((made.directory / "run.manifest").read_bytes()).record
    genesis = digest_weights(weights_of(0, safetensors.read(pair.read_bytes()), tensors))
    rules = rules.model_copy(update={"model": rules.model.model_copy(update={"genesis": genesis})})
    signed = creation.sign_manifest(rules, SigningKey(key_files.read(made.directory / "keys" / "root.key")))
    (made.directory / "run.manifest").write_bytes(signed.data)
    return replace(made, run_id=signed.digest)


def run(setup: Setup, directory: Path, pair: Path) -> list[Step]:
    """The anchor, then the patches.

    Raises:
        NamespaceError: this machine gives no namespaces.
    """
    directory.mkdir(parents=True)
    with ExitStack() as stack:
        net = stack.enter_context(Internet.open(tuple(ROLES)))
        made = found(directory, pair, setup.tensors)
        open_links(stack, net, directory, (setup.rate, setup.latency, setup.share))
        machines = Machines(directory, made, ROLES, *(f"http://127.0.0.1:{port}" for port in NEAR))
        site = Site(net, machines, setup)
        site.start(stack, pair)
        return [site.publish(version) for version in range(setup.patches + 1)]


def row(setup: Setup, steps: Sequence[Step]) -> dict[str, str]:
    """A line of the table, by column."""
    anchor, *patches = steps
    synced = sorted(time for step in patches for time in step.synced)
    size = statistics.median(step.size for step in patches)
    received = statistics.median(count for step in patches for count in step.received)
    seconds = {
        "published": statistics.median(step.published for step in patches),
        "synced": statistics.median(synced),
        "slowest": synced[-1],
        "applied": statistics.median(time for step in patches for time in step.held),
        "wire alone": size * 8e-6 / setup.rate,
        "7B": BIG_PATCH_BYTES * 8e-6 / anchor.goodput,
    }
    return {
        "Mbit/s": f"{setup.rate:g}",
        "policy": f"{setup.tensors * ROWS * COLUMNS / 1e6:.0f}M",
        "anchor": f"{anchor.size / 1e6:.1f} MB",
        "anchor synced": f"{statistics.median(anchor.synced):.1f} s",
        "goodput": f"{anchor.goodput:.1f}",
        "patch": f"{size / 1e6:.3f} MB",
        "on the link": f"{received / 1e6:.3f} MB",
        **{name: f"{value:.2f} s" for name, value in seconds.items()},
    }


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", default="1,10,100,400,1000", help="Mbit/s of every link, with commas")
    parser.add_argument("--latency", type=float, default=0.04, help="seconds of a round trip")
    parser.add_argument("--share", type=float, default=0.0, help="of requests that meet a fault")
    parser.add_argument("--patches", type=int, default=5)
    parser.add_argument("--out", type=Path, default=None)
    arguments = parser.parse_args()
    out = (arguments.out or Path(tempfile.mkdtemp(prefix="grailnode-wan-"))).absolute()
    out.mkdir(parents=True, exist_ok=True)
    pair = out / "pair.safetensors"
    if not pair.exists():
        trajectory = simulate(ROWS, COLUMNS, 0)
        before, after = trajectory.views(find_rate(trajectory, 2 * TARGETS["A1"]))
        pair.write_bytes(safetensors.write({"before": before, "after": after}))
    for number, rate in enumerate(map(float, arguments.rates.split(","))):
        setup = Setup(rate, arguments.latency, arguments.share, arguments.patches)
        steps = run(setup, out / f"{rate:g}", pair)
        (out / f"{rate:g}.json").write_text(json.dumps([step.__dict__ for step in steps]))
        cells = row(setup, steps)
        if number == 0:
            print(f"| {' | '.join(cells)} |\n{'|---' * len(cells)}|")
        print(f"| {' | '.join(cells.values())} |", flush=True)


if __name__ == "__main__":
    main()
