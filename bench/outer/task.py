"""The task of the trials: sums, a small policy, and the product's own learner.

The policy of most trials is that of the simulated networks (tests/support/simulation/small_policy.py): one layer of
width 32 with 13,440 weights, which solves one sum in five. A trial of 24 rounds takes some seconds.
"""

from collections.abc import Mapping
from typing import Final

from torch import Tensor

from grailnode.demo import smollm2
from grailnode.engine.policy import PACKAGED_POLICY
from roles.trainer.learn.learner import Learner
from roles.trainer.verified_batch import VerifiedGroup
from tests.support.simulation import small_policy
from tests.support.simulation.learning import Setup, Simulation

WARM_UP: Final = 10
"""Local steps in which a site's learning rate grows."""

HELD_OUT: Final = 512
"""Problems on which pass@1 is measured."""


def setup_of(policy: str) -> Setup:
    """Return the task of a policy: small, demo or smollm2. The last has groups of 4 completions instead of 8."""
    if policy == "smollm2":
        checkpoint = smollm2.checkpoint(print)
        return Setup(str(checkpoint), environment="sums", chat=1, group_size=4, groups_per_step=1, held_out=9)
    place = {"small": small_policy.DIRECTORY, "demo": PACKAGED_POLICY}[policy]
    return Setup(str(place), groups_per_step=2, held_out=HELD_OUT)


class Task(Simulation):
    """Miners and held-out problems for all sites of a trial, and the learner with which one site after the other takes
    its steps.
    """

    def publish(self, view: Mapping[str, Tensor]) -> None:
        """Make a BF16 view the policy that miners and held-out problems use."""
        self._versions[-1] = {}  # it is not served again
        self._versions.append(dict(view))
        self.serve(len(self._versions) - 1)

    def mine(self, number: int) -> list[VerifiedGroup]:
        """Return the groups of a round, sampled with the newest policy; their logs have its probabilities."""
        return self._mine(number, len(self._versions) - 1)

    @property
    def learner(self) -> Learner:
        return self._learner
