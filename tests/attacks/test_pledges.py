"""Miners that lie about their pledges and commitments to a validator (roles/validator/window_cases.py), or sign two
commitments for one window; and storage that swaps them.
"""

from collections.abc import Callable
from typing import Any

import pytest
import trio

from grailnode.observe.recheck import GroupReference, recheck
from grailnode.store.memory import MemoryStore
from protocol import limits, paths
from protocol.encoding import REWARD_UNIT
from protocol.errors import ProtocolError
from protocol.identity.signing import SigningKey, open_signed, sign
from protocol.rollout.batch import Commitment, Group, assemble, open_group
from roles.validator.window_cases import WindowCases, read_window_cases
from tests.support.attacked_nodes.trainer import STRANGER, WINDOW, AttackedTrainer, read_outcomes, reveal_in_turn
from tests.support.attacked_nodes.validator import HOUR_MS, PLEDGE, AttackedValidator
from tests.support.builders.chains import MINER
from tests.support.builders.recipes import demo_rules
from tests.support.simulation.network import Network, key
from tests.support.simulation.network_runs import run_nodes

# Pledges


@pytest.mark.parametrize(
    ("announcement", "groups"),
    [({}, 2), ({"groups": limits.MAX_GROUPS}, 16), ({"signer": STRANGER}, 0), ({"run": bytes(32)}, 0)],
    ids=["honest", "more than a miner may deliver", "signed by a stranger", "of another run"],
)
async def test_a_pledge_counts_if_it_is_the_miners_own(announcement: dict[str, Any], groups: int) -> None:
    testbed = AttackedValidator()
    await testbed.announce(**announcement)
    assert await testbed.pledged_groups() == ({MINER.public: groups} if groups else {})


async def test_duplicated_void_pledge():
    testbed = AttackedValidator()
    await testbed.announce()
    old = await testbed.store.get(paths.participant(MINER.public), 1 << 20)
    await testbed.pledges.read()
    testbed.pledges.void(MINER.public)
    assert await testbed.pledged_groups() == {}
    await testbed.store.put(paths.participant(MINER.public), old)
    assert await testbed.pledged_groups() == {}
    await testbed.announce(expires_ms=int(testbed.clock.now() * 1000) + 2 * HOUR_MS)
    assert await testbed.pledged_groups() == {MINER.public: 2}


async def test_forged_pledge_in_place_of_a_cached_one():
    testbed = AttackedValidator()
    await testbed.announce()
    assert await testbed.pledged_groups() == await testbed.pledged_groups() == {MINER.public: 2}
    await testbed.announce(groups=3)
    assert await testbed.pledged_groups() == {MINER.public: 3}
    await testbed.announce(signer=STRANGER, groups=4)
    assert await testbed.pledged_groups() == {}


async def test_duplicated_cached_pledge_expires():
    testbed = AttackedValidator()
    await testbed.announce()
    assert await testbed.pledged_groups() == {MINER.public: 2}
    await trio.sleep(HOUR_MS / 1000 + 1.0)
    assert await testbed.pledged_groups() == {}


# Commitments


def signed_commitment(signer: SigningKey = MINER, **changes: Any) -> Callable[[AttackedValidator], bytes]:
    """Return a function that signs the commitment to the miner's groups with changes."""
    return lambda testbed: sign(assemble(testbed.groups, "torch-float32")[1].model_copy(update=changes), signer)


def commitment_of_a_neighbour(testbed: AttackedValidator) -> bytes:
    return sign(assemble([testbed.group(0, miner=STRANGER.public)], "torch-float32")[1], STRANGER)


FALSE_COMMITMENTS: dict[str, Callable[[AttackedValidator], bytes]] = {
    "forged: of another window": signed_commitment(window=WINDOW + 1),
    "forged: of another run": signed_commitment(run=bytes(32)),
    "forged: of another miner": signed_commitment(miner=STRANGER.public),
    "forged: of no groups": signed_commitment(groups=()),
    "forged: signed by a stranger": signed_commitment(STRANGER),
    "oversized": lambda testbed: bytes(limits.MAX_COMMITMENT_BYTES),
    "duplicated: of a neighbour": commitment_of_a_neighbour,
}


@pytest.mark.parametrize("commitment", FALSE_COMMITMENTS.values(), ids=FALSE_COMMITMENTS)
async def test_a_false_commitment_counts_as_undelivered(commitment: Callable[[AttackedValidator], bytes]) -> None:
    testbed = AttackedValidator()
    await testbed.store.put(paths.commitment(MINER.public, WINDOW), commitment(testbed))
    cases = await testbed.read_cases()
    assert (cases.cases, cases.undelivered) == ((), {MINER.public: PLEDGE})


@pytest.mark.parametrize("answer", [None, b"\xc1", bytes(limits.MAX_COMMITMENT_BYTES)], ids=["none", "bytes", "size"])
async def test_one_false_answer_of_storage_does_not_void_a_pledge(answer: bytes | None) -> None:
    testbed = AttackedValidator()
    commitment = await testbed.commit()
    path = paths.commitment(MINER.public, WINDOW)
    truth = sign(commitment, MINER)
    if answer is None:
        await testbed.store.delete(path)
    else:
        await testbed.store.put(path, answer)
    read = testbed.store.get

    async def get(path: str, max_bytes: int, *, offset: int = 0, size: int | None = None) -> bytes:
        try:
            return await read(path, max_bytes, offset=offset, size=size)
        finally:  # the next answer is true
            await testbed.store.put(path, truth)

    testbed.store.get = get  # type: ignore[method-assign]
    cases = await testbed.read_cases()
    assert (len(cases.cases), cases.undelivered) == (1, {})


async def test_oversized_delivery_counts_up_to_the_pledge():
    testbed = AttackedValidator()
    testbed.groups = [testbed.group(index) for index in range(5)]
    await testbed.commit()
    (case,) = (await testbed.read_cases()).cases
    assert (case.pledged_groups, case.submitted_groups) == (2, 2)


async def test_withheld_commitment_counts_as_undelivered_and_an_unreadable_one_does_not():
    testbed = AttackedValidator()
    assert (await testbed.read_cases()).undelivered == {MINER.public: PLEDGE}
    await testbed.commit()
    testbed.store.silent_prefixes = (MINER.public.hex(),)
    cases = await testbed.read_cases()
    assert (cases.cases, cases.undelivered) == ((), {})


async def read_cases_of_two(testbed: AttackedValidator) -> WindowCases:
    """Return the cases, read from the deadline on, if the miner and a stranger who has delivered have pledged."""
    await testbed.store.put(paths.commitment(STRANGER.public, WINDOW), commitment_of_a_neighbour(testbed))
    await testbed.commit()
    await testbed.clock.sleep_until(testbed.run.deadline_time(WINDOW))
    return await read_window_cases(testbed.validator, WINDOW, dict.fromkeys((MINER.public, STRANGER.public), PLEDGE))


async def test_withheld_answers_while_other_storage_answers_count_as_undelivered():
    testbed = AttackedValidator()
    testbed.store.silent_prefixes = (MINER.public.hex(),)
    cases = await read_cases_of_two(testbed)
    assert [case.miner for case in cases.cases] == [STRANGER.public]
    assert cases.undelivered == {MINER.public: PLEDGE}
    draw_time = testbed.run.beacon.round_time(testbed.run.schedule.audit(WINDOW))
    assert testbed.clock.now() < draw_time


@pytest.mark.parametrize("prefixes", [("",), ("", "back")], ids=["all storage", "all storage for a while"])
async def test_nobody_is_blamed_for_the_validators_own_outage(prefixes: tuple[str, ...]) -> None:
    testbed = AttackedValidator()

    async def fail() -> None:
        await testbed.clock.sleep_until(testbed.run.deadline_time(WINDOW) - 0.001)
        testbed.store.silent_prefixes = ("",)
        if "back" in prefixes:
            await trio.sleep(0.3 * (draw_time - testbed.run.deadline_time(WINDOW)))
            testbed.store.silent_prefixes = ()

    draw_time = testbed.run.beacon.round_time(testbed.run.schedule.audit(WINDOW))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(fail)
        cases = await read_cases_of_two(testbed)
    assert cases.undelivered == {}
    assert len(cases.cases) == (2 if "back" in prefixes else 0)


# Miners that sign two commitments for one window, and storage that swaps them


def disguised(group: Group) -> Group:
    """Return the same rollouts with another digest: one bit of a sketch differs."""
    first, *others = group.rollouts
    first = first.model_copy(update={"sketch": bytes([first.sketch[0] ^ 1]) + first.sketch[1:]})
    return group.model_copy(update={"rollouts": (first, *others)})


async def test_the_same_rollouts_under_two_commitments_are_trained_on_once():
    groups = AttackedTrainer().groups
    testbed = await reveal_in_turn((groups, None), ([disguised(group) for group in groups], None))
    work = [(group.prompt, group.completions) for batch in await testbed.inbox_batches() for group in batch.groups]
    assert len(set(work)) == len(work) == len(groups)


async def test_a_group_of_two_commitments_is_used_once():
    groups = AttackedTrainer().groups
    testbed = await reveal_in_turn((groups[:1], None), (groups, None))
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


async def test_swapped_commitments_of_a_miner_or_verdicts_are_refused_and_accuse_no_validator() -> None:
    network = await judged_network()
    observer, miner, validator = network.node("observer"), key("miner-1").public, key("validator-0").public
    task = network.task(observer)
    for records in (
        [paths.commitment(miner, window) for window in WINDOWS],
        [paths.verdict(validator, window, miner) for window in WINDOWS],
    ):
        await swap(network.store, *records)
        for window in WINDOWS:
            with pytest.raises(ProtocolError, match="belongs at"):
                await recheck(observer, task, network.compute, GroupReference(miner.hex(), window, 0))
        await swap(network.store, *records)


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
