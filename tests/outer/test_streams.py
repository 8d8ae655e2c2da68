"""Sites that send their weights in streams, one in each round."""

from functools import partial
from itertools import pairwise

import pytest
import torch
import trio

from protocol import pseudogradient
from protocol.errors import ProtocolError
from protocol.outer.shared_state import SharedState
from protocol.pseudogradient import streams_of
from tests.support.simulation.outer_crashes import STREAMED, STREAMED_AND_DELAYED, check_sums, equal_states, run
from tests.support.simulation.outer_sites import OuterTestbed, first_weights, loss
from tests.support.simulation.virtual_clock import simulate, simulated


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


@pytest.mark.parametrize("rules", [STREAMED, STREAMED_AND_DELAYED])
@simulated
async def test_sites_train_together_in_streams(rules: object) -> None:
    testbed = OuterTestbed(3, rules)  # type: ignore[arg-type]
    async with trio.open_nursery() as nursery:
        testbed.start(nursery)
        await testbed.until_round(7)
        await trio.sleep(2)
        nursery.cancel_scope.cancel()
    manifests = await testbed.manifests()
    assert all(len(manifest.counted) == 3 for manifest in manifests[1:])
    equal_states(testbed)
    for name in testbed.names:
        await check_sums(testbed, name)
    site = testbed.handles["site-0"].site
    assert site is not None and site.shared is not None
    assert loss(site.shared.weights) < 0.8 * loss(first_weights())


@simulated
async def test_a_site_goes_on_from_its_own_weights_where_it_sent_none() -> None:
    """The first local step of a round begins where the last one of the round before ended, in the other stream."""
    testbed = OuterTestbed(2, STREAMED)
    async with trio.open_nursery() as nursery:
        testbed.start(nursery)
        await testbed.until_round(5)
        nursery.cancel_scope.cancel()
    manifests, shared = await testbed.manifests(), SharedState.begin(first_weights(), has_momentum=True)
    learner, steps = testbed.handles["site-0"].learner, 0
    for opening, manifest in pairwise(manifests):
        steps += (await testbed.contribution("site-0", manifest.number)).record.local_steps
        payload = [await testbed.payload(item) for item in manifest.counted]
        sent = set(shared.stream(opening.rules))
        moved = {name: tensor - learner.ends[steps][name] for name, tensor in shared.weights.items()}
        shared = shared.after(payload, [item.factor for item in manifest.counted], opening.rules)
        assert all(moved[name].abs().max() > 0 for name in moved)
        if manifest.number < 4:
            begins = learner.begins[steps]
            for name, tensor in begins.items():
                due = shared.weights[name] - (0 if name in sent else moved[name])
                assert torch.allclose(tensor, due, atol=1e-7), (manifest.number, name)


@pytest.mark.parametrize("kind", ["payload/", "inner/", "prepared/", "outer/site"])
def test_a_site_that_is_killed_loses_no_update_of_any_stream(kind: str) -> None:
    places = simulate(partial(run, "site-0", 1 << 30, after=False, rules=STREAMED))
    place = [place for place, (_, path) in enumerate(places) if kind in path][2]
    for after in (False, True):
        simulate(partial(run, "site-0", place, after=after, rules=STREAMED))
