"""Table (f): generation, a bare prefill and verification of the same rollouts on one core, and the time of each part.

Figures are CPU seconds of this process, so other programs on the machine do not count. Each is the minimum of several
runs.
"""

import time
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import torch

from bench.proofs.setting import GROUP_SIZE, Setting
from grailnode.engine.torch_engine import TorchEngine
from protocol.judging.evidence import NO_EVIDENCE, advance, count_values, repeated_positions, trial_values
from protocol.rollout import challenge, sampling, sketch
from protocol.rollout.batch import Group
from roles.miner.produce import HonestProducer
from roles.policy.sequences import to_batch
from roles.validator.judge import Judge
from tests.support.adversaries.harness import TrialHarness, alter
from tests.support.builders.proofs import LENIENT, packaged_thresholds
from tests.support.simulation.network import inline

_RUNS = 5
_MIN_TOKENS = 30_000  # tokens in all runs of one figure; there are at least two runs


async def _fastest(function: Callable[[], Awaitable[Any]]) -> float:
    """Return the CPU seconds of the fastest run."""
    return (await _fastest_alternating(function, runs=_RUNS))[0]


async def _fastest_alternating(*functions: Callable[[], Awaitable[Any]], runs: int) -> list[float]:
    """Return the CPU seconds of the fastest run of each function.

    The functions run alternately, so that a change of the machine's speed affects all of them.
    """
    seconds: list[list[float]] = [[] for _ in functions]
    for _ in range(runs):
        for runs_of_function, function in zip(seconds, functions, strict=True):
            start = time.process_time()
            await function()
            runs_of_function.append(time.process_time() - start)
    return list(map(min, seconds))


async def table(setting: Setting, groups: int, dtype: torch.dtype, completion_tokens: int | None = None) -> None:
    """Print the table.

    Args:
        setting: the policy.
        groups: groups that are generated and verified.
        dtype: dtype of the engines.
        completion_tokens: length of the completions; None for stories.
    """
    thresholds = alter(packaged_thresholds(), **LENIENT)  # with these the check runs to its end under any dtype
    harness = setting.harness(groups, tokens=completion_tokens)
    engine, mining_window = TorchEngine(setting.model(), dtype=dtype, run_sync=inline), harness.mining_window(0)
    await engine.stage(setting.newest, setting.weights)
    await engine.commit()
    producer = HonestProducer(harness.task, engine)
    honest_groups = await producer.produce(mining_window, range(groups))
    tokens = sum(len(rollout.tokens) for group in honest_groups for rollout in group.rollouts)
    judge = Judge(harness.task, engine, mining_window.window, mining_window.randomness)
    prompts = [group.prompt_tokens for group in honest_groups for _ in group.rollouts]
    completions = [rollout.tokens for group in honest_groups for rollout in group.rollouts]

    async def generate() -> None:
        await producer.produce(mining_window, range(groups))

    async def one_by_one() -> None:
        for index in range(groups):
            await producer.produce(mining_window, [index])

    model = setting.model()
    weights = {name: tensor.to(dtype) for name, tensor in setting.weights.items()}

    async def bare() -> None:
        with torch.inference_mode():
            batch = to_batch(prompts, completions)
            states = model.hidden(weights, batch.ids, batch.mask)[batch.rows, batch.columns]
            model.logits(weights, states)

    async def prefill() -> None:
        for forward in await engine.forward(prompts, completions):
            _ = forward.logits

    async def verify() -> None:
        assert all(
            outcome.accepted
            for outcome in await judge.judge([(group, bytes(32)) for group in honest_groups], thresholds)
        )

    async def verify_one_by_one() -> None:
        for group in honest_groups:
            await judge.judge([(group, bytes(32))], thresholds)

    all_text, group_text = f"{groups * GROUP_SIZE} rollouts together", f"{GROUP_SIZE} rollouts together, a group"
    functions = {
        f"generation, {all_text}": generate,
        f"generation, {group_text}": one_by_one,
        "bare prefill of every rollout": bare,
        "prefill with each prompt once (the engine)": prefill,
        f"verification, {all_text}": verify,
        f"verification, {group_text}": verify_one_by_one,
    }
    seconds = await _fastest_alternating(*functions.values(), runs=max(2, _MIN_TOKENS // tokens))
    print(
        f"{tokens} completion tokens, {setting.policy.vocabulary} in the vocabulary, one core, "
        f"{str(dtype).removeprefix('torch.')}"
    )
    for name, minimum in zip(functions, seconds, strict=True):
        print(f"{name:44} {tokens / minimum:9.0f} tokens/s  {minimum / tokens * 1e6:7.1f} us a token")
    generation, group_generation, bare_prefill, engine_prefill, verification, group_verification = seconds
    print(
        f"verification is {group_generation / group_verification:.1f} times faster than generation, both a group at a "
        f"time; {generation / verification:.1f} times with {all_text}; "
        f"{group_generation / verification:.1f} times if only the validator has so many"
    )
    print(
        f"it takes {verification / bare_prefill:.3f} times as long as the bare prefill, "
        f"{verification / engine_prefill:.3f} times as long as the engine's"
    )
    await _print_parts(harness, engine, honest_groups, tokens)


async def _print_parts(harness: TrialHarness, engine: TorchEngine, honest_groups: list[Group], tokens: int) -> None:
    """Print the seconds of each part of a verification except the prefill."""
    mining_window = harness.mining_window(0)
    prompts = [group.prompt_tokens for group in honest_groups for _ in group.rollouts]
    completions = [rollout.tokens for group in honest_groups for rollout in group.rollouts]
    forwards = await engine.forward(prompts, completions)
    hidden = torch.cat([forward.hidden for forward in forwards])
    logits = forwards[0].project(hidden)
    tokens_tensor = torch.tensor([token for completion in completions for token in completion])
    lengths = [len(completion) for completion in completions]
    assignments = [
        harness.task.assign(mining_window.window, mining_window.randomness, mining_window.miner, group.index)
        for group in honest_groups
    ]
    seeds = [seed for item in assignments for seed in item.seeds]
    seed = challenge.sketch_seed(harness.task.run_id, mining_window.window, mining_window.randomness)
    claim = b"".join(rollout.sketch for group in honest_groups for rollout in group.rollouts)
    proof = harness.task.run.proof

    async def sketches() -> None:
        sketch.distances(claim, sketch.commit(proof.sketch, hidden, seed))

    async def margins() -> None:
        sampling.batch_margins(logits, tokens_tensor, *sampling.token_places(seeds, lengths), 1.0)

    async def logprobs() -> None:
        sampling.log_probabilities(logits, tokens_tensor, 1.0)

    async def evidence() -> None:
        row = proof.table[0]
        for start in range(0, len(lengths), GROUP_SIZE):
            part = slice(start, start + GROUP_SIZE)
            zeros = np.zeros(sum(lengths[part]), np.int64)
            repeats = repeated_positions(completions[part])
            advance(NO_EVIDENCE, count_values(trial_values(zeros, zeros, zeros > 0, lengths[part], repeats), row), row)

    async def rewards() -> None:
        for item, group in zip(assignments, honest_groups, strict=True):
            await harness.task.rewards(item.problem, [rollout.tokens for rollout in group.rollouts])

    for part in (sketches, margins, logprobs, evidence, rewards):
        print(f"  {part.__name__:12} {await _fastest(part) / tokens * 1e6:6.2f} us a token")
