"""Verified groups: whose values count where validators' judgements differ, and that their fields agree."""

import numpy as np
import pytest

from protocol.errors import MalformedError
from protocol.judging.verdict import Judgement
from protocol.rollout.batch import pack_tokens
from roles.trainer.verified_batch import VerifiedGroup, verified_group
from tests.support.builders import samples

GROUP = samples.group()  # claims 0.5 and 1.0
LOGPROBS = np.full(5, -0.5, dtype="<f4").tobytes()


def accepting(*rewards: float) -> Judgement:
    return samples.judgement(rewards=rewards, logprobs=LOGPROBS)


def test_a_judgement_with_other_rewards_does_not_count_if_rewards_are_exact() -> None:
    assert verified_group(GROUP, samples.digest("frame"), (accepting(0.5, 0.9),), exact=True) is None
    group = verified_group(GROUP, samples.digest("frame"), (accepting(0.5, 0.9), accepting(0.5, 1.0)), exact=True)
    assert group is not None
    assert group.rewards == (0.5, 1.0)


def test_the_median_of_the_validators_rewards_counts_if_rewards_are_not_exact() -> None:
    judgements = (accepting(0.1, 0.9), accepting(0.2, 0.8), accepting(0.2, 1.0))
    group = verified_group(GROUP, samples.digest("frame"), judgements, exact=False)
    assert group is not None
    assert group.rewards == (0.2, 0.9)


VERIFIED_GROUP = VerifiedGroup(
    digest=samples.digest("frame"),
    version=3,
    prompt=pack_tokens((5, 6)),
    completions=(pack_tokens((7, 1)), pack_tokens((8, 9, 1))),
    logprobs=np.arange(-5, 0, dtype="<f4").tobytes(),
    rewards=(0.5, 1.0),
)


def test_tokens_and_log_probabilities_of_each_completion() -> None:
    assert VERIFIED_GROUP.prompt_tokens == (5, 6)
    assert VERIFIED_GROUP.completion_tokens == ((7, 1), (8, 9, 1))
    assert [logprobs.tolist() for logprobs in VERIFIED_GROUP.completion_logprobs] == [[-5.0, -4.0], [-3.0, -2.0, -1.0]]
    assert VerifiedGroup.from_bytes(VERIFIED_GROUP.to_bytes()) == VERIFIED_GROUP


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"rewards": (1.0,)}, "one reward for each completion"),
        ({"rewards": (), "completions": (), "logprobs": b""}, "one reward for each completion"),
        ({"prompt": b"12345"}, "whole 32-bit words"),
        ({"logprobs": b"1234"}, "one log-probability for each token"),
    ],
)
def test_fields_that_contradict_each_other_are_refused(changes: dict[str, object], error: str) -> None:
    data = VERIFIED_GROUP.model_copy(update=changes).to_bytes()
    with pytest.raises(MalformedError, match=error):
        VerifiedGroup.from_bytes(data)
