"""Table (e): generation, a bare prefill and verification of the same rollouts on one core, and where the time goes.

CPU seconds of this process: neighbours on the machine do not count. Each figure is the least of several runs.
"""

import time
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import torch

from bench.proofs.setting import GROUP_SIZE, Setting
from grailnode.calibration import proof_file
from grailnode.engine.policy import PACKAGED_POLICY
from grailnode.engine.torch_engine import TorchEngine
from protocol.judging.evidence import compute_evidence
from protocol.rollout import challenge, sampling, sketch
from protocol.rollout.batch import Group
from roles.miner.produce import HonestProducer
from roles.policy.prefill import join_forwards
from roles.policy.sequences import pad
from roles.ports import Engine
from roles.validator.judge import Judge
from tests.support.adversaries.harness import Field, changed, inline

_RUNS = 5
_TOKENS_IN_ALL = 30_000  # of each figure, in at least two turns
_WIDE = {"sketch_tolerance": 64, "sketch_median": 64, "margin": 100.0, "margin_limit": 100.0}


async def _least(work: Callable[[], Awaitable[Any]]) -> float:
    """CPU seconds of the fastest run."""
    return (await _least_in_turn(work, runs=_RUNS))[0]


async def _least_in_turn(*works: Callable[[], Awaitable[Any]], runs: int) -> list[float]:
    """CPU seconds of the fastest run of each, in turn, so that a machine that changes its pace changes it for all."""
    seconds: list[list[float]] = [[] for _ in works]
    for _ in range(runs):
        for own, work in zip(seconds, works, strict=True):
            start = time.process_time()
            await work()
            own.append(time.process_time() - start)
    return list(map(min, seconds))


async def table(setting: Setting, groups: int, dtype: torch.dtype, length: int | None = None) -> None:
    """Print it for engines that compute in a dtype, and completions of one length; None for stories."""
    measured = proof_file.read(PACKAGED_POLICY / proof_file.NAME).thresholds
    proof = changed(measured, **_WIDE)  # so that the check is made to its end, whatever the dtype
    field = setting.field(proof, groups, tokens=length)
    engine, mining_window = TorchEngine(setting.model(), dtype=dtype, run_sync=inline), field.mining_window(0)
    await engine.stage(setting.newest, setting.weights)
    await engine.commit()
    producer = HonestProducer(field.task, engine)
    made = await producer.produce(mining_window, range(groups))
    tokens = sum(len(rollout.tokens) for group in made for rollout in group.rollouts)
    judge = Judge(field.task, engine, mining_window.window, mining_window.randomness)
    prompts = [group.prompt_tokens for group in made for _ in group.rollouts]
    completions = [rollout.tokens for group in made for rollout in group.rollouts]

    async def generate() -> None:
        await producer.produce(mining_window, range(groups))

    async def one_by_one() -> None:
        for index in range(groups):
            await producer.produce(mining_window, [index])

    model = setting.model()
    weights = {name: tensor.to(dtype) for name, tensor in setting.weights.items()}

    async def bare() -> None:
        with torch.inference_mode():
            batch = pad(prompts, completions)
            states = model.hidden(weights, batch.ids, batch.mask)[batch.rows, batch.columns]
            model.logits(weights, states)

    async def prefill() -> None:
        seen = await engine.forward(prompts, completions)
        for at in range(0, len(seen), GROUP_SIZE):
            _ = join_forwards(seen[at : at + GROUP_SIZE]).logits

    async def verify() -> None:
        assert all(one.accepted for one in await judge.judge([(group, bytes(32)) for group in made]))

    async def verify_one_by_one() -> None:
        for group in made:
            await judge.judge([(group, bytes(32))])

    several, one = f"{groups * GROUP_SIZE} rollouts together", f"{GROUP_SIZE} rollouts together, a group"
    works = {
        f"generation, {several}": generate,
        f"generation, {one}": one_by_one,
        "bare prefill of every rollout": bare,
        "prefill with each prompt once (the engine)": prefill,
        f"verification, {several}": verify,
        f"verification, {one}": verify_one_by_one,
    }
    seconds = await _least_in_turn(*works.values(), runs=max(2, _TOKENS_IN_ALL // tokens))
    print(
        f"{tokens} completion tokens, {setting.policy.vocabulary} in the vocabulary, one core, "
        f"{str(dtype).removeprefix('torch.')}"
    )
    for name, least in zip(works, seconds, strict=True):
        print(f"{name:44} {tokens / least:9.0f} tokens/s  {least / tokens * 1e6:7.1f} us a token")
    together, single, plain, own, check, check_one = seconds
    print(f"verification is {single / check_one:.1f} times faster than generation, both a group at a time; ", end="")
    print(
        f"{together / check:.1f} times with {several}; {single / check:.1f} times where only the validator has so many"
    )
    print(
        f"it takes {check / plain:.3f} times as long as the bare prefill, "
        f"{check / own:.3f} times as long as the engine's"
    )
    await _parts(field, engine, made, tokens)


async def _parts(field: Field, engine: Engine, made: list[Group], tokens: int) -> None:
    """What a verification does beside the prefill."""
    mining_window = field.mining_window(0)
    prompts = [group.prompt_tokens for group in made for _ in group.rollouts]
    completions = [rollout.tokens for group in made for rollout in group.rollouts]
    seen = await engine.forward(prompts, completions)
    logits, hidden = join_forwards(seen).logits, join_forwards(seen).hidden
    drawn = torch.tensor([token for completion in completions for token in completion])
    lengths = [len(completion) for completion in completions]
    due = [
        field.task.assign(mining_window.window, mining_window.randomness, mining_window.miner, group.index)
        for group in made
    ]
    seeds = [seed for item in due for seed in item.seeds]
    seed = challenge.sketch_seed(field.task.run_id, mining_window.window, mining_window.randomness)
    claimed = b"".join(rollout.sketch for group in made for rollout in group.rollouts)
    proof = field.task.run.proof

    async def sketches() -> None:
        sketch.distances(claimed, sketch.commit(proof.sketch, hidden, seed))

    async def margins() -> None:
        sampling.batch_margins(logits, drawn, seeds, lengths, 1.0)

    async def logprobs() -> None:
        sampling.log_probabilities(logits, drawn, 1.0)

    async def evidence() -> None:
        for at in range(0, len(lengths), GROUP_SIZE):
            own = lengths[at : at + GROUP_SIZE]
            compute_evidence(np.zeros(sum(own), np.int16), np.zeros(sum(own), np.float32), own, proof)

    async def rewards() -> None:
        for item, group in zip(due, made, strict=True):
            await field.task.rewards(item.problem, [rollout.tokens for rollout in group.rollouts])

    for part in (sketches, margins, logprobs, evidence, rewards):
        print(f"  {part.__name__:12} {await _least(part) / tokens * 1e6:6.2f} us a token")
