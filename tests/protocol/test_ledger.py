"""The ledger: rows add up, and nobody improves a score by splitting work over keys, stopping early or changing keys."""

import random
from collections import defaultdict
from itertools import combinations, product
from statistics import fmean
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from grailnode.run import creation
from protocol.identity.signing import SigningKey
from protocol.judging.accounts import Accounts
from protocol.judging.evidence import NO_COUNTS, NO_EVIDENCE, REPRODUCED, UNREPRODUCED, Counts, Evidence, Tally, advance
from protocol.judging.ledger import (
    GROUP,
    SHARE,
    Amendment,
    Evaluation,
    LedgerRow,
    StratumResult,
    Summary,
    excess_misses,
    pass_at_k,
    priced_step,
    shares,
)
from protocol.judging.roster import Roster
from protocol.proof import MEASURED, ProofSpec, StatisticName
from protocol.run import ScoringSpec
from tests.support.builders import samples
from tests.support.builders.proofs import advance_window, by_statistic, proof_of
from tests.support.builders.samples import (
    MINER,
    SCORING,
    TRAINER,
    counts,
    judgement,
    rejected,
    row,
    summary,
    unreproduced,
    verdict,
)

BALANCE = st.integers(-(10**10), 10**10)
A, B, C = MINER, TRAINER, samples.VALIDATOR
STEADY = SCORING.model_copy(update={"miss_price": 0, "deposit": 0, "cap": SHARE, "decay": SHARE})
PROOF = samples.run_manifest().proof
_GROUPS = ("submitted", "dealt", "audited", "accepted")


def balance(*summaries: Summary, scoring: ScoringSpec = STEADY) -> int:
    """Return the balance of miner A in millionths of a group."""
    return Accounts.of(summaries, scoring, PROOF).totals()[0][A.public]


def equal_shares(balances: dict[bytes, int], scoring: ScoringSpec) -> dict[bytes, int]:
    """Return the shares of miners whose groups have equal lengths."""
    return shares(balances, scoring, dict.fromkeys(balances, GROUP))


def worth(*summaries: Summary) -> float:
    """Return the balance of miner A in groups."""
    return balance(*summaries) / GROUP


def slow_pass_at_k(completions: list[bool], k: int) -> float:
    """Return the share of the choices of k completions among which one is right."""
    return fmean(any(subset) for subset in combinations(completions, k))


@pytest.mark.parametrize("right", [(1, 0, 0, 0, 0, 0), (0, 0, 0, 0, 0, 3), (4, 2, 0, 1, 5, 1), (0, 7, 0, 0, 0, 0)])
@pytest.mark.parametrize("k", [1, 2, 3, 5])
def test_the_estimator_is_the_mean_over_all_choices(right: tuple[int, ...], k: int) -> None:
    problems = [[True] * c + [False] * (5 - c) for c, count in enumerate(right) for _ in range(count)]
    assert pass_at_k(right, k) == pytest.approx(fmean(slow_pass_at_k(problem, k) for problem in problems), abs=1e-12)


def test_pass_at_k_of_an_evaluation_is_over_the_problems_of_all_strata() -> None:
    strata = (StratumResult(name="easy", right=(0, 1, 1)), StratumResult(name="hard", right=(2, 0, 0)))
    evaluation = Evaluation(version=1, strata=strata)
    assert (evaluation.problems, evaluation.pass_at(1), evaluation.pass_at(2)) == (4, 0.375, 0.5)


def test_groups_that_were_not_reproduced_earn_nothing_and_stand_for_those_that_were_not_audited() -> None:
    accepted = LedgerRow.of(verdict(judgement(0), *(unreproduced(index, NO_COUNTS) for index in range(1, 4))))
    assert (accepted.dealt, accepted.audited, accepted.accepted, accepted.rejected) == (16, 4, 1, 0)
    assert worth(summary(accepted)) == 4
    assert Accounts.of([summary(accepted)], SCORING, PROOF).clean_windows() == {A.public: 0}
    misses: dict[str, Any] = {"counts": counts(sketch=(40, 9), margin=(40,), stop=(8,)), "audited": 4}
    scoring = STEADY.model_copy(update={"miss_price": GROUP})
    priced, halved = (
        balance(summary(row(**misses, accepted=accepted)))
        - balance(summary(row(**misses, accepted=accepted)), scoring=scoring)
        for accepted in (4, 2)
    )
    assert priced == halved > 0  # twice as many misses a group, in half as many groups
    nothing = LedgerRow.of(verdict(*(unreproduced(index, NO_COUNTS) for index in range(2)), pledged=16, submitted=2))
    assert not nothing.lapsed  # what was pledged and not delivered still costs
    assert balance(summary(nothing)) == -14 * STEADY.shortfall


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
    nothing = row(submitted=12, dealt=0, audited=0, accepted=0, counts=NO_COUNTS)
    assert worth(summary(nothing, **one_of_four)) == -4
    assert worth(summary(row(dealt=4), **one_of_four | {"judges": 4})) == 4
    assert balance(summary(row(dealt=4), **one_of_four | {"judges": 3})) == 5_333_333  # 4 * 4 / 3, rounded down


@given(st.lists(st.booleans(), min_size=1, max_size=16), st.integers(1, 8), st.integers(0, 4), st.integers(0, 1 << 32))
def test_balances_of_all_deals_have_the_balance_of_a_full_audit_as_their_mean(
    false: list[bool], judges: int, missing: int, window: int
) -> None:
    """Over the validators of a roster: each group is dealt to `judges` of them."""
    validators = tuple(sorted(samples.key(f"validator {number}").public for number in range(8)))
    roster = Roster(validators, judges)
    count, pledged = len(false), len(false) + missing

    def balance_of(dealt: tuple[int, ...], **changes: Any) -> int:
        rejected_count = sum(false[group] for group in dealt)
        result = row(
            pledged=pledged,
            submitted=count,
            dealt=len(dealt),
            audited=len(dealt),
            accepted=len(dealt) - rejected_count,
            rejected=rejected_count,
            counts=NO_COUNTS,
        )
        return balance(summary(result, **changes))

    full_audit = balance_of(tuple(range(count)))
    deals = [
        balance_of(
            roster.dealt_groups(samples.RUN_ID, window, bytes(32), A.public, groups=count, validator=validator),
            validator=validator,
            roster=validators,
            judges=judges,
        )
        for validator in validators
    ]
    assert full_audit - 1 < sum(deals) / len(deals) <= full_audit  # each is rounded down


def test_stopping_early_never_pays() -> None:
    """A miner that delivers fewer groups than pledged after it has seen the window has a lower balance."""
    for submitted in range(1, 16):
        fewer = row(submitted=submitted, audited=submitted, accepted=submitted)
        assert worth(summary(fewer)) == submitted - (16 - submitted)
    assert worth(summary(LedgerRow(miner=A.public, pledged=16))) == -16


def test_the_value_of_a_group_decays_by_a_table_of_whole_numbers() -> None:
    scoring = STEADY.model_copy(update={"decay": 900_000_001, "windows": 4})
    values = [balance(summary(row(), window=0), summary(window=age), scoring=scoring) for age in range(1, 4)]
    # 900,000,001, 810,000,001.8 and 729,000,001.7 billionths, each rounded down before the next
    assert values == [16 * 900_000, 16 * 810_000, 16 * 729_000]
    thousand = row(pledged=1000, submitted=1000)
    assert balance(summary(thousand, window=0), summary(window=3), scoring=scoring) == 729_000_001
    assert Accounts.of((summary(row(), window=0), summary(window=4)), scoring, PROOF).totals()[0] == {}
    assert Accounts.of((), scoring, PROOF).totals()[0] == {}


def test_the_value_of_a_group_in_a_new_run_halves_in_50_windows() -> None:
    ledger = (summary(row(counts=NO_COUNTS), window=0), summary(window=50))
    assert balance(*ledger, scoring=creation.SCORING) == 7_999_999


def scores(*summaries: Summary) -> dict[bytes, int]:
    return dict(Accounts.of(summaries, STEADY, PROOF).scores())


def test_shares_grow_by_the_tokens_of_groups_and_nothing_else_does() -> None:
    """By hand: 16 groups of 5 tokens beside 16 of 15, in windows of their own."""
    short, long = row(A, accepted=4, tokens=20), row(B, accepted=2, audited=2, tokens=30)
    assert scores(summary(short, window=1), summary(long, window=2)) == {A.public: SHARE // 4, B.public: 3 * SHARE // 4}
    accounts = Accounts.of([summary(short, long)], STEADY, PROOF)
    assert accounts.totals()[0] == {A.public: 16 * GROUP, B.public: 16 * GROUP}
    mixed = judgement(0), rejected(1)
    assert LedgerRow.of(verdict(*mixed)).tokens == judgement(0).tokens > 0


def test_who_sacrifices_a_group_is_not_paid_for_those_that_are_audited_therefore() -> None:
    other = row(B, tokens=20)
    short = row(A, audited=1, accepted=1, tokens=1)
    audited = row(A, audited=16, accepted=15, rejected=1, tokens=15 * 50)
    earlier = [summary(row(A, tokens=20), other, window=window) for window in range(10)]
    honest, sacrifices = (scores(*earlier, summary(own, other, window=10))[A.public] for own in (short, audited))
    assert sacrifices < honest


@given(st.lists(st.integers(1, 1000), min_size=2, max_size=16), st.integers(0, 15))
def test_nobody_is_paid_more_for_a_token_by_withholding_the_longest_groups(lengths: list[int], withheld: int) -> None:
    """Beside an honest miner, and if not a token of what is withheld was ever generated."""
    shown = sorted(lengths)[: max(1, len(lengths) - withheld)]
    results = {
        miner: row(miner, **dict.fromkeys(_GROUPS, len(groups)), pledged=len(lengths), tokens=sum(groups))
        for miner, groups in ((A, lengths), (B, shown))
    }
    paid = scores(summary(*results.values()))
    honest, other = (paid.get(miner.public, 0) / results[miner].tokens for miner in (A, B))
    assert other <= honest * 1.000_001 + 1


def test_misses_beyond_the_honest_rate_have_a_price() -> None:
    """By hand: 4 of 16 groups are audited, and honest work may have 16 / 1000 and 20 / 1000 misses in them, and 8 / 100
    of rollouts.
    """
    scoring = STEADY.model_copy(update={"miss_price": GROUP // 2})
    few, many = row(counts=counts(sketch=(16,))), row(counts=counts(sketch=(16, 4, 1, 1)))
    assert balance(summary(few), scoring=scoring) == 16 * GROUP
    assert balance(summary(many), scoring=scoring) == 16 * GROUP - 4 * (6 * GROUP - 16_000) // 2
    both = balance(summary(few, window=1), summary(many, window=2), scoring=scoring)
    assert both == 32 * GROUP - 4 * (6 * GROUP - 32_000) // 2  # what one window has too few makes up for another
    each = row(counts=counts(sketch=(16, 1), margin=(20, 1), stop=(8, 1), luck=(2_000, 0, 2_000)))
    excess = 4 * (GROUP - 16_000) + 4 * (GROUP - 20_000) + 4 * (GROUP - 80_000)
    assert balance(summary(each), scoring=scoring) == 16 * GROUP - excess // 2  # luck has no price


def test_a_miss_with_a_price_is_rare_in_honest_work() -> None:
    margin = samples.table((1_000, 10_000, 50_000), (2e-2, 1e-3, 1e-6), (1.0, 1.0, 1.0))
    stop = samples.table((1_000, 10_000), (2e-2, 1e-3), (1.0, 1.0))
    thresholds = samples.thresholds(margin=margin, stop=stop)
    assert [priced_step(thresholds, name) for name in ("sketch", "margin", "stop")] == [0, 1, 0]
    often = samples.table((1_000, 10_000), (5e-1, 2e-3), (1.0, 1.0))
    assert priced_step(samples.thresholds(sketch=often), "sketch") == 1  # no step is rare: the last one


def test_windows_of_one_declaration_do_not_make_up_for_misses_of_another() -> None:
    narrow, wide = samples.thresholds(), samples.thresholds(miner="torch-bfloat16")
    scoring, proof = STEADY.model_copy(update={"miss_price": GROUP}), proof_of(narrow, wide)
    clean = row(arithmetic="torch-bfloat16", counts=counts(sketch=(10_000,)))
    ledger = (summary(clean, window=1), summary(row(counts=counts(sketch=(16, 6))), window=2))
    assert Accounts.of(ledger, scoring, proof).totals()[0][A.public] == 32 * GROUP - 4 * (6 * GROUP - 16_000)


@given(st.dictionaries(st.binary(min_size=1, max_size=2), st.tuples(BALANCE, st.integers(1, 10**12)), max_size=6))
def test_shares_sum_to_at_most_one_and_none_exceeds_the_cap(miners: dict[bytes, tuple[int, int]]) -> None:
    values, lengths = ({miner: pair[part] for miner, pair in miners.items()} for part in (0, 1))
    result = shares(values, SCORING, lengths)
    assert result.keys() == values.keys()
    assert all(0 <= share <= SCORING.cap for share in result.values())
    assert sum(result.values()) <= SHARE
    assert (sum(result.values()) > 0) == any(value > SCORING.deposit for value in values.values())


@given(BALANCE, BALANCE, BALANCE, st.integers(0, 100))
def test_splitting_work_over_two_keys_never_earns_more_than_one_does(
    first: int, second: int, others: int, deposit: int
) -> None:
    """But for the rounding of a billionth; and beyond the deposit, pooling it earns no more than two keys do."""
    first, second, others = abs(first), abs(second), abs(others)
    scoring = STEADY.model_copy(update={"deposit": deposit * GROUP})
    whole = equal_shares({b"a": first + second, b"o": others}, scoring)[b"a"]
    split = equal_shares({b"a": first, b"b": second, b"o": others}, scoring)
    assert split[b"a"] + split[b"b"] <= whole
    if min(first, second) > scoring.deposit:
        assert whole <= split[b"a"] + split[b"b"] + 1


def test_pooled_work_earns_as_much_as_it_delivers() -> None:
    """Two of ten equal miners under one key earn twice one's share; one that delivers 16 groups beside ten that deliver
    4 earns four times theirs.
    """

    def earn(*groups: int) -> list[int]:
        keys = [samples.key(f"miner {number}") for number in range(len(groups))]
        rows = [
            row(key, pledged=16, submitted=count, counts=NO_COUNTS) for key, count in zip(keys, groups, strict=True)
        ]
        result = dict(Accounts.of([summary(*rows)], STEADY.model_copy(update={"shortfall": 0}), PROOF).scores())
        return [result[key.public] for key in keys]

    pooled, *alone = earn(8, *[4] * 8)
    assert (pooled, set(alone)) == (2 * SHARE // 10, {SHARE // 10})
    large, *small = earn(16, *[4] * 10)
    assert set(small) == {SHARE // 14}
    assert 4 * small[0] <= large <= 4 * small[0] + 4


@given(st.integers(1, 4096), st.integers(0, 100), st.integers(1, 4096))
def test_a_rejection_never_pays(acceptances: int, rejections: int, others: int) -> None:
    def share(rejections: int) -> int:
        values = {b"a": acceptances * GROUP - SCORING.penalty * rejections, b"o": others * GROUP}
        return equal_shares(values, SCORING)[b"a"]

    assert share(rejections + 1) <= share(rejections)


def test_a_key_earns_nothing_up_to_the_deposit_and_by_its_whole_balance_beyond_it() -> None:
    scoring = STEADY.model_copy(update={"deposit": 8 * GROUP})
    at, beyond = 8 * GROUP, 8 * GROUP + 1
    assert equal_shares({b"new": at, b"old": 24 * GROUP}, scoring) == {b"new": 0, b"old": SHARE}
    assert equal_shares({b"new": beyond, b"old": 24 * GROUP}, scoring) == {b"new": 250_000_023, b"old": 749_999_976}


def test_of_too_many_earners_those_with_the_largest_shares_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("protocol.limits.MAX_WINDOW_MINERS", 2)
    first, last = sorted((A, B), key=lambda key: key.public)
    entry = summary(row(first), row(last), row(C, pledged=32, submitted=32))
    assert Accounts.of((entry,), STEADY, PROOF).scores() == tuple(
        sorted([(C.public, SHARE // 2), (first.public, SHARE // 4)])
    )


def test_a_window_is_clean_if_all_groups_count_that_were_not_reproduced() -> None:
    """So an honest miner of replies that are not exact becomes known, and no limit of a machine makes one known."""
    reproduced = judgement(0, counts=judgement().counts + REPRODUCED)
    counted = LedgerRow.of(verdict(reproduced, unreproduced(1), unreproduced(2)))
    assert (counted.accepted, counted.counts.replay) == (1, Tally(trials=3, steps=(2,)))
    assert counted.counts.sketch == judgement().counts.sketch
    limited = LedgerRow.of(verdict(reproduced, unreproduced(1), unreproduced(2, NO_COUNTS)))
    nothing = LedgerRow.of(verdict(unreproduced(0)))
    refused = LedgerRow.of(verdict(reproduced, unreproduced(1), rejected(2)))
    clean = [
        Accounts.of([summary(item)], SCORING, PROOF).clean_windows()[A.public]
        for item in (counted, limited, nothing, refused)
    ]
    assert clean == [1, 0, 0, 0]
    proof = proof_of(samples.replay_thresholds())
    evidence = Accounts.of([summary(nothing), summary(nothing, window=9)], SCORING, proof).evidence_of(
        A.public, "torch-float32"
    )
    expected = advance(advance(NO_EVIDENCE, UNREPRODUCED, proof.table[0]), UNREPRODUCED, proof.table[0])
    assert evidence == expected and min(by_statistic(evidence, proof.table[0])["replay"]) > 0


def test_the_audited_share_falls_to_the_floor() -> None:
    assert [PROOF.audit_share(clean) for clean in (0, 7, 8, 16, 24, 10_000)] == [
        *(250_000, 250_000, 125_000, 62_500, 50_000, 50_000)
    ]


def test_a_row_has_the_counts_of_groups_that_are_accepted_or_rejected_for_them() -> None:
    accepted, other = counts(sketch=(3, 1), margin=(5, 2), stop=(2,)), counts(sketch=(2,), margin=(5,), stop=(2,))
    result = LedgerRow.of(verdict(judgement(0, counts=accepted), rejected(1, "wrong-reward", counts=other)))
    assert (result.accepted, result.rejected, result.counts) == (1, 1, accepted)
    for reason in ("wrong-sketch", "wrong-sampling", "wrong-stop", "improbable-window"):
        result = LedgerRow.of(verdict(rejected(0, reason, counts=accepted), rejected(1, reason, counts=other)))
        assert (result.accepted, result.rejected, result.counts) == (0, 2, accepted + other)
    assert (
        LedgerRow(miner=A.public, pledged=3).counts == LedgerRow.of(verdict(rejected(0, "copied"))).counts == NO_COUNTS
    )


def test_the_largest_verdict_has_a_row() -> None:
    """No counts that a validator may state are too large to be added."""
    most = (1 << 40, 1 << 40)
    with pytest.raises(ValidationError, match="more trials than tokens"):
        judgement(0, counts=counts(margin=most))
    for replay in (Tally(trials=(1 << 53) - 1, steps=(0,)), Tally(trials=1, steps=(1,))):
        with pytest.raises(ValidationError, match="replayed several times, or accepted though"):
            judgement(0, counts=counts(margin=(5,)).model_copy(update={"replay": replay}))
    largest = judgement(0, tokens=1 << 25, logprobs=bytes(4 << 25), counts=counts(luck=(1000 << 25, 0, 1000 << 25)))
    assert sum([largest.counts] * 4096, NO_COUNTS).luck.trials < 1 << 53


Totals = tuple[dict[bytes, int], dict[bytes, int]]


def plain_totals(ledger: list[Summary], scoring: ScoringSpec, proof: ProofSpec) -> Totals:
    """Return the balances and lengths of docs/spec/ledger.md, row by row in Python's integers."""
    result, groups, tokens = (defaultdict[bytes, int](int) for _ in range(3))
    excesses: defaultdict[tuple[bytes, str, StatisticName], int] = defaultdict(int)
    for entry in ledger:
        decay, (multiplier, divisor) = SHARE, entry.dealing.scale
        for _ in range(ledger[-1].window - entry.window):
            decay = decay * scoring.decay // SHARE
        for item in entry.rows:
            place = entry.window, item.miner
            amended = [a for later in ledger for a in later.amendments if (a.window, a.miner) == place][-1:]
            refused = item.rejected + sum(a.rejected for a in amended)
            audited = min(item.accepted + sum(a.accepted for a in amended), item.dealt)
            credit = audited if amended or item.rejected else item.counting
            earned = (credit * GROUP - scoring.penalty * refused) * multiplier // divisor
            value = 0 if item.lapsed else earned - scoring.shortfall * (item.pledged - item.submitted)
            result[item.miner] += value * decay // SHARE
            if not item.lapsed:
                groups[item.miner] += credit * GROUP * multiplier // divisor * decay // SHARE
                paid = GROUP * credit * item.tokens // item.accepted if item.accepted and not refused else 0
                tokens[item.miner] += paid * multiplier // divisor * decay // SHARE
            for name in MEASURED if item.accepted else ():
                excess = excess_misses(item, proof.row(item.arithmetic, entry.arithmetic), name)
                excesses[item.miner, item.arithmetic, name] += excess * multiplier // divisor * decay // SHARE
    for (miner, _, _), excess in excesses.items():
        result[miner] -= scoring.miss_price * max(0, excess) // GROUP
    lengths = {miner: GROUP * tokens[miner] // max(1, groups[miner]) for miner in result}
    return dict(result), lengths


def random_row(rng: random.Random, miner: SigningKey, proof: ProofSpec) -> LedgerRow:
    pledged, submitted, dealt, audited, accepted = sorted((rng.randrange(20) for _ in range(5)), reverse=True)
    if not submitted:
        return LedgerRow(miner=miner.public, pledged=pledged)
    thresholds, most = rng.choice(proof.table), rng.choice([4, 1 << 20, 1 << 30])
    tallies = {}
    for name in thresholds.statistics if rng.random() < 0.8 else ():
        steps = tuple(rng.randrange(1, most) for _ in thresholds.table(name).beyond)
        tallies[name] = Tally(trials=sum(steps) + rng.randrange(4 * most), steps=steps)
    groups = {"pledged": pledged, "submitted": submitted, "dealt": dealt, "audited": audited, "accepted": accepted}
    rejected = rng.choice([0, 0, audited - accepted])
    tokens = accepted and rng.randrange(1, most)
    counts = Counts(**tallies)
    return row(miner, arithmetic=thresholds.miner, counts=counts, rejected=rejected, tokens=tokens, **groups)


@pytest.mark.parametrize("seed", range(20))
def test_accounts_are_what_each_row_that_counts_adds_whoever_comes_and_goes(seed: int) -> None:
    rng = random.Random(seed)
    scoring = SCORING.model_copy(update={"windows": rng.choice([1, 4, 9]), "deposit": 0, "decay": rng.randrange(SHARE)})
    narrow = samples.replay_thresholds()
    sketch = samples.table((32,), (1e-3,), *((score,) for score in (0.1, 0.2, 0.4, 0.8)))
    proof = proof_of(narrow, narrow.model_copy(update={"miner": "torch-bfloat16", "sketch": sketch}))
    miners = sorted((samples.key(f"comes and goes {number}") for number in range(6)), key=lambda key: key.public)
    roster = tuple(sorted((samples.VALIDATOR.public, A.public, B.public)))
    accounts, ledger, window = Accounts(scoring, proof), list[Summary](), 0
    for _ in range(25):
        window += rng.choice([1, 1, 2, 5])
        rows = [random_row(rng, miner, proof) for miner in rng.sample(miners, 3)]
        amendments = [
            Amendment(
                window=earlier, miner=rng.choice(miners).public, verdict=b"", accepted=rng.randrange(9), rejected=1
            )
            for earlier in range(max(0, window - 4), window)
        ]
        fields = {"roster": roster, "judges": 2, "amendments": tuple(amendments), "window": window}
        ledger = [entry for entry in ledger if entry.window > window - scoring.windows] + [summary(*rows, **fields)]
        accounts.add(ledger[-1])
        balances, lengths = plain_totals(ledger, scoring, proof)
        assert accounts.totals() == (balances, lengths)
        earned = shares(balances, scoring, lengths)
        assert accounts.scores() == tuple(sorted(item for item in earned.items() if item[1]))
        clean, newest, evidence = dict[bytes, int](), dict[bytes, int](), dict[tuple[bytes, str], Evidence]()
        for entry in ledger:
            for item in entry.rows:
                clean[item.miner] = 0 if item.rejected else clean.get(item.miner, 0) + item.is_clean
                if item.rejected:
                    newest[item.miner] = entry.window
                if item.counts.computed:
                    pair, thresholds = (item.miner, item.arithmetic), proof.row(item.arithmetic, entry.arithmetic)
                    evidence[pair] = advance_window(evidence.get(pair, NO_EVIDENCE), item.counts, thresholds)
        assert accounts.clean_windows() == clean and accounts.rejections() == newest
        for pair in product((miner.public for miner in miners), proof.miners):
            assert accounts.evidence_of(*pair) == evidence.get(pair, NO_EVIDENCE)


def test_balances_beyond_64_bits_are_exact() -> None:
    scoring = STEADY.model_copy(update={"penalty": 10**12, "windows": 10_000})
    counts_of_groups = dict.fromkeys(("pledged", "submitted", "dealt", "audited"), 4000)
    item = row(A, accepted=1, rejected=3999, **counts_of_groups)
    many = {"roster": tuple(number.to_bytes(32, "big") for number in range(1000)), "judges": 1}
    ledger = [summary(item, window=window).model_copy(update=many) for window in range(400)]
    assert balance(*ledger, scoring=scoring) == 400 * 1000 * (GROUP - 3999 * 10**12) < -(1 << 63)
