"""A miner that signs two commitments for one window, one for each validator: its work counts once."""

from collections.abc import Sequence

import trio

from protocol.rollout.batch import Group
from roles.trainer.spool import INBOX, OUTCOMES
from roles.trainer.verified_batch import VerifiedBatch, WindowOutcomes
from tests.support.attacked_nodes.trainer import FIRST, SECOND, WINDOW, AttackedTrainer
from tests.support.simulation.virtual_clock import simulated

SECONDS_BETWEEN = 2.0


async def deliver_in_turn(*deliveries: Sequence[Group]) -> AttackedTrainer:
    """Let a trainer read two validators that have judged different deliveries of one miner.

    Each delivery is in storage for everybody when its validator reveals.
    """
    testbed = AttackedTrainer()
    records = []
    for validator, groups in zip((FIRST, SECOND), deliveries, strict=True):
        testbed.groups = list(groups)
        verdict = testbed.verdict(validator, *map(testbed.judgement, range(len(groups))))
        summary = testbed.summary(validator, verdict)
        await testbed.seal(validator, summary)
        records.append((groups, validator, summary, verdict))
    opening = testbed.run.opening_time(WINDOW)

    async def deliver_and_reveal() -> None:
        for number, (groups, validator, summary, verdict) in enumerate(records, start=1):
            await testbed.clock.sleep_until(opening + number * SECONDS_BETWEEN)
            await testbed.deliver(groups)
            await testbed.reveal(validator, summary, verdict)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(deliver_and_reveal)
        await testbed.collect()
    return testbed


def disguised(group: Group) -> Group:
    """Return the same rollouts with another digest: one bit of a sketch differs."""
    first, *others = group.rollouts
    first = first.model_copy(update={"sketch": bytes([first.sketch[0] ^ 1]) + first.sketch[1:]})
    return group.model_copy(update={"rollouts": (first, *others)})


@simulated
async def test_the_same_rollouts_under_two_commitments_are_trained_on_once():
    groups = AttackedTrainer().groups
    testbed = await deliver_in_turn(groups, [disguised(group) for group in groups])
    batches = [
        VerifiedBatch.from_bytes(await testbed.state.get(i.path, 1 << 20)) async for i in testbed.state.list(INBOX)
    ]
    work = [(group.prompt, group.completions) for batch in batches for group in batch.groups]
    assert len(set(work)) == len(work) == len(groups)


@simulated
async def test_a_group_of_two_commitments_is_used_once():
    groups = AttackedTrainer().groups
    testbed = await deliver_in_turn(groups[:1], groups)
    window_outcomes = [
        WindowOutcomes.from_bytes(await testbed.state.get(i.path, 1 << 20)) async for i in testbed.state.list(OUTCOMES)
    ]
    assert [item.status for window in window_outcomes for item in window.outcomes] == [
        "used",
        "commitment-changed",
        "commitment-changed",
    ]
