"""The check of one group against the policy, the randomness and the rules (docs/spec/verdict.md).

Order: version, quota and form, prompt, tokens and ending, sketch, sampling, stops, turns, reward. The sketch comes
before sampling, so that 'wrong-sketch' means another policy computed this, and 'wrong-sampling' that the right one did
but drew other tokens. Rollouts with misses are continued after these: what a miner gains by its misses is counted as
luck, and the reward of the continuation counts instead. The environment of an episode is
stepped after these, too: with a forged reply a miner could make the true policy write whatever it likes, so no
environment sees a turn before all replies ahead of it are its own.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext, suppress
from dataclasses import dataclass, field, replace

import numpy as np

from protocol.environments.base import SandboxLimitError
from protocol.judging.evidence import (
    NO_COUNTS,
    REPRODUCED,
    UNREPRODUCED,
    Counts,
    count_group,
    count_luck,
    repeated_positions,
    whole_margins,
)
from protocol.judging.stratum_counts import SharesOf
from protocol.judging.verdict import Judgement, Reason, own_rejection
from protocol.proof import Thresholds
from protocol.rollout import challenge, sketch
from protocol.rollout.batch import EpisodeRollout, Group, Rollout
from protocol.rollout.checking import Check, CheckRules
from protocol.rollout.sampling import NOISE_UNIT
from protocol.rollout.sketch import SketchKey
from roles.policy.assignment import Assignment, Task
from roles.policy.episodes import OpenEpisode, replayed_reward
from roles.policy.sequences import split
from roles.ports import CheckRequest, Engine, Request

_TOKENS_AT_ONCE = 2048  # a deadline can end the judging after so many tokens
_DECODED_AT_ONCE = 1 << 16  # tokens of continuations, whose states an engine keeps until it returns them
_MOST_LIMITS = 2  # groups at which the environment reaches a limit, which takes long; behind them no more are tried

Reservation = Callable[[int], AbstractAsyncContextManager[object]]
"""Waits until something is free, and reserves it for one case: what has a smaller load, in tokens that are computed
one by one for each million of the case, goes first.
"""


@dataclass(frozen=True)
class Continuation:
    """A rollout as the validator generates it.

    Attributes:
        begin: index of the first miss.
        tokens: of the whole rollout.
    """

    begin: int
    tokens: tuple[int, ...]


@dataclass(frozen=True)
class GroupCheck:
    """The result for one group.

    Attributes:
        reason: why the group is rejected; None if it is accepted.
        rewards, ends, logprobs: of an accepted group, as in `Judgement`.
        margins: int64 [N], `whole_margins` of its tokens.
    """

    reason: Reason | None
    counts: Counts = NO_COUNTS
    rewards: tuple[int, ...] = ()
    ends: tuple[int, ...] = ()
    logprobs: bytes = b""
    margins: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))


class Judge:
    """Checks groups of one window with an engine that serves their version, by the shares of its strata. `draw` is the
    randomness of the second round, which selects the rollouts that are continued; None for none.
    """

    def __init__(
        self,
        task: Task,
        engine: Engine,
        window: int,
        randomness: bytes,
        shares_of: SharesOf = lambda version: (),
        draw: bytes | None = None,
    ) -> None:
        self._task = task
        self._engine = engine
        self._window = window
        self._randomness = randomness
        self._shares_of = shares_of
        self._draw = draw
        self.sketch = SketchKey(task.run.proof.sketch, challenge.sketch_seed(task.run_id, window, randomness))
        self.arithmetic = engine.arithmetic

    async def judge(
        self,
        groups: Sequence[tuple[Group, bytes]],
        thresholds: Thresholds,
        at_engine: Reservation = nullcontext,
        at_rewards: Reservation = nullcontext,
    ) -> list[Judgement]:
        """Judge groups, each with the digest of its frame, some thousands of tokens at a time; return the judgements in
        order. `at_engine` is entered while the engine is used, once more for continuations, and `at_rewards` behind it
        while the environment computes.
        """
        checks: list[tuple[Assignment | None, GroupCheck]] = []
        part: list[Group] = []
        tokens = 0
        async with at_engine(0):
            for group, _ in groups:
                part.append(group)
                tokens += sum(len(rollout.sequence) for rollout in group.rollouts)
                if tokens >= _TOKENS_AT_ONCE:
                    checks += await self._check(part, thresholds)
                    part, tokens = [], 0
            checks += await self._check(part, thresholds)
        continued = await self._continue([group for group, _ in groups], checks, at_engine)
        judgements: list[Judgement] = []
        limits = 0
        async with at_rewards(0):
            for place, ((group, digest), (own, check)) in enumerate(zip(groups, checks, strict=True)):
                result = check
                if own is not None and check.reason is None:
                    result = GroupCheck(Reason.UNREPRODUCED)
                    try:
                        if limits < _MOST_LIMITS:
                            result = await self._check_rewards(group, own, check, thresholds, continued[place])
                    except SandboxLimitError:
                        limits += 1
                judgements.append(_judgement(group.index, digest, _token_count(group), result))
        return judgements

    async def _check(
        self, groups: Sequence[Group], thresholds: Thresholds
    ) -> list[tuple[Assignment | None, GroupCheck]]:
        """Return the assignment of each group, None for one that there is no more to check of, and what was found up to
        the turns. Long computations run off the event loop, which has deadlines to watch; cancelling this call takes
        effect when the current one ends.
        """
        assignments, reasons = await self._task.run_sync(self._check_forms, groups)
        sound = [index for index, reason in enumerate(reasons) if reason is None]
        requests = [
            request
            for index in sound
            if (assignment := assignments[index]) is not None
            for request in check_requests(groups[index], assignment, self.sketch)
        ]
        checks = [GroupCheck(reason) for reason in reasons]
        if sound:
            rules = CheckRules(self._task.run.sampling.params(), *filter_bounds(thresholds))
            results = await self._engine.check(requests, rules)
            size = self._task.run.group_size
            parts = [Check.join(results[start : start + size]) for start in range(0, len(results), size)]

            def check_positions() -> list[GroupCheck]:
                return [
                    self._check_positions(groups[index], part, thresholds)
                    for index, part in zip(sound, parts, strict=True)
                ]

            for index, check in zip(sound, await self._task.run_sync(check_positions), strict=True):
                checks[index] = check
        return list(zip(assignments, checks, strict=True))

    def _check_forms(self, groups: Sequence[Group]) -> tuple[list[Assignment | None], list[Reason | None]]:
        """Return the assignment of each group, and the reason to reject it that needs no engine, if there is one."""
        assignments = [self._assign(group) for group in groups]
        return assignments, [self._check_form(*pair) for pair in zip(groups, assignments, strict=True)]

    def _assign(self, group: Group) -> Assignment | None:
        """Return the assignment of a group; None if the environment reached a limit."""
        with suppress(SandboxLimitError):
            shares = self._shares_of(group.version)
            return self._task.assign(self._window, self._randomness, group.miner, group.index, shares)
        return None

    def _check_form(self, group: Group, assignment: Assignment | None) -> Reason | None:
        if assignment is None:
            return Reason.UNREPRODUCED
        if len(group.rollouts) != self._task.run.group_size:
            return Reason.QUOTA
        if group.prompt_tokens != assignment.prompt:
            return Reason.PROMPT
        for rollout in group.rollouts:
            if max(rollout.sequence, default=0) >= self._task.vocabulary or not self._is_complete(rollout):
                return Reason.TOKENS
        return None

    def _is_complete(self, rollout: Rollout) -> bool:
        rule = self._task.run.episode_rule
        if isinstance(rollout, EpisodeRollout):
            return rule is not None and rule.is_complete(rollout.tokens, rollout.decoded_turns)
        return rule is None and self._task.run.sampling.params().is_complete(rollout.tokens)

    def _check_positions(self, group: Group, check: Check, thresholds: Thresholds) -> GroupCheck:
        """Compare the statistics of the positions at which the policy drew with the thresholds."""
        miner_sketches = b"".join(rollout.sketch for rollout in group.rollouts)
        distances = sketch.distances(miner_sketches, sketch.rounded(check.sketch))
        margins = whole_margins(check.margins.numpy(), NOISE_UNIT)
        repeats = repeated_positions([rollout.sequence for rollout in group.rollouts])
        if self._task.run.episode is not None:
            repeats = repeats[np.concatenate([np.array(rollout.drawn, bool) for rollout in group.rollouts])]
        lengths = [count for rollout in group.rollouts for count in _turn_lengths(rollout)]
        counts = count_group(distances, margins, check.stops.numpy(), lengths, thresholds, repeats)
        logprobs = check.logprobs.numpy().astype(np.dtype("<f4")).tobytes()
        return GroupCheck(own_rejection(counts, thresholds), counts, logprobs=logprobs, margins=margins)

    async def _continue(
        self, groups: Sequence[Group], checks: Sequence[tuple[Assignment | None, GroupCheck]], at_engine: Reservation
    ) -> list[dict[int, Continuation]]:
        """Return, for each group, the continuations of the rollouts that R1 selects and that have a miss, by index.
        Episodes and groups that do not hold are not continued.

        What follows from the first miss is all that a miner can have gained by any of its misses in a rollout. Nothing
        in a continuation depends on what the miner chose.
        """
        run, requests, places = self._task.run, list[Request](), list[tuple[int, int]]()
        result: list[dict[int, Continuation]] = [{} for _ in groups]
        most = run.sampling.max_tokens
        for number, (group, (own, check)) in enumerate(zip(groups, checks, strict=True)):
            if self._draw is None or own is None or check.reason is not None or run.episode is not None:
                continue
            ends = np.cumsum([len(rollout.tokens) for rollout in group.rollouts])
            selected = challenge.continued_rollouts(
                self._task.run_id, self._window, self._draw, group.miner, group.index, size=len(ends), max_tokens=most
            )
            for index, misses in enumerate(np.split(check.margins > 0, ends[:-1])):
                if index in selected and misses.any():
                    first = int(misses.argmax())
                    right = own.prompt + group.rollouts[index].tokens[:first]
                    requests.append(Request(right, own.seeds[index], self.sketch, first))
                    places.append((number, index))
        if not requests:
            return result
        rooms = [most - request.offset for request in requests]
        behind = sum(len(groups[number].rollouts[index].tokens) for number, index in places)
        behind -= sum(request.offset for request in requests)
        async with at_engine(1_000_000 * behind // sum(map(_token_count, groups))):
            for batch in split(rooms, _DECODED_AT_ONCE):
                params = replace(run.sampling.params(), max_tokens=rooms[batch[-1]])
                generations = await self._engine.generate([requests[place] for place in batch], params)
                for place, generation in zip(batch, generations, strict=True):
                    # What is too long is cut off: noise depends on the position alone.
                    number, index = places[place]
                    begin = requests[place].offset
                    tokens = groups[number].rollouts[index].tokens[:begin] + generation.tokens
                    result[number][index] = Continuation(begin, tokens[:most])
        return result

    async def _check_rewards(
        self,
        group: Group,
        assignment: Assignment,
        check: GroupCheck,
        thresholds: Thresholds,
        continued: Mapping[int, Continuation],
    ) -> GroupCheck:
        """Compare turns and rewards of a group that holds so far with the environment's, and its rewards with those of
        continuations, which count where they differ. Raise SandboxLimitError if the environment reaches a limit.
        """
        counts, is_exact = check.counts, self._task.environment.exact
        if self._task.run.episode is None:
            rewards = await self._task.rewards(assignment.problem, [rollout.tokens for rollout in group.rollouts])
        else:
            replayed = await self._task.run_sync(self._replay, group, assignment)
            if None in replayed:
                if is_exact:
                    return GroupCheck(Reason.TURN, counts)
                return GroupCheck(Reason.UNREPRODUCED, UNREPRODUCED if thresholds.replay else NO_COUNTS)
            rewards = tuple(replayed)
            counts += REPRODUCED if thresholds.replay else NO_COUNTS
        if is_exact and rewards != tuple(rollout.reward for rollout in group.rollouts):
            return GroupCheck(Reason.REWARD, counts)
        own = [item.tokens for item in continued.values()]
        others = dict(zip(continued, await self._task.rewards(assignment.problem, own), strict=True)) if own else {}
        luck = count_luck((rewards[index], other) for index, other in others.items())
        counts = counts.model_copy(update={"luck": luck})
        cut = {index: continued[index].begin for index, other in others.items() if other != rewards[index]}
        ends = tuple(cut.get(index, len(rollout.tokens)) for index, rollout in enumerate(group.rollouts)) if cut else ()
        rewards = tuple(others.get(index, reward) for index, reward in enumerate(rewards))
        return replace(check, counts=counts, rewards=rewards, ends=ends)

    def _replay(self, group: Group, assignment: Assignment) -> list[int | None]:
        """Return the reward of each episode; None for one whose replies or end are not the environment's."""
        return [
            replayed_reward(OpenEpisode(self._task, assignment.problem, seed), rollout.tokens, rollout.decoded_turns)
            for rollout, seed in zip(group.rollouts, assignment.episode_seeds, strict=True)
            if isinstance(rollout, EpisodeRollout)
        ]


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


def _turn_lengths(rollout: Rollout) -> list[int]:
    """Return the policy tokens of each turn: where the policy ends is tested once a turn."""
    if isinstance(rollout, EpisodeRollout):
        return [count for count, _ in rollout.turns]
    return [len(rollout.tokens)]


def filter_bounds(thresholds: Thresholds) -> tuple[float, float, float]:
    """Return the slack, the limit and the cap of margins with filters (`sampling.batch_margins`), by a row."""
    beyond = thresholds.margin.beyond
    return beyond[0] * NOISE_UNIT, beyond[-1] * NOISE_UNIT, beyond[min(1, len(beyond) - 1)] * NOISE_UNIT


def _token_count(group: Group) -> int:
    return sum(len(rollout.completion) // 4 for rollout in group.rollouts)


def reject_group(index: int, digest: bytes, reason: Reason) -> Judgement:
    """Return the judgement on a group that is rejected without an engine."""
    return _judgement(index, digest, 0, GroupCheck(reason))


def _judgement(index: int, digest: bytes, tokens: int, check: GroupCheck) -> Judgement:
    return Judgement(
        index=index,
        digest=digest,
        reason=check.reason.value if check.reason else "",
        tokens=tokens,
        counts=check.counts,
        rewards=() if check.reason else check.rewards,
        ends=() if check.reason else check.ends,
        logprobs=b"" if check.reason else check.logprobs,
    )
