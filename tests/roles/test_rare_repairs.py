"""Objects of a state that only a repair or an incident leaves behind are noticed when they are damaged, and repaired as
well: the floor of a ledger, and the distrust of a validator.
"""

from pathlib import Path

import pytest

from grailnode.store.state.state_store import StateStore
from protocol import paths
from roles.trainer.collect.validator_monitor import DISTRUSTED, ValidatorMonitor
from roles.validator.ledger_state import FLOOR_PATH, Ledger
from tests.support.simulation.damaged_states import DAMAGES, LEARNABLE, NODES, Damage, Outcome, bend, outcome, repair
from tests.support.simulation.disk_network import Death, DiskNetwork
from tests.support.simulation.network import key
from tests.support.simulation.virtual_clock import simulate

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


@pytest.mark.parametrize("damage", SOME_DAMAGES.values(), ids=SOME_DAMAGES)
def test_a_damaged_floor_of_a_ledger_is_named_and_found_again_in_the_seals(
    network: DiskNetwork, tmp_path: Path, damage: Damage
):
    async def scenario() -> tuple[Outcome, Outcome, list[int]]:
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
        return refusal, result, await sealed_windows(other)

    refusal, result, windows = simulate(scenario)
    assert refusal.fault is None
    assert refusal.line is not None
    assert FLOOR_PATH in refusal.line
    assert "the newest window that this validator must not seal again" in refusal.line
    assert result == Outcome()
    assert max(windows) > WINDOWS, "it seals later windows"


@pytest.mark.parametrize("damage", SOME_DAMAGES.values(), ids=SOME_DAMAGES)
def test_a_validator_stays_distrusted_when_the_reason_is_damaged(network: DiskNetwork, tmp_path: Path, damage: Damage):
    distrusted = key("validator-9").public
    path = DISTRUSTED + distrusted.hex()

    async def scenario() -> tuple[Outcome, Outcome]:
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
        return refusal, await outcome(other, "trainer")

    refusal, result = simulate(scenario)
    assert refusal.fault is None
    if refusal.line is not None:
        assert path in refusal.line
    assert result == Outcome()
