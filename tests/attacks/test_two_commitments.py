"""A miner that signs two commitments for one window and shows each validator another: its work counts once."""

from collections.abc import Sequence

import trio

from protocol.rollout.batch import Group
from roles.trainer.spool import INBOX, OUTCOMES
from roles.trainer.verified_batch import VerifiedBatch, WindowOutcomes
from tests.support.attacks.court import FIRST, SECOND, WINDOW, Court
from tests.support.attacks.target import attack

BETWEEN = 2.0  # seconds


async def shown_in_turn(*shown: Sequence[Group]) -> Court:
    """A trainer that hears two validators, each of whom was shown other groups; at its time the miner shows these to
    all.
    """
    court = Court()
    spoken = []
    for validator, groups in zip((FIRST, SECOND), shown, strict=True):
        court.groups = list(groups)
        verdict = court.verdict(validator, *map(court.judgement, range(len(groups))))
        summary = court.summary(validator, verdict)
        await court.seal(validator, summary)
        spoken.append((groups, validator, summary, verdict))
    opening = court.run.opening_time(WINDOW)

    async def show() -> None:
        for number, (groups, validator, summary, verdict) in enumerate(spoken, start=1):
            await court.clock.sleep_until(opening + number * BETWEEN)
            await court.deliver(groups)
            await court.reveal(validator, summary, verdict)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(show)
        await court.listen()
    return court


def disguised(group: Group) -> Group:
    """The same rollouts under another digest: a bit of a sketch differs."""
    first, *others = group.rollouts
    first = first.model_copy(update={"sketch": bytes([first.sketch[0] ^ 1]) + first.sketch[1:]})
    return group.model_copy(update={"rollouts": (first, *others)})


@attack
async def test_the_same_rollouts_under_two_commitments_are_trained_on_once():
    groups = Court().groups
    court = await shown_in_turn(groups, [disguised(group) for group in groups])
    batches = [VerifiedBatch.from_bytes(await court.state.get(i.path, 1 << 20)) async for i in court.state.list(INBOX)]
    work = [(group.prompt, group.completions) for batch in batches for group in batch.groups]
    assert len(set(work)) == len(work) == len(groups)


@attack
async def test_a_group_that_two_commitments_name_is_used_once():
    groups = Court().groups
    court = await shown_in_turn(groups[:1], groups)
    accounts = [
        WindowOutcomes.from_bytes(await court.state.get(i.path, 1 << 20)) async for i in court.state.list(OUTCOMES)
    ]
    assert [item.status for account in accounts for item in account.outcomes] == [
        "used",
        "commitment-changed",
        "commitment-changed",
    ]
