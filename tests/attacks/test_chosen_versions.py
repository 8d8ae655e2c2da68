"""Miners that choose among the versions of the policy: after R0 is out, too old ones, or ones that do not exist."""

from types import SimpleNamespace
from typing import Any

import pytest

from grailnode.engine.compute import make_engine
from grailnode.observe.ledger_check import verify_ledger
from grailnode.store.memory import MemoryStore
from protocol.errors import ProtocolError
from protocol.judging.accounts import Accounts
from protocol.judging.evidence import NO_COUNTS
from protocol.judging.roster import Roster
from protocol.judging.verdict import Reason, Verdict
from roles.miner.miner import Miner
from roles.miner.miner_settings import MinerSettings
from roles.miner.produce import HonestProducer
from roles.policy.follower import Follower
from roles.validator.audit import Auditor
from roles.validator.judging_scheduler import CaseQueue, JudgingScheduler
from roles.validator.ledger_state import Ledger
from roles.validator.window_cases import Pledge, ServingVersions, read_window_cases
from tests.support.attacked_nodes.trainer import FIRST, WINDOW, AttackedTrainer
from tests.support.attacked_nodes.validator import HOUR_MS, AttackedValidator
from tests.support.builders import samples
from tests.support.builders.chains import MINER
from tests.support.simulation.network import Network, key
from tests.support.simulation.network_runs import RULES, run_nodes, summaries

ALLOWED = ServingVersions(5, 7)


class Chain:
    """A follower that has the weights of every version; the newest that serves any window is `newest`."""

    def __init__(self, newest: int) -> None:
        self.newest = newest

    async def refresh(self) -> None:
        """Implements Follower.refresh."""

    def version_for(self, _: int) -> int:
        return self.newest

    async def rebuild(self, version: int) -> int:
        return version


class AcceptingAuditor(Auditor):
    """Accepts whatever reaches it."""

    async def audit(self, *_: Any, **__: Any) -> tuple[Verdict, dict[int, bytes]]:
        return samples.verdict(), {}


async def judge(testbed: AttackedValidator, versions: ServingVersions, newest: int, pledge: Pledge) -> set[str]:
    """Return the reasons of the verdict on the miner's commitment.

    Args:
        versions: those that the validator knows to serve the window; newest: what it finds where it looks again.
    """
    node = testbed.validator
    (case,) = (await read_window_cases(node, WINDOW, {MINER.public: pledge})).cases
    queue = CaseQueue(node, await Ledger.open(MemoryStore(), node.run), bytes(32))
    chain: Any = Chain(newest)
    engine: Any = SimpleNamespace(arithmetic="torch-float32")
    judge: Any = SimpleNamespace(arithmetic="torch-float32")
    auditor = AcceptingAuditor(node, judge, Roster((node.key.public,), 1), bytes(32), {})
    scheduler = JudgingScheduler(node, chain, engine, auditor, queue, WINDOW, versions)
    ((verdict, _),) = await scheduler.judge([case], 60.0)
    return {judgement.reason for judgement in verdict.judgements}


@pytest.mark.parametrize("version", [5, 7])
async def test_only_the_version_that_the_pledge_binds_counts(version: int) -> None:
    testbed = AttackedValidator()
    await testbed.announce(version=6)
    pledges = await testbed.pledges.read(versions=ALLOWED)
    await testbed.commit(version=version)
    cases = await read_window_cases(testbed.validator, WINDOW, pledges)
    assert (cases.cases, cases.undelivered) == ((), {MINER.public: Pledge(2, 6, "torch-float32")})
    await testbed.commit(version=6)
    cases = await read_window_cases(testbed.validator, WINDOW, pledges)
    assert [case.commitment.record.version for case in cases.cases] == [6]


@pytest.mark.parametrize(
    ("version", "was_allowed", "reasons"),
    [
        (8, True, {Reason.LAPSED}),  # it was there, and a rewind has removed it
        (8, False, {Reason.VERSION}),
        (7, True, set()),
        (5, True, set()),
        (4, True, {Reason.LAPSED}),  # the trainer has published several versions since
        (4, False, {Reason.LAPSED}),
    ],
)
async def test_a_version_that_became_too_old_is_nobodys_fault(
    version: int, was_allowed: bool, reasons: set[Reason]
) -> None:
    testbed = AttackedValidator()
    await testbed.commit(version=version)
    assert await judge(testbed, ALLOWED, 7, Pledge(2, version, "torch-float32", was_allowed)) == reasons


async def test_a_version_that_came_after_the_pledge_was_read_may_be_used_and_makes_none_too_old():
    testbed = AttackedValidator()
    await testbed.commit(version=9)
    assert await judge(testbed, ALLOWED, 9, Pledge(2, 9, "torch-float32", was_allowed=False)) == set()
    await testbed.commit(version=5)
    assert await judge(testbed, ALLOWED, 9, Pledge(2, 5, "torch-float32")) == set()


async def test_a_pledge_of_a_version_that_is_too_old_is_none():
    testbed = AttackedValidator()
    await testbed.announce(version=4)
    assert await testbed.pledges.read(versions=ALLOWED) == {}
    await testbed.announce(version=8)
    assert await testbed.pledges.read(versions=ALLOWED) == {
        MINER.public: Pledge(2, 8, "torch-float32", was_allowed=False)
    }
    await testbed.announce(version=4)
    assert await testbed.pledges.read() == {MINER.public: Pledge(2, 4, "torch-float32", was_allowed=False)}


@pytest.mark.parametrize("changes", [{"version": 5}, {"version": 6, "arithmetic": "torch-bfloat16"}], ids=str)
async def test_an_older_announcement_of_the_miners_own_does_not_change_its_pledge(changes: dict[str, Any]) -> None:
    testbed = AttackedValidator()
    later = int(testbed.clock.now() * 1000) + HOUR_MS
    await testbed.announce(version=6, expires_ms=later)
    await testbed.pledges.read()
    await testbed.announce(**changes, expires_ms=later - 1)
    assert await testbed.pledges.read(versions=ALLOWED) == {MINER.public: Pledge(2, 6, "torch-float32")}


def test_a_verdict_does_not_call_some_groups_lapsed_and_judge_others() -> None:
    with pytest.raises(ValueError, match="lapsed"):
        samples.verdict(samples.judgement(0), samples.lapsed(1), submitted=2)
    with pytest.raises(ValueError, match="lapsed"):
        samples.verdict(samples.lapsed(0), submitted=2)


@pytest.mark.parametrize(
    ("version", "reason", "holds"),
    [(0, Reason.LAPSED, True), (1, Reason.LAPSED, False), (3, Reason.LAPSED, False), (4, Reason.LAPSED, True)],
)
async def test_a_validator_that_spares_a_miner_by_calling_its_version_lapsed_is_found(
    version: int, reason: Reason, holds: bool
) -> None:
    testbed = AttackedTrainer()
    groups = [samples.rejected(index, reason, counts=NO_COUNTS) for index in range(2)]
    verdict = testbed.verdict(FIRST, *groups, submitted=2)
    verdict = verdict.model_copy(update={"version": version})
    summary = testbed.summary(FIRST, verdict, version=3, previous=b"", scores=())
    await testbed.seal_and_reveal(FIRST, summary, verdict)
    if holds:
        assert await verify_ledger(testbed.node, FIRST.public, lambda _: None) == 1
    else:
        with pytest.raises(ProtocolError, match="lapsed"):
            await verify_ledger(testbed.node, FIRST.public, lambda _: None)


class Sluggish(Miner):
    """Pledges the first version for ever."""

    def _version_to_pledge(self, window: int) -> int:
        return 0


async def run_sluggish(network: Network) -> None:
    """Run a miner whose pledges name version 0, for ever."""
    node = network.node("sluggish")
    engine = make_engine(network.compute, node.run_sync)
    producer = HonestProducer(network.task(node), engine)
    settings = MinerSettings(groups=4, chunk=4, share=0.7, poll_seconds=0.2)
    await Sluggish(node, await Follower(node).open(), engine, producer, settings).run()


async def test_a_pledge_that_lapses_on_purpose_earns_nothing_and_keeps_no_place():
    network = Network(RULES)
    async with run_nodes(network, miners=2) as nursery:
        nursery.start_soon(run_sluggish, network)
        await network.until_window(10)
    ledger = await summaries(network, "validator-0", range(10))
    rows = {entry.window: row for entry in ledger for row in entry.rows if row.miner == key("sluggish").public}
    late = [entry for entry in ledger if entry.version > network.run.schedule.max_lag]
    assert len(late) > 3
    lapsed, *later = [rows.get(entry.window) for entry in late]
    assert lapsed is None or (lapsed.lapsed and not lapsed.rejected)  # it lapsed after the pledge had been read
    assert not any(later)
    honest = {row.miner: row.accepted for row in late[-1].rows}
    assert honest == {key(name).public: RULES.groups for name in ("miner-1", "miner-2")}
    balance = Accounts.of(ledger, network.run.scoring, network.run.proof).totals()[0][key("sluggish").public]
    before = [entry for entry in ledger if entry.version <= network.run.schedule.max_lag]
    assert balance == pytest.approx(
        Accounts.of(
            [*before, samples.summary(window=ledger[-1].window)], network.run.scoring, network.run.proof
        ).totals()[0][key("sluggish").public]
    )
