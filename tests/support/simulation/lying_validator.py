"""A validator that accepts whatever is dealt to it, as cleverly as it can: its other judgements are right."""

from collections.abc import Sequence

from grailnode.engine.compute import Compute, make_engine
from protocol import paths
from protocol.judging.roster import Roster
from protocol.judging.verdict import Judgement, Verdict
from protocol.rollout.batch import Commitment, open_group
from roles.node.identity import Node
from roles.policy.assignment import Task
from roles.policy.follower import Follower
from roles.records import fetch_record
from roles.validator.ledger_state import Ledger
from roles.validator.validator import Validator, ValidatorSettings
from roles.validator.window_cases import WindowCases


class LyingValidator(Validator):
    """Accepts every group that is dealt to it, or every group at all.

    Args:
        greedy: whether it accepts groups that are not dealt to it, and says that they are.
    """

    def __init__(
        self, node: Node, follower: Follower, compute: Compute, task: Task, ledger: Ledger, *, greedy: bool = False
    ) -> None:
        self._medium = node
        self._greedy = greedy
        engine = make_engine(compute, node.run_sync)
        super().__init__(node, follower, engine, task, ledger, ValidatorSettings(evaluate=False, poll_seconds=0.2))

    async def _judge(
        self, cases: WindowCases, version: int, roster: Roster, opening: bytes, draw: bytes
    ) -> list[Verdict]:
        verdicts = await super()._judge(cases, version, roster, opening, draw)
        return [await self._with_lies(verdict, roster, draw) for verdict in verdicts]

    async def _with_lies(self, verdict: Verdict, roster: Roster, draw: bytes) -> Verdict:
        if not any(judgement.rejected for judgement in verdict.judgements):
            return verdict
        node, window, miner = self._medium, verdict.window, verdict.miner
        commitment = (await fetch_record(node, Commitment, paths.commitment(miner, window))).record
        dealt = (
            tuple(range(verdict.submitted))
            if self._greedy
            else roster.dealt_groups(
                node.run_id, window, draw, miner, groups=verdict.submitted, validator=node.key.public
            )
        )
        return verdict.model_copy(update={"dealt": len(dealt), "judgements": await self._lies(commitment, dealt)})

    async def _lies(self, commitment: Commitment, dealt: Sequence[int]) -> tuple[Judgement, ...]:
        path = paths.batch(commitment.miner, commitment.window, commitment.batch)
        judgements = []
        for index in dealt:
            offset, size = commitment.extent(index)
            group = open_group(await self._medium.store.get(path, size, offset=offset, size=size), commitment, index)
            tokens = sum(len(rollout.completion) // 4 for rollout in group.rollouts)
            judgements.append(
                Judgement(
                    index=index,
                    digest=commitment.groups[index][0],
                    reason="",
                    tokens=tokens,
                    positions=tokens,
                    sketch_misses=0,
                    sketch_median=0.0,
                    margin_misses=0,
                    sketch_points=0,
                    margin_points=0,
                    far_rollouts=0,
                    worst_margin=0.0,
                    surprisal=0.0,
                    rewards=tuple(rollout.reward for rollout in group.rollouts),
                    logprobs=bytes(4 * tokens),
                )
            )
        return tuple(judgements)
