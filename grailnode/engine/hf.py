"""Any causal language model of transformers as pure functions of its weights, for architectures other than Qwen3."""

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM, DynamicCache
from transformers.cache_utils import DynamicLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from grailnode.engine.checkpoint_names import CheckpointNames
from grailnode.engine.lora_model import LowRankLinear, adapter_shapes
from grailnode.engine.output_projection import project_by
from grailnode.engine.policy import PolicyError
from grailnode.engine.qwen3 import join_rows, packed_sizes
from protocol.lora import DOWN, LoraSpec
from roles.policy.layer_weights import PartialWeights, TableWeights, compute_part


def _attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """transformers' attention by torch, of one packed sequence after another where `cu_seq_lens_q` has their bounds.

    transformers' mask keeps packed sequences apart already, but most of what is computed under it counts for nothing.
    """
    bounds: Sequence[int] | None = options.pop("cu_seq_lens_q", None)
    if bounds is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    parts = []
    for own in map(slice, bounds, bounds[1:]):
        mask = None if attention_mask is None else attention_mask[..., own, own]
        heads = query[:, :, own], key[:, :, own], value[:, :, own]
        parts.append(sdpa_attention_forward(module, *heads, mask, **options)[0])
    return torch.cat(parts, dim=1), None


# Under torch's own name, because models compare the name with those that they know.
AttentionInterface.register("sdpa", _attend)


class _Cache:
    """transformers' DynamicCache behind the Cache interface."""

    def __init__(self, states: DynamicCache) -> None:
        self.states = states

    @property
    def is_complete(self) -> bool:
        return all(type(layer) is DynamicLayer for layer in self.states.layers)

    def select(self, rows: Tensor) -> "_Cache":
        result = self._copy()
        result.states.batch_select_indices(rows)
        return result

    def take(self, columns: Tensor) -> "_Cache":
        pick = partial(torch.take_along_dim, indices=columns[:, None, :, None], dim=2)
        return self._changed(lambda parts: pick(parts[0]), ())

    def join(self, others: Sequence["_Cache"]) -> "_Cache":
        return self._changed(join_rows, others)

    def _changed(self, change: Callable[[list[Tensor]], Tensor], others: Sequence["_Cache"]) -> "_Cache":
        """Return a cache with what `change` makes of the keys, and of the values, of this one and others."""
        result = self._copy()
        for layer, *own in zip(*(cache.states.layers for cache in (result, self, *others)), strict=True):
            if own[0].is_initialized:
                layer.keys, layer.values = change([item.keys for item in own]), change([item.values for item in own])
        return result

    def _copy(self) -> "_Cache":
        states = copy(self.states)
        states.layers = [copy(layer) for layer in self.states.layers]
        return _Cache(states)


class TransformersModel:
    """A CausalModel (roles/policy/causal_model.py), by the config.json of a checkpoint directory, none of whose code is
    run. The weights have adapters beside a base if `lora` is given.

    A backward pass may recompute each layer instead of keeping its activations. PolicyError if transformers does not
    know the architecture, the config does not fit it, or the model has no place for such adapters.
    """

    exact = False

    def __init__(
        self,
        directory: Path,
        device: torch.device | None = None,
        attention: Literal["sdpa", "eager"] = "sdpa",
        *,
        recompute: bool = False,
        lora: LoraSpec | None = None,
    ) -> None:
        try:
            # The code that a checkpoint may bring is never run: strangers choose which policy a run has.
            config = AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
            # On the meta device the module takes no memory: weights are an argument of every call.
            with torch.device("meta"):
                module = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
                    config, trust_remote_code=False, attn_implementation=attention
                )
        except (OSError, ValueError, KeyError, AttributeError, ImportError) as error:
            raise PolicyError(f"{directory}: transformers cannot build this model ({error})") from error
        _check_rope(directory, config)
        _rebuild_buffers(module, config, device)
        if lora is not None:
            _insert_adapters(module, lora)
        self._config = config
        self._module = module.eval()
        # Names of the module, which differ from those in files for some families; `CheckpointNames` translates.
        shapes = {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}
        self._names = CheckpointNames(config.model_type, shapes)
        self.shapes = self._names.shapes
        self.vocabulary = int(config.vocab_size)
        # Other layers, such as convolutions, would carry one sequence into the next.
        kinds = set(getattr(config, "layer_types", None) or ())
        by_interface = module._supports_attention_backend and not module._is_stateful
        self._packs = by_interface and kinds <= {"full_attention", "sliding_attention"}
        self._layers = _recompute_layers(directory, module, self._names) if recompute else {}
        # Without layers that are computed again, all weights are one part.
        self.layers = tuple(self._layers)
        # 1. With gradients, or with weights that come in parts, each decoder layer takes its own weights while it
        # computes.
        # 2. All others are handed over at once.
        self._body = [name for name in shapes if name.startswith(module.base_model_prefix + ".")]
        self._outside_layers = [name for name in self._body if not name.startswith(self.layers)]
        table = module.get_input_embeddings().weight
        # Tied weights have one parameter under two names, so the table is found by identity.
        self._table = next(name for name, parameter in module.named_parameters() if parameter is table)
        self._lookup = _insert_lookup(module, self._names.file_of(self._table))

    def cache(self) -> _Cache:
        return _Cache(DynamicCache(config=self._config))

    def places(self, dtype: torch.dtype, device: torch.device) -> dict[str, Tensor]:
        return self._names.places(dtype, device)

    def file_weights(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return weights by the names in files, of those of the modules' state dict."""
        return self._names.file_weights(weights)

    def hidden(self, weights: Mapping[str, Tensor], ids: Tensor, mask: Tensor, cache: _Cache | None = None) -> Tensor:
        prefix = self._module.base_model_prefix + "."
        in_parts = bool(self._layers) and (torch.is_grad_enabled() or isinstance(weights, PartialWeights))
        looks_up = self._lookup is not None and isinstance(weights, TableWeights)
        # Which of the weights this call hands over: all, those outside the layers, and either without the table of the
        # vocabulary if the weights look rows up themselves.
        if in_parts or looks_up:
            names = self._outside_layers if in_parts else self._body
            without = self._table if looks_up else None
            tensors: Mapping[str, Tensor] = self._names.module_part(weights, [n for n in names if n != without])
        else:
            tensors = self._names.module_weights(weights)
        inner = {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
        arguments: dict[str, Any] = {
            "input_ids": ids,
            # transformers adds pads to no position: the position counts real tokens, as in qwen3.py.
            "attention_mask": mask.to(torch.int64),
            "position_ids": (mask.cumsum(dim=1) - 1).clamp(min=0)[:, -ids.shape[1] :],
            "past_key_values": None if cache is None else cache.states,
            "use_cache": cache is not None,
        }
        if mask.dtype != torch.bool:
            if not self._packs:
                raise PolicyError(
                    "not only attention mixes the tokens of this architecture, so no row has two sequences"
                )
            sizes = packed_sizes(mask)
            # Without a mask, positions that begin again tell transformers where a sequence begins.
            positions = torch.cat([torch.arange(size, device=ids.device) for size in sizes])[None]
            bounds = list(accumulate(sizes, initial=0))
            arguments |= {"attention_mask": None, "position_ids": positions, "cu_seq_lens_q": bounds}
        # The layers and the lookup get the weights for this call alone, and lose them even if it fails.
        try:
            if self._lookup is not None and isinstance(weights, TableWeights):
                self._lookup.weights = weights
            for layer in self._layers.values():
                layer.weights = weights if in_parts else None
            output = functional_call(self._module.base_model, inner, kwargs=arguments)
        finally:
            if self._lookup is not None:
                self._lookup.weights = None
            for layer in self._layers.values():
                layer.weights = None  # the backward pass has them of its own; here they would keep the gradients
        states = output.last_hidden_state
        assert isinstance(states, Tensor)
        return states

    def logits(self, weights: Mapping[str, Tensor], hidden: Tensor) -> Tensor:
        head = self._module.get_output_embeddings()
        # With tied weights the head's parameter has the name of the table, in `named_parameters` too.
        tied = next(name for name, parameter in self._module.named_parameters() if parameter is head.weight)
        bias = None if head.bias is None else weights["lm_head.bias"]
        logits = project_by(weights, self._names.file_of(tied), hidden, bias)
        config = self._config
        if divisor := getattr(config, "logits_scaling", None):
            logits = logits / divisor
        if factor := getattr(config, "logit_scale", None):
            logits = logits * factor
        if cap := getattr(config, "final_logit_softcapping", None):
            logits = torch.tanh(logits / cap) * cap
        return logits


def _insert_adapters(module: Any, lora: LoraSpec) -> None:
    """Give the linear modules that a run names an adapter; the output projection never has one."""
    # PEFT leaves the output projection out as well.
    head = module.get_output_embeddings()
    linears = {
        name: child
        for name, child in module.named_modules()
        if isinstance(child, torch.nn.Linear) and child is not head
    }
    for name in adapter_shapes(lora, {name: tuple(child.weight.shape) for name, child in linears.items()}):
        if name.endswith(DOWN):
            target = name.removesuffix(DOWN)
            module.set_submodule(target, LowRankLinear(linears[target], lora))


class _Replacement(torch.nn.Module):
    """A module in the place of another, whose children and parameters it takes over under the same names.

    The other attributes of the original are shown beside its own.
    """

    def __init__(self, original: torch.nn.Module) -> None:
        super().__init__()
        for name, child in original.named_children():
            self.add_module(name, child)
        for name, parameter in original.named_parameters(recurse=False):
            self.register_parameter(name, parameter)
        # The original itself is not a child, or its parameters would have two names.
        object.__setattr__(self, "_original", original)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(object.__getattribute__(self, "_original"), name)


class _TableLookup(_Replacement):
    """An embedding whose table a trainer's weights look up themselves: it is never rounded as a whole, and has no
    gradient of the whole table (roles/policy/layer_weights.py). The parameter keeps its name.
    """

    def __init__(self, embedding: torch.nn.Embedding, name: str) -> None:
        super().__init__(embedding)
        self._name = name
        self.weights: TableWeights | None = None

    def forward(self, ids: Tensor) -> Tensor:
        """Return rows of the table, as the embedding does: [..., D] for ids int64 [...]."""
        embedding = self._original
        if self.weights is None:
            result: Tensor = functional_call(embedding, {"weight": self.weight}, (ids,))
            return result
        rows = self.weights.rows(self._name, ids)
        if embedding.padding_idx is not None:  # that row has no gradient
            rows = torch.where((ids == embedding.padding_idx)[..., None], rows.detach(), rows)
        scale = getattr(embedding, "embed_scale", None)
        return rows if scale is None else rows * scale.to(rows.dtype)


def _insert_lookup(module: Any, name: str) -> _TableLookup | None:
    """Replace a model's embedding, whose table has this name in the files; None if it computes something else."""
    embedding = module.get_input_embeddings()
    is_scaled = isinstance(getattr(embedding, "embed_scale", None), Tensor)  # Gemma's
    if not (is_scaled or type(embedding) is torch.nn.Embedding):
        return None
    path = next(path for path, child in module.named_modules() if child is embedding)
    lookup = _TableLookup(embedding, name)
    module.set_submodule(path, lookup)
    return lookup


class _RecomputedLayer(_Replacement):
    """A decoder layer whose activations are computed again in the backward pass.

    It reads its weights when it computes, so that they can be rounded or gathered for it, and once more for the
    backward pass. The parameters keep their names, since the children are the layer's own.
    """

    def __init__(self, layer: torch.nn.Module, names: CheckpointNames, prefix: str) -> None:
        super().__init__(layer)
        self._parameter_names = [name for name, _ in layer.named_parameters()]
        self._names = names
        self._prefix = prefix
        self.weights: Mapping[str, Tensor] | None = None

    def forward(self, *arguments: Any, **options: Any) -> Any:
        weights = self.weights
        # Without weights of its own, the layer computes with the parameters that functional_call put in place.
        if weights is None:
            return self._original(*arguments, **options)
        # Sampling and checking compute each layer once; the gathering of its weights is all that is left to do.
        if not torch.is_grad_enabled():
            return compute_part(weights, self._prefix, self._compute, weights, *arguments, **options)
        # checkpoint keeps the layer's input alone and computes the layer again in the backward pass, which gathers the
        # weights once more.
        return compute_part(
            weights, self._prefix, checkpoint, self._compute, weights, *arguments, use_reentrant=False, **options
        )

    def _compute(self, weights: Mapping[str, Tensor], *arguments: Any, **options: Any) -> Any:
        tensors = self._names.module_part(weights, [self._prefix + name for name in self._parameter_names])
        own = {name.removeprefix(self._prefix): tensor for name, tensor in tensors.items()}
        return functional_call(self._original, own, arguments, options)


def _recompute_layers(directory: Path, module: torch.nn.Module, names: CheckpointNames) -> dict[str, _RecomputedLayer]:
    """Replace each decoder layer by one whose activations are computed again; return these by their prefix."""
    layers = getattr(module.base_model, "layers", getattr(module.base_model, "h", None))
    if not isinstance(layers, torch.nn.ModuleList):
        raise PolicyError(f"{directory}: this architecture has no list of layers; set [trainer] recompute = false")
    path = next(name for name, child in module.named_modules() if child is layers)
    recomputed = {}
    for index, layer in enumerate(layers):
        prefix = f"{path}.{index}."
        layers[index] = recomputed[prefix] = _RecomputedLayer(layer, names, prefix)
    return recomputed


def _check_rope(directory: Path, config: Any) -> None:
    """Refuse position encodings that depend on the length of a batch: honest nodes would not agree with each other."""
    # A config has one set of parameters, or one for each kind of attention.
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    for parameters in [rope, *(value for value in rope.values() if isinstance(value, dict))]:
        kind = parameters.get("rope_type", parameters.get("type"))
        if kind in ("dynamic", "longrope"):
            raise PolicyError(
                f"{directory}: rope type {kind!r} depends on the length of a batch, so that a prefill would not agree "
                "with generation; use a policy with another rope type"
            )


def _rebuild_buffers(module: torch.nn.Module, config: Any, device: torch.device | None) -> None:
    """Replace meta buffers (rotary frequencies) by real ones computed from the config: weights do not contain them."""
    # Modules without parameters whose buffers have no data are made anew from the config; such buffers are not in
    # checkpoints.
    for owner in list(module.modules()):
        for name, child in list(owner.named_children()):
            if any(True for _ in child.parameters()) or not any(buffer.is_meta for buffer in child.buffers()):
                continue
            try:
                fresh = type(child)(config=config).to(device)
            except TypeError as error:
                raise PolicyError(
                    f"the buffers of {type(child).__name__} cannot be computed from its config"
                ) from error
            setattr(owner, name, fresh)
    # Gemma scales its embedding by a buffer that its constructor alone knows.
    for owner in module.modules():
        scale = getattr(owner, "scalar_embed_scale", None)  # of Gemma's embedding
        if isinstance(scale, float):
            owner.register_buffer("embed_scale", torch.tensor(scale, device=device), persistent=False)
    # Any other buffer would be garbage in silence.
    for name, buffer in module.named_buffers():
        if buffer.is_meta:
            raise PolicyError(f"{name} cannot be computed from the config; this architecture is not supported")
