"""The whole network over a small internet: `python -m bench.wan_network --rate 10 --latency 0.1 --share 0.02 --minutes
3`.

As bench/wan.py, but with real nodes: a trainer, two miners and two validators as `grailnode --role ...`, learning, on
windows of 10 seconds. Prints what was judged and learned, how long a version took from its publication to serving in
each node, what each link carried, and what bench/crash_audit.py finds.
"""

import argparse
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

from bench import crash_site
from bench.crash_audit import audit
from bench.namespaces import Internet
from bench.soak import CHOICES, PATIENCE, ROLES, SETTINGS, Site, progress, proxy, start_all
from bench.wan import NEAR, open_links
from grailnode.calibration import proof_file
from grailnode.config import load
from grailnode.run import workspace
from tests.support.processes.separate_buckets import PUBLIC, SIGNED, Machines
from tests.support.servers.rclone import serving
from tests.support.simulation import small_policy


@contextmanager
def network(net: Internet, directory: Path, window: float) -> Iterator[Machines]:
    """The nodes, each in its namespace, until the end of the block."""
    pace = replace(crash_site.PACE, period_ms=round(1000 * window / CHOICES.rounds))
    proof = directory / proof_file.NAME
    proof.write_text(small_policy.proof(small_policy.DIRECTORY).to_json(), encoding="utf-8")
    made = workspace.create(directory / "founder", CHOICES, pace, policy=small_policy.DIRECTORY, proof=proof)
    settings = SETTINGS.format(policy=small_policy.DIRECTORY.absolute())
    urls = (f"http://127.0.0.1:{port}" for port in NEAR)
    machines = Machines(directory, made, ROLES, *urls, settings=settings, patience=PATIENCE, within=net.within)
    try:
        start_all(machines)
        yield machines
    finally:
        machines.end()


def latencies(site: Site) -> dict[str, list[float]]:
    """Seconds from a version's publication until a node serves it; it waits there for a window that wants it, too."""
    published = {event["version"]: event["time"] for event in site.events("trainer/upload", "published")}
    found: dict[str, list[float]] = {}
    for name in (name for name in ROLES if name != "trainer"):
        first: dict[int, float] = {}
        for event in site.events(name, "serving"):
            first.setdefault(event["version"], event["time"])
        found[name] = [at - published[version] for version, at in first.items() if version in published]
    return found


def main() -> None:
    """Run and print; exit with 1 on any violation."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", type=float, default=10.0, help="Mbit/s of every link")
    parser.add_argument("--latency", type=float, default=0.1, help="seconds of a round trip")
    parser.add_argument("--share", type=float, default=0.02, help="of requests that meet a fault")
    parser.add_argument("--minutes", type=float, default=3.0)
    parser.add_argument("--window", type=float, default=10.0, help="seconds")
    parser.add_argument("--out", type=Path, default=None)
    arguments = parser.parse_args()
    out = (arguments.out or Path(tempfile.mkdtemp(prefix="grailnode-wan-"))).absolute()
    out.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        net = stack.enter_context(Internet.open(tuple(ROLES)))
        links = open_links(stack, net, out, (arguments.rate, arguments.latency, arguments.share))
        machines = stack.enter_context(network(net, out, arguments.window))
        time.sleep(60 * arguments.minutes)
        for link in links:
            link.send_signal(signal.SIGUSR1)
        time.sleep(arguments.window * (2 + CHOICES.verdict_rounds / CHOICES.rounds))
        carried = {name: net.passed(name) for name in ROLES}
        site = Site(machines, load(out / "trainer" / "run.toml"))
        servers = [stack.enter_context(serving(out / "buckets", *options)) for options in (SIGNED, PUBLIC)]
        stack.enter_context(proxy(NEAR, servers, 0.0, out / "audit.proxy"))  # the auditor is on none of the machines
        found = audit(site)
    print(progress(site))
    for name, seconds in latencies(site).items():
        print(f"{name}: {len(seconds)} versions, published to serving {statistics.median(seconds):.1f} s (median)")
    for name, (sent, received) in carried.items():
        print(f"{name}: {sent / 1e6:.2f} MB sent, {received / 1e6:.2f} MB received")
    for line in sorted(set(found)):
        print(f"violated: {line}")
    print(f"{len(set(found))} violations; everything lies in {out}")
    sys.exit(1 if found else 0)


if __name__ == "__main__":
    main()
