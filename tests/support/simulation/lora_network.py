"""A simulated network whose run trains low-rank adapters of the small policy."""

from pathlib import Path
from typing import Any

from grailnode.engine import models
from grailnode.engine.compute import Compute
from grailnode.engine.lora_model import LoraModel
from grailnode.engine.policy import Policy, load_weights
from grailnode.node.settings import TrainerSettings
from grailnode.run.base_files import LoraStart, start_lora
from grailnode.run.rules import Rules
from protocol.digest import digest_weights
from roles.trainer.learn.learner import LearnerSettings
from roles.trainer.learn.optimizer_settings import AdamWSettings
from tests.support.simulation import small_policy
from tests.support.simulation.network import Network

RANK, ALPHA, TARGETS = 4, 8.0, ("q_proj", "v_proj", "up_proj", "down_proj")


def adapted_model(policy: Policy, start: LoraStart) -> LoraModel:
    """Return the model of a policy with adapters, whose base is the policy."""
    return LoraModel(models.build(policy, lora=start.spec), load_weights(policy.directory))


class LoraNetwork(Network):
    """A network whose run trains adapters of the small policy."""

    def __init__(self, rules: Rules, learning_rate: float = 2e-3, policy: Path = small_policy.DIRECTORY):
        super().__init__(rules, policy=policy)
        start = start_lora(self.policy, RANK, ALPHA, TARGETS)
        assert start is not None
        self.start_adapters = start
        self.learning_rate = learning_rate
        self.model = adapted_model(self.policy, start)
        self.weights = dict(start.adapters)
        self.compute = self.training_compute = Compute(self.model)
        genesis = digest_weights(start.adapters)
        self.amend(lora=start.spec, model=self.run.model.model_copy(update={"genesis": genesis}))

    def trainer_settings(self, groups_per_step: int = 4, canaries: int = 0, **publisher: Any) -> TrainerSettings:
        """Return the settings of the simulated trainer, with a learning rate for adapters."""
        settings = super().trainer_settings(groups_per_step, canaries, **publisher)
        optimizer = AdamWSettings(learning_rate=self.learning_rate, warmup_steps=0)
        return TrainerSettings(
            training=settings.training,
            learner=LearnerSettings(optimizer=optimizer),
            publisher=settings.publisher,
            collector=settings.collector,
        )
