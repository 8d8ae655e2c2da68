"""Bytes of contributions, and what the gate sends, for weights and optimizer steps of a real model's size.

The weights are those of one layer of a Llama of 75M parameters, from the distribution of workload A of the patch
benchmarks (bench/checkpoints.py), and so are the gradients: noise, which differs between sites, around a mean that all
sites share. Gradients do not depend on the weights, so that one simulation of AdamW serves every learning rate. What is
sent, and the shared weights of the next round, come from the real codec and the real arithmetic.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import torch
from torch import Tensor

from bench.checkpoints import BETAS, EPSILON, MEAN_DEVIATION, WARM_UP, WEIGHT_DEVIATION, noisy_gradient
from bench.outer.methods import VARIANTS
from bench.outer.trials import SITES
from bench.tables import print_table
from protocol import pseudogradient
from protocol.outer.shared_state import SharedState

WIDTH: Final = 640
SHAPES: Final = {
    "q": (WIDTH, WIDTH), "k": (WIDTH // 4, WIDTH), "v": (WIDTH // 4, WIDTH), "o": (WIDTH, WIDTH),
    "gate": (1760, WIDTH), "up": (1760, WIDTH), "down": (WIDTH, 1760), "norm.1": (WIDTH,), "norm.2": (WIDTH,),
}  # fmt: skip
BARS: Final = {"grid": (50, 400), "exact": (15, 120)}
"""By how much a payload must be smaller than DiLoCo's and than DDP's at a learning rate of 1e-6."""
METHODS: Final = (*BARS, "sparse-32", "sparse-128")


class NoiseSite:
    """AdamW of one site, driven by noise around a mean gradient: by how much a round moves the weights at rate 1.

    Args:
        means: the mean gradient that all sites share.
    """

    def __init__(self, means: Mapping[str, Tensor], seed: int) -> None:
        self._means = means
        self._generator = torch.Generator().manual_seed(seed)
        self._first = {name: torch.zeros_like(mean) for name, mean in means.items()}
        self._second = {name: torch.zeros_like(mean) for name, mean in means.items()}
        self._steps = 0

    def round(self, local_steps: int) -> dict[str, Tensor]:
        """Take local steps and return the sum of the updates, by which weights decrease."""
        drift = {name: torch.zeros_like(mean) for name, mean in self._means.items()}
        for _ in range(local_steps):
            self._steps += 1
            warm_up = min(1.0, self._steps / WARM_UP)
            for name, mean in self._means.items():
                first, second = self._first[name], self._second[name]
                gradient = noisy_gradient(mean, self._generator)
                first.lerp_(gradient, 1 - BETAS[0])
                second.mul_(BETAS[1]).addcmul_(gradient, gradient, value=1 - BETAS[1])
                scale = (second / (1 - BETAS[1] ** self._steps)).sqrt_().add_(EPSILON)
                drift[name].addcdiv_(first, scale, value=warm_up / (1 - BETAS[0] ** self._steps))
        return drift


def first_weights(
    shapes: Mapping[str, tuple[int, ...]], generator: torch.Generator, deviation: float = WEIGHT_DEVIATION
) -> dict[str, Tensor]:
    """Return weights like those of a trained model: float32; norms are around 1."""
    return {
        name: torch.randn(shape, generator=generator).mul_(deviation if len(shape) > 1 else 0.1)
        + (0.0 if len(shape) > 1 else 1.0)
        for name, shape in shapes.items()
    }


@dataclass(frozen=True)
class Last:
    """The newest round of a run: what site 0 encoded, and the payloads of all sites."""

    shared: SharedState
    local: dict[str, Tensor]
    feedback: dict[str, Tensor] | None
    payloads: list[pseudogradient.Payload]


@dataclass
class Run:
    """A run of one method at one learning rate.

    Attributes:
        shared: the present state; feedback: of each site.
        sent: share of the weights in a contribution, by round; bits: of all payloads; entries: likewise.
        last: the newest round: with what it began, and its payloads.
    """

    variant: str
    rate: float
    shared: SharedState
    feedback: list[dict[str, Tensor] | None] = field(default_factory=lambda: [None] * SITES)
    sent: list[float] = field(default_factory=list)
    bits: int = 0
    entries: int = 0
    last: Last | None = None

    def advance(self, drifts: list[dict[str, Tensor]], rounds: int, local_steps: int) -> None:
        """Let all sites contribute, and apply it."""
        rules = VARIANTS[self.variant].rules(local_steps, rounds)
        shared, payloads, entries = self.shared, list[pseudogradient.Payload](), 0
        uses_feedback = rules.uses_feedback(shared.step)
        for site, drift in enumerate(drifts):
            local = {name: shared.weights[name] - self.rate * drift[name] for name in drift}
            feedback = self.feedback[site] if uses_feedback else None
            decay = rules.feedback_decay if uses_feedback else 1.0
            contribution = pseudogradient.encode(
                shared.weights, local, feedback, rules.coding, shared.digests.weights, decay=decay
            )
            if site == 0:
                self.last = Last(shared, local, feedback, payloads)
            self.feedback[site] = contribution.residual if uses_feedback else None
            payloads.append(contribution.payload)
            entries += sum(contribution.head.entries)
        self.bits += 8 * sum(len(file) for payload in payloads for file in payload)
        self.entries += entries
        self.sent.append(entries / len(drifts) / elements(shared.weights))
        self.shared = shared.after(payloads, [1.0] * len(payloads), rules)


def elements(weights: Mapping[str, Tensor]) -> int:
    """Return the number of weights."""
    return sum(tensor.numel() for tensor in weights.values())


def simulate(
    pairs: list[tuple[str, float]],
    rounds: int,
    local_steps: int,
    shapes: Mapping[str, tuple[int, ...]],
    deviation: float = WEIGHT_DEVIATION,
) -> Iterator[list[Run]]:
    """Yield the runs of some methods and rates after each round."""
    generator = torch.Generator().manual_seed(0)
    weights = first_weights(shapes, generator, deviation)
    means = {name: torch.randn(shape, generator=generator) * MEAN_DEVIATION for name, shape in shapes.items()}
    sites = [NoiseSite(means, 1 + site) for site in range(SITES)]
    runs = []
    for variant, rate in pairs:
        has_momentum = VARIANTS[variant].method.momentum > 0
        runs.append(Run(variant, rate, SharedState.begin(weights, has_momentum=has_momentum)))
    for _ in range(rounds):
        drifts = [site.round(local_steps) for site in sites]
        for run in runs:
            run.advance(drifts, rounds, local_steps)
        yield runs


def sizes(
    rates: list[float], rounds: int, local_steps: int, deviation: float, methods: Sequence[str] = METHODS
) -> None:
    """Print bytes by method and learning rate, and the share that the gate sends by round."""
    pairs = [(variant, rate) for rate in rates for variant in methods if variant in BARS]
    pairs += [(variant, rates[0]) for variant in methods if variant not in BARS]
    runs: list[Run] = []
    for number, runs in enumerate(simulate(pairs, rounds, local_steps, SHAPES, deviation)):  # noqa: B007
        print(f"round {number + 1} of {rounds}", flush=True)
    count = elements(runs[0].shared.weights)
    rows = []
    for run in runs:
        size = run.bits / 8 / rounds / SITES
        ratios = 4 * count / size, local_steps * 4 * count / size
        bars = BARS.get(run.variant) if run.rate == 1e-6 else None
        holds = "" if bars is None else "yes" if ratios[0] >= bars[0] and ratios[1] >= bars[1] else "no"
        rows.append([
            f"{run.rate:g}" if run.variant in BARS else "any", run.variant,
            f"{run.entries / rounds / SITES / count:.2%}", f"{run.bits / run.entries:.2f}", f"{size:.0f}",
            f"{ratios[0]:.1f}x", f"{ratios[1]:.0f}x", holds,
        ])  # fmt: skip
    title = f"{count} weights, deviation {deviation:g}, {rounds} rounds of {local_steps} local steps, {SITES} sites"
    columns = ("rate", "method", "sent", "bits/entry", "bytes a round", "of DiLoCo", "of DDP", "holds")
    print_table(title, columns, rows)
    _print_gate(runs, rounds)


def _print_gate(runs: list[Run], rounds: int) -> None:
    numbers = sorted({number for number in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, rounds) if number <= rounds})
    rows = [
        [f"{run.rate:g}", run.variant, *(f"{run.sent[number - 1]:.2%}" for number in numbers)]
        for run in runs
        if run.variant in BARS
    ]
    print_table("share that the gate sends, by round", ("rate", "method", *map(str, numbers)), rows)
