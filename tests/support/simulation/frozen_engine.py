"""A miner that computes with weights of its own, whatever version serves."""

from typing import Any

from grailnode.engine.torch_engine import TorchEngine
from protocol.digest import Weights
from roles.miner.produce import HonestProducer
from roles.policy.assignment import Task
from roles.policy.causal_model import CausalModel
from tests.support.simulation.network import inline


class FrozenEngine(TorchEngine):
    """An engine that serves one state of the weights, whatever it is given."""

    def __init__(self, model: CausalModel, weights: Weights) -> None:
        super().__init__(model, run_sync=inline)
        self._weights = weights

    async def serve(self) -> None:
        await self.stage(0, self._weights)
        await self.commit()


class FrozenProducer(HonestProducer):
    """A miner's producer that uses an engine of its own."""

    def __init__(self, task: Task, engine: FrozenEngine) -> None:
        super().__init__(task, engine)
        self._own_engine = engine

    async def generate(self, *arguments: Any) -> Any:
        if self._own_engine.version is None:
            await self._own_engine.serve()
        return await super().generate(*arguments)
