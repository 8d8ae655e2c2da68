"""Makes versions of a policy as a run's trainer does (GRPO on its own rollouts), without a network."""

import random
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from hashlib import sha256

import torch
from torch import Tensor

from grailnode.engine.policy import Tokenizer
from grailnode.engine.torch_engine import TorchEngine
from protocol.environments import Environment
from protocol.rollout.sampling import SamplingParams, log_probabilities
from roles.policy.causal_model import CausalModel
from roles.ports import Request
from roles.trainer.learn.learner import Learner, LearnerSettings, StepReport
from roles.trainer.learn.training_settings import OptimizerSettings
from roles.trainer.verified_batch import VerifiedGroup
from tests.support.builders.policies import engine_of
from tests.support.builders.verified_batches import make_group


@dataclass(frozen=True)
class ReinforcementTask:
    """The environment, tokenizer and sampling of the reinforcement.

    Attributes:
        groups, group_size: groups of a step, and rollouts of a group.
        learning_rate: AdamW's.
    """

    environment: Environment
    text: Tokenizer
    params: SamplingParams
    groups: int
    group_size: int
    learning_rate: float


async def reinforce(
    model: CausalModel, start: Mapping[str, Tensor], task: ReinforcementTask, versions: int, seed: int
) -> AsyncIterator[tuple[StepReport, dict[str, Tensor]]]:
    """Yield versions, each by one optimizer step on rollouts of the version before."""
    optimizer = OptimizerSettings(learning_rate=task.learning_rate, warmup_steps=5)
    learner = Learner(model, start, LearnerSettings(optimizer=optimizer))
    weights = dict(start)
    for version in range(1, versions + 1):
        engine = await engine_of(model, weights)
        seeds = [sha256(f"{seed} {version} {group}".encode()).digest() for group in range(task.groups)]
        report = learner.step([await _group(engine, task, version, seed) for seed in seeds])
        weights = learner.view()
        yield report, weights


async def _group(engine: TorchEngine, task: ReinforcementTask, version: int, seed: bytes) -> VerifiedGroup:
    problem, size = task.environment.problem(seed), task.group_size
    prompt, rng = task.text.encode(problem.prompt), random.Random(seed)
    generations = await engine.generate([Request(prompt, rng.randbytes(16)) for _ in range(size)], task.params)
    completions = tuple(generation.tokens for generation in generations)
    forwards = await engine.forward([prompt] * size, completions)
    logprobs = [log_probabilities(f.logits, torch.tensor(t), 1.0) for f, t in zip(forwards, completions, strict=True)]
    texts = [task.params.without_stop(tokens) for tokens in completions]
    rewards = tuple(task.environment.reward(problem, task.text.decode(tokens)) for tokens in texts)
    return make_group(seed, version - 1, prompt, completions, logprobs, rewards)
