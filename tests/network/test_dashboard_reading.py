"""What the dashboard reads of a run: the state first, the rollouts of hostile miners within limits, in flat memory."""

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from math import inf
from pathlib import Path
from typing import Any

import pytest
import trio

from grailnode.cli.actions.run_dashboard import RunReader, View
from grailnode.cli.actions.run_reading import rollout_json, rollout_text
from grailnode.observe import window_history
from grailnode.observe.observer import RECENT_WINDOWS, Observer, newest_summarized, observe_newest
from grailnode.observe.rollout_reader import ReadingLimits, read_rollouts
from grailnode.observe.state import STORAGE_ALARM
from grailnode.observe.window_history import WindowHistory
from grailnode.run.creation import model_files, publish_files
from grailnode.track import tracker
from protocol import paths
from protocol.encoding import content_digest
from protocol.identity.signing import sign
from protocol.judging.evidence import count_luck
from protocol.rollout.batch import Commitment, assemble
from roles.validator.validator import ANNOUNCEMENT_SECONDS
from tests.support.builders import samples
from tests.support.builders.recipes import demo_rules
from tests.support.faults.decorated_store import DecoratedStore, UnreachableStore
from tests.support.simulation.network import Network, key
from tests.support.simulation.network_runs import RULES, run_nodes
from tests.support.simulation.virtual_clock import running

WINDOW = 2
_CLAIMS = (500_000, 1_000_000)  # of a group's rollouts


def batches_read(store: UnreachableStore) -> int:
    return sum("/batches/" in path for path in store.paths)


async def deliver(network: Network, miner: str, groups: int) -> Commitment:
    """Publish a miner's batch of groups of two rollouts."""
    place = {"run": network.signed.digest, "window": WINDOW, "miner": key(miner).public}
    batch, commitment = assemble([samples.group(index, **place) for index in range(groups)], "torch-float32")
    await network.store.put(commitment.path, sign(commitment, key(miner)))
    await network.store.put(paths.batch(key(miner).public, WINDOW, commitment.batch), batch)
    return commitment


async def reveal(
    network: Network,
    validator: str,
    *commitments: Commitment,
    window: int = WINDOW,
    rewards: Sequence[int] = _CLAIMS,
    ends: Sequence[int] = (),
    **more: Any,
) -> None:
    """Publish a validator's verdicts on the first group of each batch, and its summary."""
    counts = samples.counts(sketch=(5,), margin=(5,), stop=(2,)).model_copy(
        update={"luck": count_luck(zip(_CLAIMS, rewards, strict=True))}
    )
    judged: dict[str, Any] = {"rewards": tuple(rewards), "ends": tuple(ends), "counts": counts}
    place = {"run": network.signed.digest, "window": window, "validator": key(validator).public}
    rows = []
    for commitment in commitments:
        verdict = samples.verdict(
            samples.judgement(digest=commitment.groups[0][0], **judged),
            **place,
            miner=commitment.miner,
            commitment=content_digest(commitment.to_bytes()),
        )
        await network.store.put(verdict.path, sign(verdict, key(validator)))
        row = {"miner": commitment.miner, "verdict": content_digest(verdict.to_bytes())}
        rows.append(samples.row().model_copy(update=row))
    summary = samples.summary(*rows, **(place | {"scores": ()} | more))
    await network.store.put(summary.path, sign(summary, key(validator)))


@asynccontextmanager
async def reader(network: Network, store: DecoratedStore, directory: Path) -> AsyncIterator[RunReader]:
    """Run the reading of rollouts behind the state."""
    await publish_files(network.store, key("trainer").public, model_files(network.policy.directory))
    item = RunReader(network.node("observer", store=store), directory)
    async with running(item.keep_rollouts, len):
        yield item


async def reading(item: RunReader, seconds: float = 30.0) -> View:
    """Return a reading, and what another one finds after the rollouts were read."""
    await item.read()
    await trio.sleep(seconds)
    return await item.read()


def miners(view: View) -> set[bytes]:
    return {rollout.miner for rollout in view.rollouts}


async def test_no_more_is_read_of_a_miner_than_the_run_allows():
    network = Network(RULES)
    await deliver(network, "greedy", 2000)
    store = UnreachableStore(network.store)
    node, tokenizer = network.node("observer", store=store), network.policy.tokenizer
    read = await read_rollouts(node, tokenizer, WINDOW, [key("greedy").public])
    assert len(read.rollouts) == 2 * network.run.groups
    assert batches_read(store) == network.run.groups


async def test_a_frame_larger_than_a_group_of_the_run_is_not_fetched():
    network = Network(RULES)
    commitment = await deliver(network, "greedy", 2)
    huge = samples.commitment(
        ((bytes(32), network.run.group_bytes + 1), commitment.groups[1]),
        run=network.signed.digest,
        window=WINDOW,
        miner=key("greedy").public,
        batch=commitment.batch,
    )
    await network.store.put(huge.path, sign(huge, key("greedy")))
    store = UnreachableStore(network.store)
    node = network.node("observer", store=store)
    read = await read_rollouts(node, network.policy.tokenizer, WINDOW, [key("greedy").public])
    assert batches_read(store) == 1
    assert not read.rollouts


async def test_a_reading_ends_with_the_group_that_reaches_a_limit_and_waits_for_no_slow_miner():
    network = Network(RULES)
    names = ("miner-1", "slow", "miner-2")
    for name in names:
        await deliver(network, name, 4)
    slow = key("slow").public
    store = UnreachableStore(network.store, paths.kind_prefix(slow, "batches"), seconds=inf)
    node, tokenizer = network.node("observer", store=store), network.policy.tokenizer
    keys = [key(name).public for name in names]
    few = await read_rollouts(node, tokenizer, WINDOW, keys, ReadingLimits(rollouts=3))
    assert len(few.rollouts) == 4
    assert batches_read(store) == 2
    assert len((await read_rollouts(node, tokenizer, WINDOW, keys, ReadingLimits(characters=1))).rollouts) == 2
    read = await read_rollouts(node, tokenizer, WINDOW, keys, ReadingLimits(seconds=5.0))
    assert {rollout.miner for rollout in read.rollouts} == {keys[0], keys[2]}
    assert read.unread == (f"{slow.hex()[:16]}: no answer within 5 s",)


async def test_a_rollout_with_the_reward_of_a_continuation_is_shown_up_to_its_end():
    network = Network(RULES)
    await reveal(network, "validator-0", await deliver(network, "miner-1", 1), rewards=(0, 1_000_000), ends=(1, 2))
    tokenizer = network.policy.tokenizer
    read = await read_rollouts(network.node("observer"), tokenizer, WINDOW, [key("miner-1").public])
    cut, whole = read.rollouts
    status = "accepted by 1, ends at token 1: the reward is a continuation's"
    assert (cut.reward, cut.end, cut.tokens, cut.status) == (0.0, 1, 3, status)
    assert (cut.completion, cut.uncounted) == (tokenizer.decode((2,)), tokenizer.decode((3, 1)))
    assert (whole.end, whole.uncounted, whole.status) == (None, "", "accepted by 1")
    lines = rollout_text(cut).splitlines()
    assert lines[1] == f"  reward 0, {status}"
    assert lines[-2:] == [f"  completion | {cut.completion}", f"  uncounted  | {cut.uncounted}"]
    assert "uncounted" not in rollout_text(whole)
    values = json.loads(rollout_json(cut))
    assert (values["end"], values["uncounted"], values["reward"]) == (1, cut.uncounted, 0.0)
    assert tracker.samples([cut])[0].status == status


@pytest.mark.parametrize("liar", range(3))
async def test_rewards_are_those_of_a_quorum_whichever_validator_lies(liar: int):
    network = Network(RULES, validators=3, quorum=3)
    work = await deliver(network, "miner-1", 1)
    for number in range(3):
        rewards, ends = ((1_500_000, 1_000_000), (1, 2)) if number == liar else (_CLAIMS, ())
        await reveal(network, f"validator-{number}", work, rewards=rewards, ends=ends)
    await trio.sleep(20.0)
    node = network.node("observer")
    read = await read_rollouts(node, network.policy.tokenizer, WINDOW, [work.miner])
    assert [(rollout.reward, rollout.end) for rollout in read.rollouts] == [(0.5, None), (1.0, None)]
    assert [row.reward for row in (await observe_newest(node)).state().windows] == [0.75]


async def test_a_trainer_that_is_back_is_not_called_silent_any_more():
    network = Network(RULES)
    observer, trainer = Observer(network.node("observer"), 0, last_window=0), network.node("trainer")
    for _ in range(2):
        announcement = await trainer.announcement("trainer", network.clock.now() + ANNOUNCEMENT_SECONDS)
        await network.store.put(paths.participant(trainer.key.public), sign(announcement, trainer.key))
        await observer.refresh()
        assert "trainer" not in observer.state().silent
        for _ in range(8):
            await trio.sleep(ANNOUNCEMENT_SECONDS)
            await observer.refresh()
            assert "trainer" in observer.state().silent


async def test_the_newest_window_that_is_judged_may_be_the_first_one_long_ago():
    network = Network(RULES)
    await reveal(network, "validator-0", window=0)
    await network.until_window(2 * RECENT_WINDOWS)
    observer = await observe_newest(network.node("observer"))
    assert [row.window for row in observer.state().windows] == [0]


async def test_the_state_does_not_wait_for_the_rollouts_of_a_slow_miner(tmp_path: Path):
    network = Network(RULES)
    works = [await deliver(network, name, 2) for name in ("slow", "miner-1")]
    await reveal(network, "validator-0", *works)
    await trio.sleep(20.0)
    store = UnreachableStore(network.store, paths.kind_prefix(key("slow").public, "batches"), seconds=inf)
    async with reader(network, store, tmp_path) as item:
        before = trio.current_time()
        view = await item.read()
        assert trio.current_time() - before < 1.0
        assert view.state.windows[-1].window == WINDOW
        assert miners(await reading(item)) == {key("miner-1").public}


async def test_rollouts_are_read_again_when_another_validator_reveals_and_while_some_are_unread(tmp_path: Path):
    network = Network(RULES, validators=2)
    work = await deliver(network, "miner-1", 2)
    other = await deliver(network, "miner-2", 2)
    await reveal(network, "validator-0", work, other)
    await trio.sleep(20.0)
    store = UnreachableStore(network.store, paths.kind_prefix(other.miner, "batches"), seconds=0.0)
    async with reader(network, store, tmp_path) as item:
        assert miners(await reading(item)) == {work.miner}
        store.is_away = False
        view = await reading(item)
        assert miners(view) == {work.miner, other.miner}
        assert max(rollout.judged for rollout in view.rollouts) == 1
        await reveal(network, "validator-1", work, other)
        assert max(rollout.judged for rollout in (await reading(item)).rollouts) == 2


async def test_a_reader_that_began_without_storage_keeps_its_observer(tmp_path: Path):
    network = Network(RULES)
    await trio.sleep(20.0)
    async with reader(network, UnreachableStore(network.store, "", operations=("get", "list")), tmp_path) as item:
        first = (await item.read()).state
        await trio.sleep(5.0)
        assert (await item.read()).state.seconds >= first.seconds + 5.0


async def test_a_validator_whose_space_hangs_or_fails_hides_nothing_that_the_next_one_shows():
    network = Network(RULES, validators=2)
    work = await deliver(network, "miner-1", 2)
    await reveal(network, "validator-1", work)
    await network.store.put(paths.summary(key("validator-1").public, 1 << 30), b"stray")
    await trio.sleep(20.0)
    away = f"{key('validator-0').public.hex()}/"
    for store in (
        UnreachableStore(network.store, away, operations=("get", "list"), seconds=inf),
        UnreachableStore(network.store, away, operations=("get", "list")),
    ):
        node = network.node("observer", store=store)
        assert await newest_summarized(node) == WINDOW
        later = Observer(node, WINDOW + 1)
        with trio.fail_after(120):
            await later.read_back(2)
            assert [row.window for row in later.state().windows] == [WINDOW]
            observer = Observer(node, WINDOW, last_window=WINDOW)
            await observer.refresh()
        assert [row.window for row in observer.state().windows] == [WINDOW]
    nowhere = Observer(network.node("observer", store=UnreachableStore(network.store, "")), WINDOW + 1)
    await nowhere.read_back(2)
    assert any("storage cannot be read now" in alarm for alarm in nowhere.state().alarms)


async def test_alarms_of_a_validator_evict_none_of_the_chain():
    network = Network(RULES)
    await network.store.put(paths.head(key("trainer").public), b"no head")
    for window in range(5):
        alarms = tuple(f"alarm {number} of {window}" for number in range(100))
        await reveal(network, "validator-0", window=window, alarms=alarms)
    await trio.sleep(40.0)
    observer = Observer(network.node("observer"), 0)
    await observer.refresh()
    alarms = observer.state().alarms
    assert "/head, byte 1: cut off" in alarms[-1]
    assert "alarm 99 of 4" in alarms


async def test_a_full_disk_leaves_the_page_without_rollouts(tmp_path: Path):
    network = Network(RULES)
    await reveal(network, "validator-0", await deliver(network, "miner-1", 2))
    await trio.sleep(20.0)
    (tmp_path / "file").write_bytes(b"")
    async with reader(network, UnreachableStore(network.store), tmp_path / "file") as item:
        view = await reading(item)
    assert view.state.windows
    assert not view.rollouts


# A whole run: along the way as afterwards, in flat memory, and without its store


LAST = 10


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
        view = await reading(reader, 0.01)
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

    await trio.sleep(ANNOUNCEMENT_SECONDS)
    soon = Observer(network.node("soon"), LAST)
    await soon.refresh()
    assert not soon.state().has_ended
    assert soon.state().silent == ("trainer", f"validator {key('validator-0').public.hex()[:8]}")
    await trio.sleep(3 * network.run.head_ttl)
    last = RunReader(network.node("late"), tmp_path)
    async with running(last.keep_rollouts, len):
        ended = await reading(last, 0.01)
    assert ended.state.has_ended
    assert any("has expired" in alarm for alarm in ended.state.alarms)
    assert ended.state.stages == ()
    assert ended.state.silent[0] == "trainer"
    assert {miner.key: miner.name for miner in ended.state.miners} == by_name
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
