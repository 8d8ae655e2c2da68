"""The evaluation of the policy on held-out problems, by the run's rule (docs/spec/ledger.md)."""

from protocol import limits
from protocol.encoding import REWARD_UNIT
from protocol.judging.ledger import Evaluation, StratumResult
from protocol.rollout import challenge
from roles.policy.assignment import Task
from roles.ports import Engine, Request


async def evaluate(task: Task, engine: Engine, version: int) -> Evaluation:
    """Solve held-out problems with the policy that the engine serves, which is of that version."""
    rule, environment, params = task.run.evaluation, task.environment, task.run.sampling.params()
    count = min(rule.problems, environment.held_out_size or rule.problems)
    problems = await task.run_sync(lambda: [environment.held_out_problem(index) for index in range(count)])
    prompts = [task.prompt(problem) for problem in problems]
    if rule.samples:
        requests = [
            Request(prompt, challenge.evaluation_seed(task.run_id, version, index, sample))
            for index, prompt in enumerate(prompts)
            for sample in range(rule.samples)
        ]
        completions = [generation.tokens for generation in await engine.generate(requests, params)]
    else:
        completions = await engine.greedy(prompts, params)
    owners = [index for index in range(count) for _ in range(rule.completions)]
    rewards = await task.rewards_for_attempts(
        [(problems[index], completion) for index, completion in zip(owners, completions, strict=True)]
    )
    solved = [0] * count
    for index, reward in zip(owners, rewards, strict=True):
        solved[index] += reward >= REWARD_UNIT
    strata: dict[str, list[int]] = {}
    for problem, right in zip(problems, solved, strict=True):
        name = problem.stratum if problem.stratum in strata or len(strata) < limits.MAX_STRATA - 1 else ""
        strata.setdefault(name, [0] * (rule.completions + 1))[right] += 1
    results = [StratumResult(name=name, right=tuple(right)) for name, right in sorted(strata.items())]
    return Evaluation(version=version, strata=tuple(results))
