"""Validators that are heard one after another and judge different groups: who comes first decides nothing for who comes
later.
"""

import pytest
import trio

from protocol.digest import content_digest
from protocol.judging.verdict import Judgement, Reason
from roles.validator.judge import reject_group
from tests.support.attacks.court import FIRST, SECOND, WINDOW, Court
from tests.support.attacks.target import attack

BETWEEN = 2.0  # seconds


async def heard_in_turn(first: tuple[Judgement, ...], second: tuple[Judgement, ...], *, restart: bool = False) -> Court:
    """A trainer that hears one validator, and (after a restart) the other; each alone may accept."""
    court = Court()
    await court.deliver()
    spoken = []
    for who, judgements in ((FIRST, first), (SECOND, second)):
        verdict = court.verdict(who).model_copy(update={"judgements": judgements})
        spoken.append((who, court.summary(who, verdict), verdict))
        await court.seal(who, spoken[-1][1])
    opening = court.run.opening_time(WINDOW)

    async def speak() -> None:
        for number, (who, summary, verdict) in enumerate(spoken, start=1):
            await court.clock.sleep_until(opening + number * BETWEEN)
            await court.reveal(who, summary, verdict)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(speak)
        if restart:
            await court.listen(opening + 1.5 * BETWEEN)
            assert await court.account()
        await court.listen()
    return court


def accepted(index: int) -> Judgement:
    """That a group of the miner's is accepted."""
    return Court().judgement(index)


@pytest.mark.parametrize("restart", [False, True], ids=["at once", "after a restart"])
def test_groups_that_only_a_later_validator_judged_are_trained_on_too(restart: bool):
    @attack
    async def scenario() -> None:
        court = await heard_in_turn((accepted(0),), (accepted(0), accepted(1)), restart=restart)
        assert await court.outcomes() == {"used"}
        assert [event["used"] for event in court.log.named("collected")] == [1, 1]

    scenario()


@attack
async def test_a_verdict_that_judges_nothing_settles_nothing():
    court = await heard_in_turn((), (accepted(0), accepted(1)))
    assert list((await court.account()).values()) == ["used", "used"]


@attack
async def test_a_group_accepted_in_a_wrong_place_is_still_used_in_its_own():
    digest = content_digest(Court().groups[1].to_frame())
    court = await heard_in_turn((Court().judgement(0, digest=digest),), (accepted(0), accepted(1)))
    assert await court.outcomes() == {"used"}
    assert [(event["used"], event["unused"]) for event in court.log.named("collected")] == [(0, 1), (2, 0)]


@attack
async def test_a_contradiction_that_comes_after_the_settlement_is_told():
    refusal = reject_group(0, accepted(0).digest, Reason.SKETCH)
    court = await heard_in_turn((accepted(0),), (refusal,))
    assert await court.outcomes() == {"used"}  # one was enough, and what was used stays used
    assert [event["index"] for event in court.log.named("validators-disagree")] == [0]
