"""pass@k: the probability that at least one of k completions solves a problem.

The unbiased estimator of Chen et al. 2021 (arXiv 2107.03374, equation 1): c of a problem's n completions are right, and
1 - C(n - c, k) / C(n, k) is the share of the choices of k among them that have a right one.
"""

from collections.abc import Sequence
from fractions import Fraction
from math import comb


def pass_at_k(right: Sequence[int], k: int) -> float:
    """Return the mean of the estimator over problems.

    Args:
        right: right[c] is the number of problems of which c completions are right; n is its length less 1, and there is
            at least one problem.
        k: 1 to n.
    """
    completions = len(right) - 1
    solved = sum(
        (1 - Fraction(comb(completions - count, k), comb(completions, k))) * problems
        for count, problems in enumerate(right)
    )
    return float(Fraction(solved) / sum(right))
