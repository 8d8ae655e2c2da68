"""A model whose weights are low-rank adapters; the base, which never changes, is a part of the model.

    y = W x + alpha / rank * B (A x)

is computed as it stands, in the dtype of computing, and as PEFT computes it. W + alpha / rank * B A would have to be
rounded to BF16, in which most of a small change is lost: it is another function (docs/spec/lora.md).

As files, adapters are a directory in the layout of PEFT, whose tensors are those of the chain under the same names.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from copy import copy
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional

from grailnode.engine.int8_copy import int8_copy
from grailnode.engine.policy import PolicyError
from protocol.chain import safetensors
from protocol.digest import Weights, digest_weights
from protocol.lora import DOWN, PREFIX, UP, LoraSpec
from protocol.quantization import dequantize
from roles.policy.causal_model import Cache, CausalModel
from roles.policy.layer_weights import PartialWeights, compute_part

CONFIG: Final = "adapter_config.json"
WEIGHTS: Final = "adapter_model.safetensors"
_SEED: Final = 0
_LISTED: Final = 8


class LoraModel:
    """A CausalModel (roles/policy/causal_model.py) whose weights are the adapters, by PEFT's names."""

    def __init__(
        self,
        model: CausalModel,
        base: Mapping[str, Tensor],
        device: torch.device | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self._model = model
        self.exact, self.vocabulary = model.exact, model.vocabulary
        self.layers = tuple(PREFIX + layer for layer in model.layers)
        self.shapes = published_adapters(model.shapes)
        # Before anything is copied: a base with other tensors would fail in the middle of a forward pass.
        check_base(base, model.shapes)
        places = model.places(dtype, device or torch.device("cpu"))
        self._base: Mapping[str, Tensor] = dequantize(base, dtype, device, places)

    @property
    def base(self) -> dict[str, Tensor]:
        """The weights of the base in BF16, by the names of its files."""
        return {name: tensor.to(torch.bfloat16) for name, tensor in self._base.items()}

    def inner(self, adapters: Weights) -> tuple[CausalModel, dict[str, Tensor]]:
        """Return the model whose weights are base and adapters together, and these weights in BF16."""
        return self._model, self.base | {name.removeprefix(PREFIX): tensor for name, tensor in adapters.items()}

    def with_int8_base(self) -> "LoraModel":
        """Return the model on an 8-bit copy of its base; adapters stay as they are."""
        # A shallow copy: module, shapes and adapters' names are shared.
        model = copy(self)
        model._base = int8_copy(self._base)
        return model

    def cache(self) -> Cache:
        return self._model.cache()

    def places(self, dtype: torch.dtype, device: torch.device) -> dict[str, Tensor]:
        return {}

    def hidden(self, weights: Mapping[str, Tensor], ids: Tensor, mask: Tensor, cache: Any = None) -> Tensor:
        return self._model.hidden(_BaseAndAdapters(self._base, weights), ids, mask, cache)

    def logits(self, weights: Mapping[str, Tensor], hidden: Tensor) -> Tensor:
        return self._model.logits(_BaseAndAdapters(self._base, weights), hidden)


class _BaseAndAdapters(PartialWeights):
    """The weights of base and adapters, by the names of the modules; the adapters may be partial weights."""

    def __init__(self, base: Mapping[str, Tensor], adapters: Mapping[str, Tensor]) -> None:
        self._base = base
        self._adapters = adapters
        self.fused: Mapping[str, Tensor] = getattr(base, "fused", {})  # of checkpoint_names.py

    def __getitem__(self, name: str) -> Tensor:
        # Names of base and adapters do not overlap: those of adapters end with lora_A or lora_B.
        tensor = self._base.get(name)
        return self._adapters[PREFIX + name] if tensor is None else tensor

    def __iter__(self) -> Iterator[str]:
        yield from self._base
        for name in self._adapters:
            yield name.removeprefix(PREFIX)

    def __len__(self) -> int:
        return len(self._base) + len(self._adapters)

    def within(self, prefix: str, compute: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        # Only adapters can be partial; the base is whole on each rank.
        return compute_part(self._adapters, PREFIX + prefix if prefix else "", compute, *arguments, **options)


class LowRankLinear(nn.Module):
    """A linear module with an adapter, whose parameters have PEFT's names; it takes over those of the linear module."""

    def __init__(self, linear: nn.Linear, lora: LoraSpec) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias = linear.weight, linear.bias
        self.lora_A = nn.Linear(linear.in_features, lora.rank, bias=False, device=linear.weight.device)
        self.lora_B = nn.Linear(lora.rank, linear.out_features, bias=False, device=linear.weight.device)
        self._scale = lora.scale

    def forward(self, x: Tensor) -> Tensor:
        """Compute base and adapter: [..., out] from [..., in]."""
        result = functional.linear(x, self.weight, self.bias)
        return add_adapter(result, x, self.lora_A.weight, self.lora_B.weight, self._scale)


def add_adapter(result: Tensor, x: Tensor, down: Tensor, up: Tensor, scale: float) -> Tensor:
    """Return a module's output with its adapter: [..., out] from x [..., in], A [rank, in] and B [out, rank]."""
    # Two thin products instead of B A, which would be as large as the matrix.
    return result + functional.linear(functional.linear(x, down), up) * scale


def adapter_shapes(lora: LoraSpec, linears: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the adapters' tensors by name, without PEFT's prefix; PolicyError if a target is no linear
    module, or the rank is larger than one of its dimensions.

    `linears` has the shape [out, in] of the matrix of each linear module inside the model's layers, by the module's
    name.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    for module, (rows, columns) in sorted(linears.items()):
        if not lora.is_target(module):
            # The endings of names decide, as in PEFT, so that one target stands for the module of every layer.
            continue
        if lora.rank > min(rows, columns):
            raise PolicyError(
                f"LoRA rank {lora.rank} is more than {module} has ({rows} x {columns}): train all weights instead, or "
                "lower the rank"
            )
        shapes |= {module + DOWN: (lora.rank, columns), module + UP: (rows, lora.rank)}
    # A target that matches nothing is a misspelling, which would train less than the founder meant.
    for target in lora.targets:
        if not any(module == target or module.endswith(f".{target}") for module in linears):
            ends = sorted({module.rpartition(".")[2] for module in linears})
            names = f"{', '.join(ends[:_LISTED])}{', ...' if len(ends) > _LISTED else ''}" if ends else "none"
            raise PolicyError(f"LoRA target {target!r} is no linear module of this model's layers; they are: {names}")
    return shapes


def check_base(base: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raise PolicyError if a tensor is missing, unknown or of another shape than in the model with its adapters."""
    expected = {name: shape for name, shape in shapes.items() if not name.endswith((DOWN, UP))}
    for name in sorted(base.keys() | expected.keys()):
        shape = tuple(base[name].shape) if name in base else None
        if shape != expected.get(name):
            raise PolicyError(f"the base's {name} has shape {shape} where the model has {expected.get(name)}")


def check_base_digest(base: Weights, lora: LoraSpec, where: str) -> None:
    """Raise PolicyError if weights are not the base that a run names."""
    digest = digest_weights(base)
    if digest != lora.base:
        raise PolicyError(
            f"{where}: weights {digest.hex()[:16]}, and this run's adapters are for the base {lora.base.hex()[:16]}"
        )


def initial_adapters(shapes: Mapping[str, tuple[int, ...]], *, without_effect: bool = True) -> dict[str, Tensor]:
    """Return BF16 adapters: A uniform in +-1 / sqrt(in) as by PEFT, and B zero, or drawn as well for an effect."""
    # A fixed seed: all founders of a run with the same base get the same version 0.
    generator = torch.Generator().manual_seed(_SEED)
    adapters: dict[str, Tensor] = {}
    for name, shape in sorted(shapes.items()):
        if without_effect and name.endswith(UP):
            adapters[name] = torch.zeros(shape, dtype=torch.bfloat16)
        else:
            bound = shape[1] ** -0.5
            adapters[name] = torch.empty(shape).uniform_(-bound, bound, generator=generator).to(torch.bfloat16)
    return adapters


def merged_weights(base: Weights, adapters: Weights, scale: float) -> dict[str, Tensor]:
    """Return weights W + scale * B A of the base's dtype, computed in float32 and rounded once."""
    weights = dict(base)
    for name in (name for name in adapters if name.endswith(DOWN)):
        module = name.removesuffix(DOWN)
        down, up = adapters[name].to(torch.float32), adapters[module + UP].to(torch.float32)
        matrix = f"{module.removeprefix(PREFIX)}.weight"
        # The order of base and product is that of the forward pass; the sum is rounded once, to the dtype of the base.
        weights[matrix] = (base[matrix].to(torch.float32) + up @ down * scale).to(base[matrix].dtype)
    return weights


def adapter_files(lora: LoraSpec, adapters: Weights) -> dict[str, bytes]:
    """Return the files of a run's adapters by name. PEFT needs no more in the config than is here."""
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": None,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "target_modules": list(lora.targets),
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": True,
    }
    return {CONFIG: (json.dumps(config, indent=2) + "\n").encode(), WEIGHTS: safetensors.write(adapters)}


def published_adapters(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Return the adapters among the shapes of a model's tensors, by PEFT's names."""
    return {PREFIX + name: shape for name, shape in shapes.items() if name.endswith((DOWN, UP))}


def read_adapters(directory: Path) -> dict[str, Tensor]:
    """Return adapters, BF16, by PEFT's names; PolicyError if the file is missing, broken or of another dtype."""
    path = directory / WEIGHTS
    try:
        adapters = load_file(path)
    except (OSError, SafetensorError) as error:
        raise PolicyError(f"{path}: cannot be read as safetensors ({error}); `grailnode init` wrote it") from error
    for name, tensor in adapters.items():
        if tensor.dtype != torch.bfloat16:
            raise PolicyError(f"{path}: {name} has dtype {tensor.dtype}, and adapters of a run are BF16")
    return {name: adapters[name] for name in sorted(adapters)}
