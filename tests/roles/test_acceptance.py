"""From verdicts to the learner's inbox: verified groups, decisions that survive crashes, and the newest weights."""

from typing import Any

import numpy as np
import pytest
import torch
import trio

from grailnode.store.decorators.retrying import WaitingState
from grailnode.store.memory import MemoryStore
from protocol import paths
from protocol.encoding import content_digest
from protocol.errors import MalformedError
from protocol.identity.authority import Revision
from protocol.identity.signing import open_announced, sign
from protocol.judging.evidence import NO_COUNTS, count_luck
from protocol.judging.verdict import Judgement
from protocol.rollout.batch import pack_tokens
from roles.ports import NotFoundError
from roles.trainer.spool import (
    COLLECTOR_PROGRESS,
    INBOX,
    INTENTS,
    OUTCOMES,
    PUBLISHED_WEIGHTS,
    newest_weights,
    weights_folder,
)
from roles.trainer.tensor_shards import TensorSource, put_shards, read_tensors, run_inline
from roles.trainer.training_spool import TrainingSpool
from roles.trainer.verified_batch import CollectorProgress, VerifiedBatch, VerifiedGroup, verified_group
from tests.support.attacked_nodes.follower import ROOTS
from tests.support.attacked_nodes.trainer import (
    FIRST,
    SECOND,
    WINDOW,
    AttackedTrainer,
    closing_time,
    collected_windows,
    group_with_other_prompt,
    make_honest_testbed,
    read_outcomes,
)
from tests.support.builders import samples
from tests.support.builders.chains import MINER
from tests.support.builders.samples import rejected, revision
from tests.support.builders.snapshots import put_snapshot
from tests.support.faults.crash_trigger import CrashingStore, CrashTrigger, cancelling
from tests.support.faults.decorated_store import SlowStore, UnreachableStore
from tests.support.measuring import store_listing
from tests.support.simulation.network import Log
from tests.support.simulation.virtual_clock import running


class WrongOnce(SlowStore):
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


def make_testbed_with_full_disk() -> tuple[AttackedTrainer, Any]:
    """Return a testbed whose trainer cannot write its outcome log, and its disk."""
    disk: Any = UnreachableStore(MemoryStore(), OUTCOMES, operations=("put",), seconds=0.0)
    state: Any = WaitingState(disk, Log("trainer"))
    return AttackedTrainer(state=state), disk


def revise(testbed: AttackedTrainer, **changes: Any) -> None:
    """Change the authority that the trainer obeys from now on."""
    revisions = testbed.node.revisions
    authority = revisions.current.model_copy(update=changes)
    record = revision(revisions.number + 1, revisions.digest, run=testbed.run_id, authority=authority)
    revisions.adopt(open_announced(sign(record, ROOTS[0]), Revision))


@pytest.mark.parametrize("killed", [False, True], ids=["full disk", "killed"])
async def test_an_interruption_between_inbox_and_outcome_log_loses_no_group(killed: bool) -> None:
    testbed, disk = make_testbed_with_full_disk()
    await testbed.deliver()
    verdicts = [testbed.verdict(FIRST, testbed.judgement(0)), testbed.verdict(SECOND)]
    summaries = [(key, testbed.summary(key, v), v) for key, v in zip((FIRST, SECOND), verdicts, strict=True)]
    for key, summary, _ in summaries:
        await testbed.seal(key, summary)
    await testbed.reveal(*summaries[0])
    spool, received = TrainingSpool(testbed.node, max_staleness=16), list[bytes]()

    async def receive() -> None:
        while True:
            received.extend(group.digest for group in await spool.groups())

    middle = testbed.run.opening_time(WINDOW) + 2.0

    async def go_on() -> None:
        await testbed.clock.sleep_until(middle)
        await testbed.reveal(*summaries[1])
        await trio.sleep(0.0 if killed else 1.0)
        disk.is_away = False

    async with running(receive) as nursery:
        if killed:
            await testbed.collect(middle)
            await go_on()
        else:
            nursery.start_soon(go_on)
        await testbed.collect()
        await trio.sleep(1.0)
    assert await testbed.outcomes() == {"used"}
    both_groups = {content_digest(group.to_frame()) for group in testbed.groups}
    assert set(await testbed.group_outcomes()) == both_groups
    assert sorted(received) == sorted(both_groups)


async def test_groups_handed_over_before_a_crash_are_used_whatever_storage_shows_afterwards():
    testbed, disk = make_testbed_with_full_disk()
    await testbed.deliver()
    await testbed.publish_records(FIRST)
    await testbed.seal(SECOND, testbed.summary(SECOND))
    await testbed.collect(testbed.run.opening_time(WINDOW) + 2.0)
    assert await testbed.group_outcomes() == {}
    disk.is_away = False
    await testbed.deliver([group_with_other_prompt(testbed), testbed.groups[1]])
    await testbed.collect()
    assert await testbed.outcomes() == {"used"}


async def test_after_a_crash_before_its_intent_is_deleted_a_batch_is_not_handed_over_again() -> None:
    trigger = CrashTrigger(lambda name, path: name == "delete" and path.startswith(INTENTS), 0, after=False)
    state: Any = CrashingStore(MemoryStore(), trigger)
    testbed = AttackedTrainer(state=state)
    await testbed.deliver()
    await testbed.publish_records(FIRST)
    with trio.CancelScope() as scope:
        trigger.crash = cancelling(scope)
        await testbed.collect()
    assert trigger.has_fired
    assert await testbed.outcomes() == {"used"}
    for path in await store_listing.paths(state, INBOX):  # the learner takes it
        await state.delete(path)
    await testbed.collect()
    assert await store_listing.paths(state, INBOX) == await store_listing.paths(state, INTENTS) == []
    assert len(testbed.log.named("collected")) == 1


@pytest.mark.parametrize("how", ["hidden", "bent"])
@pytest.mark.parametrize("kind", ["commitments", "batches"])
async def test_storage_that_shows_a_wrong_object_once_costs_no_window(kind: str, how: str) -> None:
    testbed = await make_honest_testbed(1, SECOND, store=WrongOnce(paths.kind_prefix(MINER.public, kind), how))
    await testbed.collect()
    assert await testbed.outcomes() == {"used"}


async def test_a_batch_that_is_too_large_is_logged_and_does_not_end_the_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(VerifiedBatch, "max_bytes", 100)
    testbed = await make_honest_testbed(1, FIRST)
    await testbed.collect()
    assert await testbed.outcomes() == {"too-large"}


async def test_a_window_whose_storage_does_not_answer_is_collected_after_a_restart():
    testbed, later = await make_honest_testbed(), WINDOW + 4
    testbed.store.silent_prefixes = (paths.kind_prefix(MINER.public, "batches"),)
    timeout = testbed.run.beacon.round_time(testbed.run.schedule.verdict(WINDOW) + testbed.run.schedule.verdict_rounds)
    restart = testbed.run.opening_time(later) + 1.0
    assert closing_time(testbed) < restart < timeout - 1.0

    async def judge_a_later_window() -> None:
        await testbed.clock.sleep_until(testbed.run.opening_time(later) + 0.3)
        for validator in (FIRST, SECOND):
            await testbed.publish_records(validator, rejected(), window=later)

    async with running(judge_a_later_window):
        await testbed.collect(restart)
    assert await collected_windows(testbed) == {later}
    testbed.store.silent_prefixes = ()
    await testbed.collect(timeout + 10.0)
    records = [record for record in await read_outcomes(testbed.state) if record.window == WINDOW]
    assert {item.status for record in records for item in record.outcomes} == {"used"}


async def test_a_validator_that_is_revoked_before_it_reveals_decides_nothing():
    testbed = AttackedTrainer()
    await testbed.deliver()
    verdict = testbed.verdict(FIRST)
    summary = testbed.summary(FIRST, verdict)
    await testbed.seal(FIRST, summary)

    async def revoke() -> None:
        await testbed.clock.sleep_until(testbed.run.opening_time(WINDOW) + 1.0)
        revise(testbed, validators=(SECOND.public,))
        await testbed.reveal(FIRST, summary, verdict)

    async with running(revoke):
        await testbed.collect()
    assert await testbed.outcomes() == set()


async def test_a_raised_quorum_holds_for_groups_that_are_not_decided_yet():
    testbed = AttackedTrainer()
    await testbed.deliver()
    first, second = testbed.verdict(FIRST, testbed.judgement(0)), testbed.verdict(SECOND)
    await testbed.seal(FIRST, testbed.summary(FIRST, first))
    await testbed.seal(SECOND, testbed.summary(SECOND, second))

    async def raise_quorum() -> None:
        await testbed.clock.sleep_until(testbed.run.opening_time(WINDOW) + 1.0)
        await testbed.reveal(FIRST, testbed.summary(FIRST, first), first)
        await trio.sleep(1.0)
        revise(testbed, quorum=2)
        await testbed.reveal(SECOND, testbed.summary(SECOND, second), second)

    async with running(raise_quorum):
        await testbed.collect()
    digests = [content_digest(group.to_frame()) for group in testbed.groups]
    assert await testbed.group_outcomes() == {digests[0]: "used", digests[1]: "no-quorum"}
    await testbed.outcomes()


async def test_after_a_long_absence_slow_verdicts_are_waited_for():
    testbed = await make_honest_testbed(1, FIRST, store=SlowStore(5.0, kind="/verdicts/"))
    await testbed.state.put(COLLECTOR_PROGRESS, CollectorProgress(oldest_window=WINDOW).to_bytes())
    schedule = testbed.run.schedule
    await testbed.clock.sleep_until(
        testbed.run.beacon.round_time(schedule.verdict(WINDOW) + 3 * schedule.verdict_rounds)
    )
    await testbed.collect(testbed.clock.now() + 60.0)
    assert await testbed.outcomes() == {"used"}


# Verified groups: whose values count where validators' judgements differ, and that their fields agree


GROUP = samples.group()  # claims 0.5 and 1.0
LOGPROBS = np.full(5, -0.5, dtype="<f4").tobytes()


def accepting(*rewards: int) -> Judgement:
    return samples.judgement(rewards=rewards, logprobs=LOGPROBS)


def cut(rewards: tuple[int, int], ends: tuple[int, int]) -> Judgement:
    """An accepting judgement of rollouts that end early, with the luck that follows from it."""
    judgement, claims = accepting(*rewards), [rollout.reward for rollout in GROUP.rollouts]
    counts = judgement.counts.model_copy(update={"luck": count_luck(zip(claims, rewards, strict=True))})
    return judgement.model_copy(update={"counts": counts, "ends": ends})


def verified(*judgements: Judgement, exact: bool = True) -> VerifiedGroup:
    group = verified_group(GROUP, samples.digest("frame"), judgements, exact=exact)
    assert group is not None
    return group


FALSE_JUDGEMENTS = {
    "other rewards": accepting(500_000, 999_999),
    "ends without other rewards": cut((500_000, 0), (3, 3)),
    "another reward than the one that is cut": cut((0, 1_000_000), (3, 1)),
    "the claimed rewards, cut": cut((500_000, 1_000_000), (3, 1)),
    # so a validator that turns rewards round also counts it against the miner, whose evidence everybody adds up
    "the luck of other rewards": cut((500_000, 0), (3, 1)).model_copy(update={"counts": accepting(500_000, 0).counts}),
}


@pytest.mark.parametrize("judgement", FALSE_JUDGEMENTS.values(), ids=FALSE_JUDGEMENTS)
def test_a_judgement_that_contradicts_itself_does_not_count_if_rewards_are_exact(judgement: Judgement) -> None:
    assert verified_group(GROUP, samples.digest("frame"), (judgement,), exact=True) is None
    assert verified(judgement, accepting(500_000, 1_000_000)).rewards == (0.5, 1.0)


def test_a_rollout_counts_up_to_the_first_token_by_which_its_reward_differs_from_a_validators() -> None:
    """Its reward is the mean of those that the validators' own tokens lead to, and at most 1 beyond its claim."""
    whole, second, both = accepting(500_000, 1_000_000), cut((500_000, 0), (3, 1)), cut((10**9, 200_000), (0, 1))
    for judgements, ends, rewards in (
        ((second,), (3, 1), (0.5, 0.0)),
        ((whole, second), (3, 1), (0.5, 0.5)),
        ((both,), (0, 1), (1.5, 0.2)),
        ((second, second, both), (3, 1), (0.5, 0.0)),
        ((whole, whole, both), (3, 2), (0.5, 1.0)),
    ):
        group = verified(*judgements)
        assert group.rewards == rewards
        whole_rollouts = [rollout.tokens for rollout in GROUP.rollouts]
        assert group.completion_tokens == tuple(own[:end] for own, end in zip(whole_rollouts, ends, strict=True))
        assert [len(values) for values in group.completion_logprobs] == list(ends)


def test_an_episode_counts_up_to_the_turn_in_which_it_ends_early() -> None:
    rollout = samples.episode_rollout()  # a turn of two tokens, a reply, and a turn of one
    group, first = samples.group(1, rollouts=(rollout,)), rollout.turns[0]
    for end, turns in {0: ((0, b""),), 1: ((1, b""),), 2: ((2, b""),)}.items():
        judgement = samples.judgement(tokens=3, counts=NO_COUNTS, rewards=(0,), ends=(end,), logprobs=LOGPROBS[:12])
        result = verified_group(group, samples.digest("frame"), (judgement,), exact=False)
        assert result is not None
        assert (result.turns, result.completion_tokens) == ((turns,), (rollout.tokens[:end],))
        assert [sum(drawn) for _, drawn in result.sequences] == [end]
    two = samples.group(1, rollouts=(rollout, rollout))
    judgement = samples.judgement(tokens=6, counts=NO_COUNTS, rewards=(0, 0), ends=(3, 2), logprobs=LOGPROBS[:4] * 6)
    result = verified_group(two, samples.digest("frame"), (judgement,), exact=False)
    assert result is not None
    assert result.turns == (rollout.turns, ((first[0], b""),))


def test_the_median_of_the_validators_rewards_counts_if_rewards_are_not_exact() -> None:
    judgements = (accepting(100_000, 900_000), accepting(200_000, 800_000), accepting(200_000, 1_000_000))
    assert verified(*judgements, exact=False).rewards == (0.2, 0.9)


VERIFIED_GROUP = VerifiedGroup(
    digest=samples.digest("frame"),
    version=3,
    prompt=pack_tokens((5, 6)),
    completions=(pack_tokens((7, 1)), pack_tokens((8, 9, 1))),
    logprobs=np.arange(-5, 0, dtype="<f4").tobytes(),
    rewards=(0.5, 1.0),
)


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"rewards": (1.0,)}, "one reward for each completion"),
        ({"rewards": (), "completions": (), "logprobs": b""}, "one reward for each completion"),
        ({"prompt": b"12345"}, "whole 32-bit words"),
        ({"logprobs": b"1234"}, "one log-probability for each token"),
    ],
)
def test_fields_that_contradict_each_other_are_refused(changes: dict[str, object], error: str) -> None:
    data = VERIFIED_GROUP.model_copy(update=changes).to_bytes()
    with pytest.raises(MalformedError, match=error):
        VerifiedGroup.from_bytes(data)


# The weights from which training continues are the newest, wherever they lie (roles/trainer/spool.py)


@pytest.mark.parametrize(("queued", "published"), [(None, None), (1, None), (None, 2), (1, 2), (2, 2), (3, 2)])
async def test_the_newest_of_outbox_and_published_weights(queued: int | None, published: int | None) -> None:
    state = MemoryStore()
    if queued is not None:
        await put_snapshot(state, queued, {"w": torch.full((4,), float(queued))})
    if published is not None:
        source = TensorSource.of({"w": torch.full((4,), float(published))})
        count = await put_shards(state, weights_folder(published), source, run_inline)
        await state.put(f"{PUBLISHED_WEIGHTS}{published:010d}", str(count).encode())
    newest = await newest_weights(state)
    versions = [version for version in (queued, published) if version is not None]
    if not versions:
        assert newest is None
        return
    assert newest is not None
    weights = await read_tensors(state, weights_folder(newest[0]), newest[1])
    assert (newest[0], weights["w"][0].item()) == (max(versions), max(versions))
