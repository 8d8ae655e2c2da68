"""Window arithmetic, the challenges that are derived from randomness, deals of groups to validators, and paths."""

import itertools
import math
import re
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol import limits, paths
from protocol.errors import MalformedError
from protocol.judging.roster import Roster, presence_windows
from protocol.rollout import challenge
from tests.support.builders.samples import MINER, RUN_ID, TRAINER, VALIDATOR, digest, key, schedule

RANDOMNESS = digest("randomness")


@given(st.integers(0, (1 << 33) - 1), st.integers(0, 9))
def test_a_round_belongs_to_the_window_that_it_opened(window: int, offset: int) -> None:
    assert schedule().window_at(schedule().opening(window) + offset) == window


def test_derived_values_are_distinct() -> None:
    runs, windows, randomness_values, miners = (
        (RUN_ID, digest("other run")),
        (0, 1),
        (RANDOMNESS, digest("r")),
        (MINER.public, TRAINER.public),
    )
    groups = [
        challenge.group_seed(*parts) for parts in itertools.product(runs, windows, randomness_values, miners, range(5))
    ]
    rollouts = [challenge.rollout_seed(group, index) for group in groups for index in range(4)]
    sketches = [challenge.sketch_seed(*parts) for parts in itertools.product(runs, windows, randomness_values)]
    streams = [challenge.stream(seed, context, 32) for seed in sketches for context in ("projection", "topk")]
    values = [value[:16] for value in groups + rollouts + sketches + streams]
    assert len(set(values)) == len(values)


@given(st.integers(0, 200), st.integers(1, 1_000_000), st.binary(min_size=32, max_size=32))
def test_the_number_of_audited_groups(groups: int, share: int, randomness: bytes) -> None:
    indices = challenge.audit_indices(RUN_ID, 1, randomness, MINER.public, groups=groups, share_ppm=share)
    assert list(indices) == sorted(set(indices))
    assert all(0 <= index < groups for index in indices)
    exact = -(-groups * share // 1_000_000)
    assert len(indices) == min(groups, max(1, exact))


def test_every_group_is_audited_equally_often() -> None:
    """Chi-square over 2,000 draws of 4 out of 16: 15 degrees of freedom, 0.9999 quantile 44.3."""
    counts = [0] * 16
    for draw in range(2000):
        for index in challenge.audit_indices(RUN_ID, draw, RANDOMNESS, MINER.public, groups=16, share_ppm=250_000):
            counts[index] += 1
    assert sum(counts) == 8000
    assert sum((count - 500) ** 2 / 500 for count in counts) < 44.3


ROUND = RUN_ID, 7, RANDOMNESS, MINER.public
INPUTS: dict[str, Any] = dict(zip(("run", "window", "randomness", "miner"), ROUND, strict=True))
OTHER_INPUTS = {"run": digest("x"), "window": 8, "randomness": digest("y"), "miner": TRAINER.public}
CHANGED_INPUTS = [INPUTS, *(INPUTS | {name: value} for name, value in OTHER_INPUTS.items())]


def test_an_audit_and_a_deal_depend_on_every_input() -> None:
    audits = {challenge.audit_indices(**inputs, groups=1000, share_ppm=20_000) for inputs in CHANGED_INPUTS}
    deals = {tuple(order(group, **inputs)[0] for group in range(64)) for inputs in CHANGED_INPUTS}
    assert len(audits) == len(deals) == len(CHANGED_INPUTS)


# Paths: they are distinct, sort by window, and can be parsed


KEY, OTHER = TRAINER.public, MINER.public
ALL = [
    paths.run(digest("run")),
    paths.participant(KEY),
    paths.file(KEY, digest("file")),
    paths.head(KEY),
    paths.manifest(KEY, 3, digest("manifest")),
    paths.patch(KEY, digest("patch")),
    paths.anchor(KEY, digest("anchor")),
    paths.commitment(KEY, 3),
    paths.batch(KEY, 3, digest("batch")),
    paths.verdict(KEY, 3, OTHER),
    paths.summary(KEY, 3),
    paths.witness(KEY, 3),
    paths.round_manifest(KEY, 3),
    paths.round_plan(KEY, 3),
    paths.products(KEY, 3, KEY),
    paths.newest_round(KEY),
    paths.state_shard(KEY, digest("shard")),
    paths.contribution(KEY, 3),
    paths.payload(KEY, 3, digest("payload")),
]


def test_paths_are_plain_and_short() -> None:
    for path in ALL:
        assert re.fullmatch(r"[a-z0-9-]+(/[a-z0-9-]+)+", path)
        assert len(path) <= limits.MAX_OBJECT_PATH_BYTES
        assert max(map(len, path.split("/"))) <= limits.MAX_OBJECT_PART_BYTES


def test_no_path_is_a_directory_of_another() -> None:
    assert len(set(ALL)) == len(ALL)
    assert not [(a, b) for a in ALL for b in ALL if b.startswith(a + "/")]


def test_paths_begin_with_their_prefixes() -> None:
    assert paths.participant(KEY).startswith(paths.participants())
    assert paths.manifest(KEY, 3, digest("m")).startswith(paths.kind_prefix(KEY, "manifests"))
    assert paths.patch(KEY, digest("p")).startswith(paths.kind_prefix(KEY, "patches"))
    assert paths.anchor(KEY, digest("a")).startswith(paths.kind_prefix(KEY, "anchors"))
    assert paths.verdict(KEY, 3, OTHER).startswith(paths.verdicts(KEY, 3))
    assert not paths.verdict(KEY, 30, OTHER).startswith(paths.verdicts(KEY, 3))
    for kind, path in (("commitments", paths.commitment(KEY, 1)), ("summaries", paths.summary(KEY, 1))):
        assert path.startswith(paths.kind_prefix(KEY, kind))


@given(st.integers(0, (1 << 33) - 1), st.integers(0, (1 << 33) - 1))
def test_paths_sort_by_window(first: int, second: int) -> None:
    assert (paths.commitment(KEY, first) < paths.commitment(KEY, second)) == (first < second)


@given(st.integers(0, (1 << 33) - 1), st.binary(min_size=32, max_size=32))
def test_window_and_key_are_parsed(window: int, key: bytes) -> None:
    path = paths.verdict(VALIDATOR.public, window, key)
    assert paths.window_of(path) == window
    assert paths.key_at_end(path) == key


@pytest.mark.parametrize(
    "path", ["", "a", "a/b", "a/12", "a/123456789", "a/+123456789", "a/1_23456789", "a/١٢٣٤٥٦٧٨٩٠"]
)
def test_no_window(path: str) -> None:
    with pytest.raises(MalformedError):
        paths.window_of(path)


@pytest.mark.parametrize(
    "path", ["", "ab", KEY.hex()[1:], KEY.hex().upper(), " " + KEY.hex()[1:], KEY.hex()[:32] + " " * 32, "é" * 64]
)
def test_no_key(path: str) -> None:
    with pytest.raises(MalformedError):
        paths.key_at_end(path)


# R1 deals groups to validators: evenly, unpredictably, and with stand-ins for those that are silent


VALIDATORS = tuple(sorted(key(f"validator {number}").public for number in range(8)))


def order(group: int, validators: tuple[bytes, ...] = VALIDATORS, **changes: Any) -> tuple[bytes, ...]:
    return challenge.deal_order(group=group, validators=validators, **(INPUTS | changes))


@given(st.integers(0, 4095), st.sets(st.sampled_from(VALIDATORS), min_size=1))
def test_who_is_left_out_changes_the_order_of_nobody_else(group: int, members: set[bytes]) -> None:
    assert order(group, tuple(members)) == tuple(item for item in order(group) if item in members)


@given(st.sets(st.sampled_from(VALIDATORS)), st.integers(1, 8), st.integers(0, 8), st.integers(0, 4095), st.booleans())
def test_every_group_has_a_quorum_of_judges(
    present: set[bytes], quorum: int, spares: int, group: int, stranger: bool
) -> None:
    outsiders = {TRAINER.public} if stranger else set()
    roster = Roster.of(VALIDATORS, present | outsiders, quorum, spares)
    judges = roster.judges_of(*ROUND, group)
    assert len(judges) == min(quorum + spares, len(roster.validators)) >= quorum
    assert judges <= set(VALIDATORS)
    assert judges <= present or len(present) < quorum
    assert roster.scale == (max(len(roster.validators), quorum + spares), quorum + spares)


@given(st.sets(st.sampled_from(VALIDATORS), min_size=2), st.sampled_from(VALIDATORS), st.integers(0, 4095))
def test_a_validator_that_comes_back_takes_no_judge_but_itself_into_account(
    present: set[bytes], back: bytes, group: int
) -> None:
    roster = Roster.of(VALIDATORS, present, 2, 0)
    before = roster.judges_of(*ROUND, group)
    after = roster.joined_by(back).judges_of(*ROUND, group)
    assert after - before <= {back}


def test_all_validators_have_the_same_load() -> None:
    """5 standard deviations of a binomial count; all pairs are equally frequent too (27 degrees of freedom, quantile
    0.9999: 62).
    """
    groups = 4000
    roster = Roster.of(VALIDATORS, VALIDATORS, 2, 0)
    pairs = Counter(roster.judges_of(*ROUND, group) for group in range(groups))
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
        (judge,) = before.judges_of(*ROUND, group)
        (heir,) = after.judges_of(*ROUND, group)
        assert heir == judge or judge == silent
        heirs[heir] += judge == silent
    expected = sum(heirs.values()) / 7
    assert all(abs(count - expected) < 5 * math.sqrt(expected) for count in (heirs[item] for item in VALIDATORS[1:]))


def test_the_dealt_groups_of_all_validators_are_all_groups_as_often_as_they_have_judges() -> None:
    roster = Roster.of(VALIDATORS, VALIDATORS, 2, 1)
    counts = Counter(
        group for validator in VALIDATORS for group in roster.dealt_groups(*ROUND, groups=40, validator=validator)
    )
    assert counts == dict.fromkeys(range(40), 3)


def test_a_validator_audits_one_of_its_groups_even_if_none_of_them_is_selected() -> None:
    inputs = INPUTS | {"groups": 64, "share_ppm": 100_000}
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
