"""What `grailnode dashboard` reads of a network: along the way as afterwards, in flat memory, and without its store."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import trio

from grailnode.cli.actions.run_dashboard import RunReader
from grailnode.node.dashboard_server import View
from grailnode.observe import window_history
from grailnode.observe.observer import Observer
from grailnode.observe.state import STORAGE_ALARM
from grailnode.observe.window_history import WindowHistory
from grailnode.run.creation import model_files, publish_files
from tests.support.builders import samples
from tests.support.builders.recipes import demo_rules
from tests.support.faults.decorated_store import UnreachableStore
from tests.support.simulation.network import Network, key
from tests.support.simulation.network_runs import run_nodes
from tests.support.simulation.virtual_clock import running

LAST = 10


async def read(reader: RunReader) -> View:
    """Return a reading with the rollouts that are read behind its state."""
    await reader.read()
    await trio.sleep(0.01)
    return await reader.read()


async def test_a_reader_follows_a_run_and_outlives_its_store(tmp_path: Path) -> None:
    network = Network(demo_rules(groups=4, group_size=4))
    await publish_files(network.store, key("trainer").public, model_files(network.policy.directory))
    store = UnreachableStore(network.store, "", operations=("get", "list"), seconds=0.0, is_away=False)
    reader = RunReader(network.node("observer", store=store), tmp_path)
    async with run_nodes(network, miners=1) as nursery:
        nursery.start_soon(network.run_cheat)
        nursery.start_soon(reader.keep_rollouts, len)
        for window in range(LAST):
            await network.until_window(window)
            view = await reader.read()
            assert [stage.window for stage in view.state.stages][:1] == [window]
        await network.until_window(LAST)
        view = await read(reader)
        store.is_away = True
        await trio.sleep(30)
        away = await reader.read()
        store.is_away = False
        back = await reader.read()
    state = view.state
    assert state.head is not None
    assert state.head.version == state.versions[-1].version > 0
    assert 0 < network.clock.now() - state.head.made_at < 100
    assert {rollout.window for rollout in view.rollouts} == {state.windows[-1].window}
    by_name = {miner.key: miner.name for miner in state.miners}
    assert view.rollouts[0].reasons  # a miner with rejected groups comes first
    assert by_name[view.rollouts[0].miner.hex()] == "cheat"
    assert all("".join(text for _, text in rollout.turns) == rollout.completion for rollout in view.rollouts)
    assert [validator.windows for validator in state.validators] == [len(state.windows)]
    assert all(len(state.recent[miner.key]) > 4 for miner in state.miners)

    assert any(STORAGE_ALARM in alarm for alarm in away.state.alarms)
    assert away.state.read_at == state.read_at
    assert (away.state.windows, away.state.miners, away.rollouts) == (state.windows, state.miners, view.rollouts)
    assert not any(STORAGE_ALARM in alarm for alarm in back.state.alarms)
    assert back.state.read_at is not None
    assert state.read_at is not None
    assert back.state.read_at > state.read_at

    late = Observer(network.node("third"), LAST - 3)
    await late.refresh()
    for _ in range(4):
        await late.read_back(2)
    curve = [(row.window, row.pass_at_1, row.strata) for row in late.state().windows[: len(state.windows)]]
    assert curve == [(row.window, row.pass_at_1, row.strata) for row in state.windows]
    assert late.state().windows[0].accepted == state.windows[0].accepted
    assert late.state().windows[0].reward is None  # verdicts have them, which are not read

    afterwards = Observer(network.node("other"), 0)
    await afterwards.refresh()
    assert afterwards.state().windows[: len(state.windows)] == state.windows

    await trio.sleep(3 * network.run.head_ttl)
    last = RunReader(network.node("late"), tmp_path)
    async with running(last.keep_rollouts, len):
        ended = await read(last)
    assert ended.state.stages == ()
    assert ended.state.silent[0] == "trainer"
    assert ended.state.windows[-1].window >= state.windows[-1].window
    assert ended.rollouts


def history(windows: int, close: Sequence[int] = ()) -> WindowHistory:
    """Return a history of one miner and one validator, of which some windows were closed along the way."""
    result = WindowHistory(pass_at=1)
    for window in range(windows):
        judgements = [samples.judgement(0), samples.rejected(1)] if window % 3 else [samples.judgement(0)]
        result.add_verdict(samples.verdict(*judgements, window=window, submitted=2))
        result.add_summary(samples.summary(window=window))
        if window in close:
            result.close(window - 2)
    return result


@pytest.mark.parametrize("close", [range(0, 60, 1), range(0, 60, 7), [59], [30, 30, 31, 59]])
def test_closing_windows_changes_nothing_that_is_shown(close: Sequence[int]) -> None:
    one, other = history(60), history(60, close)
    assert other.window_rows() == one.window_rows()
    assert other.miner_rows({}, {}) == one.miner_rows({}, {})
    keys = [samples.summary().validator]
    assert other.validator_rows(keys, {}) == one.validator_rows(keys, {})
    assert (other.tokens(), other.check_rate()) == (one.tokens(), one.check_rate())
    assert one.tokens()["generated"] > 0


def test_a_history_keeps_the_newest_of_what_could_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(window_history, "MOST_WINDOWS", 300)
    monkeypatch.setattr(window_history, "_MOST_MINERS", 200)
    long = history(600, range(0, 600, 50))
    rows = long.window_rows()
    assert 300 <= len(rows) <= 360
    assert rows[-1].window == 599
    assert len(long.miner_rows({}, {})[1].popitem()[1]) == 40
    miners = WindowHistory(pass_at=1)
    for number in range(400):  # keys that are used once
        miner = number.to_bytes(32, "big")
        miners.add_verdict(samples.verdict(samples.judgement(0), window=number, miner=miner))
        miners.add_summary(samples.summary(window=number))
        if number % 100 == 0:
            miners.close(number)
    miners.close(400)
    assert len(miners.miner_rows({}, {})[0]) <= 201
