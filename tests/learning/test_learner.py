"""A training step: how it changes the policy, what it reports, and that it is reproducible."""

import dataclasses
import random
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from grailnode.engine.models import build
from protocol.rollout.batch import pack_tokens
from protocol.rollout.filters import Filters
from protocol.rollout.sampling import SamplingParams, log_probabilities
from roles.policy.causal_model import CausalModel
from roles.policy.sequences import split, split_for_training, split_packed, to_batch
from roles.trainer.learn.learner import Learner, LearnerSettings
from roles.trainer.learn.loss.loss_settings import LOSSES, CorrectionName, LossName, LossSettings
from roles.trainer.learn.loss.policy_loss import advantages, policy_loss
from roles.trainer.learn.loss.surrogates import Tokens
from roles.trainer.learn.training_settings import OptimizerSettings
from roles.trainer.verified_batch import VerifiedGroup
from tests.support.builders.policies import random_weights, write_policy
from tests.support.measuring.wrapped_model import WrappedModel
from tests.support.processes.ranks import group

TEMPERATURE = 0.7
SAMPLING = SamplingParams(TEMPERATURE, max_tokens=2048, stops=())
SHORT = dataclasses.replace(SAMPLING, max_tokens=4)
SETTINGS = LearnerSettings(SAMPLING, optimizer=OptimizerSettings(learning_rate=1e-3, warmup_steps=0))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> CausalModel:
    directory: Path = tmp_path_factory.mktemp("policy")
    return build(write_policy(directory))


def new_learner(model: CausalModel, **settings: Any) -> Learner:
    """Return a learner of random weights, with other values of SETTINGS."""
    return Learner(model, random_weights(model), dataclasses.replace(SETTINGS, **settings))


def _log_probs(model: CausalModel, weights: dict[str, torch.Tensor], one: VerifiedGroup) -> list[torch.Tensor]:
    """Compute each rollout's log-probabilities, one sequence at a time."""
    wide = {name: tensor.to(torch.float32) for name, tensor in weights.items()}
    result = []
    for completion in one.completion_tokens:
        batch = to_batch([one.prompt_tokens], [completion])
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
    learner, groups = new_learner(model), _groups(model)
    for _ in range(5):
        learner.step(groups)
    for one in groups:
        for reward, before, after in zip(
            one.rewards, one.completion_logprobs, _log_probs(model, learner.view(), one), strict=True
        ):
            assert (float(after.sum()) > float(before.sum())) == (reward == 1.0)


def test_report_on_fresh_rollouts(model: CausalModel) -> None:
    """The importance ratio is 1 for every token, so the loss is the mean over tokens of -A."""
    groups = _groups(model)
    report = new_learner(model).step(groups)
    expected = [
        -float(score)
        for one in groups
        for score, completion in zip(advantages(torch.tensor(one.rewards)), one.completion_tokens, strict=True)
        for _ in completion
    ]
    assert report.loss == pytest.approx(sum(expected) / len(expected), abs=1e-5)
    assert report.tokens == len(expected) == 14
    assert report.reward == pytest.approx(2 / 5)
    assert report.clipped == 0.0
    assert report.entropy > 0.0
    assert report.step == 1


def _as_episodes(one: VerifiedGroup, reply: tuple[int, ...]) -> VerifiedGroup:
    """Return the group with a reply behind the first token of each completion."""
    turns = tuple(((1, pack_tokens(reply)), (len(tokens) - 1, b"")) for tokens in one.completion_tokens)
    return one.model_copy(update={"turns": turns})


def test_an_episode_is_rewarded_at_its_last_turn() -> None:
    one = group("a", completions=((3, 4, 1), (4, 9, 9, 1)), rewards=(1.0, 0.5))
    assert one.turn_rewards == [(1.0,), (0.5,)]
    assert _as_episodes(one, (13,)).turn_rewards == [(0.0, 1.0), (0.0, 0.5)]


def _gradients(learner: Learner, groups: list[VerifiedGroup]) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in learner.gradients(groups).tensors.items()}


def test_replies_are_read_and_not_learned(model: CausalModel) -> None:
    """The policy's tokens alone have a part in the loss; that of the whole sequence is masked by hand here."""
    reply = (13, 12, 11)
    one = _as_episodes(group("a", completions=((3, 4, 1), (4, 9, 9, 1)), rewards=(1.0, 0.0)), reply)
    learner = new_learner(model)
    report = learner.gradients([one]).figures
    assert report.tokens == 7
    weights = {name: tensor.to(torch.float32).requires_grad_() for name, tensor in random_weights(model).items()}
    loss = torch.zeros(())
    for completion, behaviour, advantage in zip(
        one.completion_tokens, one.completion_logprobs, advantages(torch.tensor(one.rewards)), strict=True
    ):
        sequence = (completion[0], *reply, *completion[1:])
        batch = to_batch([one.prompt_tokens], [sequence])
        logits = model.logits(weights, model.hidden(weights, batch.ids, batch.mask)[batch.rows, batch.columns])
        log_probs = log_probabilities(logits, batch.targets, TEMPERATURE)
        drawn = [place for place in range(len(sequence)) if not 1 <= place <= len(reply)]
        settings = learner._settings.loss
        place = torch.zeros(len(drawn), dtype=torch.int64)
        own = log_probs[drawn]
        zeros = torch.zeros(len(drawn))
        tokens = Tokens(
            own, torch.from_numpy(behaviour.copy()), own.detach(), advantage.expand(len(drawn)), place, zeros
        )
        loss = loss + policy_loss(tokens, torch.full((len(drawn),), 1 / 7), settings).value
    loss.backward()  # type: ignore[no-untyped-call]
    true_gradients = _gradients(new_learner(model), [one])
    for name, gradient in true_gradients.items():
        torch.testing.assert_close(gradient, weights[name].grad, rtol=1e-3, atol=1e-6)
    plain = _gradients(new_learner(model), [one.model_copy(update={"turns": ()})])
    other = _gradients(new_learner(model), [_as_episodes(one, (2, 2))])
    for gradients in (plain, other):
        assert not all(torch.equal(gradient, true_gradients[name]) for name, gradient in gradients.items())


def test_an_episode_without_replies_is_learned_as_a_completion(model: CausalModel) -> None:
    (first, _) = _groups(model)
    plain, episodes = (_gradients(new_learner(model), [one]) for one in (first, _as_episodes(first, ())))
    assert all(torch.equal(plain[name], episodes[name]) for name in plain)


def test_a_ratio_above_the_truncation_setting_gives_no_gradient(model: CausalModel) -> None:
    """The behaviour log-probabilities are far too low, so every ratio is truncated."""
    groups = [
        _with_logprobs(one, [torch.from_numpy(logprobs - 5.0) for logprobs in one.completion_logprobs])
        for one in _groups(model)
    ]
    report = new_learner(model, loss=LossSettings(truncation=2.0)).step(groups)
    assert report.clipped == 1.0
    assert report.grad_norm == 0.0


def _extended(name: LossName) -> LossSettings:
    """Return a loss with a divergence, an entropy and, if it has a ratio for each token, a correction."""
    correction: CorrectionName = "none" if name == "gspo" else "truncated"
    return LossSettings(loss=name, kl_coefficient=0.01, entropy_coefficient=0.01, correction=correction)


RL_LOSSES = [name for name in LOSSES if name != "distillation"]
EVERY_LOSS = [LossSettings(), *(_extended(name) for name in RL_LOSSES)]


@pytest.mark.parametrize("loss", EVERY_LOSS, ids=str)
def test_the_gradient_of_a_loss_does_not_depend_on_the_size_of_a_pass(model: CausalModel, loss: LossSettings) -> None:
    norms = []
    for max_batch_tokens in (1, 12, 8192):
        learner = new_learner(model, max_batch_tokens=max_batch_tokens, loss=loss, sampling=SHORT)
        norms.append(learner.step(_groups(model)).grad_norm)
    assert norms == pytest.approx([norms[0]] * 3, rel=1e-4)


def _sizes(lengths: list[int], batches: list[list[int]]) -> list[int]:
    """Return the tokens of each batch, pads included."""
    return [len(batch) * max(lengths[index] for index in batch) for batch in batches]


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("longest", [90, 500, 4000])
def test_passes_have_few_pads_and_ranks_have_as_much_to_compute(ranks: int, longest: int) -> None:
    draw = random.Random(longest)
    lengths = [draw.randint(60, longest) for _ in range(64)]
    batches = split_for_training(lengths, 8192, ranks)
    assert sorted(index for batch in batches for index in batch) == list(range(64))
    sizes = _sizes(lengths, batches)
    assert sizes == sorted(sizes)
    assert sizes[-1] <= 8192
    slowest = sum(sizes[min(begin + ranks, len(sizes)) - 1] for begin in range(0, len(sizes), ranks))
    assert slowest < 1.25 * sum(lengths) / ranks


def test_few_short_sequences_share_a_pass_and_a_long_one_is_alone() -> None:
    assert split_for_training([5, 7, 6], 8192) == split([5, 7, 6], 8192) == [[0, 2, 1]]
    assert split_for_training([5, 9000, 7, 6], 8192) == [[0, 3, 2], [1]]
    assert split_for_training([5, 7, 6], 1, ranks=2) == [[0], [2], [1]]
    assert split_for_training([], 8192) == []


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("longest", [90, 500, 4000, 9000])
def test_packed_rows_are_about_as_long_on_all_ranks(ranks: int, longest: int) -> None:
    draw = random.Random(longest)
    lengths = [draw.randint(60, longest) for _ in range(64)]
    rows = split_packed(lengths, 8192, ranks)
    assert sorted(index for row in rows for index in row) == list(range(64))
    sizes = [sum(lengths[index] for index in row) for row in rows]
    assert sizes == sorted(sizes)
    assert sizes[-1] <= max(8192, *lengths)
    assert len(rows) % ranks == 0
    slowest = sum(sizes[ranks - 1 :: ranks])
    assert slowest < 1.1 * sum(lengths) / ranks


def test_few_sequences_are_packed_for_as_many_ranks_as_there_are() -> None:
    assert split_packed([5, 7, 6], 8192) == [[1, 2, 0]]
    assert split_packed([5, 7, 6], 8192, ranks=2) == [[1], [2, 0]]
    assert split_packed([5, 7, 6], 1, ranks=4) == [[0], [2], [1]]


class WidthRecorder(WrappedModel):
    """A model that records for how many tokens at once the logits are computed."""

    def __init__(self, model: CausalModel) -> None:
        super().__init__(model)
        self.widths: list[int] = []

    def logits(self, weights: Mapping[str, torch.Tensor], hidden: torch.Tensor) -> torch.Tensor:
        self.widths.append(len(hidden))
        return self._model.logits(weights, hidden)


@pytest.mark.parametrize("name", RL_LOSSES)
@pytest.mark.parametrize("filters", [Filters(), Filters(top_p=0.9)], ids=["all", "top-p"])
def test_chunks_of_logits_give_the_same_step(model: CausalModel, name: LossName, filters: Filters) -> None:
    loss, groups, results = _extended(name), _groups(model), []
    for chunk in (3, 8192):
        recorder = WidthRecorder(model)
        learner = new_learner(
            recorder, loss=loss, sampling=dataclasses.replace(SHORT, filters=filters), logits_chunk=chunk
        )
        report = learner.step(groups)
        first_moments = {k: v for k, v in learner.state().items() if k.startswith("exp_avg/")}
        results.append((report, first_moments))
        assert max(recorder.widths) == min(chunk, 14)
    (one, gradients), (other, plain_gradients) = results
    assert one.grad_norm == pytest.approx(other.grad_norm, rel=1e-5)
    assert one.entropy == pytest.approx(other.entropy, rel=1e-5)
    assert one.loss == pytest.approx(other.loss, abs=1e-5)
    for key, gradient in gradients.items():
        torch.testing.assert_close(gradient, plain_gradients[key], rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("family", ["qwen3", "qwen2"])
def test_recomputed_layers_give_the_same_bits(tmp_path: Path, family: str) -> None:
    """The one family is computed by this repository's model, the other by transformers."""
    architecture = {"qwen3": "Qwen3ForCausalLM", "qwen2": "Qwen2ForCausalLM"}[family]
    policy = write_policy(tmp_path, model_type=family, architectures=[architecture])
    views = []
    for recompute in (False, True):
        model = build(policy, recompute=recompute)
        learner = new_learner(model)
        learner.step(_groups(model))
        views.append(learner.state())
    assert views[0].keys() == views[1].keys()
    assert all(torch.equal(tensor, views[1][name]) for name, tensor in views[0].items())


@pytest.mark.parametrize("name", RL_LOSSES)
@pytest.mark.parametrize("family", ["qwen3", "qwen2"])
def test_packed_rollouts_give_the_same_step(tmp_path: Path, family: str, name: LossName) -> None:
    """With passes of one row of at most 16 tokens, and with five padded rows."""
    architecture = {"qwen3": "Qwen3ForCausalLM", "qwen2": "Qwen2ForCausalLM"}[family]
    model = build(write_policy(tmp_path, model_type=family, architectures=[architecture]), recompute=True)
    padded, packed = (
        new_learner(model, loss=_extended(name), sampling=SHORT, **settings).gradients(_groups(model))
        for settings in ({}, {"packing": True, "max_batch_tokens": 16})
    )
    assert packed.figures.loss == pytest.approx(padded.figures.loss, abs=1e-5)
    for key, gradient in packed.tensors.items():
        torch.testing.assert_close(gradient, padded.tensors[key], rtol=1e-3, atol=1e-6)


def test_an_entropy_coefficient_holds_the_entropy_up(model: CausalModel) -> None:
    groups, last = _groups(model), []
    for coefficient in (0.0, 1.0):
        learner = new_learner(model, loss=LossSettings(entropy_coefficient=coefficient))
        last.append([learner.step(groups).entropy for _ in range(5)][-1])
    assert last[1] > last[0]


def test_distillation_comes_near_its_teacher(model: CausalModel) -> None:
    teacher = {name: tensor * 1.5 for name, tensor in random_weights(model).items()}
    loss = LossSettings(loss="distillation", reference=Path("teacher"))
    learner = new_learner(model, loss=loss, read_reference=lambda: teacher)
    divergences = []
    for _ in range(6):
        view = learner.view()
        fresh = [_with_logprobs(one, _log_probs(model, view, one)) for one in _groups(model)]
        divergences.append(learner.step(fresh).divergence)
    assert divergences[-1] < divergences[0]


def test_a_supervised_step_raises_what_was_rewarded_alone(model: CausalModel) -> None:
    (one, _) = _groups(model)
    learner = new_learner(model, loss=LossSettings(loss="supervised"))
    gradients = learner.gradients([one])
    assert gradients.figures.loss == pytest.approx(-float(one.completion_logprobs[0].sum()) / 9, rel=1e-4)


def test_the_divergence_grows_from_zero_and_is_held_back_by_its_coefficient(model: CausalModel) -> None:
    groups, last = _groups(model), []
    for coefficient in (1e-6, 10.0):
        learner = new_learner(model, loss=LossSettings(kl_coefficient=coefficient))
        reports = [learner.step(groups) for _ in range(5)]
        assert reports[0].divergence == pytest.approx(0.0, abs=1e-6)
        last.append(reports[-1].divergence)
    assert last[0] > last[1] > 0.0


def test_overlong_completions_leave_the_step_and_keep_their_part_in_the_advantages(model: CausalModel) -> None:
    """The third completion has 4 tokens without the end 1, which the second has: the step is that of the other two."""
    one = _fresh(model, group("a", completions=((3, 1), (4, 8, 8, 1), (9, 9, 9, 9)), rewards=(1.0, 0.0, 0.0)))
    sampling = dataclasses.replace(SHORT, stops=(1,))
    report = new_learner(model, loss=LossSettings(overlong_filtering=True), sampling=sampling).step([one])
    assert report.overlong == pytest.approx(1 / 3)
    assert report.tokens == 6
    scores = advantages(torch.tensor(one.rewards)).tolist()
    assert report.loss == pytest.approx(-(2 * scores[0] + 4 * scores[1]) / 6, abs=1e-5)
    assert new_learner(model).step([one]).overlong == 0.0


def test_a_rollout_without_tokens_keeps_its_part_in_the_advantages(model: CausalModel) -> None:
    (one,) = [_fresh(model, group("a", completions=((3, 1), (), (9, 9)), rewards=(1.0, 1.0, 0.0)))]
    report = new_learner(model).step([one])
    scores = advantages(torch.tensor(one.rewards)).tolist()
    assert report.tokens == 4
    assert report.reward == pytest.approx(2 / 3)
    assert report.loss == pytest.approx(-(2 * scores[0] + 2 * scores[2]) / 4, abs=1e-5)


def test_the_ratio_is_that_of_the_filtered_distribution(model: CausalModel) -> None:
    """With top_k=1 only the most probable token and the sampled one count, so the ratio differs from 1."""
    groups = _groups(model)
    report = new_learner(model, sampling=dataclasses.replace(SAMPLING, filters=Filters(top_k=1))).step(groups)
    unfiltered = new_learner(model).step(groups)
    assert report.clipped > unfiltered.clipped == 0.0


def test_the_first_view_is_the_initial_weights(model: CausalModel) -> None:
    weights = random_weights(model)
    view = Learner(model, weights, SETTINGS).view()
    assert view.keys() == weights.keys()
    for name, tensor in view.items():
        assert tensor.is_contiguous()
        assert torch.equal(tensor.view(torch.int16), weights[name].view(torch.int16))


def test_a_step_without_tokens_is_refused(model: CausalModel) -> None:
    with pytest.raises(ValueError, match="no tokens"):
        new_learner(model).step([])
