"""The packaged policy, which adds, learns to play wordle: rollouts, log-probabilities and steps as in a network."""

import hashlib
import statistics

import pytest
import torch

from grailnode.engine.models import build
from grailnode.engine.policy import PACKAGED_POLICY, Policy, load_weights
from grailnode.engine.torch_engine import TorchEngine
from protocol import environments
from protocol.encoding import REWARD_UNIT
from protocol.rollout.batch import pack_tokens
from protocol.run import EpisodeSpec, SamplingSpec
from roles.policy.assignment import Task
from roles.policy.episodes import OpenEpisode, PlayedEpisode, play
from roles.trainer.learn.learner import Learner, LearnerSettings
from roles.trainer.learn.optimizer_settings import OptimizerSettings
from roles.trainer.verified_batch import VerifiedGroup
from tests.support.builders import samples
from tests.support.builders.policies import inline, run_without_waiting

GROUPS, GROUP_SIZE, STEPS, TOKENS = 24, 8, 60, 18


@pytest.fixture
def task() -> Task:
    policy = Policy.load(PACKAGED_POLICY)
    run = samples.run_manifest(
        environment=samples.task(name="wordle"),
        sampling=SamplingSpec(temperature=1.0, max_tokens=TOKENS, stops=policy.stops),
        episode=EpisodeSpec(turns=6, turn_tokens=3, reply_tokens=8, tokens=58),
    )
    return Task(bytes(32), run, environments.get("wordle"), policy.tokenizer, policy.vocabulary, inline)


def played_group(task: Task, name: str) -> list[PlayedEpisode]:
    seed = hashlib.sha256(name.encode()).digest()
    problem = task.environment.problem(seed)
    return [
        PlayedEpisode(
            OpenEpisode(task, problem, seed), task.prompt(problem), hashlib.sha256(seed + bytes([index])).digest()[:16]
        )
        for index in range(GROUP_SIZE)
    ]


def verified(task: Task, name: str, group: list[PlayedEpisode]) -> VerifiedGroup:
    logprobs = torch.tensor([value for item in group for value in item.generation.logprobs])
    return VerifiedGroup(
        digest=hashlib.sha256(name.encode()).digest(),
        version=0,
        prompt=pack_tokens(task.tokenizer.encode("**=")),
        completions=tuple(pack_tokens(item.episode.tokens) for item in group),
        turns=tuple(tuple((count, pack_tokens(reply)) for count, reply in item.episode.turns) for item in group),
        logprobs=logprobs.numpy().astype("<f4").tobytes(),
        rewards=tuple(item.episode.reward / REWARD_UNIT for item in group),
    )


@pytest.mark.slow
def test_the_reward_of_wordle_rises(task: Task) -> None:
    model, weights = build(Policy.load(PACKAGED_POLICY)), load_weights(PACKAGED_POLICY)
    optimizer = OptimizerSettings(learning_rate=4e-5, warmup_steps=5)
    settings = LearnerSettings(max_tokens=TOKENS, stops=task.run.sampling.stops, optimizer=optimizer)
    learner, engine = Learner(model, weights, settings), TorchEngine(model, run_sync=inline)
    rewards = []
    for step in range(STEPS):
        run_without_waiting(engine.stage(step, learner.view()))
        run_without_waiting(engine.commit())
        played = {name: played_group(task, name) for name in (f"{step} {number}" for number in range(GROUPS))}
        run_without_waiting(play(task, engine, [item for group in played.values() for item in group]))
        groups = [verified(task, name, group) for name, group in played.items()]
        rewards.append(statistics.fmean(reward for group in groups for reward in group.rewards))
        learner.step([group for group in groups if group.informative])
    assert statistics.fmean(rewards[:5]) < 0.1
    assert statistics.fmean(rewards[-5:]) > 0.15
