"""One step of learning: what it moves, what it reports, and that it is repeatable."""

import dataclasses
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
from roles.trainer.learn.replay_buffer import TrainingGroup
from tests.learning.groups import group
from tests.support.builders.policies import random_weights, write_policy

TEMPERATURE = 0.7
SETTINGS = LearnerSettings(temperature=TEMPERATURE, optimizer=AdamWSettings(learning_rate=1e-3))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> CausalModel:
    """A small policy's model."""
    directory: Path = tmp_path_factory.mktemp("policy")
    return build(write_policy(directory))


def _log_probs(model: CausalModel, weights: dict[str, torch.Tensor], one: TrainingGroup) -> list[torch.Tensor]:
    """Each rollout's log-probabilities, one sequence at a time."""
    wide = {name: tensor.to(torch.float32) for name, tensor in weights.items()}
    result = []
    for completion in one.completions:
        batch = pad([one.prompt], [completion])
        logits = model.logits(wide, model.hidden(wide, batch.ids, batch.mask)[batch.rows, batch.columns])
        result.append(log_probabilities(logits, batch.targets, TEMPERATURE))
    return result


def _fresh(model: CausalModel, one: TrainingGroup) -> TrainingGroup:
    """The group with the log-probabilities that the starting policy gives it."""
    return dataclasses.replace(one, logprobs=tuple(_log_probs(model, random_weights(model), one)))


def _groups(model: CausalModel) -> list[TrainingGroup]:
    first = group("a", completions=((3, 4, 1), (4, 1), (9, 9, 9, 1)), rewards=(1.0, 0.0, 0.0))
    second = group("b", prompt=(6, 8, 9, 10, 11), completions=((7, 1), (12, 13, 1)), rewards=(0.0, 1.0))
    return [_fresh(model, first), _fresh(model, second)]


def test_good_rollouts_become_likelier(model: CausalModel) -> None:
    learner, groups = Learner(model, random_weights(model), SETTINGS), _groups(model)
    for _ in range(5):
        learner.step(groups)
    for one in groups:
        for reward, before, after in zip(
            one.rewards, one.logprobs, _log_probs(model, learner.bf16_view(), one), strict=True
        ):
            assert (after.sum() > before.sum()) == (reward == 1.0)


def test_report_on_fresh_rollouts(model: CausalModel) -> None:
    """The ratio is 1 everywhere, so the loss is the mean over tokens of -A."""
    groups = _groups(model)
    report = Learner(model, random_weights(model), SETTINGS).step(groups)
    expected = [
        -float(score)
        for one in groups
        for score, completion in zip(advantages(torch.tensor(one.rewards)), one.completions, strict=True)
        for _ in completion
    ]
    assert report.loss == pytest.approx(sum(expected) / len(expected), abs=1e-5)
    assert report.tokens == len(expected) == 14
    assert report.mean_reward == pytest.approx(2 / 5)
    assert report.clip_fraction == 0.0
    assert report.entropy > 0.0
    assert report.step == 1


def test_passes_of_any_size_give_one_gradient(model: CausalModel) -> None:
    groups = _groups(model)
    views = []
    for max_batch_tokens in (1, 12, 8192):
        settings = dataclasses.replace(SETTINGS, max_batch_tokens=max_batch_tokens)
        learner = Learner(model, random_weights(model), settings)
        norm = learner.step(groups).grad_norm
        views.append(norm)
    assert views == pytest.approx([views[0]] * 3, rel=1e-4)


def test_the_loss_settings_are_the_run_s(model: CausalModel) -> None:
    """Behaviour log-probabilities far below: with a high clip the ratio counts, truncated."""
    groups = [dataclasses.replace(g, logprobs=tuple(p - 5.0 for p in g.logprobs)) for g in _groups(model)]
    settings = dataclasses.replace(SETTINGS, loss=LossSettings(truncation=2.0))
    report = Learner(model, random_weights(model), settings).step(groups)
    assert report.clip_fraction == 1.0
    assert report.grad_norm == 0.0


def test_filtered_away_is_not_compared(model: CausalModel) -> None:
    """With the most likely token alone allowed beside the chosen one, the ratio is taken in that smaller distribution."""
    groups = _groups(model)
    report = Learner(model, random_weights(model), dataclasses.replace(SETTINGS, filters=Filters(top_k=1))).step(groups)
    whole = Learner(model, random_weights(model), SETTINGS).step(groups)
    assert report.clip_fraction > whole.clip_fraction == 0.0


def test_a_restored_learner_goes_on_bit_for_bit(model: CausalModel) -> None:
    groups = _groups(model)
    one, other = (Learner(model, random_weights(model), SETTINGS) for _ in range(2))
    one.step(groups)
    other.restore(one.state())
    assert other.steps == 1
    assert one.step(groups) == other.step(groups)
    views = one.bf16_view(), other.bf16_view()
    assert all(torch.equal(tensor, views[1][name]) for name, tensor in views[0].items())


def test_the_view_starts_as_the_weights(model: CausalModel) -> None:
    weights = random_weights(model)
    view = Learner(model, weights, SETTINGS).bf16_view()
    assert view.keys() == weights.keys()
    for name, tensor in view.items():
        assert tensor.is_contiguous()
        assert torch.equal(tensor.view(torch.int16), weights[name].view(torch.int16))


def test_nothing_to_learn_from(model: CausalModel) -> None:
    with pytest.raises(ValueError, match="no tokens"):
        Learner(model, random_weights(model), SETTINGS).step([])
