"""One side of a pair: a Variant, with changes that `grailnode calibrate` has no variants for."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import torch

from bench.proofs.rounding import Inaccurate, RoundingErrors
from bench.proofs.trading_task import TradingTask
from grailnode.calibration.variants import Variant
from grailnode.engine.policy import Policy
from protocol.digest import Weights
from protocol.rollout.filters import EVERY_TOKEN, Filters
from protocol.rollout.sampling import SamplingParams
from roles.policy.causal_model import CausalModel
from roles.ports import Engine, Generation, Request
from tests.support.adversaries.decisive_tokens import DecisiveEngine, Tokens

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
        reach: how far a right account may fall short of the drawn token for the side to write it; 0 for never.
    """

    variant: Variant
    errors: RoundingErrors | None = None
    model: Callable[[CausalModel], CausalModel] | None = None
    weights: Callable[[Weights], Weights] | None = None
    temperature: float = RUN_TEMPERATURE
    filters: Filters = EVERY_TOKEN
    reach: float = 0.0

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
        if self.reach:
            converted = {name: tensor.to(getattr(torch, self.variant.dtype)) for name, tensor in weights.items()}
            engine = DecisiveEngine(model, converted, _right_account(policy), self.reach)  # generates, and no more
        elif (self.temperature, self.filters) != (RUN_TEMPERATURE, EVERY_TOKEN):
            engine = _OtherSampling(engine, self.temperature, self.filters)  # as this one
        served: Engine = engine
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


def _right_account(policy: Policy) -> Callable[[Tokens, Tokens], int | None]:
    """Return a function of prompt and part of a story that returns the token of the right account where one is due."""

    def wish(prompt: Tokens, completion: Tokens) -> int | None:
        text, task = policy.tokenizer, TradingTask()
        number = task.due_account(task.problem_of(text.decode(prompt)), text.decode(completion))
        return None if number is None else text.encode(str(number))[0]

    return wish
