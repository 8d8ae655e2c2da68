"""The narrow interface between a learner and the outer optimizer: a learner is a state and a step.

`roles.trainer.learn.learner.Learner` has it. The FP32 masters in its state begin each round as the shared weights; the
rest of it, such as the moments, belongs to the site and goes on from round to round. Where weights are sent in streams,
so does what local steps have changed in the weights that were not sent.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Final, Protocol

from torch import Tensor

from protocol.digest import Weights
from roles.trainer.verified_batch import VerifiedGroup

MASTER: Final = "master/"
"""The prefix of the FP32 masters' names in a learner's state."""

AHEAD: Final = "ahead/"
"""The prefix, in a site's own state, of how far its weights are from the shared ones where they were not sent yet."""


State = Mapping[str, Tensor]
"""The state of a learner, by name."""


class StepFigures(Protocol):
    """The figures of a local step that a site reports: the gradient's L2 norm is that before clipping."""

    @property
    def loss(self) -> float: ...

    @property
    def grad_norm(self) -> float: ...

    @property
    def reward(self) -> float: ...


class LocalLearner(Protocol):
    """What takes the local steps of a site."""

    def step(self, groups: Sequence[VerifiedGroup]) -> StepFigures:
        """Take one optimizer step.

        Raises:
            ValueError: a gradient is not finite; nothing has changed.
        """

    def state(self) -> dict[str, Tensor]:
        """Return masters and everything else by name: CPU tensors that nobody else changes."""

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Go on from a state."""


def masters(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the FP32 weights in a learner's state."""
    return {name.removeprefix(MASTER): tensor for name, tensor in state.items() if name.startswith(MASTER)}


def with_masters(state: Mapping[str, Tensor], weights: Weights) -> dict[str, Tensor]:
    """Return a learner's state with other FP32 weights."""
    return {**state, **{MASTER + name: tensor for name, tensor in weights.items()}}


def begin_round(own: State, shared: Weights) -> dict[str, Tensor]:
    """Return the state of a learner with which a site's round begins.

    Its own part is what `own_state` returned for the site's newest contribution that counts, or a new learner's state.
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
