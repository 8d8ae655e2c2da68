"""Steps that are taken on one rank and on several, to be compared."""

from collections.abc import Mapping

import torch
from torch import Tensor

from roles.trainer.learn.learner import LearnerSettings
from roles.trainer.learn.optimizer_settings import AdamWSettings
from roles.trainer.learn.policy_learner import PolicyLearner
from roles.trainer.tensor_shards import TensorSource
from roles.trainer.verified_batch import VerifiedGroup
from tests.learning.groups import group

SETTINGS = LearnerSettings(
    max_batch_tokens=20, optimizer=AdamWSettings(learning_rate=1e-3, max_grad_norm=0.5, warmup_steps=0)
)
"""With these a step of 4 rollouts has two passes, and gradients are clipped."""

Tensors = Mapping[str, Tensor]


def groups_of(step: int) -> list[VerifiedGroup]:
    """Return the groups of a step."""
    first = group(f"a{step}", completions=((3, 4, 1), (4, 9, 1)), rewards=(1.0, 0.0))
    second = group(f"b{step}", completions=((7, 7, 5, 8, 1), (12, 13, 4, 1)), rewards=(0.0, 1.0))
    return [first, second]


def read(source: TensorSource) -> dict[str, Tensor]:
    """Return copies of all tensors of a source."""
    return {name: source.read([name])[name].clone() for name in sorted(source.sizes)}


def train(learner: PolicyLearner, state: Tensors | None, first: int, last: int) -> tuple[list[Tensors], Tensors]:
    """Take steps from a state, or from the start; return the view after each, and the last state."""
    if state is not None:
        for name, tensor in state.items():
            learner.restore({name: tensor}, first)
    views: list[Tensors] = []
    for step in range(first, last):
        learner.update(learner.gradients(groups_of(step)))
        views.append(read(learner.view_source()))
    return views, read(learner.state_source())


def assert_equal(one: Tensors, other: Tensors) -> None:
    """Compare tensors by name, bit for bit."""
    assert one.keys() == other.keys()
    assert [name for name, tensor in one.items() if not torch.equal(tensor, other[name])] == []
