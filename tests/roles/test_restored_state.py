"""A node that is started with an old copy of its state seals no window twice and publishes no second history. It says
so in one line, and a repair lets it go on.
"""

import re
import shutil
from pathlib import Path

import pytest
import trio

from protocol import paths
from protocol.chain.manifest import Manifest
from protocol.identity.signing import open_announced
from protocol.judging.ledger import Seal
from tests.support.builders.snapshots import put_snapshot
from tests.support.simulation.damaged_states import LEARNABLE, NODES, Outcome, outcome, repair
from tests.support.simulation.disk_network import DiskNetwork
from tests.support.simulation.network import key
from tests.support.simulation.virtual_clock import simulate

COPIES = 12
SECONDS = 0.7  # between two copies; a window takes two seconds
WINDOWS = 6


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> DiskNetwork:
    """A network that was stopped after some windows. Beside its states are copies of them, the oldest in `0`."""
    root = tmp_path_factory.mktemp("network")

    async def copy_states(stopped: DiskNetwork) -> None:
        await stopped.until_window(1)
        for number in range(COPIES):
            shutil.copytree(root / "now", root / str(number), ignore=shutil.ignore_patterns(".tmp"))
            await trio.sleep(SECONDS)

    async def live() -> DiskNetwork:
        stopped = DiskNetwork(root / "now", LEARNABLE)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(copy_states, stopped)
            await stopped.live(WINDOWS, NODES, seconds=1.3)
            nursery.cancel_scope.cancel()
        return stopped

    return simulate(live)


def restored(network: DiskNetwork, root: Path, name: str, copy: int | None) -> DiskNetwork:
    """Return the network with an old copy of one node's state; None for an empty state."""
    other = network.copy(root)
    shutil.rmtree(root / name)
    if copy is not None:
        shutil.copytree(network.root.parent / str(copy) / name, root / name)
    return other


def contradictions(network: DiskNetwork) -> list[str]:
    """Return the seals and manifests of which there were ever two."""
    seals: dict[str, set[bytes]] = {}
    for put in network.store.under(paths.kind_prefix(key("validator-0").public, "seals")):
        seals.setdefault(put.path, set()).add(open_announced(put.data, Seal).record.summary)
    manifests: dict[str, set[bytes]] = {}
    for put in network.store.under(paths.manifests(key("trainer").public)):
        signed = open_announced(put.data, Manifest)
        manifests.setdefault(f"version {signed.record.version}", set()).add(signed.digest)
    return [place for items in (seals, manifests) for place, digests in items.items() if len(digests) > 1]


def alarms(network: DiskNetwork) -> list[str]:
    return [event["error"] for log in network.logs.values() for event in log.named("alarm")]


@pytest.mark.parametrize("name", NODES)
@pytest.mark.parametrize("copy", [None, *range(COPIES)])
def test_an_old_copy_of_a_state_contradicts_nothing(network: DiskNetwork, tmp_path: Path, name: str, copy: int | None):
    async def scenario() -> tuple[DiskNetwork, Outcome]:
        other = restored(network, tmp_path / "states", name, copy)
        return other, await outcome(other, name, windows=3)

    other, result = simulate(scenario)
    assert result.fault is None
    if result.line is not None:
        assert "`grailnode repair`" in result.line
    assert contradictions(other) == []
    assert alarms(other) == []


@pytest.mark.parametrize("name", NODES)
@pytest.mark.parametrize("copy", [None, *range(0, COPIES, 3)])
def test_a_repaired_old_copy_continues_what_was_published(
    network: DiskNetwork, tmp_path: Path, name: str, copy: int | None
):
    async def scenario() -> tuple[DiskNetwork, Outcome]:
        other = restored(network, tmp_path / "states", name, copy)
        print(*await repair(other, name), sep="\n")
        return other, await outcome(other, name, windows=7)

    other, result = simulate(scenario)
    assert result == Outcome()
    assert contradictions(other) == []
    assert alarms(other) == []
    assert work_after(network.run.window_at(network.end), other, name)


def test_an_old_snapshot_in_the_outbox_is_not_taken_for_the_newest_weights(network: DiskNetwork, tmp_path: Path):
    """The backup was made between a version's head and the deletion of its snapshot."""

    async def scenario() -> tuple[DiskNetwork, Outcome]:
        other = restored(network, tmp_path / "states", "trainer", 0)
        await put_snapshot(other.durable("trainer", ""), 0, other.weights)
        await repair(other, "trainer")
        return other, await outcome(other, "trainer", windows=7)

    other, result = simulate(scenario)
    assert result == Outcome()
    assert contradictions(other) == []
    assert other.events("trainer/upload", "published")


def work_after(window: int, network: DiskNetwork, name: str) -> bool:
    """Return whether a node has published work on later windows."""
    kind = {"trainer": "manifests", "validator-0": "summaries", "miner-1": "commitments"}[name]
    prefix = paths.kind_prefix(key(name).public, kind)
    if name == "trainer":
        return bool(network.events("trainer/upload", "published"))
    return any(paths.window_of(put.path) > window for put in network.store.under(prefix))


@pytest.mark.parametrize("name", ["trainer", "validator-0"])
def test_the_line_says_what_is_published_and_not_in_the_state(network: DiskNetwork, tmp_path: Path, name: str):
    async def scenario() -> Outcome:
        return await outcome(restored(network, tmp_path / "states", name, 0), name)

    line = simulate(scenario).line
    assert line is not None
    if name == "trainer":
        assert re.search(r"storage shows version \d, which this node.s state did not publish", line)
    else:
        assert "ends with window" in line
        assert "but this validator has published window" in line
