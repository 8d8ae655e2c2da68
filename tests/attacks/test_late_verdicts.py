"""Validators that reveal one after another and judge different groups: the first does not decide for the later ones."""

import pytest
import trio

from protocol.digest import content_digest
from protocol.judging.verdict import Judgement, Reason
from roles.validator.judge import reject_group
from tests.support.attacked_nodes.trainer import FIRST, SECOND, WINDOW, AttackedTrainer
from tests.support.simulation.virtual_clock import simulated

SECONDS_BETWEEN = 2.0


async def reveal_in_turn(
    first: tuple[Judgement, ...], second: tuple[Judgement, ...], *, restart: bool = False
) -> AttackedTrainer:
    """Let a trainer read one validator, and (after a restart) the other; one acceptance is a quorum."""
    testbed = AttackedTrainer()
    await testbed.deliver()
    records = []
    for validator, judgements in ((FIRST, first), (SECOND, second)):
        verdict = testbed.verdict(validator).model_copy(update={"judgements": judgements})
        summary = testbed.summary(validator, verdict)
        records.append((validator, summary, verdict))
        await testbed.seal(validator, summary)
    opening = testbed.run.opening_time(WINDOW)

    async def reveal() -> None:
        for number, (validator, summary, verdict) in enumerate(records, start=1):
            await testbed.clock.sleep_until(opening + number * SECONDS_BETWEEN)
            await testbed.reveal(validator, summary, verdict)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(reveal)
        if restart:
            await testbed.collect(opening + 1.5 * SECONDS_BETWEEN)
            assert await testbed.group_outcomes()
        await testbed.collect()
    return testbed


def acceptance(index: int) -> Judgement:
    """Return the judgement that accepts a group of the miner."""
    return AttackedTrainer().judgement(index)


@pytest.mark.parametrize("restart", [False, True], ids=["at once", "after a restart"])
@simulated
async def test_groups_that_only_a_later_validator_judged_are_trained_on_too(restart: bool):
    testbed = await reveal_in_turn((acceptance(0),), (acceptance(0), acceptance(1)), restart=restart)
    assert await testbed.outcomes() == {"used"}
    assert [event["used"] for event in testbed.log.named("collected")] == [1, 1]


@simulated
async def test_a_verdict_without_judgements_decides_nothing():
    testbed = await reveal_in_turn((), (acceptance(0), acceptance(1)))
    assert list((await testbed.group_outcomes()).values()) == ["used", "used"]


@simulated
async def test_a_group_accepted_at_a_wrong_index_is_still_used_at_its_own():
    digest = content_digest(AttackedTrainer().groups[1].to_frame())
    testbed = await reveal_in_turn((AttackedTrainer().judgement(0, digest=digest),), (acceptance(0), acceptance(1)))
    assert await testbed.outcomes() == {"used"}
    assert [(event["used"], event["unused"]) for event in testbed.log.named("collected")] == [(0, 1), (2, 0)]


@simulated
async def test_a_contradiction_after_the_outcome_is_reported():
    refusal = reject_group(0, acceptance(0).digest, Reason.SKETCH)
    testbed = await reveal_in_turn((acceptance(0),), (refusal,))
    assert await testbed.outcomes() == {"used"}  # one acceptance was enough, and a group that was used stays used
    assert [event["index"] for event in testbed.log.named("validators-disagree")] == [0]
