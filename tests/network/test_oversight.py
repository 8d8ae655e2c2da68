"""Validators and miners that cheat or do too little, in whole networks: it costs them, and nobody else."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import trio

from grailnode.engine.compute import make_engine
from grailnode.node.canary import CanaryAudit
from grailnode.node.wiring import run_miner, run_validator
from grailnode.observe.ledger_check import verify_ledger
from grailnode.observe.observer import Observer
from grailnode.observe.recheck import GroupReference, ValidatorResult, recheck
from grailnode.store.memory import MemoryStore
from protocol import limits, paths
from protocol.encoding import content_digest
from protocol.errors import ProtocolError
from protocol.identity.signing import sign
from protocol.judging.accounts import Accounts
from protocol.judging.ledger import LedgerRow, Seal, SharesOf, Summary, Witness
from protocol.judging.report import ValidatorReport, canary_key
from protocol.judging.verdict import Reason, ReauditVerdict, Verdict
from protocol.rollout import challenge
from protocol.rollout.batch import Group
from protocol.rollout.checking import Check, CheckRules
from roles.miner.miner import Miner
from roles.miner.produce import HonestProducer, MiningWindow
from roles.node.identity import Node
from roles.policy.follower import Follower
from roles.ports import CheckRequest, Engine, EngineError, FencedError, NotFoundError
from roles.records import fetch_record
from roles.validator.validator_settings import ValidatorSettings
from tests.support.builders.proofs import LENIENT, proof_of, with_thresholds
from tests.support.builders.samples import thresholds
from tests.support.faults.decorated_store import DecoratedStore
from tests.support.measuring.store_listing import copy_objects
from tests.support.simulation.network import Log, Network, key, miner_settings
from tests.support.simulation.network_runs import RULES, FalseSketches, run_nodes, summaries, verdicts, with_sketches
from tests.support.simulation.recording_store import RecordingStore
from tests.support.simulation.virtual_clock import running


class UnderDelivering(Miner):
    """Delivers only the first group of a window, whatever it has pledged."""

    async def _deliver(self, window: int, groups: Sequence[Group]) -> bool:
        return await super()._deliver(window, groups[:1])


async def run_under_delivering(network: Network) -> None:
    node = network.node("under-delivering")
    engine = make_engine(network.compute, node.run_sync)
    producer = HonestProducer(network.task(node), engine)
    await UnderDelivering(node, await Follower(node).open(), engine, producer, miner_settings(4, chunk=4)).run()


async def test_a_short_delivery_lowers_the_score_and_no_delivery_voids_the_pledge():
    network = Network(RULES)
    async with run_nodes(network, miners=1):
        async with running(run_under_delivering, network):
            await network.until_window(6)
        await network.until_window(10)
    ledger = await summaries(network, "validator-0", range(10))
    rows = {entry.window: row for entry in ledger for row in entry.rows if row.miner == key("under-delivering").public}
    short = [row for row in rows.values() if row.submitted]
    assert short
    assert all((row.pledged, row.submitted, row.accepted) == (4, 1, 1) for row in short)
    undelivered = [window for window, row in rows.items() if row.submitted == 0]
    assert len(undelivered) == 1  # the miner had ended, and its pledge was void after the first such window
    balance = Accounts.of(ledger, network.run.scoring, network.run.proof).totals()[0]
    assert balance[key("under-delivering").public] < 0 < balance[key("miner-1").public]
    assert all(
        entry.scores == Accounts.of(ledger[: place + 1], network.run.scoring, network.run.proof).scores()
        for place, entry in enumerate(ledger)
    )
    digests = [content_digest(entry.to_bytes()) for entry in ledger]
    assert [entry.previous for entry in ledger] == [b"", *digests[:-1]]


class Turncoat(FalseSketches):
    """False from a window on. In one earlier window each group has four rollouts with a sketch beyond the first step:
    too few to reject one group alone.
    """

    first_false_window = 8
    doubtful_window = 5

    async def produce(self, mining_window: MiningWindow, indices: Any) -> list[Group]:
        groups = await super().produce(mining_window, indices)
        if mining_window.window != self.doubtful_window:
            return groups
        return [with_sketches(group, self._beyond_first_step, 4) for group in groups]

    @staticmethod
    def _beyond_first_step(sketch: bytes) -> bytes:
        return sketch[:-4] + bytes((value + 40) % 256 for value in sketch[-4:])


async def test_a_rejection_of_a_known_miner_audits_its_whole_window_and_the_earlier_ones():
    network = Network(RULES)
    network.amend(proof=proof_of(thresholds(), audit_floor_ppm=250_000, audit_halving=1))  # few groups are audited
    async with run_nodes(network, miners=1) as nursery:
        nursery.start_soon(partial(network.run_miner, "turncoat", producer=Turncoat))
        await network.until_window(14)
    ledger = await summaries(network, "validator-0", range(14))
    rows = {entry.window: row for entry in ledger for row in entry.rows if row.miner == key("turncoat").public}
    unaudited = [w for w, row in rows.items() if w < Turncoat.first_false_window and row.audited < row.submitted]
    assert len(unaudited) > 1
    assert Turncoat.doubtful_window in unaudited
    assert rows[Turncoat.doubtful_window].rejected == 0
    later = [row for window, row in rows.items() if window > Turncoat.first_false_window]
    # It is a stranger again, of which one group is judged alone.
    assert all((row.audited, row.rejected) == (1, 1) for row in later)
    last = rows[Turncoat.first_false_window]
    assert (last.audited, last.rejected) == (last.submitted, last.submitted)
    (amending,) = [entry for entry in ledger if entry.amendments]
    assert amending.window > Turncoat.first_false_window  # when that window can no longer be sealed
    assert [item.window for item in amending.amendments] == unaudited
    assert not Accounts.of(ledger, network.run.scoring, network.run.proof).unaudited(14)  # nothing is amended twice
    await assert_amended_once(network, ledger, amending)
    for item in amending.amendments:
        others = rows[item.window].submitted - rows[item.window].audited
        is_doubtful = item.window == Turncoat.doubtful_window  # all groups of a window are tested together
        assert (item.accepted, item.rejected) == ((0, others) if is_doubtful else (others, 0))
        path = paths.reaudit(key("validator-0").public, item.window, item.miner)
        reaudit = await fetch_record(network.node("reader"), ReauditVerdict, path)
        assert reaudit.digest == item.verdict
        reasons = {judgement.reason for judgement in reaudit.record.judgements}
        if is_doubtful:
            assert Reason.WINDOW.value in reasons
            assert reasons <= {Reason.WINDOW.value, Reason.SKETCH.value}  # the draw may let a group show it by itself
    draw = await network.node("x").randomness(network.run.schedule.audit(unaudited[-1]))
    verdict = (await verdicts(network, "turncoat", range(14)))[unaudited[-1]]
    assert tuple(item.index for item in verdict.judgements) == challenge.audit_indices(
        network.signed.digest,
        unaudited[-1],
        draw,
        key("turncoat").public,
        groups=4,
        share_ppm=250_000 * len(verdict.judgements),
    )
    assert key("turncoat").public not in dict(ledger[-1].scores)


async def assert_amended_once(network: Network, ledger: list[Summary], amending: Summary) -> None:
    """Check that `verify --ledger` accepts amendments, and finds the same ones in a second summary."""
    reader, validator = network.node("reader"), key("validator-0")
    assert await verify_ledger(reader, validator.public, lambda line: None) == len(ledger)
    again = ledger[-1].model_copy(update={"amendments": amending.amendments})
    for record in (
        again,
        Seal(run=again.run, window=again.window, validator=again.validator, summary=content_digest(again.to_bytes())),
    ):
        await network.store.put(record.path, sign(record, validator))
    with pytest.raises(ProtocolError, match="amended already"):
        await verify_ledger(reader, validator.public, lambda line: None)


async def test_earlier_groups_whose_bytes_are_gone_lose_their_credit_and_count_as_no_rejections():
    """Storage keeps nothing for ever: what was removed long after its window was judged is nobody's cheat."""
    network = Network(RULES)
    network.amend(proof=proof_of(thresholds(), audit_floor_ppm=250_000, audit_halving=1))  # few groups are audited
    miner = key("turncoat").public
    async with run_nodes(network, miners=1) as nursery:
        nursery.start_soon(partial(network.run_miner, "turncoat", producer=Turncoat))
        await network.until_window(Turncoat.first_false_window)
        async for item in network.store.list(paths.kind_prefix(miner, "batches")):
            if paths.window_of(item.path) < Turncoat.doubtful_window:
                await network.store.delete(item.path)
        await network.until_window(14)
    ledger = await summaries(network, "validator-0", range(14))
    amendments = {item.window: item for entry in ledger for item in entry.amendments}
    gone = [item for window, item in amendments.items() if window < Turncoat.doubtful_window]
    assert gone
    assert {(item.verdict, item.accepted, item.rejected) for item in gone} == {(b"", 0, 0)}
    assert amendments[Turncoat.doubtful_window].rejected


async def test_a_miner_that_delivers_more_than_a_verdict_holds_costs_nobody_a_window(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(limits, "MAX_VERDICT_BYTES", 1400)
    monkeypatch.setattr(Verdict, "max_bytes", 1400)  # less than that of four groups takes
    network = Network(RULES)
    async with run_nodes(network, miners=1):
        await network.until_window(6)
    ledger = await summaries(network, "validator-0", range(2, 5))
    rows = [row for entry in ledger for row in entry.rows]
    assert [(row.submitted, row.audited, row.accepted, row.counting) for row in rows] == [(4, 1, 1, 4)] * 3


async def test_a_miner_pledges_no_more_than_a_batch_holds(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(limits, "MAX_BATCH_BYTES", 900)  # less than four groups take
    network = Network(RULES)
    async with run_nodes(network, miners=1):
        await network.until_window(6)
    rows = [row for entry in await summaries(network, "validator-0", range(2, 5)) for row in entry.rows]
    assert [(row.pledged, row.accepted) for row in rows] == [(1, 1)] * 3


async def copy_verdicts(network: Network) -> None:
    """Publish everything that validator-0 reveals in validator-1's name."""
    own, other = key("validator-1"), key("validator-0").public
    for window in range(100):
        while not await summaries(network, "validator-0", range(window, window + 1)):
            if network.node("x").window() > window + 6:
                break
            await trio.sleep(0.05)
        else:
            (original,) = await summaries(network, "validator-0", range(window, window + 1))
            rows = []
            for row in original.rows:
                if row.verdict:
                    path = paths.verdict(other, window, row.miner)
                    verdict = (await fetch_record(network.node("reader"), Verdict, path)).record
                    copied_verdict = verdict.model_copy(update={"validator": own.public})
                    await network.store.put(paths.verdict(own.public, window, row.miner), sign(copied_verdict, own))
                    rows.append(LedgerRow.of(copied_verdict))
            summary = original.model_copy(update={"validator": own.public, "rows": tuple(rows)})
            seal = seal_of(network, window, content_digest(summary.to_bytes()))
            await network.store.put(paths.seal(own.public, window), seal)
            witness = Witness(run=network.signed.digest, window=window, validator=own.public, seals=())
            await network.store.put(paths.witness(own.public, window), sign(witness, own))
            await network.store.put(paths.summary(own.public, window), sign(summary, own))


def seal_of(network: Network, window: int, digest: bytes) -> bytes:
    own = key("validator-1")
    return sign(Seal(run=network.signed.digest, window=window, validator=own.public, summary=digest), own)


class EarlySeals(DecoratedStore):
    """The store as validator-1 shows it to validator-0: every window has a seal from its first moment on."""

    def __init__(self, network: Network) -> None:
        super().__init__(network.store)
        self._network = network

    async def get(self, path: str, max_bytes: int, *, offset: int = 0, size: int | None = None) -> bytes:
        if path.startswith(paths.kind_prefix(key("validator-1").public, "seals")):
            return seal_of(self._network, paths.window_of(path.rpartition("/")[2]), bytes(32))
        return await super().get(path, max_bytes, offset=offset, size=size)


@pytest.mark.parametrize(
    ("seals_twice", "error"), [(False, "not sealed in time"), (True, "sealed twice")], ids=["waits", "seals twice"]
)
async def test_a_validator_that_copies_anothers_verdicts_does_not_count(seals_twice: bool, error: str):
    network = Network(RULES, validators=2, quorum=2)
    network.validators = ["validator-0"]
    if seals_twice:
        network.mediums["validator-0"] = EarlySeals(network)
    async with run_nodes(network, miners=1) as nursery:
        nursery.start_soon(copy_verdicts, network)
        await network.until_window(7)
    assert len(await summaries(network, "validator-1", range(7))) >= 2
    assert all(event["used"] == 0 for event in network.events("trainer/download", "collected"))
    assert network.events("trainer/download", "verdicts-unread")
    exclusions = network.events("trainer/download", "validator-excluded")
    assert {event["error"].partition(":")[0] for event in exclusions} == {error}


async def trainer_reports(network: Network) -> list[ValidatorReport]:
    node, listing = network.node("reader"), network.store.list(paths.kind_prefix(key("trainer").public, "reports"))
    return [(await fetch_record(node, ValidatorReport, item.path)).record async for item in listing]


async def run_lenient_validator(network: Network, factor: float = 1.0) -> None:
    """Run validator-1, which accepts everything, and computes log-probabilities at another temperature by a factor."""
    node = network.node("validator-1")
    sampling = node.run.sampling.model_copy(update={"temperature": factor * node.run.sampling.temperature})
    proof = with_thresholds(node.run.proof, **LENIENT)
    lenient = replace(node, run=node.run.model_copy(update={"proof": proof, "sampling": sampling}))
    settings = ValidatorSettings(evaluate=False, poll_seconds=0.2)
    await run_validator(lenient, network.task(lenient), network.compute, settings)


async def test_a_validator_that_accepts_everything_is_caught_by_a_canary_and_no_longer_counts():
    network = Network(RULES, validators=2, quorum=1)
    network.validators = ["validator-0"]
    canary = canary_key(key("trainer"), 0)

    async with run_nodes(network, miners=1, canaries=1) as nursery:
        nursery.start_soon(run_lenient_validator, network)
        nursery.start_soon(network.run_canary)
        await network.until_window(10)
    events = network.events("trainer/download", "canary-failure")
    assert events
    assert all(event["accepted"] and event["validator"] == key("validator-1").public.hex() for event in events)
    assert {event["about"] for event in events} == {"verdict"}  # its log-probabilities are right
    reports = await trainer_reports(network)
    assert any(item.validator == key("validator-1").public for report in reports for item in report.canary_failures)
    disagreements = [item for report in reports for item in report.disagreements]
    assert disagreements
    assert all(item.accepting == (key("validator-1").public,) for item in disagreements)
    honest = await verdicts(network, canary, range(10))
    reasons = {item.reason for verdict in honest.values() for item in verdict.judgements}
    assert Reason.SAMPLING.value in reasons
    assert reasons <= {"", Reason.SAMPLING.value, Reason.SKETCH.value, Reason.WINDOW.value}
    state = network.states["trainer"]
    assert not [item.path async for item in state.list("inbox/") if canary.public.hex() in item.path]
    distrusted = [item.path async for item in state.list("distrusted/")]
    assert distrusted == ["distrusted/" + key("validator-1").public.hex()]
    observer = Observer(network.node("observer"), 0)
    await observer.refresh()
    assert any("accepted a false canary" in alarm for alarm in observer.state().alarms)


class EngineThatFailsOnce:
    """An engine whose first check fails."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._fails = True

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def check(self, requests: Sequence[CheckRequest], rules: CheckRules) -> list[Check]:
        if self._fails:
            self._fails = False
            raise EngineError("out of memory")
        return await self._engine.check(requests, rules)


async def test_false_log_probabilities_of_a_stranger_are_found_by_the_canarys_audit():
    """There are no false groups, and nothing is noted of the auditing node's own ones. Its engine fails once."""
    network = Network(RULES, validators=2, quorum=1)
    network.validators = ["validator-0"]

    async def run_auditor() -> None:
        node, state = network.node("auditor"), network.node("trainer").state
        task = network.task(node)

        async def audit(engine: Engine, shares_of: SharesOf) -> None:
            failing: Any = EngineThatFailsOnce(engine)
            await CanaryAudit(node, task, failing, key("trainer"), state, shares_of, share_ppm=1_000_000).run()

        await run_miner(node, task, network.compute, miner_settings(groups=1, chunk=1), beside=audit)

    async with run_nodes(network, miners=1) as nursery:
        nursery.start_soon(run_lenient_validator, network, 0.9)
        nursery.start_soon(run_auditor)
        await network.until_window(8)
    distrusted = [item.path async for item in network.states["trainer"].list("distrusted/")]
    assert distrusted == ["distrusted/" + key("validator-1").public.hex()]
    by_trainer = [
        item
        for report in await trainer_reports(network)
        for item in report.disagreements
        if item.accepting == (key("trainer").public,)
    ]
    assert {(item.miner, item.about, item.rejecting) for item in by_trainer} == {
        (key("miner-1").public, "logprobs", (key("validator-1").public,))
    }


async def test_anybody_can_recheck_a_group_and_the_ledger():
    network = Network(RULES)
    async with run_nodes(network, miners=1) as nursery:
        nursery.start_soon(network.run_cheat)
        await network.until_window(6)
    observer = network.node("observer")
    task = network.task(observer)
    miner = key("miner-1").public.hex()
    honest = await recheck(observer, task, network.compute, GroupReference(miner[:8], 3, 2))
    assert honest.judgement.accepted
    assert all(line.holds for line in honest.statistics)
    assert [line.name for line in honest.statistics] == ["reason", "sketch", "margin", "stop", "luck", "rewards"]
    assert honest.statistics[3].value.startswith(f"{RULES.group_size} rollouts: 0 beyond 0")
    assert honest.validators == (ValidatorResult(key("validator-0").public.hex(), "accepted", contradicts=False),)
    (window, verdict), *_ = [
        item for item in sorted((await verdicts(network, "cheat", range(6))).items()) if item[1].judgements
    ]
    rejection = await recheck(observer, task, network.compute, GroupReference(key("cheat").public.hex(), window, 0))
    assert rejection.judgement.reason == verdict.judgements[0].reason
    assert next(line.name for line in rejection.statistics if not line.holds) == "reason"
    with pytest.raises(NotFoundError, match="0 participants"):
        await recheck(observer, task, network.compute, GroupReference("ffff", 3, 0))
    await trio.sleep(2 * network.run.head_ttl)  # the run is over, and its records have expired
    assert await recheck(observer, task, network.compute, GroupReference(miner[:8], 3, 2)) == honest

    lines: list[str] = []
    validator = key("validator-0").public
    assert await verify_ledger(observer, validator, lines.append) >= 4
    (line,) = lines
    assert "summaries linked" in line
    first = await summaries(network, "validator-0", range(1, 2))
    changed_summary = first[0].model_copy(update={"verify_ms": first[0].verify_ms + 1})
    await network.store.put(paths.summary(validator, 1), sign(changed_summary, key("validator-0")))
    with pytest.raises(ProtocolError, match=r"does not follow|sealed"):
        await verify_ledger(observer, validator, lines.append)

    verdict = (await verdicts(network, "miner-1", range(3, 4)))[3]
    cut = tuple(item.model_copy(update={"ends": (0,) * RULES.group_size}) for item in verdict.judgements)
    await network.store.put(verdict.path, sign(verdict.model_copy(update={"judgements": cut}), key("validator-0")))
    (result,) = (await recheck(observer, task, network.compute, GroupReference(miner[:8], 3, 2))).validators
    assert result.text == "accepted, with other rewards or ends"


@pytest.mark.parametrize("text", ["", "a/b/c", "zz/1/1", "ab/1", "ab/1/-1", "/1/1"])
def test_an_invalid_group_reference_is_refused(text: str):
    with pytest.raises(ValueError, match="MINER/WINDOW/GROUP"):
        GroupReference.parse(text)


# Two validators with one key: one stops


class HidingStore(DecoratedStore):
    """A store that does not show a miner's commitments."""

    async def before(self, operation: str, path: str) -> None:
        if path.startswith(paths.kind_prefix(key("miner-1").public, "commitments")):
            raise NotFoundError(path)


@pytest.mark.parametrize("later", [0, 3], ids=["at once", "later, from a copy of the state"])
async def test_of_two_validators_with_one_key_one_stops_before_it_reveals_other_verdicts(later: int) -> None:
    network, fenced, state = Network(RULES), list[BaseException](), MemoryStore()
    network.store = store = RecordingStore()

    async def validate(node: Node) -> None:
        try:
            settings = ValidatorSettings(evaluate=True, poll_seconds=0.2)
            await run_validator(node, network.task(node), network.compute, settings)
        except* FencedError as group:
            fenced.append(group)

    async with running(network.run_beacon) as nursery:
        nursery.start_soon(network.run_trainer)
        nursery.start_soon(network.run_miner, "miner-1")
        nursery.start_soon(validate, network.node("validator-0"))
        await network.until_window(later)
        await copy_objects(network.states["validator-0"], state)
        node = network.node("validator-0", store=HidingStore(store))
        nursery.start_soon(validate, replace(node, state=state, telemetry=Log("twin")))
        await network.until_window(later + 4)
    assert len(fenced) == 1
    revealed = defaultdict[str, set[bytes]](set)
    for put in store.under(paths.writer_prefix(key("validator-0").public)):
        if "/verdicts/" in put.path or "/summaries/" in put.path:
            revealed[put.path].add(put.data)
    assert {len(contents) for contents in revealed.values()} == {1}
