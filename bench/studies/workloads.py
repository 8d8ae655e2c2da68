"""The workloads of the studies: a small policy that learns, and a matrix with the weights of a real layer.

The policy is the packaged one. It learns sums from rollouts of its own with the product's learner: 8 groups of 8
rollouts in a step, and a version after each step. Its gradients are real, but its weights are not those of a large
model.

The layer has weights from N(0, 0.0147) and gradients of noise (bench/checkpoints.py). They do not depend on the
weights, so the product's AdamW runs once at a learning rate of 1 from zeros: the weights at any rate are the first ones
plus the rate times what it moved.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain, count
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from bench.checkpoints import MEAN_DEVIATION, WEIGHT_DEVIATION, noisy_gradient
from bench.outer.methods import VARIANTS
from grailnode.engine.models import build
from grailnode.engine.policy import PACKAGED_POLICY, Policy
from protocol.environments import Environment, Problem
from protocol.outer.local_work import begin_round, encode_work, masters, without_masters
from protocol.outer.shared_state import SharedState
from roles.trainer.learn.learner import Learner, LearnerSettings
from roles.trainer.learn.optimizer import MasterOptimizer
from roles.trainer.learn.training_settings import OptimizerSettings
from roles.trainer.verified_batch import VerifiedGroup
from tests.support.simulation.learning import Setup, Simulation

WARM_UP: Final = 20
"""Optimizer steps in which the learning rate grows (PULSE, F.4)."""
STEPS: Final = 84
"""Optimizer steps of a run."""
GROUPS: Final = 8
"""Groups of 8 rollouts in a step of the policy."""
PASS_TOKENS: Final = 1024
"""Tokens of a pass, whose activations are in memory at once."""
ROWS, COLUMNS = 256, 2048
SITES, LOCAL_STEPS = 2, 2


@dataclass(frozen=True)
class Recipe:
    """How weights are trained: the learning rate at its peak, the steps over which it grows, and AdamW's betas."""

    rate: float = 3e-6
    warm_up: int = WARM_UP
    betas: tuple[float, float] = (0.9, 0.95)

    def settings(self, max_grad_norm: float = 1.0) -> OptimizerSettings:
        """Return the settings of the optimizer."""
        return OptimizerSettings(
            learning_rate=self.rate,
            warmup_steps=self.warm_up,
            beta1=self.betas[0],
            beta2=self.betas[1],
            max_grad_norm=max_grad_norm,
        )


@dataclass(frozen=True)
class State:
    """The weights after a step.

    Attributes:
        step: from 0, before the first one.
        weights: the FP32 masters, flat.
        gradient: of the step, before clipping, flat; empty where it is not kept.
        reward: mean of the step's rollouts; NaN where there are none.
    """

    step: int
    weights: Tensor
    gradient: Tensor = field(default_factory=lambda: torch.empty(0))
    reward: float = math.nan


class LearningPolicy(Simulation):
    """A policy that learns step by step from rollouts of its own.

    Args:
        directory: of the policy.
        groups: of 8 rollouts in a step.
        delay: how many steps older the policy is that samples a step's rollouts.
        held_out: problems on which pass@1 is measured.
        task: an environment without a name in the product.
        setup: other fields of Setup.

    Attributes:
        sent: bytes that sites sent for the newest version.
    """

    sent = 0

    def __init__(
        self,
        recipe: Recipe,
        directory: Path = PACKAGED_POLICY,
        *,
        groups: int = GROUPS,
        seed: int = 0,
        delay: int = 0,
        held_out: int = 256,
        task: Environment | None = None,
        **setup: Any,
    ) -> None:
        fields = Setup(policy=str(directory), seed=seed, groups=groups, held_out=held_out, **setup)
        super().__init__(fields, environment=task)
        self._delay = delay
        self._rewards: dict[str, list[float]] = {}
        model = build(Policy.load(directory))
        settings = LearnerSettings(optimizer=recipe.settings(), max_batch_tokens=PASS_TOKENS)
        self._learner = Learner(model, self.versions[0], settings)

    def states(self, steps: int) -> Iterator[State]:
        """Yield the state before the first step and after each one."""
        yield State(0, _flat(masters(self._learner.state())))
        for step in range(1, steps + 1):
            gradients = self._learner.gradients(self._rollouts(step))
            gradient = _flat(gradients.tensors)
            report = self._learner.update(gradients)
            self._versions.append(self._learner.view())
            yield State(step, _flat(masters(self._learner.state())), gradient, report.reward)

    def rewards(self, steps: int) -> Iterator[dict[str, list[float]]]:
        """Yield the rewards of each step's rollouts by their kind, after it. A large policy has no memory for more
        states.
        """
        for step in range(1, steps + 1):
            self._rewards = {}
            self._learner.step(self._rollouts(step))
            self._versions.append(self._learner.view())
            yield self._rewards

    def _reward(self, problem: Problem, tokens: tuple[int, ...]) -> float:
        reward = super()._reward(problem, tokens)
        self._rewards.setdefault(problem.stratum, []).append(reward)
        return reward

    def _rollouts(self, step: int) -> list[VerifiedGroup]:
        version = max(0, step - 1 - self._delay)
        self.serve(version)
        return self._mine(step, version)

    def forget(self, version: int) -> None:
        """Give back the memory of a version that no later step needs."""
        if version >= 0:
            self._versions[version] = {}

    def newest_pass_at_1(self) -> float:
        """Return the share of held-out problems that the newest version solves greedily."""
        self.serve(len(self.versions) - 1)
        return self.pass_at_1()


class Sites(LearningPolicy):
    """Two sites that train one policy by PULSELoCo: a version is a round in which each takes `LOCAL_STEPS`."""

    def rewards(self, steps: int) -> Iterator[dict[str, list[float]]]:
        """Yield the rewards of each round's rollouts, after it; they come from the version before, as in PULSE, J.2."""
        rules, numbers = VARIANTS["grid"].rules(LOCAL_STEPS, steps), count(1)
        state = self._learner.state()
        shared = SharedState.begin(masters(state), has_momentum=True)
        inner: Mapping[str, Tensor] = without_masters(state)
        sites: list[tuple[Mapping[str, Tensor], Mapping[str, Tensor] | None]] = [(inner, None)] * SITES
        for number in range(steps):
            self.serve(number)
            self._rewards, payloads = {}, []
            for _ in range(SITES):
                inner, feedback = sites.pop(0)
                self._learner.restore(begin_round(inner, shared.weights))
                inner = state = {}  # gives their memory back
                for _ in range(LOCAL_STEPS):
                    self._learner.step(self._mine(next(numbers), number))
                work = encode_work(shared, self._learner.state(), feedback, rules, bytes(32))
                sites.append((work.inner, work.feedback))
                payloads.append(work.payload)
            self.sent = sum(map(len, chain(*payloads)))
            shared = shared.after(payloads, [1.0] * SITES, rules)
            self._versions.append(shared.bf16_view())
            yield self._rewards


class Layer:
    """A matrix with the weights of a real layer, and by how much each step of AdamW moves them at a rate of 1.

    Args:
        recipe: its rate is not used.
    """

    def __init__(self, recipe: Recipe, steps: int = STEPS, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        shape = ROWS, COLUMNS
        self._start = torch.randn(shape, generator=generator).mul_(WEIGHT_DEVIATION).flatten()
        mean = torch.randn(shape, generator=generator).mul_(MEAN_DEVIATION)
        unit = Recipe(1.0, recipe.warm_up, recipe.betas)
        optimizer = MasterOptimizer({"layer": torch.zeros(shape)}, unit.settings(max_grad_norm=math.inf))
        self._drifts = [torch.zeros(ROWS * COLUMNS)]
        for _ in range(steps):
            optimizer.step({"layer": noisy_gradient(mean, generator)})
            self._drifts.append(optimizer.masters["layer"].flatten().clone())

    def states(self, rate: float) -> Iterator[State]:
        """Yield the state before the first step and after each one; their gradients are not kept."""
        for step, drift in enumerate(self._drifts):
            yield State(step, self._start + rate * drift)


def _flat(tensors: Mapping[str, Tensor]) -> Tensor:
    return torch.cat([tensors[name].detach().flatten() for name in sorted(tensors)])
