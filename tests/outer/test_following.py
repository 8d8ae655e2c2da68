"""Sites that come late, were away, or read something false get the state of the others again; a coordinator or a site
that has lost its own state refuses to go on, is repaired, and continues one history.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import trio
from torch import Tensor

from grailnode.store.checks import PermanentError
from grailnode.store.memory import MemoryStore
from protocol import paths
from protocol.digest import digest_weights
from protocol.identity.signing import sign
from protocol.outer.comparing import SentRound
from protocol.outer.robust import Weighting, weigh_round
from protocol.outer.round_records import RoundPointer, RoundRules
from roles.ports import ObjectStore, RepairError, StateError, StoreError
from roles.records import fetch_record
from roles.trainer.outer import coordinator, round_files
from roles.trainer.outer.round_files import OUTER, ROUNDS, SENT, SITE, STATES, SiteRecord, get_sent
from roles.trainer.outer.round_repair import repair_rounds, repair_site
from tests.support.builders.chains import TRAINER
from tests.support.builders.samples import digest
from tests.support.faults.decorated_store import DecoratedStore
from tests.support.measuring.store_listing import copy_objects
from tests.support.measuring.store_listing import paths as paths_below
from tests.support.simulation.network import Log, key
from tests.support.simulation.outer_crashes import SPREAD, kill, operations_of
from tests.support.simulation.outer_sites import ROUND_SECONDS, OuterTestbed, equal_states
from tests.support.simulation.virtual_clock import running


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


class OwnSpace(DecoratedStore):
    """Storage in which a key writes its own objects alone."""

    def __init__(self, inner: ObjectStore, key: bytes) -> None:
        super().__init__(inner)
        self.key = key

    async def put(self, path: str, data: bytes) -> None:
        if paths.writer(path) != self.key:
            raise PermanentError(f"{path}: belongs to another participant")
        await self.inner.put(path, data)


@pytest.mark.parametrize("rules", [None, SPREAD], ids=["alone", "spread"])
async def test_a_coordinator_goes_on_under_a_new_key(rules: RoundRules | None) -> None:
    testbed = OuterTestbed(4, rules)
    async with testbed.running(testbed.names[:3]):
        await testbed.until_round(4)
        await trio.sleep(ROUND_SECONDS / 2)  # the sites have round 5 open, which the new key closes
    testbed.rotate_trainer()
    with trio.fail_after(20 * ROUND_SECONDS):
        async with testbed.running(store=OwnSpace(testbed.store, testbed.trainer.public)):
            manifest = await testbed.until_round(8)
            await trio.sleep(1)
            first = await testbed.manifest(5)
    assert bool(rules) == bool(first.aggregated)
    assert {(share.outcome, share.check) for share in first.aggregated} <= {("sound", "sound")}
    assert len(manifest.counted) == 4  # with a site that is new
    assert testbed.applied("site-3")[8] == testbed.applied("site-0")[8]


@pytest.mark.parametrize("overlap", [False, True])
async def test_a_site_goes_on_under_a_new_key_after_it_has_contributed(overlap: bool) -> None:
    def set_workers(*names: str) -> None:
        workers = tuple(sorted(key(name).public for name in names))
        authority = testbed.run.authority.model_copy(update={"workers": workers})
        testbed.run = testbed.run.model_copy(update={"authority": authority})

    testbed = OuterTestbed(2)
    set_workers("site-0", "site-1", *(["rotated"] if overlap else []))
    async with testbed.running():
        await testbed.until(lambda: any(e["number"] == 3 for e in testbed.handles["site-1"].log.named("contributed")))
    old = await testbed.contribution("site-1", 3)
    rotated = replace(testbed.handles.pop("site-1"), name="rotated")
    testbed.handles["rotated"], testbed.names = rotated, ["site-0", "rotated"]
    set_workers(*testbed.names)
    async with testbed.running():
        await testbed.until(lambda: 3 in testbed.applied("rotated"))
        node = testbed.node(Log("reader"), rotated.state, rotated.key)
        record = SiteRecord.from_bytes(await rotated.state.get(SITE, SiteRecord.max_bytes))
        feedback = await round_files.get_tensors(node, round_files.numbered(round_files.FEEDBACK, record.feedback))
        manifest = await testbed.until_round(6)
        await trio.sleep(1)
    closing = await testbed.manifest(3)
    assert closing.counted_digest(key("site-1").public) == old.digest
    assert closing.counted_digest(rotated.key.public) is None  # nothing is sent twice
    assert (record.number, record.inner, digest_weights(feedback)) == (3, 3, old.record.feedback)
    assert rotated.key.public in {item.worker for item in manifest.counted}
    assert testbed.applied("rotated")[6] == testbed.applied("site-0")[6]


# A coordinator or a site that has lost its own state


async def test_a_coordinator_without_its_rounds_refuses_to_begin_anew_and_is_repaired() -> None:
    testbed = OuterTestbed(2, state_interval=4)
    before = await testbed.run_rounds(6)
    state = await copy_objects(testbed.coordinator_state, MemoryStore(), without=OUTER)
    with pytest.raises(StateError, match=f"storage shows round {before[-1].number}, which this state did not close"):
        await testbed.run_coordinator(state)
    lines: list[str] = []
    node = testbed.node(Log("repair"), state, TRAINER)
    assert await repair_rounds(node, set(), lines.append)
    assert lines == [f"outer/rounds/: continues round {before[-1].number}, the newest that storage shows"]
    assert await repair_rounds(node, set(), lines.append)
    assert len(lines) == 1
    testbed.coordinator_state, testbed.epoch = state, 2
    after = await testbed.run_rounds(9)
    assert after[: len(before)] == before
    assert not testbed.rewritten
    assert len(after[-1].counted) == 2
    tables = [testbed.applied(name) for name in testbed.names]
    assert tables[0] == tables[1]
    assert {number: manifest.state.weights.hex()[:16] for number, manifest in enumerate(after)}.items() >= tables[
        0
    ].items()


async def test_who_fetches_the_state_knows_the_groups_that_were_used_under_an_earlier_key_of_the_trainer() -> None:
    testbed = OuterTestbed(2)
    before = await testbed.run_rounds(3)
    testbed.rotate_trainer()
    site = testbed.handles["site-1"]
    site.state = MemoryStore()
    async with testbed.running():
        await testbed.until_round(6)
    record = SiteRecord.from_bytes(await site.state.get(SITE, SiteRecord.max_bytes))
    assert {group for item in before[-1].counted for group in item.groups} <= {used.group for used in record.used}
    closed = await round_files.list_manifests(testbed.coordinator_state)
    assert len({trainer for _, trainer in closed}) == 2
    state = await copy_objects(testbed.coordinator_state, MemoryStore(), without=OUTER)
    await repair_rounds(testbed.node(Log("repair"), state, testbed.trainer), set(), lambda line: None)
    assert await round_files.list_manifests(state) == closed


@pytest.mark.parametrize("prefix", [round_files.POINTER, STATES, f"{ROUNDS}0000000003", ROUNDS])
async def test_a_loss_before_the_first_round_of_a_new_key_is_rebuilt_from_the_earlier_key_s_space(prefix: str) -> None:
    testbed = OuterTestbed(2)
    await testbed.run_rounds(3)
    before = testbed.coordinator_state
    testbed.rotate_trainer()
    testbed.coordinator_state = await copy_objects(before, MemoryStore(), without=prefix)
    lost_paths = set(await paths_below(before, prefix))
    node = testbed.node(Log("repair"), testbed.coordinator_state, testbed.trainer)
    await repair_rounds(node, lost_paths, lambda line: None)
    for path in await paths_below(before, STATES):
        assert await testbed.coordinator_state.get(path, 1 << 30) == await before.get(path, 1 << 30)
    async with testbed.running():
        manifest = await testbed.until_round(6)
        await trio.sleep(1)
    assert len(manifest.counted) == 2
    equal_states(testbed, 6)


@pytest.mark.parametrize(
    ("ahead", "lost"), [(0, round_files.POINTER), (1, round_files.POINTER), (0, f"{ROUNDS}0000000003"), (0, ROUNDS)]
)
async def test_a_repair_continues_no_round_that_an_earlier_key_has_signed_since(ahead: int, lost: str) -> None:
    testbed = OuterTestbed(2)
    closed = await testbed.run_rounds(3)
    testbed.rotate_trainer()
    reader = testbed.node(Log("reader"), MemoryStore(), key("reader"))
    pointer = (await fetch_record(reader, RoundPointer, paths.newest_round(TRAINER.public))).record
    changed = pointer.model_copy(update={"newest": pointer.newest + ahead, "digest": digest("another round")})
    await testbed.store.put(pointer.path, sign(changed, TRAINER))
    lost_paths = set(await paths_below(testbed.coordinator_state, lost))
    state = await copy_objects(testbed.coordinator_state, MemoryStore(), without=lost)
    with pytest.raises(RepairError, match=f"a round {closed[-1].number + ahead} of an earlier key, which this node"):
        await repair_rounds(testbed.node(Log("repair"), state, testbed.trainer), lost_paths, lambda line: None)


async def test_a_coordinator_has_nothing_to_repair_before_the_first_round_of_its_new_key() -> None:
    testbed = OuterTestbed(2)
    await testbed.run_rounds(3)
    node = testbed.node(Log("repair"), testbed.coordinator_state, key("rotated"))
    lines: list[str] = []
    assert await repair_rounds(node, set(), lines.append)
    assert not lines
    with pytest.raises(RepairError, match="the roots take back versions"):
        await repair_rounds(node, set(), lines.append, is_rewound=True)
    old = testbed.node(Log("repair"), testbed.coordinator_state, TRAINER, MemoryStore())  # whose bucket shows nothing
    with pytest.raises(RepairError, match="storage shows no round of this trainer"):
        await repair_rounds(old, set(), lines.append)


async def test_a_lost_shard_of_the_newest_state_is_rebuilt_from_the_rounds() -> None:
    testbed = OuterTestbed(2, state_interval=4)
    before = await testbed.run_rounds(6)
    state = await copy_objects(testbed.coordinator_state, MemoryStore(), without=STATES)
    lost_paths = {f"{STATES}{before[-1].number:010d}/00000"}
    await repair_rounds(testbed.node(Log("repair"), state, TRAINER), lost_paths, lambda line: None)
    parts = await paths_below(state, STATES)
    assert parts == sorted(lost_paths)
    expected = await testbed.coordinator_state.get(parts[0], 1 << 30)
    assert await state.get(parts[0], 1 << 30) == expected


async def test_a_repair_takes_the_factors_that_were_signed_and_computes_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def weigh_with_other_bounds(*arguments: Any) -> Weighting:
        weighting = weigh_round(*arguments)
        return replace(weighting, factors=tuple(math.nextafter(factor, 0.0) for factor in weighting.factors))

    testbed = OuterTestbed(3, SPREAD, state_interval=4)
    with monkeypatch.context() as patch:
        patch.setattr(coordinator, "weigh_round", weigh_with_other_bounds)
        before = await testbed.run_rounds(3)
    assert all(manifest.aggregated for manifest in before[1:])
    assert {item.factor for manifest in before for item in manifest.counted}.isdisjoint({0.0, 1.0})
    state = await copy_objects(testbed.coordinator_state, MemoryStore(), without=STATES)
    await repair_rounds(testbed.node(Log("repair"), state, TRAINER), {f"{STATES}0"}, lambda line: None)
    testbed.coordinator_state = state
    assert (await testbed.run_rounds(5))[: len(before)] == before
    assert testbed.applied("site-0") == testbed.applied("site-1") == testbed.applied("site-2")


async def test_a_coordinator_is_not_repaired_from_a_store_that_was_rolled_back() -> None:
    testbed = OuterTestbed(2)
    await testbed.run_rounds(2)
    old = await copy_objects(testbed.store, MemoryStore())
    await testbed.run_rounds(4)
    await copy_objects(old, testbed.store)
    node = testbed.node(Log("repair"), testbed.coordinator_state, TRAINER)
    with pytest.raises(RepairError, match=r"storage shows round 2, and this node has closed round 4"):
        await repair_rounds(node, {f"{OUTER}pointer"}, lambda line: None)


async def test_a_trainer_alone_has_no_rounds_to_repair() -> None:
    testbed = OuterTestbed(2)
    assert not await repair_rounds(testbed.node(Log("repair"), MemoryStore(), TRAINER), set(), lambda line: None)


async def test_a_site_with_an_old_backup_signs_no_second_contribution() -> None:
    testbed = OuterTestbed(2)
    await testbed.run_rounds(2)
    handle = testbed.handles["site-1"]
    backup = await copy_objects(handle.state, MemoryStore())
    await testbed.run_rounds(4)  # both have signed contributions to round 5
    handle.state = backup
    after = await testbed.run_rounds(7)
    assert not testbed.rewritten
    assert not testbed.coordinator_log.named("alarm")
    assert len(after[-1].counted) == 2
    assert testbed.applied("site-0").items() <= testbed.applied("site-1").items()


async def test_a_site_without_its_own_state_signs_no_second_contribution_and_takes_part_again() -> None:
    testbed = OuterTestbed(2)
    await testbed.run_rounds(3)  # both have signed contributions to round 4
    handle = testbed.handles["site-1"]
    lines: list[str] = []
    state = await copy_objects(handle.state, MemoryStore(), without=SITE)
    await repair_site(testbed.node(Log("repair"), state, key("site-1")), {SITE}, lines.append)
    assert lines == ["outer/: is fetched again; error feedback and the optimizer's moments begin with 0"]
    assert not await paths_below(state, OUTER)
    handle.state = state
    after = await testbed.run_rounds(6)
    assert not testbed.rewritten
    assert not testbed.coordinator_log.named("alarm")
    assert all(len(manifest.counted) == 2 for manifest in after[1:])


def same_rounds(one: dict[int, SentRound], other: dict[int, SentRound]) -> bool:
    return one.keys() == other.keys() and all(
        sent.workers == other[number].workers and np.array_equal(sent.projections, other[number].projections)
        for number, sent in one.items()
    )


async def test_what_sites_sent_over_the_rounds_is_there_after_a_restart_and_a_repair() -> None:
    testbed = OuterTestbed(3, state_interval=4)
    before = await testbed.run_rounds(3)
    newest = before[-1].number
    sent = await get_sent(testbed.coordinator_state, newest)
    assert [len(own.workers) for own in sent.values()] == [0, *[3] * newest]
    state = await copy_objects(testbed.coordinator_state, MemoryStore(), without=SENT)
    await repair_rounds(testbed.node(Log("repair"), state, TRAINER), {f"{SENT}0000000003"}, lambda line: None)
    rebuilt = await get_sent(state, newest)
    assert same_rounds(rebuilt, {number: own for number, own in sent.items() if number})
    state = await copy_objects(testbed.coordinator_state, MemoryStore(), without=STATES)
    await repair_rounds(testbed.node(Log("repair"), state, TRAINER), {f"{STATES}0"}, lambda line: None)
    assert same_rounds(await get_sent(state, newest), sent)
    after = await testbed.run_rounds(5)
    later = await get_sent(testbed.coordinator_state, after[-1].number)
    assert same_rounds({number: own for number, own in later.items() if number <= newest}, sent)
    assert all(len(later[number].workers) == 3 for number in range(1, after[-1].number + 1))


async def test_moments_and_feedback_of_a_site_are_in_files_of_a_bounded_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(round_files, "_SHARD_BYTES", 4000)
    testbed = OuterTestbed(2)
    await testbed.run_rounds(2)
    await testbed.run_rounds(4)  # each process goes on from these files
    equal_states(testbed, 3)
    state = testbed.handles["site-0"].state
    for prefix in (round_files.FEEDBACK, round_files.INNER):
        files = [item async for item in state.list(prefix)]
        assert len(files) > 1 and max(item.size for item in files) < 11_000  # a tensor has 10,240 bytes
        await state.delete(files[-1].path)
        with pytest.raises(StateError, match="files, which are not all"):
            await round_files.get_tensors(testbed.node(Log("reader"), state, key("site-0")), files[-1].path[:-12])


async def test_a_site_whose_learner_cannot_go_on_from_its_moments_says_which_file_they_are_in(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As after another `trainer.optimizer`."""
    testbed = OuterTestbed(2)
    await testbed.run_rounds(2)
    handle = testbed.handles["site-0"]

    def refuse(state: Mapping[str, Tensor]) -> None:
        raise ValueError("a saved state of another model or optimizer")

    monkeypatch.setattr(handle.learner, "restore", refuse)
    async with testbed.running(["site-1"]):
        with pytest.raises(StateError, match=r"outer/inner/\d{10} of this node's state: a saved state of another"):
            await testbed.run_site(handle)


# A site or the coordinator is killed at the last operation of each kind, and at every ninth one: before one and after
# the next in turn. `python -m bench.outer crashes` kills them at more, with other seeds


VICTIMS = ("site-0", "coordinator")


@pytest.mark.slow
@pytest.mark.parametrize("victim", VICTIMS)
def test_a_process_that_is_killed_at_any_kind_of_operation_loses_no_update(victim: str) -> None:
    places = operations_of(victim)
    kinds = {  # the last place of each kind that is not in the last rounds
        (operation, re.sub(r"[0-9a-f]{16,}|\d+", "#", path)): place
        for place, (operation, path) in enumerate(places[: len(places) * 2 // 3])
    }
    for count, place in enumerate(sorted({*kinds.values(), *range(0, len(places), 9)})):
        kill(victim, place, after=count % 2 == 1)
