"""Updates of several sites that train the demo's policy together, made by the real learner.

Each site draws problems of its own, samples with the BF16 view of the shared weights, and takes some optimizer steps
from the shared FP32 weights. Its moments stay with it. After each round the outer optimizer applies the mean of the
sites' updates (DiLoCo). No clock is used, so a machine makes the same updates each time.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from roles.trainer.learn.optimizer import MASTER
from tests.support.simulation.learning import Setup, Simulation

Floats = dict[str, NDArray[np.float32]]


@dataclass(frozen=True)
class SiteRound:
    """What one site did in one round.

    Attributes:
        number, site: which round and which site, from 0 on.
        base: the shared FP32 weights with which the round began, by name.
        local: the site's FP32 weights at its end.
    """

    number: int
    site: int
    base: Floats
    local: Floats


class _Site(Simulation):
    """One site: a learner with its own problems."""

    def train(self, base: Floats, steps: int, number: int) -> Floats:
        """Take optimizer steps from `base` and return the FP32 weights that they give."""
        masters = {MASTER + name: torch.from_numpy(values.copy()) for name, values in base.items()}
        self._learner.restore(self._learner.state() | masters)
        view = self._learner.view()
        self._versions.append(view)
        version = len(self._versions) - 1
        self.serve(version)
        for step in range(steps):
            self._learner.step(self._mine(number * steps + step, version))
        state = self._learner.state()
        return {name: state[MASTER + name].numpy() for name in base}


def record(learning_rate: float, *, rounds: int, sites: int = 4, steps: int = 8, seed: int = 0) -> Iterator[SiteRound]:
    """Yield the rounds of all sites, in order.

    Args:
        learning_rate: of the sites' AdamW.
        steps: local optimizer steps of a round, each with 4 groups of 8 rollouts.
    """
    nodes = [
        _Site(Setup(seed=1000 * seed + site, groups=4, learning_rate=learning_rate, warmup=0, held_out=1))
        for site in range(sites)
    ]
    shared = {name: tensor.float().numpy() for name, tensor in nodes[0].versions[0].items()}
    momentum = {name: np.zeros_like(values) for name, values in shared.items()}
    for number in range(rounds):
        results = [node.train(shared, steps, number) for node in nodes]
        for site, local in enumerate(results):
            yield SiteRound(number, site, shared, local)
        following: Floats = {}
        for name, values in shared.items():
            mean = sum((values - local[name] for local in results), np.zeros_like(values)) / np.float32(sites)
            momentum[name] = np.float32(0.9) * momentum[name] + mean
            following[name] = values - np.float32(0.7) * (np.float32(0.9) * momentum[name] + mean)
        shared = following
