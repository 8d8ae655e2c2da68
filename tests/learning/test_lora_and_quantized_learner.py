"""Learners of adapters and of quantized weights: their memory, what they publish, their learning, and that they resume
and run on several ranks like any other.
"""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
import trio

from grailnode.engine.lora_model import LoraModel
from grailnode.engine.models import build
from grailnode.engine.output_projection import project
from grailnode.engine.policy import Policy, load_weights
from grailnode.run.base_files import lora_spec
from grailnode.store.local import LocalStore
from grailnode.store.memory import MemoryStore
from protocol.digest import digest_weights
from protocol.lora import LoraSpec
from protocol.outer.local_work import masters
from protocol.quantization import Precision, dequantize, quantize
from roles.policy.causal_model import CausalModel
from roles.trainer.learn.checkpoint_files import newest_checkpoint, repair_checkpoint
from roles.trainer.learn.learner import Learner
from roles.trainer.learn.loss.loss_settings import LossSettings
from roles.trainer.spool import SnapshotName, put_snapshot
from roles.trainer.tensor_shards import run_inline
from tests.support.builders.policies import random_weights, write_policy
from tests.support.processes.ranks import (
    SETTINGS,
    Tensors,
    assert_equal,
    assert_same_run,
    groups_of,
    read,
    run_ranks,
    train,
)
from tests.support.simulation.learning import Setup, run
from tests.support.simulation.virtual_clock import simulated

RANK = 4
PRECISIONS: tuple[Precision, ...] = ("fp8", "int8")
DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_policy(tmp_path_factory.mktemp("policy")).directory


@pytest.fixture(scope="module")
def model(policy: Path) -> CausalModel:
    """Return the policy's model, whose layers are computed again in the backward pass."""
    return build(Policy.load(policy), recompute=True)


def spec(policy: Path) -> LoraSpec:
    return lora_spec(load_weights(policy), RANK, 8.0, ("down_proj", "q_proj"))


def lora_model(policy: Path, dtype: torch.dtype = torch.float32) -> LoraModel:
    return LoraModel(build(Policy.load(policy), recompute=True, lora=spec(policy)), load_weights(policy), dtype=dtype)


def learner_of(policy: Path, kind: Any, dtype: torch.dtype = torch.float32, **settings: Any) -> Learner:
    """Return a learner of adapters ("lora"), or of all weights in a precision."""
    model = lora_model(policy, dtype) if kind == "lora" else build(Policy.load(policy), recompute=True)
    precision: Precision = "bf16" if kind == "lora" else kind
    changed = dataclasses.replace(SETTINGS, **settings)
    return Learner(model, random_weights(model), changed, dtype=dtype, precision=precision)


@pytest.mark.parametrize("kind", ["bf16", "lora", "fp8", "int8"])
def test_training_goes_on_from_a_state_bit_for_bit(policy: Path, kind: str) -> None:
    views, state = train(learner_of(policy, kind), None, 0, 4)
    _, halfway = train(learner_of(policy, kind), None, 0, 2)
    resumed_views, resumed = train(learner_of(policy, kind), halfway, 2, 4)
    assert digest_weights(resumed_views[-1]) == digest_weights(views[-1])
    assert_equal(resumed, state)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["lora", "fp8", "int8"])
def test_a_divergence_is_from_the_first_version(policy: Path, kind: str, dtype: torch.dtype) -> None:
    learner = learner_of(policy, kind, dtype, loss=LossSettings(kl_coefficient=0.1))
    reports = [learner.step(groups_of(0)) for _ in range(3)]
    assert reports[0].divergence == pytest.approx(0.0, abs=1e-6 if kind == "lora" else 0.0)
    assert reports[2].divergence > 1e-4


# Adapters


def test_masters_moments_and_gradients_are_those_of_the_adapters_alone(policy: Path) -> None:
    learner, base = learner_of(policy, "lora"), load_weights(policy)
    adapters = sum(RANK * (out + inner) for out, inner in ((32, 32), (32, 48)) * 2)
    assert learner.parameters == adapters < sum(tensor.numel() for tensor in base.values()) / 4
    assert sum(learner.state_rows().source().sizes.values()) == 12 * adapters
    assert sum(learner.view_source().sizes.values()) == 2 * adapters
    gradients = learner.gradients(groups_of(0))
    assert sum(tensor.numel() for tensor in gradients.tensors.values()) == adapters
    assert all(not tensor.requires_grad and tensor.grad is None for tensor in lora_model(policy)._base.values())


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


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["lora", "fp8", "int8"])
def test_two_ranks_take_the_steps_of_one_process_bit_for_bit(policy: Path, kind: str) -> None:
    settings = dataclasses.replace(SETTINGS, loss=LossSettings(kl_coefficient=0.1))
    options: dict[str, Any] = {"lora": spec(policy)} if kind == "lora" else {"precision": kind}
    trained = run_ranks(2, policy, settings, train, None, 0, 3, **options)
    assert_same_run(trained, train(learner_of(policy, kind, loss=settings.loss), None, 0, 3))


def test_adapters_of_the_packaged_policy_learn_to_add() -> None:
    setup = Setup(windows=3, groups=16, groups_per_step=8, held_out=64, lag=1, learning_rate=1e-3, lora_rank=8)
    assert run(setup, print)["rise"] > 0.1


# Quantized weights


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_gradients_are_those_at_the_published_weights(
    model: CausalModel, precision: Precision, dtype: torch.dtype
) -> None:
    """A learner of BF16 weights that begins with the published values has the same gradients."""
    weights = random_weights(model)
    quantized = Learner(model, weights, SETTINGS, dtype=dtype, precision=precision)
    plain = Learner(model, dequantize(quantize(weights, precision)), SETTINGS, dtype=dtype)
    one, other = (learner.gradients(groups_of(0)) for learner in (quantized, plain))
    assert one.figures == other.figures
    assert [name for name, tensor in one.tensors.items() if not torch.equal(tensor, other.tensors[name])] == []


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_each_view_is_the_quantization_of_the_masters(
    model: CausalModel, precision: Precision, dtype: torch.dtype
) -> None:
    learner = Learner(model, random_weights(model), SETTINGS, dtype=dtype, precision=precision)
    for step in range(3):
        learner.step(groups_of(step))
        digest = digest_weights(quantize(masters(learner.state()), precision))
        assert digest_weights(learner.view()) == digest == digest_weights(read(learner.view_source()))
    sizes = learner.view_source().sizes
    assert sizes == {name: tensor.nbytes for name, tensor in learner.view().items()}


@pytest.mark.parametrize("precision", PRECISIONS)
@simulated
async def test_masters_that_are_made_from_a_version_give_that_version(model: CausalModel, precision: Precision) -> None:
    state = MemoryStore()
    learner = Learner(model, random_weights(model), SETTINGS, precision=precision)
    await put_snapshot(state, SnapshotName(1, 1), learner.view_source(), run_inline, 4096)
    await repair_checkpoint(state, lambda line: None, chain_is_rebuilt=False)
    note = await newest_checkpoint(state)
    assert note is not None
    other = Learner(model, random_weights(model, seed=1), SETTINGS, precision=precision)
    await other.load(state, note.rows, run_inline)
    values = [digest_weights(dequantize(one.view())) for one in (learner, other)]
    assert values[0] == values[1]


def refuse(learner: Learner, host: Path) -> tuple[list[str], tuple[list[Tensors], Tensors]]:
    """Give a learner masters that no scale can represent, in the rows of either rank; then take a step without them."""
    errors, state, name = [], learner.state(), "master/model.layers.0.mlp.up_proj.weight"

    def save() -> None:
        trio.run(learner.save, LocalStore(host), trio.to_thread.run_sync, 4096, "checkpoints/refused/", "")

    for row in (0, -1):
        large = state[name].clone()
        large[row, 0] = 2.0**80
        learner.restore(state | {name: large})
        for attempt in (lambda: read(learner.view_source()), lambda: learner.gradients(groups_of(0)), save):
            try:
                attempt()
            except ValueError as error:
                errors.append(str(error))
    return errors, train(learner, state, 0, 1)


def test_masters_that_no_scale_can_represent_are_refused_by_one_process_and_by_ranks_and_not_saved(
    policy: Path, tmp_path: Path
) -> None:
    hosts = [tmp_path / "a", tmp_path / "b"]
    refusals = [
        refuse(learner_of(policy, "fp8"), tmp_path / "alone"),
        run_ranks(2, policy, SETTINGS, refuse, hosts[0], precision="fp8", states=hosts),
    ]
    assert [errors for errors, _ in refusals] == [["a weight of 1.20893e+24, which no scale can represent"] * 6] * 2
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
    assert_same_run(refusals[0][1], refusals[1][1])


@pytest.mark.slow
def test_the_demo_learns_in_a_quantized_run() -> None:
    """Steps that change no code add up in the masters until they change one. (`bench.quantized demo` has more.)"""
    summary = run(Setup(precision="fp8", windows=10, learning_rate=2e-5, held_out=128), print)
    assert summary["sparsity_min"] > 0.5
    assert summary["rise"] > 0.15
