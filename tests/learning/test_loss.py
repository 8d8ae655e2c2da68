"""GRPO against a slow and simple reference, and against values computed by hand."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from protocol.rollout.sampling import log_probabilities
from roles.trainer.learn.loss import LossSettings, advantages, entropy, policy_loss

SETTINGS = LossSettings()


class TestAdvantages:
    """Equation 25."""

    def test_by_hand(self) -> None:
        # mean 1/4; deviations 3/4 and -1/4; population variance (9 + 3) / 64 = 3/16
        result = advantages(torch.tensor([1.0, 0.0, 0.0, 0.0]))
        expected = torch.tensor([0.75, -0.25, -0.25, -0.25]) / math.sqrt(3 / 16)
        torch.testing.assert_close(result, expected)

    @pytest.mark.parametrize("rewards", [[0.0] * 4, [1.0] * 4, [0.1] * 7, [1.0]])
    def test_equal_rewards_have_no_advantage(self, rewards: list[float]) -> None:
        assert torch.equal(advantages(torch.tensor(rewards)), torch.zeros(len(rewards)))

    @given(st.lists(st.sampled_from([0.0, 0.1, 1.0]), min_size=2, max_size=16).filter(lambda r: len(set(r)) > 1))
    def test_mean_zero_and_unit_variance(self, rewards: list[float]) -> None:
        result = advantages(torch.tensor(rewards))
        assert float(result.mean()) == pytest.approx(0.0, abs=1e-5)
        assert float(result.std(correction=0)) == pytest.approx(1.0, rel=1e-4)


class TestPolicyLoss:
    """Equations 23 and 24."""

    @pytest.mark.parametrize(
        ("ratio", "advantage", "loss", "slope"),
        [
            # inside the clip: -r A, and d(-r A)/d(log pi) = -r A
            (1.0, 2.0, -2.0, -2.0),
            (1.2, 1.0, -1.2, -1.2),
            (0.9, -1.0, 0.9, 0.9),
            # a good token whose ratio is above 1.28, or a bad one below 0.8: clipped, no gradient
            (1.5, 1.0, -1.28, 0.0),
            (0.5, -1.0, 0.8, 0.0),
            # the ratio moved in the wrong direction: the clip does not stop the gradient
            (0.5, 1.0, -0.5, -0.5),
            (1.5, -1.0, 1.5, 1.5),
            # but the truncation at 3 does
            (5.0, -1.0, 3.0, 0.0),
            (1.0, 0.0, 0.0, 0.0),
        ],
    )
    def test_by_hand(self, ratio: float, advantage: float, loss: float, slope: float) -> None:
        behaviour = torch.tensor([-1.0])
        log_probs = (behaviour + math.log(ratio)).requires_grad_()
        result = policy_loss(log_probs, behaviour, torch.tensor([advantage]), SETTINGS)
        assert float(result.value.detach()) == pytest.approx(loss, rel=1e-5)
        result.value.backward()  # type: ignore[no-untyped-call]
        assert log_probs.grad is not None
        assert float(log_probs.grad) == pytest.approx(slope, rel=1e-5)
        assert result.clipped_tokens == (1 if slope == 0.0 and advantage else 0)

    @given(
        st.lists(
            st.tuples(st.floats(-4, 0), st.floats(-4, 0), st.floats(-3, 3)),
            min_size=1,
            max_size=20,
        )
    )
    def test_slow_reference(self, tokens: list[tuple[float, float, float]]) -> None:
        expected = 0.0
        for new, old, advantage in tokens:
            ratio = min(math.exp(new - old), SETTINGS.truncation)
            clipped = min(max(ratio, 1 - SETTINGS.clip_low), 1 + SETTINGS.clip_high)
            expected -= min(ratio * advantage, clipped * advantage)
        table = torch.tensor(tokens, dtype=torch.float32)
        result = policy_loss(table[:, 0], table[:, 1], table[:, 2], SETTINGS)
        assert float(result.value) == pytest.approx(expected, rel=1e-4, abs=1e-4)

    @pytest.mark.parametrize("advantage", [1.0, -1.0])
    def test_a_ratio_that_overflows_gives_no_gradient(self, advantage: float) -> None:
        log_probs = torch.tensor([-0.5], requires_grad=True)
        result = policy_loss(log_probs, torch.tensor([-1000.0]), torch.tensor([advantage]), SETTINGS)
        result.value.backward()  # type: ignore[no-untyped-call]
        assert log_probs.grad is not None
        assert float(log_probs.grad) == 0.0
        assert result.clipped_tokens == 1


def test_log_probabilities_are_at_the_sampling_temperature() -> None:
    logits = torch.tensor([[0.0, math.log(4.0)]])  # at temperature 2: odds of 1 to 2
    result = log_probabilities(logits, torch.tensor([1]), 2.0)
    torch.testing.assert_close(result, torch.tensor([math.log(2 / 3)]))


def test_entropy_by_hand() -> None:
    logits = torch.tensor([[0.0, math.log(4.0)], [0.0, 0.0]])
    expected = [-(2 / 3) * math.log(2 / 3) - (1 / 3) * math.log(1 / 3), math.log(2.0)]
    torch.testing.assert_close(entropy(logits, 2.0), torch.tensor(expected))
