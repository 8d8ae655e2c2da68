"""Other selections, other people's work, and false claims."""

from collections.abc import Sequence
from dataclasses import replace

from protocol.judging.verdict import Reason
from protocol.rollout.batch import Group, Rollout, pack_tokens
from roles.miner.produce import MiningWindow
from roles.policy.assignment import Assignment
from tests.support.adversaries.harness import Field, changed
from tests.support.adversaries.miners.registry import animal, assigned, finished, with_rollouts
from tests.support.adversaries.miners.tokens import drawn


@animal("dropped losers", Reason.QUOTA)
async def dropped_losers(field: Field, mining_window: MiningWindow, indices: Sequence[int]) -> list[Group]:
    """Groups without their worst rollout."""
    groups = await field.honest(mining_window, indices)
    return [with_rollouts(group, sorted(group.rollouts, key=lambda item: -item.reward)[:-1]) for group in groups]


@animal("winners in the losers' place", Reason.SAMPLING, Reason.SKETCH)
async def repeated_winners(field: Field, mining_window: MiningWindow, indices: Sequence[int]) -> list[Group]:
    """Every rollout of a group is its best one."""
    groups = await field.honest(mining_window, indices)
    return [with_rollouts(g, [max(g.rollouts, key=lambda item: item.reward)] * len(g.rollouts)) for g in groups]


@animal("gaps in group numbers", Reason.MALFORMED)
async def gaps(field: Field, mining_window: MiningWindow, indices: Sequence[int]) -> list[Group]:
    """The first group is left out, the others keep their numbers."""
    return await field.honest(mining_window, [index + 1 for index in indices])


@animal("groups left out and the rest renumbered", Reason.PROMPT)
async def renumbered(field: Field, mining_window: MiningWindow, indices: Sequence[int]) -> list[Group]:
    """The same, hidden."""
    return [changed(group, index=group.index - 1) for group in await gaps(field, mining_window, indices)]


@animal("copied from another miner", Reason.COPIED)
async def copied(field: Field, mining_window: MiningWindow, indices: Sequence[int]) -> list[Group]:
    """What the neighbour made in the same window, under the own name."""
    await field.trial_of(field.neighbour, mining_window.window)
    groups = await field.honest(field.mining_window(mining_window.window, field.neighbour), indices)
    return [changed(group, miner=mining_window.miner) for group in groups]


@animal("replayed from an old window", Reason.COPIED)
async def replayed(field: Field, mining_window: MiningWindow, indices: Sequence[int]) -> list[Group]:
    """The own work of the window before, which was accepted then."""
    before = mining_window.window + 500_000
    await field.trial_of(field.miner, before)
    return [
        changed(group, window=mining_window.window)
        for group in await field.honest(field.mining_window(before), indices)
    ]


@animal("false reward", Reason.REWARD)
async def false_reward(field: Field, mining_window: MiningWindow, indices: Sequence[int]) -> list[Group]:
    """Every rollout says that it won, or the opposite where it did."""

    def lie(rollout: Rollout) -> Rollout:
        altered: Rollout = changed(rollout, reward=1.0 if rollout.reward < 1.0 else 0.0)
        return altered

    return [
        with_rollouts(group, [lie(item) for item in group.rollouts])
        for group in await field.honest(mining_window, indices)
    ]


class _RolloutWithLogprobs(Rollout):
    logprobs: bytes


class _GroupWithLogprobs(Group):
    rollouts: tuple[_RolloutWithLogprobs, ...]


@animal("false log-probabilities", Reason.MALFORMED)
async def false_logprobs(field: Field, mining_window: MiningWindow, indices: Sequence[int]) -> list[Group]:
    """Log-probabilities are nothing that a miner may say: there is no field for them."""

    def lie(item: Rollout) -> _RolloutWithLogprobs:
        return _RolloutWithLogprobs(**dict(item), logprobs=bytes(len(item.sketch)))

    groups = await field.honest(mining_window, indices)
    return [_GroupWithLogprobs(**dict(g) | {"rollouts": tuple(lie(item) for item in g.rollouts)}) for g in groups]


async def _behind_another_prompt(field: Field, mining_window: MiningWindow, due: Assignment) -> Group:
    easier = replace(due, prompt=due.prompt[1:])
    return await finished(field, mining_window, easier, await drawn(field, easier, due.seeds))


@animal("prompt tampered with", Reason.PROMPT)
async def other_prompt(field: Field, mining_window: MiningWindow, indices: Sequence[int]) -> list[Group]:
    """Another prompt, honestly completed and openly shown."""
    return [await _behind_another_prompt(field, mining_window, due) for due in assigned(field, mining_window, indices)]


@animal("prompt tampered with, the due one shown", Reason.SKETCH)
async def hidden_prompt(field: Field, mining_window: MiningWindow, indices: Sequence[int]) -> list[Group]:
    """Another prompt, honestly completed, under the due one's name."""
    dues = assigned(field, mining_window, indices)
    return [
        changed(await _behind_another_prompt(field, mining_window, due), prompt=pack_tokens(due.prompt)) for due in dues
    ]
