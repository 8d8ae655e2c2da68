"""Verdicts that count once, and the arithmetic of scores."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from protocol.run import ScoringSpec
from protocol.verdict import Evaluation, Reason, Verdict, shares, tally, unpack_logprobs
from tests.protocol import samples
from tests.protocol.samples import judgement, rejected, verdict

SCORING = ScoringSpec(exponent=2.0, penalty=10.0, windows=100)
COUNT = st.integers(0, 4096)


def test_accepted_is_the_absence_of_a_reason() -> None:
    assert judgement().accepted
    assert not any(rejected(reason=reason.value).accepted for reason in Reason)


@pytest.mark.parametrize(
    "changes",
    [
        {"reason": "because"},
        {"reason": "wrong-sketch"},  # with rewards and log-probabilities
        {"reason": "wrong-sketch", "rewards": ()},
        {"logprobs": bytes(16)},
        {"tokens": 6},
        {"sketch_misses": 6},
        {"margin_misses": -1},
        {"surprise": float("nan")},
        {"worst_margin": float("inf")},
        {"rewards": (2e6,)},
        {"index": 1 << 20},
    ],
)
def test_a_judgement_that_cannot_be(changes: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        judgement(**changes)


@pytest.mark.parametrize("indices", [(0, 0), (1, 0), (3, 16), (16,)])
def test_a_group_is_judged_once_and_was_submitted(indices: tuple[int, ...]) -> None:
    """A validator that names a group twice would be a quorum of two."""
    with pytest.raises(ValidationError):
        verdict(*map(judgement, indices))


def test_more_solved_than_there_were() -> None:
    with pytest.raises(ValidationError):
        Evaluation(version=1, problems=3, solved=4)


@pytest.mark.parametrize("alarm", ["two\nlines", "\x1b[2J", "a" * 501, "\u202e"])
def test_an_alarm_is_one_plain_line(alarm: str) -> None:
    summary = next(record for record in samples.every_record() if record.kind == "summary")
    with pytest.raises(ValidationError):
        type(summary)(**(summary.model_dump() | {"alarms": (alarm,)}))


def test_tally() -> None:
    other = samples.TRAINER.public
    verdicts: list[Verdict] = [
        verdict(judgement(0), judgement(1), rejected(2)),
        verdict(judgement(0), window=8),
        verdict(rejected(0), miner=other),
        verdict(miner=other, window=8),
    ]
    assert tally(verdicts) == {samples.MINER.public: (3, 1), other: (0, 1)}
    assert tally([]) == {}


def test_log_probabilities_are_cut_by_rollout() -> None:
    data = np.arange(5, dtype="<f4").tobytes()
    assert [part.tolist() for part in unpack_logprobs(data, [2, 0, 3])] == [[0, 1], [], [2, 3, 4]]
    assert unpack_logprobs(b"", []) == []
    with pytest.raises(ValueError, match="as many"):
        unpack_logprobs(data, [2, 2])


@given(st.dictionaries(st.binary(min_size=1, max_size=2), st.tuples(COUNT, COUNT), max_size=6))
def test_shares_sum_to_one_or_to_nothing(counts: dict[bytes, tuple[int, int]]) -> None:
    found = shares(counts, SCORING)
    assert found.keys() == counts.keys()
    assert all(0.0 <= share <= 1.0 for share in found.values())
    assert sum(found.values()) == pytest.approx(1.0 if any(a > 10 * r for a, r in counts.values()) else 0.0)


@given(COUNT, COUNT, COUNT, st.floats(1.0, 8.0))
def test_splitting_honest_work_over_two_keys_never_earns_more(
    first: int, second: int, others: int, exponent: float
) -> None:
    scoring = ScoringSpec(exponent=exponent, penalty=10.0, windows=100)
    whole = shares({b"a": (first + second, 0), b"o": (others, 0)}, scoring)[b"a"]
    split = shares({b"a": (first, 0), b"b": (second, 0), b"o": (others, 0)}, scoring)
    assert split[b"a"] + split[b"b"] <= whole * (1 + 1e-9) + 1e-12


@given(st.integers(1, 4096), st.integers(0, 100), st.integers(1, 4096))
def test_a_rejection_never_pays(accepted: int, rejections: int, others: int) -> None:
    def share(rejected: int) -> float:
        return shares({b"a": (accepted, rejected), b"o": (others, 0)}, SCORING)[b"a"]

    assert share(rejections + 1) <= share(rejections)
    if accepted <= 10 * rejections:
        assert share(rejections) == 0.0


def test_by_hand() -> None:
    found = shares({b"a": (30, 0), b"b": (40, 3), b"c": (5, 1)}, SCORING)
    assert found == {b"a": 0.9, b"b": 0.1, b"c": 0.0}
