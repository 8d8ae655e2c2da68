"""Networks whose versions carry difficulty tables: they follow from sealed summaries, and all nodes draw by them."""

import re
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import trio

from grailnode.engine.torch_engine import TorchEngine
from grailnode.observe.chain_check import verify_chain
from grailnode.observe.ledger_check import verify_ledger
from protocol import paths
from protocol.chain.manifest import Manifest
from protocol.difficulty import DifficultySpec, DifficultyTable, Stratum
from protocol.errors import ChainError, ProtocolError
from protocol.identity.authority import ChainPoint
from protocol.identity.signing import open_announced, sign
from protocol.judging.ledger import Seal, Summary
from roles.miner.produce import HonestProducer, MiningWindow
from roles.policy.assignment import Task
from roles.policy.difficulty_tables import watch_tables
from roles.trainer.collect.collector import Collector
from tests.support.attacked_nodes.follower import AttackedFollower
from tests.support.builders.chains import TRAINER, change_elements
from tests.support.builders.recipes import demo_rules
from tests.support.simulation.network import Network, key
from tests.support.simulation.network_runs import check_accepted, judged_groups, run_nodes, summaries

SPEC = DifficultySpec(
    strata=tuple(
        Stratum(name=f"carry-{name}", ppm=125_000 if "-" in name or name > "o" else 250_000)
        for name in ("both", "none", "none-nine", "ones", "tens", "tens-nine")
    ),
    floor_ppm=200_000,
    decay=900_000,
)


def network_of(validators: int = 1, quorum: int = 1) -> Network:
    network = Network(demo_rules(groups=4, group_size=4), validators, quorum)
    network.amend(difficulty=SPEC)
    return network


async def manifests(network: Network) -> list[Manifest]:
    """Return the manifests of the chain, oldest first."""
    head = await network.head()
    trainer = key("trainer").public
    items = [paths.manifest(trainer, head.base + place, digest) for place, digest in enumerate(head.manifests)]
    return [open_announced(await network.store.get(path, 1 << 20), Manifest).record for path in items]


class OfFirstTable(HonestProducer):
    """Draws its problems by the shares of version 0, whichever version serves."""

    async def produce(self, mining_window: MiningWindow, indices):
        shares = DifficultyTable.of(SPEC).shares
        return await super().produce(replace(mining_window, shares=shares), indices)


def of_first_table(task: Task, engine: TorchEngine) -> HonestProducer:
    return OfFirstTable(task, engine)


async def test_the_table_moves_and_all_nodes_draw_by_it() -> None:
    network = network_of(validators=2, quorum=2)
    lines: list[str] = []
    async with run_nodes(network) as nursery:
        nursery.start_soon(network.run_miner, "old", 4, of_first_table)
        await network.until_window(12)
        await verify_chain(network.node("auditor"), lines.append)
        for name in network.validators:
            assert await verify_ledger(network.node("auditor"), key(name).public, lines.append) >= 6
    await check_accepted(network, "miner-1", range(12), at_least=6)
    chain = await manifests(network)
    tables = [manifest.difficulty for manifest in chain]
    assert tables[0] == DifficultyTable.of(SPEC)
    newest = tables[-1]
    assert newest is not None and newest.window > 3
    assert [validator for validator, _ in newest.summaries] == sorted(key(name).public for name in network.validators)
    assert newest.shares != tables[0].shares
    assert any(line.startswith("difficulty of version") for line in lines)
    # Who draws by another table gets other problems, except where both tables draw one stratum.
    judged = await judged_groups(network, "old", range(12))
    reasons = {judgement.reason for _, judgement in judged}
    assert reasons == {"", "wrong-prompt"}
    assert all(judgement.accepted for group, judgement in judged if group.version == 0)
    for name in network.validators:
        assert not network.events(name, "alarm")
        counts = [summary.strata for summary in await summaries(network, name, range(12))]
        assert counts[-1] is not None and sum(groups for groups, _ in counts[-1]) > 20_000_000
    await network.store.delete(paths.summary(newest.summaries[0][0], newest.window))
    with pytest.raises(ChainError, match=rf"^version \d+: .* for window {newest.window}, which is not in storage"):
        await verify_chain(network.node("auditor"), lines.append)


def invented(window: int) -> DifficultyTable:
    """Return a table that names a summary of nothing."""
    summaries_named = ((key("validator-0").public, bytes(32)),)
    return DifficultyTable(window=window, summaries=summaries_named, shares=(400_000, 200_000, *(100_000,) * 4))


async def test_followers_refuse_an_invented_table_of_a_future_window() -> None:
    testbed = AttackedFollower()
    testbed.run = testbed.run.model_copy(update={"difficulty": SPEC})
    await testbed.publish()
    first = testbed.chain.signed_manifests.pop().record.model_copy(update={"difficulty": DifficultyTable.of(SPEC)})
    testbed.chain.signed_manifests.append(open_announced(sign(first, TRAINER), Manifest))
    await testbed.store.put(testbed.manifest_path(0), testbed.chain.signed_manifests[0].data)
    await testbed.put_head(testbed.head())
    await testbed.restart()
    await testbed.assert_follows()
    patched = await testbed.chain.publish(change_elements(testbed.genesis, 1), head=False)
    testbed.chain.signed_manifests.pop()
    await testbed.forge(patch=patched.patch, weights=patched.weights, anchor=(), first_window=5, difficulty=invented(5))
    with pytest.raises(ChainError, match="of a window that is not over when the version begins to serve"):
        await testbed.follower.refresh()


async def test_validators_name_a_table_whose_summary_is_absent_after_its_deadline() -> None:
    network = network_of()
    node, deadline = network.node("validator-0"), network.run.schedule.verdict(3)
    manifest = SimpleNamespace(version=5, difficulty=invented(3))
    follower: Any = SimpleNamespace(chain=SimpleNamespace(head=manifest, manifests=lambda: [manifest]))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(network.run_beacon)
        nursery.start_soon(watch_tables, node, follower, partial(trio.sleep, 0.5))
        await network.clock.sleep_until(network.run.beacon.round_time(deadline) - 0.1)
        assert not network.events("validator-0", "alarm")
        await trio.sleep(2 * network.run.beacon.period_ms / 1000 + 1)
        (alarm,) = network.events("validator-0", "alarm")
        assert re.search(r"version 5: .* for window 3, which is not in storage", str(alarm))
        nursery.cancel_scope.cancel()


async def test_a_table_that_does_not_follow_is_named_by_validators_and_by_verify(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shares = (850_000, 50_000, *(25_000,) * 4)
    honest = Collector._write_table

    async def write(self, window, ledgers):
        await honest(self, window, ledgers)
        if ledgers:
            inputs = tuple(sorted((validator, digest) for validator, (digest, _) in ledgers.items()))
            false = DifficultyTable(window=window, summaries=inputs, shares=shares)
            await self._node.state.put("difficulty", false.to_bytes())

    monkeypatch.setattr(Collector, "_write_table", write)
    network = network_of()
    async with run_nodes(network) as nursery:
        await network.until_window(9)
        with pytest.raises(
            ChainError, match=r"^version \d+: its difficulty table does not follow from the 1 summaries"
        ):
            await verify_chain(network.node("auditor"), lambda line: None)
        nursery.cancel_scope.cancel()
    # All nodes draw by what was signed: the run goes on, and the summaries carry the alarm.
    await check_accepted(network, "miner-1", range(9), at_least=4)
    assert any(
        alarm.startswith("trainer: version ") and "difficulty table does not follow" in alarm
        for summary in await summaries(network, "validator-0", range(9))
        for alarm in summary.alarms
    )


async def test_verify_names_a_validator_that_counts_falsely() -> None:
    network = network_of()
    async with run_nodes(network):
        await network.until_window(6)
    validator = key("validator-0")
    # The roots take back all versions after the first, and with them the tables by which their groups drew.
    head, rewound = await network.head(), network.node("rewound")
    rewound.revisions.rewind = 1, ChainPoint(version=head.base, digest=head.manifests[0])
    head_path = paths.head(key("trainer").public)
    signed_head = await network.store.get(head_path, 1 << 20)
    changes = {"manifests": head.manifests[:1], "anchors": (head.base,), "oldest_patch": head.base + 1}
    await network.store.put(head_path, sign(head.model_copy(update=changes), key("trainer")))
    assert await verify_ledger(rewound, validator.public, lambda line: None) >= 4
    await network.store.put(head_path, signed_head)
    last = (await summaries(network, "validator-0", range(6)))[-1]
    assert last.strata is not None
    false = last.model_copy(update={"strata": ((9_000_000, 9_000_000), *last.strata[1:])})
    seal = paths.seal(validator.public, last.window)
    record = open_announced(await network.store.get(seal, 1 << 20), Seal).record
    digest = open_announced(sign(false, validator), Summary).digest
    await network.store.put(seal, sign(record.model_copy(update={"summary": digest}), validator))
    await network.store.put(false.path, sign(false, validator))
    with pytest.raises(ProtocolError, match=rf"^window {last.window} .*counts by stratum does not follow"):
        await verify_ledger(network.node("auditor"), validator.public, lambda line: None)
