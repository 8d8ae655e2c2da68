"""Miners with the right policy that decide near ties as far as they dare, or edit tokens: what they gain.

The rows are those of tests, as `python -m bench.proofs cheats` has measured ones. Misses of stops are rarer than one in
200 rollouts, as they have to be for the bounds below.
"""

from itertools import count, cycle

import numpy as np
import pytest

from grailnode.calibration.thresholds import likelihood_scores
from grailnode.calibration.thresholds import table as calibrated_table
from grailnode.run.creation import SCORING
from protocol.proof import Arithmetic, Table, Thresholds
from protocol.rollout.sampling import NOISE_UNIT
from tests.support.adversaries.careful_cheats import (
    GROUPS,
    HEADROOM,
    Accepts,
    Cheat,
    Gain,
    SimulatedGroup,
    choose_lengths,
    choose_luck,
    edit_tokens,
    gain,
    take_stops,
)
from tests.support.builders.proofs import packaged_thresholds
from tests.support.builders.samples import table, thresholds


def steps(*margins: float) -> tuple[int, ...]:
    return tuple(round(margin / NOISE_UNIT) for margin in margins)


def margin_table(margins: tuple[float, ...], rates: tuple[float, ...]) -> Table:
    """Return a table against near ties that are decided, and edited tokens, as calibration chooses it."""
    x, honest = np.array(margins), np.array(rates) / HEADROOM
    tails = [honest + 0.01 * (1 - x / near).clip(min=0.0) for near in (0.3, 0.1)]
    tails += [(1 - share) * honest + share / (1 + x) for share in (1e-2, 1e-3, 2e-4, 4e-5)]
    return calibrated_table(steps(*margins), rates, [likelihood_scores(rates, tail) for tail in tails])


_STOP_SCORES = ((0.1, 0.1), (0.3, 1.5), (0.6, 3.0), (1.2, 6.0))
ROWS = {
    "float32": thresholds(
        margin=margin_table((0.0, 1e-4, 1e-3, 1e-2), (1e-4, 1e-9, 1e-12, 1e-15)),
        stop=table(steps(1e-5, 1e-4), (1e-3, 1e-8), *_STOP_SCORES),
    ),
    "bfloat16": thresholds(
        margin=margin_table(
            (0.0, 0.01, 0.03, 0.5, 0.9, 1.7, 3.1, 5.6), (4e-3, 2e-3, 8e-4, 2e-6, 7e-8, 8e-10, 2e-12, 1e-15)
        ),
        stop=table(steps(0.0, 0.02), (5e-3, 1e-3), *_STOP_SCORES),
    ),
}  # fmt: skip
COINS, RARE = [[0.0] * 4 + [1.0] * 4], [[0.0] * 7 + [1.0]]


def gains(cheat: Cheat, row: str, *, careful: bool, windows: int = 20) -> Gain:
    return gain(cheat, ROWS[row], SCORING, careful=careful, windows=windows)


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("reach", [0.5, 0.1, 0.02])
def test_who_ends_early_wherever_it_can_loses(row: str, reach: float) -> None:
    result = gains(take_stops(370, reach), row, careful=False)
    assert result.pay < 0.95
    assert (result.refused or 99) <= 2 or (row, reach) == ("bfloat16", 0.02)  # there, the price of misses suffices


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("reach", [0.5, 0.02])
def test_who_ends_as_early_as_it_dares_gains_one_percent_at_most(row: str, reach: float) -> None:
    result = gains(take_stops(370, reach), row, careful=True)
    assert result.refused is None
    assert 0.99 < result.pay < 1.01


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("windows", [1, 2, 5])
def test_who_changes_its_key_before_the_evidence_grows_gains_no_more(row: str, windows: int) -> None:
    cheat = take_stops(370, 0.02)
    results = [gain(cheat, ROWS[row], SCORING, careful=True, windows=windows, seed=seed) for seed in range(8)]
    assert np.mean([result.pay for result in results]) < 1.01


@pytest.mark.parametrize("row", ROWS)
def test_who_spreads_its_misses_over_the_statistics_gains_no_more_than_by_one(row: str) -> None:
    cheats = cycle([take_stops(512, 0.02), choose_luck(512, 0.02, 0.25, COINS, 0.02)])

    def in_turn(thresholds: Thresholds, rng: np.random.Generator, accepts: Accepts) -> SimulatedGroup:
        return next(cheats)(thresholds, rng, accepts)

    result = gains(in_turn, row, careful=True)
    assert (result.pay < 1.01, result.reward, result.refused) == (True, 0.0, None)


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("tokens", [59, 370, 1000, 4000])
def test_who_decides_near_ties_for_shorter_rollouts_gains_nothing(row: str, tokens: int) -> None:
    """It is not refused, and by the group it would be paid 72% more for a token in bfloat16 at 4000 tokens."""
    result = gains(choose_lengths(tokens, 0.02, 0.25, 0.1), row, careful=True, windows=10)
    assert result.refused is None
    assert result.pay < 1.005


def test_a_miner_without_a_cheat_is_never_refused_and_gains_nothing() -> None:
    for row in ROWS:
        for cheat in (take_stops(370, 0.0), edit_tokens(6000, 0, [1.0])):
            assert gains(cheat, row, careful=False) == Gain(pytest.approx(1.0), 0.0, None)  # type: ignore[arg-type]


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("tokens", [59, 512])
@pytest.mark.parametrize("sacrificed", [0.0, 0.02])
def test_who_chooses_its_luck_as_it_dares_raises_no_reward_and_is_not_refused(
    row: str, tokens: int, sacrificed: float
) -> None:
    cheat = choose_luck(tokens, 0.02, 0.25, COINS, sacrificed)
    assert gains(cheat, row, careful=True) == Gain(pytest.approx(1.0), 0.0, None)  # type: ignore[arg-type]


@pytest.mark.parametrize(("row", "sacrificed", "most"), [("float32", 0.0, 0.01), ("bfloat16", 0.02, 0.07)])
def test_luck_is_worth_something_where_rollouts_are_too_long_to_continue_all(
    row: str, sacrificed: float, most: float
) -> None:
    result = gains(choose_luck(1024, 0.02, 0.25, COINS, sacrificed), row, careful=True, windows=100)
    assert 0.0 < result.reward < most


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize(("reach", "window"), [(0.5, 5), (0.1, 5), (0.02, 12)])
def test_who_chooses_its_luck_wherever_it_can_is_refused(row: str, reach: float, window: int) -> None:
    assert (gains(choose_luck(59, reach, 0.25, COINS), row, careful=False).refused or 99) <= window


def test_rewards_refuse_a_miner_whose_margins_are_as_honest_ones() -> None:
    blind = ROWS["bfloat16"].model_copy(update={"margin": table(steps(0.0), (4e-4,), (1e-4,))})
    result = gain(choose_luck(59, 0.02, 0.25, RARE), blind, SCORING, careful=False, windows=40)
    assert result.refused is not None and result.refused <= 25


@pytest.mark.parametrize("arithmetic", ["torch-bfloat16", "torch-float32"])
@pytest.mark.parametrize(("edited", "windows", "tries", "refusals"), [(10, 2, 20, 1), (1, 100, 5, 90)])
def test_edited_tokens_of_6000_are_refused_in_most_windows(
    arithmetic: Arithmetic, edited: int, windows: int, tries: int, refusals: int
) -> None:
    """The second-best tokens of a policy that was trained on stories fall short as follows."""
    shares, gaps = (0.0, 0.001, 0.01, 0.1, 0.5, 0.9, 1.0), (0.0, 0.004, 0.04, 0.4, 7.0, 12.5, 20.0)
    cheat = edit_tokens(6000, edited, np.interp(np.linspace(0.0, 1.0, 1000), shares, gaps).tolist())
    row = packaged_thresholds(arithmetic, arithmetic).model_copy(
        update=dict.fromkeys(("miner", "validator"), "torch-float32")
    )
    gains = [gain(cheat, row, SCORING, careful=False, windows=windows, seed=seed) for seed in range(tries)]
    assert np.quantile([result.refusals for result in gains], 0.1) >= refusals


def test_whoever_is_honest_again_is_soon_accepted() -> None:
    """Eight windows of edited tokens leave evidence of at most one threshold, which honest work soon takes off."""
    wrong, right, made = edit_tokens(6000, 60, [5.0]), edit_tokens(6000, 0, [5.0]), count()

    def repents(thresholds: Thresholds, rng: np.random.Generator, accepts: Accepts) -> SimulatedGroup:
        return (wrong if next(made) < 8 * GROUPS else right)(thresholds, rng, accepts)

    result = gains(repents, "bfloat16", careful=False, windows=40)
    assert (result.refused, result.refusals in range(8, 12)) == (1, True)
