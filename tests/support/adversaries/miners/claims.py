"""Adversaries that select rollouts, copy the work of others, or make false claims."""

from dataclasses import replace

from protocol.encoding import REWARD_UNIT
from protocol.judging.verdict import Reason
from protocol.rollout.batch import Group, Rollout, pack_tokens
from roles.policy.assignment import Assignment
from tests.support.adversaries.harness import alter
from tests.support.adversaries.miners.registry import Attempt, adversary, falsified, with_rollouts


@falsified("dropped losers", Reason.QUOTA)
def drop_losers(group: Group) -> Group:
    """Omit the worst rollout of each group."""
    copy: Group = alter(group, rollouts=tuple(sorted(group.rollouts, key=lambda item: -item.reward)[:-1]))
    return copy


@falsified("winners in the losers' place", Reason.SAMPLING, Reason.SKETCH)
def repeat_winners(group: Group) -> Group:
    """Replace every rollout of a group by its best one."""
    best = max(group.rollouts, key=lambda item: item.reward)
    return with_rollouts(group, lambda _: best)


@adversary("gaps in group numbers", Reason.MALFORMED)
async def gaps(attempt: Attempt) -> list[Group]:
    """Omit the first group; the others have their own numbers."""
    return await attempt.harness.honest_groups(attempt.window, [index + 1 for index in attempt.indices])


@adversary("groups left out and the rest renumbered", Reason.PROMPT)
async def renumber_groups(attempt: Attempt) -> list[Group]:
    """Omit the first group, and number the others from 0."""
    return [alter(group, index=group.index - 1) for group in await gaps(attempt)]


@adversary("copied from another miner", Reason.COPIED)
async def copy_neighbour(attempt: Attempt) -> list[Group]:
    """Deliver another miner's groups of the same window under the miner's own key."""
    harness, window = attempt.harness, attempt.window
    await harness.honest_trial(harness.neighbour, window.window)
    groups = await harness.honest_groups(harness.mining_window(window.window, harness.neighbour), attempt.indices)
    return [alter(group, miner=window.miner) for group in groups]


@adversary("replayed from an old window", Reason.COPIED)
async def replay_window(attempt: Attempt) -> list[Group]:
    """Deliver the miner's own accepted groups of an earlier window."""
    harness, window = attempt.harness, attempt.window.window
    await harness.honest_trial(harness.miner, window + 500_000)
    groups = await harness.honest_groups(harness.mining_window(window + 500_000), attempt.indices)
    return [alter(group, window=window) for group in groups]


@falsified("false reward", Reason.REWARD)
def false_reward(group: Group) -> Group:
    """Claim for every rollout the opposite reward."""
    return with_rollouts(group, lambda item: alter(item, reward=REWARD_UNIT if item.reward < REWARD_UNIT else 0))


class _RolloutWithLogprobs(Rollout):
    logprobs: bytes


class _GroupWithLogprobs(Group):
    rollouts: tuple[_RolloutWithLogprobs, ...]


@falsified("false log-probabilities", Reason.MALFORMED)
def false_logprobs(group: Group) -> Group:
    """Add log-probabilities, for which a rollout has no field."""
    rollouts = (_RolloutWithLogprobs(**dict(item), logprobs=bytes(len(item.sketch))) for item in group.rollouts)
    return _GroupWithLogprobs(**dict(group) | {"rollouts": tuple(rollouts)})


async def _group_after_other_prompt(attempt: Attempt, assignment: Assignment) -> Group:
    other = replace(assignment, prompt=assignment.prompt[1:])
    return await attempt.complete(other, await attempt.completions(other, other.seeds))


@adversary("prompt tampered with", Reason.PROMPT)
async def other_prompt(attempt: Attempt) -> list[Group]:
    """Complete another prompt, and deliver it as the prompt."""
    return [await _group_after_other_prompt(attempt, assignment) for assignment in attempt.assignments]


@adversary("prompt tampered with, the due one shown", Reason.SKETCH)
async def hide_prompt(attempt: Attempt) -> list[Group]:
    """Complete another prompt, and claim the assigned one."""
    return [
        alter(group, prompt=pack_tokens(assignment.prompt))
        for group, assignment in zip(await other_prompt(attempt), attempt.assignments, strict=True)
    ]
