"""A validator that lists verdicts on miners that nobody else has seen."""

import trio

from protocol import paths
from protocol.digest import content_digest
from protocol.identity.signing import SigningKey, sign
from protocol.judging.report import canary_key, is_false_group
from roles.trainer.collect.collector import Collector, CollectorSettings
from roles.trainer.spool import OUTCOMES
from tests.support.attacked_nodes.trainer import (
    FIRST,
    SECOND,
    WINDOW,
    AttackedTrainer,
    closing_time,
)
from tests.support.builders.chains import TRAINER
from tests.support.simulation.virtual_clock import simulated

INVENTED = [SigningKey(content_digest(number.to_bytes(4, "big"))) for number in range(200)]


async def invent_miners(testbed: AttackedTrainer) -> set[str]:
    """Publish the first validator's records, which list the miner and the invented ones; return the paths of the
    verdicts on these.
    """
    verdicts = [testbed.verdict(FIRST, miner=key.public) for key in INVENTED]
    own = testbed.verdict(FIRST)
    summary = testbed.summary(FIRST, *sorted([own, *verdicts], key=lambda verdict: verdict.miner))
    for verdict in verdicts:
        await testbed.store.put(paths.verdict(FIRST.public, WINDOW, verdict.miner), sign(verdict, FIRST))
    await testbed.seal(FIRST, summary)
    await testbed.reveal(FIRST, summary, own)
    return {paths.verdict(FIRST.public, WINDOW, verdict.miner) for verdict in verdicts}


@simulated
async def test_miners_that_one_validator_invents_cost_the_trainer_no_request_and_no_object():
    testbed = AttackedTrainer(quorum=2)
    await testbed.deliver()
    await invent_miners(testbed)
    await testbed.publish_records(SECOND)
    reads_before = testbed.store.read_count
    await testbed.collect()
    assert await testbed.outcomes() == {"used"}
    assert len([item async for item in testbed.state.list(OUTCOMES)]) == 1
    assert testbed.store.read_count - reads_before < len(INVENTED)
    (event,) = testbed.log.named("verdicts-unread")
    assert (event["validator"], event["miners"]) == (FIRST.public.hex()[:8], len(INVENTED))


@simulated
async def test_what_one_validator_lists_is_read_when_a_late_one_lists_it_too():
    testbed = AttackedTrainer(quorum=2)
    await testbed.deliver()
    await testbed.publish_records(FIRST)
    late_verdict = testbed.verdict(SECOND)
    summary = testbed.summary(SECOND, late_verdict)
    await testbed.seal(SECOND, summary)
    opening = testbed.run.opening_time(WINDOW)
    await testbed.collect(opening + 1.0)
    assert await testbed.outcomes() == set()
    await testbed.reveal(SECOND, summary, late_verdict)
    await testbed.collect()
    assert await testbed.outcomes() == {"used"}


@simulated
async def test_a_canary_that_one_validator_lists_is_examined():
    testbed = AttackedTrainer(quorum=2)
    canary = canary_key(TRAINER, 0).public
    false_index = next(index for index in range(100) if is_false_group(TRAINER, WINDOW, index))
    lie = testbed.verdict(FIRST, testbed.judgement(false_index), miner=canary, pledged=100, submitted=100)
    summary = testbed.summary(FIRST, lie)
    await testbed.seal(FIRST, summary)
    await testbed.store.put(paths.verdict(FIRST.public, WINDOW, canary), sign(lie, FIRST))
    await testbed.reveal(FIRST, summary)
    await testbed.clock.sleep_until(testbed.run.opening_time(WINDOW))
    with trio.move_on_after(closing_time(testbed) - 1.0 - testbed.clock.now()):
        await Collector(testbed.node, CollectorSettings(canaries=1)).run()
    assert [event["accepted"] for event in testbed.log.named("canary-failure")] == [True]


@simulated
async def test_a_late_summary_makes_a_validator_that_was_read_often_enough_be_read_again():
    """The first validator's storage has lost a verdict, so that it was read in vain until the second one is back."""
    testbed = AttackedTrainer(quorum=2)
    await testbed.deliver()
    verdict_on_canary = testbed.verdict(FIRST, miner=canary_key(TRAINER, 0).public)
    own = testbed.verdict(FIRST)
    summary = testbed.summary(FIRST, *sorted([own, verdict_on_canary], key=lambda verdict: verdict.miner))
    await testbed.seal(FIRST, summary)
    await testbed.reveal(FIRST, summary, own)
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
