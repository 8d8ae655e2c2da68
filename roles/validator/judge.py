"""The check of one group against the policy, the randomness and the rules (docs/spec/verdict.md).

Order: version, quota and form, prompt, tokens and ending, sketch, sampling, reward. The sketch comes before sampling,
so that 'wrong-sketch' means another policy computed this, and 'wrong-sampling' that the right one did but drew other
tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from protocol.judging.evidence import NOT_REACHED, Evidence, repeated, weigh
from protocol.judging.verdict import Judgement, Reason
from protocol.rollout import challenge, sketch
from protocol.rollout.batch import Group
from roles.policy.assignment import Assignment, Task, ends_as_due
from roles.policy.prefill import check, joined
from roles.ports import Engine, Forward

_REWARD_TOLERANCE = 1e-6
_TOKENS_AT_ONCE = 2048  # a deadline can end the judging behind so many tokens


@dataclass(frozen=True)
class GroupCheck:
    """What was found of a group: why it is rejected, or its rewards and log-probabilities (float32 little-endian)."""

    reason: Reason | None
    evidence: Evidence = NOT_REACHED
    rewards: tuple[float, ...] = ()
    logprobs: bytes = b""


class Judge:
    """Checks groups of one window with an engine that serves their version."""

    def __init__(self, task: Task, engine: Engine, window: int, randomness: bytes) -> None:
        self._task = task
        self._engine = engine
        self._window = window
        self._randomness = randomness
        self._sketch_seed = challenge.sketch_seed(task.run_id, window, randomness)

    async def judge(self, groups: Sequence[tuple[Group, bytes]]) -> list[Judgement]:
        """Judge groups, each given with the digest of its frame; in order, some thousands of tokens at a time.

        Raises:
            EngineError: the engine broke; nothing was judged.
        """
        judgements: list[Judgement] = []
        part: list[tuple[Group, bytes]] = []
        tokens = 0
        for item in groups:
            part.append(item)
            tokens += sum(len(rollout.completion) // 4 for rollout in item[0].rollouts)
            if tokens >= _TOKENS_AT_ONCE:
                judgements += await self._judge(part)
                part, tokens = [], 0
        return judgements + await self._judge(part)

    async def _judge(self, groups: Sequence[tuple[Group, bytes]]) -> list[Judgement]:
        """All that takes long runs off the event loop, which has deadlines to watch; a cancelled call ends when its
        step does.
        """
        due, reasons = await self._task.run_sync(self._forms, groups)
        sound = [place for place, reason in enumerate(reasons) if reason is None]
        prompts = [due[place].prompt for place in sound for _ in groups[place][0].rollouts]
        completions = [rollout.tokens for place in sound for rollout in groups[place][0].rollouts]
        found = [GroupCheck(reason) for reason in reasons]
        if sound:
            forwards = await self._engine.forward(prompts, completions)
            size = self._task.run.group_size
            parts = [forwards[at : at + size] for at in range(0, len(forwards), size)]
            weighed = await self._task.run_sync(self._weigh, [(groups[at][0], due[at]) for at in sound], parts)
            for place, one in zip(sound, weighed, strict=True):
                found[place] = one if one.reason else await self._pay(groups[place][0], due[place], one)
        return [_judgement(group, digest, one) for (group, digest), one in zip(groups, found, strict=True)]

    def _forms(self, groups: Sequence[tuple[Group, bytes]]) -> tuple[list[Assignment], list[Reason | None]]:
        """What each group should be, and why it is not where no policy is needed to see that."""
        due = [self._task.assign(self._window, self._randomness, group.miner, group.index) for group, _ in groups]
        return due, [self._form(group, item) for (group, _), item in zip(groups, due, strict=True)]

    def _form(self, group: Group, due: Assignment) -> Reason | None:
        """Everything that needs no computation by the policy."""
        if len(group.rollouts) != self._task.run.group_size:
            return Reason.QUOTA
        if group.prompt_tokens != due.prompt:
            return Reason.PROMPT
        params = self._task.run.sampling.params()
        for rollout in group.rollouts:
            tokens = rollout.tokens
            if max(tokens, default=0) >= self._task.vocabulary or not ends_as_due(tokens, params):
                return Reason.TOKENS
        return None

    def _weigh(
        self, groups: Sequence[tuple[Group, Assignment]], parts: Sequence[Sequence[Forward]]
    ) -> list[GroupCheck]:
        """What the prefill (a Forward a rollout) says of each group."""
        return [self._compute(group, due, part) for (group, due), part in zip(groups, parts, strict=True)]

    def _compute(self, group: Group, due: Assignment, forwards: Sequence[Forward]) -> GroupCheck:
        """The statistics of a group's positions, against the run's thresholds; log-probabilities where they hold."""
        proof, params = self._task.run.proof, self._task.run.sampling.params()
        claimed = b"".join(rollout.sketch for rollout in group.rollouts)
        whole, completions = joined(forwards), [rollout.tokens for rollout in group.rollouts]
        distances = sketch.distances(claimed, sketch.commit(proof.sketch, whole.hidden, self._sketch_seed))
        margins, logprobs = check(
            whole, completions, due.seeds, params, self._task.vocabulary, proof.margin, proof.margin_limit
        )
        evidence = weigh(distances, margins.numpy(), list(map(len, completions)), proof, repeated(completions))
        if evidence.wrong_sketch(proof):
            return GroupCheck(Reason.SKETCH, evidence)
        if evidence.wrong_sampling(proof):
            return GroupCheck(Reason.SAMPLING, evidence)
        return GroupCheck(None, evidence, logprobs=logprobs.numpy().astype(np.dtype("<f4")).tobytes())

    async def _pay(self, group: Group, due: Assignment, found: GroupCheck) -> GroupCheck:
        """The finding on a group that the policy made, with what the environment pays for it."""
        rewards = await self._task.rewards(due.problem, [rollout.tokens for rollout in group.rollouts])
        claims = [rollout.reward for rollout in group.rollouts] if self._task.environment.exact else rewards
        if any(abs(claim - reward) > _REWARD_TOLERANCE for claim, reward in zip(claims, rewards, strict=True)):
            return GroupCheck(Reason.REWARD, found.evidence)
        return replace(found, rewards=rewards)


def _judgement(group: Group, digest: bytes, found: GroupCheck) -> Judgement:
    return Judgement(
        index=group.index,
        digest=digest,
        reason=found.reason.value if found.reason else "",
        tokens=sum(len(rollout.completion) // 4 for rollout in group.rollouts),
        positions=found.evidence.positions,
        sketch_misses=found.evidence.sketch_misses,
        sketch_median=found.evidence.sketch_median,
        margin_misses=found.evidence.margin_misses,
        worst_margin=found.evidence.worst_margin,
        surprisal=max(found.evidence.sketch_surprise, found.evidence.margin_surprise),
        rewards=found.rewards,
        logprobs=found.logprobs,
    )


def rejected(index: int, digest: bytes, reason: Reason) -> Judgement:
    """The judgement on a group that no computation was spent on."""
    return Judgement(
        index=index,
        digest=digest,
        reason=reason.value,
        tokens=0,
        positions=0,
        sketch_misses=0,
        sketch_median=0.0,
        margin_misses=0,
        worst_margin=0.0,
        surprisal=0.0,
        rewards=(),
        logprobs=b"",
    )
