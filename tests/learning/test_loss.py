"""Losses against slow references (loops over float64 numbers) and values computed by hand.

The references have the clips of the papers as numbers of their own.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

from grailnode.config import TrainerSection
from protocol.rollout.sampling import log_probabilities
from roles.trainer.learn.loss.loss_settings import LOSSES, LossName, LossSettings
from roles.trainer.learn.loss.policy_loss import AGGREGATIONS, PolicyLoss, advantages, entropy, policy_loss
from roles.trainer.learn.loss.surrogates import Objective, Tokens, surrogate_of

MAX_TOKENS = 8


def _gradient(value: Tensor, log_probs: Tensor) -> Tensor:
    value.backward()  # type: ignore[no-untyped-call]
    assert log_probs.grad is not None
    return log_probs.grad


def _tokens(
    lengths: Sequence[int], log_probs: Tensor, behaviour: Tensor, advantage: Sequence[float], **others: Tensor
) -> Tokens:
    """Return the tokens of completions of these lengths, each with an advantage."""
    rows = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    proximal = others.pop("proximal", log_probs.detach())
    zeros = torch.zeros_like(behaviour)
    return Tokens(
        log_probs, behaviour, proximal, torch.tensor(advantage)[rows], rows, others.pop("entropy", zeros), **others
    )


def _settings(name: LossName, **keys: Any) -> LossSettings:
    teacher: dict[str, Any] = {"reference": Path("teacher")} if name == "distillation" else {}
    return LossSettings(loss=name, **teacher, **keys)


class TestAdvantages:
    """Equation 25."""

    def test_by_hand(self) -> None:
        # mean 1/4; deviations 3/4 and -1/4; population variance (9 + 3) / 64 = 3/16
        rewards, centered = torch.tensor([1.0, 0.0, 0.0, 0.0]), torch.tensor([0.75, -0.25, -0.25, -0.25])
        torch.testing.assert_close(advantages(rewards), centered / math.sqrt(3 / 16))
        torch.testing.assert_close(advantages(rewards, "centered"), centered)
        assert torch.equal(advantages(rewards, "reward"), rewards)

    @pytest.mark.parametrize("name", ["standardized", "centered"])
    @pytest.mark.parametrize("rewards", [[0.0] * 4, [1.0] * 4, [0.1] * 7, [1.0]])
    def test_equal_rewards_have_no_advantage(self, rewards: list[float], name: str) -> None:
        assert torch.equal(advantages(torch.tensor(rewards), name), torch.zeros(len(rewards)))  # type: ignore[arg-type]

    @given(st.lists(st.floats(-2, 2, width=32), min_size=2, max_size=8).filter(lambda r: max(r) - min(r) > 1e-2))
    def test_rloo_subtracts_the_mean_of_the_other_rewards(self, rewards: list[float]) -> None:
        others = [(math.fsum(rewards) - one) / (len(rewards) - 1) for one in rewards]
        expected = [one - mean for one, mean in zip(rewards, others, strict=True)]
        torch.testing.assert_close(advantages(torch.tensor(rewards), "rloo"), torch.tensor(expected))

    @given(st.lists(st.sampled_from([0.0, 0.1, 1.0]), min_size=2, max_size=16).filter(lambda r: len(set(r)) > 1))
    def test_mean_zero_and_unit_variance(self, rewards: list[float]) -> None:
        result = advantages(torch.tensor(rewards))
        assert float(result.mean()) == pytest.approx(0.0, abs=1e-5)
        assert float(result.std(correction=0)) == pytest.approx(1.0, rel=1e-4)


@dataclass(frozen=True)
class Completion:
    """One completion of a step: the log-probabilities of its tokens under four policies, the entropies before them, and
    its advantage.
    """

    new: tuple[float, ...]
    old: tuple[float, ...]
    reference: tuple[float, ...]
    proximal: tuple[float, ...]
    entropy: tuple[float, ...]
    advantage: float


def _completion(tokens: Sequence[tuple[float, ...]], advantage: float) -> Completion:
    new, old, reference, proximal, entropies = zip(*tokens, strict=True)
    return Completion(new, old, reference, proximal, entropies, advantage)


def _completions() -> st.SearchStrategy[list[Completion]]:
    log_prob = st.floats(-4, 0, width=32)
    token = st.tuples(log_prob, log_prob, log_prob, log_prob, st.floats(0, 3, width=32))
    tokens = st.lists(token, min_size=1, max_size=MAX_TOKENS)
    return st.lists(st.builds(_completion, tokens, st.floats(-3, 3, width=32)), min_size=1, max_size=6)


def _loss(
    step: Sequence[Completion], settings: LossSettings, weights: Sequence[float] | None = None
) -> tuple[PolicyLoss, Tensor]:
    """Return the loss of a step in one batch, and the leaf tensor float32 [N] of the log-probabilities."""
    lengths = [len(completion.new) for completion in step]

    def column(name: str) -> Tensor:
        return torch.tensor([value for completion in step for value in getattr(completion, name)])

    others = {name: column(name) for name in ("reference", "proximal", "entropy")}
    log_probs = column("new").requires_grad_()
    tokens = _tokens(lengths, log_probs, column("old"), [one.advantage for one in step], **others)
    weights = weights or AGGREGATIONS[settings.aggregation_name](lengths, MAX_TOKENS)
    return policy_loss(tokens, torch.tensor(weights)[tokens.rows], settings), log_probs


TRUNCATION = 3.0
Bounds = tuple[float, float]
PPO: Bounds = (0.8, 1.28)
GSPO: Bounds = (1 - 3e-4, 1 + 4e-4)  # section 5.1 of its paper
CISPO_HIGH = 5.0  # no lower bound: its paper; the upper one: ScaleRL


def _clipped(log_ratio: float, advantage: float, bounds: Bounds) -> float:
    ratio = min(math.exp(log_ratio), TRUNCATION)
    return min(ratio * advantage, min(max(ratio, bounds[0]), bounds[1]) * advantage)


def _token_objectives(one: Completion) -> list[float]:
    return [_clipped(new - old, one.advantage, PPO) for new, old in zip(one.new, one.old, strict=True)]


def _sequence_objectives(one: Completion) -> list[float]:
    ratio = math.prod(math.exp(new - old) for new, old in zip(one.new, one.old, strict=True)) ** (1 / len(one.new))
    return [_clipped(math.log(ratio), one.advantage, GSPO)] * len(one.new)


def _weighted_log_probs(one: Completion) -> list[float]:
    ratios = [min(math.exp(new - old), CISPO_HIGH) for new, old in zip(one.new, one.old, strict=True)]
    return [ratio * one.advantage * new for ratio, new in zip(ratios, one.new, strict=True)]


def _likelihoods(one: Completion) -> list[float]:
    return [one.advantage * new for new in one.new]


def _teacher_objectives(one: Completion) -> list[float]:
    columns = zip(one.new, one.old, one.reference, strict=True)
    return [_clipped(new - old, reference - new, PPO) for new, old, reference in columns]


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _token_mean(step: Sequence[Sequence[float]]) -> float:
    return _mean([value for one in step for value in one])


def _sequence_mean(step: Sequence[Sequence[float]]) -> float:
    return _mean([_mean(one) for one in step])


def _constant_length(step: Sequence[Sequence[float]]) -> float:
    return _mean([math.fsum(one) / MAX_TOKENS for one in step])


Objectives = Callable[[Completion], list[float]]
REFERENCES: dict[LossName, tuple[Objectives, Callable[[Sequence[Sequence[float]]], float]]] = {  # as papers write them
    "grpo": (_token_objectives, _sequence_mean),
    "token-mean": (_token_objectives, _token_mean),
    "dr-grpo": (_token_objectives, _constant_length),
    "gspo": (_sequence_objectives, _sequence_mean),
    "cispo": (_weighted_log_probs, _token_mean),
    "supervised": (_likelihoods, _token_mean),
    "distillation": (_teacher_objectives, _token_mean),
}


def _divergences(completion: Completion) -> list[float]:
    return [
        math.exp(reference - new) - (reference - new) - 1
        for new, reference in zip(completion.new, completion.reference, strict=True)
    ]


def _ages(one: Completion) -> list[float]:
    """Return pi_before / pi_sampling of each token."""
    return [math.exp(before - old) for before, old in zip(one.proximal, one.old, strict=True)]


CORRECTIONS: dict[str, Callable[[float], float]] = {
    "decoupled": lambda age: age,
    "truncated": lambda age: min(age, 2.0),
    "masked": lambda age: age if 0.5 <= age <= 5.0 else 0.0,
}


@pytest.mark.parametrize("name", LOSSES)
class TestEveryLoss:
    """What holds for each loss of run.toml."""

    @given(step=_completions())
    def test_slow_reference_with_a_divergence_and_an_entropy(self, name: LossName, step: list[Completion]) -> None:
        loss, _ = _loss(step, _settings(name, kl_coefficient=0.1, entropy_coefficient=0.2))
        objectives, aggregate = REFERENCES[name]
        objective, divergence, entropies = (
            aggregate([values(one) for one in step])
            for values in (objectives, _divergences, lambda one: list(one.entropy))
        )
        expected = -objective + 0.1 * divergence - 0.2 * entropies
        assert float(loss.value.detach()) == pytest.approx(expected, rel=1e-4, abs=1e-4)
        total = math.fsum(value for one in step for value in _divergences(one))
        assert loss.divergence == pytest.approx(total, rel=1e-4, abs=1e-5)

    @given(step=_completions(), correction=st.sampled_from(sorted(CORRECTIONS)))
    def test_slow_reference_with_a_correction(self, name: LossName, step: list[Completion], correction: str) -> None:
        """The ratio is against the policy before the step, and the correction's weight against the sampling one."""
        ages = [age for one in step for age in _ages(one)]
        assume(not any(abs(age - bound) < 1e-3 for age in ages for bound in (0.5, 5.0)))
        if name == "gspo":  # it has one ratio for a completion, and takes no correction
            return
        loss, _ = _loss(step, _settings(name, correction=correction))
        objectives, aggregate = REFERENCES[name]
        values = [
            [CORRECTIONS[correction](age) * value for age, value in zip(_ages(one), objectives(before), strict=True)]
            for one in step
            for before in [replace(one, old=one.proximal)]
        ]
        assert float(loss.value.detach()) == pytest.approx(-aggregate(values), rel=1e-4, abs=1e-3)

    @given(step=_completions())
    def test_without_advantages_there_is_no_gradient(self, name: LossName, step: list[Completion]) -> None:
        """In distillation a policy that agrees with its teacher has none."""
        same = [replace(one, advantage=0.0, reference=one.new) for one in step]
        loss, log_probs = _loss(same, _settings(name))
        assert not _gradient(loss.value, log_probs).any()

    @given(step=_completions())
    def test_on_the_sampling_policy_nothing_is_clipped(self, name: LossName, step: list[Completion]) -> None:
        """Every ratio is 1, so the gradient of each token is that of policy gradient: -w A."""
        settings = _settings(name)
        loss, log_probs = _loss([replace(one, old=one.new) for one in step], settings)
        weights = AGGREGATIONS[settings.aggregation_name]([len(one.new) for one in step], MAX_TOKENS)
        expected = [
            -w * (reference - new if name == "distillation" else one.advantage)
            for w, one in zip(weights, step, strict=True)
            for new, reference in zip(one.new, one.reference, strict=True)
        ]
        assert loss.clipped_tokens == 0
        torch.testing.assert_close(_gradient(loss.value, log_probs), torch.tensor(expected), rtol=1e-4, atol=1e-6)

    @pytest.mark.parametrize("correction", ["none", "decoupled", "masked"])
    def test_gradients_are_those_of_finite_differences(self, name: LossName, correction: str) -> None:
        """Central differences in float64, where a constant of the objective does not depend on the policy itself."""
        if name in ("cispo", "distillation"):
            return  # their weight and advantage are taken as constants; the test above has their gradients
        draws = [torch.rand(12, dtype=torch.float64, generator=torch.Generator().manual_seed(i)) for i in range(5)]
        correction = "none" if name == "gspo" else correction
        settings = _settings(name, correction=correction, kl_coefficient=0.1, clip_low=0.2, clip_high=0.28)
        tokens = _tokens(
            [5, 7], -draws[0], -draws[1], [1.5, -0.5], proximal=-draws[2], reference=-draws[3], entropy=draws[4]
        )
        weight = torch.full((12,), 0.25, dtype=torch.float64)

        def value(log_probs: Tensor) -> Tensor:
            return policy_loss(replace(tokens, log_probs=log_probs), weight, settings).value

        assert torch.autograd.gradcheck(value, (tokens.log_probs.requires_grad_(),))

    @pytest.mark.parametrize("advantage", [1.0, -1.0])
    @pytest.mark.parametrize("truncation", [3.0, math.inf])
    @pytest.mark.parametrize("correction", ["none", "decoupled", "truncated", "masked"])
    def test_a_ratio_that_overflows_gives_a_finite_gradient(
        self, name: LossName, advantage: float, truncation: float, correction: str
    ) -> None:
        correction = "none" if name == "gspo" else correction
        settings = _settings(name, truncation=truncation, correction=correction)
        reference = -0.5 + advantage
        one = Completion((-0.5,), (-1000.0,), (reference,), (-0.5,), (0.0,), advantage)
        loss, log_probs = _loss([one], settings)
        assert bool(_gradient(loss.value, log_probs).isfinite().all())
        if correction == "none" and name != "supervised":
            assert loss.clipped_tokens == 1

    @given(step=_completions(), cut=st.integers(1, 5))
    def test_two_passes_add_up_to_one(self, name: LossName, step: list[Completion], cut: int) -> None:
        """The gradient of a step does not depend on how its completions are divided into passes."""
        settings = _settings(name)
        loss, log_probs = _loss(step, settings)
        whole_weights = AGGREGATIONS[settings.aggregation_name]([len(one.new) for one in step], MAX_TOKENS)
        parts = []
        for part, weights in ((step[:cut], whole_weights[:cut]), (step[cut:], whole_weights[cut:])):
            if part:
                result, new = _loss(part, settings, weights)
                parts.append(_gradient(result.value, new))
        torch.testing.assert_close(_gradient(loss.value, log_probs), torch.cat(parts))


class TestClipBoundaries:
    """The clip is asymmetric: exactly at a bound a token still counts, and just beyond it gives no gradient."""

    @pytest.mark.parametrize(("name", "bounds"), [("grpo", PPO), ("token-mean", PPO), ("dr-grpo", PPO), ("gspo", GSPO)])
    @given(distance=st.floats(1e-4, 1.0), advantage=st.sampled_from([1.0, -1.0]), inside=st.booleans())
    def test_a_ratio_beyond_the_bound_gives_no_gradient(
        self, name: LossName, bounds: Bounds, distance: float, advantage: float, inside: bool
    ) -> None:
        bound = math.log(bounds[1] if advantage > 0 else bounds[0])
        new = -2.0 + bound + math.copysign(distance, -advantage if inside else advantage)
        loss, log_probs = _loss([_one(new, -2.0, advantage)], LossSettings(loss=name))
        assert bool(_gradient(loss.value, log_probs).any()) == inside
        assert loss.clipped_tokens == (0 if inside else 1)

    def test_without_truncation_a_bad_token_that_became_likely_counts_in_full(self) -> None:
        loss, _ = _loss([_one(-1.0, -4.0, -1.0)], LossSettings(truncation=math.inf))
        assert float(loss.value.detach()) == pytest.approx(math.exp(3.0), rel=1e-5)
        assert loss.clipped_tokens == 0

    def test_cispo_bounds_the_weight_and_keeps_the_gradient(self) -> None:
        loss, log_probs = _loss([_one(-1.0, -4.0, 1.0)], LossSettings(loss="cispo"))
        assert float(_gradient(loss.value, log_probs)) == pytest.approx(-CISPO_HIGH)
        assert loss.clipped_tokens == 1
        loss, log_probs = _loss([_one(-4.0, -1.0, 1.0)], LossSettings(loss="cispo"))
        assert float(_gradient(loss.value, log_probs)) == pytest.approx(-math.exp(-3.0))


def _one(new: float, old: float, advantage: float) -> Completion:
    return Completion((new,), (old,), (new,), (new,), (0.0,), advantage)


class TestCorrections:
    """The weight of the policy before the step over the sampling one, apart from the clip."""

    @pytest.mark.parametrize(
        ("keys", "age", "weight"),
        [
            ({"correction": "decoupled"}, 8.0, 8.0),
            ({"correction": "truncated"}, 8.0, 2.0),
            ({"correction": "truncated"}, 0.01, 0.01),
            ({"correction": "truncated", "correction_high": 10.0}, 8.0, 8.0),
            ({"correction": "masked"}, 4.0, 4.0),
            ({"correction": "masked"}, 8.0, 0.0),
            ({"correction": "masked"}, 0.4, 0.0),
            ({"correction": "masked", "correction_low": 0.1}, 0.4, 0.4),
        ],
    )
    def test_gradient_by_hand(self, keys: dict[str, Any], age: float, weight: float) -> None:
        """One step on stale groups: its ratio is 1, so that the gradient is -w A of the correction alone."""
        loss, log_probs = _loss([_one(-1.0, -1.0 - math.log(age), 0.5)], LossSettings(**keys))
        assert float(_gradient(loss.value, log_probs)) == pytest.approx(-0.5 * weight, rel=1e-5)
        assert loss.clipped_tokens == int(weight != age)


def own_loss(tokens: Tokens, settings: LossSettings) -> Objective:
    """Compute REINFORCE without any ratio."""
    return Objective(tokens.advantage * tokens.log_probs, tokens.advantage < 0)


def test_a_loss_of_ones_own_is_imported_and_has_corrections_and_weights() -> None:
    name = f"{__name__}:own_loss"
    step = [_one(-1.0, -4.0, 1.0), _one(-2.0, -2.0, -1.0)]
    loss, log_probs = _loss(step, LossSettings(loss=name, correction="truncated", aggregation="sequence-mean"))
    assert loss.clipped_tokens == 2
    torch.testing.assert_close(_gradient(loss.value, log_probs), torch.tensor([-1.0, 0.5]))


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        *(({"loss": name}, "loss") for name in ("no-such-loss", "module.name", ":loss", "module:")),
        ({"loss": "no_such_module:loss"}, "no_such_module:loss cannot be imported"),
        ({"loss": f"{__name__}:no_such_loss"}, ":no_such_loss cannot be imported"),
        ({"correction": "truncated", "correction_low": 3.0}, "correction_low must be below correction_high"),
        ({"loss": "gspo", "correction": "masked"}, "gspo has one ratio for a completion"),
        ({"loss": "distillation"}, "the checkpoint of the teacher"),
    ],
)
def test_settings_of_no_loss_are_refused(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        surrogate_of(LossSettings(**keys))


def test_groups_of_equal_rewards_teach_some_losses() -> None:
    settings = {
        name: LossSettings(loss=name, reference=Path("teacher") if name == "distillation" else None) for name in LOSSES
    }
    assert {name for name, item in settings.items() if not item.needs_contrast} == {"supervised", "distillation"}
    assert LossSettings(loss="supervised", advantage="centered").needs_contrast
    assert TrainerSection(loss="supervised").filters_groups is False
    assert TrainerSection().filters_groups is True


def test_a_divergence_needs_a_reference() -> None:
    one = torch.zeros(1)
    with pytest.raises(ValueError, match="reference policy"):
        policy_loss(_tokens([1], one, one, [1.0]), one, LossSettings(kl_coefficient=0.1))


def test_what_belongs_to_a_loss_can_be_replaced() -> None:
    assert LossSettings(loss="dr-grpo").advantage_name == "centered"
    assert LossSettings(loss="grpo").advantage_name == "standardized"
    changed = LossSettings(loss="dr-grpo", advantage="rloo", aggregation="token-mean", clip_high=0.5)
    assert (changed.advantage_name, changed.aggregation_name) == ("rloo", "token-mean")
    assert changed.clip_bounds == (0.8, 1.5)


def test_log_probabilities_are_at_the_sampling_temperature() -> None:
    logits = torch.tensor([[0.0, math.log(4.0)]])  # at temperature 2: odds of 1 to 2
    result = log_probabilities(logits, torch.tensor([1]), 2.0)
    torch.testing.assert_close(result, torch.tensor([math.log(2 / 3)]))


def test_entropy_by_hand() -> None:
    logits = torch.tensor([[0.0, math.log(4.0)], [0.0, 0.0]])
    expected = [-(2 / 3) * math.log(2 / 3) - (1 / 3) * math.log(1 / 3), math.log(2.0)]
    torch.testing.assert_close(entropy(logits, 2.0), torch.tensor(expected))
