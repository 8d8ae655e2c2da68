"""Storage, miners and validators that hang, or answer with as many bytes as they may: they cost only themselves."""

from dataclasses import replace
from itertools import count
from typing import Any

import pytest
import trio

from grailnode.store.memory import MemoryStore
from protocol import limits, paths
from protocol.encoding import content_digest
from protocol.errors import ForkError, ProtocolError
from protocol.identity.signing import SigningKey, open_signed, sign
from protocol.judging.ledger import SHARE
from protocol.judging.report import ValidatorReport
from protocol.judging.verdict import Judgement, Reason
from roles.authority_updates import poll_authority, refresh_authority
from roles.policy.serving import keep_fresh
from roles.ports import StateError
from roles.trainer.spool import OUTCOMES
from tests.support.attacked_nodes.follower import SECOND as SECOND_TRAINER
from tests.support.attacked_nodes.follower import VALIDATOR, AttackedFollower, follow_chain
from tests.support.attacked_nodes.trainer import (
    FIRST,
    SECOND,
    STRANGER,
    WINDOW,
    AttackedTrainer,
    closing_time,
    collected_windows,
    make_honest_testbed,
)
from tests.support.builders import samples
from tests.support.builders.chains import MINER, TRAINER
from tests.support.faults.decorated_store import HangingStore, SlowStore, UnreachableStore
from tests.support.simulation.network import Log
from tests.support.simulation.virtual_clock import running


class JunkStore(MemoryStore):
    """Storage that answers junk for every manifest, and counts the bytes that its readers would take."""

    max_bytes = 0

    async def get(self, path: str, max_bytes: int, *, offset: int = 0, size: int | None = None) -> bytes:
        if "/manifests/" in path:
            self.max_bytes += max_bytes
            return bytes(16)
        return await super().get(path, max_bytes, offset=offset, size=size)


async def test_a_revoked_validator_does_not_delay_its_revocation_by_hanging():
    store = HangingStore(seconds=200.0)
    testbed = await follow_chain(store=store)
    await testbed.revise(validators=(SECOND_TRAINER.public,), revoked=(VALIDATOR.public,))
    store.hangs = lambda path: path.startswith(f"{VALIDATOR.public.hex()}/revisions/")
    with trio.move_on_after(60.0):
        await poll_authority(testbed.node)
    assert testbed.node.revisions.number == 1


CROWD = tuple(SigningKey(bytes([100 + number]) * 32) for number in range(8))


async def look_seconds(testbed: AttackedFollower) -> float:
    """Return how long a look for revisions in all places takes."""
    begin = trio.current_time()
    await refresh_authority(testbed.node)
    return trio.current_time() - begin


async def test_places_that_hang_delay_the_first_look_for_revisions_alone():
    """The first one waits: without the newest revision a node would begin with the chain of a revoked trainer."""
    store = HangingStore()
    store.hangs = lambda path: "/revisions/" in path
    testbed = AttackedFollower(store, validators=tuple(key.public for key in CROWD))
    await testbed.revise()
    assert await look_seconds(testbed) <= 34.0
    assert testbed.node.revisions.number == 1
    assert sum([await look_seconds(testbed) for _ in range(10)]) <= 4.0
    assert store.waiting <= 3 * (len(CROWD) + 2)  # of each number one request a place


@pytest.mark.parametrize("poll_seconds", [1.0, 20.0])
async def test_a_revision_that_only_a_slow_place_shows_is_obeyed(poll_seconds: float) -> None:
    """Looks do not wait for it, and ask the slow place no second time while it answers."""
    store = SlowStore(get_seconds=45.0, kind=f"{VALIDATOR.public.hex()}/revisions/")
    testbed = AttackedFollower(store)
    assert await look_seconds(testbed) == 30.0
    await testbed.revise(at=paths.revision_copy(VALIDATOR.public, 1), revoked=(MINER.public,))
    looks, begin = 0, trio.current_time()
    while not testbed.node.revisions.number and trio.current_time() < begin + 150.0:
        assert await look_seconds(testbed) <= 4.0
        await trio.sleep(poll_seconds)
        looks += 1
    assert testbed.node.authority.revoked == (MINER.public,)
    assert trio.current_time() <= begin + 15.0 + 45.0 + 2 * (poll_seconds + 4.0)


@pytest.mark.parametrize("seconds", [2.5, 3.9])
async def test_the_search_for_a_second_revision_of_a_number_loses_no_later_revision(seconds: float) -> None:
    store = SlowStore(get_seconds=seconds, kind=f"{VALIDATOR.public.hex()}/revisions/")
    testbed = AttackedFollower(store)
    await testbed.revise_and_learn()
    await testbed.revise(at=paths.revision_copy(VALIDATOR.public, 2))
    for _ in range(10):
        await refresh_authority(testbed.node)
        await trio.sleep(1.0)
    assert testbed.node.revisions.number == 2


async def test_a_look_that_is_cancelled_loses_no_revision():
    store, reads = HangingStore(), count()
    store.hangs = lambda path: next(reads) > 0
    testbed = AttackedFollower(store)
    await testbed.revise()
    with trio.move_on_after(1.0):  # of the two that it waits for a second revision
        await refresh_authority(testbed.node, 0)
    await refresh_authority(testbed.node)
    assert testbed.node.revisions.number == 1


async def test_however_many_places_hang_a_polling_node_asks_each_other_place_within_a_minute():
    store = HangingStore()
    store.hangs = lambda path: "/revisions/" in path and not path.startswith(VALIDATOR.public.hex())
    testbed = AttackedFollower(store, validators=(VALIDATOR.public, *(key.public for key in CROWD)))
    await refresh_authority(testbed.node)
    async with running(poll_authority, testbed.node):
        for number in (1, 2):
            await testbed.revise(at=paths.revision_copy(VALIDATOR.public, number), note=str(number))
            await trio.sleep(62.0)
            assert testbed.node.revisions.number == number


async def test_a_node_whose_disk_was_slow_makes_up_for_no_missed_looks():
    store = SlowStore()
    testbed = AttackedFollower(store)
    await testbed.revise()
    async with running(poll_authority, replace(testbed.node, state=SlowStore(put_seconds=3600.0))):
        await trio.sleep(3610.0)
    assert store.reads <= 20


async def test_an_unexpected_failure_of_a_slow_place_is_raised_by_the_next_look():
    class DamagedStore(SlowStore):
        async def get(self, path: str, max_bytes: int, *, offset: int = 0, size: int | None = None) -> bytes:
            await super().get(path, max_bytes)
            raise StateError("announcements/", "damaged")

    testbed = AttackedFollower(DamagedStore(get_seconds=31.0))
    for path in (paths.revision(testbed.run_id, 1), paths.revision_copy(VALIDATOR.public, 1)):
        await testbed.store.put(path, b"")
    await refresh_authority(testbed.node)
    await trio.sleep(5.0)
    with pytest.raises(StateError):
        await refresh_authority(testbed.node)


async def test_a_log_that_cannot_be_written_fails_a_look_for_revisions_and_not_the_event_loop():
    class FullLog(Log):
        def event(self, name: str, **fields: Any) -> None:
            raise OSError(28, "No space left on device")

    store = SlowStore()
    store.silent_prefixes = ("",)
    with pytest.raises(OSError, match="No space"):
        await refresh_authority(replace(AttackedFollower(store).node, telemetry=FullLog("miner")))


async def test_only_a_few_unchecked_manifests_are_in_memory():
    store = JunkStore()
    testbed = AttackedFollower(store)
    await testbed.publish(60)
    await testbed.restart()
    with pytest.raises(ProtocolError):
        await testbed.follower.refresh()
    assert 0 < store.max_bytes <= 16 * (limits.MAX_RECORD_BYTES + limits.MAX_ENVELOPE_BYTES)


async def test_a_fork_in_another_trainers_space_accuses_its_signer():
    testbed = await follow_chain()
    await testbed.publish(2)
    await testbed.follow()
    digests = [manifest.digest for manifest in testbed.chain.signed_manifests]
    digests[-1] = samples.digest("another history")
    await testbed.put_head(testbed.head(manifests=tuple(digests)), SECOND_TRAINER, at=TRAINER)
    with pytest.raises(ForkError):
        await testbed.follower.refresh()
    (line,) = testbed.node.alarms.drain()
    assert SECOND_TRAINER.public.hex()[:16] in line
    assert TRAINER.public.hex()[:16] not in line


async def test_a_fetch_of_the_head_that_hangs_is_given_up_for_the_next_one():
    store = HangingStore(seconds=600.0)
    testbed = await follow_chain(store=store)
    fetches = count()
    store.hangs = lambda path: path == paths.head(TRAINER.public) and next(fetches) == 0
    await testbed.publish()
    with trio.move_on_after(10.0):
        await keep_fresh(testbed.node, testbed.follower, 1.0)
    assert testbed.head_version == 4
    assert ["no answer within 5 s" in event["error"] for event in testbed.log.named("cannot-follow")] == [True]


# Validators, miners and storage that make the trainer wait: a space that hangs costs only its owner


@pytest.mark.parametrize(("seconds", "before"), [(0.5, 1.0), (5.0, 3.0)])
async def test_a_validators_space_that_hangs_costs_the_others_nothing(seconds: float, before: float) -> None:
    hanging, honest = sorted((FIRST, SECOND), key=lambda key: key.public)
    store = HangingStore(seconds)
    store.hangs = lambda path: path.startswith(hanging.public.hex())
    testbed = AttackedTrainer(store=store)
    await testbed.deliver()

    async def publish_late() -> None:
        await testbed.clock.sleep_until(testbed.run.beacon.round_time(testbed.run.schedule.seal(WINDOW)) - before)
        await testbed.publish_records(honest)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(publish_late)
        await testbed.collect(until=closing_time(testbed) + 200)
    assert await testbed.outcomes() == {"used"}


async def test_miners_whose_spaces_hang_delay_only_each_other():
    hanging = [SigningKey(bytes([150 + number]) * 32) for number in range(40)]
    store = HangingStore(seconds=1.5)
    store.hangs = lambda path: path.startswith(tuple(key.public.hex() for key in hanging))
    testbed = AttackedTrainer(store=store)
    verdicts = sorted((testbed.verdict(FIRST, miner=key.public) for key in hanging), key=lambda verdict: verdict.miner)
    scores = tuple(sorted((key.public, SHARE) for key in [*hanging, MINER]))
    summary = testbed.summary(FIRST, *verdicts, scores=scores)
    await testbed.seal(FIRST, summary)
    for verdict in verdicts:
        await testbed.store.put(paths.verdict(FIRST.public, WINDOW, verdict.miner), sign(verdict, FIRST))
    await testbed.reveal(FIRST, summary)
    async with running((await testbed.open_collector()).run):
        await trio.sleep(5.2)  # by now the collector has tried each of them once
        assert await collected_windows(testbed) == set()
        for validator in (FIRST, SECOND):
            refusal = Judgement(index=0, digest=testbed.judgement(0).digest, reason=Reason.SKETCH.value)
            await testbed.publish_records(validator, refusal, window=WINDOW + 1)
        await trio.sleep(0.7)
        assert await collected_windows(testbed) == {WINDOW + 1}
        await testbed.clock.sleep_until(closing_time(testbed, WINDOW + 20))
    outcomes = [item async for item in testbed.state.list(OUTCOMES)]
    assert len(outcomes) == 1 + len(hanging)  # each of them 'unreachable' in the end


async def test_a_report_that_storage_refuses_delays_nothing():
    reports, later = paths.kind_prefix(TRAINER.public, "reports"), WINDOW + 4
    store: Any = UnreachableStore(SlowStore(), reports, operations=("put",), seconds=0.0)
    testbed = AttackedTrainer(store=store)
    await testbed.deliver()
    await testbed.publish_records(
        FIRST, Judgement(index=0, digest=testbed.judgement(0).digest, reason=Reason.SKETCH.value)
    )
    await testbed.publish_records(SECOND)
    async with running((await testbed.open_collector()).run):
        await testbed.clock.sleep_until(testbed.run.opening_time(later) + 1)
        await testbed.publish_records(FIRST, window=later)
        await testbed.publish_records(SECOND, window=later)
        await testbed.clock.sleep_until(closing_time(testbed, later) + 5)
        assert await collected_windows(testbed) == {WINDOW, later}
        store.is_away = False
        await trio.sleep(5)
    data = await store.get(paths.report(TRAINER.public, WINDOW), ValidatorReport.max_bytes)
    assert len(open_signed(data, ValidatorReport, [TRAINER.public]).record.disagreements) == 1


async def test_an_invented_group_and_a_missing_verdict_delay_no_honest_group():
    testbed = AttackedTrainer()
    await testbed.deliver()
    invented = testbed.verdict(FIRST, Judgement(index=1, digest=samples.digest("nothing"), reason=Reason.SKETCH.value))
    missing_verdict = testbed.verdict(FIRST, miner=STRANGER.public)
    summary = testbed.summary(FIRST, invented, missing_verdict)
    await testbed.seal_and_reveal(FIRST, summary, invented)
    await testbed.publish_records(SECOND)
    await testbed.collect(until=closing_time(testbed) - 1.0)
    honest = {content_digest(group.to_frame()): "used" for group in testbed.groups}
    assert await testbed.group_outcomes() == {**honest, samples.digest("nothing"): Reason.SKETCH}
    await testbed.outcomes()


async def test_a_read_that_goes_on_after_a_window_has_closed_is_given_up():
    """Otherwise it would keep the window's verdicts in memory for as long as it takes."""
    store = HangingStore()
    store.hangs = lambda path: path == paths.summary(SECOND.public, WINDOW)
    testbed = await make_honest_testbed(store=store)
    async with running((await testbed.open_collector()).run):
        await testbed.clock.sleep_until(closing_time(testbed) + 1.0)
        assert store.waiting == 1
        while not await testbed.window_has_closed():
            await trio.sleep(1.0)
        await trio.sleep(1.0)
        assert store.waiting == 0
    assert await testbed.outcomes() == {"used"}
