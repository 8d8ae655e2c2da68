"""The trainer's canary: a miner whose groups are false where a secret coin says so, to see which validators look.

To everybody else it is a miner like any other: its key, its pledges and its true groups tell nothing. What is false
about a group is subtle (completions drawn with each other's noise, sketches and rewards that fit them), and is checked
here by the validator's own judge first: a canary that honest validators might accept would sing against the wrong ones.
"""

from collections.abc import Sequence

from protocol.digest import content_digest
from protocol.identity.signing import SigningKey
from protocol.judging.report import is_false
from protocol.rollout.batch import Group
from roles.miner.produce import HonestProducer, MiningWindow
from roles.policy.assignment import Task
from roles.ports import Engine
from roles.validator.judge import Judge

_PLAINLY = 2.0  # times the margin that no honest token exceeds


class CanaryProducer(HonestProducer):
    """Honest groups, every second one made false.

    Args:
        trainer: the key whose secret tosses the coin.
    """

    def __init__(self, task: Task, engine: Engine, trainer: SigningKey) -> None:
        super().__init__(task, engine)
        self._trainer = trainer

    async def produce(self, turn: MiningWindow, indices: Sequence[int]) -> list[Group]:
        """The groups of these numbers, in order."""
        groups = await super().produce(turn, indices)
        return [
            await self._falsified(turn, group) if is_false(self._trainer, turn.window, group.index) else group
            for group in groups
        ]

    async def _falsified(self, turn: MiningWindow, group: Group) -> Group:
        """The group with its rollouts in another order; without any hidden states behind them where that is no plain
        lie.
        """
        first, *others = group.rollouts
        turned = group.model_copy(update={"rollouts": (*others, first)})
        judge = Judge(self.task, self.engine, turn.window, turn.randomness)
        (judgement,) = await judge.judge([(turned, content_digest(turned.to_frame()))])
        if not judgement.accepted and judgement.worst_margin > _PLAINLY * self.task.run.proof.margin_limit:
            return turned
        empty = tuple(item.model_copy(update={"sketch": bytes(len(item.sketch))}) for item in group.rollouts)
        return group.model_copy(update={"rollouts": empty})
