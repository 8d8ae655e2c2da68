"""The trainer's canary: a miner that falsifies groups picked by a secret coin, to test whether validators look.

Others cannot tell it from a miner: its key, its pledges and its true groups are ordinary. A false group is one that
only the policy shows to be false: its tokens and sketches are those of the policy, in the wrong place. The canary first
runs the validator's own judge on the group, because a group that honest validators might accept would accuse them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from protocol.digest import content_digest
from protocol.identity.signing import SigningKey
from protocol.judging.report import is_false_group
from protocol.judging.verdict import Judgement, Reason
from protocol.rollout import sampling
from protocol.rollout.batch import Group
from roles.miner.produce import HonestProducer, MiningWindow
from roles.policy.assignment import Assignment, Task
from roles.ports import Engine, Forward, Generation, ObjectStore
from roles.trainer.spool import canary_path, pack_canary_note
from roles.validator.judge import Judge

_PLAIN_FACTOR = 2.0  # times `margin_limit` or `sketch_median`, which no honest group exceeds
_TAIL = 64  # tokens that are generated anew behind an edit, at most: each takes a prefill
_MATCHES = 16  # edits that change the noise of a group least
_ATTEMPTS = 4  # edits of a group that are tried


@dataclass(frozen=True)
class Edit:
    """A token that could be replaced by the one with the second-best score.

    Attributes:
        rollout, position: its place in the group.
        token: the one with the second-best score.
        shortfall: of its score, in units of logits / temperature.
        noise_change: its noise minus that of the right token.
    """

    rollout: int
    position: int
    token: int
    shortfall: float
    noise_change: float


class CanaryProducer(HonestProducer):
    """Produces honest groups and falsifies every second one.

    Of the false groups, which the coin decides as well:

    - one in three has one token replaced by the runner-up, and continues from there as the policy does;
    - one in three likewise, at the nearest tie that is no honest noise: there a quantized copy goes wrong, too;
    - one in three has the right tokens with the sketches of this policy's states behind another prompt.

    A validator without the policy could compare the noise of the chosen tokens, which is public, with that of other
    groups. So an edit is made where it changes the noise of the group least.

    Args:
        trainer: the key whose secret decides which groups are false, and how.
        trainer_state: where the log-probabilities of true groups are noted for the collector, which compares what
            validators say with them; None for nowhere.
    """

    def __init__(
        self, task: Task, engine: Engine, trainer: SigningKey, trainer_state: ObjectStore | None = None
    ) -> None:
        super().__init__(task, engine)
        self._widest = task.run.proof.widest(engine.generating_arithmetic)
        self._trainer = trainer
        self._trainer_state = trainer_state

    async def produce(self, mining_window: MiningWindow, indices: Sequence[int]) -> list[Group]:
        """Return the groups with these indices, in order."""
        groups = await super().produce(mining_window, indices)
        return [
            await self._falsify(mining_window, group)
            if is_false_group(self._trainer, mining_window.window, group.index)
            else await self._noted(mining_window, group)
            for group in groups
        ]

    async def _noted(self, mining_window: MiningWindow, group: Group) -> Group:
        """Return a true group, and note its log-probabilities for the collector."""
        if self._trainer_state is not None:
            judgement = await self._judge(mining_window, group)
            if judgement.accepted:
                path = canary_path(mining_window.window, group.index, judgement.digest)
                note = pack_canary_note(self.engine.generating_arithmetic, judgement.logprobs)
                await self._trainer_state.put(path, note)
        return group

    async def _falsify(self, mining_window: MiningWindow, group: Group) -> Group:
        """Return the group with a change that honest validators plainly refuse.

        Where the first kind of change does not give that, for instance because the policy is certain of every token,
        the next kind follows; all-zero sketches are the last.
        """
        (assignment,) = self.assignments(mining_window, [group.index])
        first = self._trainer.derive("canary kind", mining_window.window, group.index)[0] % 3
        kinds = (self._with_runner_up, self._with_near_tie, self._with_states_of_another_prompt)
        for kind in (*kinds[first:], *kinds[:first]):
            false_group = await kind(mining_window, group, assignment)
            if false_group is not None:
                return false_group
        zeroed = tuple(item.model_copy(update={"sketch": bytes(len(item.sketch))}) for item in group.rollouts)
        return group.model_copy(update={"rollouts": zeroed})

    async def _with_runner_up(self, mining_window: MiningWindow, group: Group, assignment: Assignment) -> Group | None:
        edits = await self._inconspicuous_edits(group, assignment)
        return await self._first_plain(mining_window, group, assignment, edits)

    async def _with_near_tie(self, mining_window: MiningWindow, group: Group, assignment: Assignment) -> Group | None:
        edits = sorted(await self._inconspicuous_edits(group, assignment), key=lambda edit: edit.shortfall)
        return await self._first_plain(mining_window, group, assignment, edits)

    async def _with_states_of_another_prompt(
        self, mining_window: MiningWindow, group: Group, assignment: Assignment
    ) -> Group | None:
        (other,) = self.assignments(mining_window, [assignment.index + 1])
        completions = [rollout.tokens for rollout in group.rollouts]
        forwards = await self.engine.forward([other.prompt] * len(completions), completions)
        generations = [
            Generation(tokens, forward.hidden, ()) for tokens, forward in zip(completions, forwards, strict=True)
        ]
        false_group = self.group(mining_window, assignment, await self.rollouts(mining_window, assignment, generations))
        judgement = await self._judge(mining_window, false_group)
        is_plain = judgement.sketch_median > _PLAIN_FACTOR * self._widest.sketch_median
        return false_group if is_plain and judgement.reason == Reason.SKETCH else None

    async def _inconspicuous_edits(self, group: Group, assignment: Assignment) -> list[Edit]:
        """Return the edits that honest validators plainly refuse, and of these the ones that change the noise least."""
        completions = [rollout.tokens for rollout in group.rollouts]
        forwards = await self.engine.forward([assignment.prompt] * len(completions), completions)
        edits = [
            edit
            for rollout, (tokens, forward) in enumerate(zip(completions, forwards, strict=True))
            for edit in self._runners_up(rollout, tokens, assignment.seeds[rollout], forward)
            if edit.shortfall > _PLAIN_FACTOR * self._widest.margin_limit
        ]
        return sorted(edits, key=lambda edit: abs(edit.noise_change))[:_MATCHES]

    def _runners_up(self, rollout: int, tokens: tuple[int, ...], seed: bytes, forward: Forward) -> list[Edit]:
        """Return an edit for each of a rollout's last tokens."""
        begin = max(0, len(tokens) - _TAIL)
        logits = forward.project(forward.hidden[begin:])[:, : self.task.vocabulary]
        words = sampling.seed_words([seed], logits.device)
        noise = sampling.noise(words, torch.arange(begin, len(tokens), device=logits.device), logits.shape[-1])
        scores = logits / self.task.run.sampling.temperature + noise
        own = torch.tensor(tokens[begin:], device=logits.device)[:, None]
        own_scores, own_noise = scores.gather(1, own)[:, 0], noise.gather(1, own)[:, 0]
        best_scores, best = scores.scatter(1, own, -torch.inf).max(dim=1)
        changes = noise.gather(1, best[:, None])[:, 0] - own_noise
        shortfalls = own_scores - best_scores
        return [
            Edit(rollout, begin + row, int(best[row]), float(shortfalls[row]), float(changes[row]))
            for row in range(len(tokens) - begin)
        ]

    async def _first_plain(
        self, mining_window: MiningWindow, group: Group, assignment: Assignment, edits: Sequence[Edit]
    ) -> Group | None:
        """Return the group with the first of these edits that honest validators plainly refuse; None if none is."""
        limit = _PLAIN_FACTOR * self._widest.margin_limit
        for edit in edits[:_ATTEMPTS]:
            prefix = (*group.rollouts[edit.rollout].tokens[: edit.position], edit.token)
            tokens = await self._continue(assignment, assignment.seeds[edit.rollout], prefix)
            if tokens is None:
                continue
            (forward,) = await self.engine.forward([assignment.prompt], [tokens])
            one = replace(assignment, seeds=(assignment.seeds[edit.rollout],))
            rollouts = list(group.rollouts)
            generation = Generation(tokens, forward.hidden, ())
            rollouts[edit.rollout] = (await self.rollouts(mining_window, one, [generation]))[0]
            false_group = group.model_copy(update={"rollouts": tuple(rollouts)})
            judgement = await self._judge(mining_window, false_group)
            if judgement.reason == Reason.SAMPLING and judgement.worst_margin > limit:
                return false_group
        return None

    async def _continue(self, assignment: Assignment, seed: bytes, tokens: tuple[int, ...]) -> tuple[int, ...] | None:
        """Return these tokens and those that the policy samples behind them; None if they are too many."""
        params, words = self.task.run.sampling.params(), sampling.seed_words([seed])
        for _ in range(2 * _TAIL):
            if params.is_complete(tokens):
                return tokens
            (forward,) = await self.engine.forward([assignment.prompt], [(*tokens, params.stops[0])])
            logits = forward.project(forward.hidden[-1:]).cpu()[:, : self.task.vocabulary]
            position = torch.tensor([len(tokens)])
            tokens = (*tokens, int(sampling.choose(logits, words, position, params.temperature, params.filters)))
        return tokens if params.is_complete(tokens) else None

    async def _judge(self, mining_window: MiningWindow, group: Group) -> Judgement:
        """Return the judgement on a group by itself of an honest validator of whatever arithmetic tolerates most."""
        judge = Judge(self.task, self.engine, mining_window.window, mining_window.randomness)
        (judgement,) = await judge.judge([(group, content_digest(group.to_frame()))], self._widest)
        return judgement
