"""Validators and miners that do not do their part, in whole networks: what it costs them, and that nobody else pays."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import trio

from grailnode.engine.compute import make_engine
from grailnode.node.canary import CanaryProducer
from grailnode.node.wiring import run_miner, run_validator
from grailnode.observe.ledger_check import verify_ledger
from grailnode.observe.observer import Observer
from grailnode.observe.recheck import GroupReference, ValidatorResult, recheck
from grailnode.run.creation import Choices
from protocol import limits, paths
from protocol.digest import content_digest
from protocol.errors import ProtocolError
from protocol.identity.signing import open_signed, sign
from protocol.judging.ledger import LedgerRow, Seal, Summary, Witness, balances, scores
from protocol.judging.report import ValidatorReport, canary_key
from protocol.judging.verdict import Reason, ReauditVerdict, Verdict
from protocol.rollout import challenge
from protocol.rollout.batch import Group
from roles.miner.miner import Miner, MinerSettings
from roles.miner.produce import HonestProducer, MiningWindow
from roles.policy.follower import Follower
from roles.ports import NotFoundError
from roles.validator.validator import ValidatorSettings
from tests.network.test_network import running, simulate, verdicts
from tests.network.test_spaces_that_fail import Unreachable
from tests.support.simulation.network import Network, key

CHOICES = Choices(groups=4, group_size=8)
GULLIBLE: dict[str, Any] = {
    "sketch_tolerance": 64,
    "sketch_median": 64,
    "sketch_rate": 0.999,
    "margin": 100.0,
    "margin_rate": 0.999,
    "margin_limit": 100.0,
}


async def summaries(network: Network, validator: str, windows: range) -> list[Summary]:
    """A validator's revealed summaries."""
    found = []
    for window in windows:
        try:
            data = await network.store.get(paths.summary(key(validator).public, window), Summary.max_bytes)
            found.append(open_signed(data, Summary, [key(validator).public]).record)
        except NotFoundError:
            continue
    return found


class Choosy(Miner):
    """Sees what a window brings and delivers only its first group, whatever it had pledged."""

    async def _deliver(self, window: int, groups: Sequence[Group]) -> bool:
        return await super()._deliver(window, groups[:1])


async def run_choosy(network: Network) -> None:
    """A miner that picks and chooses, for ever."""
    node = network.node("choosy")
    engine = make_engine(network.compute, node.run_sync)
    producer = HonestProducer(network.task(node), engine)
    settings = MinerSettings(groups=4, chunk=4, share=0.7, poll_seconds=0.2)
    await Choosy(node, await Follower.open(node), engine, producer, settings).run()


class Turncoat(HonestProducer):
    """Honest up to a window, and then once with sketches of nothing at all, in a group that is audited."""

    turns = 8

    async def produce(self, turn: MiningWindow, indices: Any) -> list[Group]:
        groups = await super().produce(turn, indices)
        if turn.window < self.turns:
            return groups
        empty = [
            tuple(item.model_copy(update={"sketch": bytes(len(item.sketch))}) for item in group.rollouts)
            for group in groups
        ]
        return [group.model_copy(update={"rollouts": rollouts}) for group, rollouts in zip(groups, empty, strict=True)]


def test_delivering_less_than_pledged_costs_and_delivering_nothing_voids_the_pledge():
    async def scenario() -> None:
        network = Network(CHOICES)
        async with running(network, miners=1) as nursery:
            choosy = trio.CancelScope()

            async def until_cancelled() -> None:
                with choosy:
                    await run_choosy(network)

            nursery.start_soon(until_cancelled)
            await network.until_window(6)
            choosy.cancel()
            await network.until_window(10)
        ledger = await summaries(network, "validator-0", range(10))
        rows = {entry.window: row for entry in ledger for row in entry.rows if row.miner == key("choosy").public}
        short = [row for row in rows.values() if row.submitted]
        assert short
        assert all((row.pledged, row.submitted, row.accepted) == (4, 1, 1) for row in short)
        broken = [window for window, row in rows.items() if row.submitted == 0]
        assert len(broken) == 1  # it was gone, and that it owed was noted once
        worth = balances(ledger, network.run.scoring)
        assert worth[key("choosy").public] < 0 < worth[key("miner-1").public]
        assert all(
            entry.scores == scores(ledger[: place + 1], network.run.scoring) for place, entry in enumerate(ledger)
        )
        digests = [content_digest(entry.to_bytes()) for entry in ledger]
        assert [entry.previous for entry in ledger] == [b"", *digests[:-1]]

    simulate(scenario)


async def betrayed(producer: type[Turncoat]) -> tuple[Network, list[Summary], dict[int, LedgerRow]]:
    """A network in which few groups are audited, the validator's ledger, and its rows of the miner that lied in the
    end.
    """
    network = Network(CHOICES)
    proof = network.run.proof.model_copy(update={"audit_floor_ppm": 250_000, "audit_halving": 1})
    network.amend(proof=proof)
    async with running(network, miners=1) as nursery:
        nursery.start_soon(partial(network.run_miner, "turncoat", producer=producer))
        await network.until_window(14)
    ledger = await summaries(network, "validator-0", range(14))
    return network, ledger, {e.window: row for e in ledger for row in e.rows if row.miner == key("turncoat").public}


def test_a_rejection_after_a_clean_record_audits_everything_and_looks_back():
    async def scenario() -> None:
        network, ledger, rows = await betrayed(Turncoat)
        fewer = [w for w, row in rows.items() if w < Turncoat.turns and row.audited < row.submitted]
        assert fewer
        later = [row for window, row in rows.items() if window > Turncoat.turns]
        assert all(
            (row.audited, row.rejected) == (1, 1) for row in later
        )  # a stranger again, and no more time spent on it
        last = rows[Turncoat.turns]
        assert (last.audited, last.rejected) == (last.submitted, last.submitted)
        (amending,) = [entry for entry in ledger if entry.amendments]
        assert amending.window > Turncoat.turns  # when nobody can seal that window any more
        assert [item.window for item in amending.amendments] == fewer
        for item in amending.amendments:
            row = rows[item.window]
            assert item.accepted == row.submitted - row.audited  # they had been honest
            path = paths.reaudit(key("validator-0").public, item.window, item.miner)
            data = await network.store.get(path, limits.MAX_VERDICT_BYTES)
            assert open_signed(data, ReauditVerdict, [key("validator-0").public]).digest == item.verdict
        draw = await network.node("x").randomness(network.run.schedule.audit(fewer[-1]))
        seen = (await verdicts(network, "turncoat", range(14)))[fewer[-1]]
        assert tuple(item.index for item in seen.judgements) == challenge.first_audit_indices(
            network.signed.digest, fewer[-1], draw, key("turncoat").public, groups=4, count=len(seen.judgements)
        )
        assert key("turncoat").public not in dict(ledger[-1].scores)

    simulate(scenario)


class Thin(Turncoat):
    """In one earlier window a false sketch in each of three rollouts of every group: no group shows it, all together
    do.
    """

    thin = 5

    async def produce(self, turn: MiningWindow, indices: Any) -> list[Group]:
        groups = await super().produce(turn, indices)
        return [self._thinned(group) for group in groups] if turn.window == self.thin else groups

    @staticmethod
    def _thinned(group: Group) -> Group:
        last = [item.model_copy(update={"sketch": item.sketch[:-4] + bytes(4)}) for item in group.rollouts[:3]]
        return group.model_copy(update={"rollouts": (*last, *group.rollouts[3:])})


def test_looking_back_holds_a_windows_groups_together():
    async def scenario() -> None:
        network, ledger, rows = await betrayed(Thin)
        assert rows[Thin.thin].rejected == 0
        assert rows[Thin.thin].audited < rows[Thin.thin].submitted
        amended = {item.window: item for entry in ledger for item in entry.amendments}
        unseen = {window: row.submitted - row.audited for window, row in rows.items() if window in amended}
        assert len(unseen) > 1
        for window, item in amended.items():
            accepted = 0 if window == Thin.thin else unseen[window]
            assert (item.accepted, item.rejected) == (accepted, unseen[window] - accepted)
        own = key("validator-0").public
        path = paths.reaudit(own, Thin.thin, key("turncoat").public)
        found = open_signed(await network.store.get(path, limits.MAX_VERDICT_BYTES), ReauditVerdict, [own]).record
        assert {judgement.reason for judgement in found.judgements} == {Reason.WINDOW.value}

    simulate(scenario)


async def copy(network: Network) -> None:
    """Everything that validator-0 reveals, under validator-1's name."""
    own, other = key("validator-1"), key("validator-0").public
    for window in range(100):
        while not await summaries(network, "validator-0", range(window, window + 1)):
            if network.node("x").window() > window + 6:
                break
            await trio.sleep(0.05)
        else:
            (theirs,) = await summaries(network, "validator-0", range(window, window + 1))
            rows = []
            for row in theirs.rows:
                if row.verdict:
                    data = await network.store.get(paths.verdict(other, window, row.miner), 1 << 26)
                    verdict = open_signed(data, Verdict, [other]).record
                    mine = verdict.model_copy(update={"validator": own.public})
                    await network.store.put(paths.verdict(own.public, window, row.miner), sign(mine, own))
                    rows.append(LedgerRow.of(mine))
            summary = theirs.model_copy(update={"validator": own.public, "rows": tuple(rows)})
            seal = seal_of(network, window, content_digest(summary.to_bytes()))
            await network.store.put(paths.seal(own.public, window), seal)
            witness = Witness(run=network.signed.digest, window=window, validator=own.public, seals=())
            await network.store.put(paths.witness(own.public, window), sign(witness, own))
            await network.store.put(paths.summary(own.public, window), sign(summary, own))


def seal_of(network: Network, window: int, digest: bytes) -> bytes:
    """Validator-1's seal on a summary."""
    own = key("validator-1")
    return sign(Seal(run=network.signed.digest, window=window, validator=own.public, summary=digest), own)


class TwoFaced(Unreachable):
    """What validator-1's storage shows to the other one: it has sealed something from the first moment of a window on."""

    def __init__(self, network: Network) -> None:
        super().__init__(network.store, "nothing")
        self._network = network

    async def get(self, path: str, max_bytes: int, *, offset: int = 0, size: int | None = None) -> bytes:
        if path.startswith(paths.kind_prefix(key("validator-1").public, "seals")):
            return seal_of(self._network, paths.window_of(path.rpartition("/")[2]), bytes(32))
        return await super().get(path, max_bytes, offset=offset, size=size)


@pytest.mark.parametrize(
    ("two_faced", "why"), [(False, "not sealed in time"), (True, "sealed twice")], ids=["waits", "seals twice"]
)
def test_a_validator_that_copies_anothers_findings_is_not_heard(two_faced: bool, why: str):
    async def scenario() -> None:
        network = Network(CHOICES, validators=2, quorum=2)
        network.validators = ["validator-0"]
        shown = TwoFaced(network) if two_faced else network.store
        network.medium = lambda name, process: shown if name == "validator-0" else network.store  # type: ignore[method-assign]
        async with running(network, miners=1) as nursery:
            nursery.start_soon(copy, network)
            await network.until_window(7)
        assert len(await summaries(network, "validator-1", range(7))) >= 2
        settled = network.events("trainer/download", "collected")
        assert settled
        assert all(event["used"] == 0 for event in settled)
        unheard = network.events("trainer/download", "validator-excluded")
        assert {event["error"].partition(":")[0] for event in unheard} == {why}

    simulate(scenario)


def test_validators_that_seal_do_not_wait_for_the_last_moment():
    async def scenario() -> None:
        network = Network(CHOICES, validators=2, quorum=2)
        async with running(network, miners=1):
            await network.until_window(5)
        used = [event for event in network.events("trainer/download", "collected") if event["used"]]
        assert {event["window"] for event in used} >= {1, 2, 3}  # window 3 long before its seals are due

    simulate(scenario)


def test_a_validator_that_accepts_anything_is_caught_by_a_canary_and_counts_no_more():
    async def scenario() -> None:
        network = Network(CHOICES, validators=2, quorum=1)
        network.validators = ["validator-0"]
        canary = canary_key(key("trainer"), 0)

        async def gullible() -> None:
            node = network.node("validator-1")
            lax = node.run.model_copy(update={"proof": node.run.proof.model_copy(update=GULLIBLE)})
            settings = ValidatorSettings(0, 0.2)
            blind = replace(node, run=lax)
            await run_validator(blind, network.task(blind), network.compute, settings)

        async def sing() -> None:
            node = replace(network.node("canary"), key=canary)
            settings = MinerSettings(groups=4, chunk=4, share=0.7, poll_seconds=0.2)
            producer = partial(CanaryProducer, trainer=key("trainer"))
            await run_miner(node, network.task(node), network.compute, settings, producer)

        async with running(network, miners=1, canaries=1) as nursery:
            nursery.start_soon(gullible)
            nursery.start_soon(sing)
            await network.until_window(10)
        deceived = network.events("trainer/download", "canary-failure")
        assert deceived
        assert all(event["accepted"] and event["validator"] == key("validator-1").public.hex() for event in deceived)
        reports = []
        async for item in network.store.list(paths.kind_prefix(key("trainer").public, "reports")):
            data = await network.store.get(item.path, ValidatorReport.max_bytes)
            reports.append(open_signed(data, ValidatorReport, [key("trainer").public]).record)
        assert any(
            found.validator == key("validator-1").public for report in reports for found in report.canary_failures
        )
        split = [found for report in reports for found in report.disagreements]
        assert split
        assert all(found.accepting == (key("validator-1").public,) for found in split)
        honest = await verdicts(network, canary, range(10))
        reasons = {item.reason for verdict in honest.values() for item in verdict.judgements}
        assert Reason.SAMPLING.value in reasons
        assert reasons <= {"", Reason.SAMPLING.value, Reason.SKETCH.value, Reason.WINDOW.value}
        assert not [
            item.path async for item in network.states["trainer"].list("inbox/") if canary.public.hex() in item.path
        ]
        assert [item.path async for item in network.states["trainer"].list("distrusted/")] == [
            "distrusted/" + key("validator-1").public.hex()
        ]
        observer = Observer(network.node("bystander"), 0)
        await observer.refresh()
        assert any("accepted a false canary" in alarm for alarm in observer.state().alarms)

    simulate(scenario)


def test_anybody_can_judge_a_group_again_and_recompute_the_ledger():
    async def scenario() -> None:
        network = Network(CHOICES)
        async with running(network, miners=1) as nursery:
            nursery.start_soon(network.run_cheat)
            await network.until_window(6)
        bystander = network.node("bystander")
        task = network.task(bystander)
        miner = key("miner-1").public.hex()
        honest = await recheck(bystander, task, network.compute, GroupReference(miner[:8], 3, 2))
        assert honest.judgement.accepted
        assert all(line.holds for line in honest.statistics)
        assert honest.validators == (ValidatorResult(key("validator-0").public.hex(), "accepted", contradicts=False),)
        (window, verdict), *_ = [
            item for item in sorted((await verdicts(network, "cheat", range(6))).items()) if item[1].judgements
        ]
        false = await recheck(bystander, task, network.compute, GroupReference(key("cheat").public.hex(), window, 0))
        assert false.judgement.reason == verdict.judgements[0].reason
        assert [line.name for line in false.statistics if not line.holds]
        with pytest.raises(NotFoundError, match="0 participants"):
            await recheck(bystander, task, network.compute, GroupReference("ffff", 3, 0))
        await trio.sleep(2 * network.run.head_ttl)  # the run is over, and nobody renews anything
        assert await recheck(bystander, task, network.compute, GroupReference(miner[:8], 3, 2)) == honest

        said: list[str] = []
        validator = key("validator-0").public
        assert await verify_ledger(bystander, validator, said.append) >= 4
        (line,) = said
        assert "summaries linked" in line
        first = await summaries(network, "validator-0", range(1, 2))
        bent = first[0].model_copy(update={"verify_ms": first[0].verify_ms + 1})
        await network.store.put(paths.summary(validator, 1), sign(bent, key("validator-0")))
        with pytest.raises(ProtocolError, match=r"does not follow|sealed"):
            await verify_ledger(bystander, validator, said.append)

    simulate(scenario)


@pytest.mark.parametrize("text", ["", "a/b/c", "zz/1/1", "ab/1", "ab/1/-1", "/1/1"])
def test_which_group_has_to_be_said_plainly(text: str):
    with pytest.raises(ValueError, match="MINER/WINDOW/GROUP"):
        GroupReference.parse(text)
