"""Five sites with buckets of their own over slow links: `python -m bench.outer_network --rate 10`.

Trainer, sites, a validator and two miners run as `grailnode --role ...`, each in a network namespace with a limited
link (tests/support/processes/namespaces.py), and write to buckets of their own on a real S3 server (rclone). Four sites
train from the beginning. One of them has a tenth of the others' rate, one is killed with SIGKILL after a quarter of the
rounds and starts again after half of them, and a fifth one starts then. One is poisoned: its weight decay takes 4% off
all weights in each local step.

The command prints the length of the rounds; for each site its contributions that counted, why others were refused, the
median seconds from the opening of a round to its contribution and from the end of a round until it has applied it, the
share of the time in which it took local steps, and the bytes on its link; and what the followers noticed. It exits with
1 if two sites applied different states, if the poisoned site was never refused, or if a group was rejected for another
reason than a late upload.

With `--copier payload` or `--copier record` there are three honest sites, to which nothing happens, and one that copies
what the first one sends, as soon as storage shows its payload or its record (tests/support/adversaries). The command
prints how many copies were in storage first, and exits with 1 if another site was refused for what it sent.

It needs root on Linux, `ip`, `tc`, rclone (the `test` extra) and 6 GB of free memory, and takes about 10 seconds a
round. With less memory it may wait in vain for the first round.
"""

import argparse
import statistics
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final

from bench.soak import TIMEOUTS
from bench.wan import PROXY_PORTS, open_links
from grailnode.run import workspace
from protocol import paths
from tests.support.builders.recipes import demo_recipe
from tests.support.processes.namespaces import NamespaceNetwork
from tests.support.processes.programs import eventually
from tests.support.processes.separate_buckets import MEETING_BUCKET, Machines

SITES: Final = tuple(f"worker-{number}" for number in range(1, 6))
KILLED, SLOW, POISONED, LATE = SITES[1:]
LATE_UPLOAD: Final = "missing"
"""Why groups are rejected that a miner could not upload in time."""

COPIER: Final = POISONED
VICTIM: Final = SITES[0]
BUSY: Final = {"lost", "late", "quorum"}
"""Why sites are refused that were not ready in time, or alone in a round that had too few of them."""

FOLLOWERS: Final = ("validator", "miner-1", "miner-2")
ROLES: Final = {
    "trainer": "trainer",
    **dict.fromkeys(SITES, "worker"),
    "validator": "validator",
    "miner-1": "miner",
    "miner-2": "miner",
}
_SETTINGS: Final = """
[engine]
threads = 1

[trainer]
groups_per_step = 2
learning_rate = 2e-6
anchor_interval = 10
poll_seconds = 0.5

[trainer.outer]
local_steps = 4
quorum = 2
delay = {delay}
round_windows = 2
upload_seconds = 3.0

[validator]
evaluate = false
"""
_POISON: Final = ("learning_rate = 2e-6", "learning_rate = 2e-6\nweight_decay = 2e4")


class SiteNetwork:
    """The nodes at work, and what their logs say; `sites` are those that train."""

    def __init__(self, machines: Machines, sites: Sequence[str]) -> None:
        self.machines, self.sites = machines, sites

    def events(self, name: str, event: str) -> list[dict[str, Any]]:
        """Return the events of a node."""
        return self.machines.events(name, "trainer-coordinator" if name == "trainer" else name, event)

    def newest_round(self) -> int:
        """Return the number of the newest round that is closed; -1 before the first is open."""
        return max((event["number"] for event in self.events("trainer", "round-closed")), default=-1)

    def wait_for_round(self, number: int) -> None:
        """Wait until a round is closed."""
        eventually(lambda: self.newest_round() >= number, f"round {number} is closed", seconds=60 + 60 * number)

    def states(self) -> dict[int, set[str]]:
        """Return the digests of the states that sites have applied, by round."""
        states: dict[int, set[str]] = {}
        for name in self.sites:
            for event in self.events(name, "round-applied"):
                states.setdefault(event["number"], set()).add(event["state"])
        return states

    def refusals(self, name: str) -> dict[str, int]:
        """Return how often the contributions of a site were refused, by reason."""
        own = self.machines.workspace.keys[name].hex()[:8]
        refused = (event["refused"] for event in self.events("trainer", "round-closed") if event["refused"])
        return dict(Counter(item[9:] for text in refused for item in text.split(",") if item.startswith(own)))

    def rejections(self) -> Counter[str]:
        """Return how many groups the validator has rejected, by its reasons for a miner's window."""
        rejected: Counter[str] = Counter()
        for event in self.events("validator", "verdict"):
            if event["rejected"]:
                rejected[event["reasons"]] += event["rejected"]
        return rejected


@contextmanager
def started(
    directory: Path, namespaces: NamespaceNetwork, delay: int, window: float, copier: str | None
) -> Iterator[SiteNetwork]:
    """Start all nodes but the late site, and stop them at the end of the block."""
    recipe = demo_recipe(trainers=len(SITES), evaluation_problems=16, window=window)
    sites = SITES if copier is None else tuple(name for name in SITES if name not in (COPIER, LATE))
    founder = workspace.create(directory / "creator", recipe)
    urls = (f"http://127.0.0.1:{port}" for port in PROXY_PORTS)
    machines = Machines(
        directory, founder, ROLES, *urls,
        settings=_SETTINGS.format(delay=delay), patience=TIMEOUTS, within=namespaces.command_prefix,
    )  # fmt: skip
    settings = directory / POISONED / "run.toml"
    settings.write_text(settings.read_text(encoding="utf-8").replace(*_POISON), encoding="utf-8")
    others = [name for name in (*sites, *FOLLOWERS) if name != LATE]
    try:
        machines.start("trainer")
        rules = directory / "buckets" / MEETING_BUCKET / paths.run(founder.run_id)
        eventually(rules.is_file, f"the trainer publishes the run; see {directory}/trainer.terminal")
        for name in others:
            machines.start(name)
        if copier is not None:
            machines.start_hostile(f"copy-{copier}", COPIER, founder.keys[VICTIM].hex())
        yield SiteNetwork(machines, sites)
    finally:
        machines.end()


def live(network: SiteNetwork, rounds: int) -> None:
    """Let the network live through some rounds. Without a copier, one site is killed and one comes late."""
    eventually(partial(_has_counted, network), "a round counts two sites", seconds=600)
    first = network.newest_round()
    if LATE in network.sites:
        network.wait_for_round(first + rounds // 4)
        network.machines.programs[KILLED].end()
        network.wait_for_round(first + rounds // 2)
        for name in (KILLED, LATE):
            network.machines.start(name)
    network.wait_for_round(first + rounds)
    last = network.newest_round()
    eventually(
        lambda: all(_newest_applied(network, name) >= last for name in network.sites), "all sites apply the last round"
    )


def _has_counted(network: SiteNetwork) -> bool:
    return any(event["counted"] >= 2 for event in network.events("trainer", "round-closed"))


def _newest_applied(network: SiteNetwork, name: str) -> int:
    return max((event["number"] for event in network.events(name, "round-applied")), default=-1)


def print_results(network: SiteNetwork, namespaces: NamespaceNetwork) -> None:
    """Print a line on the rounds, a table of the sites, and a line on the followers."""
    closed = {event["number"]: event for event in network.events("trainer", "round-closed")}
    numbers = [number for number in closed if number - 1 in closed]
    lengths = [closed[number]["time"] - closed[number - 1]["time"] for number in numbers]
    version = max(event["version"] for event in closed.values())
    print(f"{len(numbers)} rounds of {statistics.median(lengths):.1f} s (median), {version} versions")
    print("| site | counted | refused | payload | to contribute | to apply | computing | sent | received |")
    print("|---|---|---|---|---|---|---|---|---|")
    for name in network.sites:
        applied = network.events(name, "round-applied")
        contributions = network.events(name, "contributed")
        openings = {event["number"] + 1: event["time"] for event in closed.values()}
        to_contribute = [event["time"] - openings[event["number"]] for event in contributions]
        to_apply = [event["time"] - closed[event["number"]]["time"] for event in applied]
        steps = network.events(name, "local-step")
        computing = sum(event["seconds"] for event in steps) / (steps[-1]["time"] - steps[0]["time"])
        payload = statistics.median(event["payload_bytes"] for event in contributions)
        sent, received = namespaces.carried_bytes(name)
        cells = (
            f"{sum(event['counts_own'] for event in applied)} of {len(numbers)}",
            ", ".join(f"{count} {reason}" for reason, count in network.refusals(name).items()),
            f"{payload / 1e3:.0f} KB",
            f"{statistics.median(to_contribute):.1f} s",
            f"{statistics.median(to_apply):.1f} s",
            f"{computing:.0%}",
            f"{sent / 1e6:.2f} MB",
            f"{received / 1e6:.2f} MB",
        )
        print(f"| {name} | {' | '.join(cells)} |")
    missed = sum(len(network.events(name, "cannot-follow")) for name in FOLLOWERS)
    accepted = sum(event["accepted"] for event in network.events("validator", "verdict"))
    rejected = dict(network.rejections())
    print(f"validator: {accepted} groups accepted, rejected: {rejected}; followers: {missed} cannot-follow")


def print_copies(network: SiteNetwork) -> bool:
    """Print what became of the copier's contributions; return whether no other site was refused for what it sent."""
    copies = {event["number"]: event["time"] for event in network.events(COPIER, "copied")}
    sent = {event["number"]: event["time"] for event in network.events(VICTIM, "contributed")}
    first = sum(copies[number] < time for number, time in sent.items() if number in copies)
    print(f"{COPIER}: {len(copies)} copies, {first} before {VICTIM} had sent its record")
    print(f"refused: {network.refusals(COPIER)}; {VICTIM}: {network.refusals(VICTIM)}")
    return all(network.refusals(name).keys() <= BUSY for name in network.sites)


def main() -> None:
    """Run the network, print, and exit with 1 if the sites disagree or honest work was rejected."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", type=float, default=10.0, help="Mbit/s of every link")
    parser.add_argument("--latency", type=float, default=0.04, help="seconds of a round trip")
    parser.add_argument("--rounds", type=int, default=20, help="rounds after the first that counts")
    parser.add_argument("--delay", type=int, default=0, help="1: sites go on with local steps while a round closes")
    parser.add_argument("--window", type=float, default=4.0, help="seconds; a round has two windows")
    parser.add_argument("--copier", choices=("payload", "record"), help="what one site waits for, to copy it")
    parser.add_argument("--out", type=Path, default=None, help="directory of the network; the default is a new one")
    arguments = parser.parse_args()
    out = (arguments.out or Path(tempfile.mkdtemp(prefix="grailnode-outer-"))).absolute()
    out.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        namespaces = stack.enter_context(NamespaceNetwork.open(tuple(ROLES)))
        open_links(stack, namespaces, out, (arguments.rate, arguments.latency, 0.0), tuple(ROLES))
        if arguments.copier is None:
            namespaces.limit(SLOW, arguments.rate / 10)
        network = stack.enter_context(started(out, namespaces, arguments.delay, arguments.window, arguments.copier))
        live(network, arguments.rounds)
        print_results(network, namespaces)
        is_right = print_copies(network) if arguments.copier else "poisoned" in network.refusals(POISONED)
    states = network.states()
    different = [number for number, digests in states.items() if len(digests) > 1]
    print(f"rounds with different states: {different or 'none'}; all files are in {out}")
    sys.exit(1 if different or not is_right or network.rejections().keys() - {LATE_UPLOAD} else 0)


if __name__ == "__main__":
    main()
