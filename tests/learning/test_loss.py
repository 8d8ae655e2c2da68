"""Losses against slow references (loops over float64 numbers) and values computed by hand."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from protocol.rollout.sampling import log_probabilities
from roles.trainer.learn.loss.loss_settings import LossName, LossSettings
from roles.trainer.learn.loss.policy_loss import (
    LOSSES,
    PolicyLoss,
    advantage_name,
    advantages,
    entropy,
    policy_loss,
    reference_divergence,
)
from roles.trainer.learn.loss.surrogates import token_ratio

CLIP = LossSettings()
MAX_TOKENS = 8


def _gradient(value: Tensor, log_probs: Tensor) -> Tensor:
    value.backward()  # type: ignore[no-untyped-call]
    assert log_probs.grad is not None
    return log_probs.grad


class TestAdvantages:
    """Equation 25."""

    def test_by_hand(self) -> None:
        # mean 1/4; deviations 3/4 and -1/4; population variance (9 + 3) / 64 = 3/16
        result = advantages(torch.tensor([1.0, 0.0, 0.0, 0.0]))
        expected = torch.tensor([0.75, -0.25, -0.25, -0.25]) / math.sqrt(3 / 16)
        torch.testing.assert_close(result, expected)

    def test_without_the_standard_deviation_by_hand(self) -> None:
        result = advantages(torch.tensor([1.0, 0.0, 0.0, 0.0]), "centered")
        torch.testing.assert_close(result, torch.tensor([0.75, -0.25, -0.25, -0.25]))

    @pytest.mark.parametrize("name", ["standardized", "centered"])
    @pytest.mark.parametrize("rewards", [[0.0] * 4, [1.0] * 4, [0.1] * 7, [1.0]])
    def test_equal_rewards_have_no_advantage(self, rewards: list[float], name: str) -> None:
        assert torch.equal(advantages(torch.tensor(rewards), name), torch.zeros(len(rewards)))  # type: ignore[arg-type]

    @given(st.lists(st.sampled_from([0.0, 0.1, 1.0]), min_size=2, max_size=16).filter(lambda r: len(set(r)) > 1))
    def test_mean_zero_and_unit_variance(self, rewards: list[float]) -> None:
        result = advantages(torch.tensor(rewards))
        assert float(result.mean()) == pytest.approx(0.0, abs=1e-5)
        assert float(result.std(correction=0)) == pytest.approx(1.0, rel=1e-4)


class TestClippedRatio:
    """Equations 23 and 24, token by token."""

    @pytest.mark.parametrize(
        ("ratio", "advantage", "value", "slope"),
        [
            # inside the clip: r A, and d(r A)/d(log pi) = r A
            (1.0, 2.0, 2.0, 2.0),
            (1.2, 1.0, 1.2, 1.2),
            (0.9, -1.0, -0.9, -0.9),
            # a good token whose ratio is above 1.28, or a bad one below 0.8: clipped, no gradient
            (1.5, 1.0, 1.28, 0.0),
            (0.5, -1.0, -0.8, 0.0),
            # the ratio moved in the wrong direction: the clip does not stop the gradient
            (0.5, 1.0, 0.5, 0.5),
            (1.5, -1.0, -1.5, -1.5),
            # but the truncation at 3 does
            (5.0, -1.0, -3.0, 0.0),
            (1.0, 0.0, 0.0, 0.0),
        ],
    )
    def test_by_hand(self, ratio: float, advantage: float, value: float, slope: float) -> None:
        behaviour = torch.tensor([-1.0])
        log_probs = (behaviour + math.log(ratio)).requires_grad_()
        result = token_ratio(log_probs, behaviour, torch.tensor([advantage]), torch.zeros(1, dtype=torch.int64), CLIP)
        assert float(result.values.detach()) == pytest.approx(value, rel=1e-5)
        assert float(_gradient(result.values.sum(), log_probs)) == pytest.approx(slope, rel=1e-5)
        assert int(result.clipped.sum()) == (1 if slope == 0.0 and advantage else 0)

    def test_without_truncation_a_bad_token_that_became_likely_counts_in_full(self) -> None:
        clip = LossSettings(truncation=math.inf)
        rows = torch.zeros(1, dtype=torch.int64)
        result = token_ratio(torch.tensor([-1.0]), torch.tensor([-4.0]), torch.tensor([-1.0]), rows, clip)
        assert float(result.values) == pytest.approx(-math.exp(3.0), rel=1e-5)
        assert not result.clipped.any()


@dataclass(frozen=True)
class Completion:
    """One completion of a step: the log-probabilities of its tokens under three policies, and its advantage."""

    new: tuple[float, ...]
    old: tuple[float, ...]
    reference: tuple[float, ...]
    advantage: float


def _completion(tokens: Sequence[tuple[float, float, float]], advantage: float) -> Completion:
    new, old, reference = zip(*tokens, strict=True)
    return Completion(new, old, reference, advantage)


def _completions() -> st.SearchStrategy[list[Completion]]:
    token = st.tuples(st.floats(-4, 0, width=32), st.floats(-4, 0, width=32), st.floats(-4, 0, width=32))
    tokens = st.lists(token, min_size=1, max_size=MAX_TOKENS)
    return st.lists(
        st.builds(
            _completion,
            tokens,
            st.floats(-3, 3, width=32),
        ),
        min_size=1,
        max_size=6,
    )


def _loss(
    step: Sequence[Completion], settings: LossSettings, weights: Sequence[float] | None = None
) -> tuple[PolicyLoss, Tensor]:
    """Return the loss of a step in one batch, and the leaf tensor float32 [N] of the log-probabilities."""
    lengths = [len(completion.new) for completion in step]
    rows = torch.arange(len(step)).repeat_interleave(torch.tensor(lengths))
    log_probs = torch.tensor([value for completion in step for value in completion.new], requires_grad=True)
    loss = policy_loss(
        log_probs,
        torch.tensor([value for completion in step for value in completion.old]),
        torch.tensor([completion.advantage for completion in step])[rows],
        rows,
        torch.tensor(weights or LOSSES[settings.loss].weights(lengths, MAX_TOKENS))[rows],
        settings,
        torch.tensor([value for completion in step for value in completion.reference]),
    )
    return loss, log_probs


def _clipped(ratio: float, advantage: float) -> float:
    bounded = min(max(ratio, 1 - CLIP.clip_low), 1 + CLIP.clip_high)
    return min(ratio * advantage, bounded * advantage)


def _ratio(new: float, old: float) -> float:
    return min(math.exp(new - old), CLIP.truncation)


def _token_objectives(completion: Completion) -> list[float]:
    return [_clipped(_ratio(n, o), completion.advantage) for n, o in zip(completion.new, completion.old, strict=True)]


def _sequence_objective(completion: Completion) -> float:
    mean_log_ratio = math.fsum(completion.new) / len(completion.new) - math.fsum(completion.old) / len(completion.old)
    return _clipped(_ratio(mean_log_ratio, 0.0), completion.advantage)


def _weighted_log_probs(completion: Completion) -> list[float]:
    return [
        min(max(_ratio(n, o), 1 - CLIP.clip_low), 1 + CLIP.clip_high) * completion.advantage * n
        for n, o in zip(completion.new, completion.old, strict=True)
    ]


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


REFERENCES: dict[LossName, Callable[[Sequence[Completion]], float]] = {  # each as its paper writes it, to be maximized
    "grpo": lambda step: _mean([_mean(_token_objectives(one)) for one in step]),
    "token-mean": lambda step: _mean([value for one in step for value in _token_objectives(one)]),
    "dr-grpo": lambda step: _mean([math.fsum(_token_objectives(one)) / MAX_TOKENS for one in step]),
    "gspo": lambda step: _mean([_sequence_objective(one) for one in step]),
    "cispo": lambda step: _mean([value for one in step for value in _weighted_log_probs(one)]),
}


def _divergences(completion: Completion) -> list[float]:
    return [
        math.exp(reference - new) - (reference - new) - 1
        for new, reference in zip(completion.new, completion.reference, strict=True)
    ]


KL_REFERENCES: dict[LossName, Callable[[Sequence[Completion]], float]] = {
    "grpo": lambda step: _mean([_mean(_divergences(one)) for one in step]),
    "token-mean": lambda step: _mean([value for one in step for value in _divergences(one)]),
    "dr-grpo": lambda step: _mean([math.fsum(_divergences(one)) / MAX_TOKENS for one in step]),
    "gspo": lambda step: _mean([_mean(_divergences(one)) for one in step]),
    "cispo": lambda step: _mean([value for one in step for value in _divergences(one)]),
}


@pytest.mark.parametrize("name", LOSSES)
class TestEveryLoss:
    """What holds for each loss of run.toml."""

    @given(step=_completions())
    def test_slow_reference(self, name: LossName, step: list[Completion]) -> None:
        loss, _ = _loss(step, LossSettings(loss=name))
        assert float(loss.value.detach()) == pytest.approx(-REFERENCES[name](step), rel=1e-4, abs=1e-5)
        assert loss.divergence == 0.0

    @given(step=_completions())
    def test_slow_reference_with_a_divergence(self, name: LossName, step: list[Completion]) -> None:
        loss, _ = _loss(step, LossSettings(loss=name, kl_coefficient=0.1))
        expected = -REFERENCES[name](step) + 0.1 * KL_REFERENCES[name](step)
        assert float(loss.value.detach()) == pytest.approx(expected, rel=1e-4, abs=1e-4)
        total = math.fsum(value for one in step for value in _divergences(one))
        assert loss.divergence == pytest.approx(total, rel=1e-4, abs=1e-5)

    @given(step=_completions())
    def test_without_advantages_there_is_no_gradient(self, name: LossName, step: list[Completion]) -> None:
        loss, log_probs = _loss([replace(one, advantage=0.0) for one in step], LossSettings(loss=name))
        assert not _gradient(loss.value, log_probs).any()

    @given(step=_completions())
    def test_on_the_sampling_policy_nothing_is_clipped(self, name: LossName, step: list[Completion]) -> None:
        """Every ratio is 1, so the gradient of each token is that of policy gradient: -w A."""
        settings = LossSettings(loss=name)
        loss, log_probs = _loss([replace(one, old=one.new) for one in step], settings)
        weights = LOSSES[settings.loss].weights([len(one.new) for one in step], MAX_TOKENS)
        expected = [-w * one.advantage for w, one in zip(weights, step, strict=True) for _ in one.new]
        assert loss.clipped_tokens == 0
        torch.testing.assert_close(_gradient(loss.value, log_probs), torch.tensor(expected), rtol=1e-4, atol=1e-6)

    @pytest.mark.parametrize("advantage", [1.0, -1.0])
    @pytest.mark.parametrize("truncation", [3.0, math.inf])
    def test_a_ratio_that_overflows_gives_a_finite_gradient(
        self, name: LossName, advantage: float, truncation: float
    ) -> None:
        settings = LossSettings(loss=name, truncation=truncation)
        loss, log_probs = _loss([Completion((-0.5,), (-1000.0,), (-0.5,), advantage)], settings)
        assert bool(_gradient(loss.value, log_probs).isfinite().all())
        assert loss.clipped_tokens == 1

    @given(step=_completions(), cut=st.integers(1, 5))
    def test_two_passes_add_up_to_one(self, name: LossName, step: list[Completion], cut: int) -> None:
        """The gradient of a step does not depend on how its completions are divided into passes."""
        settings = LossSettings(loss=name)
        loss, log_probs = _loss(step, settings)
        whole_weights = LOSSES[settings.loss].weights([len(one.new) for one in step], MAX_TOKENS)
        parts = []
        for part, weights in ((step[:cut], whole_weights[:cut]), (step[cut:], whole_weights[cut:])):
            if part:
                result, new = _loss(part, settings, weights)
                parts.append(_gradient(result.value, new))
        torch.testing.assert_close(_gradient(loss.value, log_probs), torch.cat(parts))


class TestClipBoundaries:
    """The clip is asymmetric: exactly at a bound a token still counts, and just beyond it gives no gradient."""

    @pytest.mark.parametrize("name", ["grpo", "token-mean", "dr-grpo", "gspo"])
    @given(distance=st.floats(1e-3, 0.5), advantage=st.sampled_from([1.0, -1.0]), inside=st.booleans())
    def test_a_ratio_beyond_the_bound_gives_no_gradient(
        self, name: LossName, distance: float, advantage: float, inside: bool
    ) -> None:
        bound = math.log(1 + CLIP.clip_high) if advantage > 0 else math.log(1 - CLIP.clip_low)
        new = -2.0 + bound + math.copysign(distance, -advantage if inside else advantage)
        loss, log_probs = _loss([Completion((new,), (-2.0,), (-2.0,), advantage)], LossSettings(loss=name))
        assert bool(_gradient(loss.value, log_probs).any()) == inside
        assert loss.clipped_tokens == (0 if inside else 1)

    def test_cispo_bounds_the_weight_and_keeps_the_gradient(self) -> None:
        loss, log_probs = _loss([Completion((-1.0,), (-2.0,), (-2.0,), 1.0)], LossSettings(loss="cispo"))
        assert float(_gradient(loss.value, log_probs)) == pytest.approx(-(1 + CLIP.clip_high))
        assert loss.clipped_tokens == 1


def test_a_divergence_needs_a_reference() -> None:
    one = torch.zeros(1)
    with pytest.raises(ValueError, match="reference policy"):
        policy_loss(one, one, one, torch.zeros(1, dtype=torch.int64), one, LossSettings(kl_coefficient=0.1))


@given(st.floats(-20, 0), st.floats(-20, 0))
def test_the_divergence_is_zero_only_where_the_policies_agree(new: float, reference: float) -> None:
    result = float(reference_divergence(torch.tensor([new]), torch.tensor([reference])))
    assert result >= -1e-6
    if abs(new - reference) > 1e-2:
        assert result > 0.0


def test_centered_advantages_belong_to_dr_grpo_and_can_be_replaced() -> None:
    assert advantage_name(LossSettings(loss="dr-grpo")) == "centered"
    assert advantage_name(LossSettings(loss="grpo")) == "standardized"
    assert advantage_name(LossSettings(loss="dr-grpo", advantage="standardized")) == "standardized"


def test_log_probabilities_are_at_the_sampling_temperature() -> None:
    logits = torch.tensor([[0.0, math.log(4.0)]])  # at temperature 2: odds of 1 to 2
    result = log_probabilities(logits, torch.tensor([1]), 2.0)
    torch.testing.assert_close(result, torch.tensor([math.log(2 / 3)]))


def test_entropy_by_hand() -> None:
    logits = torch.tensor([[0.0, math.log(4.0)], [0.0, 0.0]])
    expected = [-(2 / 3) * math.log(2 / 3) - (1 / 3) * math.log(1 / 3), math.log(2.0)]
    torch.testing.assert_close(entropy(logits, 2.0), torch.tensor(expected))
