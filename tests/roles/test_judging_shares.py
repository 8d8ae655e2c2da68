"""How a validator shares a short window among miners and computes rewards, and what a miner promises for its window."""

import threading
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from grailnode.engine.policy import PACKAGED_POLICY, Policy
from grailnode.store.memory import MemoryStore
from protocol.encoding import REWARD_UNIT, content_digest
from protocol.environments import Environment, Problem
from protocol.environments.addition import Addition
from protocol.environments.base import SandboxError
from protocol.identity.signing import Signed
from protocol.judging.evidence import NO_COUNTS
from protocol.judging.ledger import GROUP, LedgerRow
from protocol.judging.verdict import Verdict
from protocol.rollout.batch import assemble
from roles.miner.miner import ChunkTimes
from roles.policy.assignment import Task
from roles.validator.judge import Slots
from roles.validator.judging_scheduler import SHARES, CaseQueue, JudgingScheduler, Reputation, Slot
from roles.validator.ledger_state import Ledger
from roles.validator.window_cases import Case, ServingVersions
from tests.support.attacked_nodes.trainer import WINDOW
from tests.support.attacked_nodes.validator import AttackedValidator
from tests.support.builders import samples

VERSIONS = ServingVersions(0, 0)


class Chain:
    """A follower that has version 0."""

    def version_for(self, _: int) -> int:
        return 0

    async def rebuild(self, _: int) -> Any:
        return type("Weights", (), {"version": 0, "digest": bytes(32), "weights": {}})()


class IdleEngine:
    """An engine that serves version 0 at once."""

    version = None

    async def stage(self, *_: Any) -> None:
        """Implements Engine.stage."""

    async def commit(self) -> None:
        """Implements Engine.commit."""


class BusyAuditor:
    """Takes seconds at the engine for each step of a case, then some for rewards, and accepts it."""

    def __init__(self, seconds: float, steps: int, reward_seconds: float) -> None:
        self._seconds = seconds
        self._steps = steps
        self._reward_seconds = reward_seconds

    async def audit(self, case: Case, *arguments: Any, slots: Slots, **others: Any) -> tuple[Verdict, dict[int, bytes]]:
        for _ in range(self._steps):
            context: AbstractAsyncContextManager[object] = slots.engine(0)
            async with context:
                await trio.sleep(self._seconds)
            context = slots.rewards(0)
            async with context:
                await trio.sleep(self._reward_seconds)
        return samples.verdict().model_copy(update={"miner": case.miner}), {}


def miners(reputation: Reputation, count: int) -> list[bytes]:
    return [content_digest(bytes([reputation, number % 256, number // 256])) for number in range(count)]


async def judged(
    crowd: dict[Reputation, int], seconds: float, steps: int = 1, reward_seconds: float = 0.0
) -> tuple[dict[Reputation, int], dict[str, Any]]:
    """Let a validator judge a window's crowd, a second for each case.

    Returns:
        How many of each reputation were judged, and the event that says so.
    """
    testbed = AttackedValidator()
    node = testbed.validator
    keys = {reputation: miners(reputation, count) for reputation, count in crowd.items()}
    scoring = node.run.scoring.model_copy(update={"deposit": 50 * GROUP})
    ledger = await Ledger.open(MemoryStore(), node.run.model_copy(update={"scoring": scoring}))
    await record_histories(ledger, keys)
    await testbed.clock.sleep_until(node.run.beacon.round_time(node.run.schedule.audit(WINDOW)))
    commitment = assemble(testbed.groups, "torch-float32")[1]
    cases = [
        Case(Signed(commitment.model_copy(update={"miner": miner}), (miner,), bytes(32), b""), 2, 0.0)
        for group in keys.values()
        for miner in group
    ]
    chain: Any = Chain()
    engine: Any = IdleEngine()
    auditor: Any = BusyAuditor(1.0, steps, reward_seconds)
    queue = CaseQueue(node, ledger, bytes(32))
    queue.has_time = lambda *_: True  # type: ignore[method-assign] # the window's own length is tested elsewhere
    scheduler = JudgingScheduler(node, chain, engine, auditor, queue, WINDOW, VERSIONS)
    verdicts = await scheduler.judge(cases, seconds)
    judged_keys = {verdict.miner for verdict, _ in verdicts}
    (event,) = testbed.validator.telemetry.named("judged")  # type: ignore[attr-defined]
    return {reputation: len(judged_keys & set(group)) for reputation, group in keys.items()}, event


async def record_histories(ledger: Ledger, keys: Mapping[Reputation, Sequence[bytes]]) -> None:
    """Write a window into the ledger that gives every miner its reputation."""
    scored = set(keys.get(Reputation.EARNING, ()))
    judged_miners = [*keys.get(Reputation.EARNING, ()), *keys.get(Reputation.KNOWN, ())]
    rows = [row(miner, accepted=100 if miner in scored else 1) for miner in judged_miners]
    rows += [row(miner, rejected=1) for miner in keys.get(Reputation.REJECTED, ())]
    await ledger.record(samples.summary(*sorted(rows, key=lambda item: item.miner), window=0, previous=b""))


def row(miner: bytes, *, accepted: int = 0, rejected: int = 0) -> LedgerRow:
    counts: dict[str, Any] = dict.fromkeys(("pledged", "submitted", "dealt", "audited"), accepted + rejected)
    result: LedgerRow = samples.row(**counts, counts=NO_COUNTS, accepted=accepted, rejected=rejected)
    return result.model_copy(update={"miner": miner})


async def test_cases_that_were_begun_are_completed_before_others_are_begun():
    counts, _ = await judged({Reputation.STRANGER: 60}, 10.5, steps=2)
    assert counts[Reputation.STRANGER] == 4  # and of two more, the first step


async def test_continuations_come_behind_prefills_and_those_of_who_misses_most_come_last() -> None:
    """Misses at near ties cost a miner nothing, and a validator generates again what is behind them."""
    slot, order = Slot(lambda _: 0.0), list[str]()

    async def use(name: str, place: int, load: int) -> None:
        async with slot.reserve(Reputation.EARNING, 0, place, load):
            order.append(name)
            await trio.sleep(1.0)

    async with trio.open_nursery() as nursery:
        for place, (name, load) in enumerate(
            {"begun": 0, "flood": 900_000, "continuation": 10_000, "later": 10_000, "prefill": 0}.items()
        ):
            nursery.start_soon(use, name, place, load)
            await trio.sleep(0.1)
    assert order == ["begun", "prefill", "continuation", "later", "flood"]


async def test_the_engine_is_free_while_the_rewards_of_one_case_at_a_time_are_computed():
    counts, _ = await judged({Reputation.EARNING: 12}, 11.5, reward_seconds=1.0)
    assert counts[Reputation.EARNING] == 10
    counts, _ = await judged({Reputation.EARNING: 12}, 21.5, reward_seconds=2.0)
    assert counts[Reputation.EARNING] == 10


async def test_miners_that_fill_the_window_leave_newcomers_their_share():
    counts, event = await judged({Reputation.EARNING: 60, Reputation.KNOWN: 60, Reputation.STRANGER: 60}, 50.5)
    assert counts[Reputation.EARNING] >= 0.6 * 50
    assert counts[Reputation.KNOWN] >= 0.2 * 50
    assert counts[Reputation.STRANGER] >= 0.1 * 50
    left = {reputation: 60 - count for reputation, count in counts.items()}
    assert (event["left_earning"], event["left_known"], event["left_stranger"]) == tuple(left.values())


@pytest.mark.parametrize("crowd", [Reputation.KNOWN, Reputation.STRANGER, Reputation.REJECTED])
async def test_a_crowd_takes_no_more_than_its_share_from_miners_that_earn(crowd: Reputation) -> None:
    counts, event = await judged({Reputation.EARNING: 20, crowd: 500}, 40.5)
    assert counts[Reputation.EARNING] == 20
    assert counts[crowd] == 20
    assert event["cases"] == 40
    # Those that earn had to wait for no more than the crowd's share.
    counts, _ = await judged({Reputation.EARNING: 20, crowd: 500}, 20.5 / (1 - 2 * SHARES[crowd]))
    assert counts[Reputation.EARNING] == 20


async def test_time_that_nobody_else_uses_is_the_newcomers():
    counts, event = await judged({Reputation.EARNING: 1, Reputation.STRANGER: 30}, 31.5)
    assert counts == {Reputation.EARNING: 1, Reputation.STRANGER: 30}
    assert event["left_stranger"] == 0


# Rewards of a task: they are computed off the event loop, a bounded number at a time


class BlockingAddition(Addition):
    """Addition whose rewards wait for the event loop, and that counts how many are computed at a time."""

    def __init__(self) -> None:
        self.running_rewards = self.max_running_rewards = 0
        self.lock = threading.Lock()
        self.event_loop_ran = threading.Event()

    def reward(self, problem: Problem, completion: str) -> float:
        with self.lock:
            self.running_rewards += 1
            self.max_running_rewards = max(self.max_running_rewards, self.running_rewards)
        assert self.event_loop_ran.wait(20), "the event loop is blocked while a reward is computed"
        with self.lock:
            self.running_rewards -= 1
        return super().reward(problem, completion)


class BrokenAddition(Addition):
    """Addition in a broken sandbox."""

    def reward(self, problem: Problem, completion: str) -> float:
        raise SandboxError("the sandbox did not start")


def task(environment: Environment, at_once: int = 1) -> Task:
    policy = Policy.load(PACKAGED_POLICY)
    run = samples.run_manifest()
    return Task(samples.RUN_ID, run, environment, policy.tokenizer, policy.vocabulary, at_once=at_once)


PROBLEM = Problem("57+68=", "125")
TEXTS = ("125", "15", "126", "125", "", "1", "125")
REWARDS = (REWARD_UNIT, 0, 0, REWARD_UNIT, 0, 0, REWARD_UNIT)


@pytest.mark.parametrize("at_once", [1, 3])
async def test_rewards_are_in_order_and_do_not_block_the_event_loop(at_once: int) -> None:
    environment = BlockingAddition()
    addition_task = task(environment, at_once)
    stop = addition_task.run.sampling.stops[0]
    completions = [(*addition_task.tokenizer.encode(text), stop) for text in TEXTS]

    async def run_event_loop() -> None:
        while environment.running_rewards < at_once:
            await trio.sleep(0.001)
        environment.event_loop_ran.set()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(run_event_loop)
        assert await addition_task.rewards(PROBLEM, completions) == REWARDS
    assert environment.max_running_rewards == at_once


@pytest.mark.parametrize("at_once", [1, 3])
def test_no_completions_have_no_rewards_and_a_broken_sandbox_is_an_error(at_once: int) -> None:
    assert trio.run(task(Addition(), at_once).rewards, PROBLEM, []) == ()
    with pytest.raises(SandboxError, match="did not start"):
        trio.run(task(BrokenAddition(), at_once).rewards, PROBLEM, [(3,), (4,)])


# What a miner promises by the times of its chunks


SIZE, MOST, BUDGET = 4, 16, 20.0


def promise(times: ChunkTimes) -> int:
    return times.affordable(BUDGET, SIZE, MOST)


@pytest.mark.parametrize("slow", [30.0, 100.0])
def test_a_machine_for_which_one_group_takes_as_long_as_a_chunk_soon_promises_whole_chunks_again(slow: float):
    times = ChunkTimes()
    times.add(SIZE, slow)  # other programs took the processor
    promises = []
    for _ in range(8):
        promises.append(promise(times))
        times.add(min(promises[-1], SIZE), 9.0 + 0.1 * promises[-1])
    assert promises[0] < SIZE
    assert promises[-1] == 2 * SIZE


@given(st.floats(0.0, 10.0), st.floats(0.1, 10.0), st.lists(st.integers(1, SIZE), max_size=8))
def test_what_is_promised_fits_on_a_machine_that_stays_as_fast(begin: float, group: float, sizes: list[int]):
    times = ChunkTimes()
    for size in (SIZE, *sizes):
        times.add(size, begin + group * size)
    groups = promise(times)
    chunks, rest = divmod(groups, SIZE)
    needed = chunks * (begin + group * SIZE) + (begin + group * rest if rest else 0.0)
    assert groups == 1 or needed <= BUDGET


def test_a_machine_that_has_become_slower_forgets_how_fast_it_was():
    times = ChunkTimes()
    assert promise(times) == MOST  # nothing was measured
    times.add(SIZE, 8.0)
    assert promise(times) == 2 * SIZE
    times.add(1, 15.0)
    assert times.of(SIZE) == 15.0
    assert promise(times) == SIZE
