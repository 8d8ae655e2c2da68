"""The check of one group against the policy, the randomness and the rules (docs/spec/verdict.md).

Order: version, quota and form, prompt, tokens and ending, sketch, sampling, stops, turns, reward. The sketch comes
before sampling, so that 'wrong-sketch' means another policy computed this, and 'wrong-sampling' that the right one did
but drew other tokens. The environment of an episode is stepped after these: with a forged reply a miner could make the
true policy write whatever it likes, so no environment sees a turn before all replies ahead of it are its own. Rollouts
with misses are continued at last: what a miner gains by its misses is counted as luck, and the reward of the
continuation counts instead.
"""

from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final

import numpy as np

from protocol.environments.base import SandboxLimitError
from protocol.judging.evidence import (
    NO_COUNTS,
    REPRODUCED,
    UNREPRODUCED,
    Counts,
    count_luck,
    count_values,
    repeated_positions,
    trial_values,
    whole_margins,
)
from protocol.judging.ledger import SharesOf
from protocol.judging.verdict import Judgement, Reason, own_rejection
from protocol.proof import Thresholds
from protocol.rollout import challenge, sketch
from protocol.rollout.batch import EpisodeRollout, Group, Rollout
from protocol.rollout.checking import Check, CheckRules
from protocol.rollout.sampling import NOISE_UNIT
from protocol.rollout.sketch import SketchKey
from roles.policy.assignment import Assignment, Task
from roles.policy.episodes import AT_ONCE, MOST_LIMITS, OpenEpisode, PlayedEpisode, play, replayed_reward
from roles.policy.sequences import Tokens, split
from roles.ports import CheckRequest, Engine, Request

_TOKENS_AT_ONCE = 2048  # a deadline can end the judging after so many tokens
_DECODED_AT_ONCE = 1 << 16  # tokens of continuations, whose states an engine keeps until it returns them

Reservation = Callable[[int], AbstractAsyncContextManager[object]]
"""Waits until something is free, and reserves it for one case: what has a smaller load, in tokens that are computed
one by one for each million of the case, goes first.
"""


@dataclass(frozen=True)
class Slots:
    """Reservations of what works on one case at a time: the engine, the environment, and the continuation of episodes,
    within which a case reserves both by turns.
    """

    engine: Reservation = nullcontext
    rewards: Reservation = nullcontext
    episodes: Reservation = nullcontext


NO_SLOTS: Final = Slots()


@dataclass
class GroupCheck:
    """What is found out about one group, check after check.

    Attributes:
        digest: of its frame.
        reason: why the group is rejected; None as long as it is not.
        rewards, ends, logprobs: as in `Judgement`.
        assignment: unless the environment reached a limit.
        margins: int64 [N], `whole_margins` of its tokens.
        first_misses: the place of the first miss of each rollout that is continued, by its index.
        continuations: likewise, the tokens before it with those that the validator generates behind them, but of
            episodes, which are `played` on; others: the rewards of continuations.
    """

    group: Group
    digest: bytes
    reason: Reason | None = None
    counts: Counts = NO_COUNTS
    rewards: tuple[int, ...] = ()
    ends: tuple[int, ...] = ()
    logprobs: bytes = b""
    assignment: Assignment = field(init=False)
    margins: np.ndarray = field(init=False)
    first_misses: dict[int, int] = field(default_factory=dict)
    continuations: dict[int, Tokens] = field(default_factory=dict)
    played: dict[int, PlayedEpisode] = field(default_factory=dict)
    others: dict[int, int] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        """Completion tokens of the group."""
        return sum(len(rollout.completion) // 4 for rollout in self.group.rollouts)

    def judgement(self) -> Judgement:
        """Return the judgement on the group."""
        found: dict[str, Any] = {"index": self.group.index, "tokens": self.tokens, "counts": self.counts}
        if self.reason is None:
            found |= {"rewards": self.rewards, "ends": self.ends, "logprobs": self.logprobs}
        return Judgement(digest=self.digest, reason="" if self.reason is None else self.reason.value, **found)


@dataclass(eq=False)
class Judge:
    """Checks groups of one window with an engine that serves their version, by the shares of its strata. `draw` is the
    randomness of the second round, which selects the rollouts that are continued; None for none.
    """

    task: Task
    engine: Engine
    window: int
    randomness: bytes
    shares_of: SharesOf = lambda version: ()
    draw: bytes | None = None

    def __post_init__(self) -> None:
        self.sketch = SketchKey(
            self.task.run.proof.sketch, challenge.sketch_seed(self.task.run_id, self.window, self.randomness)
        )
        self.arithmetic = self.engine.arithmetic

    async def judge(
        self, groups: Sequence[tuple[Group, bytes]], thresholds: Thresholds, slots: Slots = NO_SLOTS
    ) -> list[Judgement]:
        """Judge groups, each with the digest of its frame, some thousands of tokens at a time; return the judgements in
        order. What works on one case at a time is reserved while it is used, for continuations by their load.
        """
        checks = [GroupCheck(*item) for item in groups]
        begin = tokens = 0
        async with slots.engine(0):
            for end, check in enumerate(checks, 1):
                tokens += sum(len(rollout.sequence) for rollout in check.group.rollouts)
                if tokens >= _TOKENS_AT_ONCE or end == len(checks):
                    await self._check(checks[begin:end], thresholds)
                    begin, tokens = end, 0
        async with slots.rewards(0):
            await _attempt(partial(self._check_rewards, thresholds), checks)
        if behind := sum(map(self._select_misses, checks)):
            missing = [check for check in checks if check.first_misses]
            load = 1_000_000 * behind // sum(check.tokens for check in checks)
            if self.task.run.episode is None:
                async with slots.engine(load):
                    await self._continue(missing)
            else:
                async with slots.episodes(load):
                    await self._continue_episodes(missing, slots, load)
            async with slots.rewards(load):
                await _attempt(self._count_luck, missing)
        return [check.judgement() for check in checks]

    async def _check(self, checks: Sequence[GroupCheck], thresholds: Thresholds) -> None:
        """Check groups up to the turns. Long computations run off the event loop, which has deadlines to watch;
        cancelling this call takes effect when the current one ends.
        """
        await self.task.run_sync(self._check_forms, checks)
        sound = [check for check in checks if check.reason is None]
        requests = [
            request for check in sound for request in check_requests(check.group, check.assignment, self.sketch)
        ]
        if sound:
            rules = CheckRules(self.task.run.sampling.params(), *filter_bounds(thresholds))
            results = await self.engine.check(requests, rules)
            await self.task.run_sync(self._check_positions, sound, results, thresholds)

    def _check_forms(self, checks: Sequence[GroupCheck]) -> None:
        """Assign groups, and find the reasons to reject them that need no engine."""
        for check in checks:
            group = check.group
            try:
                shares = self.shares_of(group.version)
                check.assignment = self.task.assign(self.window, self.randomness, group.miner, group.index, shares)
            except SandboxLimitError:
                check.reason = Reason.UNREPRODUCED
                continue
            if len(group.rollouts) != self.task.run.group_size:
                check.reason = Reason.QUOTA
            elif group.prompt_tokens != check.assignment.prompt:
                check.reason = Reason.PROMPT
            elif not all(map(self._is_sound, group.rollouts)):
                check.reason = Reason.TOKENS

    def _is_sound(self, rollout: Rollout) -> bool:
        """Return whether the tokens of a rollout are in the vocabulary and end where the policy may end."""
        if max(rollout.sequence, default=0) >= self.task.vocabulary:
            return False
        rule = self.task.run.episode_rule
        if isinstance(rollout, EpisodeRollout):
            return rule is not None and rule.is_complete(rollout.tokens, rollout.decoded_turns)
        return rule is None and self.task.run.sampling.params().is_complete(rollout.tokens)

    def _check_positions(self, checks: Sequence[GroupCheck], results: Sequence[Check], thresholds: Thresholds) -> None:
        """Compare the statistics of the positions at which the policy drew with the thresholds. An engine's results are
        of the rollouts of all these groups.
        """
        size = self.task.run.group_size
        for place, check in enumerate(checks):
            rollouts, result = check.group.rollouts, Check.join(results[place * size : (place + 1) * size])
            distances = sketch.distances(b"".join(item.sketch for item in rollouts), sketch.rounded(result.sketch))
            check.margins = whole_margins(result.margins.numpy(), NOISE_UNIT)
            repeats = repeated_positions([rollout.sequence for rollout in rollouts])
            repeats = repeats[np.concatenate([np.array(rollout.drawn, bool) for rollout in rollouts])]
            lengths = [count for rollout in rollouts for count, _ in rollout.decoded_turns]
            values = trial_values(distances, check.margins, result.stops.numpy(), lengths, repeats)
            check.counts = count_values(values, thresholds)
            check.logprobs = result.logprobs.numpy().astype(np.dtype("<f4")).tobytes()
            check.reason = own_rejection(check.counts, thresholds)

    async def _check_rewards(self, thresholds: Thresholds, check: GroupCheck) -> None:
        """Compare turns and rewards of a group that holds so far with the environment's, or raise SandboxLimitError if
        it reaches a limit.
        """
        rollouts, problem, is_exact = check.group.rollouts, check.assignment.problem, self.task.environment.exact
        if self.task.run.episode is None:
            check.rewards = await self.task.rewards(problem, [rollout.tokens for rollout in rollouts])
        else:
            replayed = await self.task.run_sync(self._replay, check.group, check.assignment)
            check.rewards = tuple(reward for reward in replayed if reward is not None)
            if len(check.rewards) < len(replayed):
                check.reason = Reason.TURN if is_exact else Reason.UNREPRODUCED
                if not is_exact:
                    check.counts = UNREPRODUCED if thresholds.replay else NO_COUNTS
                return
            check.counts += REPRODUCED if thresholds.replay else NO_COUNTS
        if is_exact and check.rewards != tuple(rollout.reward for rollout in rollouts):
            check.reason = Reason.REWARD

    def _replay(self, group: Group, assignment: Assignment) -> list[int | None]:
        """Return the reward of each episode; None for one whose replies or end are not the environment's."""
        return [
            replayed_reward(OpenEpisode(self.task, assignment.problem, seed), rollout.tokens, rollout.decoded_turns)
            for rollout, seed in zip(group.rollouts, assignment.episode_seeds, strict=True)
        ]

    def _select_misses(self, check: GroupCheck) -> int:
        """Select the rollouts of a group that are continued: those that R1 selects and that have a miss, if the group
        holds and replies are exact. Return how many tokens they have from their first misses on.

        What follows from the first miss is all that a miner can have gained by any of its misses in a rollout. Nothing
        in a continuation depends on what the miner chose.
        """
        run, group = self.task.run, check.group
        if self.draw is None or check.reason is not None or not run.exact_replies:
            return 0
        lengths = [len(rollout.tokens) for rollout in group.rollouts]
        parts = self.task.run_id, self.window, self.draw, group.miner, group.index
        selected = challenge.continued_rollouts(*parts, size=len(lengths), max_tokens=run.sampling.max_tokens)
        for index, misses in enumerate(np.split(check.margins > 0, np.cumsum(lengths[:-1]))):
            if index in selected and misses.any():
                check.first_misses[index] = int(misses.argmax())
        return sum(lengths[index] - first for index, first in check.first_misses.items())

    async def _continue(self, checks: Sequence[GroupCheck]) -> None:
        """Continue the selected rollouts of groups without episodes."""
        params = self.task.run.sampling.params()
        places = [
            (check, index, check.group.rollouts[index].tokens[:first])
            for check in checks
            for index, first in check.first_misses.items()
        ]
        rooms = [params.max_tokens - len(right) for _, _, right in places]
        for batch in split(rooms, _DECODED_AT_ONCE):
            requests = [
                Request(check.assignment.prompt + right, check.assignment.seeds[index], self.sketch, len(right))
                for check, index, right in (places[place] for place in batch)
            ]
            generations = await self.engine.generate(requests, replace(params, max_tokens=rooms[batch[-1]]))
            for place, generation in zip(batch, generations, strict=True):
                check, index, right = places[place]
                # What is too long is cut off: noise depends on the position alone.
                check.continuations[index] = right + generation.tokens[: rooms[place]]

    async def _continue_episodes(self, checks: Sequence[GroupCheck], slots: Slots, load: int) -> None:
        """Play the selected episodes of groups from their first misses on. One that reaches a limit of the environment
        leaves its group unreproduced.
        """
        at_once = max(1, AT_ONCE // self.task.run.group_size)
        for some in (checks[start : start + at_once] for start in range(0, len(checks), at_once)):
            async with slots.rewards(load):
                await _attempt(partial(self.task.run_sync, self._replay_begun), some)
            sound = [check for check in some if check.reason is None]
            played = [item for check in sound for item in check.played.values()]
            at_engine, at_rewards = partial(slots.engine, load), partial(slots.rewards, load)
            await play(self.task, self.engine, played, self.sketch, at_engine, at_rewards)
            for check in sound:
                check.others = {index: item.episode.reward for index, item in check.played.items()}
                if any(item.is_cut_off for item in check.played.values()):
                    check.reason, check.counts = Reason.UNREPRODUCED, NO_COUNTS
                check.played.clear()

    def _replay_begun(self, check: GroupCheck) -> None:
        """Set `played` of a group: play its selected episodes again up to their first misses, but for those whose
        replies differ now; raise SandboxLimitError if the environment reaches a limit.
        """
        own = check.assignment
        for index, first in check.first_misses.items():
            rollout, begin = check.group.rollouts[index], 0
            episode = OpenEpisode(self.task, own.problem, own.episode_seeds[index])
            is_same = True
            for count, reply in rollout.decoded_turns:
                if begin + count > first:
                    break
                turn = rollout.tokens[begin : begin + count]
                is_same = is_same and episode.room > 0 and episode.take(turn) == reply
                begin += count
            if is_same and episode.room > first - begin:  # else the environment is less exact than it says
                check.played[index] = PlayedEpisode(episode, own.prompt, own.seeds[index], rollout.tokens[begin:first])

    async def _count_luck(self, check: GroupCheck) -> None:
        """Let the rewards of continuations count where they differ, and count what the rollouts have gained; raise
        SandboxLimitError if the environment reaches a limit.
        """
        if check.continuations:
            others = await self.task.rewards(check.assignment.problem, list(check.continuations.values()))
            check.others = dict(zip(check.continuations, others, strict=True))
        rewards, own = check.rewards, check.others
        luck = count_luck((rewards[index], other) for index, other in own.items())
        check.counts = check.counts.model_copy(update={"luck": luck})
        check.rewards = tuple(own.get(index, reward) for index, reward in enumerate(rewards))
        if check.rewards != rewards:
            check.ends = tuple(
                len(rollout.tokens) if reward == other else check.first_misses[index]
                for index, (rollout, reward, other) in enumerate(
                    zip(check.group.rollouts, rewards, check.rewards, strict=True)
                )
            )


async def _attempt(step: Callable[[GroupCheck], Awaitable[None]], checks: Sequence[GroupCheck]) -> None:
    """Take a step with each group that holds so far. Those at which the environment reaches a limit are unreproduced,
    and so are those behind the last limit.
    """
    limits = 0
    for check in (check for check in checks if check.reason is None):
        try:
            if limits < MOST_LIMITS:
                await step(check)
                continue
        except SandboxLimitError:
            limits += 1
        check.reason, check.counts = Reason.UNREPRODUCED, NO_COUNTS


def check_requests(group: Group, assignment: Assignment, key: SketchKey) -> list[CheckRequest]:
    """Return what an engine is asked about the rollouts of a group."""
    return [
        CheckRequest(
            assignment.prompt,
            rollout.sequence,
            seed,
            key,
            rollout.drawn if isinstance(rollout, EpisodeRollout) else None,
        )
        for rollout, seed in zip(group.rollouts, assignment.seeds, strict=True)
    ]


def filter_bounds(thresholds: Thresholds) -> tuple[float, float, float]:
    """Return the slack, the limit and the cap of margins with filters (`sampling.batch_margins`), by a row."""
    beyond = thresholds.margin.beyond
    return beyond[0] * NOISE_UNIT, beyond[-1] * NOISE_UNIT, beyond[min(1, len(beyond) - 1)] * NOISE_UNIT
