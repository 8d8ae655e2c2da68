"""The network's learning dynamics in one process, without I/O.

Window by window: miners sample with the policy that was newest `lag` windows ago, a prefill recomputes the
log-probabilities as a validator does, groups enter the replay buffer, the trainer steps as often as there are groups
for it, and publishes. Costs are process CPU seconds of one thread, so that other programs on the machine do not matter.
"""

import hashlib
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from grailnode.chat.chat_template import ChatTemplate
from grailnode.cli.actions.policy_evaluation import PolicyRules
from grailnode.engine.lora_model import LoraModel
from grailnode.engine.models import build
from grailnode.engine.policy import PACKAGED_POLICY, Policy, load_weights
from grailnode.engine.torch_engine import TorchEngine
from grailnode.run import requirements
from grailnode.run.base_files import start_lora
from grailnode.run.requirements import difficulty_rule
from grailnode.run.rules import Rules
from protocol import environments
from protocol.difficulty import Counts
from protocol.encoding import REWARD_UNIT
from protocol.environments import Environment, Problem
from protocol.environments.mixture import Strata, drawn_member
from protocol.outer.local_work import masters
from protocol.quantization import Precision, quantize
from protocol.rollout.sampling import SamplingParams, log_probabilities
from protocol.run import ChatSpec, SamplingSpec
from roles.policy.assignment import PolicyTask, encode_prompt
from roles.policy.episodes import OpenEpisode, PlayedEpisode, play
from roles.ports import Request
from roles.trainer.learn.learner import Learner, LearnerSettings
from roles.trainer.learn.replay_buffer import ReplayBuffer
from roles.trainer.learn.training_settings import OptimizerName, OptimizerSettings, ReplaySettings
from roles.trainer.verified_batch import VerifiedGroup
from tests.support.adversaries.weight_changes import changed_share
from tests.support.builders.policies import inline, run_without_waiting
from tests.support.builders.verified_batches import make_group


@dataclass(frozen=True)
class Setup:
    """The parameters of a run. A window's rollouts are `groups` (of all miners together) times `group_size`.

    With a `lora_rank` it trains adapters of the modules `lora_targets` (with commas), whose alpha is twice the rank.
    """

    policy: str = str(PACKAGED_POLICY)
    windows: int = 60
    seed: int = 0
    lag: int = 3
    groups: int = 32
    group_size: int = 8
    groups_per_step: int = 16
    steps_per_version: int = 1
    optimizer: OptimizerName = "adamw"
    learning_rate: float = 7e-6
    warmup: int = 10
    temperature: float = 1.0
    max_uses: int = 1
    decay: float = 0.7
    max_staleness: int = 16
    held_out: int = 256
    environment: str = "addition"
    chat: int = 0
    max_tokens: int = 5
    lora_rank: int = 0
    lora_targets: str = "q_proj,k_proj,v_proj,o_proj,gate_proj,up_proj,down_proj"
    precision: Precision = "bf16"
    difficulty: int = 0
    dither: int = 1
    json: str = ""


@dataclass
class Costs:
    """CPU seconds by phase."""

    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def of(self, phase: str) -> Iterator[None]:
        """Add the CPU time of the block to a phase."""
        start = time.process_time()
        yield
        self.seconds[phase] = self.seconds.get(phase, 0.0) + time.process_time() - start


class Simulation:
    """One run of the network.

    Args:
        keep_masters: whether `masters` gets the learner's FP32 weights of each version.
        environment: None for addition.
    """

    def __init__(self, setup: Setup, *, keep_masters: bool = False, environment: Environment | None = None) -> None:
        self.setup = setup
        self.masters: list[dict[str, Tensor]] = []
        self._keep_masters = keep_masters
        self.costs = Costs()
        self._policy = Policy.load(Path(setup.policy))
        model, start = build(self._policy), load_weights(Path(setup.policy))
        lora = start_lora(self._policy, setup.lora_rank, 0.0, setup.lora_targets.split(","))
        if lora is not None:
            model, start = LoraModel(build(self._policy, lora=lora.spec), start), dict(lora.adapters)
        self._engine = TorchEngine(model, run_sync=inline)
        self._environment = environment or environments.get(setup.environment)
        rules = Rules(environment=setup.environment)
        episode = requirements.episode(rules) if environment is None else None
        tokens = requirements.completion_tokens(rules) if episode else setup.max_tokens
        self._params = SamplingParams(setup.temperature, tokens, self._policy.stops)
        sampling = SamplingSpec(temperature=setup.temperature, max_tokens=tokens, stops=self._policy.stops)
        task_rules = PolicyRules(sampling, episode_rule=episode.rule(sampling) if episode else None)
        self._task = PolicyTask(
            bytes(32), task_rules, self._environment, self._policy.tokenizer, self._policy.vocabulary, inline
        )
        self._chat: ChatSpec | None = None
        if setup.chat:
            self._chat = ChatTemplate.read(self._policy.directory).chat(
                "", [self._environment.problem(bytes(32)).prompt]
            )
        optimizer = OptimizerSettings(
            optimizer=setup.optimizer,
            learning_rate=setup.learning_rate,
            warmup_steps=setup.warmup,
            dither=bool(setup.dither),
        )
        settings = LearnerSettings(self._params, optimizer=optimizer)
        self._learner = Learner(model, start, settings, precision=setup.precision)
        bounds = ReplaySettings(decay=setup.decay, max_staleness=setup.max_staleness, max_uses=setup.max_uses)
        self.replay = ReplayBuffer(bounds, setup.seed)
        self._versions: list[dict[str, Tensor]] = [quantize(start, setup.precision)]
        self._newest_at: list[int] = []  # version, by window
        self.sparsity: list[float] = []  # by version, from 1 on
        self._strata = Strata(self._environment)
        self._rule = difficulty_rule(self._strata.weights) if setup.difficulty else None
        self._counts: list[Counts] = []  # of the accepted groups, by window
        self._shares: list[tuple[int, ...]] = [self._rule.shares(())] if self._rule else []  # by version
        self.tokens = 0

    @property
    def versions(self) -> Sequence[Mapping[str, Tensor]]:
        """All versions so far, the genesis first."""
        return self._versions

    def window(self, number: int) -> dict[str, float]:
        """Simulate one window, and return its figures by name."""
        version = self._newest_at[number - self.setup.lag] if number >= self.setup.lag else 0
        self.serve(version)
        groups = self._mine(number, version)
        for group in groups:
            self.replay.add(group)
        flat = statistics.fmean(not group.informative for group in groups)
        row = {"reward": statistics.fmean(r for group in groups for r in group.rewards), "flat": flat} | self._learn()
        self._newest_at.append(len(self._versions) - 1)
        self.serve(self._newest_at[-1])
        return row | {"version": self._newest_at[-1], "pass_at_1": self.pass_at_1()}

    def _learn(self) -> dict[str, float]:
        """Step while there are enough groups; return the last step's figures and the newest version's sparsity."""
        figures: dict[str, float] = {}
        while len(self.replay) >= self.setup.groups_per_step:
            with self.costs.of("training"):
                report = self._learner.step(self.replay.draw(self.setup.groups_per_step))
            figures = {name: getattr(report, name) for name in ("grad_norm", "clipped", "entropy")}
            if report.step % self.setup.steps_per_version == 0:
                view = self._learner.view()
                self.sparsity.append(1 - changed_share(self._versions[-1], view))
                self._versions.append(view)
                if self._rule:  # the verdicts of a window are sealed and revealed in the next one
                    self._shares.append(self._rule.shares(self._counts[-2:-1]))
                if self._keep_masters:
                    self.masters.append(masters(self._learner.state()))
                self.replay.advance(len(self._versions) - 1)
        return figures | {"sparsity": self.sparsity[-1] if self.sparsity else 1.0}

    def serve(self, version: int) -> None:
        with self.costs.of("staging"):
            run_without_waiting(self._engine.stage(version, self._versions[version]))
            run_without_waiting(self._engine.commit())

    def _mine(self, number: int, version: int) -> list[VerifiedGroup]:
        setup, policy = self.setup, self._policy
        seeds = [hashlib.sha256(f"{setup.seed} {number} {group}".encode()).digest() for group in range(setup.groups)]
        drawn: list[int] = []
        if self._rule is None:
            problems = [self._environment.problem(seed) for seed in seeds]
        else:
            drawn = [drawn_member(self._shares[version], seed) for seed in seeds]
            names = [self._rule.strata[place].name for place in drawn]
            problems = [self._strata.problem(name, seed) for name, seed in zip(names, seeds, strict=True)]
        prompts = [encode_prompt(policy.tokenizer, self._chat, problem.prompt) for problem in problems]
        requests = [
            Request(prompt, hashlib.sha256(seed + bytes([rollout])).digest()[:16])
            for prompt, seed in zip(prompts, seeds, strict=True)
            for rollout in range(setup.group_size)
        ]
        mine = self._play if self._task.run.episode_rule else self._complete
        groups = mine(version, seeds, problems, requests)
        if self._rule is not None:
            before = self._counts[-1] if self._counts else None
            accepted = zip(drawn, (group.informative for group in groups), strict=True)
            self._counts.append(self._rule.count(before, 1, accepted))
        return groups

    def _complete(
        self, version: int, seeds: Sequence[bytes], problems: Sequence[Problem], requests: Sequence[Request]
    ) -> list[VerifiedGroup]:
        """Return groups of completions, with the log-probabilities of a validator's prefill."""
        setup, groups = self.setup, []
        with self.costs.of("generation"):
            completions = [g.tokens for g in run_without_waiting(self._engine.generate(requests, self._params))]
        self.tokens += sum(map(len, completions))
        with self.costs.of("verification"):
            forwards = run_without_waiting(self._engine.forward([request.prompt for request in requests], completions))
        for index, problem in enumerate(problems):
            rollouts = slice(index * setup.group_size, (index + 1) * setup.group_size)
            rewards = tuple(self._reward(problem, tokens) for tokens in completions[rollouts])
            logprobs = [
                log_probabilities(result.logits, torch.tensor(tokens), setup.temperature)
                for result, tokens in zip(forwards[rollouts], completions[rollouts], strict=True)
            ]
            prompt = requests[rollouts.start].prompt
            groups.append(make_group(seeds[index], version, prompt, completions[rollouts], logprobs, rewards))
        return groups

    def _play(
        self, version: int, seeds: Sequence[bytes], problems: Sequence[Problem], requests: Sequence[Request]
    ) -> list[VerifiedGroup]:
        """Return groups of episodes, with the log-probabilities of their generation."""
        size, groups = self.setup.group_size, []
        with self.costs.of("generation"):
            episodes = self._episodes([problem for problem in problems for _ in range(size)], requests)
        for place, seed in enumerate(seeds):
            own = episodes[place * size :][:size]
            tokens, turns = [item.episode.tokens for item in own], [item.episode.turns for item in own]
            logprobs = [torch.tensor(item.generation.logprobs) for item in own]
            rewards = [item.episode.reward / REWARD_UNIT for item in own]
            self.tokens += sum(map(len, tokens))
            groups.append(make_group(seed, version, requests[place * size].prompt, tokens, logprobs, rewards, turns))
        return groups

    def _episodes(self, problems: Sequence[Problem], requests: Sequence[Request]) -> list[PlayedEpisode]:
        episodes = [
            PlayedEpisode(OpenEpisode(self._task, problem, 2 * request.seed or bytes(32)), request.prompt, request.seed)
            for problem, request in zip(problems, requests, strict=True)
        ]
        run_without_waiting(play(self._task, self._engine, episodes))
        return episodes

    def pass_at_1(self) -> float:
        """Return the share of held-out problems that the served policy solves greedily."""
        return statistics.fmean(reward for rewards in self.rewards_by_stratum().values() for reward in rewards)

    def rewards_by_stratum(self) -> dict[str, list[float]]:
        """Return the rewards of held-out problems that the served policy solves greedily, by their kind."""
        problems = [self._environment.held_out_problem(index) for index in range(self.setup.held_out)]
        prompts = [encode_prompt(self._policy.tokenizer, self._chat, problem.prompt) for problem in problems]
        requests = [Request(prompt, b"") for prompt in prompts]
        if self._task.run.episode_rule:
            with self.costs.of("evaluation"):
                episodes = self._episodes(problems, requests)
            return {"": [item.episode.reward / REWARD_UNIT for item in episodes]}
        with self.costs.of("evaluation"):
            answers = [item.tokens for item in run_without_waiting(self._engine.generate(requests, self._params))]
        rewards: dict[str, list[float]] = {}
        for problem, tokens in zip(problems, answers, strict=True):
            rewards.setdefault(problem.stratum, []).append(self._reward(problem, tokens))
        return rewards

    def _reward(self, problem: environments.Problem, tokens: tuple[int, ...]) -> float:
        text = self._policy.tokenizer.decode(self._params.without_stop(tokens))
        return self._environment.reward(problem, text)


def run(setup: Setup, show: Callable[[str], None]) -> dict[str, Any]:
    """Simulate a run, show a line for the genesis and for each window, and return a summary."""
    simulation = Simulation(setup)
    simulation.serve(0)
    first = simulation.pass_at_1()
    show(f"genesis pass@1 {first:.3f}")
    rows = []
    for number in range(setup.windows):
        row = simulation.window(number)
        rows.append(row)
        show(f"window {number:3d}  " + "  ".join(f"{name} {value:.4f}" for name, value in row.items()))
    return _summary(simulation, first, rows)


def _summary(simulation: Simulation, first: float, rows: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    setup, curve = simulation.setup, [row["pass_at_1"] for row in rows]
    return {
        "first": first,
        "last": curve[-1],
        "rise": curve[-1] - first,
        "pass_at_1": {str(n): curve[n - 1] for n in range(10, len(curve) + 1, 10)},
        "reward": [rows[0]["reward"], rows[-1]["reward"]],
        "flat": statistics.fmean(row["flat"] for row in rows),
        "versions": len(simulation.sparsity),
        "sparsity_mean": statistics.fmean(simulation.sparsity),
        "sparsity_min": min(simulation.sparsity),
        "cpu_seconds_per_window": {k: round(v / setup.windows, 4) for k, v in simulation.costs.seconds.items()},
        "tokens_per_window": simulation.tokens / setup.windows,
    }
