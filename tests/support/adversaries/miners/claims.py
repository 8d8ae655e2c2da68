"""Adversaries that select rollouts, copy the work of others, or make false claims."""

from collections.abc import Sequence
from dataclasses import replace

from protocol.encoding import REWARD_UNIT
from protocol.judging.verdict import Reason
from protocol.rollout.batch import Group, Rollout, pack_tokens
from roles.miner.produce import MiningWindow
from roles.policy.assignment import Assignment
from tests.support.adversaries.harness import TrialHarness, alter
from tests.support.adversaries.miners.registry import adversary, assignments_of, complete_group, with_rollouts
from tests.support.adversaries.miners.tokens import generate_completions


@adversary("dropped losers", Reason.QUOTA)
async def drop_losers(harness: TrialHarness, mining_window: MiningWindow, indices: Sequence[int]) -> list[Group]:
    """Omit the worst rollout of each group."""
    groups = await harness.honest_groups(mining_window, indices)
    return [with_rollouts(group, sorted(group.rollouts, key=lambda item: -item.reward)[:-1]) for group in groups]


@adversary("winners in the losers' place", Reason.SAMPLING, Reason.SKETCH)
async def repeat_winners(harness: TrialHarness, mining_window: MiningWindow, indices: Sequence[int]) -> list[Group]:
    """Replace every rollout of a group by its best one."""
    groups = await harness.honest_groups(mining_window, indices)
    return [with_rollouts(g, [max(g.rollouts, key=lambda item: item.reward)] * len(g.rollouts)) for g in groups]


@adversary("gaps in group numbers", Reason.MALFORMED)
async def gaps(harness: TrialHarness, mining_window: MiningWindow, indices: Sequence[int]) -> list[Group]:
    """Omit the first group; the others have their own numbers."""
    return await harness.honest_groups(mining_window, [index + 1 for index in indices])


@adversary("groups left out and the rest renumbered", Reason.PROMPT)
async def renumber_groups(harness: TrialHarness, mining_window: MiningWindow, indices: Sequence[int]) -> list[Group]:
    """Omit the first group, and number the others from 0."""
    return [alter(group, index=group.index - 1) for group in await gaps(harness, mining_window, indices)]


@adversary("copied from another miner", Reason.COPIED)
async def copy_neighbour(harness: TrialHarness, mining_window: MiningWindow, indices: Sequence[int]) -> list[Group]:
    """Deliver another miner's groups of the same window under the miner's own key."""
    await harness.honest_trial(harness.neighbour, mining_window.window)
    groups = await harness.honest_groups(harness.mining_window(mining_window.window, harness.neighbour), indices)
    return [alter(group, miner=mining_window.miner) for group in groups]


@adversary("replayed from an old window", Reason.COPIED)
async def replay_window(harness: TrialHarness, mining_window: MiningWindow, indices: Sequence[int]) -> list[Group]:
    """Deliver the miner's own accepted groups of an earlier window."""
    earlier_window = mining_window.window + 500_000
    await harness.honest_trial(harness.miner, earlier_window)
    return [
        alter(group, window=mining_window.window)
        for group in await harness.honest_groups(harness.mining_window(earlier_window), indices)
    ]


@adversary("false reward", Reason.REWARD)
async def false_reward(harness: TrialHarness, mining_window: MiningWindow, indices: Sequence[int]) -> list[Group]:
    """Claim for every rollout the opposite reward."""

    def falsify(rollout: Rollout) -> Rollout:
        copy: Rollout = alter(rollout, reward=REWARD_UNIT if rollout.reward < REWARD_UNIT else 0)
        return copy

    return [
        with_rollouts(group, [falsify(item) for item in group.rollouts])
        for group in await harness.honest_groups(mining_window, indices)
    ]


class _RolloutWithLogprobs(Rollout):
    logprobs: bytes


class _GroupWithLogprobs(Group):
    rollouts: tuple[_RolloutWithLogprobs, ...]


@adversary("false log-probabilities", Reason.MALFORMED)
async def false_logprobs(harness: TrialHarness, mining_window: MiningWindow, indices: Sequence[int]) -> list[Group]:
    """Add log-probabilities, for which a rollout has no field."""

    def falsify(item: Rollout) -> _RolloutWithLogprobs:
        return _RolloutWithLogprobs(**dict(item), logprobs=bytes(len(item.sketch)))

    groups = await harness.honest_groups(mining_window, indices)
    return [_GroupWithLogprobs(**dict(g) | {"rollouts": tuple(falsify(item) for item in g.rollouts)}) for g in groups]


async def _group_after_other_prompt(
    harness: TrialHarness, mining_window: MiningWindow, assignment: Assignment
) -> Group:
    other_assignment = replace(assignment, prompt=assignment.prompt[1:])
    return await complete_group(
        harness,
        mining_window,
        other_assignment,
        await generate_completions(harness, other_assignment, assignment.seeds),
    )


@adversary("prompt tampered with", Reason.PROMPT)
async def other_prompt(harness: TrialHarness, mining_window: MiningWindow, indices: Sequence[int]) -> list[Group]:
    """Complete another prompt, and deliver it as the prompt."""
    return [
        await _group_after_other_prompt(harness, mining_window, assignment)
        for assignment in assignments_of(harness, mining_window, indices)
    ]


@adversary("prompt tampered with, the due one shown", Reason.SKETCH)
async def hide_prompt(harness: TrialHarness, mining_window: MiningWindow, indices: Sequence[int]) -> list[Group]:
    """Complete another prompt, and claim the assigned one."""
    assignments = assignments_of(harness, mining_window, indices)
    return [
        alter(
            await _group_after_other_prompt(harness, mining_window, assignment), prompt=pack_tokens(assignment.prompt)
        )
        for assignment in assignments
    ]
