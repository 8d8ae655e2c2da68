"""Miners that sign two commitments for one window, and storage that swaps them."""

from collections.abc import Sequence

import pytest
import trio

from grailnode.observe.recheck import GroupReference, recheck
from grailnode.store.memory import MemoryStore
from protocol import limits, paths
from protocol.encoding import REWARD_UNIT
from protocol.errors import ProtocolError
from protocol.identity.signing import open_signed, sign
from protocol.rollout.batch import Commitment, Group, assemble, open_group
from tests.support.attacked_nodes.trainer import FIRST, SECOND, WINDOW, AttackedTrainer, read_outcomes
from tests.support.builders.recipes import demo_rules
from tests.support.simulation.network import Network, key
from tests.support.simulation.network_runs import run_nodes

SECONDS_BETWEEN = 2.0


async def deliver_in_turn(*deliveries: Sequence[Group]) -> AttackedTrainer:
    """Let a trainer read two validators that have judged different deliveries of one miner.

    Each delivery is in storage for everybody when its validator reveals.
    """
    testbed = AttackedTrainer()
    records = []
    for validator, groups in zip((FIRST, SECOND), deliveries, strict=True):
        testbed.groups = list(groups)
        verdict = testbed.verdict(validator, *map(testbed.judgement, range(len(groups))))
        summary = testbed.summary(validator, verdict)
        await testbed.seal(validator, summary)
        records.append((groups, validator, summary, verdict))
    opening = testbed.run.opening_time(WINDOW)

    async def deliver_and_reveal() -> None:
        for number, (groups, validator, summary, verdict) in enumerate(records, start=1):
            await testbed.clock.sleep_until(opening + number * SECONDS_BETWEEN)
            await testbed.deliver(groups)
            await testbed.reveal(validator, summary, verdict)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(deliver_and_reveal)
        await testbed.collect()
    return testbed


def disguised(group: Group) -> Group:
    """Return the same rollouts with another digest: one bit of a sketch differs."""
    first, *others = group.rollouts
    first = first.model_copy(update={"sketch": bytes([first.sketch[0] ^ 1]) + first.sketch[1:]})
    return group.model_copy(update={"rollouts": (first, *others)})


async def test_the_same_rollouts_under_two_commitments_are_trained_on_once():
    groups = AttackedTrainer().groups
    testbed = await deliver_in_turn(groups, [disguised(group) for group in groups])
    work = [(group.prompt, group.completions) for batch in await testbed.inbox_batches() for group in batch.groups]
    assert len(set(work)) == len(work) == len(groups)


async def test_a_group_of_two_commitments_is_used_once():
    groups = AttackedTrainer().groups
    testbed = await deliver_in_turn(groups[:1], groups)
    statuses = [item.status for window in await read_outcomes(testbed.state) for item in window.outcomes]
    assert statuses == ["used", "commitment-changed", "commitment-changed"]


# Storage and miners that try to make `verify --rollout` contradict an honest validator


RULES = demo_rules(groups=4, group_size=8)
WINDOWS = (3, 4)


async def swap(store: MemoryStore, first: str, second: str) -> None:
    """Put each of two objects at the path of the other."""
    size = limits.MAX_RECORD_BYTES
    one, other = await store.get(first, size), await store.get(second, size)
    await store.put(first, other)
    await store.put(second, one)


async def committed_groups(network: Network, commitment: Commitment) -> list[Group]:
    batch = await network.store.get(
        paths.batch(commitment.miner, commitment.window, commitment.batch), limits.MAX_BATCH_BYTES
    )
    extents = [commitment.extent(index) for index in range(len(commitment.groups))]
    return [open_group(batch[at : at + size], commitment, index) for index, (at, size) in enumerate(extents)]


async def judged_network() -> Network:
    """Return a network with one honest miner, whose windows a validator has judged."""
    network = Network(RULES)
    async with run_nodes(network, miners=1):
        await network.until_window(6)
    return network


@pytest.mark.parametrize("kind", ["commitments of a miner", "verdicts of a validator"])
async def test_swapped_records_are_refused_and_accuse_no_validator(kind: str) -> None:
    network = await judged_network()
    observer, miner, validator = network.node("observer"), key("miner-1").public, key("validator-0").public
    task = network.task(observer)
    one, other = (
        paths.commitment(miner, window) if kind.startswith("commitments") else paths.verdict(validator, window, miner)
        for window in WINDOWS
    )
    await swap(network.store, one, other)
    for window in WINDOWS:
        with pytest.raises(ProtocolError, match="belongs at"):
            await recheck(observer, task, network.compute, GroupReference(miner.hex(), window, 0))


async def test_a_second_commitment_of_a_miner_does_not_contradict_the_validator_that_judged_the_first():
    network = await judged_network()
    observer, miner, window = network.node("observer"), key("miner-1"), WINDOWS[0]
    path = paths.commitment(miner.public, window)
    commitment = open_signed(await network.store.get(path, limits.MAX_RECORD_BYTES), Commitment, [miner.public])
    groups = await committed_groups(network, commitment.record)
    rollouts = tuple(
        rollout.model_copy(update={"reward": REWARD_UNIT - rollout.reward}) for rollout in groups[0].rollouts
    )
    false = groups[0].model_copy(update={"rollouts": rollouts})
    batch, second = assemble([false, *groups[1:]], "torch-float32")
    await network.store.put(paths.batch(miner.public, window, second.batch), batch)
    await network.store.put(path, sign(second, miner))
    reference = GroupReference(miner.public.hex(), window, 0)
    group = await recheck(observer, network.task(observer), network.compute, reference)
    assert not group.judgement.accepted
    (result,) = group.validators
    assert result.text == "judged another commitment of the miner"
    assert not result.contradicts
