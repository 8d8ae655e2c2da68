"""Sites that train one policy as real processes: one is killed and comes back, another joins, one has several ranks,
one copies what another sends, and one lies about the comparison of a spread round.
"""

import os
import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from grailnode.node.process_launch import TRAINER_KINDS
from grailnode.run import workspace
from tests.support.builders.recipes import demo_recipe
from tests.support.processes.command_line import run_command, succeed
from tests.support.processes.network_of_processes import RULES, NetworkOfProcesses, wait_until_gone
from tests.support.processes.programs import eventually, members
from tests.support.processes.separate_buckets import Machines, serving_buckets

FOLLOWERS = ("validator", "miner-1", "miner-2")
# windows twice as long as elsewhere, so that sites of a busy machine contribute within a round, too
NETWORK_RULES = RULES.changed(trainers=2).in_rounds(2 * RULES.rounds)


def counted_rounds(network: NetworkOfProcesses, worker: str) -> list[int]:
    """Return the numbers of the rounds in which a contribution of a site counted, as the site saw it."""
    return [event["number"] for event in network.events(worker, "round-applied") if event["counts_own"]]


def closed_rounds(network: NetworkOfProcesses) -> list[int]:
    return [event["number"] for event in network.events("trainer-coordinator", "round-closed")]


def has_counted_again(network: NetworkOfProcesses, worker: str, rounds: int, after: int = 0) -> bool:
    """Return whether so many contributions of a site count in rounds after some round."""
    return sum(number > after for number in counted_rounds(network, worker)) >= rounds


@pytest.mark.slow
def test_sites_end_with_one_state_though_one_was_killed_and_another_came_late(network: NetworkOfProcesses):
    for name in ("trainer", "worker-1", "worker-2", *FOLLOWERS):
        network.start(name.partition("-")[0], name)
    for name in ("worker-1", "worker-2"):
        eventually(partial(has_counted_again, network, name, 1), f"a contribution of {name} counts")

    victim = network.programs["worker-1"]
    victim.kill()
    wait_until_gone(victim)
    killed = max(closed_rounds(network))
    eventually(lambda: max(closed_rounds(network)) >= killed + 2, "rounds are closed without the killed site")
    eventually(partial(has_counted_again, network, "worker-2", 1, killed), "the other site counts alone")
    closed = max(closed_rounds(network))
    network.start("worker", "worker-1")
    eventually(partial(has_counted_again, network, "worker-1", 2, closed), "the killed site counts again")

    key = run_command("keys", "new", str(network.workspace.directory / "keys" / "worker-3.key")).stdout.split()[-1]
    succeed("keys", "grant", key, "--role", "worker", "--run", str(network.workspace.config))
    network.start("worker", "worker-3")
    eventually(partial(has_counted_again, network, "worker-3", 2), "contributions of the late site count")

    network.stop(*FOLLOWERS)
    last = max(closed_rounds(network)) + 1
    workers = ("worker-1", "worker-2", "worker-3")

    def have_applied() -> bool:
        return all(any(event["number"] >= last for event in network.events(name, "round-applied")) for name in workers)

    eventually(have_applied, "all sites apply one more round")
    for name in ("trainer", *workers):
        network.stop(name)

    states = network.values(workers, "round-applied", "number", "state")
    assert all(len(digests) == 1 for digests in states.values())
    assert len(states) >= killed + 2
    reasons = ",".join(event["refused"] for event in network.events("trainer-coordinator", "round-closed"))
    assert f"{network.workspace.keys['worker-1'].hex()[:8]}:lost" in reasons
    for process in (*(f"trainer-{kind}" for kind in TRAINER_KINDS), *workers, *FOLLOWERS):
        assert not network.events(process, "alarm")

    verdicts = [event for event in network.events("validator", "verdict") if event["accepted"] + event["rejected"]]
    assert verdicts
    assert all(verdict["rejected"] == 0 for verdict in verdicts)
    versions = [event["version"] for event in network.events("trainer-coordinator", "published")]
    assert versions == list(range(versions[-1] + 1))
    for name in FOLLOWERS:
        failures = [event["error"] for event in network.events(name, "cannot-follow")]
        assert all("under revision 1 of the authority" in error for error in failures)  # until the next poll for it
    weights = network.values(FOLLOWERS, "serving", "version", "weights")
    assert len(weights) >= 3
    assert all(len(digests) == 1 for digests in weights.values())
    succeed("verify", "--run", str(network.workspace.config))


@pytest.mark.slow
def test_a_site_on_two_ranks_contributes_and_goes_on_when_one_of_them_is_killed(network: NetworkOfProcesses):
    network.start("trainer", "trainer")
    network.start("worker", "worker-1", "--set", "trainer.gpus=2")
    for name in ("worker-2", "validator", "miner-1"):
        network.start(name.partition("-")[0], name)
    for name in ("worker-1", "worker-2"):
        eventually(partial(has_counted_again, network, name, 1), f"contributions of {name} count")

    site = network.programs["worker-1"]
    os.kill(members(site.session)[-1], signal.SIGKILL)
    eventually(lambda: len(network.events("worker-1", "started")) == 2, "the site has started again")
    closed = max(closed_rounds(network))
    # the first of two may have been sent before the kill
    eventually(partial(has_counted_again, network, "worker-1", 2, closed), "the site counts again")

    states = network.values(("worker-1", "worker-2"), "round-applied", "number", "state")
    assert not network.events("worker-1", "alarm") + network.events("worker-2", "alarm")
    assert len(states) >= 2
    assert all(len(digests) == 1 for digests in states.values())


# Each site writes to a bucket of its own on a real S3 server


HOSTILE = "worker-3"
COPIES = {HOSTILE: "copy-payload", "worker-4": "copy-record"}
ROLES = {"trainer": "trainer", "validator": "validator", "miner-1": "miner"}
SETTINGS = """
[trainer]
groups_per_step = 2
anchor_interval = 5
poll_seconds = 0.5

[trainer.outer]
local_steps = 2
round_windows = 2
spread = 1
payload_seconds = 5.0

[validator]
evaluate = false
"""


@pytest.fixture
def machines(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Machines]:
    """Start all nodes but hostile sites; there are three sites, or as many as a parameter says."""
    sites = getattr(request, "param", 3)
    roles = ROLES | {f"worker-{number}": "worker" for number in range(1, sites + 1)}
    with serving_buckets(tmp_path / "buckets", roles) as (endpoint, public):
        recipe = demo_recipe(trainers=sites, evaluation_problems=16, deposit=0.0, window=6.0)
        founder = workspace.create(tmp_path / "founder", recipe, miners=("miner-1",))
        machines = Machines(tmp_path, founder, roles, endpoint, public, settings=SETTINGS)
        machines.start("trainer")
        published = tmp_path / "buckets" / "square" / "runs" / founder.run_id.hex()
        eventually(published.is_file, "the rules of the run are published")
        for name in roles:
            if name not in ("trainer", *COPIES):
                machines.start(name)
        yield machines
        machines.end()


def outcomes(machines: Machines, name: str) -> dict[int, str]:
    """Return what became of a site's contributions, by round: counted, or the reason why not."""
    key, found = machines.workspace.keys[name].hex()[:8], {}
    for event in machines.events("trainer", "trainer-coordinator", "round-closed"):
        reasons = dict(item.split(":") for item in event["refused"].split(",") if item)
        if event["number"] > 0:
            found[event["number"]] = reasons.get(key, "counted")
    return found


def counts_after(machines: Machines, name: str, number: int) -> bool:
    return any(other > number and what == "counted" for other, what in outcomes(machines, name).items())


def honest_sites_are_refused_for_nothing_that_they_sent(machines: Machines, *names: str) -> None:
    """Check it; a site of a busy machine may be late. All sites must have applied the same states."""
    for name in names:
        assert set(outcomes(machines, name).values()) <= {"counted", "lost", "late"}
    states: dict[int, set[str]] = {}
    for name in names:
        for event in machines.events(name, name, "round-applied"):
            states.setdefault(event["number"], set()).add(event["state"])
    assert all(len(digests) == 1 for digests in states.values())


@pytest.mark.slow
@pytest.mark.parametrize("machines", [4], indirect=True)
def test_a_site_that_copies_another_one_costs_it_no_round(machines: Machines):
    """Two do: one as soon as storage shows the payload, and one that waits for the record."""
    for name, kind in COPIES.items():
        machines.start_hostile(kind, name, machines.workspace.keys["worker-1"].hex())

    def refused_beside_its_victim(name: str) -> int:
        copies = [number for number, what in outcomes(machines, name).items() if what == "malformed"]
        return sum(outcomes(machines, "worker-1").get(number) == "counted" for number in copies)

    what = "copies are refused in three rounds that count the victim"
    eventually(lambda: min(map(refused_beside_its_victim, COPIES)) >= 3, what, seconds=600)
    honest_sites_are_refused_for_nothing_that_they_sent(machines, "worker-1", "worker-2")
    for name in COPIES:
        assert set(outcomes(machines, name).values()) <= {"malformed", "lost", "late"}


@pytest.mark.slow
def test_spread_rounds_go_on_beside_a_site_that_lies_and_one_that_is_killed_in_a_round(machines: Machines):
    machines.start_hostile("liar", HOSTILE)
    liar = f"worker {machines.workspace.keys[HOSTILE].hex()[:16]} computed wrong products"

    def alarms() -> list[str]:
        return [event["error"] for event in machines.events("trainer", "trainer-coordinator", "alarm")]

    eventually(lambda: any(line.startswith(liar) for line in alarms()), "the liar is named", seconds=600)

    def sent_to_the_open_round() -> int:
        sent = max((event["number"] for event in machines.events("worker-2", "worker-2", "contributed")), default=0)
        return sent if sent > max(outcomes(machines, "worker-2")) else 0

    eventually(lambda: sent_to_the_open_round() > 0, "the second site has contributed to a round that is not closed")
    number = sent_to_the_open_round() or max(outcomes(machines, "worker-2"))
    machines.programs["worker-2"].end()
    eventually(lambda: counts_after(machines, "worker-1", number + 1), "rounds go on without the killed site")
    machines.start("worker-2")
    last = max(outcomes(machines, "worker-2"))
    eventually(lambda: counts_after(machines, "worker-2", last), "the killed site counts again")
    eventually(lambda: counts_after(machines, HOSTILE, last), "what the liar has learned still counts")

    honest_sites_are_refused_for_nothing_that_they_sent(machines, "worker-1", "worker-2")
    assert all(line.startswith(liar) for line in alarms())
