"""The ledger: rows add up, and nobody improves a score by splitting work over keys, stopping early or changing keys."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from protocol.judging.evidence import Counts
from protocol.judging.ledger import (
    Amendment,
    Evaluation,
    LedgerRow,
    StratumResult,
    Summary,
    are_same_scores,
    balances,
    clean_windows,
    histories,
    scores,
    shares,
)
from protocol.judging.roster import Roster
from protocol.run import ScoringSpec
from tests.support.builders import samples
from tests.support.builders.proofs import windows_of
from tests.support.builders.samples import MINER, SCORING, TRAINER, judgement, rejected, row, summary, verdict

WORTH = st.floats(-1e4, 1e4)
A, B, C = MINER, TRAINER, samples.VALIDATOR
STEADY = SCORING.model_copy(update={"miss_price": 0.0, "deposit": 0.0, "cap": 1.0, "half_life": 1e6})
PROOF = samples.run_manifest().proof


def worth(*summaries: Summary, scoring: ScoringSpec = STEADY) -> float:
    """Return the balance of miner A, rounded because the half-life is finite."""
    return round(balances(summaries, scoring, PROOF)[A.public], 2)


@pytest.mark.parametrize(
    "changes",
    [
        {"accepted": 5},
        {"audited": 17, "accepted": 17},
        {"pledged": 15},
        {"dealt": 3},
        {"dealt": 17},
        {"verdict": b""},
        {"submitted": 0, "audited": 0, "accepted": 0},
        {"verdict": bytes(31)},
        {"tokens": 15},
        {"sketch_misses": 17},
        {"margin_misses": 21},
        {"far_rollouts": 21},
    ],
)
def test_invalid_rows(changes: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        row(**changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"rows": (row(), row())},
        {"rows": tuple(sorted((row(A), row(B)), key=lambda item: item.miner, reverse=True))},
        {"amendments": (Amendment(window=7, miner=A.public, verdict=b"", accepted=0, rejected=1),)},
        {"previous": bytes(5)},
        {"salt": bytes(15)},
        {"roster": ()},
        {"roster": (MINER.public,)},
        {"roster": (samples.VALIDATOR.public,) * 2},
        {"judges": 2},
        {"judges": 0},
        {"alarms": ("two\nlines",)},
        {"alarms": ("\x1b[2J",)},
        {"alarms": ("a" * 501,)},
        {"alarms": ("\u202e",)},
    ],
)
def test_invalid_summaries(changes: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        summary(**changes)


@pytest.mark.parametrize(
    "strata",
    [
        (),
        (("a", (1,)),),
        (("a", (0, 0)),),
        (("a", (1, -1)),),
        (("b", (1, 0)), ("a", (1, 0))),
        (("a", (1, 0)), ("a", (1, 0))),
        (("a", (1, 0)), ("b", (1, 0, 0))),
        (("a\n", (1, 0)),),
    ],
    ids=str,
)
def test_invalid_evaluations(strata: tuple[tuple[str, tuple[int, ...]], ...]) -> None:
    with pytest.raises(ValidationError):
        Evaluation(version=1, strata=tuple(StratumResult(name=name, right=right) for name, right in strata))


def test_pass_at_k_of_an_evaluation_is_over_the_problems_of_all_strata() -> None:
    strata = (StratumResult(name="easy", right=(0, 1, 1)), StratumResult(name="hard", right=(2, 0, 0)))
    evaluation = Evaluation(version=1, strata=strata)
    assert (evaluation.problems, evaluation.pass_at(1), evaluation.pass_at(2)) == (4, 0.375, 0.5)


def test_the_row_of_a_verdict() -> None:
    result = LedgerRow.of(verdict(judgement(0), judgement(1), rejected(2)))
    assert (result.pledged, result.submitted, result.audited, result.accepted, result.rejected) == (16, 16, 3, 2, 1)
    assert LedgerRow.undelivered(A.public, 4).submitted == 0


def test_unaudited_groups_count_unless_the_window_has_a_rejection_or_an_amendment() -> None:
    assert worth(summary(row())) == 16
    assert worth(summary(row(audited=4, accepted=3, rejected=1))) == 3 - 10
    good = (Amendment(window=5, miner=A.public, verdict=b"", accepted=8, rejected=0),)
    assert worth(summary(row(), window=5), summary(window=7, amendments=good)) == 12
    unavailable = (Amendment(window=5, miner=A.public, verdict=b"", accepted=0, rejected=0),)
    assert worth(summary(row(), window=5), summary(window=7, amendments=unavailable)) == 4
    false = (Amendment(window=5, miner=A.public, verdict=b"", accepted=10, rejected=2),)
    assert worth(summary(row(), window=5), summary(window=7, amendments=false)) == 14 - 20


def test_a_group_that_is_dealt_stands_for_those_that_are_not() -> None:
    roster = tuple(sorted(samples.key(f"validator {number}").public for number in range(3)))
    one_of_four = {"roster": tuple(sorted((*roster, samples.VALIDATOR.public))), "judges": 1}
    assert worth(summary(row(dealt=4), **one_of_four)) == 16
    assert worth(summary(row(submitted=12, dealt=4), **one_of_four)) == 16 - 4
    assert worth(summary(row(dealt=4, accepted=3, rejected=1), **one_of_four)) == 4 * (3 - 10)
    nothing = row(submitted=12, dealt=0, audited=0, accepted=0, tokens=0, positions=0, sketch_misses=0)
    assert worth(summary(nothing, **one_of_four)) == -4
    assert worth(summary(row(dealt=4), **one_of_four | {"judges": 4})) == 4


@given(
    st.lists(st.booleans(), min_size=1, max_size=16),
    st.integers(1, 8),
    st.integers(0, 4),
    st.integers(0, 1 << 32),
)
def test_balances_of_all_deals_have_the_balance_of_a_full_audit_as_their_mean(
    false: list[bool], judges: int, missing: int, window: int
) -> None:
    """Over the validators of a roster: each group is dealt to `judges` of them."""
    validators = tuple(sorted(samples.key(f"validator {number}").public for number in range(8)))
    roster = Roster(validators, judges)
    count, pledged = len(false), len(false) + missing

    def balance(dealt: tuple[int, ...], **changes: Any) -> float:
        rejected_count = sum(false[group] for group in dealt)
        result = row(
            pledged=pledged,
            submitted=count,
            dealt=len(dealt),
            audited=len(dealt),
            accepted=len(dealt) - rejected_count,
            rejected=rejected_count,
            tokens=0,
            positions=0,
            sketch_misses=0,
        )
        return balances([summary(result, **changes)], STEADY, PROOF)[A.public]

    full_audit = balance(tuple(range(count)))
    deals = [
        balance(
            roster.dealt_groups(samples.RUN_ID, window, bytes(32), A.public, groups=count, validator=validator),
            validator=validator,
            roster=validators,
            judges=judges,
        )
        for validator in validators
    ]
    assert sum(deals) / len(deals) == pytest.approx(full_audit)


def test_stopping_early_never_pays() -> None:
    """A miner that delivers fewer groups than pledged after it has seen the window has a lower balance."""
    for submitted in range(1, 16):
        fewer = row(submitted=submitted, audited=submitted, accepted=submitted)
        assert worth(summary(fewer)) == submitted - (16 - submitted)
    assert worth(summary(LedgerRow.undelivered(A.public, 16))) == -16


def test_balances_decay_and_end() -> None:
    ledger = (summary(row(), window=0), summary(window=50))
    assert worth(*ledger, scoring=SCORING.model_copy(update={"miss_price": 0.0})) == 8.0
    assert balances((summary(row(), window=0), summary(window=100)), SCORING, PROOF) == {}
    assert balances((), SCORING, PROOF) == {}


def test_misses_beyond_the_honest_rate_have_a_price() -> None:
    scoring, rate = STEADY.model_copy(update={"miss_price": 0.5}), samples.thresholds().sketch_rate
    few, many = row(sketch_misses=0, margin_misses=0), row(sketch_misses=6, margin_misses=0)  # 4 of 16 groups audited
    assert worth(summary(few), scoring=scoring) == 16.0
    assert worth(summary(many), scoring=scoring) == round(16.0 - 0.5 * 4 * (6 - rate * 16), 2)
    both = worth(summary(few, window=1), summary(many, window=2), scoring=scoring)
    assert both == round(32.0 - 0.5 * 4 * (6 - rate * 32), 2)  # what one window has too few makes up for another


@given(st.dictionaries(st.binary(min_size=1, max_size=2), WORTH, max_size=6))
def test_shares_sum_to_at_most_one_and_none_exceeds_the_cap(values: dict[bytes, float]) -> None:
    result = shares(values, SCORING)
    assert result.keys() == values.keys()
    assert all(0.0 <= share <= SCORING.cap for share in result.values())
    assert sum(result.values()) <= 1.0 + 1e-9
    assert (sum(result.values()) > 0) == any(value > SCORING.deposit for value in values.values())


@given(st.floats(0, 1e4), st.floats(0, 1e4), st.floats(0, 1e4), st.floats(1.0, 8.0), st.floats(0, 100))
def test_splitting_honest_work_over_two_keys_never_earns_more(
    first: float, second: float, others: float, exponent: float, deposit: float
) -> None:
    scoring = STEADY.model_copy(update={"exponent": exponent, "deposit": deposit})
    whole = shares({b"a": first + second, b"o": others}, scoring)[b"a"]
    split = shares({b"a": first, b"b": second, b"o": others}, scoring)
    assert split[b"a"] + split[b"b"] <= whole * (1 + 1e-9) + 1e-12


@given(st.integers(1, 4096), st.integers(0, 100), st.integers(1, 4096))
def test_a_rejection_never_pays(acceptances: int, rejections: int, others: int) -> None:
    def share(rejections: int) -> float:
        balances = {b"a": acceptances - SCORING.penalty * rejections, b"o": float(others)}
        return shares(balances, SCORING)[b"a"]

    assert share(rejections + 1) <= share(rejections)


def test_a_key_earns_nothing_until_its_balance_exceeds_the_deposit() -> None:
    assert shares({b"new": SCORING.deposit, b"old": 100.0}, SCORING)[b"new"] == 0.0


def test_scores_are_in_order_and_capped() -> None:
    entry = summary(row(A), row(B), row(C, submitted=4))
    result = scores((entry,), SCORING, PROOF)
    assert [miner for miner, _ in result] == sorted(key.public for key in (A, B))
    assert dict(result) == {A.public: 0.5, B.public: 0.5}  # and C earns nothing


def test_the_count_of_clean_windows_restarts_after_a_rejection() -> None:
    entries = [summary(row(), window=window) for window in range(5)]
    assert clean_windows(entries) == {A.public: 5}
    entries.append(summary(row(accepted=3, rejected=1), window=5))
    assert clean_windows(entries) == {A.public: 0}
    entries.append(summary(row(), LedgerRow.undelivered(C.public, 3), window=6))
    assert clean_windows(entries) == {A.public: 1, C.public: 0}
    entries.append(
        summary(window=7, amendments=(Amendment(window=2, miner=A.public, verdict=b"", accepted=0, rejected=1),))
    )
    assert clean_windows(entries)[A.public] == 1  # the rejection that caused the re-audit was counted before


def test_the_audited_share_falls_to_the_floor() -> None:
    proof = samples.run_manifest().proof
    assert [proof.audit_share(clean) for clean in (0, 7, 8, 16, 24, 10_000)] == [
        *(250_000, 250_000, 125_000, 62_500, 50_000, 50_000)
    ]


def test_a_row_has_the_counts_of_the_accepted_groups() -> None:
    first = judgement(0, tokens=5, positions=3, sketch_misses=1, margin_misses=2)
    result = LedgerRow.of(verdict(first, judgement(1, positions=2), rejected(2)))
    assert result.counts == Counts(tokens=10, positions=5, sketch_misses=1, margin_misses=2)
    assert LedgerRow.undelivered(A.public, 3).counts == Counts()


def test_a_rejection_does_not_end_a_history() -> None:
    good, bad = row(A), row(A, accepted=3, rejected=1)
    unaudited = row(A, audited=0, accepted=0, tokens=0, positions=0, sketch_misses=0)
    ledger = [
        summary(good, row(B), window=1),
        summary(bad, window=2),
        summary(good, window=3),
        summary(unaudited, window=4),
    ]
    counts = {A.public: [good.counts, bad.counts, good.counts], B.public: [row(B).counts]}
    assert histories(ledger, PROOF) == {
        miner: windows_of(items, samples.thresholds()) for miner, items in counts.items()
    }
    amendment = Amendment(window=3, miner=A.public, verdict=bytes(32), accepted=0, rejected=1)
    assert histories([*ledger, summary(window=5, amendments=(amendment,))], PROOF) == histories(ledger, PROOF)


@pytest.mark.parametrize(
    "listed, computed, same",
    [
        ([(b"a", 0.5), (b"b", 0.25)], [(b"a", 0.5 + 1e-15), (b"b", 0.25)], True),
        ([(b"a", 0.5)], [(b"a", 0.5), (b"b", 1e-16)], True),  # a balance that rounding moves across the deposit
        ([(b"a", 0.5)], [(b"a", 0.5 + 2e-9)], False),
        ([(b"a", 0.5)], [(b"a", 0.5), (b"b", 2e-9)], False),
        ([], [(b"a", 0.5)], False),
        ([(b"b", 0.25), (b"a", 0.5)], [(b"a", 0.5), (b"b", 0.25)], False),
        ([(b"a", 0.9), (b"a", 0.5)], [(b"a", 0.5)], False),
    ],
)
def test_scores_are_the_same_but_for_the_last_bits(
    listed: list[tuple[bytes, float]], computed: list[tuple[bytes, float]], same: bool
) -> None:
    assert are_same_scores(listed, computed) == same
