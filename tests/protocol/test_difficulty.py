"""Difficulty tables: the shares that follow from counts, and what a table may be."""

from contextlib import nullcontext

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol import environments
from protocol.chain.manifest import Manifest
from protocol.chain.verifier import ChainVerifier
from protocol.difficulty import DifficultySpec, DifficultyTable, Stratum, table_refusal
from protocol.encoding import pack
from protocol.environments.addition import Addition
from protocol.environments.base import Environment
from protocol.environments.calculator import Calculator
from protocol.environments.countdown import Countdown
from protocol.environments.mixture import Mixture, Strata
from protocol.environments.record import SHARES
from protocol.environments.sat import Sat
from protocol.errors import ChainError, MalformedError
from protocol.judging.ledger import Summary
from tests.protocol.signed_chain import Trainer, follow
from tests.support.builders import samples
from tests.support.builders.tasks import MATH

GROUP = 1_000_000


def rule(*ppm: int, floor_ppm: int = 200_000, decay: int = 900_000) -> DifficultySpec:
    strata = tuple(Stratum(name=f"{place:02}", ppm=share) for place, share in enumerate(ppm))
    return DifficultySpec(strata=strata, floor_ppm=floor_ppm, decay=decay)


HALVES = rule(500_000, 500_000)
counts_of = st.tuples(st.integers(0, (1 << 53) - 1), st.integers(0, (1 << 53) - 1)).map(
    lambda pair: (max(pair), min(pair))
)


@given(
    st.integers(2, 64).flatmap(
        lambda strata: st.tuples(
            st.lists(st.integers(1, 100), min_size=strata, max_size=strata),
            st.lists(st.lists(counts_of, min_size=strata, max_size=strata), max_size=5),
        )
    ),
    st.integers(0, SHARES - 1),
)
def test_shares_add_up_and_no_stratum_falls_below_its_floor(counts, floor_ppm):
    parts, ledgers = counts
    ppm = [max(1, SHARES * part // sum(parts)) for part in parts]
    ppm[ppm.index(max(ppm))] += SHARES - sum(ppm)
    spec = rule(*ppm, floor_ppm=floor_ppm)
    shares = spec.shares([tuple(ledger) for ledger in ledgers])
    assert sum(shares) == SHARES
    assert all(share >= max(1, own * floor_ppm // SHARES) for share, own in zip(shares, ppm, strict=True))
    if not ledgers:
        assert all(abs(share - own) <= len(ppm) + 1 for share, own in zip(shares, ppm, strict=True))


def test_what_is_useless_falls_to_its_floor_and_what_was_not_tried_counts_as_useful():
    easy, useful, new = (1000 * GROUP, 0), (1000 * GROUP, 1000 * GROUP), (0, 0)
    assert rule(400_000, 300_000, 300_000).shares([(easy, useful, new)]) == (80_000, 460_000, 460_000)


def test_equally_useful_strata_are_drawn_by_the_roots_of_their_own_shares():
    counts = ((10 * GROUP, 5 * GROUP),) * 2
    assert rule(800_000, 200_000, floor_ppm=0).shares([counts]) == (666_666, 333_334)


def test_fewer_than_half_of_the_validators_move_a_share_only_within_the_values_of_the_others():
    low, high = ((100 * GROUP, 20 * GROUP), (0, 0)), ((100 * GROUP, 30 * GROUP), (0, 0))
    lies = ((1 << 52, 0), (0, 0)), ((1 << 52, 1 << 52), (0, 0))
    for lie in lies:
        share = HALVES.shares([low, lie, high])[0]
        assert HALVES.shares([low])[0] <= share <= HALVES.shares([high])[0]


def test_levels_that_nobody_solves_are_tried_again_when_their_counts_have_faded():
    tried = HALVES.count(None, 0, [(0, False)] * 100 + [(1, True)] * 100)
    assert HALVES.shares([tried])[0] < 110_000
    assert HALVES.shares([HALVES.count(tried, 60, ())])[0] > 440_000
    assert HALVES.count(tried, 1 << 33, ()) == ((0, 0), (0, 0))


def test_a_first_version_has_the_strata_s_own_shares_and_every_other_table_names_summaries():
    first = DifficultyTable.of(HALVES)
    assert first.shares == (500_000, 500_000)
    assert table_refusal(HALVES, first, 0) == table_refusal(None, None, 0) == ""
    assert "in a run without" in table_refusal(None, first, 0)
    assert "or none" in table_refusal(HALVES, None, 0)
    assert "of other strata" in table_refusal(rule(200_000, 300_000, 500_000), first, 0)
    chosen = DifficultyTable(window=0, summaries=(), shares=(900_000, 100_000))
    assert "follows from no summaries" in table_refusal(HALVES, chosen, 0)


def invented(window: int = 7, *shares: int) -> DifficultyTable:
    return DifficultyTable(window=window, summaries=((samples.VALIDATOR.public, bytes(32)),), shares=shares)


def test_a_table_is_of_a_window_before_its_version_serves():
    assert table_refusal(HALVES, invented(7, 500_000, 500_000), 8) == ""
    for window in (8, 9, (1 << 33) - 1):
        assert "is not over" in table_refusal(HALVES, invented(window, 500_000, 500_000), 8)


@pytest.mark.parametrize("window", [6, 7])
def test_a_table_is_of_no_older_window_than_that_of_the_version_before(window: int) -> None:
    trainer, node = Trainer(), ChainVerifier(samples.RUN_ID, samples.run_manifest(difficulty=HALVES))
    for table in (DifficultyTable.of(HALVES), invented(7, 500_000, 500_000), invented(window, 500_000, 500_000)):
        trainer.add(difficulty=table, first_window=8)
    with pytest.raises(ChainError, match="of an older window") if window < 7 else nullcontext():
        follow(node, trainer)


def test_a_table_gives_no_stratum_less_than_its_floor():
    assert table_refusal(HALVES, invented(7, 900_000, 100_000), 8) == ""
    for shares in ((900_001, 99_999), (1, 999_999)):
        assert "below the floor" in table_refusal(HALVES, invented(7, *shares), 8)


def test_counts_with_more_uneven_groups_than_groups_are_malformed():
    fields = samples.summary().model_dump() | {"strata": ((GROUP, GROUP), (0, 0))}
    assert Summary.from_bytes(pack(fields)).strata == ((GROUP, GROUP), (0, 0))
    with pytest.raises(MalformedError, match="more uneven groups than groups"):
        Summary.from_bytes(pack(fields | {"strata": ((GROUP, GROUP + 1), (0, 0))}))


@pytest.mark.parametrize("change", [{"shares": (SHARES, 0)}, {"summaries": ((samples.MINER.public, bytes(32)),) * 2}])
def test_tables_of_another_form_are_refused(change):
    with pytest.raises(MalformedError):
        DifficultyTable.from_bytes(pack(DifficultyTable.of(HALVES).model_dump() | change))


def test_a_manifest_without_a_table_has_no_byte_more():
    plain, table = samples.manifest(), DifficultyTable.of(HALVES)
    assert b"difficulty" not in plain.to_bytes()
    assert Manifest.from_bytes(plain.to_bytes()) == plain
    with_table = plain.model_copy(update={"difficulty": table})
    assert Manifest.from_bytes(with_table.to_bytes()).difficulty == table
    with pytest.raises(MalformedError, match="canonical"):
        Manifest.from_bytes(pack(plain.model_dump() | {"difficulty": None}))


def mixture() -> Environment:
    return Mixture([(300_000, environments.get("addition")), (700_000, environments.get("sat"))])


LEVELED = (Addition(), Calculator(), Countdown(), Sat())


@pytest.mark.parametrize("environment", [*LEVELED, environments.get("math", MATH), mixture()])
def test_a_stratum_gives_training_problems_of_its_own_alone(environment):
    strata = Strata(environment)
    assert list(strata.weights) == sorted(strata.weights)
    held_out = {environment.held_out_problem(index).prompt for index in range(200)}
    for name in strata.weights:
        problems = [strata.problem(name, samples.digest(f"{name} {number}")) for number in range(20)]
        assert {problem.stratum for problem in problems} == {name}
        assert not {problem.prompt for problem in problems} & held_out


@pytest.mark.parametrize("environment", LEVELED)
def test_the_share_of_a_level_is_that_of_all_problems(environment):
    drawn = [environment.level_of(environment.problem(samples.digest(f"seed {number}"))) for number in range(1000)]
    total = sum(environment.levels.values())
    for level, weight in environment.levels.items():
        assert drawn.count(level) / 1000 == pytest.approx(weight / total, abs=0.04)


@pytest.mark.parametrize(
    ("environment", "reference", "level"),
    [
        *(("countdown", "3 7 25>35", "sum"), ("countdown", "3 7 25>46", "product")),
        *(("countdown", "1 3 9>3", "quotient"), ("calculator", "999", "3"), ("calculator", "1000", "4")),
    ],
)
def test_levels(environment, reference, level):
    problem = environments.Problem("", reference)
    (leveled,) = (item for item in LEVELED if item.name == environment)
    assert leveled.level_of(problem) == level
