"""A miner that signs two commitments for one window, one for each validator: its work counts once."""

from collections.abc import Sequence

import trio

from protocol.rollout.batch import Group
from roles.trainer.spool import INBOX, OUTCOMES
from roles.trainer.verified_batch import VerifiedBatch, WindowOutcomes
from tests.support.attacks.court import FIRST, SECOND, WINDOW, Court
from tests.support.attacks.target import attack

SECONDS_BETWEEN = 2.0


async def deliver_in_turn(*deliveries: Sequence[Group]) -> Court:
    """Let a trainer read two validators that have judged different deliveries of one miner.

    Each delivery is in storage for everybody when its validator reveals.
    """
    court = Court()
    records = []
    for validator, groups in zip((FIRST, SECOND), deliveries, strict=True):
        court.groups = list(groups)
        verdict = court.verdict(validator, *map(court.judgement, range(len(groups))))
        summary = court.summary(validator, verdict)
        await court.seal(validator, summary)
        records.append((groups, validator, summary, verdict))
    opening = court.run.opening_time(WINDOW)

    async def deliver_and_reveal() -> None:
        for number, (groups, validator, summary, verdict) in enumerate(records, start=1):
            await court.clock.sleep_until(opening + number * SECONDS_BETWEEN)
            await court.deliver(groups)
            await court.reveal(validator, summary, verdict)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(deliver_and_reveal)
        await court.listen()
    return court


def disguised(group: Group) -> Group:
    """Return the same rollouts with another digest: one bit of a sketch differs."""
    first, *others = group.rollouts
    first = first.model_copy(update={"sketch": bytes([first.sketch[0] ^ 1]) + first.sketch[1:]})
    return group.model_copy(update={"rollouts": (first, *others)})


@attack
async def test_the_same_rollouts_under_two_commitments_are_trained_on_once():
    groups = Court().groups
    court = await deliver_in_turn(groups, [disguised(group) for group in groups])
    batches = [VerifiedBatch.from_bytes(await court.state.get(i.path, 1 << 20)) async for i in court.state.list(INBOX)]
    work = [(group.prompt, group.completions) for batch in batches for group in batch.groups]
    assert len(set(work)) == len(work) == len(groups)


@attack
async def test_a_group_of_two_commitments_is_used_once():
    groups = Court().groups
    court = await deliver_in_turn(groups[:1], groups)
    window_outcomes = [
        WindowOutcomes.from_bytes(await court.state.get(i.path, 1 << 20)) async for i in court.state.list(OUTCOMES)
    ]
    assert [item.status for window in window_outcomes for item in window.outcomes] == [
        "used",
        "commitment-changed",
        "commitment-changed",
    ]
