"""A learner of a quantized run computes with the weights that it publishes, and learns in its masters."""

import dataclasses
from pathlib import Path

import pytest
import torch

from grailnode.engine.models import build
from grailnode.engine.policy import Policy
from grailnode.store.memory import MemoryStore
from protocol.digest import digest_weights
from protocol.quantization import Precision, dequantize, quantize
from roles.policy.causal_model import CausalModel
from roles.trainer.learn.checkpoint_files import newest_checkpoint
from roles.trainer.learn.checkpoint_repair import repair_checkpoint
from roles.trainer.learn.learner import Learner
from roles.trainer.learn.loss.policy_loss import LossSettings
from roles.trainer.learn.optimizer import MASTER
from roles.trainer.spool import SnapshotName, put_snapshot
from roles.trainer.tensor_shards import run_inline
from tests.learning.rank_scenarios import SETTINGS, groups_of, read
from tests.support.builders.policies import random_weights, write_policy
from tests.support.simulation.learning import Setup, Simulation
from tests.support.simulation.virtual_clock import simulated

PRECISIONS: tuple[Precision, ...] = ("fp8", "int8")
DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> CausalModel:
    """Return a small model whose layers are computed again in the backward pass."""
    directory: Path = tmp_path_factory.mktemp("policy")
    write_policy(directory)
    return build(Policy.load(directory), recompute=True)


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
        masters = {
            name.removeprefix(MASTER): tensor
            for name, tensor in read(learner.state_source()).items()
            if name.startswith(MASTER)
        }
        digest = digest_weights(quantize(masters, precision))
        assert digest_weights(learner.view()) == digest == digest_weights(read(learner.view_source()))
    sizes = learner.view_source().sizes
    assert sizes == {name: tensor.nbytes for name, tensor in learner.view().items()}


def test_a_learner_goes_on_from_its_state_bit_for_bit(model: CausalModel) -> None:
    one, other = (Learner(model, random_weights(model), SETTINGS, precision="fp8") for _ in range(2))
    one.step(groups_of(0))
    other.restore(read(one.state_source()), 1)
    assert one.step(groups_of(1)) == other.step(groups_of(1))
    assert digest_weights(one.view()) == digest_weights(other.view())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_reference_policy_is_the_quantized_version_0(model: CausalModel, dtype: torch.dtype) -> None:
    settings = dataclasses.replace(SETTINGS, loss=LossSettings(kl_coefficient=0.1))
    learner = Learner(model, random_weights(model), settings, dtype=dtype, precision="int8")
    assert learner.gradients(groups_of(0)).figures.divergence == 0.0


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
    reader = note.reader(state, run_inline)
    while (tensors := await reader.next_shard()) is not None:
        other.restore(tensors, 0)
    values = [digest_weights(dequantize(one.view())) for one in (learner, other)]
    assert values[0] == values[1]


def test_masters_that_no_scale_can_represent_are_refused(model: CausalModel) -> None:
    weights = random_weights(model)
    weights["model.layers.0.mlp.up_proj.weight"][0, 0] = 2.0**80
    with pytest.raises(ValueError, match="no scale can represent"):
        Learner(model, weights, SETTINGS, precision="fp8").view()
    Learner(model, weights, SETTINGS).view()


@pytest.mark.slow
def test_the_demo_learns_in_a_quantized_run() -> None:
    """Steps that change no code add up in the masters until they change one. (`bench.quantized demo` has more.)"""
    simulation = Simulation(Setup(precision="fp8", windows=10, learning_rate=2e-5, held_out=128))
    simulation.serve(0)
    first = simulation.pass_at_1()
    for number in range(10):
        last = simulation.window(number)["pass_at_1"]
    assert min(simulation.sparsity) > 0.5
    assert last > first + 0.15
