"""The names of a model's tensors: those of its files, and those of transformers' modules.

A run's weights have the names of the checkpoint's files, as vLLM expects them. For some families transformers' modules
have other names, and one tensor for all experts of a layer. Here the files' tensors become the modules'.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor


@dataclass(frozen=True)
class _Experts:
    """How a family's files name a layer's router and experts, which the modules call "mlp", and its matrices."""

    block: str
    gate: str
    up: str
    down: str


_ONE_BY_ONE: Final = _Experts("mlp", "gate_proj", "up_proj", "down_proj")
_EXPERTS: Final = {
    "qwen2_moe": _ONE_BY_ONE,
    "qwen3_moe": _ONE_BY_ONE,
    "olmoe": _ONE_BY_ONE,
    "mixtral": _Experts("block_sparse_moe", "w1", "w3", "w2"),
}
_HEADS: Final = {"gpt_neox": "embed_out.weight"}
"""The name of the output projection in the files, where it is not the module's."""

_fused: Final = re.compile(r"(?P<block>.*\.mlp\.)experts\.(?P<part>gate_up_proj|down_proj)")


class FusedWeights(dict[str, Tensor]):
    """Weights by the names of files. Experts are views of the modules' tensors, so that they are in memory once."""

    def __init__(self) -> None:
        super().__init__()
        self.fused: dict[str, Tensor] = {}
        """The modules' tensors of experts, by their names there."""


class CheckpointNames:
    """The names of one model."""

    def __init__(self, family: str, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self._experts = _EXPERTS.get(family)
        self._head = _HEADS.get(family)
        self._module_shapes = shapes
        self._parts = {name: self._files_of(name, shape) for name, shape in shapes.items()}
        self.shapes: dict[str, tuple[int, ...]] = {}
        """The shapes of the files' tensors, by name."""
        for name, files in self._parts.items():
            self.shapes |= dict.fromkeys(files, self._file_shape(name, shapes[name]))

    def places(self, dtype: torch.dtype, device: torch.device) -> FusedWeights:
        """Return tensors for the experts, by the names of files, with any elements. No copies are made of weights that
        have these: they are views of the modules' tensors.
        """
        places = FusedWeights()
        for name, files in self._parts.items():
            if len(files) > 1:
                places.fused[name] = torch.empty(self._module_shapes[name], dtype=dtype, device=device)
                places |= self.file_weights({name: places.fused[name]})
        return places

    def file_weights(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the files' tensors of weights that may have the modules' names, as in a state dict: experts are views.
        Other names stay. ValueError if experts have another shape.
        """
        result = dict[str, Tensor]()
        for name, tensor in weights.items():
            files = self._parts.get(name, [name])
            if self._experts is None or name not in self._parts or _fused.fullmatch(name) is None:
                result[files[0]] = tensor
            elif (shape := tuple(tensor.shape)) != self._module_shapes[name]:
                raise ValueError(f"{name}: shape {shape} where the model has {self._module_shapes[name]}")
            else:
                matrices = tensor.chunk(len(files) // len(tensor), dim=1)
                result.update(zip(files, (expert for matrix in matrices for expert in matrix), strict=True))
        return result

    def module_weights(self, weights: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return the modules' tensors from the files' tensors; gradients flow to these."""
        return weights if self._experts is None and self._head is None else self.module_part(weights, self._parts)

    def module_part(self, weights: Mapping[str, Tensor], names: Iterable[str]) -> dict[str, Tensor]:
        """Return some of the modules' tensors; only the files' tensors that they are made of are read. Experts are
        copies, unless they lie in `places`.
        """
        fused: Mapping[str, Tensor] = getattr(weights, "fused", {})
        return {
            name: fused[name] if name in fused else _module_tensor(name, [weights[file] for file in self._parts[name]])
            for name in names
        }

    def file_of(self, name: str) -> str:
        """Return the name in the files of a parameter that is one tensor there."""
        return self._parts[name][0]

    def _files_of(self, name: str, shape: tuple[int, ...]) -> list[str]:
        """Return the names of the tensors that make a parameter: all gates before all ups, expert after expert."""
        if self._head is not None and name == "lm_head.weight":
            return [self._head]
        experts = self._experts
        if experts is None:
            return [name]
        # The modules of all these families call the block "mlp"; files have the family's own name.
        block = name.replace(".mlp.", f".{experts.block}.", 1)
        fused = _fused.fullmatch(name)
        if fused is None:
            return [block]
        prefix = fused["block"].replace(".mlp.", f".{experts.block}.", 1)
        matrices = (experts.down,) if fused["part"] == "down_proj" else (experts.gate, experts.up)
        return [f"{prefix}experts.{index}.{matrix}.weight" for matrix in matrices for index in range(shape[0])]

    def _file_shape(self, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        if self._experts is None or _fused.fullmatch(name) is None:
            return shape
        # A fused matrix has the gate's rows, then those of up.
        _, rows, columns = shape
        return (rows // 2, columns) if name.endswith("gate_up_proj") else (rows, columns)


def _module_tensor(name: str, tensors: list[Tensor]) -> Tensor:
    """Return a parameter from its tensors: itself, [E, D, F] from E matrices, or [E, 2F, D] from E gates and E ups."""
    if len(tensors) == 1 and "experts." not in name:
        return tensors[0]
    if not name.endswith("gate_up_proj"):
        return torch.stack(tensors)
    half = len(tensors) // 2
    return torch.cat([torch.stack(tensors[:half]), torch.stack(tensors[half:])], dim=1)
