"""One side of a pair: a Variant, with changes that `grailnode calibrate` has no variants for."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import torch

from bench.proofs.rounding import Inaccurate, RoundingErrors
from grailnode.calibration.variants import Variant
from grailnode.engine.policy import Policy
from protocol.digest import Weights
from protocol.rollout.filters import EVERY_TOKEN, Filters
from protocol.rollout.sampling import SamplingParams
from roles.policy.causal_model import CausalModel
from roles.ports import Engine, Generation, Request
from tests.support.adversaries.decisive_tokens import TieEngine

RUN_TEMPERATURE: Final = 1.0


@dataclass(frozen=True)
class Side:
    """How a side computes.

    Attributes:
        variant: the way of computing that is changed.
        errors: of each value, as GPUs may have them; None for those of the variant alone.
        model: changes the model, such as its cache; None for no change.
        weights: changes the weights; None for no change.
        temperature, filters: with which it generates.
        decide: returns an engine that generates and decides near ties in its own way; None for none.
    """

    variant: Variant
    errors: RoundingErrors | None = None
    model: Callable[[CausalModel], CausalModel] | None = None
    weights: Callable[[Weights], Weights] | None = None
    temperature: float = RUN_TEMPERATURE
    filters: Filters = EVERY_TOKEN
    decide: Callable[[Policy, CausalModel, Weights], TieEngine] | None = None

    async def serve(self, policy: Policy, weights: Weights, seed: int) -> Engine:
        """Return an engine that computes this way and serves these weights as version 0.

        Args:
            seed: of the errors.
        """
        model = self.variant.model(policy)
        if self.model is not None:
            model = self.model(model)
        if self.errors is not None:
            model = Inaccurate(model, self.errors, seed)
        weights = weights if self.weights is None else self.weights(weights)
        engine: Any = await self.variant.host(model, weights)
        if self.decide is not None:
            dtype = getattr(torch, self.variant.dtype)
            engine = self.decide(policy, model, {name: tensor.to(dtype) for name, tensor in weights.items()})
        elif (self.temperature, self.filters) != (RUN_TEMPERATURE, EVERY_TOKEN):
            engine = _OtherSampling(engine, self.temperature, self.filters)
        served: Engine = engine  # those that decide, or sample otherwise, generate and can do nothing else
        return served


@dataclass(frozen=True)
class Pair:
    """A miner's way to compute and the validator's way that checks it."""

    generating: Side
    checking: Side


@dataclass
class _OtherSampling:
    """Generates at another temperature or with other filters than the run's."""

    engine: Engine
    temperature: float
    filters: Filters

    async def generate(self, requests: Sequence[Request], params: SamplingParams) -> list[Generation]:
        changed = replace(params, temperature=self.temperature, filters=self.filters)
        return await self.engine.generate(requests, changed)
