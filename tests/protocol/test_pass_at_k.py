"""pass@k: the estimator is the mean over all choices of k completions."""

from itertools import combinations
from statistics import fmean

import pytest

from protocol.judging.ledger import pass_at_k


def slow_pass_at_k(completions: list[bool], k: int) -> float:
    """Return the share of the choices of k completions among which one is right."""
    return fmean(any(subset) for subset in combinations(completions, k))


@pytest.mark.parametrize("right", [(1, 0, 0, 0, 0, 0), (0, 0, 0, 0, 0, 3), (4, 2, 0, 1, 5, 1), (0, 7, 0, 0, 0, 0)])
@pytest.mark.parametrize("k", [1, 2, 3, 5])
def test_the_estimator_is_the_mean_over_all_choices(right: tuple[int, ...], k: int) -> None:
    problems = [[True] * c + [False] * (5 - c) for c, count in enumerate(right) for _ in range(count)]
    assert pass_at_k(right, k) == pytest.approx(fmean(slow_pass_at_k(problem, k) for problem in problems), abs=1e-12)


def test_one_completion_of_each_problem_gives_the_share_of_solved_problems() -> None:
    assert pass_at_k((3, 1), 1) == 0.25


def test_many_completions_are_exact() -> None:
    assert pass_at_k((1, *[0] * 63, 1), 64) == 0.5
