"""The task of the trials: sums, a small policy, and the product's own learner.

The policy is that of the simulated networks (tests/support/simulation/small_policy.py): one layer of width 32 with
13,440 weights, which solves one sum in five. A trial of 24 rounds takes some seconds.
"""

from collections.abc import Mapping, Sequence
from typing import Final

from torch import Tensor

from grailnode.engine.models import build
from grailnode.engine.policy import Policy
from roles.trainer.learn.learner import Learner, LearnerSettings
from roles.trainer.learn.optimizer_settings import OptimizerSettings
from roles.trainer.verified_batch import VerifiedGroup
from tests.support.simulation import small_policy
from tests.support.simulation.learning import Setup, Simulation

GROUPS_PER_STEP: Final = 2
"""Groups of 8 rollouts in a local step of one site."""

WARM_UP: Final = 10
"""Local steps in which a site's learning rate grows."""

HELD_OUT: Final = 512
"""Problems on which pass@1 is measured."""


class Task(Simulation):
    """Miners and held-out problems for all sites of a trial.

    Args:
        groups: groups that miners make for all sites at a time.
        seed: of problems and sampling.
    """

    def __init__(self, groups: int, seed: int) -> None:
        super().__init__(Setup(policy=str(small_policy.DIRECTORY), groups=groups, seed=seed, held_out=HELD_OUT))

    def publish(self, view: Mapping[str, Tensor]) -> None:
        """Make a BF16 view the policy that miners and held-out problems use."""
        self._versions.append(dict(view))
        self.serve(len(self._versions) - 1)

    def mine(self, number: int) -> list[VerifiedGroup]:
        """Return the groups of a round, sampled with the newest policy; their logs have its probabilities."""
        return self._mine(number, len(self._versions) - 1)


def new_learner(weights: Mapping[str, Tensor], rate: float) -> Learner:
    """Return a site's learner."""
    model = build(Policy.load(small_policy.DIRECTORY))
    optimizer = OptimizerSettings(learning_rate=rate, warmup_steps=WARM_UP)
    return Learner(model, weights, LearnerSettings(optimizer=optimizer))


def split(groups: Sequence[VerifiedGroup], count: int) -> list[Sequence[VerifiedGroup]]:
    """Return so many parts of a sequence, of the same size."""
    size = len(groups) // count
    return [groups[index * size : (index + 1) * size] for index in range(count)]
