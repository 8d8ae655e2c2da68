"""False episodes: they are refused for what is false in them, and no environment sees a turn behind a false reply.

The order of the checks is a matter of safety. With a forged reply a miner could make the true policy write any text,
and environments may execute what they are given.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from itertools import chain, repeat
from typing import Any

import pytest
import torch

from grailnode.calibration.pairs import CalibrationTask, GroupMeasurement, check_groups, generate_groups
from grailnode.calibration.thresholds import ThresholdDemands, choose_thresholds
from grailnode.engine.policy import PACKAGED_POLICY, Policy, load_weights
from protocol import environments
from protocol.environments.base import Problem, SandboxLimitError
from protocol.judging.evidence import NO_EVIDENCE, Evidence, advance
from protocol.judging.verdict import Reason
from protocol.proof import EXACT_PROOF, RATE_UNIT, Table, Thresholds
from protocol.rollout.batch import EpisodeRollout, Group, Rollout, assemble
from protocol.rollout.sampling import SamplingParams
from protocol.run import EpisodeSpec
from roles.miner.produce import HonestProducer
from roles.policy.assignment import Task
from roles.ports import Engine, Generation, Request
from tests.support.adversaries.false_episodes import CHEATS
from tests.support.adversaries.harness import PolicyHistory, TrialHarness, TrialOutcome, alter
from tests.support.builders.dice import Dice, DiceEpisode
from tests.support.builders.proofs import FLOAT32, LENIENT, packaged_thresholds, proof_of
from tests.support.simulation.virtual_clock import simulate

OTHER = 3  # a token that is no stop token, and which the policy seldom draws
SPEC = EpisodeSpec(turns=6, turn_tokens=4, reply_tokens=8, tokens=60)
Steps = dict[bytes, list[str]]


class InexactDice(Dice):
    """Dice whose replies may differ between machines, and whose episodes reach a limit while `hangs`."""

    exact = False
    hangs = False
    tries = 0

    def begin(self, problem: Problem, seed: bytes) -> DiceEpisode:
        self.tries += 1
        if self.hangs:
            raise SandboxLimitError("over 30 s")
        return super().begin(problem, seed)


class FlakyDice(InexactDice):
    """Dice of which one episode in some replies otherwise than the time before."""

    def begin(self, problem: Problem, seed: bytes) -> DiceEpisode:
        episode = super().begin(problem, seed)
        return super().begin(problem, bytes(32)) if self.tries % 64 == 0 else episode


def new_harness(
    environment: Any, episode: EpisodeSpec | None, groups: int = 2, row: Thresholds | None = None
) -> TrialHarness:
    """Return a harness over the packaged policy, in exact arithmetic or by a row of thresholds."""
    weights = load_weights(PACKAGED_POLICY)
    policy_history = PolicyHistory(Policy.load(PACKAGED_POLICY), 0, lambda _: weights)
    return TrialHarness(
        policy_history,
        environment,
        EXACT_PROOF if row is None else proof_of(row),
        max_tokens=20,
        group_size=4,
        groups=groups,
        episode=episode,
        exact=row is None,
    )


@pytest.fixture(scope="module")
def harness() -> TrialHarness:
    return new_harness(Dice(), SPEC)


def steps_of(harness: TrialHarness) -> Steps:
    """Return the texts that the environment was given since the last call, by the episode's seed."""
    environment, steps = harness.task.environment, defaultdict(list)
    assert isinstance(environment, Dice)
    for seed, text in environment.steps:
        steps[seed].append(text)
    environment.steps.clear()
    return dict(steps)


def judge(harness: TrialHarness, groups: Sequence[Group], evidence: Evidence = NO_EVIDENCE) -> TrialOutcome:
    async def scenario() -> TrialOutcome:
        harness.accepted_work.clear()
        arithmetic = harness.node.run.proof.miners[0]
        return await harness.judge(*assemble(groups, arithmetic), harness.miner, evidence)

    outcome: TrialOutcome = simulate(scenario)
    return outcome


def produce(harness: TrialHarness, make: Callable[..., HonestProducer] = HonestProducer) -> list[Group]:
    async def scenario() -> list[Group]:
        producer = make(harness.task, await harness.serving_engine())
        return await producer.produce(harness.mining_window(0), range(harness.groups))

    groups: list[Group] = simulate(scenario)
    return groups


@pytest.fixture(scope="module")
def honest(harness: TrialHarness) -> tuple[list[Group], Steps]:
    """Return honest groups, and what was stepped when they were played."""
    steps_of(harness)
    return produce(harness), steps_of(harness)


def test_honest_episodes_are_accepted_and_given_to_the_environment_as_they_were_played(
    harness: TrialHarness, honest: tuple[list[Group], Steps]
) -> None:
    groups, played = honest
    steps_of(harness)
    outcome = judge(harness, groups)
    assert (outcome.accepted, outcome.reasons) == (2, {})
    assert steps_of(harness) == played
    lengths = [
        len(rollout.turns) for group in groups for rollout in group.rollouts if isinstance(rollout, EpisodeRollout)
    ]
    assert max(lengths) >= 4


@pytest.mark.parametrize("name", CHEATS)
def test_a_false_episode_is_refused_and_nothing_behind_a_false_reply_is_stepped(
    harness: TrialHarness, honest: tuple[list[Group], Steps], name: str
) -> None:
    true_groups, played = honest
    make, reason = CHEATS[name]
    groups = produce(harness, make)
    false = [group.rollouts != other.rollouts for group, other in zip(groups, true_groups, strict=True)]
    assert any(false)
    steps_of(harness)
    outcome = judge(harness, groups)
    assert outcome.reasons.total() == sum(false)
    assert set(outcome.reasons) <= {reason.value, Reason.STOP.value}
    assert reason.value in outcome.reasons
    stepped = steps_of(harness)
    for seed, texts in stepped.items():
        assert texts == played[seed][: len(texts)]
    if name == "forged-reply":  # each first turn is the policy's own; all later ones answer to the miner
        assert stepped and all(len(texts) == 1 for texts in stepped.values())


@pytest.fixture(scope="module")
def inexact() -> tuple[TrialHarness, list[Group]]:
    """Return a harness whose environment is not exact, and honest groups of it."""
    harness = new_harness(InexactDice(), SPEC)
    return harness, produce(harness)


@pytest.mark.parametrize("name", CHEATS)
def test_false_replies_of_an_inexact_environment_count_for_nobody(
    inexact: tuple[TrialHarness, list[Group]], name: str
) -> None:
    harness, honest = inexact
    make, reason = CHEATS[name]
    groups = produce(harness, make)
    false = sum(group.rollouts != other.rollouts for group, other in zip(groups, honest, strict=True))
    outcome = judge(harness, groups)
    assert outcome.accepted == 2 - false
    due = {Reason.UNREPRODUCED.value} if reason is Reason.TURN else {reason.value}
    assert due <= set(outcome.reasons) <= {*due, Reason.STOP.value}


def test_answers_that_reach_a_limit_take_the_time_of_two_groups_and_are_not_rejected() -> None:
    environment = InexactDice()
    harness = new_harness(environment, SPEC, groups=4)
    groups = produce(harness)
    environment.hangs, environment.tries = True, 0
    assert judge(harness, groups).reasons == {Reason.UNREPRODUCED.value: 4}
    assert environment.tries == 2


def test_a_miner_whose_replies_differ_too_often_is_refused_and_an_honest_one_is_not() -> None:
    """The rate is what calibration measures on the environment, which here replies otherwise once in 64 episodes."""
    environment = FlakyDice()
    engine_task = new_harness(environment, SPEC, groups=32, row=packaged_thresholds())
    replays = calibrated_replays(engine_task)
    assert 4 / 64 < replays.rates[0] / RATE_UNIT < 0.4
    row = packaged_thresholds().model_copy(update={"replay": replays})
    harness = new_harness(environment, SPEC, groups=8, row=row)
    evidence, honest = NO_EVIDENCE, Counter[str]()
    for _ in range(4):
        outcome = judge(harness, produce(harness), evidence)
        honest += outcome.reasons
        evidence = advance(evidence, outcome.counts, row)
    assert set(honest) == {Reason.UNREPRODUCED.value} and 0 < honest.total() < 8
    false, evidence, windows = produce(harness, CHEATS["forged-reply"][0]), NO_EVIDENCE, 0
    while set((outcome := judge(harness, false, evidence)).reasons) == {Reason.UNREPRODUCED.value} and windows < 9:
        evidence, windows = advance(evidence, outcome.counts, row), windows + 1
    assert set(outcome.reasons) == {Reason.WINDOW.value} and windows < 4


def calibrated_replays(harness: TrialHarness) -> Table:
    """Return the table of replays that calibration chooses for a harness's environment."""

    async def scenario() -> list[GroupMeasurement]:
        engine, task = await harness.serving_engine(), harness.task
        work = CalibrationTask(
            policy=harness.policy_history.policy,
            params=task.run.sampling.params(),
            group_size=4,
            prompt=lambda seed: task.environment.problem(seed).prompt,
            task=task,
        )
        return [
            group
            async for chunk in generate_groups(work, engine, 32)
            for group in await check_groups(work, engine, chunk)
        ]

    honest = {"pair": simulate(scenario)}
    row = choose_thresholds(honest, [honest["pair"]], FLOAT32, ThresholdDemands(headroom=1.0))
    assert row.replay is not None
    return row.replay


def alter_turns(turns: Callable[[Any], Any]) -> Callable[[Rollout], Rollout]:
    return lambda rollout: alter(rollout, turns=turns(rollout.turns))  # type: ignore[attr-defined]


def without_turns(rollout: Rollout) -> Rollout:
    return Rollout(completion=rollout.completion, sketch=rollout.sketch, reward=rollout.reward)


def first_token_as_reply(rollout: Any) -> Rollout:
    (count, reply), *others = rollout.turns
    first = {"completion": rollout.completion[4:], "sketch": rollout.sketch[4:]}
    turns = ((count - 1, rollout.completion[:4] + reply), *others)
    changed: Rollout = alter(rollout, **first, turns=turns)
    return changed


CHANGES: dict[str, tuple[Callable[[Rollout], Rollout], set[str]]] = {
    "another reply in the same states": (
        alter_turns(lambda turns: tuple((count, reply[::-1]) for count, reply in turns)),
        {"wrong-sketch", "malformed", "bad-tokens"},
    ),
    "a reply of no token of the vocabulary": (
        alter_turns(lambda turns: tuple((count, b"\xff\xff\0\0" * (len(reply) // 4)) for count, reply in turns)),
        {"bad-tokens"},
    ),
    "a reply behind the last turn": (
        alter_turns(lambda turns: (*turns[:-1], (turns[-1][0], b"\5\0\0\0"))),
        {"bad-tokens"},
    ),
    "the last reply left out": (
        alter_turns(lambda turns: tuple((count, b"") for count, _ in turns)),
        {"wrong-sketch", "wrong-sampling"},
    ),
    "no turns": (without_turns, {"bad-tokens"}),
    "the first token as part of a reply": (first_token_as_reply, {"wrong-sketch", "wrong-sampling", "bad-tokens"}),
}


@pytest.mark.parametrize("name", CHANGES)
def test_changed_records_are_refused_before_any_step(
    harness: TrialHarness, honest: tuple[list[Group], Steps], name: str
) -> None:
    change, reasons = CHANGES[name]
    group = honest[0][0]
    assert any(len(rollout.turns) > 1 for rollout in group.rollouts if isinstance(rollout, EpisodeRollout))
    changed = alter(group, rollouts=tuple(map(change, group.rollouts)))
    steps_of(harness)
    outcome = judge(harness, [changed])
    assert outcome.accepted == 0
    assert set(outcome.reasons) <= reasons
    assert steps_of(harness) == {}


def test_turns_in_a_run_without_episodes_are_refused() -> None:
    harness = new_harness(environments.get("addition"), None)
    groups = [
        alter(
            group,
            rollouts=tuple(
                EpisodeRollout(**dict(rollout), turns=((len(rollout.tokens), b""),)) for rollout in group.rollouts
            ),
        )
        for group in produce(harness)
    ]
    assert judge(harness, groups).reasons == {Reason.TOKENS.value: 2}


class OtherTurns:
    """An engine that begins each turn of most seeds but the first with another token than the policy draws."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def generate(self, requests: Sequence[Request], params: SamplingParams) -> list[Generation]:
        generations = await self._engine.generate(requests, params)
        places = [n for n, request in enumerate(requests) if request.offset and request.seed[0] % 4]
        begun = [
            replace(requests[n], prompt=(*requests[n].prompt, OTHER), offset=requests[n].offset + 1, turn_cache=None)
            for n in places
        ]
        rest = await self._engine.generate(begun, params)
        for n, behind in zip(places, rest, strict=True):
            first = generations[n]
            generations[n] = Generation(
                (OTHER, *behind.tokens),
                torch.cat([first.hidden[:1], behind.hidden]),
                (*first.logprobs[:1], *behind.logprobs),
            )
        return generations


def test_misses_of_episodes_raise_no_rewards_and_count_as_luck() -> None:
    """A validator plays each episode on from its first miss, which is at the beginning of its second turn."""
    harness = new_harness(Dice(), SPEC, groups=4, row=alter(packaged_thresholds(), **LENIENT))

    def make(task: Task, engine: Engine) -> HonestProducer:
        return HonestProducer(task, OtherTurns(engine))

    async def scenario() -> tuple[TrialOutcome, TrialOutcome]:
        return await harness.luck(make(harness.task, await harness.serving_engine()), 0)

    outcome, expected = simulate(scenario)
    assert outcome == expected
    assert sum(outcome.counts.luck.steps) > 0


def refuse(text: str) -> str | None:
    raise SandboxLimitError("over 30 s")


class LimitedDice(Dice):
    """Dice that reach a limit at some problems, or in turns behind the first of an episode that is played again."""

    problems: Collection[Problem] = ()
    is_limited_again = False

    def begin(self, problem: Problem, seed: bytes) -> DiceEpisode:
        if problem in self.problems:
            refuse("")
        episode = super().begin(problem, seed)
        if self.is_limited_again and any(own == seed for own, _ in self.steps):
            steps: Iterator[Callable[[str], str | None]] = chain([episode.step], repeat(refuse))

            def step(text: str) -> str | None:
                return next(steps)(text)

            episode.step = step  # type: ignore[method-assign]
        return episode


def test_limits_cost_the_groups_in_which_they_are_reached_and_no_others_that_are_continued() -> None:
    environment = LimitedDice()
    harness = new_harness(environment, SPEC, groups=4, row=alter(packaged_thresholds(), **LENIENT))
    groups = produce(harness, lambda task, engine: HonestProducer(task, OtherTurns(engine)))
    assert judge(harness, groups).accepted == 4
    assignments = [harness.task.assign(0, harness.randomness(0), harness.miner.public, index) for index in range(4)]
    environment.problems = [assignment.problem for assignment in assignments[2:]]
    assert judge(harness, groups).reasons == {Reason.UNREPRODUCED.value: 2}
    environment.problems, environment.is_limited_again = (), True
    environment.steps.clear()
    outcome = judge(harness, groups)
    assert outcome.reasons == {Reason.UNREPRODUCED.value: 4 - outcome.accepted}
    assert 0 < outcome.accepted < 4  # those without a miss are not played again
