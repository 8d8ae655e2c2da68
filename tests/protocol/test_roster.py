"""R1 deals groups to validators: evenly, unpredictably, and with stand-ins for those that are silent."""

import math
from collections import Counter
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from protocol.judging.roster import Roster, presence_windows
from protocol.rollout import challenge
from tests.support.builders.samples import MINER, RUN_ID, TRAINER, digest, key, schedule

VALIDATORS = tuple(sorted(key(f"validator {number}").public for number in range(8)))
R1 = digest("second round")


def order(group: int, validators: tuple[bytes, ...] = VALIDATORS, **changes: Any) -> tuple[bytes, ...]:
    inputs: dict[str, Any] = {"run": RUN_ID, "window": 7, "randomness": R1, "miner": MINER.public} | changes
    return challenge.deal_order(group=group, validators=validators, **inputs)


@given(st.integers(0, 4095), st.sets(st.sampled_from(VALIDATORS), min_size=1))
def test_who_is_left_out_changes_the_order_of_nobody_else(group: int, members: set[bytes]) -> None:
    assert order(group, tuple(members)) == tuple(item for item in order(group) if item in members)


@given(st.sets(st.sampled_from(VALIDATORS)), st.integers(1, 8), st.integers(0, 8), st.integers(0, 4095), st.booleans())
def test_every_group_has_a_quorum_of_judges(
    present: set[bytes], quorum: int, spares: int, group: int, stranger: bool
) -> None:
    outsiders = {TRAINER.public} if stranger else set()
    roster = Roster.of(VALIDATORS, present | outsiders, quorum, spares)
    judges = roster.judges_of(RUN_ID, 7, R1, MINER.public, group)
    assert len(judges) == min(quorum + spares, len(roster.validators)) >= quorum
    assert judges <= set(VALIDATORS)
    assert judges <= present or len(present) < quorum
    assert roster.scale == (max(len(roster.validators), quorum + spares), quorum + spares)


@given(st.sets(st.sampled_from(VALIDATORS), min_size=2), st.sampled_from(VALIDATORS), st.integers(0, 4095))
def test_a_validator_that_comes_back_takes_no_judge_but_itself_into_account(
    present: set[bytes], back: bytes, group: int
) -> None:
    roster = Roster.of(VALIDATORS, present, 2, 0)
    before = roster.judges_of(RUN_ID, 7, R1, MINER.public, group)
    after = roster.joined_by(back).judges_of(RUN_ID, 7, R1, MINER.public, group)
    assert after - before <= {back}


def test_all_validators_have_the_same_load() -> None:
    """5 standard deviations of a binomial count; all pairs are equally frequent too (27 degrees of freedom, quantile
    0.9999: 62).
    """
    groups = 4000
    roster = Roster.of(VALIDATORS, VALIDATORS, 2, 0)
    pairs = Counter(roster.judges_of(RUN_ID, 7, R1, MINER.public, group) for group in range(groups))
    loads = Counter(validator for pair, count in pairs.items() for validator in pair for _ in range(count))
    assert set(loads) == set(VALIDATORS)
    assert all(abs(load - groups / 4) < 5 * math.sqrt(groups * 0.25 * 0.75) for load in loads.values())
    expected = groups / math.comb(8, 2)
    assert len(pairs) == math.comb(8, 2)
    assert sum((count - expected) ** 2 / expected for count in pairs.values()) < 62


def test_the_groups_of_one_that_is_silent_are_shared_by_all_others() -> None:
    groups, silent = 4000, VALIDATORS[0]
    before = Roster.of(VALIDATORS, VALIDATORS, 1, 0)
    after = Roster.of(VALIDATORS, VALIDATORS[1:], 1, 0)
    heirs: Counter[bytes] = Counter()
    for group in range(groups):
        (judge,) = before.judges_of(RUN_ID, 7, R1, MINER.public, group)
        (heir,) = after.judges_of(RUN_ID, 7, R1, MINER.public, group)
        assert heir == judge or judge == silent
        heirs[heir] += judge == silent
    expected = sum(heirs.values()) / 7
    assert all(abs(count - expected) < 5 * math.sqrt(expected) for count in (heirs[item] for item in VALIDATORS[1:]))


def test_a_deal_depends_on_every_input() -> None:
    changes: list[dict[str, Any]] = [
        {},
        {"run": digest("x")},
        {"window": 8},
        {"randomness": digest("y")},
        {"miner": TRAINER.public},
    ]
    deals = {tuple(order(group, **change)[0] for group in range(64)) for change in changes}
    assert len(deals) == len(changes)


def test_the_dealt_groups_of_all_validators_are_all_groups_as_often_as_they_have_judges() -> None:
    roster = Roster.of(VALIDATORS, VALIDATORS, 2, 1)
    counts = Counter(
        group
        for validator in VALIDATORS
        for group in roster.dealt_groups(RUN_ID, 7, R1, MINER.public, groups=40, validator=validator)
    )
    assert counts == dict.fromkeys(range(40), 3)


def test_a_validator_audits_one_of_its_groups_even_if_none_of_them_is_selected() -> None:
    inputs: dict[str, Any] = {
        "run": RUN_ID,
        "window": 7,
        "randomness": R1,
        "miner": MINER.public,
        "groups": 64,
        "share_ppm": 100_000,
    }
    selected = set(challenge.audit_indices(**inputs))
    others = set(range(64)) - selected
    assert len(challenge.audit_indices(**inputs, dealt=others)) == 1
    assert challenge.audit_indices(**inputs, dealt=()) == ()
    own = {*sorted(selected)[:3], *sorted(others)[:5]}
    assert set(challenge.audit_indices(**inputs, dealt=own)) == own & selected


def test_the_windows_that_show_presence_are_over_when_a_window_opens() -> None:
    plan = schedule()
    for window in range(20):
        shown = presence_windows(plan, window)
        assert all(plan.verdict(item) <= plan.opening(window) for item in shown)
        assert len(shown) in (0, 3)
        if shown:
            assert plan.verdict(shown[-1] + 1) > plan.opening(window)
    newest = -(-plan.verdict_rounds // plan.rounds)
    assert [bool(presence_windows(plan, window)) for window in (0, newest + 1, newest + 2)] == [False, False, True]
