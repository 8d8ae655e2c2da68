"""The evaluation of a policy on held-out problems, by the run's rule (docs/spec/ledger.md)."""

from protocol import limits
from protocol.encoding import REWARD_UNIT
from protocol.environments import Problem
from protocol.judging.ledger import Evaluation, StratumResult
from protocol.rollout import challenge
from roles.policy.assignment import PolicyTask
from roles.policy.episodes import OpenEpisode, PlayedEpisode, play
from roles.ports import Engine, Request


async def evaluate(task: PolicyTask, engine: Engine, version: int) -> Evaluation:
    """Solve held-out problems with the policy that the engine serves, which is of that version."""
    rule, problems = task.run.evaluation, await task.run_sync(_problems, task)
    places = [(index, sample) for index in range(len(problems)) for sample in range(rule.completions)]
    prompts = [task.prompt(problem) for problem in problems]
    seeds = [challenge.evaluation_seed(task.run_id, version, *place) for place in places]
    noise = seeds if rule.samples else [b""] * len(seeds)
    if task.run.episode_rule is None:
        requests = [Request(prompts[index], seed) for (index, _), seed in zip(places, noise, strict=True)]
        generations = await engine.generate(requests, task.run.sampling.params())
        attempts = [(problems[index], item.tokens) for (index, _), item in zip(places, generations, strict=True)]
        rewards = await task.scores(attempts)
    else:
        episodes = [
            PlayedEpisode(OpenEpisode(task, problems[index], challenge.episode_seed(seed, 0)), prompts[index], own)
            for (index, _), seed, own in zip(places, seeds, noise, strict=True)
        ]
        await play(task, engine, episodes)
        rewards = tuple(item.episode.reward for item in episodes)
    solved = [0] * len(problems)
    for (index, _), reward in zip(places, rewards, strict=True):
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
