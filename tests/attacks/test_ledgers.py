"""What observers find and what they do not blame: false ledgers (`grailnode verify --ledger`), reports and verdicts."""

from collections.abc import Mapping
from typing import Any

import pytest

from grailnode.observe.ledger_check import verify_ledger
from grailnode.observe.observer import Observer
from grailnode.store.memory import MemoryStore
from protocol import paths
from protocol.encoding import content_digest
from protocol.errors import ProtocolError
from protocol.identity.signing import SigningKey, sign
from protocol.judging.accounts import Accounts
from protocol.judging.evidence import NO_COUNTS
from protocol.judging.ledger import Amendment, Summary
from protocol.judging.report import ValidatorReport
from protocol.judging.verdict import ReauditVerdict, joint_rejection
from protocol.rollout import challenge
from roles.node.identity import Node
from roles.ports import BeaconError, NotFoundError, StoreError
from roles.records import fetch_record
from roles.validator.ledger_state import Ledger
from tests.support.attacked_nodes.trainer import FIRST, STRANGER, WINDOW, AttackedTrainer, make_honest_testbed
from tests.support.builders import samples
from tests.support.builders.chains import MINER, TRAINER
from tests.support.builders.samples import VALIDATOR, counts

REFUSED = {"rewards": (), "logprobs": b""}
REJECTED = REFUSED | {"reason": "wrong-prompt", "counts": NO_COUNTS}


async def with_ledger(
    windows: int,
    amendments: Mapping[int, tuple[Amendment, ...]] | None = None,
    more_score: int = 0,
    submitted: int = 1,
    rejecting: int | None = None,
    rules: Mapping[str, Any] | None = None,
    **changes: Any,
) -> AttackedTrainer:
    """Return a testbed with a ledger of some windows, each with one accepted group.

    Args:
        amendments: by window.
        more_score: what the validator adds to each score.
        submitted: groups of each window.
        rejecting: a window in which the group is rejected.
        rules: of the run's proof.
        changes: other fields of each judgement.
    """
    testbed, amendments = AttackedTrainer(**(rules or {})), amendments or {}
    ledger: list[Summary] = []
    for window in range(windows):
        own = REJECTED if window == rejecting else changes
        judgement, counted = testbed.judgement(0, **own), {"pledged": submitted, "submitted": submitted}
        verdict = testbed.verdict(FIRST, judgement, window=window, **counted)
        previous = content_digest(ledger[-1].to_bytes()) if ledger else b""
        fields = {"window": window, "previous": previous, "amendments": amendments.get(window, ())}
        entry = testbed.summary(FIRST, verdict, **fields)
        computed = Accounts.of([*ledger, entry], testbed.run.scoring, testbed.run.proof).scores()
        stated = tuple((miner, score + more_score) for miner, score in computed)
        entry = entry.model_copy(update={"scores": stated})
        await testbed.seal_and_reveal(FIRST, entry, verdict)
        ledger.append(entry)
    return testbed


async def assert_holds(testbed: AttackedTrainer, windows: int) -> None:
    assert await verify_ledger(testbed.node, FIRST.public, lambda line: None) == windows


async def test_an_honest_ledger_holds():
    await assert_holds(await with_ledger(12), 12)


async def test_a_ledger_older_than_the_rounds_of_its_beacon_holds(monkeypatch: pytest.MonkeyPatch):
    async def gone(*_: Any) -> bytes:
        raise BeaconError("no such round, or no longer")

    testbed, lines = await with_ledger(3, submitted=2), list[str]()  # of which one is judged
    monkeypatch.setattr(Node, "randomness", gone)
    assert await verify_ledger(testbed.node, FIRST.public, lines.append) == 3
    assert "picks unchecked in 3 windows" in lines[0]


async def test_a_round_that_the_beacon_does_not_give_hides_no_other_window(monkeypatch: pytest.MonkeyPatch):
    testbed, randomness = await with_ledger(3, submitted=2), Node.randomness
    newest = testbed.run.schedule.audit(2)

    async def without_newest(node: Node, number: int) -> bytes:
        if number == newest:
            raise BeaconError("no answer")
        return await randomness(node, number)

    monkeypatch.setattr(Node, "randomness", without_newest)
    await assert_found(testbed, "judges other groups")


async def assert_found(testbed: AttackedTrainer, why: str) -> None:
    with pytest.raises(ProtocolError, match=why):
        await verify_ledger(testbed.node, FIRST.public, lambda line: None)


@pytest.mark.parametrize(
    ("windows", "changes", "why"),
    [
        (3, {"more_score": -1}, "the scores do not follow from the rows"),  # a billionth too low
        (1, {"submitted": 2}, "judges other groups of miner .* than the window's second round picks"),
        (1, REFUSED | {"reason": "wrong-stop"}, r"refuses group 0 of miner .* \(wrong-stop\) against .* \(accepted"),
        (1, REFUSED | {"reason": "improbable-window"}, r"refuses miner .* \(improbable-window\) against .* \(accepted"),
        (1, {"counts": counts(sketch=(5, 0, 0, 1), margin=(5,), stop=(2,))}, r"accepts group 0 .* \(wrong-sketch"),
        (1, {"counts": counts(sketch=(5,), margin=(5, 0, 0, 1), stop=(2,))}, r"accepts group 0 .* \(wrong-sampling"),
        (1, {"counts": counts(sketch=(5,), margin=(5,), stop=(2, 0, 1))}, r"accepts group 0 .* \(wrong-stop"),
        (1, {"counts": NO_COUNTS}, "accepts group 0 of miner .* without counting the steps of its thresholds"),
        (4, {"counts": counts(sketch=(5, 2), margin=(5,))}, r"window 3 .* accepts miner .* \(improbable-window"),
        (9, {"counts": counts(sketch=(5,), margin=(5, 1))}, r"window 7 .* accepts miner .* \(improbable-window"),
    ],
)
async def test_a_ledger_against_its_own_numbers_is_found(windows: int, changes: dict[str, Any], why: str) -> None:
    await assert_found(await with_ledger(windows, **changes), why)


@pytest.mark.parametrize(
    ("declared", "version", "why"),
    [
        ("torch-bfloat16", 0, "as one in torch-float32, which committed to torch-bfloat16"),
        ("torch-float32", 1, "as one of version 0, which committed to version 1"),
        ("torch-float32", 0, ""),
    ],
)
async def test_a_verdict_that_says_what_its_commitment_does_not_is_found(declared: Any, version: int, why: str) -> None:
    testbed = AttackedTrainer()
    groups, changes = ((testbed.judgement(0).digest, 1),), {"version": version, "arithmetic": declared}
    committed = samples.commitment(groups, run=testbed.run_id, miner=MINER.public, window=0, **changes)
    await testbed.store.put(paths.commitment(MINER.public, 0), sign(committed, MINER))
    changes = {"window": 0, "commitment": content_digest(committed.to_bytes()), "submitted": 1}
    verdict = testbed.verdict(FIRST, testbed.judgement(0), **changes)
    entry = testbed.summary(FIRST, verdict, window=0, previous=b"", amendments=())
    entry = entry.model_copy(update={"scores": Accounts.of([entry], testbed.run.scoring, testbed.run.proof).scores()})
    await testbed.seal_and_reveal(FIRST, entry, verdict)
    if why:
        await assert_found(testbed, f"judges miner .* {why}")
    else:
        await assert_holds(testbed, 1)


@pytest.mark.parametrize(
    ("committed", "changes", "why"),
    [
        (3, {"pledged": 3}, "counts 1 groups of miner .*, which committed to 3"),
        (1, {"digest": bytes(32)}, "judges groups that miner .* did not commit to"),
        (1, {"pledged": 4096}, "cannot have pledged 4096 groups"),
    ],
)
async def test_a_verdict_that_counts_other_groups_than_there_are_is_found(
    committed: int, changes: dict[str, Any], why: str
) -> None:
    testbed = AttackedTrainer()
    groups = tuple((samples.digest(f"frame {number}"), 1) for number in range(committed))
    commitment = samples.commitment(groups, run=testbed.run_id, miner=MINER.public, window=0, version=0)
    await testbed.store.put(paths.commitment(MINER.public, 0), sign(commitment, MINER))
    own = {"digest": changes.pop("digest")} | REJECTED if "digest" in changes else {}
    fields = {"window": 0, "commitment": content_digest(commitment.to_bytes()), "submitted": 1, "pledged": 1} | changes
    verdict = testbed.verdict(FIRST, testbed.judgement(0, **own), **fields)
    entry = testbed.summary(FIRST, verdict, window=0, previous=b"", amendments=())
    entry = entry.model_copy(update={"scores": Accounts.of([entry], testbed.run.scoring, testbed.run.proof).scores()})
    await testbed.seal_and_reveal(FIRST, entry, verdict)
    await assert_found(testbed, why)


async def test_scores_that_cannot_be_checked_are_said():
    testbed, lines = await with_ledger(12, more_score=-1), list[str]()
    await testbed.store.delete(paths.summary(FIRST.public, 0))
    assert await verify_ledger(testbed.node, FIRST.public, lines.append) == 11
    assert "scores and refusals of whole windows unchecked in 11 windows" in lines[0]


async def test_others_than_the_picked_groups_may_be_judged_if_these_are_refused_together():
    """They lower the evidence again, and the window is accepted."""
    near, rules = counts(sketch=(5,), margin=(5, 1)), {"audit_floor_ppm": 125_000, "audit_halving": 1}
    long = {"tokens": 200, "logprobs": bytes(800), "counts": counts(sketch=(200,), margin=(200,), stop=(2,))}
    testbed = await with_ledger(7, rules=rules, counts=near)
    run, node = testbed.run, testbed.node
    await testbed.clock.sleep_until(run.beacon.round_time(run.schedule.audit(7)))
    draw = await node.randomness(run.schedule.audit(7))
    ledger = [(await fetch_record(node, Summary, paths.summary(FIRST.public, window))).record for window in range(7)]
    accounts = Accounts.of(ledger, run.scoring, run.proof)
    clean = accounts.clean_windows()[MINER.public]
    for groups in range(2, run.groups + 1):
        place, share = (testbed.run_id, 7, draw, MINER.public), run.audit_share(clean, groups)
        picked = challenge.audit_indices(*place, groups=groups, share_ppm=share, dealt=range(groups))
        unlucky = picked[-1]
        fields: list[dict[str, Any]] = [{"counts": near} if index == unlucky else long for index in range(groups)]
        judgements = [testbed.judgement(index, **own) for index, own in enumerate(fields)]
        row, evidence = run.proof.table[0], accounts.evidence_of(MINER.public, "torch-float32")
        alone, together = ([j for j in judgements if j.index in chosen] for chosen in (picked, range(groups)))
        if joint_rejection(alone, evidence, row) and not joint_rejection(together, evidence, row):
            break
    verdict = testbed.verdict(FIRST, *judgements, window=7, pledged=groups, submitted=groups)
    previous = content_digest(ledger[-1].to_bytes())
    entry = testbed.summary(FIRST, verdict, window=7, previous=previous, amendments=())
    scores = Accounts.of([*ledger, entry], run.scoring, run.proof).scores()
    await testbed.seal_and_reveal(FIRST, entry.model_copy(update={"scores": scores}), verdict)
    await assert_holds(testbed, 8)


class FullDisk(MemoryStore):
    is_full = False

    async def put(self, path: str, data: bytes) -> None:
        if self.is_full:
            raise StoreError(f"{path}: no space left on device")
        await super().put(path, data)


async def test_a_window_that_a_full_disk_did_not_take_counts_for_no_later_score():
    testbed, state = AttackedTrainer(), FullDisk()
    ledger = await Ledger.open(state, testbed.run)
    for window in range(3):
        judgement = testbed.judgement(0, **(REJECTED if window == 1 else {}))
        verdict = testbed.verdict(FIRST, judgement, window=window, pledged=1, submitted=1)
        entry = testbed.summary(FIRST, verdict, window=window, previous=ledger.tip, amendments=(), scores=())
        state.is_full = window == 1
        if state.is_full:
            with pytest.raises(StoreError):
                await ledger.record(entry)
        else:
            entry = await ledger.record(entry)
            await testbed.seal_and_reveal(FIRST, entry, verdict)
    await assert_holds(testbed, 2)


async def test_a_commitment_that_was_not_judged_is_no_evidence_against_a_validator():
    testbed = await with_ledger(1)
    other = samples.commitment(
        ((bytes(32), 1),), run=testbed.run_id, miner=MINER.public, window=0, arithmetic="torch-bfloat16"
    )
    await testbed.store.put(paths.commitment(MINER.public, 0), sign(other, MINER))
    await assert_holds(testbed, 1)


def amendment(window: int, miner: bytes = MINER.public, **changes: Any) -> Amendment:
    empty = Amendment(window=window, miner=miner, verdict=b"", accepted=0, rejected=0)
    return empty.model_copy(update=changes)


@pytest.mark.parametrize(
    ("amendments", "why"),
    [
        ({3: (amendment(1, VALIDATOR.public),)}, "does not exist"),
        ({3: (amendment(1, rejected=1),)}, "had not left unaudited, or without a verdict"),
        ({3: (amendment(1, rejected=4096, verdict=bytes(32)),)}, "had not left unaudited"),
        ({3: (amendment(1),)}, "that no later window rejects"),
    ],
)
async def test_invented_amendments_are_found(amendments: dict[int, tuple[Amendment, ...]], why: str) -> None:
    """They would lower an honest miner's score."""
    await assert_found(await with_ledger(7, amendments), why)


@pytest.mark.parametrize(
    ("index", "changes", "why"),
    [
        (1, REFUSED | {"reason": "wrong-stop"}, r"refuses group 1 .* \(wrong-stop\) against"),
        (1, REFUSED | {"reason": "improbable-window"}, r"refuses miner .* \(improbable-window\) against"),
        (0, REJECTED, "judges groups a second time"),
        (1, REJECTED, ""),
    ],
)
async def test_a_reaudit_is_held_to_its_own_numbers(
    monkeypatch: pytest.MonkeyPatch, index: int, changes: dict[str, Any], why: str
) -> None:
    async def gone(*_: Any) -> bytes:
        raise BeaconError("not any more")

    monkeypatch.setattr(Node, "randomness", gone)  # of two groups, the one is judged that this test needs
    testbed = AttackedTrainer()
    fields = {"window": 1, "pledged": 2, "submitted": 2}
    reaudit = ReauditVerdict(**dict(testbed.verdict(FIRST, testbed.judgement(index, **changes), **fields)))
    caused = amendment(1, verdict=content_digest(reaudit.to_bytes()), rejected=1)
    testbed = await with_ledger(7, {5: (caused,)}, submitted=2, rejecting=4)
    await testbed.store.put(reaudit.path, sign(reaudit, FIRST))
    if why:
        await assert_found(testbed, why)
    else:
        await assert_holds(testbed, 7)


async def expire(testbed: AttackedTrainer, *windows: int) -> None:
    """Delete the seals and verdicts of windows, as a bucket with an expiry rule does."""
    for window in windows:
        await testbed.store.delete(paths.seal(FIRST.public, window))
        await testbed.store.delete(testbed.verdict_path(FIRST, window))


async def test_a_ledger_whose_oldest_verdicts_have_expired_holds_by_its_links_and_scores():
    testbed, lines = await with_ledger(12), list[str]()
    await expire(testbed, 0, 1, 2)
    assert await verify_ledger(testbed.node, FIRST.public, lines.append) == 12
    assert "9 verdicts; of the first 3 only links and scores" in lines[0]


async def test_withheld_verdicts_between_others_do_not_count_as_expired():
    testbed = await with_ledger(12)
    await expire(testbed, 0, 5)
    with pytest.raises(NotFoundError):
        await verify_ledger(testbed.node, FIRST.public, lambda line: None)


# Storage that lies to an observer about reports and verdicts: it raises an alarm and still shows the rest
# (grailnode/observe/observer.py)


LATER = WINDOW + 1


async def put(
    testbed: AttackedTrainer, window: int, signer: SigningKey = TRAINER, at: int | None = None, **changes: Any
) -> None:
    """Put a report of the trainer into storage."""
    own: dict[str, Any] = {"run": testbed.run_id, "window": window, "trainer": TRAINER.public}
    record: ValidatorReport = samples.report(**(own | changes))
    await testbed.store.put(paths.report(TRAINER.public, window if at is None else at), sign(record, signer))


async def alarms(testbed: AttackedTrainer) -> list[str]:
    """Return an observer's alarms, which a second refresh must not repeat."""
    await testbed.clock.sleep_until(testbed.run.opening_time(LATER))
    observer = Observer(testbed.node, 0)
    await observer.refresh()
    first = observer.state().alarms
    await observer.refresh()
    assert observer.state().alarms == first
    return list(first)


async def test_a_report_raises_alarms():
    testbed = AttackedTrainer()
    await put(testbed, WINDOW)
    lines = await alarms(testbed)
    assert any("accepted a false canary" in line for line in lines)
    assert any("1 of 2 validators accept group 3" in line for line in lines)


@pytest.mark.parametrize(
    ("lie", "match"),
    [
        ({"signer": STRANGER}, "not signed by keys that may sign it"),
        ({"run": bytes(32)}, "is of another run"),
        ({"trainer": STRANGER.public}, "belongs at"),
        ({"window": WINDOW + 7, "at": WINDOW}, "belongs at"),
    ],
    ids=["forged", "of another run", "of another trainer", "duplicated from another window"],
)
async def test_a_false_report_accuses_nobody_and_hides_no_later_one(lie: dict[str, Any], match: str) -> None:
    testbed = AttackedTrainer()
    await put(testbed, **({"window": WINDOW} | lie))
    await put(testbed, LATER, disagreements=())
    lines = await alarms(testbed)
    assert [line for line in lines if match in line]
    assert [line for line in lines if "canary" in line] == [
        f"window {LATER}: validator {samples.VALIDATOR.public.hex()[:8]} accepted a false canary"
    ]


async def test_oversized_report():
    testbed = AttackedTrainer()
    await testbed.store.put(paths.report(TRAINER.public, WINDOW), bytes(ValidatorReport.max_bytes * 2))
    await put(testbed, LATER)
    assert any(line.startswith(f"window {LATER}") for line in await alarms(testbed))


@pytest.mark.parametrize("is_withheld", [False, True], ids=["forged", "withheld"])
async def test_a_summary_of_one_validator_that_cannot_be_read_does_not_hide_the_other(is_withheld: bool) -> None:
    testbed = await make_honest_testbed()
    if is_withheld:
        testbed.store.silent_prefixes = (FIRST.public.hex(),)
    else:
        await testbed.store.put(paths.summary(FIRST.public, WINDOW), sign(testbed.summary(FIRST), STRANGER))
    await testbed.clock.sleep_until(testbed.run.opening_time(LATER))
    observer = Observer(testbed.node, 0)
    await observer.refresh()
    state = observer.state()
    assert [row.accepted for row in state.windows if row.window == WINDOW] == [2]
    assert is_withheld or any("not signed by keys" in line for line in state.alarms)
