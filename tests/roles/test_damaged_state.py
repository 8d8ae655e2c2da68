"""A node whose own state was damaged goes on rightly or ends with one clear line. It never publishes from it, and never
ends in a traceback.
"""

from pathlib import Path

import pytest

from tests.support.simulation.damaged_states import (
    DAMAGES,
    MOMENTS,
    Damage,
    Outcome,
    StateFile,
    bend,
    files_by_kind,
    outcome,
    repair,
    stopped_network,
)
from tests.support.simulation.disk_network import DiskNetwork
from tests.support.simulation.virtual_clock import simulate

BITS = 3
MAY_GO_ON = {".names", "inbox", "outcomes", "pending"}
"""Kinds with which a node may go on: damaged lines of the list of names do no harm while the files are there, a batch
in the inbox is written again while its intent is there, a pending window has no content, and the outcomes of a closed
window are not read.
"""


@pytest.fixture(scope="module")
def networks(tmp_path_factory: pytest.TempPathFactory) -> list[DiskNetwork]:
    """Networks that were stopped, one at each moment."""
    root = tmp_path_factory.mktemp("states")
    return [simulate(stopped_network, root / str(number), moment) for number, moment in enumerate(MOMENTS)]


@pytest.fixture(scope="module")
def files(networks: list[DiskNetwork]) -> dict[tuple[str, str], StateFile]:
    return {(state_file.node, state_file.kind): state_file for state_file in files_by_kind(networks)}


KINDS = [
    *(("trainer", f"chain/{kind}") for kind in ("anchors", "manifests", "weights")),
    *(("trainer", kind) for kind in (".names", "authority", "chain", "collector-progress", "inbox", "intents")),
    *(("trainer", kind) for kind in ("checkpoints", "outbox", "outcomes", "training", "weights")),
    *(("validator-0", kind) for kind in (".names", "authority", "ledger", "pending", "sealed", "trust", "witness")),
    *(("miner-1", kind) for kind in (".names", "authority", "trust")),
]


def test_the_states_have_an_object_of_every_kind(files: dict[tuple[str, str], StateFile]):
    assert sorted(files) == sorted(KINDS)


async def damaged(state_file: StateFile, root: Path, damage: Damage) -> Outcome:
    network = state_file.network.copy(root)
    damage(root / state_file.node / state_file.path)
    return await outcome(network, state_file.node)


@pytest.mark.parametrize("node, kind", KINDS)
def test_a_damaged_file_is_named_in_one_line_or_made_again(
    files: dict[tuple[str, str], StateFile], tmp_path: Path, node: str, kind: str
):
    state_file = files[node, kind]
    damages = DAMAGES | {f"bit {place}": bend(place) for place in range(BITS)}
    for number, (name, damage) in enumerate(damages.items()):
        result = simulate(damaged, state_file, tmp_path / str(number), damage)
        assert result.fault is None, f"{name}: {result.fault}"
        if result.line is not None:
            assert state_file.path in result.line, f"{name}: {result.line}"
            assert "`grailnode repair`" in result.line
        else:
            assert kind in MAY_GO_ON, name


@pytest.mark.slow
@pytest.mark.parametrize("node, kind", KINDS)
def test_a_repaired_state_is_gone_on_with(
    files: dict[tuple[str, str], StateFile], tmp_path: Path, node: str, kind: str
):
    state_file = files[node, kind]

    async def scenario(root: Path, damage: Damage) -> Outcome:
        network = state_file.network.copy(root)
        damage(root / state_file.node / state_file.path)
        lines = await repair(network, node)
        print(*lines, sep="\n")
        assert kind == ".names" or any(line.startswith(state_file.path) for line in lines)
        return await outcome(network, node)

    for name, damage in DAMAGES.items():
        assert simulate(scenario, tmp_path / name, damage) == Outcome()


def test_whole_states_are_gone_on_with(networks: list[DiskNetwork], tmp_path: Path):
    for number, network in enumerate(networks):
        for name in ("trainer", "validator-0", "miner-1"):
            copy = tmp_path / f"{number}-{name}"

            async def go_on(network=network, copy=copy, name=name) -> Outcome:
                return await outcome(network.copy(copy), name)

            assert simulate(go_on) == Outcome()
