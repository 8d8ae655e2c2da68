"""Times of publishing and following versions over links of several rates: `python -m bench.wan --rates 1,10,100`.

Storage (two `rclone serve s3`, one for writes with credentials, one for public reads), a trainer, two miners and two
validators each run in a network namespace of their own (tests/support/processes/namespaces.py), whose link is limited
to the rate in both directions. bench/fault_proxy.py between a node and its link adds latency and
faults. The nodes run the trainer's real publisher and the real follower (bench/wan_nodes.py); each writes to its own
bucket and reads the others' over HTTP.

For each rate all followers fetch the anchor of a policy whose size fits the rate. Then the trainer publishes patches as
dense as workload A1 of bench/patches.py, each one when all followers have the one before. In the table *sync* is the
time from the head in storage until a follower has verified the version, *apply* the part of it after the download,
*link bytes* what a follower receives for a patch, *at link rate* the patch's size over the link's rate, and *7B* the
time of a 66 MB patch of a 7B policy at the goodput of the anchor. The five default rates take about
6 minutes on two idle cores. `--tensors 118 --followers 1` is a policy of 495M elements, and needs 6 GB of memory. The
command needs root on Linux, `ip`, `tc` and rclone (the `test` extra).
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

from bench.checkpoints import TARGETS, find_rate, simulate
from bench.soak import ROLES, recipe
from bench.wan_nodes import weights_of
from grailnode.calibration import proof_file
from grailnode.run import creation, key_files, workspace
from protocol import paths
from protocol.chain import safetensors
from protocol.digest import digest_weights
from protocol.identity.signing import SigningKey
from tests.support.processes.namespaces import HUB, NamespaceNetwork
from tests.support.processes.programs import eventually
from tests.support.processes.separate_buckets import (
    AUTH_OPTIONS,
    MEETING_BUCKET,
    PUBLIC_OPTIONS,
    Machines,
    make_buckets,
)
from tests.support.servers.rclone import serving
from tests.support.simulation import small_policy

FOLLOWERS: Final = tuple(name for name in ROLES if name != "trainer")
ROWS, COLUMNS = 1024, 4096
TENSORS: Final = {1: 1, 10: 4, 100: 16, 400: 32, 1000: 32}
"""Tensors of 4,194,304 elements (8.4 MB), by rate in Mbit/s; another rate has those of the next lower one."""
PUBLIC_WITHOUT_ETAGS: Final = (*PUBLIC_OPTIONS, "--etag-hash", "")
"""Options without ETags. Unlike a bucket, rclone stores no ETag and would digest the whole object for each range."""
BIG_PATCH_BYTES: Final = 66e6
"""Bytes of the patch of a 7B policy (docs/benchmarks/patches.md, workload A1, compact)."""
PROXY_PORTS: Final = (9000, 9001)
"""Ports of 127.0.0.1 on every machine that lead to the server for writes and to the one for public reads."""


@dataclass(frozen=True)
class Setup:
    """The setup of one row of the table.

    Attributes:
        rate: rate of each link in Mbit/s.
        latency: seconds of a round trip.
        share: share of requests that get a fault.
        patches: number of patches.
        followers: number of followers.
        own_tensors: number of tensors of the policy; 0 for the one that fits the rate.
    """

    rate: float
    latency: float
    share: float
    patches: int
    followers: int = len(FOLLOWERS)
    own_tensors: int = 0

    @property
    def tensors(self) -> int:
        """The number of tensors of the policy."""
        return self.own_tensors or TENSORS[max((rate for rate in TENSORS if rate <= self.rate), default=1)]


@dataclass(frozen=True)
class Step:
    """The measurements of one version.

    Attributes:
        version: the version.
        size: bytes of its objects.
        publish_seconds: time from the snapshot to the head in storage.
        sync_seconds: time from the head in storage until a follower has verified the version, by follower.
        apply_seconds: the part of it after the download of the patch, by follower; for an anchor, with the download.
        received_bytes: bytes that each follower's link has received, with headers and polls.
    """

    version: int
    size: int
    publish_seconds: float
    sync_seconds: tuple[float, ...]
    apply_seconds: tuple[float, ...]
    received_bytes: tuple[int, ...]

    @property
    def goodput(self) -> float:
        """The goodput of the median follower in Mbit/s."""
        return self.size * 8e-6 / statistics.median(self.sync_seconds)


class PublishingNetwork:
    """The publisher and the followers of one setup."""

    def __init__(self, namespaces: NamespaceNetwork, machines: Machines, setup: Setup) -> None:
        self._namespaces, self._machines, self._setup = namespaces, machines, setup
        self._followers = FOLLOWERS[: setup.followers]
        key = machines.workspace.keys["trainer"]
        self._space = machines.directory / "buckets" / "trainer"
        self._head = self._space / paths.head(key)

    def start(self, stack: ExitStack, pair: Path) -> None:
        """Start the publisher and the followers; `stack` ends them."""
        node = (sys.executable, "-m", "bench.wan_nodes")
        trainer = (*node, "publish", str(self._directory("trainer") / "run.toml"), "--pair", str(pair))
        self._spawn(stack, "trainer", *trainer, "--tensors", str(self._setup.tensors))
        manifest_file = (
            self._machines.directory / "buckets" / MEETING_BUCKET / paths.run(self._machines.workspace.run_id)
        )
        eventually(manifest_file.is_file, f"the run manifest is published; see {self._directory('trainer')}.terminal")
        for name in self._followers:
            self._spawn(stack, name, *node, "follow", str(self._directory(name) / "run.toml"), "--name", name)

    def _directory(self, name: str) -> Path:
        return self._machines.directory / name

    def _spawn(self, stack: ExitStack, name: str, *command: str) -> None:
        stack.enter_context(
            running(*self._namespaces.command_prefix(name), *command, log=Path(f"{self._directory(name)}.terminal"))
        )

    def publish(self, version: int) -> Step:
        """Let the trainer publish a version and wait until all followers have it."""
        bytes_before = {name: self._namespaces.carried_bytes(name)[1] for name in self._followers}
        (self._directory("trainer") / f"go-{version}").touch()
        eventually(
            lambda: len(self._verified_events(version)) == len(self._followers),
            f"all followers have version {version}",
            seconds=1200,
        )
        head_time = self._head.stat().st_ctime
        (snapshot_event,) = [
            event for event in self._machines.events("trainer", "trainer", "snapshot") if event["version"] == version
        ]
        return Step(
            version,
            self._size(version),
            head_time - snapshot_event["time"],
            tuple(event["time"] - head_time for event in self._verified_events(version)),
            tuple(event["apply_seconds"] for event in self._verified_events(version)),
            tuple(self._namespaces.carried_bytes(name)[1] - bytes_before[name] for name in self._followers),
        )

    def _verified_events(self, version: int) -> list[dict[str, Any]]:
        return [
            event
            for name in self._followers
            for event in self._machines.events(name, name, "verified")
            if event["version"] == version
        ]

    def _size(self, version: int) -> int:
        """Return the bytes of an anchor's shards, for version 0, or of a version's patch with all its parts."""
        key = self._machines.workspace.keys["trainer"]
        if version == 0:
            return sum(file.stat().st_size for file in (self._space / paths.kind_prefix(key, "anchors")).iterdir())
        published = self._machines.events("trainer", "trainer", "published")
        return int(next(event["patch_bytes"] for event in published if event["version"] == version))


@contextmanager
def running(*command: str, log: Path) -> Iterator["subprocess.Popen[bytes]"]:
    """Start a program and kill it at the end of the block."""
    with log.open("ab") as output:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def open_links(
    stack: ExitStack,
    namespaces: NamespaceNetwork,
    directory: Path,
    link: tuple[float, float, float],
    machines: Sequence[str] = tuple(ROLES),
) -> list["subprocess.Popen[bytes]"]:
    """Make the buckets below a directory and start their servers at the hub and a fault proxy on each machine.

    Args:
        stack: ends the servers and the proxies.
        namespaces: the machines.
        directory: parent of the buckets and of the logs.
        link: rate in Mbit/s, seconds of a round trip, and share of requests that get a fault.
        machines: their names.

    Returns:
        The processes of the proxies.
    """
    rate, latency, share = link
    make_buckets(directory / "buckets", machines)
    servers = [
        stack.enter_context(serving(directory / "buckets", *options, address=HUB, within=namespaces.command_prefix()))
        for options in (AUTH_OPTIONS, PUBLIC_WITHOUT_ETAGS)
    ]
    proxy = [sys.executable, "-m", "bench.fault_proxy", "--latency", str(latency), "--share", str(share)]
    for port, server in zip(PROXY_PORTS, servers, strict=True):
        proxy += ["--port", f"{port}={server.removeprefix('http://')}"]
    for name in machines:
        namespaces.limit(name, rate)
    return [
        stack.enter_context(running(*namespaces.command_prefix(name), *proxy, log=directory / f"{name}.proxy"))
        for name in machines
    ]


def create_run(directory: Path, pair: Path, tensors: int) -> workspace.Workspace:
    """Create a run whose genesis is version 0 of `weights_of` instead of a packaged policy."""
    proof = directory / proof_file.NAME
    proof.write_text(small_policy.proof_of(small_policy.DIRECTORY).to_json(), encoding="utf-8")
    run_workspace = workspace.create(directory / "creator", recipe(1.2), policy=small_policy.DIRECTORY, proof=proof)
    manifest = creation.open_run((run_workspace.directory / "run.manifest").read_bytes()).record
    genesis = digest_weights(weights_of(0, safetensors.read(pair.read_bytes()), tensors))
    manifest = manifest.model_copy(update={"model": manifest.model.model_copy(update={"genesis": genesis})})
    signed = creation.sign_manifest(manifest, SigningKey(key_files.read(run_workspace.directory / "keys" / "root.key")))
    (run_workspace.directory / "run.manifest").write_bytes(signed.data)
    return replace(run_workspace, run_id=signed.digest)


def run(setup: Setup, directory: Path, pair: Path) -> list[Step]:
    """Publish the anchor, then the patches, and return the measurements of each."""
    directory.mkdir(parents=True)
    with ExitStack() as stack:
        namespaces = stack.enter_context(NamespaceNetwork.open(tuple(ROLES)))
        run_workspace = create_run(directory, pair, setup.tensors)
        open_links(stack, namespaces, directory, (setup.rate, setup.latency, setup.share))
        machines = Machines(directory, run_workspace, ROLES, *(f"http://127.0.0.1:{port}" for port in PROXY_PORTS))
        network = PublishingNetwork(namespaces, machines, setup)
        network.start(stack, pair)
        return [network.publish(version) for version in range(setup.patches + 1)]


def row(setup: Setup, steps: Sequence[Step]) -> dict[str, str]:
    """Return the cells of a row by column."""
    anchor, *patches = steps
    sync_seconds = sorted(time for step in patches for time in step.sync_seconds)
    size = statistics.median(step.size for step in patches)
    received_bytes = statistics.median(count for step in patches for count in step.received_bytes)
    seconds = {
        "publish": statistics.median(step.publish_seconds for step in patches),
        "sync": statistics.median(sync_seconds),
        "slowest sync": sync_seconds[-1],
        "apply": statistics.median(time for step in patches for time in step.apply_seconds),
        "at link rate": size * 8e-6 / setup.rate,
        "7B": BIG_PATCH_BYTES * 8e-6 / anchor.goodput,
    }
    return {
        "Mbit/s": f"{setup.rate:g}",
        "policy": f"{setup.tensors * ROWS * COLUMNS / 1e6:.0f}M",
        "anchor": f"{anchor.size / 1e6:.1f} MB",
        "anchor sync": f"{statistics.median(anchor.sync_seconds):.1f} s",
        "goodput": f"{anchor.goodput:.1f}",
        "patch": f"{size / 1e6:.3f} MB",
        "link bytes": f"{received_bytes / 1e6:.3f} MB",
        **{name: f"{value:.2f} s" for name, value in seconds.items()},
    }


def main() -> None:
    """Measure each rate and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", default="1,10,100,400,1000", help="rates of every link in Mbit/s, with commas")
    parser.add_argument("--latency", type=float, default=0.04, help="seconds of a round trip")
    parser.add_argument("--share", type=float, default=0.0, help="share of requests that get a fault")
    parser.add_argument("--patches", type=int, default=5, help="number of patches for each rate")
    parser.add_argument("--followers", type=int, default=len(FOLLOWERS), help="number of followers")
    parser.add_argument("--tensors", type=int, default=0, help="of 4.2M elements each; 0 for those that fit the rate")
    parser.add_argument("--out", type=Path, default=None, help="directory of the runs; the default is a new one")
    arguments = parser.parse_args()
    out = (arguments.out or Path(tempfile.mkdtemp(prefix="grailnode-wan-"))).absolute()
    out.mkdir(parents=True, exist_ok=True)
    pair = out / "pair.safetensors"
    if not pair.exists():
        trajectory = simulate(ROWS, COLUMNS, 0)
        before, after = trajectory.views(find_rate(trajectory, 2 * TARGETS["A1"]))
        pair.write_bytes(safetensors.write({"before": before, "after": after}))
    for number, rate in enumerate(map(float, arguments.rates.split(","))):
        setup = Setup(
            rate, arguments.latency, arguments.share, arguments.patches, arguments.followers, arguments.tensors
        )
        steps = run(setup, out / f"{rate:g}", pair)
        (out / f"{rate:g}.json").write_text(json.dumps([step.__dict__ for step in steps]))
        cells = row(setup, steps)
        if number == 0:
            print(f"| {' | '.join(cells)} |\n{'|---' * len(cells)}|")
        print(f"| {' | '.join(cells.values())} |", flush=True)


if __name__ == "__main__":
    main()
