"""A whole learning network over slow links: `python -m bench.wan_network --rate 10 --latency 0.1 --minutes 3`.

The network is that of bench/wan.py, but with real nodes: a trainer, two miners and two validators run as
`grailnode --role ...` and learn in windows of 10 seconds. The command prints how much was judged and learned, the time
from a version's publication until each node serves it, the bytes on each link, and all violations of invariants
(bench/crash_audit.py), and exits with 1 if there are any. It takes --minutes and one more. It needs root on Linux,
`ip`, `tc` and rclone (the `test` extra).
"""

import argparse
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from bench.crash_audit import find_violations
from bench.soak import ROLES, RULES, SETTINGS, TIMEOUTS, NodeNetwork, fault_proxy, progress, recipe, start_all
from bench.wan import PROXY_PORTS, open_links
from grailnode.calibration import proof_file
from grailnode.config import load
from grailnode.run import workspace
from tests.support.processes.namespaces import NamespaceNetwork
from tests.support.processes.separate_buckets import AUTH_OPTIONS, PUBLIC_OPTIONS, Machines
from tests.support.servers.rclone import serving
from tests.support.simulation import small_policy


@contextmanager
def start_network(namespaces: NamespaceNetwork, directory: Path, window: float) -> Iterator[Machines]:
    """Start the nodes, each in its namespace, and stop them at the end of the block."""
    proof = directory / proof_file.NAME
    proof.write_text(small_policy.proof_of(small_policy.DIRECTORY).to_json(), encoding="utf-8")
    run_workspace = workspace.create(directory / "creator", recipe(window), policy=small_policy.DIRECTORY, proof=proof)
    settings = SETTINGS.format(policy=small_policy.DIRECTORY.absolute())
    urls = (f"http://127.0.0.1:{port}" for port in PROXY_PORTS)
    machines = Machines(
        directory, run_workspace, ROLES, *urls,
        settings=settings, patience=TIMEOUTS, within=namespaces.command_prefix,
    )  # fmt: skip
    try:
        start_all(machines)
        yield machines
    finally:
        machines.end()


def serving_delays(network: NodeNetwork) -> dict[str, list[float]]:
    """Return the seconds from a version's publication until a node serves it, by node.

    They include the time in which the node waits for a window that uses the version.
    """
    publication_times = {event["version"]: event["time"] for event in network.events("trainer/upload", "published")}
    delays: dict[str, list[float]] = {}
    for name in (name for name in ROLES if name != "trainer"):
        serving_times: dict[int, float] = {}
        for event in network.events(name, "serving"):
            serving_times.setdefault(event["version"], event["time"])
        versions = serving_times.keys() & publication_times.keys()
        delays[name] = [serving_times[version] - publication_times[version] for version in versions]
    return delays


def main() -> None:
    """Run the network, print, and exit with 1 on a violation."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", type=float, default=10.0, help="Mbit/s of every link")
    parser.add_argument("--latency", type=float, default=0.1, help="seconds of a round trip")
    parser.add_argument("--share", type=float, default=0.02, help="share of requests that get a fault")
    parser.add_argument("--minutes", type=float, default=3.0, help="how long the network runs")
    parser.add_argument("--window", type=float, default=10.0, help="seconds of a window")
    parser.add_argument("--out", type=Path, default=None, help="directory of the network; the default is a new one")
    arguments = parser.parse_args()
    out = (arguments.out or Path(tempfile.mkdtemp(prefix="grailnode-wan-"))).absolute()
    out.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        namespaces = stack.enter_context(NamespaceNetwork.open(tuple(ROLES)))
        links = open_links(stack, namespaces, out, (arguments.rate, arguments.latency, arguments.share))
        machines = stack.enter_context(start_network(namespaces, out, arguments.window))
        time.sleep(60 * arguments.minutes)
        for link in links:
            link.send_signal(signal.SIGUSR1)
        time.sleep(arguments.window * (2 + RULES.verdict_rounds / RULES.rounds))
        link_bytes = {name: namespaces.carried_bytes(name) for name in ROLES}
        network = NodeNetwork(machines, load(out / "trainer" / "run.toml"))
        servers = [
            stack.enter_context(serving(out / "buckets", *options)) for options in (AUTH_OPTIONS, PUBLIC_OPTIONS)
        ]
        # The check runs on none of the machines and needs a way of its own to the servers.
        stack.enter_context(fault_proxy(PROXY_PORTS, servers, 0.0, out / "audit.proxy"))
        violations = find_violations(network)
    print(progress(network))
    for name, seconds in serving_delays(network).items():
        print(f"{name}: {len(seconds)} versions, served {statistics.median(seconds):.1f} s after publication (median)")
    for name, (sent_bytes, received_bytes) in link_bytes.items():
        print(f"{name}: {sent_bytes / 1e6:.2f} MB sent, {received_bytes / 1e6:.2f} MB received")
    for line in sorted(set(violations)):
        print(f"violation: {line}")
    print(f"{len(set(violations))} violations; all files are in {out}")
    sys.exit(1 if violations else 0)


if __name__ == "__main__":
    main()
