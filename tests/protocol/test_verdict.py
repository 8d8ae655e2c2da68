"""Verdicts: valid judgements, and the joint rejection of a window's groups."""

from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from protocol.judging.verdict import Judgement, Reason, joint_rejection, unpack_logprobs
from tests.support.builders.samples import judgement, rejected, thresholds, verdict

PROOF = thresholds()  # rates 1e-3, level 1e-9


def test_a_judgement_without_a_reason_accepts() -> None:
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
        {"surprisal": float("nan")},
        {"worst_margin": float("inf")},
        {"rewards": (2e6,)},
        {"index": 1 << 20},
    ],
)
def test_invalid_judgements(changes: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        judgement(**changes)


@pytest.mark.parametrize("indices", [(0, 0), (1, 0), (3, 16), (16,)])
def test_a_verdict_judges_submitted_groups_once(indices: tuple[int, ...]) -> None:
    """Two judgements on one group would count as those of two validators."""
    with pytest.raises(ValidationError):
        verdict(*map(judgement, indices))


def test_log_probabilities_are_split_by_rollout() -> None:
    data = np.arange(5, dtype="<f4").tobytes()
    assert [part.tolist() for part in unpack_logprobs(data, [2, 0, 3])] == [[0, 1], [], [2, 3, 4]]
    assert unpack_logprobs(b"", []) == []
    with pytest.raises(ValueError, match="20 bytes of log-probabilities for 4 tokens"):
        unpack_logprobs(data, [2, 2])


@pytest.mark.parametrize(
    ("rejection", "reason"),
    [
        (rejected(1), Reason.WINDOW),  # a group that passes by chance is rejected with those of another policy
        (rejected(1, sketch_misses=1), None),  # its median is too large, but honest work may have as many misses
        (rejected(1, "wrong-reward", sketch_misses=0, sketch_median=0.0), None),
        (rejected(1, "wrong-prompt", positions=0, sketch_misses=0, sketch_median=0.0), None),
    ],
)
def test_a_rejected_group_counts_if_its_statistics_were_computed(rejection: Judgement, reason: Reason | None) -> None:
    assert joint_rejection([judgement(0), rejection], [], PROOF) == reason
    assert joint_rejection([rejection], [], PROOF) is None  # there is no accepted group


def test_groups_without_statistics_do_not_dilute_the_others() -> None:
    groups = [judgement(0, sketch_misses=2), judgement(1, sketch_misses=2)]
    unchecked = [rejected(2, "bad-tokens", tokens=10**6, positions=0, sketch_misses=0)]
    assert joint_rejection(groups, [], PROOF) == joint_rejection([*groups, *unchecked], [], PROOF) == Reason.WINDOW
