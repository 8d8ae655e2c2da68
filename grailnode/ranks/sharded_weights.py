"""Weights that `fully_shard` divides among the ranks: each layer is gathered while it is computed (FSDP2).

The shards of float32 masters are the parameters. With BF16 as the dtype of computing, they are rounded before they are
gathered; with float32, and in a quantized run, the gathered masters are rounded when they are read, as in
roles/trainer/learn/rounded_weights.py.
Either way the forward pass has the published weights, and the gradients of all ranks add up in float32.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from grailnode.ranks.rank_group import RankGroup
from protocol.quantization import Precision
from roles.policy.causal_model import CausalModel
from roles.policy.layer_weights import PartialWeights
from roles.trainer.learn.rounded_weights import round_straight_through


class ShardedWeights(PartialWeights):
    """The weights of a model on all ranks, of which this process has one's shards: float32 if they are `trained`, and
    BF16 otherwise. The dtype is that of computing, the precision that of publishing. ValueError if a weight has no
    dimension along which it could be divided.
    """

    def __init__(
        self, model: CausalModel, group: RankGroup, dtype: torch.dtype, precision: Precision = "bf16", *, trained: bool
    ) -> None:
        self._dtype = dtype
        self._precision = precision
        self._shapes = model.shapes
        part_of = {name: next(filter(name.startswith, model.layers), "") for name in self._shapes}
        for name, shape in self._shapes.items():
            if not shape:
                raise ValueError(f"{name} is a single number, and cannot be divided among ranks")
        low = trained and dtype == torch.bfloat16 and precision == "bf16"  # rounded before they are gathered
        policy = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16 if low else None,
            reduce_dtype=torch.float32 if low else None,
            cast_forward_inputs=False,
        )
        self._parts: dict[str, _Part] = {}
        for prefix in (*model.layers, ""):  # the root comes last, and contains the layers
            part = self._parts[prefix] = _Part()
            for number, inner in enumerate(self._parts.values() if not prefix else ()):
                if inner is not part:
                    part.add_module(f"part_{number}", inner)
            for name in (name for name, own in part_of.items() if own == prefix):
                stored = torch.float32 if trained else torch.bfloat16
                weight = torch.empty(self._shapes[name], dtype=stored, device=group.device)
                part.register_parameter(_attribute(name), nn.Parameter(weight, requires_grad=trained))
            fully_shard(part, mesh=group.mesh, mp_policy=policy)
            assert isinstance(part, FSDPModule)
            part.set_gradient_divide_factor(1.0)  # gradients are added and not averaged: the loss is a sum
            part.set_force_sum_reduction_for_comms(True)
        self._part_of = {name: self._parts[prefix] for name, prefix in part_of.items()}
        self._shards = {name: part.parameter(name) for name, part in self._part_of.items()}

    def __getitem__(self, name: str) -> Tensor:
        """Return a weight of the part that is being computed, in the dtype of computing."""
        return round_straight_through(name, self._part_of[name].parameter(name), self._precision, self._dtype)

    def __iter__(self) -> Iterator[str]:
        return iter(self._shapes)

    def __len__(self) -> int:
        return len(self._shapes)

    def within(self, prefix: str, compute: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        return self._parts[prefix](compute, *arguments, **options)

    @torch.no_grad()
    def shards(self) -> dict[str, Tensor]:
        """Return this rank's rows of each weight; to change them is to change the weights."""
        return {name: shard.to_local() for name, shard in self._shards.items()}  # type: ignore[attr-defined]

    @torch.no_grad()
    def gradients(self) -> dict[str, Tensor]:
        """Return this rank's rows of the gradients of all passes since `forget_gradients`: float32."""
        return {
            name: torch.zeros_like(shard) if (gradient := self._shards[name].grad) is None else gradient.to_local()  # type: ignore[attr-defined]
            for name, shard in self.shards().items()
        }

    def forget_gradients(self) -> None:
        """Begin a new sum of gradients."""
        for shard in self._shards.values():
            shard.grad = None


class _Part(nn.Module):
    """Weights that are gathered together."""

    def parameter(self, name: str) -> nn.Parameter:
        """Return the shard of a weight, or while it is gathered the weight."""
        parameter: nn.Parameter = getattr(self, _attribute(name))
        return parameter

    def forward(self, compute: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """Compute something with the weights; `fully_shard` gathers them before and frees them afterwards."""
        return compute(*arguments, **options)


def _attribute(name: str) -> str:
    """Return the name of a weight's attribute, which may have no dots."""
    return "weight_" + name.replace(".", "/")
