"""Weights that `fully_shard` divides among the ranks: each layer is gathered while it is computed (FSDP2).

The shards of float32 masters are the parameters. With BF16 as the dtype of computing, they are rounded before they are
gathered; with float32, the gathered masters are rounded when they are read (roles/trainer/learn/rounded_weights.py).
Either way the forward pass has the published weights, and the gradients of all ranks add up in float32.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from roles.policy.causal_model import CausalModel
from roles.policy.layer_weights import PartialWeights
from roles.trainer.learn.rounded_weights import round_straight_through
from roles.trainer.learn.sharded.rank_group import RankGroup


class ShardedWeights(PartialWeights):
    """The weights of a model on all ranks, of which this process has one's shards.

    Args:
        dtype: of computing. The shards are float32 if the weights are `trained`, and BF16 otherwise.

    Raises:
        ValueError: a weight has no dimension along which it could be divided.
    """

    def __init__(self, model: CausalModel, group: RankGroup, dtype: torch.dtype, *, trained: bool) -> None:
        self._dtype = dtype
        self._shapes = model.shapes
        names = {prefix: [name for name in self._shapes if name.startswith(prefix)] for prefix in model.layers}
        inner = {name for part in names.values() for name in part}
        names[""] = [name for name in self._shapes if name not in inner]
        for name, shape in self._shapes.items():
            if not shape:
                raise ValueError(f"{name} is a single number, and cannot be divided among ranks")
        self._root = _Part()
        self._parts: dict[str, _Part] = {}
        stored = torch.float32 if trained else torch.bfloat16
        for prefix, part_names in names.items():  # the root comes last, and takes what no layer has
            part = self._parts[prefix] = self._root if not prefix else _Part()
            part.fill({name: self._shapes[name] for name in part_names}, stored, group.device, trained=trained)
            if prefix:
                self._root.add_module(f"part_{len(self._parts)}", part)
            _shard(part, group, dtype, trained=trained)
        self._part_of = {name: self._parts[prefix] for prefix, part in names.items() for name in part}
        self._shards = {name: part.parameter(name) for name, part in self._part_of.items()}

    def __getitem__(self, name: str) -> Tensor:
        """Return a weight of the part that is being computed, in the dtype of computing."""
        return round_straight_through(self._part_of[name].parameter(name), self._dtype)

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

    def __init__(self) -> None:
        super().__init__()
        self._attributes: dict[str, str] = {}  # names of weights have dots, attributes have none

    def fill(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        dtype: torch.dtype,
        device: torch.device,
        *,
        trained: bool,
    ) -> None:
        """Add weights without values."""
        for number, (name, shape) in enumerate(shapes.items()):
            self._attributes[name] = f"weight_{number}"
            weight = nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=trained)
            self.register_parameter(self._attributes[name], weight)

    def parameter(self, name: str) -> nn.Parameter:
        """Return the shard of a weight, or while it is gathered the weight."""
        parameter: nn.Parameter = getattr(self, self._attributes[name])
        return parameter

    def forward(self, compute: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """Compute something with the weights; `fully_shard` gathers them before and frees them afterwards."""
        return compute(*arguments, **options)


def _shard(part: _Part, group: RankGroup, dtype: torch.dtype, *, trained: bool) -> None:
    """Divide a part's weights among the ranks. Gradients are added over ranks and not averaged: the loss is a sum."""
    low = trained and dtype == torch.bfloat16
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if low else None,
        reduce_dtype=torch.float32 if low else None,
        cast_forward_inputs=False,
    )
    fully_shard(part, mesh=group.mesh, mp_policy=policy)
    assert isinstance(part, FSDPModule)
    part.set_gradient_divide_factor(1.0)
    part.set_force_sum_reduction_for_comms(True)
