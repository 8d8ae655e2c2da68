"""The optimizers over FP32 masters: their steps, their state, and the learning rate of each step."""

from typing import Any, get_args

import pytest
import torch

from roles.trainer.learn.optimizer import MasterOptimizer
from roles.trainer.learn.training_settings import OptimizerName, OptimizerSettings, ScheduleName

NAMES: tuple[OptimizerName, ...] = get_args(OptimizerName)
MATRIX = "model.layers.0.mlp.up_proj.weight"


def _weights() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"a": (5, 3), "b": (7,), MATRIX: (64, 96)}
    weights = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    weights["b"][0] = -0.0
    return weights


def _gradients(step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(step + 1)
    return {name: torch.randn(tensor.shape, generator=generator) for name, tensor in _weights().items()}


def copies(optimizer: MasterOptimizer) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in optimizer.tensors.items()}


def new(name: OptimizerName = "adamw", **constants: Any) -> MasterOptimizer:
    settings = OptimizerSettings(**{"optimizer": name, "learning_rate": 1e-2, "warmup_steps": 0, **constants})
    return MasterOptimizer(_weights(), settings)


@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("max_norm", [1e9, 0.5])
def test_a_tensor_at_a_time_gives_what_torch_gives_with_all_of_them(decay: float, max_norm: float) -> None:
    own = new(weight_decay=decay, max_grad_norm=max_norm)
    theirs = {name: tensor.requires_grad_() for name, tensor in _weights().items()}
    reference = torch.optim.AdamW(
        theirs.values(), lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=decay, foreach=True
    )
    for step in range(20):
        for name, gradient in _gradients(step).items():
            theirs[name].grad = gradient
        expected_norm = torch.nn.utils.clip_grad_norm_(theirs.values(), max_norm)
        reference.step()
        assert own.step(_gradients(step)) == pytest.approx(float(expected_norm), rel=1e-5)
    for name, tensor in theirs.items():
        torch.testing.assert_close(own.masters[name], tensor.detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_an_optimizer_goes_on_from_its_state_bit_for_bit(name: OptimizerName) -> None:
    """To begin changes no weight."""
    one, other = new(name, weight_decay=0.1), new(name, weight_decay=0.1)
    untouched = {weight: tensor.view(torch.int32) for weight, tensor in _weights().items()}
    assert all(torch.equal(one.masters[weight].view(torch.int32), bits) for weight, bits in untouched.items())
    for step in range(3):
        one.step(_gradients(step))
    other.restore(one.state())
    for step in range(3, 6):
        assert one.step(_gradients(step)) == other.step(_gradients(step))
    assert all(torch.equal(tensor, other.tensors[part]) for part, tensor in one.tensors.items())
    assert not any(torch.equal(one.masters[weight], tensor) for weight, tensor in _weights().items())


def test_optimizers_have_the_state_that_their_memory_is_for() -> None:
    """Muon has one moment of a layer's matrix; 8-bit moments are a byte for each element, of large tensors alone."""
    sizes = {name: sum(t.nbytes for part, t in new(name).tensors.items() if part.endswith(MATRIX)) for name in NAMES}
    elements = _weights()[MATRIX].numel()
    assert sizes["adamw"] == 12 * elements
    assert sizes["muon"] == 8 * elements
    assert 6 * elements <= sizes["adamw-8bit"] <= 6.5 * elements


def test_the_first_step_is_the_learning_rate() -> None:
    """m_hat / sqrt(v_hat) is the gradient's sign; with a warm-up of 4 steps, the first step takes a quarter."""
    own = MasterOptimizer({"w": torch.zeros(3)}, OptimizerSettings(learning_rate=0.4, warmup_steps=4))
    own.step({"w": torch.tensor([1e-3, -2e-3, 0.0])})
    torch.testing.assert_close(own.masters["w"], torch.tensor([-0.1, 0.1, 0.0]), rtol=1e-3, atol=0)


def test_small_steps_add_up_in_the_masters() -> None:
    """A hundredth of a BF16 unit in the last place changes the master, and not the view."""
    own = MasterOptimizer({"w": torch.ones(1)}, OptimizerSettings(learning_rate=2.0**-8 / 100, warmup_steps=0))
    views = []
    for _ in range(60):
        own.step({"w": torch.ones(1)})
        views.append(float(own.masters["w"].to(torch.bfloat16)))
    assert views[0] == 1.0
    assert views[-1] < 1.0
    assert len(set(views)) == 2


def test_a_state_of_another_model_is_refused_and_changes_nothing() -> None:
    optimizer = MasterOptimizer(_weights(), OptimizerSettings(learning_rate=1e-2, warmup_steps=0))
    optimizer.step(_gradients(0))
    before = copies(optimizer)
    for change in ({"master/c": torch.zeros(1)}, {"master/a": torch.zeros(1)}):
        with pytest.raises(ValueError, match="another model"):
            optimizer.restore(MasterOptimizer(_weights(), OptimizerSettings()).state() | change)
    assert optimizer.steps == 1
    assert all(torch.equal(tensor, before[name]) for name, tensor in optimizer.tensors.items())


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_infinite_gradients_are_refused_and_change_nothing(bad: float) -> None:
    optimizer = MasterOptimizer(_weights(), OptimizerSettings(learning_rate=1e-2, warmup_steps=0))
    before = copies(optimizer)
    with pytest.raises(ValueError, match="norm"):
        optimizer.step(_gradients(0) | {"b": torch.full((7,), bad)})
    assert all(torch.equal(tensor, before[name]) for name, tensor in optimizer.tensors.items())


# The learning rate of each step


@pytest.mark.parametrize(
    ("name", "final_share", "shares"),
    [
        ("constant", 0.0, [0.5, 1.0, 1.0, 1.0, 1.0]),
        ("linear", 0.0, [0.5, 1.0, 0.75, 0.5, 0.25, 0.0, 0.0]),
        ("linear", 0.2, [0.5, 1.0, 0.8, 0.6, 0.4, 0.2, 0.2]),
        ("cosine", 0.0, [0.5, 1.0, 0.853553, 0.5, 0.146447, 0.0, 0.0]),
    ],
)
def test_by_hand(name: ScheduleName, final_share: float, shares: list[float]) -> None:
    """Two steps of warm-up, then four steps down."""
    schedule = OptimizerSettings(schedule=name, warmup_steps=2, training_steps=6, final_share=final_share)
    assert [schedule.share(step + 1) for step in range(len(shares))] == pytest.approx(shares, abs=1e-6)
