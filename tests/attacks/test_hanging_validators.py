"""Validators, miners and storage that make the trainer wait: a space that hangs costs only its owner."""

from dataclasses import replace

import pytest
import trio

from protocol import paths
from protocol.digest import content_digest
from protocol.identity.signing import SigningKey, open_signed, sign
from protocol.judging.ledger import LedgerRow
from protocol.judging.report import ValidatorReport, canary_key, is_false_group
from protocol.judging.verdict import Reason
from roles.ports import StoreError
from roles.trainer.collect.collector import Collector, CollectorSettings
from roles.trainer.spool import OUTCOMES
from roles.validator.judge import reject_group
from tests.support.attacked_nodes.trainer import (
    FIRST,
    SECOND,
    STRANGER,
    WINDOW,
    AttackedTrainer,
    SilentStore,
    closing_time,
    collected_windows,
    publish_window,
)
from tests.support.builders import samples
from tests.support.builders.chains import MINER, TRAINER
from tests.support.simulation.virtual_clock import simulated


class SlowStore(SilentStore):
    """A store that fails after some seconds for every object in some spaces."""

    def __init__(self, seconds: float, *spaces: SigningKey) -> None:
        super().__init__()
        self._spaces = tuple(space.public.hex() for space in spaces)
        self._seconds = seconds

    async def get(self, path: str, max_bytes: int, *, offset: int = 0, size: int | None = None) -> bytes:
        if path.startswith(self._spaces):
            await trio.sleep(self._seconds)
            raise StoreError(f"{path}: no answer within {self._seconds} s")
        return await super().get(path, max_bytes, offset=offset, size=size)


class StoreWithoutReports(SilentStore):
    """A store that refuses the trainer's reports while it is full, and takes everything else."""

    full = True

    async def put(self, path: str, data: bytes) -> None:
        if self.full and path.startswith(paths.kind_prefix(TRAINER.public, "reports")):
            raise StoreError(f"{path}: quota exceeded")
        await super().put(path, data)


@pytest.mark.parametrize(("seconds", "before"), [(0.5, 1.0), (5.0, 3.0)])
def test_a_validators_space_that_hangs_costs_the_others_nothing(seconds: float, before: float) -> None:
    @simulated
    async def scenario() -> None:
        testbed = AttackedTrainer()
        hanging, honest = sorted((FIRST, SECOND), key=lambda key: key.public)
        testbed.store = SlowStore(seconds, hanging)
        testbed.node = replace(testbed.node, store=testbed.store)
        await testbed.deliver()

        async def publish_late() -> None:
            await testbed.clock.sleep_until(testbed.run.beacon.round_time(testbed.run.schedule.seal(WINDOW)) - before)
            await testbed.publish_records(honest)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(publish_late)
            await testbed.collect(until=closing_time(testbed) + 200)
        assert await testbed.outcomes() == {"used"}

    scenario()


@simulated
async def test_miners_whose_spaces_hang_delay_only_each_other():
    testbed = AttackedTrainer()
    hanging = [SigningKey(bytes([150 + number]) * 32) for number in range(40)]
    testbed.store = SlowStore(1.5, *hanging)
    testbed.node = replace(testbed.node, store=testbed.store)
    verdicts = sorted((testbed.verdict(FIRST, miner=key.public) for key in hanging), key=lambda verdict: verdict.miner)
    scores = tuple(sorted((key.public, 1.0) for key in [*hanging, MINER]))
    summary = testbed.summary(FIRST, *verdicts, scores=scores)
    await testbed.seal(FIRST, summary)
    for verdict in verdicts:
        await testbed.store.put(paths.verdict(FIRST.public, WINDOW, verdict.miner), sign(verdict, FIRST))
    await testbed.reveal(FIRST, summary)
    async with trio.open_nursery() as nursery:
        nursery.start_soon((await testbed.open_collector()).run)
        await trio.sleep(5.2)  # by now the collector has tried each of them once
        assert await collected_windows(testbed) == set()
        for validator in (FIRST, SECOND):
            await publish_window(
                testbed, validator, WINDOW + 1, reject_group(0, testbed.judgement(0).digest, Reason.SKETCH)
            )
        await trio.sleep(0.7)
        assert await collected_windows(testbed) == {WINDOW + 1}
        await testbed.clock.sleep_until(closing_time(testbed, WINDOW + 20))
        nursery.cancel_scope.cancel()
    assert len([item async for item in testbed.state.list(OUTCOMES)]) == 1 + len(
        hanging
    )  # each of them 'unreachable' in the end


@simulated
async def test_a_restart_during_a_short_outage_of_storage_loses_no_window():
    testbed = AttackedTrainer()
    await testbed.deliver()
    await testbed.publish_records(FIRST)
    await testbed.publish_records(SECOND)
    await testbed.clock.sleep_until(closing_time(testbed) + 0.5)
    testbed.store.silent_prefixes = ("",)
    async with trio.open_nursery() as nursery:
        nursery.start_soon((await testbed.open_collector()).run)
        await trio.sleep(2.0)
        testbed.store.silent_prefixes = ()
        await trio.sleep(10.0)
        nursery.cancel_scope.cancel()
    assert await testbed.outcomes() == {"used"}


@simulated
async def test_a_report_that_storage_refuses_delays_nothing():
    testbed, store, later = AttackedTrainer(), StoreWithoutReports(), WINDOW + 4
    testbed.store, testbed.node = store, replace(testbed.node, store=store)
    await testbed.deliver()
    await testbed.publish_records(FIRST, reject_group(0, testbed.judgement(0).digest, Reason.SKETCH))
    await testbed.publish_records(SECOND)
    async with trio.open_nursery() as nursery:
        nursery.start_soon((await testbed.open_collector()).run)
        await testbed.clock.sleep_until(testbed.run.opening_time(later) + 1)
        await publish_window(testbed, FIRST, later)
        await publish_window(testbed, SECOND, later)
        await testbed.clock.sleep_until(closing_time(testbed, later) + 5)
        assert await collected_windows(testbed) == {WINDOW, later}
        store.full = False
        await trio.sleep(5)
        nursery.cancel_scope.cancel()
    data = await store.get(paths.report(TRAINER.public, WINDOW), ValidatorReport.max_bytes)
    assert len(open_signed(data, ValidatorReport, [TRAINER.public]).record.disagreements) == 1


@simulated
async def test_an_invented_group_and_a_missing_verdict_delay_no_honest_group():
    testbed = AttackedTrainer()
    await testbed.deliver()
    invented = testbed.verdict(FIRST, reject_group(1, samples.digest("nothing"), Reason.SKETCH))
    missing_verdict = testbed.verdict(FIRST, miner=STRANGER.public)
    summary = testbed.summary(FIRST, invented, missing_verdict)
    await testbed.seal(FIRST, summary)
    await testbed.reveal(FIRST, summary, invented)
    await testbed.publish_records(SECOND)
    await testbed.collect(until=closing_time(testbed) - 1.0)
    honest = {content_digest(group.to_frame()): "used" for group in testbed.groups}
    assert await testbed.group_outcomes() == {**honest, samples.digest("nothing"): Reason.SKETCH}
    await testbed.outcomes()


@simulated
async def test_a_validator_that_accepts_a_false_canary_is_caught_although_another_verdict_is_missing():
    testbed = AttackedTrainer()
    canary = canary_key(TRAINER, 0).public
    false_index = next(index for index in range(100) if is_false_group(TRAINER, WINDOW, index))
    lie = testbed.verdict(FIRST, testbed.judgement(false_index), miner=canary, pledged=100, submitted=100)
    summary = testbed.summary(FIRST, lie, testbed.verdict(FIRST, miner=STRANGER.public))
    await testbed.seal(FIRST, summary)
    await testbed.store.put(paths.verdict(FIRST.public, WINDOW, canary), sign(lie, FIRST))
    await testbed.reveal(FIRST, summary)
    await testbed.clock.sleep_until(testbed.run.opening_time(WINDOW))
    with trio.move_on_after(closing_time(testbed) - 1.0 - testbed.clock.now()):
        await Collector(testbed.node, CollectorSettings(canaries=1)).run()
    events = testbed.log.named("canary-failure")
    assert [(event["validator"], event["accepted"], event["verdict"]) for event in events] == [
        (FIRST.public.hex(), True, LedgerRow.of(lie).verdict.hex())
    ]


class DrippingStore(SilentStore):
    """A store that takes an hour for one object, and counts the reads that it keeps waiting."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.waiting = 0
        self._path = path

    async def get(self, path: str, max_bytes: int, *, offset: int = 0, size: int | None = None) -> bytes:
        if path == self._path:
            self.waiting += 1
            try:
                await trio.sleep(3600.0)
            finally:
                self.waiting -= 1
        return await super().get(path, max_bytes, offset=offset, size=size)


@simulated
async def test_a_read_that_goes_on_after_a_window_has_closed_is_given_up():
    """Otherwise it would keep the window's verdicts in memory for as long as it takes."""
    testbed = AttackedTrainer()
    testbed.store = DrippingStore(paths.summary(SECOND.public, WINDOW))
    testbed.node = replace(testbed.node, store=testbed.store)
    await testbed.deliver()
    await testbed.publish_records(FIRST)
    await testbed.publish_records(SECOND)
    collector = await testbed.open_collector()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(collector.run)
        await testbed.clock.sleep_until(closing_time(testbed) + 1.0)
        assert testbed.store.waiting == 1
        while not await testbed.window_has_closed():
            await trio.sleep(1.0)
        await trio.sleep(1.0)
        assert testbed.store.waiting == 0
        nursery.cancel_scope.cancel()
    assert await testbed.outcomes() == {"used"}
