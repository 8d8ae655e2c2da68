"""Sites that send their weights in streams, one in each round, and sites that go on while a round closes."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
import trio

from protocol import pseudogradient
from protocol.errors import ProtocolError
from protocol.outer import robust
from protocol.outer.dithering import first_state
from protocol.outer.round_checks import DELAYED_TURN, owner, turn_of
from protocol.outer.round_records import RoundRules
from protocol.outer.shared_state import SharedState
from protocol.pseudogradient import streams_of
from tests.support.builders.samples import round_rules
from tests.support.simulation.network import key
from tests.support.simulation.outer_crashes import (
    DELAYED,
    RULES,
    STREAMED,
    STREAMED_AND_DELAYED,
    check_sums,
    kill,
    operations_of,
)
from tests.support.simulation.outer_sites import OuterTestbed, equal_states, first_weights
from tests.support.simulation.virtual_clock import running


def test_a_round_changes_the_tensors_of_its_stream_alone() -> None:
    state = SharedState.begin(first_weights(), has_momentum=True)
    streams = streams_of(state.weights, 3)
    assert len(streams) == 2, "the third stream would have no tensors"
    for number in range(4):
        due = set(streams[number % 2])
        assert set(state.stream(STREAMED)) == due
        local = {name: tensor - 1e-3 for name, tensor in state.weights.items()}
        encoded = pseudogradient.encode(
            state.stream(STREAMED), local, None, STREAMED.coding, state.digests.weights
        ).payload
        after = state.after([encoded], [1.0], STREAMED)
        assert state.momentum is not None and after.momentum is not None
        for tensors, others in ((state.weights, after.weights), (state.momentum, after.momentum)):
            assert {name for name in tensors if not torch.equal(tensors[name], others[name])} == due
        state = after


def test_a_contribution_with_other_tensors_is_refused() -> None:
    state = SharedState.begin(first_weights(), has_momentum=True)
    local = {name: tensor - 1e-3 for name, tensor in state.weights.items()}
    digest = state.digests.weights
    for tensors in (state.weights, {"norm": state.weights["norm"]}):
        payload = pseudogradient.encode(tensors, local, None, STREAMED.coding, digest).payload
        with pytest.raises(ProtocolError):
            state.after([payload], [1.0], STREAMED)
    after = state.after([], [], STREAMED)
    assert after is state, "a round that is repeated has the same stream"


async def test_a_site_goes_on_from_its_own_weights_where_it_sent_none() -> None:
    """The first local step of a round begins where the last one of the round before ended, in the other stream."""
    testbed = OuterTestbed(2, STREAMED)
    async with testbed.running():
        await testbed.until_round(5)
    manifests, shared = await testbed.manifests(), first_state(first_weights(), STREAMED)
    learner, steps = testbed.handles["site-0"].learner, 0
    for opening, manifest in pairwise(manifests):
        steps += (await testbed.contribution("site-0", manifest.number)).record.local_steps
        payloads = await testbed.payloads(manifest, shared, opening.rules)
        sent = set(shared.stream(opening.rules))
        moved = {name: tensor - learner.ends[steps][name] for name, tensor in shared.weights.items()}
        shared = shared.after(payloads, [item.factor for item in manifest.counted], opening.rules)
        assert all(moved[name].abs().max() > 0 for name in moved)
        if manifest.number < 4:
            begins = learner.begins[steps]
            for name, tensor in begins.items():
                due = shared.weights[name] - (0 if name in sent else moved[name])
                assert torch.allclose(tensor, due, atol=1e-7), (manifest.number, name)


# Sites that go on with their local steps while a round closes


def ahead(testbed: OuterTestbed, name: str) -> list[int]:
    """Return the rounds for which a site took steps while the round before was closing."""
    return [event["number"] for event in testbed.handles[name].log.named("local-step") if event["ahead"]]


@pytest.mark.parametrize("rules", [RULES, STREAMED, DELAYED, STREAMED_AND_DELAYED])
async def test_sites_have_the_same_state_and_go_on_while_a_round_closes_only_with_a_delay(rules: RoundRules) -> None:
    testbed = OuterTestbed(3, rules)
    manifests = await testbed.run_rounds(7)
    assert all(len(manifest.counted) == 3 for manifest in manifests[1:])
    equal_states(testbed, 7)
    for name in testbed.names:
        rounds_ahead = set(ahead(testbed, name))
        assert len(rounds_ahead) >= 5 if rules.delay else not rounds_ahead
        assert not testbed.handles[name].log.named("steps-dropped")
        await check_sums(testbed, name)
    used = [group for manifest in manifests for item in manifest.counted for group in item.groups]
    assert len(used) == len(set(used)) >= 3 * 2 * 7
    assert testbed.remaining_loss("site-0") < 0.8


async def test_steps_ahead_of_a_contribution_that_does_not_count_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(robust, "DISTRUST", 0.0)  # so that one that disagrees is refused at once
    testbed = OuterTestbed(4, DELAYED)
    testbed.handles["site-3"].learner.direction = -1.0
    manifests = await testbed.run_rounds(4)
    assert all(testbed.reasons(manifest) == {"site-3": "poisoned"} for manifest in manifests[1:])
    dropped = [event["number"] for event in testbed.handles["site-3"].log.named("steps-dropped")]
    assert dropped == [2, 3, 4, 5] == sorted(set(ahead(testbed, "site-3")))[:4]
    for manifest in manifests[2:]:
        record = (await testbed.contribution("site-3", manifest.number)).record
        assert record.state == manifests[manifest.number - 1].state
    equal_states(testbed, 4)


@pytest.mark.parametrize("rules", [round_rules(local_steps=3, quorum=2), DELAYED], ids=["no delay", "delay"])
async def test_a_site_that_comes_later_fetches_the_state_and_takes_part(rules: RoundRules) -> None:
    testbed = OuterTestbed(3, rules)
    async with testbed.running(testbed.names[:2]) as nursery:
        await testbed.until_round(6)
        nursery.start_soon(testbed.run_site, testbed.handles["site-2"])
        manifest = await testbed.until_round(10)
        await trio.sleep(1)
    assert len(manifest.counted) == 3
    assert testbed.handles["site-2"].log.named("state-adopted")[0]["number"] == 4
    assert bool(ahead(testbed, "site-2")) == bool(rules.delay)
    reasons = {reason for manifest in await testbed.manifests() for reason in testbed.reasons(manifest).values()}
    assert reasons == {"lost"}
    equal_states(testbed, 4)


async def test_a_rule_that_ends_the_delay_drops_the_steps_ahead() -> None:
    testbed = OuterTestbed(2, DELAYED)
    async with running(testbed.feed) as nursery:
        for name in testbed.names:
            nursery.start_soon(testbed.run_site, testbed.handles[name])
        async with running(testbed.run_coordinator):
            await testbed.until_round(3)
        testbed.settings = replace(testbed.settings, rules=RULES)
        nursery.start_soon(testbed.run_coordinator)
        await testbed.until_round(8)
        await trio.sleep(1)
    manifests = await testbed.manifests()
    last = max(manifest.number for manifest in manifests if manifest.rules.delay)
    assert last < 6 and max(ahead(testbed, "site-0")) == last + 2
    assert len(testbed.handles["site-0"].log.named("steps-dropped")) == 1
    assert all(len(manifest.counted) == 2 for manifest in manifests[1:])
    equal_states(testbed, 7)


@pytest.mark.parametrize(
    ("rules", "kind", "number"),
    [
        *((STREAMED, kind, 2) for kind in ("payload/", "inner/", "prepared/", "outer/site")),
        *((DELAYED, kind, 3) for kind in ("payload/", "prepared/", "/contributions/", "outer/site")),
    ],
)
def test_a_site_that_is_killed_while_it_goes_ahead_or_sends_a_stream_loses_no_update(
    rules: RoundRules, kind: str, number: int
) -> None:
    places = operations_of("site-0", rules)
    place = [place for place, (_, path) in enumerate(places) if kind in path][number]
    for after in (False, True):
        kill("site-0", place, after=after, rules=rules)


@pytest.mark.slow
@pytest.mark.parametrize("rules", [DELAYED, STREAMED_AND_DELAYED], ids=["delay", "delay and streams"])
@pytest.mark.parametrize(("victim", "stride"), [("site-0", 11), ("coordinator", 17)])
def test_a_process_that_is_killed_at_many_operations_loses_no_update(
    victim: str, stride: int, rules: RoundRules
) -> None:
    for place in range(0, len(operations_of(victim, rules)), stride):
        kill(victim, place, after=place % 2 == 1, rules=rules)


def test_rounds_with_a_delay_are_dealt_alike_in_turns() -> None:
    assert [turn_of(number, 0) for number in range(5)] == [0, 1, 2, 3, 4]
    assert [turn_of(number, 1) for number in range(2 * DELAYED_TURN)] == [0] * DELAYED_TURN + [1] * DELAYED_TURN
    workers = [key(name).public for name in ("a", "b")]
    assert owner(bytes(32), turn_of(1, 1), b"group", workers) == owner(bytes(32), turn_of(2, 1), b"group", workers)
