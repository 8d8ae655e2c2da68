"""Chooses the model of a policy: `qwen3.Qwen3`, which does not need transformers; `hf.TransformersModel`, any other
causal language model of transformers; or `exact_qwen3.ExactQwen3` in exact arithmetic.

`check_model` tries a policy before a run is created with it: a model that fails only at its first use would leave a run
that is published and that no miner can work in.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Final

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from grailnode.engine.policy import Policy, PolicyError, published_names, weight_files
from grailnode.engine.qwen3 import Attention, Qwen3, Qwen3Config
from protocol.lora import LoraSpec
from protocol.quantization import is_scale
from roles.policy.causal_model import CausalModel
from roles.ports import EngineError

_LISTED: Final = 3


def check_fit(shapes: Mapping[str, tuple[int, ...]], weights: Mapping[str, Tensor]) -> None:
    """Raise EngineError if a version has other tensors than a model, whose shapes have no scales of codes."""
    tensors = {name: tensor for name, tensor in weights.items() if not is_scale(name, weights)}
    if tensors.keys() != shapes.keys():
        # The first one by name, so that all nodes say the same.
        name = min(tensors.keys() ^ shapes.keys())
        raise EngineError(f"{name}: {'unknown to the model' if name in tensors else 'missing from the weights'}")
    for name, tensor in tensors.items():
        if tuple(tensor.shape) != shapes[name]:
            raise EngineError(f"{name}: shape {tuple(tensor.shape)} where the model has {shapes[name]}")


def build(
    policy: Policy,
    device: torch.device | None = None,
    attention: Attention = "sdpa",
    *,
    recompute: bool = False,
    lora: LoraSpec | None = None,
) -> CausalModel:
    """Return the model of a policy's config.json, without reading weights; `recompute` saves the memory of activations.

    transformers is imported only if the Qwen3 of this repository does not cover the config: the import takes seconds.
    """
    config = Qwen3Config.of(policy.config)
    if config is not None:
        return Qwen3(config, device, attention, recompute=recompute, lora=lora)
    from grailnode.engine.hf import TransformersModel  # noqa: PLC0415

    return TransformersModel(policy.directory, device, attention, recompute=recompute, lora=lora)


def build_exact(policy: Policy) -> CausalModel:
    """Return a policy's model in exact arithmetic (docs/spec/numerics.md); PolicyError if that does not cover it."""
    config = Qwen3Config.of(policy.config)
    if config is None:
        raise PolicyError(
            f"{policy.directory}: exact numerics cover plain Qwen3, and this is {policy.config.get('model_type')!r}; "
            "create the run with --numerics calibrated"
        )
    from grailnode.engine.exact_qwen3 import ExactQwen3  # noqa: PLC0415 - numba takes half a second to import

    return ExactQwen3(config)


def check_model(policy: Policy, lora: LoraSpec | None = None) -> None:
    """Refuse a policy that this program cannot compute. The weights' names and shapes are read, not their values."""
    model = build(policy)
    # Without adapters first: the files have the names of the base.
    _check_names(policy.directory, file_shapes(policy.directory), model.shapes)
    _try(policy.directory, model if lora is None else build(policy, lora=lora))


def check_packing(policy: Policy, lora: LoraSpec | None = None) -> None:
    """Raise PolicyError unless a policy's model computes several sequences that are packed into one row."""
    model = build(policy, lora=lora)
    # As a mask, the numbers of two sequences that have a token each.
    weights, row = {name: torch.zeros(()).expand(shape) for name, shape in model.shapes.items()}, torch.tensor([[1, 2]])
    with torch.inference_mode():
        model.hidden(weights, row - 1, row)


def file_shapes(directory: Path) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a checkpoint's published tensors by name; PolicyError if a file is missing or broken."""
    shapes: dict[str, tuple[int, ...]] = {}
    for path in weight_files(directory):
        try:
            with safe_open(path, "pt") as file:
                shapes |= {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            raise PolicyError(f"{path}: cannot be read as safetensors ({error})") from error
    return {name: shapes[name] for name in published_names(directory, shapes)}


def _check_names(
    directory: Path, shapes: Mapping[str, tuple[int, ...]], expected: Mapping[str, tuple[int, ...]]
) -> None:
    missing, unknown = sorted(expected.keys() - shapes.keys()), sorted(shapes.keys() - expected.keys())
    if missing or unknown:
        texts = [
            f"{len(names)} {what}: {', '.join(names[:_LISTED])}{', ...' if len(names) > _LISTED else ''}"
            for what, names in (("missing", missing), ("unknown", unknown))
            if names
        ]
        raise PolicyError(
            f"{directory}: the tensors in the files are not those of the model ({'; '.join(texts)}); "
            "docs/guide/models.md lists the families that work"
        )
    for name, shape in shapes.items():
        if shape != expected[name]:
            raise PolicyError(
                f"{directory}: {name} has shape {list(shape)}, and config.json says {list(expected[name])}"
            )


def _try(directory: Path, model: CausalModel) -> None:
    """Compute a prompt and one more token with zeros that take no memory."""
    weights = {name: torch.zeros(()).expand(shape) for name, shape in model.shapes.items()}
    # Two rows, one of which has a pad, then one of them alone with its cache: all that an engine asks of a model.
    ids, mask = torch.tensor([[0, 1], [0, 1]]), torch.tensor([[True, True], [False, True]])
    try:
        with torch.inference_mode():
            cache = model.cache()
            model.hidden(weights, ids, mask, cache)
            cache = cache.select(torch.tensor([1]))
            longer = torch.tensor([[False, True, True]])
            states = model.hidden(weights, ids[:1, :1], longer, cache)
            logits: Tensor = model.logits(weights, states[:, -1])
    except Exception as error:  # whatever an architecture's own code raises
        raise PolicyError(
            f"{directory}: this program cannot compute the model ({type(error).__name__}: {error})"
        ) from error
    if logits.shape != (1, model.vocabulary):
        raise PolicyError(
            f"{directory}: the model gives logits of shape {list(logits.shape)} for {model.vocabulary} tokens"
        )
