"""A learner of adapters: its memory, its learning, and that it resumes and runs on several ranks like any other."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from grailnode.engine.lora_model import LoraModel
from grailnode.engine.models import build
from grailnode.engine.output_projection import project
from grailnode.engine.policy import Policy, load_weights
from grailnode.run.base_files import lora_spec
from protocol.lora import LoraSpec
from roles.trainer.learn.learner import Learner
from roles.trainer.learn.loss.policy_loss import LossSettings
from tests.learning.groups import group
from tests.learning.rank_scenarios import SETTINGS, assert_equal, groups_of, read, train
from tests.learning.ranks import run_ranks
from tests.support.builders.policies import random_weights, write_policy
from tests.support.simulation.learning import Setup, Simulation

RANK = 4


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of a small policy."""
    return write_policy(tmp_path_factory.mktemp("policy")).directory


def spec(policy: Path) -> LoraSpec:
    return lora_spec(load_weights(policy), RANK, 8.0, ("down_proj", "q_proj"))


def model_of(policy: Path, dtype: torch.dtype = torch.float32) -> LoraModel:
    model = build(Policy.load(policy), recompute=True, lora=spec(policy))
    return LoraModel(model, load_weights(policy), dtype=dtype)


def learner_of(policy: Path, dtype: torch.dtype = torch.float32) -> Learner:
    model = model_of(policy, dtype)
    return Learner(model, random_weights(model), SETTINGS, dtype=dtype)


def test_masters_moments_and_gradients_are_those_of_the_adapters_alone(policy: Path) -> None:
    learner, base = learner_of(policy), load_weights(policy)
    adapters = sum(RANK * (out + inner) for out, inner in ((32, 32), (32, 48)) * 2)
    assert learner.parameters == adapters < sum(tensor.numel() for tensor in base.values()) / 4
    assert sum(learner.state_source().sizes.values()) == 12 * adapters
    assert sum(learner.view_source().sizes.values()) == 2 * adapters
    gradients = learner.gradients(groups_of(0))
    assert sum(tensor.numel() for tensor in gradients.tensors.values()) == adapters
    assert all(not tensor.requires_grad and tensor.grad is None for tensor in model_of(policy)._base.values())


def test_a_base_in_the_dtype_of_computing_is_not_copied(policy: Path) -> None:
    base = load_weights(policy)
    model = LoraModel(build(Policy.load(policy), lora=spec(policy)), base, dtype=torch.bfloat16)
    assert all(model._base[name].data_ptr() == tensor.data_ptr() for name, tensor in base.items())


def test_a_frozen_output_projection_has_no_gradient() -> None:
    hidden = torch.randn(3, 8, dtype=torch.bfloat16, requires_grad=True)
    frozen, trained = (torch.randn(16, 8, dtype=torch.bfloat16, requires_grad=trains) for trains in (False, True))
    for weight in (frozen, trained):
        project(hidden, weight).sum().backward()  # type: ignore[no-untyped-call]
    assert frozen.grad is None
    assert trained.grad is not None
    assert hidden.grad is not None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_good_rollouts_become_more_probable(policy: Path, dtype: torch.dtype) -> None:
    learner, one = learner_of(policy, dtype), group("a", completions=((3, 4, 1), (9, 9, 1)), rewards=(1.0, 0.0))
    before = learner.view()
    losses = [learner.step([one]).loss for _ in range(8)]
    assert losses[-1] < losses[0]
    assert any(not torch.equal(before[name], tensor) for name, tensor in learner.view().items())


def test_a_divergence_is_from_the_first_adapters(policy: Path) -> None:
    settings = replace(SETTINGS, loss=LossSettings(kl_coefficient=0.1))
    model = model_of(policy)
    learner = Learner(model, random_weights(model), settings)
    reports = [learner.step(groups_of(0)) for _ in range(3)]
    assert math.isclose(reports[0].divergence, 0.0, abs_tol=1e-6)
    assert reports[2].divergence > 1e-4


def test_training_goes_on_from_a_state_bit_for_bit(policy: Path) -> None:
    views, state = train(learner_of(policy), None, 0, 4)
    _, halfway = train(learner_of(policy), None, 0, 2)
    resumed_views, resumed = train(learner_of(policy), halfway, 2, 4)
    assert_equal(resumed_views[-1], views[-1])
    assert_equal(resumed, state)


@pytest.mark.slow
def test_two_ranks_take_the_steps_of_one_process_bit_for_bit(policy: Path) -> None:
    views, state = run_ranks(2, policy, SETTINGS, train, None, 0, 3, dtype=torch.float32, lora=spec(policy))
    expected_views, expected_state = train(learner_of(policy), None, 0, 3)
    for view, expected in zip(views, expected_views, strict=True):
        assert_equal(view, expected)
    assert_equal(state, expected_state)
    assert set(read(learner_of(policy).view_source())) == set(views[0])


def test_adapters_of_the_packaged_policy_learn_to_add() -> None:
    setup = Setup(windows=3, groups=16, groups_per_step=8, held_out=64, lag=1, learning_rate=1e-3, lora_rank=8)
    simulation = Simulation(setup)
    simulation.serve(0)
    first = simulation.pass_at_1()
    rows = [simulation.window(number) for number in range(setup.windows)]
    assert rows[-1]["pass_at_1"] > first + 0.1
