"""Window arithmetic, and the challenges that are derived from randomness."""

import itertools
from typing import Any

import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from protocol.rollout import challenge
from tests.support.builders.samples import MINER, RUN_ID, TRAINER, digest, schedule

RANDOMNESS = digest("randomness")


@given(st.integers(0, (1 << 33) - 1), st.integers(0, 9))
def test_a_round_belongs_to_the_window_that_it_opened(window: int, offset: int) -> None:
    assert schedule().window_at(schedule().opening(window) + offset) == window


def test_the_rounds_of_a_window() -> None:
    plan = schedule()
    assert [moment(3) for moment in (plan.opening, plan.deadline, plan.audit, plan.seal, plan.verdict)] == [
        *(130, 136, 138, 150, 160)
    ]
    assert plan.window_at(99) == -1
    assert plan.window_at(100) == 0


@pytest.mark.parametrize(
    "changes",
    [
        {"commit_rounds": 8},
        {"audit_rounds": 6},
        {"audit_rounds": 11},
        {"verdict_rounds": 20},
        {"seal_rounds": 8},
        {"rounds": 2},
        {"lead": 0},
        {"max_lag": -1},
        {"first_round": 0},
        {"rounds": 10.0},
        {"rounds": True},
    ],
)
def test_invalid_schedules(changes: dict[str, int]) -> None:
    with pytest.raises(ValidationError):
        schedule(**changes)


def test_a_seed_follows_its_definition() -> None:
    parts = (RUN_ID, (5).to_bytes(8, "little"), RANDOMNESS, MINER.public, (2).to_bytes(8, "little"))
    message = b"".join(len(part).to_bytes(4, "little") + part for part in parts)
    assert (
        challenge.group_seed(RUN_ID, 5, RANDOMNESS, MINER.public, 2)
        == blake3(message, derive_key_context="grailnode/1 group").digest()
    )


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


def test_a_longer_stream_begins_with_the_shorter_one() -> None:
    assert challenge.stream(RANDOMNESS, "topk", 100)[:10] == challenge.stream(RANDOMNESS, "topk", 10)


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


def test_an_audit_depends_on_every_input() -> None:
    base: dict[str, Any] = {"run": RUN_ID, "window": 1, "randomness": RANDOMNESS, "miner": MINER.public}
    changes: list[dict[str, Any]] = [
        {},
        {"run": digest("x")},
        {"window": 2},
        {"randomness": digest("y")},
        {"miner": TRAINER.public},
    ]
    picks = {challenge.audit_indices(**(base | change), groups=1000, share_ppm=20_000) for change in changes}
    assert len(picks) == len(changes)
