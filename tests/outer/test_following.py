"""Sites that come late, were away, or read something false: they get the state of the others again."""

import pytest
import trio

from protocol import paths
from protocol.identity.signing import sign
from roles.ports import StoreError
from tests.support.builders.chains import TRAINER
from tests.support.builders.samples import digest
from tests.support.faults.decorated_store import DecoratedStore
from tests.support.simulation.network import key
from tests.support.simulation.outer_sites import ROUND_SECONDS, OuterTestbed, equal_states
from tests.support.simulation.virtual_clock import running


async def test_a_site_that_comes_later_uses_no_group_that_is_used_up() -> None:
    testbed = OuterTestbed(3)
    async with testbed.running(testbed.names[:2], per_second=1) as nursery:
        await testbed.until_round(6)
        nursery.start_soon(testbed.run_site, testbed.handles["site-2"])
        await testbed.until_round(9)
    manifests = await testbed.manifests()
    reasons = {reason for manifest in manifests for reason in testbed.reasons(manifest).values()}
    assert reasons <= {"lost", "quorum"}  # a site to which no group of a round is dealt is lost to that round
    assert any(key("site-2").public in {item.worker for item in manifest.counted} for manifest in manifests[7:])


async def test_a_site_that_was_away_for_long_fetches_the_state() -> None:
    testbed = OuterTestbed(3, state_interval=2)
    async with testbed.running(testbed.names[:2]) as nursery:
        async with running(testbed.run_site, testbed.handles["site-2"]):
            await testbed.until_round(2)
        await testbed.until_round(12)  # the manifests from round 3 on are deleted
        nursery.start_soon(testbed.run_site, testbed.handles["site-2"])
        closing = await testbed.until_round(15)
        await trio.sleep(1)
    assert len(closing.counted) == 3
    assert len(testbed.handles["site-2"].log.named("state-adopted")) == 2
    assert testbed.applied("site-2")[15] == testbed.applied("site-0")[15]


async def test_a_site_that_finds_the_next_manifest_without_its_payloads_fetches_the_state() -> None:
    testbed = OuterTestbed(3, state_interval=6)
    handle = testbed.handles["site-2"]
    async with testbed.running(testbed.names[:2]) as nursery:
        async with running(testbed.run_site, handle):
            await testbed.until_round(5)
            await trio.sleep(1)
        await testbed.until_round(18)  # manifest 6 is the oldest one, and the payloads from round 7 on are there
        await trio.sleep(1)
        assert max(testbed.applied("site-2")) == 5
        assert (await testbed.manifest(6)).counted
        nursery.start_soon(testbed.run_site, handle)
        closing = await testbed.until_round(21)
        await trio.sleep(1)
    assert handle.log.named("payload-unread")
    assert len(closing.counted) == 3
    assert testbed.applied("site-2")[21] == testbed.applied("site-0")[21]


async def test_a_false_payload_in_a_workers_space_costs_no_site_its_feedback_while_the_trainer_is_silent() -> None:
    testbed = OuterTestbed(3)
    failures = 0

    class FalseStore(DecoratedStore):
        """Shows false bytes in the space of site-1, and does not answer for the trainer's copies three times."""

        async def get(self, path: str, max_bytes: int, *, offset: int = 0, size: int | None = None) -> bytes:
            nonlocal failures
            data = await testbed.store.get(path, max_bytes, offset=offset, size=size)
            if path.startswith(paths.kind_prefix(TRAINER.public, "payloads")) and failures < 3:
                failures += 1
                raise StoreError("no answer")
            return bytes(len(data)) if path.startswith(paths.kind_prefix(key("site-1").public, "payloads")) else data

    async with testbed.running(testbed.names[:2]) as nursery:
        nursery.start_soon(testbed.run_site, testbed.handles["site-2"], None, FalseStore(testbed.store))
        await testbed.until_round(4)
        await trio.sleep(ROUND_SECONDS / 2)
    log = testbed.handles["site-2"].log
    assert failures == 3 and len(log.named("payload-unread")) == 3
    assert len(log.named("state-adopted")) == 1 and not log.named("round-not-applied")
    equal_states(testbed, 4)


async def test_a_site_that_computes_another_state_says_so_and_fetches_the_state() -> None:
    testbed = OuterTestbed(3)
    handle = testbed.handles["site-2"]
    async with testbed.running():
        await testbed.until_round(2)
        assert handle.site is not None and handle.site.shared is not None
        handle.site.shared.weights["norm"][0] += 1.0  # memory that went bad
        await testbed.until_round(9)
        await trio.sleep(1)
    assert handle.log.named("alarm") or handle.log.named("round-not-applied")
    assert len((await testbed.manifest(9)).counted) == 3
    assert testbed.applied("site-2")[9] == testbed.applied("site-0")[9]


async def test_a_site_follows_a_coordinator_of_a_higher_epoch_and_reports_two_histories_of_one() -> None:
    testbed = OuterTestbed(2)
    async with testbed.running():
        await testbed.until_round(3)
        await trio.sleep(1)
    assert (await testbed.manifest(3)).epoch == 1
    testbed.epoch = 2
    async with testbed.running():
        manifest = await testbed.until_round(5)
    assert manifest.epoch == 2 and len(manifest.counted) == 2
    other = (await testbed.manifest(5)).model_copy(update={"number": 6, "previous": digest("another history")})
    changed = other.model_copy(update={"beacon_round": other.closes, "closes": other.closes + 20})
    handle = testbed.handles["site-0"]
    await testbed.store.put(changed.path, sign(changed, TRAINER))
    with pytest.raises(BaseExceptionGroup):
        async with running(testbed.run_site, handle):
            await trio.sleep(60)
    assert any("round manifests" in event["error"] for event in handle.log.named("alarm"))
