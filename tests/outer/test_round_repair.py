"""A coordinator or a site that has lost its own state: it refuses to go on, is repaired, and continues one history."""

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import trio
from torch import Tensor

from grailnode.store.memory import MemoryStore
from protocol.outer.comparing import SentRound
from protocol.outer.robust import Weighting, weigh_round
from roles.ports import RepairError, StateError
from roles.trainer.outer import coordinator
from roles.trainer.outer.round_files import OUTER, SENT, SITE, STATES, get_sent
from roles.trainer.outer.round_repair import repair_rounds, repair_site
from tests.support.builders.chains import TRAINER
from tests.support.measuring.store_listing import copy_objects, paths
from tests.support.simulation.network import Log, key
from tests.support.simulation.outer_crashes import SPREAD, kill, operations_of
from tests.support.simulation.outer_sites import OuterTestbed


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
    assert testbed.store.rewritten == []
    assert len(after[-1].counted) == 2
    tables = [testbed.applied(name) for name in testbed.names]
    assert tables[0] == tables[1]
    assert {number: manifest.state.weights.hex()[:16] for number, manifest in enumerate(after)}.items() >= tables[
        0
    ].items()


async def test_a_lost_shard_of_the_newest_state_is_rebuilt_from_the_rounds() -> None:
    testbed = OuterTestbed(2, state_interval=4)
    before = await testbed.run_rounds(6)
    state = await copy_objects(testbed.coordinator_state, MemoryStore(), without=STATES)
    lost_paths = {f"{STATES}{before[-1].number:010d}/00000"}
    await repair_rounds(testbed.node(Log("repair"), state, TRAINER), lost_paths, lambda line: None)
    parts = await paths(state, STATES)
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
    assert testbed.store.rewritten == []
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
    assert not await paths(state, OUTER)
    handle.state = state
    after = await testbed.run_rounds(6)
    assert testbed.store.rewritten == []
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


async def test_what_sites_sent_stays_for_as_long_as_drifts_are_looked_for_with_fewer_manifests() -> None:
    testbed = OuterTestbed(2, state_interval=1, remembered_rounds=2)
    async with testbed.running():
        await testbed.until_round(6)
        await trio.sleep(1.0)
    assert (await get_sent(testbed.coordinator_state, 6)).keys() == set(range(7))


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


# A site or the coordinator is killed at the last operation of each kind, and at every third one: before one and after
# the next in turn


VICTIMS = ("site-0", "coordinator")


@pytest.mark.slow
@pytest.mark.parametrize("victim", VICTIMS)
def test_a_process_that_is_killed_at_any_kind_of_operation_loses_no_update(victim: str) -> None:
    places = operations_of(victim)
    kinds = {  # the last place of each kind that is not in the last rounds
        (operation, re.sub(r"[0-9a-f]{16,}|\d+", "#", path)): place
        for place, (operation, path) in enumerate(places[: len(places) * 2 // 3])
    }
    for count, place in enumerate(sorted({*kinds.values(), *range(0, len(places), 3)})):
        kill(victim, place, after=count % 2 == 1)
