"""The real validator refuses every adversary in its first audited window, for a reason that fits."""

import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
import trio

from grailnode.store.memory import MemoryStore
from protocol.encoding import content_digest
from protocol.judging.evidence import NO_EVIDENCE, advance, count_values, exceeded, trial_values, whole_margins
from protocol.judging.verdict import Reason
from protocol.proof import Arithmetic
from protocol.rollout import sampling
from protocol.rollout.filters import Filters
from protocol.rollout.sampling import NOISE_UNIT, SamplingParams
from roles.ports import Generation, Request
from roles.validator.judge import Judge, Slots
from tests.support.adversaries.harness import TrialHarness, TrialOutcome, alter
from tests.support.adversaries.miners import ADVERSARIES, Adversary
from tests.support.builders.proofs import LENIENT, packaged_thresholds, proof_of, with_thresholds
from tests.support.builders.samples import seeds, table
from tests.support.pytest_options.few_daily import few_daily

WINDOWS = range(2)
DETECTABLE = [adversary for adversary in ADVERSARIES.values() if not adversary.within_noise]
WITHIN_NOISE = [adversary for adversary in ADVERSARIES.values() if adversary.within_noise]


def trials(harness: TrialHarness, adversary: Adversary, windows: range = WINDOWS) -> list[TrialOutcome]:
    async def run() -> list[TrialOutcome]:
        return [await harness.trial(adversary.producer(harness), window) for window in windows]

    return trio.run(run)


def test_honest_work_is_accepted(harness: TrialHarness) -> None:
    async def run() -> list[TrialOutcome]:
        return [await harness.honest_trial(harness.miner, window) for window in WINDOWS]

    for outcome in trio.run(run):
        assert not outcome.reasons
        assert outcome.accepted == harness.groups


@pytest.mark.parametrize("adversary", DETECTABLE, ids=lambda adversary: adversary.name)
def test_an_adversary_is_refused_in_every_window(harness: TrialHarness, adversary: Adversary) -> None:
    for outcome in trials(harness, adversary):
        assert adversary.explains(outcome.reasons)


@pytest.mark.parametrize("adversary", WITHIN_NOISE, ids=lambda adversary: adversary.name)
def test_a_change_within_honest_noise_is_refused_for_no_other_reason(
    harness: TrialHarness, adversary: Adversary
) -> None:
    for outcome in trials(harness, adversary):
        assert not outcome.reasons or adversary.explains(outcome.reasons)


def lenient(harness: TrialHarness, dtype: torch.dtype) -> TrialHarness:
    """Return a harness in which nothing but luck is refused."""
    name: Arithmetic = "torch-float32" if dtype == torch.float32 else "torch-bfloat16"
    proof = with_thresholds(proof_of(packaged_thresholds(name, name)), **LENIENT)
    return replace(
        harness, proof=proof, dtype=dtype, store=MemoryStore(), accepted_work={}, _engines={}, _group_cache={}
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_near_ties_that_are_decided_for_the_reward_raise_none_and_refuse_a_miner(
    harness: TrialHarness, dtype: torch.dtype
) -> None:
    own = lenient(harness, dtype)
    lucky = ADVERSARIES["lucky near ties"].producer(own)
    outcome, expected = trio.run(own.luck, lucky, 0)
    assert outcome == expected
    assert outcome.counts.luck.steps[0] < outcome.counts.luck.steps[1]
    windows, reasons = trio.run(own.windows_until_refusal, lucky, 200)
    assert 10 < windows < 200
    assert reasons == {Reason.WINDOW.value: 1}


@dataclass
class MeasuredEngine:
    """An engine that notes the most tokens that a call may generate."""

    engine: Any
    largest: int = 0

    def __getattr__(self, name: str) -> object:
        return getattr(self.engine, name)

    async def generate(self, requests: Sequence[Request], params: SamplingParams) -> list[Generation]:
        self.largest = max(self.largest, len(requests) * params.max_tokens)
        generations: list[Generation] = await self.engine.generate(requests, params)
        return generations


@pytest.mark.parametrize("name", ["forced end of sequence", "special tokens", "one edited token in 10% of rollouts"])
def test_no_cheat_with_tokens_changes_the_rewards_that_count(
    harness: TrialHarness, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """A validator continues each rollout from its first miss, some at a time, and gets the rewards of honest work, from
    which the cheat's own differ by its luck.
    """
    monkeypatch.setattr("roles.validator.judge._DECODED_AT_ONCE", 3 * harness.max_tokens)
    own = lenient(harness, torch.float32)
    producer = ADVERSARIES[name].producer(own)
    engine: Any = MeasuredEngine(trio.run(own.serving_engine))
    outcome, expected = trio.run(replace(own, judging_engine=engine).luck, producer, 0)
    assert outcome == expected
    assert outcome.counts.luck.trials
    assert engine.largest <= 3 * harness.max_tokens


FILTERS = [Filters(top_k=5), Filters(top_p=0.9), Filters(min_p=0.05)]
SAMPLING_ADVERSARIES = [
    "own noise",
    "greedy",
    "special tokens",
    "one edited token in 10% of rollouts",
    "draft model of half the depth, full prefill",
]


@pytest.mark.parametrize(("filters", "is_wide"), few_daily(product(FILTERS, (False, True)), 3), ids=str)
def test_a_filter_changes_neither_acceptance_nor_refusal(
    harness: TrialHarness, filters: Filters, is_wide: bool
) -> None:
    wide = table(tuple(round(beyond / NOISE_UNIT) for beyond in (0.1, 7.2)), (1e-4, 1e-15), (2.0, 12.0))
    proof = with_thresholds(harness.proof, margin=wide) if is_wide else harness.proof
    filtered_harness = replace(
        harness, filters=filters, proof=proof, store=MemoryStore(), accepted_work={}, _engines={}, _group_cache={}
    )

    async def run() -> TrialOutcome:
        return await filtered_harness.honest_trial(filtered_harness.miner, 0)

    outcome = trio.run(run)
    assert not outcome.reasons
    assert outcome.accepted == filtered_harness.groups
    for name in SAMPLING_ADVERSARIES:
        for outcome in trials(filtered_harness, ADVERSARIES[name], range(1)):
            assert ADVERSARIES[name].explains(outcome.reasons), name


# Silent truncation: a miner samples among the most likely tokens only, and says nothing of it


_LENGTHS = [60, 60]
_VOCABULARY = 20_000


def _misses(count: int) -> tuple[int, bool]:
    """Return the margin misses of a group whose miner samples among `count` tokens, and whether it is rejected."""
    tokens, row = sum(_LENGTHS), packaged_thresholds()
    logits = torch.randn(tokens, _VOCABULARY, generator=torch.Generator().manual_seed(1)) * 1.5
    words = sampling.seed_words(seeds(2)).repeat_interleave(torch.tensor(_LENGTHS), dim=0)
    positions = torch.cat([torch.arange(length) for length in _LENGTHS])
    choice = sampling.choose(logits, words, positions, 1.0, Filters(top_k=count))
    margins = whole_margins(
        sampling.batch_margins(logits, choice, *sampling.token_places(seeds(2), _LENGTHS), 1.0).numpy(), NOISE_UNIT
    )
    nowhere, exact = np.zeros(tokens, dtype=bool), np.zeros(tokens, np.uint8)
    counts = count_values(trial_values(exact, margins, nowhere, _LENGTHS, nowhere), row)
    return int((margins > 0).sum()), exceeded(advance(NO_EVIDENCE, counts, row), row) == "margin"


def test_a_miner_that_samples_among_the_1024_most_likely_tokens_is_refused() -> None:
    misses, refused = _misses(1024)
    assert misses > 10
    assert refused
    assert _misses(_VOCABULARY) == (0, False)  # among all tokens


# A judge computes in worker threads, and says how much of a case it generates again


WINDOW = 3


async def test_the_event_loop_runs_while_a_judge_computes(harness: TrialHarness) -> None:
    judgements, has_started, may_compute = [], trio.Event(), threading.Event()

    async def run_sync(function: Callable[..., Any], *arguments: Any) -> Any:
        """Return a function's result, computed by a thread, which waits until it may compute."""
        has_started.set()
        return await trio.to_thread.run_sync(lambda: (may_compute.wait(), function(*arguments))[1])

    async def judge() -> None:
        task, engine = replace(harness.task, run_sync=run_sync), await harness.serving_engine()
        judge = Judge(task, engine, WINDOW, harness.randomness(WINDOW))
        groups = await harness.honest_groups(harness.mining_window(WINDOW), [0, 1])
        thresholds = harness.proof.row(harness.arithmetic, judge.arithmetic)
        judgements.extend(
            await judge.judge([(group, content_digest(group.to_frame())) for group in groups], thresholds)
        )

    async with trio.open_nursery() as nursery:
        nursery.start_soon(judge)
        await has_started.wait()
        for _ in range(3):
            await trio.lowlevel.checkpoint()  # returns only while the loop is free
        assert not judgements
        may_compute.set()
    assert [judgement.reason for judgement in judgements] == ["", ""]


@pytest.mark.parametrize(("name", "most"), [("one edited token in 10% of rollouts", 200_000), ("own noise", 10**6)])
async def test_a_judge_waits_for_the_engine_again_by_the_share_of_tokens_behind_misses(
    harness: TrialHarness, name: str, most: int
) -> None:
    loads: list[int] = []

    @asynccontextmanager
    async def at_engine(load: int) -> AsyncIterator[None]:
        loads.append(load)
        yield

    groups = await ADVERSARIES[name].producer(harness).produce(harness.mining_window(WINDOW), range(4))
    judge = Judge(harness.task, await harness.serving_engine(), WINDOW, harness.randomness(WINDOW), draw=bytes(32))
    thresholds = alter(harness.proof.row(harness.arithmetic, judge.arithmetic), **LENIENT)
    await judge.judge([(group, bytes(32)) for group in groups], thresholds, Slots(at_engine))
    assert loads[0] == 0
    assert most // 4 < loads[1] <= most
