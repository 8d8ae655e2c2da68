"""Workload A of the patch benchmarks: the BF16 view of FP32 AdamW masters before and after one update.

    python -m bench.checkpoints --rows 4096 --columns 4096

This command prints the learning rate and the share of changed elements of each target A1 to A4. Weights are drawn from
N(0, 0.0147). The gradient of a step is (mu + N(0, 1)) times lognormal row and column scales that are drawn anew in each
step. AdamW has betas (0.9, 0.95), a learning-rate warm-up of 20 steps, and makes 60 steps. Gradients do not depend on
the weights here, so the masters are `start + rate * drift` for any learning rate. Therefore one simulation serves every
target, and bisection finds the rate at which the last update changes the target's share of BF16 elements. The command
takes half a minute with the defaults, some minutes with 4096 rows, and needs nothing but the installed program.
"""

import argparse
from dataclasses import dataclass
from typing import Final

import torch

from protocol.patch.values import bits_of

TARGETS: Final = {"A1": 0.010, "A2": 0.006, "A3": 0.05, "A4": 0.30}
"""Share of the BF16 elements that the last update changes, by target."""

STEPS: Final = 60
WARM_UP: Final = 20
WEIGHT_DEVIATION: Final = 0.0147
SCALE_DEVIATION: Final = 0.5  # of the logarithm of a row's or a column's scale
MEAN_DEVIATION: Final = 0.1  # of mu, each element's mean gradient, in units of the noise
BETAS: Final = (0.9, 0.95)
EPSILON: Final = 1e-8


@dataclass(frozen=True)
class Trajectory:
    """The masters of one tensor as a function of the learning rate: `start + rate * drift`, FP32 [rows, columns].

    Attributes:
        start: masters before the first step.
        before, after: drift before and after the last step.
    """

    start: torch.Tensor
    before: torch.Tensor
    after: torch.Tensor

    def views(self, rate: float) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the BF16 views before and after the last update."""
        old = (self.start + rate * self.before).to(torch.bfloat16)
        new = (self.start + rate * self.after).to(torch.bfloat16)
        return old, new

    def density(self, rate: float) -> float:
        """Return the share of BF16 elements that the last update changes."""
        old, new = self.views(rate)
        return float((bits_of(old) != bits_of(new)).mean())


def noisy_gradient(mean: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Return a gradient of the mean's shape: noise around it, times lognormal scales of the indices of each dimension.

    Args:
        mean: float32, in units of the noise.
    """
    gradient = torch.randn(mean.shape, generator=generator).add_(mean)
    for dimension in range(mean.dim()):
        size = [1] * mean.dim()
        size[dimension] = mean.shape[dimension]
        gradient *= torch.exp(SCALE_DEVIATION * torch.randn(size, generator=generator))
    return gradient


def simulate(rows: int, columns: int, seed: int) -> Trajectory:
    """Simulate sixty AdamW steps of one tensor of `rows` x `columns`."""
    generator = torch.Generator().manual_seed(seed)
    shape = (rows, columns)
    start = torch.randn(shape, generator=generator).mul_(WEIGHT_DEVIATION)
    mean = torch.randn(shape, generator=generator).mul_(MEAN_DEVIATION)
    first, second, drift = torch.zeros(shape), torch.zeros(shape), torch.zeros(shape)
    before = drift
    for step in range(1, STEPS + 1):
        gradient = noisy_gradient(mean, generator)
        first.lerp_(gradient, 1 - BETAS[0])
        second.mul_(BETAS[1]).addcmul_(gradient, gradient, value=1 - BETAS[1])
        scale = (second / (1 - BETAS[1] ** step)).sqrt_().add_(EPSILON)
        warm_up = min(1.0, step / WARM_UP)
        if step == STEPS:
            before = drift.clone()
        drift.addcdiv_(first, scale, value=-warm_up / (1 - BETAS[0] ** step))
    return Trajectory(start, before, drift)


def find_rate(trajectory: Trajectory, density: float) -> float:
    """Return the learning rate at which the last update changes a share `density` of the BF16 elements."""
    low, high = 1e-9, 1e-1
    for _ in range(40):
        middle = (low * high) ** 0.5
        if trajectory.density(middle) < density:
            low = middle
        else:
            high = middle
    return high


def main() -> None:
    """Print the learning rate and the density of each target."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1024, help="rows of the tensor")
    parser.add_argument("--columns", type=int, default=4096, help="columns of the tensor")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights and gradients")
    arguments = parser.parse_args()
    trajectory = simulate(arguments.rows, arguments.columns, arguments.seed)
    for target, target_density in TARGETS.items():
        rate = find_rate(trajectory, target_density)
        density = trajectory.density(rate)
        print(f"{target}  target {target_density:.3%}  changed {density:.3%}  learning rate {rate:.2e}")


if __name__ == "__main__":
    main()
