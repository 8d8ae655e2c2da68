"""The weight of each token in the loss of a step.

A weight depends on the lengths of the completions alone, so it is known before the first pass of the model: gradients
that add up over several passes are those of one pass.
"""

from collections.abc import Callable, Sequence

TokenWeights = Callable[[Sequence[int], int], list[float]]
"""A function of the lengths of all completions of a step, in tokens, and of the longest completion that the run allows.
It returns the weight of each token of each completion: one number for each completion.
"""


def token_mean(lengths: Sequence[int], max_tokens: int) -> list[float]:
    """Return weights for the mean over all tokens of the step: a token of a long completion weighs as much as one of a
    short one (DAPO, Yu et al. 2025).
    """
    return [1 / sum(lengths)] * len(lengths)


def sequence_mean(lengths: Sequence[int], max_tokens: int) -> list[float]:
    """Return weights for the mean over completions of the mean over each one's tokens (equation 23)."""
    return [1 / (len(lengths) * length) if length else 0.0 for length in lengths]


def constant_length(lengths: Sequence[int], max_tokens: int) -> list[float]:
    """Return weights for the sum over tokens divided by a constant length, and the mean over completions (Dr. GRPO,
    Liu et al. 2025): the length of a completion does not bias its gradient.
    """
    return [1 / (len(lengths) * max_tokens)] * len(lengths)
