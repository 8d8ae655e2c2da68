"""Verdicts: valid judgements, and the joint rejection of a window's groups."""

import numpy as np
import pytest

from protocol.judging.evidence import NO_COUNTS, NO_EVIDENCE
from protocol.judging.verdict import Judgement, Reason, joint_rejection, own_rejection, unpack_logprobs
from roles.validator.audit import reject_accepted
from tests.support.builders.samples import counts, judgement, rejected, replay_thresholds, thresholds, unreproduced

ROW = thresholds()


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
    assert joint_rejection(judgements[:1], {"sketch": (0, 8_000_000, 0, 0)}, ROW) == Reason.WINDOW
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
