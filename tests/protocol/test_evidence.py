"""Evidence: honest noise at its bounded rate passes, and a cheat is detected in the scope where it hides."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.judging.evidence import (
    MAX_MARGIN,
    MAX_SURPRISAL,
    Counts,
    Evidence,
    compute_evidence,
    history_surprisal,
    repeated_positions,
    surprisal,
    surprisal_threshold,
    window_surprisal,
)
from protocol.proof import Thresholds
from tests.support.builders import samples
from tests.support.builders.proofs import windows_of

PROOF: Thresholds = samples.thresholds()  # tolerance 2, margin 0.02, limit 0.5, rates 1e-3, level 1e-9
ROLLOUTS, TOKENS = 8, 200
LENGTHS = [TOKENS] * ROLLOUTS
N = ROLLOUTS * TOKENS


def honest(seed: int, rate: float = 1e-3) -> tuple[np.ndarray, np.ndarray]:
    """Return distances and margins with misses at the run's rates."""
    rng = np.random.default_rng(seed)
    return np.where(rng.random(N) < rate, 3, 1), np.where(rng.random(N) < rate, 0.1, 0.001)


def rejections(evidence: Evidence) -> tuple[bool, bool]:
    return evidence.wrong_sketch(PROOF), evidence.wrong_sampling(PROOF)


def test_honest_work_at_the_full_rate_passes():
    groups = [compute_evidence(*honest(seed), LENGTHS, PROOF) for seed in range(200)]
    assert not any(any(rejections(group)) for group in groups)
    assert sum(group.sketch_misses for group in groups) > 100  # there was noise
    assert window_surprisal([group.counts for group in groups], PROOF) < surprisal_threshold(PROOF)


def test_a_cheat_in_one_rollout_of_eight_is_detected():
    distances, margins = honest(0)
    margins[3 * TOKENS : 3 * TOKENS + 10] = 0.1
    assert rejections(compute_evidence(distances, margins, LENGTHS, PROOF)) == (False, True)


def test_a_cheat_that_begins_late_is_detected_in_the_last_quarter():
    distances, margins = np.ones(N, dtype=int), np.zeros(N)
    last = np.arange(N) % TOKENS >= 3 * TOKENS // 4
    places = np.flatnonzero(last)[::50]  # two in each rollout: few of a rollout, few of the group
    distances[places] = 60
    evidence = compute_evidence(distances, margins, LENGTHS, PROOF)
    without_quarters = max(
        surprisal(evidence.sketch_misses, N, PROOF.sketch_rate),
        surprisal(int((distances[:TOKENS] == 60).sum()), TOKENS, PROOF.sketch_rate),
    )
    assert evidence.sketch_surprisal > without_quarters


def test_a_sparse_cheat_is_detected_only_in_the_window():
    distances, margins = np.ones(N, dtype=int), np.zeros(N)
    margins[::400] = 0.1
    group = compute_evidence(distances, margins, LENGTHS, PROOF)
    assert rejections(group) == (False, False)
    assert window_surprisal([group.counts] * 16, PROOF) > surprisal_threshold(PROOF)


def test_one_token_beyond_the_limit_is_rejected():
    distances, margins = honest(1)
    margins[77] = 0.6
    assert rejections(compute_evidence(distances, margins, LENGTHS, PROOF)) == (False, True)
    margins[77] = np.nan
    assert compute_evidence(distances, margins, LENGTHS, PROOF).worst_margin == MAX_MARGIN


def test_far_margins_are_counted_once_for_each_rollout():
    """One large error may go on in a rollout, and rollouts that begin alike share it."""
    rows = PROOF.model_copy(update={"margin_limit": 100.0})
    exact, repeats = np.zeros(N, dtype=int), np.zeros(N, dtype=bool)

    def far_rollouts(*places: int) -> int:
        margins = np.zeros(N)
        margins[list(places)] = 0.45
        return compute_evidence(exact, margins, LENGTHS, rows, repeats).far_rollouts

    assert [far_rollouts(10, 20, 30), far_rollouts(10, TOKENS + 50, 2 * TOKENS), far_rollouts()] == [1, 3, 0]
    repeats[TOKENS : TOKENS + 20] = repeats[2 * TOKENS : 2 * TOKENS + 20] = True
    assert far_rollouts(10, TOKENS + 10, 2 * TOKENS + 10) == 1  # the same state
    assert far_rollouts(TOKENS + 10, 2 * TOKENS + 10) == 1
    assert far_rollouts(TOKENS + 10, 2 * TOKENS + 30, 3 * TOKENS) == 2
    margins = np.zeros(N)
    margins[[10, 20, TOKENS + 30]] = 0.4, math.nan, 0.41  # not beyond, no number, and beyond
    evidence = compute_evidence(exact, margins, LENGTHS, rows, repeats)
    assert (evidence.far_rollouts, evidence.counts.far_rollouts) == (2, 2)
    assert evidence.margin_surprisal >= surprisal(2, N, rows.far_rate)


def test_far_margins_show_a_window_and_a_history_that_nothing_else_shows():
    one, few = Counts(6000, 6000, 0, 1, 0, 20, 1), Counts(6000, 6000, 0, 4, 0, 80, 4)
    without = Counts(6000, 6000, 0, 4, 0, 80)
    assert window_surprisal([without], PROOF) < surprisal_threshold(PROOF) < window_surprisal([few], PROOF)
    assert window_surprisal([one], PROOF) < surprisal_threshold(PROOF)
    assert history_surprisal(windows_of([one] * 12, PROOF)) > surprisal_threshold(PROOF)
    assert history_surprisal(windows_of([Counts(6000, 6000, 0, 1, 0, 20)] * 12, PROOF)) < surprisal_threshold(PROOF)


def test_a_median_above_its_threshold_is_rejected():
    _, margins = honest(2)
    assert rejections(compute_evidence(np.full(N, 2), margins, LENGTHS, PROOF)) == (
        True,
        False,
    )  # all within the tolerance


def test_uneven_and_empty_rollouts():
    lengths = [1, 0, 7, 3]
    evidence = compute_evidence(np.full(11, 9), np.full(11, np.inf), lengths, PROOF)
    assert (evidence.tokens, evidence.sketch_misses, evidence.margin_misses) == (11, 11, 11)
    assert rejections(evidence) == (True, True)
    assert compute_evidence(np.zeros(0), np.zeros(0), [0, 0], PROOF) == Evidence()
    assert rejections(Evidence()) == (False, False)


def test_positions_with_the_same_tokens_before_them_are_repeated():
    completions = [(5, 6, 7), (5, 6, 8, 9), (6, 6), (), (5, 6, 8, 1), (5, 6, 7)]
    masks = [[0, 0, 0], [1, 1, 1, 0], [1, 0], [], [1, 1, 1, 1], [1, 1, 1]]
    assert repeated_positions(completions).tolist() == [bool(flag) for mask in masks for flag in mask]
    assert repeated_positions([]).tolist() == []


def test_a_miss_in_a_common_prefix_counts_once():
    """All rollouts begin with the same tokens, so the same state with the same honest noise occurs in each of them."""
    distances, margins = np.zeros(80, dtype=np.int16), np.zeros(80)
    distances[::10] = 9
    repeats = np.zeros(80, dtype=bool)
    repeats[10::10] = True
    assert rejections(compute_evidence(distances, margins, [10] * 8, PROOF)) == (True, False)
    evidence = compute_evidence(distances, margins, [10] * 8, PROOF, repeats)
    assert rejections(evidence) == (False, False)
    assert evidence.sketch_misses == 1
    margins[10::10] = 0.1  # the sampling noise of each rollout is independent
    assert compute_evidence(distances, margins, [10] * 8, PROOF, repeats).margin_misses == 7


def test_a_rollout_of_repeated_positions_only():
    evidence = compute_evidence(np.array([9, 9]), np.zeros(2), [1, 1], PROOF, np.array([False, True]))
    assert (evidence.tokens, evidence.sketch_misses, evidence.sketch_median) == (2, 1, 9.0)


@given(st.integers(0, 500), st.integers(1, 500), st.floats(1e-6, 0.5))
def test_surprisal_increases_with_the_misses(misses: int, trials: int, rate: float):
    misses = min(misses, trials)
    assert 0.0 <= surprisal(max(0, misses - 1), trials, rate) <= surprisal(misses, trials, rate) <= MAX_SURPRISAL


@pytest.mark.parametrize(
    "changes", [{"margin_limit": 0.01}, {"audit_floor_ppm": 300_000}, {"sketch_rate": 0.0}, {"level": 0.5}]
)
def test_contradictory_thresholds_are_invalid(changes: dict[str, float]):
    with pytest.raises(ValueError):
        Thresholds(**(PROOF.model_dump() | changes))


TINY = 24  # tokens of a window of one group of three-token answers


def windows(seed: int, count: int, rate: float) -> list[Counts]:
    """Return tiny windows with margin misses at a rate."""
    misses = np.random.default_rng(seed).binomial(TINY, rate, count)
    return [Counts(TINY, TINY, 0, int(number)) for number in misses]


def first_rejection(history: list[Counts]) -> int | None:
    """Return the number of windows after which the history is rejected, or None if it never is."""
    return next(
        (
            n
            for n in range(1, len(history) + 1)
            if history_surprisal(windows_of(history[:n], PROOF)) > surprisal_threshold(PROOF)
        ),
        None,
    )


def test_a_history_of_honest_windows_passes_at_the_full_rate():
    assert all(first_rejection(windows(seed, 60, PROOF.margin_rate)) is None for seed in range(10))


def test_a_history_detects_a_cheat_that_no_tiny_window_shows():
    for seed in range(10):
        history = windows(seed, 32, 0.03)
        assert sum(window_surprisal([window], PROOF) > surprisal_threshold(PROOF) for window in history) == 0
        assert first_rejection(history) is not None


def test_good_windows_do_not_offset_later_bad_ones():
    bad = windows(0, 32, 0.05)
    assert (first_rejection(windows(1, 100, 0.0) + bad) or 0) - 100 <= (first_rejection(bad) or 0) + 3


def test_the_false_rejection_rate_of_a_history_is_bounded():
    """By Doob's inequality, R exceeds 1 / level after any of n windows of honest work with a probability of at most
    n * level.
    """
    level, n, miners = 0.005, 20, 150
    rejections = 0
    for seed in range(miners):
        history = windows(seed, n, PROOF.margin_rate)
        rejections += any(
            history_surprisal(windows_of(history[:end], PROOF)) > -np.log10(level) for end in range(1, n + 1)
        )
    assert rejections <= miners * n * level


def test_the_surprisal_of_a_history_follows_its_formula():
    history, p = [Counts(40, 30, 1, 2), Counts(0, 0, 0, 0), Counts(24, 9, 0, 3)], PROOF.margin_rate
    R = np.zeros(10)
    k = np.arange(1, 11)
    for t, x in ((40, 2), (24, 3)):
        R = (1.0 + R) * 2.0 ** (k * x) / (1.0 + p * (2.0**k - 1.0)) ** t
    assert history_surprisal(windows_of(history, PROOF)) == pytest.approx(np.log10(R.mean()))
    assert history_surprisal(windows_of([], PROOF)) == 0.0
    assert history_surprisal(windows_of([Counts(10**6, 10**6, 10**6, 10**6)], PROOF)) == MAX_SURPRISAL


@given(st.lists(st.tuples(st.integers(0, 99), st.integers(0, 99)), max_size=9), st.floats(1e-9, 0.999))
def test_any_history_has_a_surprisal(trials: list[tuple[int, int]], rate: float) -> None:
    proof = PROOF.model_copy(update={"margin_rate": rate, "sketch_rate": rate})
    history = [Counts(max(pair), max(pair), min(pair), min(pair)) for pair in trials]
    assert 0.0 <= history_surprisal(windows_of(history, proof)) <= MAX_SURPRISAL
