"""What the local steps of a round gave: the payload of the contribution, and the site's own states if it counts."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from protocol import pseudogradient
from protocol.digest import Weights
from protocol.outer.round_records import RoundRules
from protocol.outer.shared_state import SharedState
from roles.trainer.outer.local_learner import masters, own_state


@dataclass(frozen=True)
class LocalWork:
    """The result of the local steps of a round.

    Attributes:
        payload, norm: of the contribution; feedback, inner: the site's own states if it counts.
    """

    payload: bytes
    norm: float
    feedback: dict[str, Tensor]
    inner: Mapping[str, Tensor]


def encode_work(
    shared: SharedState, state: Mapping[str, Tensor], feedback: Weights | None, rules: RoundRules
) -> LocalWork:
    """Encode what the local steps have changed.

    Args:
        state: of the learner after the steps.
        feedback: the site's error feedback before the round; None for zeros.
    """
    uses_feedback, stream = rules.uses_feedback(shared.step), shared.stream(rules)
    if feedback is None and len(stream) < len(shared.weights):
        feedback = {name: torch.zeros_like(tensor) for name, tensor in shared.weights.items()}
    contribution = pseudogradient.encode(
        stream,
        masters(state),
        feedback,
        rules.coding,
        shared.digests.weights,
        decay=rules.feedback_decay if uses_feedback else 1.0,
    )
    return LocalWork(
        payload=contribution.payload,
        norm=contribution.head.squared_norm**0.5,
        feedback={**(feedback or {}), **contribution.residual} if uses_feedback else {},
        inner=own_state(state, shared.weights, stream),
    )
