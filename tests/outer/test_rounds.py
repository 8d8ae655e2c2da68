"""Sites and coordinator together: the state is the same everywhere, whatever becomes of a site."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import trio

from protocol import paths
from protocol.identity.signing import Signed, open_signed, sign
from protocol.limits import MAX_ROUND_GROUPS, MAX_WORKERS
from protocol.outer.comparing import projection_size
from protocol.outer.dithering import first_state
from protocol.outer.round_checks import most_groups
from protocol.outer.round_records import PlannedContribution, RoundContribution, RoundManifest, RoundPlan
from roles.trainer.outer.round_files import SentContribution, SentRoundRecord, SiteRecord, UsedGroup
from roles.trainer.outer.round_reader import HEAD_START
from tests.outer.methods import METHODS
from tests.support.builders.samples import TRAINER, aggregated, counted, digest, round_manifest, round_plan, round_rules
from tests.support.faults.decorated_store import DecoratedStore, UnreachableStore
from tests.support.simulation.network import key
from tests.support.simulation.outer_sites import ROUND_SECONDS, SITE_SETTINGS, OuterTestbed, equal_states, first_weights
from tests.support.simulation.virtual_clock import running


@pytest.mark.parametrize("name", METHODS)
async def test_all_sites_have_the_same_state_and_learn(name: str) -> None:
    testbed = OuterTestbed(3, METHODS[name].model_copy(update={"local_steps": 3, "quorum": 2}))
    manifests = await testbed.run_rounds(8)
    assert all(len(manifest.counted) == 3 for manifest in manifests[1:])
    assert [manifest.version for manifest in manifests] == list(range(len(manifests)))
    equal_states(testbed, 8)
    assert testbed.remaining_loss("site-0") < (0.9 if name == "chunked" else 0.5)
    used = [group for manifest in manifests for item in manifest.counted for group in item.groups]
    assert len(used) == len(set(used)) > 24


async def test_the_first_state_is_dithered_so_that_the_first_round_changes_the_policy() -> None:
    testbed = OuterTestbed(3, METHODS["exact"].model_copy(update={"local_steps": 3, "quorum": 2}))
    manifests = await testbed.run_rounds(2)
    dithered, policy = first_state(first_weights(), METHODS["exact"]), first_weights()
    assert manifests[0].state == dithered.digests
    assert all(torch.equal(policy[name], view) for name, view in dithered.bf16_view().items())
    assert any((dithered.weights[name] != weight.float()).any() for name, weight in policy.items())
    equal_states(testbed, 2)


async def test_a_site_remembers_used_groups_only_until_their_copies_are_too_stale() -> None:
    testbed = OuterTestbed(2, round_rules(local_steps=3, quorum=2))
    testbed.site_settings = replace(SITE_SETTINGS, max_staleness=1)
    manifests = await testbed.run_rounds(8)
    newest = {group for manifest in manifests[-5:] for item in manifest.counted for group in item.groups}
    for handle in testbed.handles.values():
        assert handle.site is not None and handle.site._pool._used <= newest
    equal_states(testbed, 8)


async def test_a_site_takes_no_more_steps_than_a_contribution_can_name_groups_for() -> None:
    testbed = OuterTestbed(1, round_rules(local_steps=3, quorum=1))
    testbed.site_settings = replace(SITE_SETTINGS, groups_per_step=MAX_ROUND_GROUPS // 2)
    await testbed.feed_once(2 * MAX_ROUND_GROUPS)
    async with running(testbed.run_coordinator) as nursery:
        nursery.start_soon(testbed.run_site, testbed.handles["site-0"])
        manifest = await testbed.until_round(1)
    assert [len(item.groups) for item in manifest.counted] == [MAX_ROUND_GROUPS]
    assert (await testbed.contribution("site-0", 1)).record.local_steps == 2


@pytest.mark.slow
def test_the_records_of_a_round_with_as_many_sites_and_groups_as_there_may_be_are_within_their_limits() -> None:
    workers = tuple(sorted(digest(f"site {place}") for place in range(MAX_WORKERS)))
    count = most_groups(MAX_WORKERS)
    groups = [sorted(digest(f"{place} {number}") for number in range(count)) for place in range(MAX_WORKERS)]
    items = tuple(counted(worker, groups=tuple(own)) for worker, own in zip(workers, groups, strict=True))
    aggregated_shares = tuple(aggregated(worker=worker) for worker in workers)
    manifest = round_manifest(1, counted=items, refused=(), workers=workers, aggregated=aggregated_shares)
    assert open_signed(sign(manifest, TRAINER), RoundManifest, [TRAINER.public]).record == manifest
    planned = tuple(PlannedContribution(worker=item.worker, payload=item.payload) for item in items)
    plan = round_plan(contributions=planned, aggregators=workers)
    assert open_signed(sign(plan, TRAINER), RoundPlan, [TRAINER.public]).record == plan
    numbers = bytes(4 * projection_size(MAX_WORKERS))
    sent = [SentContribution(worker=worker, disagreeing=True, numbers=numbers) for worker in workers]
    record = SentRoundRecord(stream=0, sent=tuple(sent))
    assert SentRoundRecord.from_bytes(record.to_bytes()) == record
    used = tuple(UsedGroup(group=group, step=(1 << 33) - 1) for own in groups for group in own)
    site = SiteRecord(number=1, trainer=TRAINER.public, feedback=-1, inner=-1, used=used)
    assert SiteRecord.from_bytes(site.to_bytes()) == site


async def test_a_lost_site_is_named_and_its_groups_are_dealt_again() -> None:
    testbed = OuterTestbed(3)
    async with testbed.running(testbed.names[:2]):
        manifest = await testbed.until_round(3)
        await trio.sleep(1)
    assert testbed.reasons(manifest) == {"site-2": "lost"}
    assert len(manifest.counted) == 2
    refusals = testbed.handles["site-0"].log.named("site-refused")
    assert any(event["groups"] > 0 for event in refusals)


async def test_below_quorum_nothing_changes_and_the_next_round_repeats_the_work() -> None:
    testbed = OuterTestbed(3, round_rules(local_steps=3, quorum=3))
    async with testbed.running(testbed.names[:2]) as nursery:
        manifest = await testbed.until_round(2)
        opening = await testbed.manifest(0)
        assert manifest.counted == () and manifest.version == 0 and manifest.state == opening.state
        assert testbed.reasons(manifest) == {"site-0": "quorum", "site-1": "quorum", "site-2": "lost"}
        nursery.start_soon(testbed.run_site, testbed.handles["site-2"])
        closing = await testbed.until_round(5)
    assert len(closing.counted) == 3 and closing.version >= 1
    first = await testbed.contribution("site-0", 1)
    second = await testbed.contribution("site-0", 2)
    assert first.record.state == second.record.state


async def test_a_late_contribution_does_not_count_and_its_site_keeps_its_feedback() -> None:
    testbed = OuterTestbed(3)

    class LateStore(DecoratedStore):
        """Shows the contribution of a site to round 2 only after the round is closed."""

        async def get(self, path: str, max_bytes: int, *, offset: int = 0, size: int | None = None) -> bytes:
            late = path == paths.contribution(key("site-1").public, 2)
            if late and not any(event[0] == "contribution-weighed" and event[1]["number"] == 2 for event in events):
                path += "-not-yet"
            return await testbed.store.get(path, max_bytes, offset=offset, size=size)

    events = testbed.coordinator_log.events
    async with testbed.running(store=LateStore(testbed.store)):
        manifest = await testbed.until_round(2)
        await testbed.until_round(5)
        await trio.sleep(1)
    assert testbed.reasons(manifest) == {"site-1": "late"}
    assert [len((await testbed.manifest(number)).counted) for number in (3, 4, 5)] == [3, 3, 3]
    equal_states(testbed, 5)


async def test_many_sites_that_withhold_their_payloads_cost_no_other_site_its_round() -> None:
    testbed = OuterTestbed(6)
    names = sorted(testbed.names, key=lambda name: key(name).public)

    class WithholdingStore(DecoratedStore):
        async def put(self, path: str, data: bytes) -> None:
            if "/payloads/" not in path:
                await super().put(path, data)

    async with testbed.running(names[4:]) as nursery:
        for name in names[:4]:
            nursery.start_soon(testbed.run_site, testbed.handles[name], None, WithholdingStore(testbed.store))
        manifest = await testbed.until_round(2)
    assert testbed.reasons(manifest) == dict.fromkeys(names[:4], "withheld")


async def test_sites_whose_storage_hangs_do_not_hold_up_a_round() -> None:
    testbed = OuterTestbed(4)
    contributions = (paths.kind_prefix(key(name).public, "contributions") for name in testbed.names[:2])
    async with testbed.running(store=UnreachableStore(testbed.store, *contributions, seconds=240.0)):
        with trio.fail_after(6 * ROUND_SECONDS):
            manifest = await testbed.until_round(3)
    assert testbed.reasons(manifest) == dict.fromkeys(testbed.names[:2], "lost")


@pytest.mark.parametrize("behaviour", ["hangs", "is slow"])
async def test_a_space_that_serves_only_the_coordinator_costs_the_other_sites_some_seconds(behaviour: str) -> None:
    testbed = OuterTestbed(4)
    hidden = tuple(paths.kind_prefix(key(name).public, "payloads") for name in testbed.names[2:])

    class HidingStore(DecoratedStore):
        """Gives no payload of two workers, or only after a long time."""

        async def before(self, operation: str, path: str) -> None:
            if operation == "get" and path.startswith(hidden):
                await trio.sleep(1e6 if behaviour == "hangs" else 60)

    async with testbed.running(testbed.names[2:]) as nursery:
        for name in testbed.names[:2]:
            nursery.start_soon(testbed.run_site, testbed.handles[name], None, HidingStore(testbed.store))
        await testbed.until_round(1)
        begin = trio.current_time()
        await testbed.until(lambda: 1 in testbed.applied("site-0"))
        assert trio.current_time() - begin < HEAD_START + 1
        await testbed.until(lambda: 4 in testbed.applied("site-0"))
    equal_states(testbed, 4)


async def test_sites_whose_steps_change_nothing_visible_count_as_sites_that_send_nothing() -> None:
    testbed = OuterTestbed(5)
    for name in testbed.names[:2]:
        testbed.handles[name].learner.direction = 0.0
    async with testbed.running():
        manifest = await testbed.until_round(3)
    assert testbed.reasons(manifest) == {}
    empty = [await testbed.contribution(name, 3) for name in testbed.names[:2]]
    assert [signed.record.norm for signed in empty] == [0.0, 0.0]


async def second_contribution(testbed: OuterTestbed) -> Signed[RoundContribution]:
    """Wait until site-1 has contributed to round 2; return its contribution."""
    await testbed.until_round(1)
    await testbed.until(lambda: any(e["number"] == 2 for e in testbed.handles["site-1"].log.named("contributed")))
    await trio.sleep(0.5)
    return await testbed.contribution("site-1", 2)


async def test_a_site_that_signs_two_contributions_is_refused_and_reported() -> None:
    testbed = OuterTestbed(3)
    async with testbed.running():
        first = await second_contribution(testbed)
        second = first.record.model_copy(update={"local_steps": 2})
        await testbed.store.put(first.record.path, sign(second, key("site-1")))
        manifest = await testbed.until_round(2)
        await testbed.until_round(4)
        await trio.sleep(1)
    assert testbed.reasons(manifest) == {"site-1": "contradictory"}
    assert any("two contributions" in event["error"] for event in testbed.coordinator_log.named("alarm"))
    assert len((await testbed.manifest(4)).counted) == 3
    equal_states(testbed, 4)


async def test_a_key_that_was_revoked_in_a_round_does_not_count_in_it() -> None:
    testbed = OuterTestbed(3)
    handles = testbed.handles.values()
    async with testbed.running():
        await testbed.until(lambda: all(any(e["number"] == 3 for e in h.log.named("contributed")) for h in handles))
    stolen = key("site-2").public
    workers = tuple(worker for worker in testbed.run.authority.workers if worker != stolen)
    authority = testbed.run.authority.model_copy(update={"workers": workers, "revoked": (stolen,)})
    testbed.run = testbed.run.model_copy(update={"authority": authority})
    async with testbed.running(testbed.names[:2]):
        manifest = await testbed.until_round(3)
    assert testbed.reasons(manifest) == {"site-2": "malformed"}
    assert len(manifest.counted) == 2


async def test_a_copied_payload_is_refused_and_its_maker_counts_whoever_is_seen_first() -> None:
    testbed, copier, victim = OuterTestbed(3), key("site-2"), key("site-1").public

    class CopyingStore(DecoratedStore):
        """Has site-2 publish each payload of site-1, and a record of its own with it, before site-1's record."""

        async def put(self, path: str, data: bytes) -> None:
            if path.startswith(paths.kind_prefix(victim, "contributions")):
                first = open_signed(data, RoundContribution, [victim]).record
                ref = first.payload
                payload = await testbed.store.get(paths.payload(victim, first.number, ref.digest), ref.size)
                await testbed.store.put(paths.payload(copier.public, first.number, ref.digest), payload)
                copy = first.model_copy(update={"worker": copier.public, "groups": ()})
                await testbed.store.put(copy.path, sign(copy, copier))
                await trio.sleep(ROUND_SECONDS / 4)  # the coordinator looks meanwhile
            await testbed.store.put(path, data)

    async with testbed.running(testbed.names[:1]) as nursery:
        nursery.start_soon(testbed.run_site, testbed.handles["site-1"], None, CopyingStore(testbed.store))
        manifests = [await testbed.until_round(number) for number in range(2, 6)]
    assert all(testbed.reasons(manifest) == {"site-2": "malformed"} for manifest in manifests)
    assert all(len(manifest.counted) == 2 for manifest in manifests)


@pytest.mark.parametrize(
    ("attack", "reason"),
    [
        ("no payload", "withheld"),
        ("altered payload", "malformed"),
        ("another norm", "malformed"),
        ("not a record", "malformed"),
        ("another state", "other-state"),
        ("another round", "malformed"),
        ("a group of another site", "undealt"),
    ],
)
async def test_false_contributions_are_refused_with_their_reason(attack: str, reason: str) -> None:
    testbed = OuterTestbed(3)
    async with testbed.running(testbed.names[:2]):
        first = (await second_contribution(testbed)).record
        attacker = key("site-2")
        payload = await testbed.store.get(paths.payload(key("site-1").public, 2, first.payload.digest), 1 << 20)
        altered = payload[:-1] + bytes([payload[-1] ^ 1])
        ref = first.payload.model_copy(update={"digest": digest("altered")})
        record = first.model_copy(update={"worker": attacker.public, "groups": (), "payload": ref})
        if attack != "no payload":
            await testbed.store.put(paths.payload(attacker.public, 2, ref.digest), altered)
        changes: dict[str, dict[str, Any]] = {
            "another norm": {"norm": 2 * first.norm},
            "another state": {"state": first.state.model_copy(update={"weights": digest("other")})},
            "another round": {"number": 1},
            "a group of another site": {"groups": first.groups[:1]},
        }
        data = sign(record.model_copy(update=changes.get(attack, {})), attacker)
        if attack == "not a record":
            data = b"not a record"
        await testbed.store.put(paths.contribution(attacker.public, 2), data)
        manifest = await testbed.until_round(2)
        await testbed.until_round(3)
        await trio.sleep(1)
    assert testbed.reasons(manifest) == {"site-2": reason}
    assert len(manifest.counted) == 2
    assert testbed.applied("site-0")[3] == testbed.applied("site-1")[3]


async def test_a_poisoned_site_is_refused_and_the_others_learn_as_if_it_was_not_there() -> None:
    testbed = OuterTestbed(4)
    testbed.handles["site-3"].learner.direction = -1.0
    manifests = await testbed.run_rounds(12)
    for manifest in manifests[9:]:
        assert testbed.reasons(manifest) == {"site-3": "poisoned"}
    equal_states(testbed, 12)
    assert testbed.remaining_loss("site-3") < 0.5
