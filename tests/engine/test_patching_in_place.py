"""Weights are patched in place inside of vLLM: places of tensors, commits, rollbacks. These tests need no vLLM.

The model here has a loader as vLLM's models have: fused projections, experts in a stack, a padded vocabulary.
"""

from collections.abc import Iterable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

from grailnode.engine.vllm.inside.element_changes import ElementChange
from grailnode.engine.vllm.inside.served_weights import (
    DifferentWeightsError,
    PoisonedError,
    ServedWeights,
    ServedWeightsError,
)
from grailnode.engine.vllm.inside.staging import stage_patch, stage_weights
from grailnode.engine.vllm.inside.tensor_map import UnsupportedModelError, map_tensors
from protocol.digest import digest_weights
from protocol.errors import PatchError
from protocol.patch import encode

SHAPES = {
    "q.weight": (8, 6),
    "k.weight": (4, 6),
    "v.weight": (4, 6),
    "embed.weight": (10, 6),
    "experts.0.weight": (5, 6),
    "experts.1.weight": (5, 6),
    "down.weight": (6, 12),
    "norm.weight": (6,),
}


class FusedModel(torch.nn.Module):
    """A model whose loader copies into parts of its parameters."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()

        def parameter(*shape: int) -> torch.nn.Parameter:
            return torch.nn.Parameter(torch.zeros(shape, dtype=dtype), requires_grad=False)

        self.qkv = parameter(16, 6)
        self.embed = parameter(64, 6)
        self.experts = parameter(2, 5, 6)
        self.down = parameter(6, 12)
        self.norm = parameter(6)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        rows = {"q": (0, 8), "k": (8, 4), "v": (12, 4)}
        for name, tensor in weights:
            first = name.split(".")[0]
            if first in rows:
                self.qkv.data.narrow(0, *rows[first]).copy_(tensor)
            elif first == "embed":
                self.embed[: len(tensor)].data.copy_(tensor)
                self.embed[len(tensor) :].data.fill_(0)
            elif first == "experts":
                self.experts.data[int(name.split(".")[1])].copy_(tensor)
            elif first == "down":
                self.down.data.copy_(tensor)
            elif first == "norm":
                self.norm.data.copy_(tensor)
            else:
                raise KeyError(name)


def weights_of(seed: int) -> dict[str, Tensor]:
    """Return random bit patterns: NaN payloads, infinities and negative zeros among them."""
    generator, bounds = torch.Generator().manual_seed(seed), (-(1 << 15), 1 << 15)
    words = {name: torch.randint(*bounds, shape, generator=generator) for name, shape in SHAPES.items()}
    return {name: tensor.to(torch.int16).view(torch.bfloat16) for name, tensor in words.items()}


def bits(tensor: Tensor) -> Tensor:
    return tensor.view(torch.int16)


WEIGHTS, TARGET, OTHER = (weights_of(seed) for seed in range(3))


def loaded(dtype: torch.dtype, directory: Path) -> tuple[FusedModel, ServedWeights]:
    """Return a model that serves WEIGHTS as version 0."""
    model = FusedModel(dtype)
    engine_weights = ServedWeights(map_tensors(model, SHAPES))
    save_file(WEIGHTS, directory / "weights")
    engine_weights.commit(stage_weights(engine_weights, 0, directory / "weights", digest_weights(WEIGHTS)))
    engine_weights.verify(0, digest_weights(WEIGHTS))
    return model, engine_weights


@pytest.fixture(params=[torch.bfloat16, torch.float32], ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    result: torch.dtype = request.param
    return result


def test_an_adapter_is_found_through_pinned_copies_and_verified_with_its_base(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    """On a GPU vLLM pins the tensors of an adapter before it loads them."""
    base_model, base = loaded(dtype, tmp_path)
    model = FusedModel(dtype)

    def load(tensors: Iterable[tuple[str, Tensor]]) -> None:
        model.load_weights((name, tensor.pin_memory()) for name, tensor in tensors)

    places = map_tensors(base_model, SHAPES, adapter=(load, list(model.parameters())))
    adapters = ServedWeights(places, base=base)
    adapters.commit(stage_weights(adapters, 0, tmp_path / "weights", digest_weights(WEIGHTS)))
    adapters.verify(0, digest_weights(WEIGHTS))
    base_model.norm.view(torch.int16)[1] ^= 1
    for _ in range(2):
        with pytest.raises(DifferentWeightsError, match=r"norm\.weight"):
            adapters.verify(0, digest_weights(WEIGHTS))
        assert adapters.version is None


def test_every_tensor_is_found_and_nothing_is_written(dtype: torch.dtype) -> None:
    model = FusedModel(dtype)
    for parameter in model.parameters():
        parameter.fill_(7.0)
    places = map_tensors(model, SHAPES)
    assert {name: placement.shape for name, placement in places.items()} == SHAPES
    assert all((parameter == 7.0).all() for parameter in model.parameters())


@pytest.mark.parametrize("name", ["unknown.weight", "lm_head.weight"])
def test_a_tensor_that_the_loader_does_not_know_is_refused(name: str) -> None:
    with pytest.raises(UnsupportedModelError, match=name):
        map_tensors(FusedModel(torch.bfloat16), SHAPES | {name: (3, 3)})


def test_a_loader_that_computes_is_refused_by_tensor() -> None:
    class ComputingModel(FusedModel):
        def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
            super().load_weights((name, tensor + 1 if name == "norm.weight" else tensor) for name, tensor in weights)

    with pytest.raises(UnsupportedModelError, match=r"norm\.weight.*0 of 6"):
        map_tensors(ComputingModel(torch.bfloat16), SHAPES)


def test_quantized_parameters_are_refused_by_name() -> None:
    model = FusedModel(torch.bfloat16)
    model.norm = torch.nn.Parameter(torch.zeros(6, dtype=torch.float8_e4m3fn), requires_grad=False)
    with pytest.raises(UnsupportedModelError, match=r"norm\.weight: it is served as torch\.float8_e4m3fn"):
        map_tensors(model, SHAPES)


@given(st.integers(0, 1000), st.floats(0.0, 1.0))
def test_a_patch_is_committed_and_undone_bit_by_bit(seed: int, share: float) -> None:
    weights, other = weights_of(seed), weights_of(seed + 1)
    generator = torch.Generator().manual_seed(seed)
    target = {}
    for name, tensor in weights.items():
        is_changed = torch.rand(tensor.shape, generator=generator) < share
        target[name] = torch.where(is_changed, bits(other[name]), bits(tensor)).view(torch.bfloat16)
    model = FusedModel(torch.float32)
    engine_weights = ServedWeights(map_tensors(model, SHAPES))
    for name, tensor in weights.items():
        for piece in engine_weights.placements[name].pieces:
            piece.view.copy_(piece.source_view(bits(tensor)).to(torch.int32) << 16)
    engine_weights.verify(0, digest_weights(weights))
    engine_weights.commit(stage_patch(engine_weights, 1, encode(weights, target), digest_weights(target)))
    assert engine_weights.version == 1
    engine_weights.verify(1, digest_weights(target))
    engine_weights.commit(stage_patch(engine_weights, 2, encode(target, weights), digest_weights(weights)))
    engine_weights.verify(2, digest_weights(weights))


class FailingChange:
    """A change that fails when it is swapped in; `undo` works or not."""

    def __init__(self, undo_works: bool) -> None:
        self.places = self.target = torch.zeros(0)
        self._undo_works = undo_works

    def swap(self) -> None:
        raise RuntimeError("out of memory")

    def undo(self) -> None:
        if not self._undo_works:
            raise RuntimeError("out of memory again")


def test_a_commit_that_fails_is_undone(dtype: torch.dtype, tmp_path: Path) -> None:
    _, engine_weights = loaded(dtype, tmp_path)
    staged = stage_patch(engine_weights, 1, encode(WEIGHTS, TARGET), digest_weights(TARGET))
    staged.changes.insert(len(staged.changes) // 2, FailingChange(True))  # type: ignore[arg-type]
    with pytest.raises(ServedWeightsError, match="undone: out of memory"):
        engine_weights.commit(staged)
    assert engine_weights.version == 0
    engine_weights.verify(0, digest_weights(WEIGHTS))
    engine_weights.commit(stage_patch(engine_weights, 1, encode(WEIGHTS, TARGET), digest_weights(TARGET)))
    engine_weights.verify(1, digest_weights(TARGET))


def test_weights_that_cannot_be_restored_are_poisoned(dtype: torch.dtype, tmp_path: Path) -> None:
    _, engine_weights = loaded(dtype, tmp_path)
    staged = stage_patch(engine_weights, 1, encode(WEIGHTS, TARGET), digest_weights(TARGET))
    staged.changes.append(FailingChange(False))  # type: ignore[arg-type]
    with pytest.raises(PoisonedError, match="reload them"):
        engine_weights.commit(staged)
    assert engine_weights.version is None
    with pytest.raises(PoisonedError):
        engine_weights.commit(stage_weights(engine_weights, 0, tmp_path / "weights", digest_weights(WEIGHTS)))


class ParameterOnGpu(Tensor):
    """A parameter that says that it is on a GPU, where torch exchanges elements, and of which one write may fail."""

    device = torch.device("cuda")
    fails = False

    def __setitem__(self, places: Any, values: Any) -> None:
        written = slice(1 if self.fails else None)
        super().__setitem__(places[written], values[written])
        if self.fails:
            self.fails = False
            raise RuntimeError("out of memory")


@pytest.mark.parametrize("fails", [False, True])
def test_elements_on_a_gpu_are_exchanged_and_come_back(fails: bool) -> None:
    before = torch.arange(6, dtype=torch.int16)
    target = before.clone().as_subclass(ParameterOnGpu)
    change = ElementChange(target, torch.tensor([4, 1]), torch.tensor([40, 10], dtype=torch.int16))
    target.fails = fails
    with pytest.raises(RuntimeError, match="out of memory") if fails else nullcontext():
        change.swap()
    assert target.tolist() == ([0, 1, 2, 3, 40, 5] if fails else [0, 10, 2, 3, 40, 5])
    change.undo()
    assert target.tolist() == before.tolist()


def test_a_patch_for_other_weights_is_refused(tmp_path: Path) -> None:
    _, engine_weights = loaded(torch.bfloat16, tmp_path)
    with pytest.raises(PatchError, match="other weights"):
        stage_patch(engine_weights, 1, encode(OTHER, TARGET), digest_weights(TARGET))
    with pytest.raises(PatchError, match="not the patch of this version"):
        stage_patch(engine_weights, 1, encode(WEIGHTS, TARGET), digest_weights(OTHER))


def test_weights_that_were_changed_behind_our_back_are_found(dtype: torch.dtype, tmp_path: Path) -> None:
    model, engine_weights = loaded(dtype, tmp_path)
    words, bit = (torch.int16, 0) if dtype == torch.bfloat16 else (torch.int32, 16)
    model.qkv.view(words)[9, 2] ^= 1 << bit
    model.norm.view(words)[0] ^= 1  # in float32 no BF16 number
    line = r"differ from version 0 in 2 tensors: k\.weight, norm\.weight"
    with pytest.raises(DifferentWeightsError, match=line) as error_info:
        engine_weights.verify(0, digest_weights(WEIGHTS))
    assert error_info.value.tensors == ("k.weight", "norm.weight")
    assert engine_weights.version is None


def test_whole_weights_that_differ_little_are_staged_as_changes(tmp_path: Path) -> None:
    _, engine_weights = loaded(torch.bfloat16, tmp_path)
    target = {name: tensor.clone() for name, tensor in WEIGHTS.items()}
    bits(target["q.weight"])[3, 3] ^= 1
    save_file(target, tmp_path / "next")
    staged = stage_weights(engine_weights, 1, tmp_path / "next", digest_weights(target))
    assert sum(len(change.places) for change in staged.changes) == 1
    assert not staged.tensors
    engine_weights.commit(staged)
    engine_weights.verify(1, digest_weights(target))
