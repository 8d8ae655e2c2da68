"""The trainer's canary: a miner that falsifies groups picked by a secret coin, to test whether validators look.

Others cannot tell it from a miner: its key, its pledges and its true groups are ordinary. A false group is subtly
false: its completions are sampled with each other's noise, and its sketches and rewards fit them. The canary first runs
the validator's own judge on the group, because a group that honest validators might accept would accuse honest ones.
"""

from collections.abc import Sequence

from protocol.digest import content_digest
from protocol.identity.signing import SigningKey
from protocol.judging.report import is_false_group
from protocol.rollout.batch import Group
from roles.miner.produce import HonestProducer, MiningWindow
from roles.policy.assignment import Task
from roles.ports import Engine
from roles.validator.judge import Judge

_PLAIN_MARGIN_FACTOR = 2.0  # times `margin_limit`, which no honest token exceeds


class CanaryProducer(HonestProducer):
    """Produces honest groups and falsifies every second one.

    Args:
        trainer: the key whose secret decides which groups are false.
    """

    def __init__(self, task: Task, engine: Engine, trainer: SigningKey) -> None:
        super().__init__(task, engine)
        self._trainer = trainer

    async def produce(self, mining_window: MiningWindow, indices: Sequence[int]) -> list[Group]:
        """Return the groups with these indices, in order."""
        groups = await super().produce(mining_window, indices)
        return [
            await self._falsify(mining_window, group)
            if is_false_group(self._trainer, mining_window.window, group.index)
            else group
            for group in groups
        ]

    async def _falsify(self, mining_window: MiningWindow, group: Group) -> Group:
        """Return the group with its rollouts rotated by one place.

        Where the judge does not plainly refuse that, for instance because its rollouts are equal, return the group with
        all-zero sketches instead.
        """
        first, *others = group.rollouts
        rotated = group.model_copy(update={"rollouts": (*others, first)})
        judge = Judge(self.task, self.engine, mining_window.window, mining_window.randomness)
        (judgement,) = await judge.judge([(rotated, content_digest(rotated.to_frame()))])
        margin_limit = self.task.run.proof.margin_limit
        if not judgement.accepted and judgement.worst_margin > _PLAIN_MARGIN_FACTOR * margin_limit:
            return rotated
        zeroed = tuple(item.model_copy(update={"sketch": bytes(len(item.sketch))}) for item in group.rollouts)
        return group.model_copy(update={"rollouts": zeroed})
