"""Adversaries that use the right policy, but other tokens than it samples."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from protocol.judging.verdict import Reason
from protocol.rollout import sampling
from protocol.rollout.batch import Group, Rollout, pack_tokens
from roles.gather import gather
from roles.miner.produce import MiningWindow
from roles.policy.assignment import Assignment
from roles.ports import Request
from tests.support.adversaries.decisive_tokens import LuckyEngine, TieEngine, stop_taker
from tests.support.adversaries.harness import TrialHarness, alter
from tests.support.adversaries.miners.registry import (
    Tokens,
    adversary,
    assignments_of,
    complete_group,
    honest_groups_of,
    window_rng,
    with_rollouts,
)


async def generate_completions(
    harness: TrialHarness, assignment: Assignment, seeds: Sequence[bytes], temperature: float = 1.0
) -> list[Tokens]:
    """Return completions of the right policy with these seeds."""
    params = replace(harness.task.run.sampling.params(), temperature=temperature)
    engine = await harness.serving_engine()
    generations = await engine.generate([Request(assignment.prompt, seed) for seed in seeds], params)
    return [item.tokens for item in generations]


@adversary("own noise", Reason.SAMPLING)
async def own_noise(harness: TrialHarness, mining_window: MiningWindow, indices: Sequence[int]) -> list[Group]:
    """Sample honestly, but with seeds of the miner's own."""
    rng = window_rng(mining_window)
    return [
        await complete_group(
            harness,
            mining_window,
            assignment,
            await generate_completions(harness, assignment, [rng.randbytes(16) for _ in assignment.seeds]),
        )
        for assignment in assignments_of(harness, mining_window, indices)
    ]


@adversary("best of 8", Reason.SAMPLING)
async def best_of_8(harness: TrialHarness, mining_window: MiningWindow, indices: Sequence[int]) -> list[Group]:
    """Choose among the right completion and seven others the one with the highest reward, and then the shortest.

    It delivers four groups at most, since it generates eight times as many.
    """
    rng, groups = window_rng(mining_window), []
    for assignment in assignments_of(harness, mining_window, indices[:4]):
        seeds = [seed for first in assignment.seeds for seed in (first, *(rng.randbytes(16) for _ in range(7)))]
        candidates = await generate_completions(harness, assignment, seeds)
        rewards = await harness.task.rewards(assignment.problem, candidates)
        values = [(reward, -len(tokens)) for reward, tokens in zip(rewards, candidates, strict=True)]
        best = [candidates[max(range(at, at + 8), key=values.__getitem__)] for at in range(0, len(candidates), 8)]
        groups.append(await complete_group(harness, mining_window, assignment, best))
    return groups


@adversary("greedy", Reason.SAMPLING)
async def greedy(harness: TrialHarness, mining_window: MiningWindow, indices: Sequence[int]) -> list[Group]:
    """Deliver the most likely completion in every rollout of a group."""
    assignments, engine = assignments_of(harness, mining_window, indices), await harness.serving_engine()
    likely = await engine.greedy([assignment.prompt for assignment in assignments], harness.task.run.sampling.params())
    return [
        await complete_group(harness, mining_window, assignment, [tokens] * len(assignment.seeds))
        for assignment, tokens in zip(assignments, likely, strict=True)
    ]


@adversary("temperature 0.8", Reason.SAMPLING)
async def other_temperature(harness: TrialHarness, mining_window: MiningWindow, indices: Sequence[int]) -> list[Group]:
    """Sample with the right seeds, but at a temperature with higher rewards."""
    assignments = assignments_of(harness, mining_window, indices)
    return [
        await complete_group(
            harness, mining_window, assignment, await generate_completions(harness, assignment, assignment.seeds, 0.8)
        )
        for assignment in assignments
    ]


@adversary("truncated", Reason.TOKENS)
async def truncate(harness: TrialHarness, mining_window: MiningWindow, indices: Sequence[int]) -> list[Group]:
    """Deliver the first half of every completion."""
    groups = []
    for group in await harness.honest_groups(mining_window, indices):
        halves = [len(item.tokens) // 2 for item in group.rollouts]
        halved_rollouts = [
            alter(item, completion=item.completion[: 4 * half], sketch=item.sketch[: 4 * half])
            for item, half in zip(group.rollouts, halves, strict=True)
        ]
        groups.append(with_rollouts(group, halved_rollouts))
    return groups


@adversary("forced end of sequence", Reason.SAMPLING)
async def forced_end(harness: TrialHarness, mining_window: MiningWindow, indices: Sequence[int]) -> list[Group]:
    """Deliver the first half of every completion, followed by the end token."""
    end, assignments = harness.task.run.sampling.stops[0], assignments_of(harness, mining_window, indices)
    return [
        await complete_group(
            harness,
            mining_window,
            assignment,
            [(*item.tokens[: max(1, len(item.tokens) // 2)], end) for item in group.rollouts],
        )
        for group, assignment in zip(await harness.honest_groups(mining_window, indices), assignments, strict=True)
    ]


async def edit_tokens(
    harness: TrialHarness, mining_window: MiningWindow, indices: Sequence[int], count: int, rank: int = 2
) -> list[Group]:
    """Replace one token in `count` rollouts by the one with the `rank`-th best score, and sample the rest."""
    groups, rng = list(await harness.honest_groups(mining_window, indices)), window_rng(mining_window)
    assignments = assignments_of(harness, mining_window, indices)
    rollout_places = [(at, index) for at, group in enumerate(groups) for index in range(len(group.rollouts))]
    edit_places = rng.sample(rollout_places, count)
    edits = [(at, index, rng.randrange(len(groups[at].rollouts[index].tokens))) for at, index in edit_places]

    async def rewrite(edit: tuple[int, int, int]) -> Rollout:
        at, index, place = edit
        prefix = groups[at].rollouts[index].tokens[:place]
        tokens = await _rewrite_completion(harness, assignments[at], assignments[at].seeds[index], prefix, rank)
        return (await complete_group(harness, mining_window, assignments[at], [tokens])).rollouts[0]

    for (at, index, _), rollout in zip(edits, await gather(rewrite, edits), strict=True):
        rollouts = list(groups[at].rollouts)
        rollouts[index] = rollout
        groups[at] = with_rollouts(groups[at], rollouts)
    return groups


async def _rewrite_completion(
    harness: TrialHarness, assignment: Assignment, seed: bytes, prefix: Tokens, rank: int
) -> Tokens:
    """Return a completion of a prefix, then the token of a rank, then the tokens that the policy samples."""
    engine, params = await harness.serving_engine(), harness.task.run.sampling.params()
    words, tokens = sampling.seed_words([seed]), prefix
    while not tokens or (tokens[-1] not in params.stops and len(tokens) < params.max_tokens):
        logits = (await engine.forward([assignment.prompt], [(*tokens, 0)]))[0].logits[-1:]
        scores = logits / params.temperature + sampling.noise(words, torch.tensor([len(tokens)]), logits.shape[-1])
        tokens = (*tokens, int(scores.topk(rank).indices[0, -1]))
        rank = 1
    return tokens


@adversary("one edited token in 1% of rollouts", Reason.SAMPLING)
async def edit_1_percent(harness: TrialHarness, mining_window: MiningWindow, indices: Sequence[int]) -> list[Group]:
    """Replace one token in 1% of the rollouts by the second-best one, at least once a window."""
    return await edit_tokens(harness, mining_window, indices, max(1, len(indices) * harness.group_size // 100))


@adversary("one edited token in 10% of rollouts", Reason.SAMPLING)
async def edit_10_percent(harness: TrialHarness, mining_window: MiningWindow, indices: Sequence[int]) -> list[Group]:
    """Replace one token in 10% of the rollouts by the second-best one, at least once a window."""
    return await edit_tokens(harness, mining_window, indices, max(1, len(indices) * harness.group_size // 10))


@adversary("special tokens", Reason.SAMPLING)
async def special_tokens(harness: TrialHarness, mining_window: MiningWindow, indices: Sequence[int]) -> list[Group]:
    """Put a padding token into the middle of one rollout of each group."""
    groups = []
    for group, assignment in zip(
        await harness.honest_groups(mining_window, indices),
        assignments_of(harness, mining_window, indices),
        strict=True,
    ):
        tokens = list(group.rollouts[0].tokens)
        tokens[len(tokens) // 2 - 1] = 0
        altered_group = await complete_group(harness, mining_window, assignment, [tuple(tokens)])
        groups.append(with_rollouts(group, [altered_group.rollouts[0], *group.rollouts[1:]]))
    return groups


@adversary("tokens outside the vocabulary", Reason.TOKENS)
async def foreign_tokens(harness: TrialHarness, mining_window: MiningWindow, indices: Sequence[int]) -> list[Group]:
    """Deliver a token id outside the vocabulary."""

    def replace_first_token(rollout: Rollout) -> Rollout:
        tokens = (harness.task.vocabulary, *rollout.tokens[1:])
        copy: Rollout = alter(rollout, completion=pack_tokens(tokens))
        return copy

    groups = await harness.honest_groups(mining_window, indices)
    return [with_rollouts(group, [replace_first_token(group.rollouts[0]), *group.rollouts[1:]]) for group in groups]


async def _decided_groups(
    harness: TrialHarness, mining_window: MiningWindow, indices: Sequence[int], make: Callable[..., TieEngine]
) -> list[Group]:
    weights = harness.policy_history.version(harness.policy_history.serving)
    cast = {name: tensor.to(harness.dtype) for name, tensor in weights.items()}
    engine: Any = make(harness.change(harness.model()), cast)  # a producer calls nothing but `generate`
    return await honest_groups_of(engine, harness, mining_window, indices)


@adversary("end wherever it is near", Reason.STOP, Reason.SAMPLING)
async def take_stops(harness: TrialHarness, mining_window: MiningWindow, indices: Sequence[int]) -> list[Group]:
    """Take the end token wherever it falls short of the best one by at most 8."""
    end = harness.task.run.sampling.stops[0]
    return await _decided_groups(
        harness, mining_window, indices, lambda model, weights: stop_taker(model, weights, end, reach=8.0)
    )


@adversary("lucky near ties", Reason.WINDOW, Reason.SAMPLING, within_noise=True)
async def choose_luck(harness: TrialHarness, mining_window: MiningWindow, indices: Sequence[int]) -> list[Group]:
    """Decide one near tie in each rollout if that makes its reward higher."""
    task, problems = (
        harness.task,
        {item.prompt: item.problem for item in assignments_of(harness, mining_window, indices)},
    )

    def reward(prompt: Tokens, completion: Tokens) -> float:
        return task.environment.reward(problems[prompt], task.tokenizer.decode(completion))

    return await _decided_groups(
        harness, mining_window, indices, lambda model, weights: LuckyEngine(model, weights, reward, reach=0.5)
    )
