"""Verdicts that count once."""

from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from protocol.judging.verdict import Judgement, Reason, joint_rejection, unpack_logprobs
from tests.support.builders.samples import judgement, rejected, run_manifest, verdict

PROOF = run_manifest().proof  # rates 1e-3, level 1e-9


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
        {"surprisal": float("nan")},
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


def test_log_probabilities_are_cut_by_rollout() -> None:
    data = np.arange(5, dtype="<f4").tobytes()
    assert [part.tolist() for part in unpack_logprobs(data, [2, 0, 3])] == [[0, 1], [], [2, 3, 4]]
    assert unpack_logprobs(b"", []) == []
    with pytest.raises(ValueError, match="20 bytes of log-probabilities for 4 tokens"):
        unpack_logprobs(data, [2, 2])


@pytest.mark.parametrize(
    ("refused", "reason"),
    [
        (rejected(1), Reason.WINDOW),  # a lucky group falls with what another policy made
        (rejected(1, sketch_misses=1), None),  # its median is too large; its misses are what honest work may show
        (rejected(1, "wrong-reward", sketch_misses=0, sketch_median=0.0), None),
        (rejected(1, "wrong-prompt", positions=0, sketch_misses=0, sketch_median=0.0), None),
    ],
)
def test_what_is_refused_by_itself_counts_where_its_statistics_were_reached(
    refused: Judgement, reason: Reason | None
) -> None:
    assert joint_rejection([judgement(0), refused], [], PROOF) == reason
    assert joint_rejection([refused], [], PROOF) is None  # nothing to take back


def test_groups_that_no_statistic_was_reached_of_dilute_nothing() -> None:
    found = [judgement(0, sketch_misses=2), judgement(1, sketch_misses=2)]
    unread = [rejected(2, "bad-tokens", tokens=10**6, positions=0, sketch_misses=0)]
    assert joint_rejection(found, [], PROOF) == joint_rejection([*found, *unread], [], PROOF) == Reason.WINDOW
