"""Sites that train with AdamW and noisy gradients, and a coordinator that weighs what they send: no I/O, and no clock.

The loss is half the squared distance of the weights from a target that is far away, so its gradient is the same for
all, and each step of a site adds a noise of its own. A site's moments go on from round to round, as those of
`protocol.outer.local_work`. Codec, comparison and step of the shared state are those of the product.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from protocol import pseudogradient
from protocol.outer.comparing import SentRounds, compare
from protocol.outer.robust import Weighting, weigh_round
from protocol.outer.round_records import RoundRules
from protocol.outer.shared_state import SharedState

Vector = NDArray[np.float32]
Attack = Callable[[Vector, int], Vector]
"""Returns what a site sends instead of its update, base - local, in the round with a number from 0."""

SIZE = 2048
NEW_MOMENTS = (np.zeros((2, SIZE)), 0)


class NoisySite:
    """A site with moments of its own."""

    def __init__(self, seed: int, steps: int, *, rate: float, noise: float) -> None:
        self._random = np.random.default_rng(seed)
        self._steps, self._rate, self._noise = steps, rate, noise
        self.moments = NEW_MOMENTS
        self.feedback = torch.zeros(SIZE)

    def local_steps(self, weights: Vector, gradient: Vector) -> tuple[Vector, tuple[NDArray[np.float64], int]]:
        """Return the weights and the moments after a round's steps."""
        (first, second), count = self.moments
        local = weights.astype(np.float64)
        for _ in range(self._steps):
            own = gradient + self._noise * self._random.standard_normal(SIZE)
            count += 1
            first, second = 0.9 * first + 0.1 * own, 0.95 * second + 0.05 * own * own
            local -= self._rate * first / (1 - 0.9**count) / (np.sqrt(second / (1 - 0.95**count)) + 1e-8)
        return local.astype(np.float32), (np.stack([first, second]), count)


def weighed_rounds(
    rules: RoundRules,
    rounds: int,
    *,
    steps: Sequence[int],
    seed: int = 0,
    rate: float = 3e-5,
    noise: float = 1.0,
    attack: Attack | None = None,
    has_bounds: bool = True,
) -> tuple[list[Weighting], Vector]:
    """Return how the contributions of each round are weighed, and the weights at the end.

    Args:
        steps: local steps of each site in a round.
        noise: of a step's gradient, whose length is that of `noise` = 1 without it.
        attack: of site 1.
        has_bounds: whether the coordinator has bounds; else the mean of all contributions counts.
    """
    random = np.random.default_rng(seed)
    begin = (0.02 * random.standard_normal(SIZE)).astype(np.float32)
    direction = random.standard_normal(SIZE).astype(np.float32)
    shared = SharedState.begin({"w": torch.from_numpy(begin)}, has_momentum=rules.momentum > 0)
    sites = [NoisySite(97 * seed + place, count, rate=rate, noise=noise) for place, count in enumerate(steps)]
    workers, sent, weightings = [bytes([place]) for place in range(len(sites))], SentRounds(), []
    for number in range(rounds):
        weights, ends, encoded = shared.weights["w"].numpy(), [], []
        for place, site in enumerate(sites):
            local, moments = site.local_steps(weights, direction)
            if attack is not None and place == 1:
                local = weights - attack(weights - local, number)
            uses = rules.uses_feedback(shared.step)
            encoded.append(
                pseudogradient.encode(
                    shared.weights,
                    {"w": torch.from_numpy(local)},
                    {"w": site.feedback} if uses else None,
                    rules.coding,
                    shared.digests.weights,
                    decay=rules.feedback_decay if uses else 1.0,
                )
            )
            ends.append(moments)
        payloads = [item.payload for item in encoded]
        comparison = compare(shared, payloads, rules, bytes(32))
        comparison = replace(comparison, projections=comparison.projections[:, :SIZE])  # the others are 0
        weighting = weigh_round(workers, comparison, sent)
        if not has_bounds:
            weighting = replace(weighting, factors=(1.0,) * len(workers))
        sent = sent.after(weighting.sent)
        counted = [place for place, factor in enumerate(weighting.factors) if factor > 0]
        shared = shared.after(
            [payloads[place] for place in counted], [weighting.factors[place] for place in counted], rules
        )
        for place, site in enumerate(sites):
            site.moments = ends[place] if place in counted else NEW_MOMENTS
            if place in counted and rules.uses_feedback(number):
                site.feedback = encoded[place].residual["w"]
            else:
                site.feedback = torch.zeros(SIZE)
        weightings.append(weighting)
    return weightings, shared.weights["w"].numpy()
