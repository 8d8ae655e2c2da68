"""The bias of groups that end after a probe of equal rewards, exactly: `python -m bench.short_groups [SIZE PROBE]`.

Of a problem that the policy solves with probability p, a group with a share m of right rollouts moves p by
sqrt(m (1 - m)) / (p (1 - p)) on average, with standardized advantages. A short group ends without any if the first
rollouts are all right or all wrong. The command prints, by p: the mean over short groups divided by that over whole
ones (a constant would be no bias); the same where a group is weighted by 1 / (the probability of a mixed probe, given
m), which has none; and for both how much a rollout then tells, mean^2 / (mean square * rollouts), over that of whole
groups.
"""

import argparse
from collections.abc import Sequence
from math import comb, sqrt
from typing import Final

SHARES: Final = (0.001, 0.01, 0.05, 0.1, 0.2, 0.5)


def main() -> None:
    """Print a line for each share of right rollouts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("size", type=int, nargs="?", default=8)
    parser.add_argument("probe", type=int, nargs="?", default=4)
    options = parser.parse_args()
    if not 2 <= options.probe <= options.size:
        parser.error(f"a probe of {options.probe} rollouts of {options.size}: it has 2 at least, and at most all")
    print("p       rollouts  mean  weighted  tells  weighted")
    for p in SHARES:
        cost, *figures = compare(p, options.size, options.probe)
        print(f"{p:<8}{cost:8.2f}{figures[0]:6.3f}{figures[1]:10.3f}{figures[2]:7.3f}{figures[3]:10.3f}")


def compare(p: float, size: int, probe: int) -> tuple[float, float, float, float, float]:
    """Return the rollouts of a short group, and its four figures."""
    chances = [comb(size, right) * p**right * (1 - p) ** (size - right) for right in range(size + 1)]
    moves = [sqrt(right * (size - right)) / size for right in range(size + 1)]
    mixed = [1 - (comb(right, probe) + comb(size - right, probe)) / comb(size, probe) for right in range(size + 1)]
    cost = probe + (size - probe) * sum(chance * share for chance, share in zip(chances, mixed, strict=True))
    weighted = [move / share if share else 0.0 for move, share in zip(moves, mixed, strict=True)]
    short = [chance * share for chance, share in zip(chances, mixed, strict=True)]
    whole = _moments(chances, moves)
    means = [_moments(short, values) for values in (moves, weighted)]
    tells = [mean**2 / square / cost / (whole[0] ** 2 / whole[1] / size) for mean, square in means]
    return cost, means[0][0] / whole[0], means[1][0] / whole[0], tells[0], tells[1]


def _moments(chances: Sequence[float], values: Sequence[float]) -> tuple[float, float]:
    pairs = list(zip(chances, values, strict=True))
    return sum(chance * value for chance, value in pairs), sum(chance * value**2 for chance, value in pairs)


if __name__ == "__main__":
    main()
