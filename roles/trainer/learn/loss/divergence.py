"""Distances between policies, and the entropy of one, token by token."""

import torch
from torch import Tensor

from roles.trainer.learn.loss.loss_settings import LARGEST_LOG_RATIO


def reference_divergence(log_probs: Tensor, reference: Tensor) -> Tensor:
    """Estimate D_KL(pi_theta || pi_ref) of equation 23 at each token as exp(d) - d - 1, d being the difference
    log pi_ref - log pi_theta.

    The estimator is never negative, and unbiased for tokens that pi_theta samples (Schulman 2020, "k3").

    Args:
        log_probs: float32 [N], log pi_theta, with gradient.
        reference: float32 [N], log pi_ref.

    Returns:
        float32 [N], nats.
    """
    difference = (reference - log_probs).clamp(max=LARGEST_LOG_RATIO)
    return difference.exp() - difference - 1


def entropy(logits: Tensor, temperature: float) -> Tensor:
    """Return the entropy of the sampled distribution in nats, float32 [N], of logits [N, V]."""
    log_p = torch.log_softmax(logits / temperature, dim=-1)
    return -(log_p.exp() * log_p).sum(dim=-1)
