"""The right policy, but other tokens than it draws."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from protocol.judging.verdict import Reason
from protocol.rollout import sampling
from protocol.rollout.batch import Group, Rollout, pack_tokens
from roles.gather import gather
from roles.miner.produce import MiningWindow
from roles.policy.assignment import Assignment
from roles.ports import Request
from tests.support.adversaries.harness import Field, changed
from tests.support.adversaries.miners.registry import Tokens, animal, assigned, chance, finished, with_rollouts


async def drawn(field: Field, due: Assignment, seeds: Sequence[bytes], temperature: float = 1.0) -> list[Tokens]:
    """Completions of the right policy with these seeds."""
    params = replace(field.task.run.sampling.params(), temperature=temperature)
    engine = await field.serving()
    done = await engine.generate([Request(due.prompt, seed) for seed in seeds], params)
    return [item.tokens for item in done]


@animal("own noise", Reason.SAMPLING)
async def own_noise(field: Field, mining_window: MiningWindow, indices: Sequence[int]) -> list[Group]:
    """Fair samples, but with the miner's own dice."""
    dice = chance(mining_window)
    return [
        await finished(field, mining_window, due, await drawn(field, due, [dice.randbytes(16) for _ in due.seeds]))
        for due in assigned(field, mining_window, indices)
    ]


@animal("best of 8", Reason.SAMPLING)
async def best_of_8(field: Field, mining_window: MiningWindow, indices: Sequence[int]) -> list[Group]:
    """The due completion or one of seven others: what earns most, the shortest of equals. Four groups are work
    enough.
    """
    dice, groups = chance(mining_window), []
    for due in assigned(field, mining_window, indices[:4]):
        seeds = [seed for first in due.seeds for seed in (first, *(dice.randbytes(16) for _ in range(7)))]
        candidates = await drawn(field, due, seeds)
        earned = await field.task.rewards(due.problem, candidates)
        worth = [(reward, -len(tokens)) for reward, tokens in zip(earned, candidates, strict=True)]
        best = [candidates[max(range(at, at + 8), key=worth.__getitem__)] for at in range(0, len(candidates), 8)]
        groups.append(await finished(field, mining_window, due, best))
    return groups


@animal("greedy", Reason.SAMPLING)
async def greedy(field: Field, mining_window: MiningWindow, indices: Sequence[int]) -> list[Group]:
    """The most likely completion, as many times as the group is large."""
    dues, engine = assigned(field, mining_window, indices), await field.serving()
    likely = await engine.greedy([due.prompt for due in dues], field.task.run.sampling.params())
    return [
        await finished(field, mining_window, due, [tokens] * len(due.seeds))
        for due, tokens in zip(dues, likely, strict=True)
    ]


@animal("temperature 0.8", Reason.SAMPLING)
async def other_temperature(field: Field, mining_window: MiningWindow, indices: Sequence[int]) -> list[Group]:
    """The due noise, but at a temperature that earns more."""
    dues = assigned(field, mining_window, indices)
    return [await finished(field, mining_window, due, await drawn(field, due, due.seeds, 0.8)) for due in dues]


@animal("truncated", Reason.TOKENS)
async def truncated(field: Field, mining_window: MiningWindow, indices: Sequence[int]) -> list[Group]:
    """The first half of every completion."""
    groups = []
    for group in await field.honest(mining_window, indices):
        halves = [len(item.tokens) // 2 for item in group.rollouts]
        cut = [
            changed(item, completion=item.completion[: 4 * half], sketch=item.sketch[: 4 * half])
            for item, half in zip(group.rollouts, halves, strict=True)
        ]
        groups.append(with_rollouts(group, cut))
    return groups


@animal("forced end of sequence", Reason.SAMPLING)
async def forced_end(field: Field, mining_window: MiningWindow, indices: Sequence[int]) -> list[Group]:
    """The first half, then the token that ends."""
    end, dues = field.task.run.sampling.eos, assigned(field, mining_window, indices)
    return [
        await finished(
            field, mining_window, due, [(*item.tokens[: max(1, len(item.tokens) // 2)], end) for item in group.rollouts]
        )
        for group, due in zip(await field.honest(mining_window, indices), dues, strict=True)
    ]


async def edited(
    field: Field, mining_window: MiningWindow, indices: Sequence[int], count: int, rank: int = 2
) -> list[Group]:
    """Honest work, but in `count` rollouts one token is the one with the `rank`-th best score, and what follows follows
    from it.
    """
    groups, dice = list(await field.honest(mining_window, indices)), chance(mining_window)
    dues = assigned(field, mining_window, indices)
    places = [(at, index) for at, group in enumerate(groups) for index in range(len(group.rollouts))]
    chosen = dice.sample(places, count)
    edits = [(at, index, dice.randrange(len(groups[at].rollouts[index].tokens))) for at, index in chosen]

    async def rewrite(edit: tuple[int, int, int]) -> Rollout:
        at, index, place = edit
        kept = groups[at].rollouts[index].tokens[:place]
        tokens = await _rewritten(field, dues[at], dues[at].seeds[index], kept, rank)
        return (await finished(field, mining_window, dues[at], [tokens])).rollouts[0]

    for (at, index, _), rollout in zip(edits, await gather(rewrite, edits), strict=True):
        rollouts = list(groups[at].rollouts)
        rollouts[index] = rollout
        groups[at] = with_rollouts(groups[at], rollouts)
    return groups


async def _rewritten(field: Field, due: Assignment, seed: bytes, kept: Tokens, rank: int) -> Tokens:
    """A completion that begins with some tokens, then the one of another rank, then goes on as is due."""
    engine, params = await field.serving(), field.task.run.sampling.params()
    words, tokens = sampling.seed_words([seed]), kept
    while not tokens or (tokens[-1] != params.eos and len(tokens) < params.max_tokens):
        logits = (await engine.forward([due.prompt], [(*tokens, 0)]))[0].logits[-1:]
        scores = logits / params.temperature + sampling.noise(words, torch.tensor([len(tokens)]), logits.shape[-1])
        tokens = (*tokens, int(scores.topk(rank).indices[0, -1]))
        rank = 1
    return tokens


@animal("one edited token in 1% of rollouts", Reason.SAMPLING)
async def edited_1(field: Field, mining_window: MiningWindow, indices: Sequence[int]) -> list[Group]:
    """The runner-up in place of the winner, at least once a window."""
    return await edited(field, mining_window, indices, max(1, len(indices) * field.group_size // 100))


@animal("one edited token in 10% of rollouts", Reason.SAMPLING)
async def edited_10(field: Field, mining_window: MiningWindow, indices: Sequence[int]) -> list[Group]:
    """The same, ten times as often."""
    return await edited(field, mining_window, indices, max(1, len(indices) * field.group_size // 10))


@animal("special tokens", Reason.SAMPLING)
async def special_tokens(field: Field, mining_window: MiningWindow, indices: Sequence[int]) -> list[Group]:
    """A pad in the middle of a rollout of each group."""
    groups = []
    for group, due in zip(
        await field.honest(mining_window, indices), assigned(field, mining_window, indices), strict=True
    ):
        tokens = list(group.rollouts[0].tokens)
        tokens[len(tokens) // 2 - 1] = 0
        bent = await finished(field, mining_window, due, [tuple(tokens)])
        groups.append(with_rollouts(group, [bent.rollouts[0], *group.rollouts[1:]]))
    return groups


@animal("tokens outside the vocabulary", Reason.TOKENS)
async def foreign_tokens(field: Field, mining_window: MiningWindow, indices: Sequence[int]) -> list[Group]:
    """An id that no policy can draw."""

    def bent(rollout: Rollout) -> Rollout:
        tokens = (field.task.vocabulary, *rollout.tokens[1:])
        altered: Rollout = changed(rollout, completion=pack_tokens(tokens))
        return altered

    groups = await field.honest(mining_window, indices)
    return [with_rollouts(group, [bent(group.rollouts[0]), *group.rollouts[1:]]) for group in groups]
