"""Decisions on a miner's window reach the learner's inbox and the outcome log alike, through crashes, full disks and
restarts.
"""

from dataclasses import replace
from typing import Any, cast

import pytest
import trio

from grailnode.store.memory import MemoryStore
from protocol import paths
from protocol.digest import content_digest
from protocol.identity.authority import Revision
from protocol.identity.signing import open_announced, sign
from roles.ports import NotFoundError, StoreError
from roles.trainer.learn.replay_buffer import ReplayBuffer, ReplaySettings
from roles.trainer.learn.training import Training, TrainingSettings
from roles.trainer.spool import COLLECTOR_PROGRESS, OUTCOMES
from roles.trainer.verified_batch import CollectorProgress, VerifiedBatch, WindowOutcomes
from tests.attacks.test_hanging_validators import closing, publish_window, windows_collected
from tests.support.attacks.court import FIRST, SECOND, WINDOW, Court, Silent, other_prompt
from tests.support.attacks.target import ROOTS, attack
from tests.support.builders.chains import MINER
from tests.support.builders.samples import rejected, revision
from tests.support.simulation.stormy_network import WrongClock


class NoSpaceForOutcomes(MemoryStore):
    """A disk that is full when the outcome log is written."""

    full = True

    async def put(self, path: str, data: bytes) -> None:
        if self.full and path.startswith(OUTCOMES):
            raise StoreError(f"{path}: no space left on device")
        await super().put(path, data)


class WrongOnce(Silent):
    """A store that hides one object below a prefix once, or shows zeros instead."""

    def __init__(self, prefix: str, how: str) -> None:
        super().__init__()
        self._prefix: str | None = prefix
        self._how = how

    async def get(self, path: str, max_bytes: int, *, offset: int = 0, size: int | None = None) -> bytes:
        data = await super().get(path, max_bytes, offset=offset, size=size)
        if self._prefix is None or not path.startswith(self._prefix):
            return data
        self._prefix = None
        if self._how == "hidden":
            raise NotFoundError(f"{path}: no such object")
        return bytes(len(data))


class Distant(Silent):
    """A store whose reads take 50 ms."""

    async def get(self, path: str, max_bytes: int, *, offset: int = 0, size: int | None = None) -> bytes:
        await trio.sleep(0.05)
        return await super().get(path, max_bytes, offset=offset, size=size)


class ScheduledBeacon:
    """A beacon that gives each round when it is due by the right clock."""

    def __init__(self, court: Court) -> None:
        self._chain = court.run.beacon
        self._clock = court.clock

    async def randomness(self, round_number: int) -> bytes:
        await self._clock.sleep_until(self._chain.round_time(round_number))
        return round_number.to_bytes(32, "little")


def court_with_full_disk() -> tuple[Court, NoSpaceForOutcomes]:
    """Return a court whose trainer cannot write its outcome log."""
    court, disk = Court(), NoSpaceForOutcomes()
    court.state, court.node = disk, replace(court.node, state=disk)
    return court, disk


def revise(court: Court, **changes: Any) -> None:
    """Change the authority that the trainer obeys from now on."""
    revisions = court.node.revisions
    authority = revisions.current.model_copy(update=changes)
    record = revision(revisions.number + 1, revisions.digest, run=court.run_id, authority=authority)
    revisions.adopt(open_announced(sign(record, ROOTS[0]), Revision))


@pytest.mark.parametrize("killed", [False, True], ids=["full disk", "killed"])
def test_an_interruption_between_inbox_and_outcome_log_loses_no_group(killed: bool) -> None:
    @attack
    async def scenario() -> None:
        court, disk = court_with_full_disk()
        await court.deliver()
        verdicts = [court.verdict(FIRST, court.judgement(0)), court.verdict(SECOND)]
        summaries = [(key, court.summary(key, v), v) for key, v in zip((FIRST, SECOND), verdicts, strict=True)]
        for key, summary, _ in summaries:
            await court.seal(key, summary)
        await court.reveal(*summaries[0])
        buffer = ReplayBuffer(ReplaySettings(), 0)
        training = Training(court.node, cast(Any, None), buffer, dict, TrainingSettings(1, 1))
        middle = court.run.opening_time(WINDOW) + 2.0

        async def go_on() -> None:
            await court.clock.sleep_until(middle)
            await court.reveal(*summaries[1])
            await trio.sleep(0.0 if killed else 1.0)
            disk.full = False

        async with trio.open_nursery() as nursery:
            nursery.start_soon(training._read_inbox)
            if killed:
                await court.listen(middle)
                await go_on()
            else:
                nursery.start_soon(go_on)
            await court.listen()
            await trio.sleep(1.0)
            nursery.cancel_scope.cancel()
        assert await court.outcomes() == {"used"}
        both_groups = {content_digest(group.to_frame()) for group in court.groups}
        assert set(await court.account()) == {group.digest for group in buffer.draw(9)} == both_groups

    scenario()


@attack
async def test_groups_handed_over_before_a_crash_are_used_whatever_storage_shows_afterwards():
    court, disk = court_with_full_disk()
    await court.deliver()
    await court.say(FIRST)
    await court.seal(SECOND, court.summary(SECOND))
    await court.listen(court.run.opening_time(WINDOW) + 2.0)
    assert await court.account() == {}
    disk.full = False
    await court.deliver([other_prompt(court), court.groups[1]])
    await court.listen()
    assert await court.outcomes() == {"used"}


@pytest.mark.parametrize("how", ["hidden", "bent"])
@pytest.mark.parametrize("kind", ["commitments", "batches"])
def test_storage_that_shows_a_wrong_object_once_costs_no_window(kind: str, how: str) -> None:
    @attack
    async def scenario() -> None:
        court = Court()
        court.store = WrongOnce(paths.kind_prefix(MINER.public, kind), how)
        court.node = replace(court.node, store=court.store)
        await court.deliver()
        await court.say(SECOND)
        await court.listen()
        assert await court.outcomes() == {"used"}

    scenario()


def test_a_batch_that_is_too_large_is_logged_and_does_not_end_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(VerifiedBatch, "max_bytes", 100)

    @attack
    async def scenario() -> None:
        court = Court()
        await court.deliver()
        await court.say(FIRST)
        await court.listen()
        assert await court.outcomes() == {"too-large"}

    scenario()


@attack
async def test_a_window_whose_storage_does_not_answer_is_collected_after_a_restart():
    court, later = Court(), WINDOW + 4
    await court.deliver()
    await court.say(FIRST)
    await court.say(SECOND)
    court.store.silent = (paths.kind_prefix(MINER.public, "batches"),)
    timeout = court.run.beacon.round_time(court.run.schedule.verdict(WINDOW) + court.run.schedule.verdict_rounds)
    restart = court.run.opening_time(later) + 1.0
    assert closing(court) < restart < timeout - 1.0

    async def judge_a_later_window() -> None:
        await court.clock.sleep_until(court.run.opening_time(later) + 0.3)
        for validator in (FIRST, SECOND):
            await publish_window(court, validator, later, rejected())

    async with trio.open_nursery() as nursery:
        nursery.start_soon(judge_a_later_window)
        await court.listen(restart)
    assert await windows_collected(court) == {later}
    court.store.silent = ()
    await court.listen(timeout + 10.0)
    records = [
        WindowOutcomes.from_bytes(await court.state.get(i.path, 1 << 20)) async for i in court.state.list(OUTCOMES)
    ]
    assert {item.status for record in records if record.window == WINDOW for item in record.outcomes} == {"used"}


@attack
async def test_a_clock_that_is_an_hour_ahead_for_two_seconds_costs_no_window():
    court, later = Court(), WINDOW + 4
    clock = WrongClock(court.clock)
    court.store = Distant()
    court.node = replace(court.node, store=court.store, clock=clock, beacon=ScheduledBeacon(court))
    async with trio.open_nursery() as nursery:
        nursery.start_soon((await court.open()).run)
        await trio.sleep(1.0)
        clock.wrong = 3600.0
        await trio.sleep(2.0)
        clock.wrong = 0.0
        await court.clock.sleep_until(court.run.opening_time(later) + 2.0)
        await publish_window(court, FIRST, later)
        await publish_window(court, SECOND, later)
        await court.clock.sleep_until(closing(court, later) + 10.0)
        nursery.cancel_scope.cancel()
    assert await windows_collected(court) == {later}


@attack
async def test_a_validator_that_is_revoked_before_it_reveals_decides_nothing():
    court = Court()
    await court.deliver()
    verdict = court.verdict(FIRST)
    summary = court.summary(FIRST, verdict)
    await court.seal(FIRST, summary)

    async def revoke() -> None:
        await court.clock.sleep_until(court.run.opening_time(WINDOW) + 1.0)
        revise(court, validators=(SECOND.public,))
        await court.reveal(FIRST, summary, verdict)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(revoke)
        await court.listen()
    assert await court.outcomes() == set()


@attack
async def test_a_raised_quorum_holds_for_groups_that_are_not_decided_yet():
    court = Court()
    await court.deliver()
    first, second = court.verdict(FIRST, court.judgement(0)), court.verdict(SECOND)
    await court.seal(FIRST, court.summary(FIRST, first))
    await court.seal(SECOND, court.summary(SECOND, second))

    async def raise_quorum() -> None:
        await court.clock.sleep_until(court.run.opening_time(WINDOW) + 1.0)
        await court.reveal(FIRST, court.summary(FIRST, first), first)
        await trio.sleep(1.0)
        revise(court, quorum=2)
        await court.reveal(SECOND, court.summary(SECOND, second), second)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(raise_quorum)
        await court.listen()
    digests = [content_digest(group.to_frame()) for group in court.groups]
    assert await court.account() == {digests[0]: "used", digests[1]: "no-quorum"}
    await court.outcomes()


class SlowVerdicts(Silent):
    """A store whose reads of verdicts take five seconds."""

    async def get(self, path: str, max_bytes: int, *, offset: int = 0, size: int | None = None) -> bytes:
        if "/verdicts/" in path:
            await trio.sleep(5.0)
        return await super().get(path, max_bytes, offset=offset, size=size)


@attack
async def test_after_a_long_absence_slow_verdicts_are_waited_for():
    court = Court()
    court.store = SlowVerdicts()
    object.__setattr__(court.node, "store", court.store)
    await court.deliver()
    await court.say(FIRST)
    await court.state.put(COLLECTOR_PROGRESS, CollectorProgress(oldest_window=WINDOW).to_bytes())
    schedule = court.run.schedule
    await court.clock.sleep_until(court.run.beacon.round_time(schedule.verdict(WINDOW) + 3 * schedule.verdict_rounds))
    await court.listen(court.clock.now() + 60.0)
    assert await court.outcomes() == {"used"}
