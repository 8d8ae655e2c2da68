"""A validator that lies about log-probabilities only: the learner must not learn its ratios."""

import numpy as np
import pytest

from protocol.judging.verdict import Verdict
from roles.trainer.collect.quorum import LOGPROBS_DISAGREE, Decision, decide
from tests.support.builders.samples import VALIDATOR, judgement, verdict

PAYING = {VALIDATOR.public}
TRUE = np.linspace(-3.0, -0.1, 5, dtype=np.float32)
HALF = TRUE - np.float32(np.log(2.0))  # every token half as likely: its ratio in the loss would double


def tolerance(one: str, other: str) -> float:
    return 0.01


def verdicts(*logprobs: np.ndarray) -> list[Verdict]:
    """Return verdicts that accept group 0 with these log-probabilities."""
    return [verdict(judgement(0, logprobs=values.astype("<f4").tobytes())) for values in logprobs]


def decision(*logprobs: np.ndarray, quorum: int = 2, outstanding: int = 0) -> Decision:
    awaited = {bytes([number]) * 32 for number in range(outstanding)}
    (result,) = decide(verdicts(*logprobs), quorum, awaited, tolerance, PAYING, lambda group: PAYING | awaited)
    return result


def noisy(scale: float = 0.005) -> np.ndarray:
    return TRUE + scale * np.array([1, -1, 1, -1, 1], dtype=np.float32)


def test_of_two_validators_that_say_different_things_neither_counts() -> None:
    refused = decision(TRUE, HALF)
    assert refused.reason == LOGPROBS_DISAGREE
    assert len(refused.dissenting) == 1


def test_a_liar_among_three_is_left_out_and_named() -> None:
    for order in ((HALF, TRUE, noisy()), (TRUE, HALF, noisy()), (TRUE, noisy(), HALF)):
        accepted = decision(*order)
        assert not accepted.reason
        assert not accepted.pending
        assert [np.frombuffer(item.logprobs, "<f4")[0] for item in accepted.dissenting] == [HALF[0]]
        assert len(accepted.accepting) == 2


def test_a_third_validator_is_awaited_when_two_disagree() -> None:
    assert decision(TRUE, HALF, outstanding=1).pending


def test_two_quorums_that_contradict_each_other_are_refused() -> None:
    assert decision(TRUE, noisy(), HALF, HALF).reason == LOGPROBS_DISAGREE


def test_honest_noise_is_no_disagreement() -> None:
    accepted = decision(TRUE, noisy(), noisy(-0.004))
    assert not accepted.reason
    assert len(accepted.accepting) == 3


def test_those_that_count_agree_with_each_other_and_not_only_with_one_between_them() -> None:
    accepted = decision(TRUE, noisy(0.009), noisy(-0.009))
    assert len(accepted.accepting) == 2
    assert len(accepted.dissenting) == 1
    assert decision(TRUE, noisy(0.009), noisy(-0.009), quorum=3).reason == LOGPROBS_DISAGREE


def test_equal_values_of_many_validators_are_compared_once() -> None:
    honest = [TRUE] * 600 + [noisy()] * 424
    accepted = decision(*honest, HALF, quorum=600)
    assert len(accepted.accepting) == 1024
    assert [np.frombuffer(item.logprobs, "<f4")[0] for item in accepted.dissenting] == [HALF[0]]


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 0.5])
def test_values_that_are_no_log_probabilities_agree_with_nobody(value: float) -> None:
    bad = TRUE.copy()
    bad[2] = value
    assert decision(TRUE, bad).reason == LOGPROBS_DISAGREE
    assert decision(bad, bad, quorum=1).reason == LOGPROBS_DISAGREE


def test_a_verdict_on_another_number_of_tokens_agrees_with_nobody() -> None:
    other = verdict(judgement(0, tokens=2, logprobs=TRUE[:2].tobytes(), positions=2))
    (refused,) = decide([*verdicts(TRUE), other], 2, set(), tolerance, PAYING, lambda group: PAYING)
    assert refused.reason == LOGPROBS_DISAGREE
