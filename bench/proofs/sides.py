"""One side of a pair: a Variant, with changes that `grailnode calibrate` has no variants for."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from bench.proofs.rounding import Inaccurate, RoundingErrors
from grailnode.calibration.variants import Variant
from grailnode.engine.policy import Policy
from protocol.digest import Weights
from protocol.rollout.sampling import SamplingParams
from roles.policy.causal_model import CausalModel
from roles.ports import Engine, Generation, Request

RUN_TEMPERATURE: Final = 1.0


@dataclass(frozen=True)
class Side:
    """How a side computes.

    Attributes:
        variant: the way of computing that is changed.
        errors: of each value, as GPUs may have them; None for those of the variant alone.
        model: changes the model, such as its cache; None for no change.
        weights: changes the weights; None for no change.
        temperature: at which it generates.
    """

    variant: Variant
    errors: RoundingErrors | None = None
    model: Callable[[CausalModel], CausalModel] | None = None
    weights: Callable[[Weights], Weights] | None = None
    temperature: float = RUN_TEMPERATURE

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
        engine: Engine = await self.variant.host(model, weights if self.weights is None else self.weights(weights))
        other: Any = _OtherTemperature(engine, self.temperature)  # generates, and can do nothing else
        return engine if self.temperature == RUN_TEMPERATURE else other


@dataclass(frozen=True)
class Pair:
    """A miner's way to compute and the validator's way that checks it."""

    generating: Side
    checking: Side


@dataclass
class _OtherTemperature:
    """Generates at another temperature than the run's."""

    engine: Engine
    temperature: float

    async def generate(self, requests: Sequence[Request], params: SamplingParams) -> list[Generation]:
        return await self.engine.generate(requests, replace(params, temperature=self.temperature))
