"""What local steps leave: the payload of a contribution, and the rest of a learner's state, which stays with its site.

The FP32 masters in the state begin each round as the shared weights; the rest of it, such as the moments, goes on from
round to round. Where weights are sent in streams, so does what local steps have changed in the weights that were not
sent.
"""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from protocol import limits, pseudogradient
from protocol.digest import Weights
from protocol.encoding import content_digest
from protocol.outer.round_records import PayloadRef, RoundRules
from protocol.outer.shared_state import SharedState
from protocol.pseudogradient import Keep, Payload, in_memory

MASTER: Final = "master/"
"""The prefix of the FP32 masters' names in a learner's state."""

AHEAD: Final = "ahead/"
"""The prefix, in a site's own state, of how far its weights are from the shared ones where they were not sent yet."""


State = Mapping[str, Tensor]
"""The state of a learner, by name."""


def masters(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the FP32 weights in a learner's state."""
    return {name.removeprefix(MASTER): tensor for name, tensor in state.items() if name.startswith(MASTER)}


def with_masters(state: Mapping[str, Tensor], weights: Weights) -> dict[str, Tensor]:
    """Return a learner's state with other FP32 weights."""
    return {**state, **{MASTER + name: tensor for name, tensor in weights.items()}}


def begin_round(own: State, shared: Weights) -> dict[str, Tensor]:
    """Return the state of a learner with which a site's round begins. Its own part is what `own_state` returned for the
    site's newest contribution that counts, or a new learner's state.
    """
    weights = {name: tensor + own[AHEAD + name] if AHEAD + name in own else tensor for name, tensor in shared.items()}
    return with_masters({name: tensor for name, tensor in own.items() if not name.startswith(AHEAD)}, weights)


def own_state(state: State, shared: Weights, sent: Collection[str]) -> dict[str, Tensor]:
    """Return what of a learner's state belongs to the site alone if its contribution counts."""
    ahead = {AHEAD + name: tensor - shared[name] for name, tensor in masters(state).items() if name not in sent}
    return without_masters(state) | ahead


def without_masters(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return what of a learner's state belongs to the site alone."""
    return {name: tensor for name, tensor in state.items() if not name.startswith(MASTER)}


@dataclass(frozen=True)
class LocalWork:
    """The payload and norm of a round's contribution, and the site's own states if it counts."""

    payload: Payload
    norm: float
    feedback: dict[str, Tensor]
    inner: Mapping[str, Tensor]

    def reference(self) -> PayloadRef:
        """Return what the contribution says of the payload."""
        first = self.payload[0]
        return PayloadRef(digest=content_digest(bytes(first[:])), size=len(first), total=sum(map(len, self.payload)))


def encode_work(
    shared: SharedState,
    state: Mapping[str, Tensor],
    feedback: Weights | None,
    rules: RoundRules,
    sender: bytes,
    file_bytes: int = limits.MAX_PAYLOAD_FILE_BYTES,
    keep: Keep = in_memory,
) -> LocalWork:
    """Encode what the local steps have changed, from the learner's state and the error feedback before; None for zeros.
    `sender` names the site and the round (`round_checks.sender_digest`); `keep` stores each file of the payload, which
    has at most `file_bytes` of frames, or a single one.
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
        sender=sender,
        file_bytes=file_bytes,
        keep=keep,
    )
    return LocalWork(
        payload=contribution.payload,
        norm=math.sqrt(contribution.head.squared_norm),
        feedback={**(feedback or {}), **contribution.residual} if uses_feedback else {},
        inner=own_state(state, shared.weights, stream),
    )
