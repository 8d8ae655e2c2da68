"""Validators, miners and storage that make the trainer wait: a space that hangs costs only its owner."""

from dataclasses import replace

import pytest
import trio

from protocol import paths
from protocol.digest import content_digest
from protocol.identity.signing import SigningKey, open_signed, sign
from protocol.judging.ledger import LedgerRow
from protocol.judging.report import ValidatorReport, canary_key, is_false_group
from protocol.judging.verdict import Judgement, Reason
from roles.ports import StoreError
from roles.trainer.collect.collector import Collector, CollectorSettings
from roles.trainer.spool import OUTCOMES
from roles.validator.judge import reject_group
from tests.support.attacks.court import FIRST, SECOND, STRANGER, WINDOW, Court, Silent
from tests.support.attacks.target import attack
from tests.support.builders import samples
from tests.support.builders.chains import TRAINER


class Slow(Silent):
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


class TakesNoReports(Silent):
    """A store that refuses the trainer's reports while it is full, and takes everything else."""

    full = True

    async def put(self, path: str, data: bytes) -> None:
        if self.full and path.startswith(paths.kind_prefix(TRAINER.public, "reports")):
            raise StoreError(f"{path}: quota exceeded")
        await super().put(path, data)


async def publish_window(court: Court, validator: SigningKey, window: int, *judgements: Judgement) -> None:
    """Publish all of a validator's records on a window; it accepts both groups unless judgements are given."""
    verdict = court.verdict(validator, *judgements, window=window)
    summary = court.summary(validator, verdict, window=window)
    await court.seal(validator, summary)
    await court.reveal(validator, summary, verdict)


async def windows_collected(court: Court) -> set[int]:
    """Return the windows of which the collector has recorded the outcomes."""
    return {paths.window_of(item.path.removeprefix(OUTCOMES)) async for item in court.state.list(OUTCOMES)}


def closing(court: Court, window: int = WINDOW) -> float:
    """Return the time at which a window's verdicts are due, in seconds since the Unix epoch."""
    return court.run.beacon.round_time(court.run.schedule.verdict(window))


@pytest.mark.parametrize(("seconds", "before"), [(0.5, 1.0), (5.0, 3.0)])
def test_a_validators_space_that_hangs_costs_the_others_nothing(seconds: float, before: float) -> None:
    @attack
    async def scenario() -> None:
        court = Court()
        hanging, honest = sorted((FIRST, SECOND), key=lambda key: key.public)
        court.store = Slow(seconds, hanging)
        court.node = replace(court.node, store=court.store)
        await court.deliver()

        async def publish_late() -> None:
            await court.clock.sleep_until(court.run.beacon.round_time(court.run.schedule.seal(WINDOW)) - before)
            await court.say(honest)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(publish_late)
            await court.listen(until=closing(court) + 200)
        assert await court.outcomes() == {"used"}

    scenario()


@attack
async def test_miners_whose_spaces_hang_delay_only_each_other():
    court = Court()
    hanging = [SigningKey(bytes([150 + number]) * 32) for number in range(40)]
    court.store = Slow(1.5, *hanging)
    court.node = replace(court.node, store=court.store)
    verdicts = sorted((court.verdict(FIRST, miner=key.public) for key in hanging), key=lambda verdict: verdict.miner)
    summary = court.summary(FIRST, *verdicts)
    await court.seal(FIRST, summary)
    for verdict in verdicts:
        await court.store.put(paths.verdict(FIRST.public, WINDOW, verdict.miner), sign(verdict, FIRST))
    await court.reveal(FIRST, summary)
    async with trio.open_nursery() as nursery:
        nursery.start_soon((await court.open()).run)
        await trio.sleep(5.2)  # by now the collector has tried each of them once
        assert await windows_collected(court) == set()
        for validator in (FIRST, SECOND):
            await publish_window(
                court, validator, WINDOW + 1, reject_group(0, court.judgement(0).digest, Reason.SKETCH)
            )
        await trio.sleep(0.7)
        assert await windows_collected(court) == {WINDOW + 1}
        await court.clock.sleep_until(closing(court, WINDOW + 20))
        nursery.cancel_scope.cancel()
    assert len([item async for item in court.state.list(OUTCOMES)]) == 1 + len(
        hanging
    )  # each of them 'unreachable' in the end


@attack
async def test_a_restart_during_a_short_outage_of_storage_loses_no_window():
    court = Court()
    await court.deliver()
    await court.say(FIRST)
    await court.say(SECOND)
    await court.clock.sleep_until(closing(court) + 0.5)
    court.store.silent = ("",)
    async with trio.open_nursery() as nursery:
        nursery.start_soon((await court.open()).run)
        await trio.sleep(2.0)
        court.store.silent = ()
        await trio.sleep(10.0)
        nursery.cancel_scope.cancel()
    assert await court.outcomes() == {"used"}


@attack
async def test_a_report_that_storage_refuses_delays_nothing():
    court, store, later = Court(), TakesNoReports(), WINDOW + 4
    court.store, court.node = store, replace(court.node, store=store)
    await court.deliver()
    await court.say(FIRST, reject_group(0, court.judgement(0).digest, Reason.SKETCH))
    await court.say(SECOND)
    async with trio.open_nursery() as nursery:
        nursery.start_soon((await court.open()).run)
        await court.clock.sleep_until(court.run.opening_time(later) + 1)
        await publish_window(court, FIRST, later)
        await publish_window(court, SECOND, later)
        await court.clock.sleep_until(closing(court, later) + 5)
        assert await windows_collected(court) == {WINDOW, later}
        store.full = False
        await trio.sleep(5)
        nursery.cancel_scope.cancel()
    data = await store.get(paths.report(TRAINER.public, WINDOW), ValidatorReport.max_bytes)
    assert len(open_signed(data, ValidatorReport, [TRAINER.public]).record.disagreements) == 1


@attack
async def test_an_invented_group_and_a_missing_verdict_delay_no_honest_group():
    court = Court()
    await court.deliver()
    invented = court.verdict(FIRST, reject_group(1, samples.digest("nothing"), Reason.SKETCH))
    missing_verdict = court.verdict(FIRST, miner=STRANGER.public)
    summary = court.summary(FIRST, invented, missing_verdict)
    await court.seal(FIRST, summary)
    await court.reveal(FIRST, summary, invented)
    await court.say(SECOND)
    await court.listen(until=closing(court) - 1.0)
    honest = {content_digest(group.to_frame()): "used" for group in court.groups}
    assert await court.account() == {**honest, samples.digest("nothing"): Reason.SKETCH}
    await court.outcomes()


@attack
async def test_a_validator_that_accepts_a_false_canary_is_caught_although_another_verdict_is_missing():
    court = Court()
    canary = canary_key(TRAINER, 0).public
    false_index = next(index for index in range(100) if is_false_group(TRAINER, WINDOW, index))
    lie = court.verdict(FIRST, court.judgement(false_index), miner=canary, pledged=100, submitted=100)
    summary = court.summary(FIRST, lie, court.verdict(FIRST, miner=STRANGER.public))
    await court.seal(FIRST, summary)
    await court.store.put(paths.verdict(FIRST.public, WINDOW, canary), sign(lie, FIRST))
    await court.reveal(FIRST, summary)
    await court.clock.sleep_until(court.run.opening_time(WINDOW))
    with trio.move_on_after(closing(court) - 1.0 - court.clock.now()):
        await Collector(court.node, CollectorSettings(canaries=1)).run()
    events = court.log.named("canary-failure")
    assert [(event["validator"], event["accepted"], event["verdict"]) for event in events] == [
        (FIRST.public.hex(), True, LedgerRow.of(lie).verdict.hex())
    ]
