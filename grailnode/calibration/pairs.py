"""Measures a pair: one way to compute generates, another checks, and the check yields a measurement for each group.

Of what was generated only the tokens, their log-probabilities and the sketches are needed, as of what miners submit. So
several ways can check the same rollouts, one after the other.
"""

from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Final

import numpy as np
import torch
import trio
from torch import Tensor

from grailnode import UserError
from grailnode.engine.policy import Policy, Tokenizer
from protocol import bounded_json
from protocol.errors import MalformedError
from protocol.judging.evidence import Counts, count_values, repeated_positions, trial_values, whole_margins
from protocol.lora import LoraSpec
from protocol.proof import StatisticName, Thresholds
from protocol.rollout import challenge, sketch
from protocol.rollout.batch import Turn, join_turns
from protocol.rollout.checking import Check, CheckRules
from protocol.rollout.sampling import NOISE_UNIT, SamplingParams
from protocol.rollout.sketch import SketchKey
from protocol.run import ChatSpec
from roles.policy.assignment import PolicyTask, encode_prompt
from roles.policy.episodes import OpenEpisode, PlayedEpisode, play, replayed_reward
from roles.ports import CheckRequest, Engine, Generation, Request

Prompts = Callable[[bytes], str]
"""Returns the prompt for a group's 32-byte seed."""

_MAX_PROMPT_BYTES: Final = 1 << 30


def drawn_from(prompts: Sequence[str]) -> Prompts:
    """Return prompts of which each is as likely as the others."""
    return lambda seed: prompts[int.from_bytes(seed[:8], "little") % len(prompts)]


def read_prompts(path: Path, tokenizer: Tokenizer) -> list[str]:
    """Return the prompts of a file of JSON Lines, each {"prompt": "..."}; a UserError names the wrong line."""
    with path.open("rb") as file:
        data = file.read(_MAX_PROMPT_BYTES + 1)
    if len(data) > _MAX_PROMPT_BYTES:
        raise UserError(f"{path}: larger than {_MAX_PROMPT_BYTES} bytes")
    prompts: list[str] = []
    for number, line in enumerate(data.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            value = bounded_json.parse(line)
        except MalformedError as error:
            raise UserError(f"{path}: line {number}: {error}") from error
        prompt = value.get("prompt") if isinstance(value, dict) else None
        if not isinstance(prompt, str) or not tokenizer.encode(prompt):
            raise UserError(f'{path}: line {number}: not {{"prompt": "..."}} with at least one token')
        prompts.append(prompt)
    if not prompts:
        raise UserError(f"{path}: contains no prompt")
    return prompts


_CHUNK_BYTES: Final = 1 << 28
"""Bound on the bytes of the logits (float32) of groups that are generated and checked together."""
_CHUNK_ROLLOUTS: Final = 512
_LEAST_RIVAL: Final = 0.02  # probability of all other tokens; below it, rounding of the log-probability would dominate
_Part = tuple[Sequence[Generation], Sequence[tuple[Turn, ...]], tuple[int, ...], tuple[bool, ...]]
"""The completions of a group, the turns of each, their rewards if there are any, and which were reproduced if replies
are not exact.
"""
_RUN: Final = bytes(32)  # replaces the ids of run and miner where seeds are derived, as there is no run


@dataclass(frozen=True)
class CalibrationTask:
    """The work of both sides, as a run would give it to them."""

    policy: Policy
    params: SamplingParams
    group_size: int
    prompt: Callable[[bytes], str]  # returns the prompt for a group's 32-byte seed
    kind: sketch.SketchKind = "projection"
    seed: int = 0  # prompts, noise and projections are derived from it
    chat: ChatSpec | None = None  # how a prompt becomes a conversation; None for prompts as they are
    lora: LoraSpec | None = None  # the adapters that the run trains; None for a run that trains all weights
    # with the environment that made the prompts, which rewards and, in episodes, replies; None for none
    task: PolicyTask | None = None

    @property
    def turns(self) -> int:
        """Most turns of an episode; 1 without episodes."""
        rule = None if self.task is None else self.task.run.episode_rule
        return 1 if rule is None else rule.turns

    @property
    def chunk(self) -> int:
        """Groups that are generated and checked together."""
        rollout = self.params.max_tokens * self.policy.vocabulary * 4
        return max(1, min(_CHUNK_ROLLOUTS, _CHUNK_BYTES // rollout) // self.group_size)


@dataclass(frozen=True)
class GroupMeasurement:
    """The measurements of a check on one group of N tokens, one rollout after another."""

    lengths: tuple[int, ...]  # tokens of each rollout, N in sum
    distances: np.ndarray  # uint8 [N], the largest of the four differences of the sketches at each position
    sketch_errors: np.ndarray  # float32 [N], the same before rounding, and not on the circle
    # bool [N], positions with the state of an earlier rollout (protocol/judging/evidence.py): their distances do not
    # count
    repeats: np.ndarray
    margins: np.ndarray  # float32 [N], the sampling shortfall of each token
    # float32 [N], absolute difference of the two sides in a token's score relative to the average other token's, in
    # units of logits / temperature: it causes a margin where two scores nearly tie
    shifts: np.ndarray
    stops: np.ndarray  # bool [N], where a stop token is taken or drawn
    differences: np.ndarray  # float32 [N], the checking side's log-probabilities minus those of the generating side
    # float32 [N], the probability of all other tokens, at least 0.02. The two best scores differ by less than a small d
    # with a probability of about d times this
    rivals: np.ndarray
    rewards: tuple[int, ...] = ()  # of each rollout, in millionths; empty if the prompts have no rewards
    turns: tuple[int, ...] = ()  # tokens of each turn, N in sum; empty if each rollout is one turn
    # whether the environment gave the replies of each rollout again; empty if they are exact
    reproduced: tuple[bool, ...] = ()

    @property
    def ends(self) -> tuple[int, ...]:
        """Tokens of each turn: where the policy ends is tested once a turn."""
        return self.turns or self.lengths

    @property
    def values(self) -> dict[StatisticName, np.ndarray]:
        """The value of each trial, by measured statistic (protocol/judging/evidence.py)."""
        margins = whole_margins(self.margins, NOISE_UNIT)
        return trial_values(self.distances, margins, self.stops, self.ends, self.repeats)

    def counts(self, thresholds: Thresholds) -> Counts:
        """Return what a validator counts of this group, all but its luck."""
        return count_values(self.values, thresholds)


@dataclass(frozen=True)
class Submission:
    """A group of N tokens as a miner submits it, without the hidden states."""

    requests: tuple[CheckRequest, ...]  # what is checked of each rollout
    turns: tuple[int, ...]  # the tokens of each turn, N in sum
    rewards: tuple[int, ...]  # of the rollouts, in millionths; empty if the prompts have no rewards
    reproduced: tuple[bool, ...]  # see `GroupMeasurement`
    sketch: Tensor  # of the states behind all tokens before rounding, float32 [N, 4]
    logprobs: np.ndarray  # float32 [N], of the tokens


async def generate_groups(
    work: CalibrationTask, generating: Engine, groups: int, *, first: int = 0
) -> AsyncIterator[list[Submission]]:
    """Generate groups, and yield what a miner submits of them, as many at a time as are computed together.

    Groups of the same numbers, of which `first` is the first, have the same prompts, noise and projections.
    """
    randomness, size = work.seed.to_bytes(32, "little"), work.group_size
    run_sync = trio.to_thread.run_sync if work.task is None else work.task.run_sync
    for begin in range(first, first + groups, work.chunk):
        numbers = range(begin, min(begin + work.chunk, first + groups))
        seeds = [challenge.group_seed(_RUN, 0, randomness, _RUN, number) for number in numbers]
        prompts = await run_sync(lambda seeds: list(map(work.prompt, seeds)), seeds)
        requests = [
            Request(encode_prompt(work.policy.tokenizer, work.chat, prompt), challenge.rollout_seed(seed, index))
            for seed, prompt in zip(seeds, prompts, strict=True)
            for index in range(size)
        ]
        parts = await (_complete if work.turns == 1 else _play)(work, generating, seeds, requests)
        key = SketchKey(work.kind, challenge.sketch_seed(_RUN, begin, randomness))
        yield [_submit(requests[place * size :][:size], part, key) for place, part in enumerate(parts)]


async def _complete(
    work: CalibrationTask, engine: Engine, seeds: Sequence[bytes], requests: Sequence[Request]
) -> list[_Part]:
    """Return the completions of each group, as episodes of one turn."""
    generations, size = await engine.generate(requests, work.params), work.group_size
    parts: list[_Part] = []
    for place, seed in enumerate(seeds):
        part = generations[place * size :][:size]
        rewards: tuple[int, ...] = ()
        if work.task is not None:
            problem = await work.task.run_sync(work.task.environment.problem, seed)
            rewards = await work.task.scores([(problem, item.tokens) for item in part])
        parts.append((part, [((len(item.tokens), ()),) for item in part], rewards, ()))
    return parts


async def _play(
    work: CalibrationTask, engine: Engine, seeds: Sequence[bytes], requests: Sequence[Request]
) -> list[_Part]:
    """Return the episodes of each group. If replies are not exact, each is replayed, as by a validator."""
    task, size, groups = work.task, work.group_size, []
    assert task is not None
    for place, seed in enumerate(seeds):
        episode_seeds = [challenge.episode_seed(seed, index) for index in range(size)]
        opened, again = await task.run_sync(_open, task, seed, episode_seeds)
        own = requests[place * size :][:size]
        groups.append(
            (again, [PlayedEpisode(item, one.prompt, one.seed) for item, one in zip(opened, own, strict=True)])
        )
    await play(task, engine, [episode for _, group in groups for episode in group])
    return [
        (
            [item.generation for item in group],
            [item.episode.turns for item in group],
            tuple(item.episode.reward for item in group),
            () if task.environment.exact else await task.run_sync(_reproduced, again, group),
        )
        for again, group in groups
    ]


def _open(task: PolicyTask, seed: bytes, episode_seeds: Sequence[bytes]) -> tuple[list[OpenEpisode], list[OpenEpisode]]:
    """Return the episodes of a group's problem, each twice: to play, and to replay."""
    problem = task.environment.problem(seed)
    played, again = ([OpenEpisode(task, problem, item) for item in episode_seeds] for _ in range(2))
    return played, again


def _reproduced(again: Sequence[OpenEpisode], group: Sequence[PlayedEpisode]) -> tuple[bool, ...]:
    return tuple(
        replayed_reward(own, played.episode.tokens, played.episode.turns) is not None
        for own, played in zip(again, group, strict=True)
    )


async def check_groups(
    work: CalibrationTask, checking: Engine, submissions: Sequence[Submission]
) -> list[GroupMeasurement]:
    """Check groups by a prefill of all of them, and return the measurements."""
    requests = [request for submission in submissions for request in submission.requests]
    checks = iter(await checking.check(requests, CheckRules(work.params)))
    return [
        _compare(submission, Check.join(list(islice(checks, len(submission.requests))))) for submission in submissions
    ]


def _submit(requests: Sequence[Request], part: _Part, key: SketchKey) -> Submission:
    generations, turns, rewards, reproduced = part
    joined = [join_turns(item.tokens, own) for item, own in zip(generations, turns, strict=True)]
    return Submission(
        requests=tuple(
            CheckRequest(request.prompt, sequence, request.seed, key, drawn)
            for request, (sequence, drawn) in zip(requests, joined, strict=True)
        ),
        turns=tuple(count for own in turns for count, _ in own),
        rewards=rewards,
        reproduced=reproduced,
        sketch=sketch.values_of(key.kind, torch.cat([item.hidden for item in generations]), key.seed),
        logprobs=np.array([value for item in generations for value in item.logprobs], dtype=np.float32),
    )


def _compare(submission: Submission, check: Check) -> GroupMeasurement:
    """Compare the two sides, as roles/validator/judge.py does."""
    checked, requests = check.logprobs.numpy(), submission.requests
    drawn = np.concatenate([np.array(request.drawn) for request in requests])
    # A log-probability moves by (1 - p) times what the token's score moves relative to the average other token's.
    rivals = np.maximum(1.0 - np.exp(checked), np.float32(_LEAST_RIVAL))
    return GroupMeasurement(
        lengths=tuple(len(request.drawn_tokens) for request in requests),
        distances=sketch.distances(sketch.rounded(submission.sketch), sketch.rounded(check.sketch)),
        sketch_errors=(submission.sketch - check.sketch).abs().amax(dim=1).numpy(),
        repeats=repeated_positions([request.completion for request in requests])[drawn],
        margins=check.margins.numpy(),
        shifts=np.abs(checked - submission.logprobs) / rivals,
        rivals=rivals,
        stops=check.stops.numpy(),
        differences=checked - submission.logprobs,
        rewards=submission.rewards,
        turns=submission.turns,
        reproduced=submission.reproduced,
    )
