"""Qwen3 as pure functions of its weights.

It computes, operation by operation, what transformers' modeling_qwen3.py computes, bit for bit equal on the same device
(tests/engine/test_families.py). It exists because every process of a node would have to import that file, which takes
three times as long as importing torch (docs/log.md); it does not compute faster.

Shapes: B sequences, S new tokens, P cached tokens, K = P + S, H query heads, C key-value heads, E head size, D width.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, Literal, Self

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from grailnode.engine.lora_model import adapter_shapes, add_adapter
from grailnode.engine.output_projection import project_by
from protocol.lora import DOWN, UP, LoraSpec
from roles.policy.layer_weights import compute_part, look_up

Weights = Mapping[str, Tensor]

Attention = Literal["sdpa", "eager"]
"""torch's fused attention, or the formula written out, by transformers' names. The two round differently."""


@dataclass(frozen=True)
class Qwen3Config:
    """The sizes in a Qwen3 config.json, by transformers' names."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    tie_word_embeddings: bool

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Self | None:
        """Return the config of a plain Qwen3 (no scaled RoPE, sliding window, bias or quantization), or None."""
        # Newer configs have `rope_parameters`, older ones `rope_scaling` and `rope_theta` beside it.
        rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
        theta = rope.get("rope_theta", config.get("rope_theta", 0.0))
        # Whatever this file does not compute makes the config another architecture, and transformers computes it.
        plain = (
            config.get("model_type") == "qwen3"
            and rope.get("rope_type", rope.get("type", "default")) == "default"
            and not config.get("use_sliding_window")
            and not config.get("attention_bias")
            and config.get("quantization_config") is None
            and config.get("hidden_act", "silu") == "silu"
            and theta > 0
        )
        counts = [field.name for field in fields(cls) if field.type is int]
        if not plain or not all(isinstance(config.get(name), int) for name in counts):
            return None
        return cls(
            **{name: config[name] for name in counts},
            rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
            rope_theta=float(theta),
            tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
        )


class KeyValueCache:
    """Keys and values of each layer: [B, C, P, E] pairs."""

    is_complete = True

    def __init__(self, layers: dict[int, tuple[Tensor, Tensor]] | None = None) -> None:
        self._layers = layers or {}

    def extend(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Append [B, C, S, E] keys and values, and return all of that layer."""
        # torch.cat makes a new tensor, so another cache that shares the old rows does not see the new tokens.
        if layer in self._layers:
            old_keys, old_values = self._layers[layer]
            keys, values = torch.cat([old_keys, keys], dim=2), torch.cat([old_values, values], dim=2)
        self._layers[layer] = keys, values
        return keys, values

    def select(self, rows: Tensor) -> "KeyValueCache":
        return KeyValueCache({layer: (k[rows], v[rows]) for layer, (k, v) in self._layers.items()})

    def take(self, columns: Tensor) -> "KeyValueCache":
        pick = partial(torch.take_along_dim, indices=columns[:, None, :, None], dim=2)
        return KeyValueCache({layer: (pick(k), pick(v)) for layer, (k, v) in self._layers.items()})

    def join(self, others: Sequence["KeyValueCache"]) -> "KeyValueCache":
        batches = [cache._layers for cache in (self, *others)]
        return KeyValueCache(
            {
                layer: (join_rows([own[layer][0] for own in batches]), join_rows([own[layer][1] for own in batches]))
                for layer in self._layers
            }
        )


def join_rows(parts: Sequence[Tensor]) -> Tensor:
    """Return keys or values of several batches [B, C, P, E] as one, with zeros in front of the shorter ones."""
    width = max(part.shape[2] for part in parts)
    return torch.cat([functional.pad(part, (0, 0, width - part.shape[2], 0)) for part in parts])


def packed_sizes(numbers: Tensor) -> list[int]:
    """Return the tokens of each sequence in a packed row, by the number of each token's sequence: int64 [1, S]."""
    sizes: list[int] = numbers[0].bincount()[1:].tolist()
    return sizes


def _wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of norms and rotations: float32, or float64 for float64 weights."""
    return torch.promote_types(dtype, torch.float32)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply the rotary embedding to [B, H, S, E] with cos, sin [B, 1, S, E]."""
    # Dimension i turns together with i + E/2, as checkpoints of this family store them.
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


def _visible(mask: Tensor, new: int) -> Tensor:
    """Return bool [B, 1, S, K]: the keys that each of the last `new` tokens attends to, which are real and not after
    it.

    A pad attends to itself, because a softmax over no keys is NaN.
    """
    # `new` tokens are the last columns; the keys of earlier columns lie in the cache.
    total = mask.shape[1]
    queries = torch.arange(total - new, total, device=mask.device)[:, None]
    keys = torch.arange(total, device=mask.device)[None, :]
    return (((keys <= queries) & mask[:, None, :]) | (keys == queries))[:, None]


def _eager(queries: Tensor, keys: Tensor, values: Tensor, visible: Tensor) -> Tensor:
    """Compute scaled dot-product attention [B, H, S, E] from keys and values [B, C, K, E] and visible [B, 1, S, K].

    Scores and weights are float32 at least, as in fused kernels; only the result is rounded to the dtype of the values.
    """
    dtype, wide, shared = values.dtype, _wide(values.dtype), queries.shape[1] // keys.shape[1]
    # Each key-value head serves a group of query heads.
    keys, values = (tensor.to(wide).repeat_interleave(shared, dim=1) for tensor in (keys, values))
    scores = queries.to(wide) @ keys.transpose(2, 3) * queries.shape[-1] ** -0.5
    mixed: Tensor = scores.masked_fill(~visible, -math.inf).softmax(dim=-1) @ values
    return mixed.to(dtype)


class Qwen3:
    """A CausalModel (roles/policy/causal_model.py), with its rotary frequencies on a device. The weights have adapters
    beside a base if `lora` is given; PolicyError if the model has no place for such ones. A backward pass may recompute
    each layer instead of keeping its activations.
    """

    exact = False

    def __init__(
        self,
        config: Qwen3Config,
        device: torch.device | None = None,
        attention: Attention = "sdpa",
        *,
        recompute: bool = False,
        lora: LoraSpec | None = None,
    ) -> None:
        self.vocabulary = config.vocab_size
        self.layers = tuple(f"model.layers.{layer}." for layer in range(config.num_hidden_layers))
        self._config = config
        # Tied weights: the table of the vocabulary is also the output projection.
        self._head = "model.embed_tokens.weight" if config.tie_word_embeddings else "lm_head.weight"
        self._recompute = recompute
        self._attention_kind = attention
        # To the bit as in transformers: integers, converted to float32, divided by the size of a head.
        exponents = torch.arange(0, config.head_dim, 2, dtype=torch.int64).to(torch.float32) / config.head_dim
        self._frequencies = (1.0 / config.rope_theta**exponents).to(device)
        self.shapes = _shapes(config)
        self._adapters: dict[str, tuple[int, ...]] = {}
        self._adapter_scale = 0.0
        if lora is not None:
            # Adapters are for the linear modules of layers; the embedding and the output projection have none.
            linears = {n.removesuffix(".weight"): s for n, s in self.shapes.items() if n.endswith("_proj.weight")}
            self._adapters, self._adapter_scale = adapter_shapes(lora, linears), lora.scale
            self.shapes |= self._adapters

    def cache(self) -> KeyValueCache:
        return KeyValueCache()

    def places(self, dtype: torch.dtype, device: torch.device) -> dict[str, Tensor]:
        return {}

    def hidden(self, weights: Weights, ids: Tensor, mask: Tensor, cache: KeyValueCache | None = None) -> Tensor:
        new = ids.shape[1]
        x = look_up(weights, "model.embed_tokens.weight", ids)
        # A token's position counts real tokens only, so that padding on the left does not move it. Positions and
        # attention are all that tells packed sequences apart.
        masks = (mask,) if mask.dtype == torch.bool else torch.split(mask.bool(), packed_sizes(mask), dim=1)
        positions = [(part.cumsum(dim=1) - 1).clamp(min=0) for part in masks]
        cosine, sine = self._rotations(torch.cat(positions, dim=1)[:, -new:])
        rotation = cosine.to(x.dtype), sine.to(x.dtype)
        visible = [_visible(part, min(new, part.shape[1])) for part in masks]
        for layer, prefix in enumerate(self.layers):
            # One call for each layer, so that partial weights are gathered for a layer and freed behind it.
            arguments = weights, layer, x, rotation, visible, cache
            if self._recompute and torch.is_grad_enabled():
                # The forward pass keeps what enters a layer, and the backward pass computes the layer once more.
                x = compute_part(weights, prefix, checkpoint, self._layer, *arguments, use_reentrant=False)
            else:
                x = compute_part(weights, prefix, self._layer, *arguments)
        return self._norm(x, weights["model.norm.weight"])

    # The operations that exact arithmetic replaces (exact_qwen3.py).

    def _rotations(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosine and sine [B, 1, S, E] for positions [B, S]."""
        # Angles in float32: BF16 has too few digits for positions beyond 256.
        angles = positions[:, None, :, None].to(torch.float32) * self._frequencies
        angles = torch.cat([angles, angles], dim=-1)
        return angles.cos(), angles.sin()

    def _norm(self, x: Tensor, gain: Tensor) -> Tensor:
        """Compute x / rms(x) * gain over the last dimension."""
        # The mean of squares and the division are in float32 even for BF16 weights, as in transformers; the gain is
        # applied in the dtype of the weights.
        wide = x.to(_wide(x.dtype))
        scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self._config.rms_norm_eps)
        return gain * (wide * scale).to(x.dtype)

    def _project(self, x: Tensor, weight: Tensor) -> Tensor:
        return functional.linear(x, weight)

    def _activate(self, gate: Tensor, up: Tensor) -> Tensor:
        return functional.silu(gate) * up

    def _attend(self, queries: Tensor, keys: Tensor, values: Tensor, visible: Tensor) -> Tensor:
        """Compute attention [B, H, S, E] from keys and values [B, C, K, E] and visible [B, 1, S, K]."""
        if self._attention_kind == "eager":
            return _eager(queries, keys, values, visible)
        return functional.scaled_dot_product_attention(queries, keys, values, attn_mask=visible, enable_gqa=True)

    def _layer(
        self,
        weights: Weights,
        layer: int,
        x: Tensor,
        rotation: tuple[Tensor, Tensor],
        visible: Sequence[Tensor],
        cache: KeyValueCache | None,
    ) -> Tensor:
        """Compute a layer: [B, S, D] from [B, S, D]."""
        prefix = self.layers[layer]
        # x + attention(norm(x)), then x + mlp(norm(x)): the residual stream x itself is never normed before the end.
        normed = self._norm(x, weights[prefix + "input_layernorm.weight"])
        x = x + self._attention(weights, layer, normed, rotation, visible, cache)
        normed = self._norm(x, weights[prefix + "post_attention_layernorm.weight"])
        gate = self._linear(weights, prefix + "mlp.gate_proj", normed)
        up = self._linear(weights, prefix + "mlp.up_proj", normed)
        return x + self._linear(weights, prefix + "mlp.down_proj", self._activate(gate, up))

    def _linear(self, weights: Weights, module: str, x: Tensor) -> Tensor:
        """Compute a module's matrix, and its adapter if it has one: [..., out] from [..., in]."""
        result = self._project(x, weights[f"{module}.weight"])
        if module + DOWN not in self._adapters:
            return result
        return add_adapter(result, x, weights[module + DOWN], weights[module + UP], self._adapter_scale)

    def _attention(
        self,
        weights: Weights,
        layer: int,
        x: Tensor,
        rotation: tuple[Tensor, Tensor],
        visible: Sequence[Tensor],
        cache: KeyValueCache | None,
    ) -> Tensor:
        """Compute grouped-query attention with normed queries and keys: [B, S, D] from [B, S, D]."""
        config, prefix = self._config, f"{self.layers[layer]}self_attn."
        B, S, _ = x.shape

        def heads(name: str) -> Tensor:
            return self._linear(weights, f"{prefix}{name}_proj", x).view(B, S, -1, config.head_dim)

        # Qwen3 norms each head's queries and keys, before the rotation.
        queries = self._norm(heads("q"), weights[prefix + "q_norm.weight"]).transpose(1, 2)
        keys = self._norm(heads("k"), weights[prefix + "k_norm.weight"]).transpose(1, 2)
        values = heads("v").transpose(1, 2)
        queries, keys = _rotate(queries, *rotation), _rotate(keys, *rotation)
        # What is cached is rotated already, since a token's position does not change.
        if cache is not None:
            keys, values = cache.extend(layer, keys, values)
        # Each part of `visible` is of one batch, or of one packed sequence.
        new, known = [part.shape[2] for part in visible], [part.shape[3] for part in visible]
        parts = zip(*map(torch.split, (queries, keys, values), (new, known, known), (2, 2, 2)), visible, strict=True)
        mixed = torch.cat([self._attend(*part) for part in parts], dim=2)
        return self._linear(weights, prefix + "o_proj", mixed.transpose(1, 2).reshape(B, S, -1))

    def logits(self, weights: Weights, hidden: Tensor) -> Tensor:
        return project_by(weights, self._head, hidden)


def _shapes(config: Qwen3Config) -> dict[str, tuple[int, ...]]:
    D, F, E = config.hidden_size, config.intermediate_size, config.head_dim
    queries, keys = config.num_attention_heads * E, config.num_key_value_heads * E
    layer = {
        "input_layernorm.weight": (D,),
        "self_attn.q_proj.weight": (queries, D),
        "self_attn.k_proj.weight": (keys, D),
        "self_attn.v_proj.weight": (keys, D),
        "self_attn.o_proj.weight": (D, queries),
        "self_attn.q_norm.weight": (E,),
        "self_attn.k_norm.weight": (E,),
        "post_attention_layernorm.weight": (D,),
        "mlp.gate_proj.weight": (F, D),
        "mlp.up_proj.weight": (F, D),
        "mlp.down_proj.weight": (D, F),
    }
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config.vocab_size, D),
        "model.norm.weight": (D,),
    }
    for index in range(config.num_hidden_layers):
        shapes |= {f"model.layers.{index}.{name}": shape for name, shape in layer.items()}
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, D)
    return shapes
