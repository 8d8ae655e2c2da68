"""Evidence: honest noise at its bounded rates passes as often as the level says, and cheats add up."""

import ast
import inspect
import math
from collections.abc import Iterable, Iterator, Sequence
from types import ModuleType

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.encoding import REWARD_UNIT
from protocol.judging import accounts, evidence, ledger, report, roster, verdict
from protocol.judging.evidence import (
    LUCK_UNIT,
    NO_COUNTS,
    NO_EVIDENCE,
    REPRODUCED,
    UNREPRODUCED,
    Counts,
    Evidence,
    Tally,
    advance,
    count_luck,
    count_values,
    exceeded,
    is_improbable,
    repeated_positions,
    trial_values,
    weigh_tally,
    whole_margins,
)
from protocol.judging.verdict import Judgement, Reason, joint_rejection, own_rejection, unpack_logprobs
from protocol.outer import comparing, drift, local_work, robust, round_shares
from protocol.proof import DECADE, EXACT_PROOF, LUCK, RATE_UNIT, StatisticName, Table, Thresholds
from protocol.rollout.sampling import NOISE_UNIT
from roles.trainer.collect import logprob_bias, quorum
from roles.validator.audit import reject_accepted
from tests.support.builders.proofs import by_statistic, packaged_thresholds
from tests.support.builders.samples import (
    counts,
    judgement,
    rejected,
    replay_thresholds,
    table,
    thresholds,
    unreproduced,
)

ROW = thresholds()
NAMED_ROWS = {"sample": ROW, "packaged": packaged_thresholds(), "exact": EXACT_PROOF.table[0]}


def after(groups: Iterable[Counts], row: Thresholds = ROW) -> Evidence:
    """Return the evidence after groups, one after the other."""
    evidence = NO_EVIDENCE
    for group in groups:
        evidence = advance(evidence, group, row)
    return evidence


def margin_after(groups: Iterable[Counts]) -> Evidence:
    """Return the evidence of margins after groups."""
    return by_statistic(after(groups), ROW)["margin"]


# The tables


def worst_mean(item: Table, tails: Sequence[float]) -> list[float]:
    """Return the expectation of 10^e of one trial for each alternative, less 1, if a trial reaches each step with the
    probability of `tails`. Of a rate below 1e-15, e has no digits left beside 1.
    """
    return [
        math.expm1(-alternative.growth / DECADE * math.log(10))
        + 10 ** (-alternative.growth / DECADE)
        * sum(
            tail * (10 ** (score / DECADE) - 10 ** (before / DECADE))
            for tail, score, before in zip(tails, alternative.scores, (0, *alternative.scores), strict=False)
        )
        for alternative in item.alternatives
    ]


@pytest.mark.parametrize("statistic", ["sketch", "margin", "stop"])
@pytest.mark.parametrize("row", NAMED_ROWS.values(), ids=NAMED_ROWS)
def test_no_alternative_grows_at_the_full_rates(row: Thresholds, statistic: StatisticName) -> None:
    item = row.table(statistic)
    assert max(worst_mean(item, [rate / RATE_UNIT for rate in item.rates])) <= 1e-15


@given(st.data())
def test_no_alternative_grows_under_any_honest_distribution(data: st.DataObject) -> None:
    """The worst of all distributions whose tails are within the rates is that of the rates themselves."""
    number = data.draw(st.integers(1, 6))
    numbers = st.lists(st.floats(1e-9, 0.9), min_size=number, max_size=number)
    rates = sorted(data.draw(numbers), reverse=True)
    scores = sorted(data.draw(st.lists(st.floats(0.0, 12.0), min_size=number, max_size=number)))
    item = table(tuple(range(number)), tuple(rates), tuple(scores))
    tails: list[float] = []
    for rate in rates:
        tails.append(data.draw(st.floats(0.0, 1.0)) * min(rate, *tails[-1:], 1.0))
    assert max(worst_mean(item, tails)) <= max(worst_mean(item, rates)) <= 1e-12


def test_luck_does_not_grow_if_either_of_two_nodes_has_the_higher_reward_with_equal_probability() -> None:
    """For every difference of rewards, the mean of 10^e over both signs is at most 1."""
    for difference in range(0, REWARD_UNIT + 1, REWARD_UNIT // LUCK_UNIT):
        both = [weigh_tally(count_luck([pair]), LUCK) for pair in ((difference, 0), (0, difference))]
        assert (np.mean(10.0 ** (np.array(both) / DECADE), axis=0) <= 1.0).all()


# The sequential test

FREQUENT = thresholds(
    sketch=table((32, 64), (0.05, 0.01), (0.3, 0.6), (0.0, 1.0)),
    margin=table((10, 20, 30), (0.1, 0.02, 1e-3), (0.5, 0.5, 0.5), (0.2, 0.6, 2.0), (0.0, 0.0, 2.0)),
    stop=table((10,), (0.1,), (0.7,)),
    threshold=math.ceil(math.log10((6 + len(LUCK.alternatives)) / 0.01) * DECADE),
)
"""A row of so few trials, and with so low a threshold, that honest work is refused now and then; the level is 1e-2."""


def draw_groups(trials: dict[StatisticName, int], groups: int, histories: int) -> dict[StatisticName, np.ndarray]:
    """Return how many trials reach each step in groups at the full rates: int64 [groups, histories, steps]."""
    rng = np.random.default_rng(1)
    drawn: dict[StatisticName, np.ndarray] = {}
    for name, number in trials.items():
        if name == "luck":  # rewards that differ by 1, each of which either node has
            more = rng.binomial(number, 0.5, (groups, histories))
            drawn[name] = LUCK_UNIT * np.stack([number - more, more], axis=-1)
            continue
        rates = np.array(FREQUENT.table(name).rates) / RATE_UNIT
        drawn[name] = rng.multinomial(number, [1.0 - rates[0], *-np.diff([*rates, 0.0])], (groups, histories))[..., 1:]
    return drawn


def test_honest_histories_are_refused_at_most_as_often_as_the_level_says() -> None:
    """100,000 miners at the full rates: after N groups at most N * level of them are refused, but some."""
    trials: dict[StatisticName, int] = {"sketch": 20, "margin": 20, "stop": 4, "luck": 4}
    groups, histories = 10, 100_000
    drawn = draw_groups(trials, groups, histories)
    trials["luck"] *= LUCK_UNIT
    bets = {name: [(item.scores, item.growth) for item in FREQUENT.table(name).alternatives] for name in trials}
    refused = np.zeros(histories, dtype=bool)
    evidence = {name: np.zeros((histories, len(bets[name])), np.int64) for name in trials}
    for group in range(groups):
        for name, number in trials.items():
            scores, growths = (np.array(column) for column in zip(*bets[name], strict=True))
            gained = drawn[name][group] @ scores.T - number * growths
            evidence[name] = np.maximum(evidence[name], 0) + gained
            refused |= evidence[name].max(axis=1) > FREQUENT.threshold
    assert 0.001 * histories < refused.sum() <= groups * 0.01 * histories

    for place in [*range(20), *np.flatnonzero(refused)[:20]]:  # the formula above is that of the module
        history = [
            counts(FREQUENT, **{name: (trials[name], *drawn[name][group, place].tolist()) for name in trials})
            for group in range(groups)
        ]
        assert after(history, FREQUENT) == tuple(np.concatenate([evidence[name][place] for name in trials]).tolist())
        assert is_improbable(NO_EVIDENCE, history, FREQUENT) == refused[place]


def test_evidence_below_zero_restarts_and_evidence_above_it_goes_on() -> None:
    few, many = counts(margin=(1000, 1)), counts(margin=(1000, 12))
    assert min(margin_after([few])) < 0
    assert after([few, few]) == after([few])
    assert max(margin_after([many, many])) == 2 * max(margin_after([many])) > 0


def test_too_many_groups_that_are_not_reproduced_are_evidence_where_replies_are_not_exact() -> None:
    row = replay_thresholds()
    assert max(worst_mean(row.table("replay"), [0.05])) <= 1e-15
    spoiled = [index for index in range(1, 40) if is_improbable(NO_EVIDENCE, [UNREPRODUCED] * index, row)]
    assert spoiled[0] == 9
    half = [UNREPRODUCED, REPRODUCED] * 32
    assert is_improbable(NO_EVIDENCE, half, row) and exceeded(after(half, row), row) == "replay"
    rng = np.random.default_rng(0)
    honest = [UNREPRODUCED if value < 0.05 else REPRODUCED for value in rng.random(50_000)]
    assert not is_improbable(NO_EVIDENCE, honest, row)
    # what was not tried leaves it as it is, and runs of exact replies have no such evidence
    assert after([UNREPRODUCED, counts()], row)[-3:] == after([UNREPRODUCED], row)[-3:] > (0, 0, 0)
    assert set(after([UNREPRODUCED] * 99)) == {0}


def test_only_evidence_beyond_the_threshold_refuses_and_the_first_statistic_is_named() -> None:
    limit = ROW.threshold
    assert exceeded(NO_EVIDENCE, ROW) is None
    assert exceeded((limit,) * len(ROW.alternatives), ROW) is None
    highest = {"stop": limit + 1, "luck": limit + 2}
    assert exceeded(tuple(highest.get(name, -5) for name in ROW.alternatives), ROW) == "stop"


# What is refused


def test_a_trial_that_reaches_the_last_step_refuses_its_group() -> None:
    for name, last in (("sketch", (2000, 0, 0, 1)), ("margin", (2000, 0, 0, 1)), ("stop", (8, 0, 1))):
        assert exceeded(after([counts(**{name: last})]), ROW) == name


def test_a_cheat_that_no_group_shows_is_shown_by_several() -> None:
    group = counts(sketch=(1600,), margin=(1600, 8))  # 5 times the honest rate
    assert exceeded(after([group]), ROW) is None
    assert is_improbable(NO_EVIDENCE, [group] * 16, ROW)
    assert is_improbable(after([group] * 15), [group], ROW)
    assert not is_improbable(after([counts(margin=(1600, 2))] * 1000), [counts(margin=(1600, 2))], ROW)


def test_a_miner_that_chooses_among_near_ties_by_reward_is_refused_for_luck() -> None:
    """A group has two rewards that differ from the validator's: both are higher, or one of them."""
    lucky, honest = counts(luck=(2000, 0, 2000)), counts(luck=(2000, 1000, 1000))
    assert exceeded(after([lucky] * 40), ROW) == "luck"
    assert exceeded(after([honest] * 1000), ROW) is None
    assert exceeded(after([counts(luck=(1000 * 4096, 0, 1000 * 4096))]), ROW) == "luck"
    assert max(after([counts(luck=(1000, 0, 1000))])) < DECADE / 4  # one rollout alone says little


# What is counted


def test_values_are_counted_by_the_last_step_that_they_reach() -> None:
    distances = np.array([0, 32, 33, 64, 65, 96, 97, 128], dtype=np.uint8)
    result = count_values(
        trial_values(distances, np.zeros(8, np.int64), np.zeros(8, bool), [8], np.zeros(8, bool)), ROW
    )
    assert result == counts(sketch=(8, 2, 2, 2), margin=(8,), stop=(1,))
    assert (result.computed, NO_COUNTS.computed) == (True, False)


def test_positions_with_the_same_tokens_before_them_are_repeated() -> None:
    completions = [(5, 6, 7), (5, 6, 8, 9), (6, 6), (), (5, 6, 8, 1), (5, 6, 7)]
    masks = [[0, 0, 0], [1, 1, 1, 0], [1, 0], [], [1, 1, 1, 1], [1, 1, 1]]
    assert repeated_positions(completions).tolist() == [bool(flag) for mask in masks for flag in mask]
    assert repeated_positions([]).tolist() == []


def test_the_sketch_of_a_common_prefix_counts_once_and_its_margins_always() -> None:
    """All rollouts begin with the same token, so the same state with the same honest noise occurs in each of them."""
    distances, margins, repeats = np.zeros(80, np.uint8), np.zeros(80, np.int64), np.zeros(80, bool)
    distances[::10], margins[10::10], repeats[10::10] = 40, 20_000, True  # of independent noise
    result = count_values(trial_values(distances, margins, np.zeros(80, bool), [10] * 8, repeats), ROW)
    assert result == counts(sketch=(73, 1), margin=(80, 7), stop=(8,))


def test_stops_are_counted_once_for_each_rollout_by_the_largest_margin() -> None:
    margins = np.array([300_000, 20_000, 300_000, 0, 20_000, 20_000])
    stops = np.array([False, True, True, False, True, True])  # rollouts of 1, 2, 1 and 2 tokens
    result = count_values(trial_values(np.zeros(6, np.uint8), margins, stops, [1, 2, 1, 2], np.zeros(6, bool)), ROW)
    assert (result.stop, result.margin) == (Tally(trials=4, steps=(1, 1)), Tally(trials=6, steps=(3, 0, 2)))


@pytest.mark.parametrize(
    ("own", "other", "expected"),
    [
        (1_000_000, 0, (1000, 0, 1000)),
        (0, 1_000_000, (1000, 1000, 0)),
        (500_000, 750_000, (63, 250, 0)),  # 62.5 thousandths, rounded up
        (7_000_000, -7_000_000, (1000, 0, 1000)),  # as one reward
        (999, 0, (0, 0, 0)),  # less than a thousandth, either way
        (0, 999, (0, 0, 0)),
        (-3, -3, (0, 0, 0)),
    ],
)
def test_luck_is_the_difference_of_the_rewards(own: int, other: int, expected: tuple[int, int, int]) -> None:
    result = count_luck([(own, other)])
    assert (result.trials, *result.steps) == expected
    assert count_luck([(own, other)] * 3) == result + result + result


@pytest.mark.parametrize("margin", [math.nan, math.inf, 1e6, 3e38])
def test_what_is_no_number_or_out_of_range_reaches_the_last_step(margin: float) -> None:
    whole = whole_margins(np.array([margin, 0.0], np.float32), NOISE_UNIT)
    result = count_values(
        trial_values(np.zeros(2, np.uint8), whole, np.array([True, False]), [2], np.zeros(2, bool)), ROW
    )
    assert result == counts(sketch=(2,), margin=(2, 0, 0, 1), stop=(1, 0, 1))


@given(st.integers(0, 1 << 24), st.integers(0, 1 << 24))
def test_a_margin_exceeds_a_step_exactly_if_its_whole_one_does(margin: int, step: int) -> None:
    (whole,) = whole_margins(np.array([margin / 64 * NOISE_UNIT], np.float32), NOISE_UNIT)
    assert (whole > step) == (margin / 64 > step)


def test_counts_of_any_lengths_are_added() -> None:
    """A validator that lies may count more or fewer steps than its row has."""
    one, other = Tally(trials=5, steps=(1, 2)), Tally(trials=3, steps=(1, 0, 1))
    assert one + other == other + one == Tally(trials=8, steps=(2, 2, 1))
    assert Counts(margin=one) + NO_COUNTS == Counts(margin=one)


# Verdicts: valid judgements, and the joint rejection of a window's groups


def test_a_judgement_without_a_reason_accepts() -> None:
    assert judgement().accepted
    assert not any(rejected(reason=reason.value, counts=NO_COUNTS).accepted for reason in Reason)


def test_log_probabilities_are_split_by_rollout() -> None:
    data = np.arange(5, dtype="<f4").tobytes()
    assert [part.tolist() for part in unpack_logprobs(data, [2, 0, 3])] == [[0, 1], [], [2, 3, 4]]
    assert unpack_logprobs(b"", []) == []
    with pytest.raises(ValueError, match="20 bytes of log-probabilities for 4 tokens"):
        unpack_logprobs(data, [2, 2])


@pytest.mark.parametrize(
    ("reached", "reason"),
    [
        ({"sketch": (200, 0, 0, 1), "margin": (200, 0, 0, 1)}, Reason.SKETCH),
        ({"margin": (200, 0, 0, 1), "stop": (2, 0, 1)}, Reason.SAMPLING),
        ({"stop": (2, 0, 1), "luck": (2_000, 0, 2_000)}, Reason.STOP),
        ({"sketch": (200, 1), "margin": (200, 1), "stop": (2, 1), "luck": (2_000, 0, 2_000)}, None),
        ({}, None),
    ],
)
def test_a_group_is_refused_for_the_first_statistic_that_refuses_it(
    reached: dict[str, tuple[int, ...]], reason: Reason | None
) -> None:
    assert own_rejection(counts(**reached), ROW) == reason


@pytest.mark.parametrize(
    ("rejection", "reason"),
    [
        (rejected(1), Reason.WINDOW),  # a group that passes by chance is rejected with those of another policy
        (rejected(1, counts=counts(sketch=(5, 1), margin=(5,))), None),  # honest work may have as many misses
        (rejected(1, "wrong-reward", counts=counts(sketch=(5,), margin=(5,))), None),
        (rejected(1, "wrong-prompt", counts=NO_COUNTS), None),
    ],
)
def test_a_rejected_group_counts_if_its_statistics_were_computed(rejection: Judgement, reason: Reason | None) -> None:
    assert joint_rejection([judgement(0), rejection], NO_EVIDENCE, ROW) == reason


def test_groups_add_up_with_each_other_and_with_the_windows_before() -> None:
    group = counts(sketch=(5, 2), margin=(5,))
    judgements = [judgement(index, counts=group) for index in range(4)]
    assert own_rejection(group, ROW) is None
    assert joint_rejection(judgements, NO_EVIDENCE, ROW) == Reason.WINDOW
    assert joint_rejection(judgements[:1], NO_EVIDENCE, ROW) is None
    assert joint_rejection(judgements[:1], (0, 8_000_000), ROW) == Reason.WINDOW
    unchecked = [rejected(index, "bad-tokens", tokens=10**6, counts=NO_COUNTS) for index in range(4, 8)]
    assert joint_rejection([*unchecked, *judgements], NO_EVIDENCE, ROW) == Reason.WINDOW  # and dilute nothing


def test_a_window_is_refused_with_the_groups_that_were_not_reproduced() -> None:
    judgements = [judgement(0), unreproduced(1, NO_COUNTS), *map(unreproduced, range(2, 11))]
    assert joint_rejection(judgements[:10], NO_EVIDENCE, replay_thresholds()) is None
    refusal = joint_rejection(judgements, NO_EVIDENCE, replay_thresholds())
    reasons = [item.reason for item in reject_accepted(judgements, refusal)]
    assert reasons == ["improbable-window", "unreproduced", *["improbable-window"] * 9]
    assert joint_rejection(judgements, NO_EVIDENCE, ROW) is None


def test_groups_count_in_the_order_of_their_indices() -> None:
    """Clean groups take evidence off: what a window shows must not depend on what was judged first."""
    clean, bad = counts(sketch=(1000,)), counts(sketch=(5, 2))
    judgements = [judgement(index, tokens=1000, logprobs=bytes(4000), counts=bad) for index in (0, 1, 5, 6)]
    judgements += [judgement(index, tokens=1000, logprobs=bytes(4000), counts=clean) for index in (2, 3, 4)]
    assert joint_rejection(judgements, NO_EVIDENCE, ROW) is None


# What judges decide, sign and pay is computed from whole numbers, so that it is the same on every machine


MODULES = [accounts, evidence, ledger, report, roster, verdict, logprob_bias, quorum]
BORDER = {"whole_margins", "pass_at_k", "pass_at"}  # from what an engine measures, and to what people see
FLOAT_NAMES = {"math", "log", "log2", "log10", "log1p", "exp", "sqrt", "mean", "std", "var", "median", "average"}


def float_expressions(node: ast.AST) -> Iterator[str]:
    """Yield the expressions that may compute with floats."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef) and child.name in BORDER:
            continue
        name = getattr(child, "id", getattr(child, "attr", ""))
        is_division = isinstance(child, ast.BinOp | ast.AugAssign) and isinstance(child.op, ast.Div)
        is_constant = isinstance(child, ast.Constant) and isinstance(child.value, float)
        if is_division or is_constant or name in FLOAT_NAMES or name.startswith("float"):
            yield ast.unparse(child)
        yield from float_expressions(child)


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_evidence_decisions_and_scores_use_no_float(module: ModuleType) -> None:
    assert list(float_expressions(ast.parse(inspect.getsource(module)))) == []


@pytest.mark.parametrize("module", [comparing, drift, local_work, robust, round_shares], ids=lambda item: item.__name__)
def test_outer_rounds_raise_nothing_to_a_power(module: ModuleType) -> None:
    """Platforms round products and square roots alike, but not the powers of their C libraries."""
    assert not any(isinstance(node, ast.Pow) for node in ast.walk(ast.parse(inspect.getsource(module))))
