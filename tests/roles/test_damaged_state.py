"""A node whose own state was damaged or is an old copy goes on rightly, or ends with one clear line."""

import re
import shutil
from pathlib import Path

import pytest
import trio

from grailnode.store.state.state_store import StateStore
from protocol import paths
from protocol.chain.manifest import Manifest
from protocol.identity.signing import open_announced, sign
from protocol.judging.ledger import Seal
from roles.trainer.collect.validator_monitor import DISTRUSTED, ValidatorMonitor
from roles.validator.ledger_state import FLOOR_PATH, Ledger
from tests.support.builders.snapshots import put_snapshot
from tests.support.pytest_options.few_daily import few_daily
from tests.support.simulation.damaged_states import (
    DAMAGES,
    LEARNABLE,
    MOMENTS,
    NODES,
    Damage,
    Death,
    DiskNetwork,
    Outcome,
    StateFile,
    bend,
    files_by_kind,
    outcome,
    repair,
    stopped_network,
)
from tests.support.simulation.network import key
from tests.support.simulation.virtual_clock import running, simulate

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
    *(
        ("trainer", kind)
        for kind in (".names", "acknowledged", "authority", "chain", "collector-progress", "inbox", "intents")
    ),
    *(("trainer", kind) for kind in ("checkpoints", "logprob-bias", "outbox", "outcomes", "training", "weights")),
    *(("validator-0", kind) for kind in (".names", "authority", "ledger", "pending", "sealed", "trust", "witness")),
    *(("miner-1", kind) for kind in (".names", "authority", "trust")),
]


def test_the_states_have_an_object_of_every_kind(files: dict[tuple[str, str], StateFile]):
    assert sorted(files) == sorted(KINDS)


async def damaged(state_file: StateFile, root: Path, damage: Damage) -> Outcome:
    network = state_file.network.copy(root)
    damage(root / state_file.node / state_file.path)
    return await outcome(network, state_file.node)


FILE_DAMAGES = DAMAGES | {f"bit {place}": bend(place) for place in range(BITS)}


@pytest.mark.parametrize("names", few_daily([[*FILE_DAMAGES][part::3] for part in (1, 0, 2)], 3), ids=", ".join)
@pytest.mark.parametrize("node, kind", KINDS)
def test_a_damaged_file_is_named_in_one_line_or_made_again(
    files: dict[tuple[str, str], StateFile], tmp_path: Path, node: str, kind: str, names: list[str]
):
    state_file = files[node, kind]
    for name in names:
        result = simulate(damaged, state_file, tmp_path / name, FILE_DAMAGES[name])
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
    """Each kind of file is missing, or has one of the other damages; `python -m bench.state` has all pairs."""
    state_file = files[node, kind]
    others = [name for name in DAMAGES if name != "missing"]

    async def scenario(root: Path, damage: Damage) -> Outcome:
        network = state_file.network.copy(root)
        damage(root / state_file.node / state_file.path)
        lines = await repair(network, node)
        print(*lines, sep="\n")
        assert kind == ".names" or any(line.startswith(state_file.path) for line in lines)
        return await outcome(network, node)

    for name in ("missing", others[KINDS.index((node, kind)) % len(others)]):
        assert simulate(scenario, tmp_path / name, DAMAGES[name]) == Outcome(), name


# Objects of a state that only a repair or an incident leaves behind are noticed when they are damaged, and repaired
# as well: the floor of a ledger, and the distrust of a validator


WINDOWS = 5
SOME_DAMAGES = {name: DAMAGES[name] for name in ("missing", "zeros")} | {"a bit": bend(1)}


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> DiskNetwork:
    """A network that was stopped when its validator had sealed a window and not revealed it."""

    async def live() -> DiskNetwork:
        stopped = DiskNetwork(tmp_path_factory.mktemp("network") / "now", LEARNABLE)
        await stopped.live(WINDOWS, NODES, {"validator-0": Death("put", "witness/", 3)})
        return stopped

    return simulate(live)


async def sealed_windows(network: DiskNetwork) -> list[int]:
    prefix = paths.kind_prefix(key("validator-0").public, "seals")
    return [paths.window_of(info.path) async for info in network.store.list(prefix)]


async def lose_sealed_window(network: DiskNetwork) -> int:
    """Lose the newest window of the ledger, which is sealed and not revealed, and repair; return the window."""
    window = max(await sealed_windows(network))
    objects = network.root / "validator-0"
    for file in [*objects.glob(f"ledger/{window:010d}"), *objects.glob(f"sealed/{window:010d}-*")]:
        file.unlink()
    lines = await repair(network, "validator-0")
    assert f"ledger/: windows {window} to {window} are lost: they are not revealed, and never sealed again" in lines
    return window


def puts_of_seal(network: DiskNetwork, window: int) -> int:
    path = paths.seal(key("validator-0").public, window)
    return len({put.data for put in network.store.under(path)})


@pytest.mark.parametrize("damage", few_daily(SOME_DAMAGES.values(), 3), ids=SOME_DAMAGES)
async def test_a_damaged_floor_of_a_ledger_is_named_and_found_again_in_the_seals(
    network: DiskNetwork, tmp_path: Path, damage: Damage
):
    other = network.copy(tmp_path / "states")
    window = await lose_sealed_window(other)
    damage(other.root / "validator-0" / FLOOR_PATH)
    refusal = await outcome(other, "validator-0")
    await repair(other, "validator-0")
    ledger = await Ledger.open(other.durable("validator-0", ""), other.run)
    assert ledger.closed_window == window
    assert ledger.newest < window
    result = await outcome(other, "validator-0")
    assert puts_of_seal(other, window) == 1
    windows = await sealed_windows(other)
    assert refusal.fault is None
    assert refusal.line is not None
    assert FLOOR_PATH in refusal.line
    assert "the newest window that this validator must not seal again" in refusal.line
    assert result == Outcome()
    assert max(windows) > WINDOWS, "it seals later windows"


async def test_a_repaired_validator_gives_up_a_window_that_another_with_its_key_has_sealed(
    network: DiskNetwork, tmp_path: Path
):
    other, own_key = network.copy(tmp_path / "states"), key("validator-0")
    window = max(await sealed_windows(other))
    seal = Seal(run=other.signed.digest, window=window, validator=own_key.public, summary=bytes(32))
    await other.store.put(paths.seal(own_key.public, window), sign(seal, own_key))
    refusal = await outcome(other, "validator-0")
    assert refusal.line is not None
    assert "`grailnode repair`" in refusal.line
    await repair(other, "validator-0")
    assert await outcome(other, "validator-0") == Outcome()
    assert max(await sealed_windows(other)) > WINDOWS, "it seals later windows"


@pytest.mark.parametrize("damage", few_daily(SOME_DAMAGES.values(), 3), ids=SOME_DAMAGES)
async def test_a_validator_stays_distrusted_when_the_reason_is_damaged(
    network: DiskNetwork, tmp_path: Path, damage: Damage
):
    distrusted = key("validator-9").public
    path = DISTRUSTED + distrusted.hex()

    other = network.copy(tmp_path / "states")
    state = StateStore(other.root / "trainer", other.signed.digest, inline=True)
    await state.put(path, b"the verdict that shows it")
    damage(other.root / "trainer" / path)
    refusal = await outcome(other, "trainer")
    lines = await repair(other, "trainer")
    assert f"{path}: stays distrusted; the verdict that shows why is in storage" in lines
    monitor = ValidatorMonitor(other.node("trainer", "/download"), 0)
    await monitor.open()
    assert monitor.distrusted_validators == {distrusted}
    result = await outcome(other, "trainer")
    assert refusal.fault is None
    if refusal.line is not None:
        assert path in refusal.line
    assert result == Outcome()


# A node that is started with an old copy of its state seals no window twice and publishes no second history. It says
# so in one line, and a repair lets it go on.


COPIES = 6
SECONDS = 1.3  # between two copies; a window takes two seconds
COPIED_WINDOWS = 6


@pytest.fixture(scope="module")
def copied_network(tmp_path_factory: pytest.TempPathFactory) -> DiskNetwork:
    """A network that was stopped after some windows. Beside its states are copies of them, the oldest in `0`."""
    root = tmp_path_factory.mktemp("network")

    async def copy_states(stopped: DiskNetwork) -> None:
        await stopped.until_window(1)
        for number in range(COPIES):
            shutil.copytree(root / "now", root / str(number), ignore=shutil.ignore_patterns(".tmp"))
            await trio.sleep(SECONDS)

    async def live() -> DiskNetwork:
        stopped = DiskNetwork(root / "now", LEARNABLE)
        async with running(copy_states, stopped):
            await stopped.live(COPIED_WINDOWS, NODES, seconds=1.3)
        return stopped

    return simulate(live)


def restored(copied_network: DiskNetwork, root: Path, name: str, copy: int | None) -> DiskNetwork:
    """Return the network with an old copy of one node's state; None for an empty state."""
    other = copied_network.copy(root)
    shutil.rmtree(root / name)
    if copy is not None:
        shutil.copytree(copied_network.root.parent / str(copy) / name, root / name)
    return other


def check_no_contradiction(network: DiskNetwork) -> None:
    """Check that there were never two seals or manifests of one place, and that no node has logged an alarm."""
    seals: dict[str, set[bytes]] = {}
    for put in network.store.under(paths.kind_prefix(key("validator-0").public, "seals")):
        seals.setdefault(put.path, set()).add(open_announced(put.data, Seal).record.summary)
    manifests: dict[str, set[bytes]] = {}
    for put in network.store.under(paths.kind_prefix(key("trainer").public, "manifests")):
        signed = open_announced(put.data, Manifest)
        manifests.setdefault(f"version {signed.record.version}", set()).add(signed.digest)
    assert [place for items in (seals, manifests) for place, digests in items.items() if len(digests) > 1] == []
    assert [event["error"] for log in network.logs.values() for event in log.named("alarm")] == []


@pytest.mark.parametrize("name", NODES)
@pytest.mark.parametrize("copy", few_daily([None, *range(COPIES)], COPIES))
async def test_an_old_copy_of_a_state_contradicts_nothing(
    copied_network: DiskNetwork, tmp_path: Path, name: str, copy: int | None
):
    other = restored(copied_network, tmp_path / "states", name, copy)
    result = await outcome(other, name, windows=3)
    assert result.fault is None
    if result.line is not None:
        assert "`grailnode repair`" in result.line
    check_no_contradiction(other)


@pytest.mark.parametrize("name", NODES)
@pytest.mark.parametrize("copy", few_daily([*range(0, COPIES, 3), None], 3))
async def test_a_repaired_old_copy_continues_what_was_published(
    copied_network: DiskNetwork, tmp_path: Path, name: str, copy: int | None
):
    other = restored(copied_network, tmp_path / "states", name, copy)
    print(*await repair(other, name), sep="\n")
    result = await outcome(other, name, windows=7)
    assert result == Outcome()
    check_no_contradiction(other)
    assert work_after(copied_network.run.window_at(copied_network.end), other, name)


async def test_an_old_snapshot_in_the_outbox_is_not_taken_for_the_newest_weights(
    copied_network: DiskNetwork, tmp_path: Path
):
    """The backup was made between a version's head and the deletion of its snapshot."""

    other = restored(copied_network, tmp_path / "states", "trainer", 0)
    await put_snapshot(other.durable("trainer", ""), 0, other.weights)
    await repair(other, "trainer")
    result = await outcome(other, "trainer", windows=7)
    assert result == Outcome()
    check_no_contradiction(other)
    assert other.events("trainer/upload", "published")


def work_after(window: int, copied_network: DiskNetwork, name: str) -> bool:
    """Return whether a node has published work on later windows."""
    kind = {"trainer": "manifests", "validator-0": "summaries", "miner-1": "commitments"}[name]
    prefix = paths.kind_prefix(key(name).public, kind)
    if name == "trainer":
        return bool(copied_network.events("trainer/upload", "published"))
    return any(paths.window_of(put.path) > window for put in copied_network.store.under(prefix))


@pytest.mark.parametrize("name", ["trainer", "validator-0"])
async def test_the_line_says_what_is_published_and_not_in_the_state(
    copied_network: DiskNetwork, tmp_path: Path, name: str
):

    line = (await outcome(restored(copied_network, tmp_path / "states", name, 0), name)).line
    assert line is not None
    if name == "trainer":
        assert re.search(r"storage shows version \d, which this node.s state did not publish", line)
    else:
        assert "ends with window" in line
        assert "but this validator has published window" in line
