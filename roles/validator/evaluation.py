"""The evaluation of a policy on held-out problems, by the run's rule (docs/spec/ledger.md)."""

from collections.abc import Sequence

from protocol import limits
from protocol.encoding import REWARD_UNIT
from protocol.environments import Problem
from protocol.judging.ledger import Evaluation, StratumResult
from protocol.rollout import challenge
from roles.policy.assignment import PolicyTask
from roles.policy.episodes import OpenEpisode, PlayedEpisode, play
from roles.policy.sequences import Tokens
from roles.ports import Engine, Request


async def evaluate(task: PolicyTask, engine: Engine, version: int) -> Evaluation:
    """Solve held-out problems with the policy that the engine serves, which is of that version."""
    rule, problems = task.run.evaluation, await task.run_sync(_problems, task)
    prompts = [task.prompt(problem) for problem in problems]
    owners = [index for index in range(len(problems)) for _ in range(rule.completions)]
    if task.run.episode_rule is not None:
        rewards = await _episode_rewards(task, engine, version, problems, prompts)
    else:
        rewards = await _rewards(task, engine, version, problems, prompts)
    solved = [0] * len(problems)
    for index, reward in zip(owners, rewards, strict=True):
        solved[index] += reward >= REWARD_UNIT
    strata: dict[str, list[int]] = {}
    for problem, right in zip(problems, solved, strict=True):
        name = problem.stratum if problem.stratum in strata or len(strata) < limits.MAX_STRATA - 1 else ""
        strata.setdefault(name, [0] * (rule.completions + 1))[right] += 1
    results = [StratumResult(name=name, right=tuple(right)) for name, right in sorted(strata.items())]
    return Evaluation(version=version, strata=tuple(results))


def _problems(task: PolicyTask) -> list[Problem]:
    environment, most = task.environment, task.run.evaluation.problems
    return [environment.held_out_problem(index) for index in range(min(most, environment.held_out_size or most))]


async def _rewards(
    task: PolicyTask, engine: Engine, version: int, problems: Sequence[Problem], prompts: Sequence[Tokens]
) -> tuple[int, ...]:
    """Return the rewards of all completions of all problems, in millionths."""
    rule = task.run.evaluation
    requests = [
        Request(prompt, challenge.evaluation_seed(task.run_id, version, index, sample) if rule.samples else b"")
        for index, prompt in enumerate(prompts)
        for sample in range(rule.completions)
    ]
    completions = [item.tokens for item in await engine.generate(requests, task.run.sampling.params())]
    attempts = [problem for problem in problems for _ in range(rule.completions)]
    return await task.scores(list(zip(attempts, completions, strict=True)))


async def _episode_rewards(
    task: PolicyTask, engine: Engine, version: int, problems: Sequence[Problem], prompts: Sequence[Tokens]
) -> tuple[int, ...]:
    """Return the rewards of all episodes of all problems, in millionths."""
    rule, episodes = task.run.evaluation, []
    for index, (problem, prompt) in enumerate(zip(problems, prompts, strict=True)):
        for sample in range(rule.completions):
            seed = challenge.evaluation_seed(task.run_id, version, index, sample)
            opened = OpenEpisode(task, problem, challenge.episode_seed(seed, 0))
            episodes.append(PlayedEpisode(opened, prompt, seed if rule.samples else b""))
    await play(task, engine, episodes)
    return tuple(item.episode.reward for item in episodes)
