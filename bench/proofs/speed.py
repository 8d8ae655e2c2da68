"""Table (e): generation, a bare prefill and verification of the same rollouts on one core, and where the time goes.

CPU seconds of this process: neighbours on the machine do not count. Each figure is the least of several runs.
"""

import time
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import torch

from bench.proofs.setting import GROUP_SIZE, Setting
from bench.zoo.field import Field, inline
from grailnode import genesis
from grailnode.calibration import proof_file
from grailnode.engine.torch_engine import TorchEngine
from protocol import challenge, sampling, sketch
from protocol.evidence import weigh
from protocol.rollout import Group
from roles.miner.produce import HonestProducer
from roles.ports import Engine
from roles.sequences import pad
from roles.validator.judge import Judge

_RUNS = 5
_TURNS = 20


async def _least(work: Callable[[], Awaitable[Any]], runs: int = _RUNS) -> float:
    """CPU seconds of the fastest run."""
    return (await _least_in_turn(work, runs=runs))[0]


async def _least_in_turn(*works: Callable[[], Awaitable[Any]], runs: int) -> list[float]:
    """CPU seconds of the fastest run of each, in turn, so that a machine that changes its pace changes it for all."""
    seconds: list[list[float]] = [[] for _ in works]
    for _ in range(runs):
        for own, work in zip(seconds, works, strict=True):
            start = time.process_time()
            await work()
            own.append(time.process_time() - start)
    return list(map(min, seconds))


async def table(setting: Setting, groups: int, dtype: torch.dtype) -> None:
    """Print it for engines that compute in a dtype."""
    proof = proof_file.read(genesis.PACKAGED / proof_file.NAME).thresholds  # any will do: they cost nothing
    field = setting.field(proof, groups)
    engine, turn = TorchEngine(setting.model(), dtype=dtype, run_sync=inline), field.turn(0)
    await engine.stage(setting.newest, setting.weights)
    await engine.commit()
    producer = HonestProducer(field.task, engine)
    made = await producer.produce(turn, range(groups))
    tokens = sum(len(rollout.tokens) for group in made for rollout in group.rollouts)
    judge = Judge(field.task, engine, turn.window, turn.randomness)
    prompts = [group.prompt_tokens for group in made for _ in group.rollouts]
    completions = [rollout.tokens for group in made for rollout in group.rollouts]

    async def generate() -> None:
        await producer.produce(turn, range(groups))

    async def one_by_one() -> None:
        for index in range(groups):
            await producer.produce(turn, [index])

    model = setting.model()
    weights = {name: tensor.to(dtype) for name, tensor in setting.weights.items()}

    async def bare() -> None:
        with torch.inference_mode():
            batch = pad(prompts, completions)
            states = model.hidden(weights, batch.ids, batch.mask)[batch.rows, batch.columns]
            model.logits(weights, states)

    async def prefill() -> None:
        await engine.forward(prompts, completions)

    async def verify() -> None:
        await judge.judge([(group, bytes(32)) for group in made])

    plain, own, check = await _least_in_turn(bare, prefill, verify, runs=_TURNS)
    rows = {
        f"generation, {groups * GROUP_SIZE} rollouts together": await _least(generate, 2),
        f"generation, {GROUP_SIZE} rollouts together": await _least(one_by_one, 2),
        "bare prefill of every rollout": plain,
        "prefill with each prompt once (the engine)": own,
        "verification (Judge.judge)": check,
    }
    print(
        f"{tokens} completion tokens, {setting.policy.vocabulary} in the vocabulary, one core, {str(dtype).removeprefix('torch.')}"
    )
    for name, seconds in rows.items():
        print(f"{name:42} {tokens / seconds:9.0f} tokens/s  {seconds / tokens * 1e6:7.1f} us a token")
    together, single, *_ = rows.values()
    print(f"verification is {together / check:.1f} and {single / check:.1f} times faster than generation, ", end="")
    print(
        f"takes {check / plain:.3f} times as long as the bare prefill and {check / own:.3f} times as long as the engine's"
    )
    await _parts(field, engine, made, tokens)


async def _parts(field: Field, engine: Engine, made: list[Group], tokens: int) -> None:
    """What a verification does beside the prefill."""
    turn = field.turn(0)
    prompts = [group.prompt_tokens for group in made for _ in group.rollouts]
    completions = [rollout.tokens for group in made for rollout in group.rollouts]
    seen = await engine.forward(prompts, completions)
    logits, hidden = torch.cat([item.logits for item in seen]), torch.cat([item.hidden for item in seen])
    drawn = torch.tensor([token for completion in completions for token in completion])
    lengths = [len(completion) for completion in completions]
    due = [field.task.assign(turn.window, turn.randomness, turn.miner, group.index) for group in made]
    seeds = [seed for item in due for seed in item.seeds]
    seed = challenge.sketch_seed(field.task.run_id, turn.window, turn.randomness)
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
            weigh(np.zeros(sum(own), np.int16), np.zeros(sum(own), np.float32), own, proof)

    async def rewards() -> None:
        for item, group in zip(due, made, strict=True):
            await field.task.rewards(item.problem, [rollout.tokens for rollout in group.rollouts])

    for part in (sketches, margins, logprobs, evidence, rewards):
        print(f"  {part.__name__:12} {await _least(part) / tokens * 1e6:6.2f} us a token")
