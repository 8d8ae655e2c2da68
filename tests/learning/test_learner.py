"""A training step: how it changes the policy, what it reports, and that it is reproducible."""

import dataclasses
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch

from grailnode.engine.causal_model import CausalModel, build
from protocol.rollout.filters import Filters
from protocol.rollout.sampling import log_probabilities
from roles.policy.sequences import pad
from roles.trainer.learn.learner import Learner, LearnerSettings
from roles.trainer.learn.loss import LossSettings, advantages
from roles.trainer.learn.optimizer import AdamWSettings
from roles.trainer.verified_batch import VerifiedGroup
from tests.learning.groups import group
from tests.support.builders.policies import random_weights, write_policy

TEMPERATURE = 0.7
SETTINGS = LearnerSettings(temperature=TEMPERATURE, optimizer=AdamWSettings(learning_rate=1e-3))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> CausalModel:
    """Return the model of a small policy."""
    directory: Path = tmp_path_factory.mktemp("policy")
    return build(write_policy(directory))


def _log_probs(model: CausalModel, weights: dict[str, torch.Tensor], one: VerifiedGroup) -> list[torch.Tensor]:
    """Compute each rollout's log-probabilities, one sequence at a time."""
    wide = {name: tensor.to(torch.float32) for name, tensor in weights.items()}
    result = []
    for completion in one.completion_tokens:
        batch = pad([one.prompt_tokens], [completion])
        logits = model.logits(wide, model.hidden(wide, batch.ids, batch.mask)[batch.rows, batch.columns])
        result.append(log_probabilities(logits, batch.targets, TEMPERATURE))
    return result


def _with_logprobs(one: VerifiedGroup, logprobs: Iterable[torch.Tensor]) -> VerifiedGroup:
    """Return the group with other log-probabilities, float32 [T] for each rollout."""
    return one.model_copy(update={"logprobs": torch.cat(list(logprobs)).detach().numpy().tobytes()})


def _fresh(model: CausalModel, one: VerifiedGroup) -> VerifiedGroup:
    """Return the group with its log-probabilities under the initial policy."""
    return _with_logprobs(one, _log_probs(model, random_weights(model), one))


def _groups(model: CausalModel) -> list[VerifiedGroup]:
    first = group("a", completions=((3, 4, 1), (4, 1), (9, 9, 9, 1)), rewards=(1.0, 0.0, 0.0))
    second = group("b", prompt=(6, 8, 9, 10, 11), completions=((7, 1), (12, 13, 1)), rewards=(0.0, 1.0))
    return [_fresh(model, first), _fresh(model, second)]


def test_good_rollouts_become_more_probable(model: CausalModel) -> None:
    learner, groups = Learner(model, random_weights(model), SETTINGS), _groups(model)
    for _ in range(5):
        learner.step(groups)
    for one in groups:
        for reward, before, after in zip(
            one.rewards, one.completion_logprobs, _log_probs(model, learner.bf16_view(), one), strict=True
        ):
            assert (float(after.sum()) > float(before.sum())) == (reward == 1.0)


def test_report_on_fresh_rollouts(model: CausalModel) -> None:
    """The importance ratio is 1 for every token, so the loss is the mean over tokens of -A."""
    groups = _groups(model)
    report = Learner(model, random_weights(model), SETTINGS).step(groups)
    expected = [
        -float(score)
        for one in groups
        for score, completion in zip(advantages(torch.tensor(one.rewards)), one.completion_tokens, strict=True)
        for _ in completion
    ]
    assert report.loss == pytest.approx(sum(expected) / len(expected), abs=1e-5)
    assert report.tokens == len(expected) == 14
    assert report.mean_reward == pytest.approx(2 / 5)
    assert report.clip_fraction == 0.0
    assert report.entropy > 0.0
    assert report.step == 1


def test_the_gradient_does_not_depend_on_the_size_of_a_pass(model: CausalModel) -> None:
    groups = _groups(model)
    norms = []
    for max_batch_tokens in (1, 12, 8192):
        settings = dataclasses.replace(SETTINGS, max_batch_tokens=max_batch_tokens)
        learner = Learner(model, random_weights(model), settings)
        norms.append(learner.step(groups).grad_norm)
    assert norms == pytest.approx([norms[0]] * 3, rel=1e-4)


def test_a_ratio_above_the_truncation_setting_gives_no_gradient(model: CausalModel) -> None:
    """The behaviour log-probabilities are far too low, so every ratio is truncated."""
    groups = [
        _with_logprobs(one, [torch.from_numpy(logprobs - 5.0) for logprobs in one.completion_logprobs])
        for one in _groups(model)
    ]
    settings = dataclasses.replace(SETTINGS, loss=LossSettings(truncation=2.0))
    report = Learner(model, random_weights(model), settings).step(groups)
    assert report.clip_fraction == 1.0
    assert report.grad_norm == 0.0


def test_the_ratio_is_that_of_the_filtered_distribution(model: CausalModel) -> None:
    """With top_k=1 only the most probable token and the sampled one count, so the ratio differs from 1."""
    groups = _groups(model)
    report = Learner(model, random_weights(model), dataclasses.replace(SETTINGS, filters=Filters(top_k=1))).step(groups)
    unfiltered = Learner(model, random_weights(model), SETTINGS).step(groups)
    assert report.clip_fraction > unfiltered.clip_fraction == 0.0


def test_a_restored_learner_continues_bit_for_bit(model: CausalModel) -> None:
    groups = _groups(model)
    one, other = (Learner(model, random_weights(model), SETTINGS) for _ in range(2))
    one.step(groups)
    other.restore(one.state())
    assert other.steps == 1
    assert one.step(groups) == other.step(groups)
    views = one.bf16_view(), other.bf16_view()
    assert all(torch.equal(tensor, views[1][name]) for name, tensor in views[0].items())


def test_the_first_view_is_the_initial_weights(model: CausalModel) -> None:
    weights = random_weights(model)
    view = Learner(model, weights, SETTINGS).bf16_view()
    assert view.keys() == weights.keys()
    for name, tensor in view.items():
        assert tensor.is_contiguous()
        assert torch.equal(tensor.view(torch.int16), weights[name].view(torch.int16))


def test_a_step_without_tokens_is_refused(model: CausalModel) -> None:
    with pytest.raises(ValueError, match="no tokens"):
        Learner(model, random_weights(model), SETTINGS).step([])
