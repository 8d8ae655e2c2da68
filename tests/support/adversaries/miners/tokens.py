"""Adversaries that use the right policy, but other tokens than it samples."""

from collections.abc import Callable
from typing import Any

import torch

from protocol.judging.verdict import Reason
from protocol.rollout import sampling
from protocol.rollout.batch import Group, Rollout, pack_tokens
from roles.gather import gather
from roles.policy.assignment import Assignment
from roles.ports import Request
from tests.support.adversaries.decisive_tokens import LuckyEngine, TieEngine, stop_taker
from tests.support.adversaries.harness import alter
from tests.support.adversaries.miners.registry import (
    Attempt,
    Tokens,
    adversary,
    falsified,
    with_first_rollout,
    with_rollouts,
)


@adversary("own noise", Reason.SAMPLING)
async def own_noise(attempt: Attempt) -> list[Group]:
    """Sample honestly, but with seeds of the miner's own."""
    rng, groups = attempt.rng(), []
    for assignment in attempt.assignments:
        seeds = [rng.randbytes(16) for _ in assignment.seeds]
        groups.append(await attempt.complete(assignment, await attempt.completions(assignment, seeds)))
    return groups


@adversary("best of 8", Reason.SAMPLING)
async def best_of_8(attempt: Attempt) -> list[Group]:
    """Choose among the right completion and seven others the one with the highest reward, and then the shortest.

    It delivers four groups at most, since it generates eight times as many.
    """
    rng, groups = attempt.rng(), []
    for assignment in attempt.assignments[:4]:
        seeds = [seed for first in assignment.seeds for seed in (first, *(rng.randbytes(16) for _ in range(7)))]
        candidates = await attempt.completions(assignment, seeds)
        rewards = await attempt.harness.task.rewards(assignment.problem, candidates)
        values = [(reward, -len(tokens)) for reward, tokens in zip(rewards, candidates, strict=True)]
        best = [candidates[max(range(at, at + 8), key=values.__getitem__)] for at in range(0, len(candidates), 8)]
        groups.append(await attempt.complete(assignment, best))
    return groups


@adversary("greedy", Reason.SAMPLING)
async def greedy(attempt: Attempt) -> list[Group]:
    """Deliver the most likely completion in every rollout of a group."""
    assignments, engine = attempt.assignments, await attempt.harness.serving_engine()
    params = attempt.harness.task.run.sampling.params()
    likely = await engine.generate([Request(assignment.prompt, b"") for assignment in assignments], params)
    return [
        await attempt.complete(assignment, [item.tokens] * len(assignment.seeds))
        for assignment, item in zip(assignments, likely, strict=True)
    ]


@adversary("temperature 0.8", Reason.SAMPLING)
async def other_temperature(attempt: Attempt) -> list[Group]:
    """Sample with the right seeds, but at a temperature with higher rewards."""
    return [
        await attempt.complete(assignment, await attempt.completions(assignment, assignment.seeds, 0.8))
        for assignment in attempt.assignments
    ]


@falsified("truncated", Reason.TOKENS)
def truncate(group: Group) -> Group:
    """Deliver the first half of every completion."""

    def halve(item: Rollout) -> Rollout:
        size = 4 * (len(item.tokens) // 2)
        half: Rollout = alter(item, completion=item.completion[:size], sketch=item.sketch[:size])
        return half

    return with_rollouts(group, halve)


@adversary("forced end of sequence", Reason.SAMPLING)
async def forced_end(attempt: Attempt) -> list[Group]:
    """Deliver the first half of every completion, followed by the end token."""
    end = attempt.harness.task.run.sampling.stops[0]
    return [
        await attempt.complete(
            assignment, [(*item.tokens[: max(1, len(item.tokens) // 2)], end) for item in group.rollouts]
        )
        for group, assignment in await attempt.pairs()
    ]


async def edit_tokens(attempt: Attempt, count: int) -> list[Group]:
    """Replace one token in `count` rollouts by the one with the second-best score, and sample the rest."""
    groups, assignments, rng = list(await attempt.honest_groups()), attempt.assignments, attempt.rng()
    rollout_places = [(at, index) for at, group in enumerate(groups) for index in range(len(group.rollouts))]
    edit_places = rng.sample(rollout_places, count)
    edits = [(at, index, rng.randrange(len(groups[at].rollouts[index].tokens))) for at, index in edit_places]

    async def rewrite(edit: tuple[int, int, int]) -> Rollout:
        at, index, place = edit
        prefix = groups[at].rollouts[index].tokens[:place]
        tokens = await _rewrite_completion(attempt, assignments[at], assignments[at].seeds[index], prefix)
        return (await attempt.complete(assignments[at], [tokens])).rollouts[0]

    for (at, index, _), rollout in zip(edits, await gather(rewrite, edits), strict=True):
        rollouts = list(groups[at].rollouts)
        rollouts[index] = rollout
        groups[at] = alter(groups[at], rollouts=tuple(rollouts))
    return groups


async def _rewrite_completion(attempt: Attempt, assignment: Assignment, seed: bytes, prefix: Tokens) -> Tokens:
    """Return a completion of a prefix, then the second-best token, then the tokens that the policy samples."""
    engine, params = await attempt.harness.serving_engine(), attempt.harness.task.run.sampling.params()
    words, tokens, rank = sampling.seed_words([seed]), prefix, 2
    while not tokens or (tokens[-1] not in params.stops and len(tokens) < params.max_tokens):
        logits = (await engine.forward([assignment.prompt], [(*tokens, 0)]))[0].logits[-1:]
        scores = logits / params.temperature + sampling.noise(words, torch.tensor([len(tokens)]), logits.shape[-1])
        tokens = (*tokens, int(scores.topk(rank).indices[0, -1]))
        rank = 1
    return tokens


@adversary("one edited token in 1% of rollouts", Reason.SAMPLING)
async def edit_1_percent(attempt: Attempt) -> list[Group]:
    """Replace one token in 1% of the rollouts by the second-best one, at least once a window."""
    return await edit_tokens(attempt, max(1, len(attempt.indices) * attempt.harness.group_size // 100))


@adversary("one edited token in 10% of rollouts", Reason.SAMPLING)
async def edit_10_percent(attempt: Attempt) -> list[Group]:
    """Replace one token in 10% of the rollouts by the second-best one, at least once a window."""
    return await edit_tokens(attempt, max(1, len(attempt.indices) * attempt.harness.group_size // 10))


@adversary("special tokens", Reason.SAMPLING)
async def special_tokens(attempt: Attempt) -> list[Group]:
    """Put a padding token into the middle of one rollout of each group."""
    groups = []
    for group, assignment in await attempt.pairs():
        tokens = list(group.rollouts[0].tokens)
        tokens[len(tokens) // 2 - 1] = 0
        altered_group = await attempt.complete(assignment, [tuple(tokens)])
        groups.append(with_first_rollout(group, altered_group.rollouts[0]))
    return groups


@adversary("tokens outside the vocabulary", Reason.TOKENS)
async def foreign_tokens(attempt: Attempt) -> list[Group]:
    """Deliver a token id outside the vocabulary."""
    groups = []
    for group in await attempt.honest_groups():
        first = group.rollouts[0]
        tokens = (attempt.harness.task.vocabulary, *first.tokens[1:])
        groups.append(with_first_rollout(group, alter(first, completion=pack_tokens(tokens))))
    return groups


async def _decided_groups(attempt: Attempt, make: Callable[..., TieEngine]) -> list[Group]:
    harness = attempt.harness
    cast = {name: tensor.to(harness.dtype) for name, tensor in harness.serving_weights.items()}
    engine: Any = make(harness.change(harness.model()), cast)  # a producer calls nothing but `generate`
    return await attempt.produce(engine)


@adversary("end wherever it is near", Reason.STOP, Reason.SAMPLING)
async def take_stops(attempt: Attempt) -> list[Group]:
    """Take the end token wherever it falls short of the best one by at most 8."""
    end = attempt.harness.task.run.sampling.stops[0]
    return await _decided_groups(attempt, lambda model, weights: stop_taker(model, weights, end, reach=8.0))


@adversary("lucky near ties", Reason.WINDOW, Reason.SAMPLING, within_noise=True)
async def choose_luck(attempt: Attempt) -> list[Group]:
    """Decide one near tie in each rollout if that makes its reward higher."""
    task, problems = attempt.harness.task, {item.prompt: item.problem for item in attempt.assignments}

    def reward(prompt: Tokens, completion: Tokens) -> float:
        return task.environment.reward(problems[prompt], task.tokenizer.decode(completion))

    return await _decided_groups(attempt, lambda model, weights: LuckyEngine(model, weights, reward, reach=0.5))
