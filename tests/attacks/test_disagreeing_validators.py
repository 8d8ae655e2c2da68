"""Validators that judge otherwise than the others: late ones, and ones that invent miners or log-probabilities."""

from collections.abc import Sequence

import numpy as np
import pytest
import trio

from protocol import paths
from protocol.encoding import content_digest
from protocol.identity.signing import SigningKey, sign
from protocol.judging.evidence import NO_COUNTS
from protocol.judging.ledger import LedgerRow
from protocol.judging.report import canary_key, is_false_group
from protocol.judging.verdict import Judgement, Reason, Verdict
from roles.trainer.collect.collector import Collector
from roles.trainer.collect.quorum import LOGPROBS_DISAGREE, Decision, LogprobRule, decide
from roles.trainer.spool import OUTCOMES
from tests.support.attacked_nodes.trainer import (
    FIRST,
    SECOND,
    STRANGER,
    WINDOW,
    AttackedTrainer,
    closing_time,
    reveal_in_turn,
)
from tests.support.builders.chains import TRAINER
from tests.support.builders.proofs import proof_of
from tests.support.builders.samples import VALIDATOR, judgement, thresholds, verdict


async def judge_in_turn(*judgements: Sequence[Judgement], restart: bool = False) -> AttackedTrainer:
    """Let a trainer read one validator's judgements on the same two groups, and then the other's."""
    groups = AttackedTrainer().groups
    return await reveal_in_turn(*((groups, own) for own in judgements), restart=restart)


def acceptance(index: int) -> Judgement:
    return AttackedTrainer().judgement(index)


@pytest.mark.parametrize("restart", [False, True], ids=["at once", "after a restart"])
async def test_groups_that_only_a_later_validator_judged_are_trained_on_too(restart: bool):
    testbed = await judge_in_turn((acceptance(0),), (acceptance(0), acceptance(1)), restart=restart)
    assert await testbed.outcomes() == {"used"}
    assert [event["used"] for event in testbed.log.named("collected")] == [1, 1]


async def test_a_verdict_without_judgements_decides_nothing():
    testbed = await judge_in_turn((), (acceptance(0), acceptance(1)))
    assert list((await testbed.group_outcomes()).values()) == ["used", "used"]


async def test_a_group_accepted_at_a_wrong_index_is_still_used_at_its_own():
    digest = content_digest(AttackedTrainer().groups[1].to_frame())
    testbed = await judge_in_turn((AttackedTrainer().judgement(0, digest=digest),), (acceptance(0), acceptance(1)))
    assert await testbed.outcomes() == {"used"}
    assert [(event["used"], event["unused"]) for event in testbed.log.named("collected")] == [(0, 1), (2, 0)]


async def test_a_contradiction_after_the_outcome_is_reported():
    refusal = Judgement(index=0, digest=acceptance(0).digest, reason=Reason.SKETCH.value)
    testbed = await judge_in_turn((acceptance(0),), (refusal,))
    assert await testbed.outcomes() == {"used"}  # one acceptance was enough, and a group that was used stays used
    assert [event["index"] for event in testbed.log.named("validators-disagree")] == [0]


# A validator that lists verdicts on miners that nobody else has seen


INVENTED = [SigningKey(content_digest(number.to_bytes(4, "big"))) for number in range(200)]


async def invent_miners(testbed: AttackedTrainer) -> set[str]:
    """Publish the first validator's records, which list the miner and the invented ones; return the paths of the
    verdicts on these.
    """
    verdicts = [testbed.verdict(FIRST, miner=key.public) for key in INVENTED]
    own = testbed.verdict(FIRST)
    summary = testbed.summary(FIRST, *sorted([own, *verdicts], key=lambda verdict: verdict.miner))
    for invented in verdicts:
        await testbed.store.put(paths.verdict(FIRST.public, WINDOW, invented.miner), sign(invented, FIRST))
    await testbed.seal_and_reveal(FIRST, summary, own)
    return {paths.verdict(FIRST.public, WINDOW, verdict.miner) for verdict in verdicts}


async def test_miners_that_one_validator_invents_cost_the_trainer_no_request_and_no_object():
    testbed = AttackedTrainer(quorum=2)
    await testbed.deliver()
    await invent_miners(testbed)
    await testbed.publish_records(SECOND)
    reads_before = testbed.store.reads
    await testbed.collect()
    assert await testbed.outcomes() == {"used"}
    assert len([item async for item in testbed.state.list(OUTCOMES)]) == 1
    assert testbed.store.reads - reads_before < len(INVENTED)
    (event,) = testbed.log.named("verdicts-unread")
    assert (event["validator"], event["miners"]) == (FIRST.public.hex()[:8], len(INVENTED))


@pytest.mark.parametrize(
    ("quorum", "missing_verdicts"), [(2, 0), (1, 1)], ids=["listed by one", "another verdict is missing"]
)
async def test_a_validator_that_accepts_a_false_canary_is_caught(quorum: int, missing_verdicts: int) -> None:
    testbed = AttackedTrainer(quorum)
    canary = canary_key(TRAINER, 0).public
    false_index = next(index for index in range(100) if is_false_group(TRAINER, WINDOW, index))
    lie = testbed.verdict(FIRST, testbed.judgement(false_index), miner=canary, pledged=100, submitted=100)
    missing = [testbed.verdict(FIRST, miner=STRANGER.public)] * missing_verdicts
    await testbed.store.put(paths.verdict(FIRST.public, WINDOW, canary), sign(lie, FIRST))
    await testbed.seal_and_reveal(FIRST, testbed.summary(FIRST, lie, *missing))
    await testbed.clock.sleep_until(testbed.run.opening_time(WINDOW))
    with trio.move_on_after(closing_time(testbed) - 1.0 - testbed.clock.now()):
        await Collector(testbed.node, canaries=1).run()
    events = testbed.log.named("canary-failure")
    assert [(event["validator"], event["accepted"], event["verdict"]) for event in events] == [
        (FIRST.public.hex(), True, LedgerRow.of(lie).verdict.hex())
    ]


async def test_a_late_summary_makes_a_validator_that_was_read_often_enough_be_read_again():
    """The first validator's storage has lost a verdict, so that it was read in vain until the second one is back."""
    testbed = AttackedTrainer(quorum=2)
    await testbed.deliver()
    verdict_on_canary = testbed.verdict(FIRST, miner=canary_key(TRAINER, 0).public)
    own = testbed.verdict(FIRST)
    summary = testbed.summary(FIRST, *sorted([own, verdict_on_canary], key=lambda verdict: verdict.miner))
    await testbed.seal_and_reveal(FIRST, summary, own)
    await testbed.publish_records(SECOND)
    testbed.store.silent_prefixes = (paths.summary(SECOND.public, WINDOW),)

    async def answer_late() -> None:
        await testbed.clock.sleep_until(closing_time(testbed) + 3.0)
        testbed.store.silent_prefixes = ()

    collector = await testbed.open_collector(canaries=1)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(answer_late)
        with trio.move_on_after(closing_time(testbed) + 6.0 - testbed.clock.now()):
            await collector.run()
    assert await testbed.outcomes() == {"used"}


# A validator that lies about log-probabilities only: the learner must not learn its ratios


PAYING = {VALIDATOR.public}
TRUE = np.linspace(-3.0, -0.1, 5, dtype=np.float32)
HALF = TRUE - np.float32(np.log(2.0))  # every token half as likely: its ratio in the loss would double


RULE = LogprobRule(proof_of(thresholds(logprob_tolerance=10_000)))


def verdicts(*logprobs: np.ndarray) -> list[Verdict]:
    """Return verdicts that accept group 0 with these log-probabilities."""
    return [verdict(judgement(0, logprobs=values.astype("<f4").tobytes())) for values in logprobs]


def decision(*logprobs: np.ndarray, quorum: int = 2, outstanding: int = 0) -> Decision:
    awaited = {bytes([number]) * 32 for number in range(outstanding)}
    (result,) = decide(verdicts(*logprobs), quorum, awaited, RULE, PAYING, lambda group: PAYING | awaited)
    return result


def noisy(scale: float = 0.005) -> np.ndarray:
    return TRUE + scale * np.array([1, -1, 1, -1, 1], dtype=np.float32)


def test_of_two_validators_that_say_different_things_neither_counts() -> None:
    refused = decision(TRUE, HALF)
    assert refused.reason == LOGPROBS_DISAGREE
    assert len(refused.dissenting) == 1
    assert decision(TRUE, HALF, outstanding=1).pending  # a third one decides
    assert decision(TRUE, noisy(), HALF, HALF).reason == LOGPROBS_DISAGREE  # two quorums


def test_honest_noise_is_no_disagreement_and_those_that_count_all_agree_with_each_other() -> None:
    accepted = decision(TRUE, noisy(), noisy(-0.004))
    assert (accepted.reason, len(accepted.accepting)) == ("", 3)
    accepted = decision(TRUE, noisy(0.009), noisy(-0.009))  # the first one lies between the others
    assert (len(accepted.accepting), len(accepted.dissenting)) == (2, 1)
    assert decision(TRUE, noisy(0.009), noisy(-0.009), quorum=3).reason == LOGPROBS_DISAGREE


def test_equal_values_of_many_validators_are_compared_once() -> None:
    honest = [TRUE] * 600 + [noisy()] * 424
    accepted = decision(*honest, HALF, quorum=600)
    assert len(accepted.accepting) == 1024
    assert [np.frombuffer(item.judgement.logprobs, "<f4")[0] for item in accepted.dissenting] == [HALF[0]]


def test_a_verdict_on_another_number_of_tokens_agrees_with_nobody() -> None:
    other = verdict(judgement(0, tokens=2, counts=NO_COUNTS, logprobs=TRUE[:2].tobytes()))
    (refused,) = decide([*verdicts(TRUE), other], 2, set(), RULE, PAYING, lambda group: PAYING)
    assert refused.reason == LOGPROBS_DISAGREE
