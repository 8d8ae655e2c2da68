"""What the dashboard reads of a run whose miners and storage are hostile: the state first, rollouts within limits."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import trio

from grailnode.cli.actions.run_dashboard import RunReader
from grailnode.node.dashboard_server import View
from grailnode.observe.observer import Observer, newest_summarized
from grailnode.observe.rollout_reader import ReadingLimits, read_rollouts
from grailnode.run.creation import model_files, publish_files
from protocol import paths
from protocol.encoding import content_digest
from protocol.identity.signing import sign
from protocol.rollout.batch import Commitment, assemble
from tests.support.builders import samples
from tests.support.faults.decorated_store import DecoratedStore, UnreachableStore
from tests.support.simulation.network import Network, key
from tests.support.simulation.network_runs import RULES
from tests.support.simulation.virtual_clock import running

WINDOW = 2


class CountingStore(DecoratedStore):
    """Counts the operations by the kind of object, and lets those of some prefixes hang."""

    def __init__(self, network: Network, *hanging: str) -> None:
        super().__init__(network.store)
        self.hanging = hanging
        self.paths: list[str] = []

    async def before(self, operation: str, path: str) -> None:
        self.paths.append(path)
        if path.startswith(self.hanging):
            await trio.sleep_forever()

    def count(self, kind: str) -> int:
        return sum(f"/{kind}/" in path for path in self.paths)


async def deliver(network: Network, miner: str, groups: int, window: int = WINDOW) -> Commitment:
    """Publish a miner's batch of groups of two rollouts."""
    place = {"run": network.signed.digest, "window": window, "miner": key(miner).public}
    batch, commitment = assemble([samples.group(index, **place) for index in range(groups)], "torch-float32")
    await network.store.put(commitment.path, sign(commitment, key(miner)))
    await network.store.put(paths.batch(key(miner).public, window, commitment.batch), batch)
    return commitment


async def reveal(network: Network, validator: str, *commitments: Commitment, window: int = WINDOW, **more: Any) -> None:
    """Publish a validator's verdicts on the first group of each batch, and its summary."""
    place = {"run": network.signed.digest, "window": window, "validator": key(validator).public}
    rows = []
    for commitment in commitments:
        verdict = samples.verdict(
            samples.judgement(digest=commitment.groups[0][0]),
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
    store = CountingStore(network)
    node, tokenizer = network.node("observer", store=store), network.policy.tokenizer
    read = await read_rollouts(node, tokenizer, WINDOW, [key("greedy").public])
    assert len(read.rollouts) == 2 * network.run.groups
    assert store.count("batches") == network.run.groups


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
    store = CountingStore(network)
    node = network.node("observer", store=store)
    read = await read_rollouts(node, network.policy.tokenizer, WINDOW, [key("greedy").public])
    assert store.count("batches") == 1
    assert not read.rollouts


async def test_a_reading_ends_with_the_group_that_reaches_a_limit_and_waits_for_no_slow_miner():
    network = Network(RULES)
    names = ("miner-1", "slow", "miner-2")
    for name in names:
        await deliver(network, name, 4)
    slow = key("slow").public
    store = CountingStore(network, paths.kind_prefix(slow, "batches"))
    node, tokenizer = network.node("observer", store=store), network.policy.tokenizer
    keys = [key(name).public for name in names]
    few = await read_rollouts(node, tokenizer, WINDOW, keys, ReadingLimits(rollouts=3))
    assert len(few.rollouts) == 4
    assert store.count("batches") == 2
    assert len((await read_rollouts(node, tokenizer, WINDOW, keys, ReadingLimits(characters=1))).rollouts) == 2
    read = await read_rollouts(node, tokenizer, WINDOW, keys, ReadingLimits(seconds=5.0))
    assert {rollout.miner for rollout in read.rollouts} == {keys[0], keys[2]}
    assert read.unread == (f"{slow.hex()[:16]}: no answer in 5 s",)


async def test_the_state_does_not_wait_for_the_rollouts_of_a_slow_miner(tmp_path: Path):
    network = Network(RULES)
    works = [await deliver(network, name, 2) for name in ("slow", "miner-1")]
    await reveal(network, "validator-0", *works)
    await trio.sleep(20.0)
    slow = key("slow").public
    async with reader(network, CountingStore(network, paths.kind_prefix(slow, "batches")), tmp_path) as item:
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


async def test_one_validator_whose_space_cannot_be_listed_hides_no_window_and_costs_no_observer(tmp_path: Path):
    network = Network(RULES, validators=2)
    work = await deliver(network, "miner-1", 2)
    await reveal(network, "validator-0", work)
    await trio.sleep(20.0)
    away = key("validator-1").public.hex()
    store = UnreachableStore(network.store, away, operations=("get", "list"), seconds=0.0)
    async with reader(network, store, tmp_path) as item:
        first = (await reading(item)).state
        assert first.windows[-1].window == WINDOW
        store.prefixes = ("",)  # nothing answers
        assert (await item.read()).state.windows == first.windows


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
    await trio.sleep(20.0)
    away = f"{key('validator-0').public.hex()}/"
    for store in (CountingStore(network, away), UnreachableStore(network.store, away, operations=("get", "list"))):
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
    assert alarms[-1].startswith("byte 1: cut off")  # of the head
    assert "alarm 99 of 4" in alarms


async def test_a_full_disk_leaves_the_page_without_rollouts(tmp_path: Path):
    network = Network(RULES)
    await reveal(network, "validator-0", await deliver(network, "miner-1", 2))
    await trio.sleep(20.0)
    (tmp_path / "file").write_bytes(b"")
    async with reader(network, CountingStore(network), tmp_path / "file") as item:
        view = await reading(item)
    assert view.state.windows
    assert not view.rollouts
