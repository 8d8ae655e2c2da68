"""Measures a pair: one way to compute generates, another checks, and the check yields a measurement for each group.

Of what was generated only the tokens, their log-probabilities and the sketches are needed, as of what miners submit. So
several ways can check the same rollouts, one after the other.
"""

from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Final

import numpy as np
import torch
from torch import Tensor

from grailnode.engine.policy import Policy
from protocol.judging.evidence import Counts, count_group, count_luck, repeated_positions, whole_margins
from protocol.lora import LoraSpec
from protocol.proof import Thresholds
from protocol.rollout import challenge, sketch
from protocol.rollout.checking import Check, CheckRules
from protocol.rollout.sampling import NOISE_UNIT, SamplingParams
from protocol.rollout.sketch import SketchKey
from protocol.run import ChatSpec
from roles.policy.assignment import encode_prompt
from roles.ports import CheckRequest, Engine, Generation, Request

_CHUNK_BYTES: Final = 1 << 28
"""Bound on the bytes of the logits (float32) of groups that are generated and checked together."""
_CHUNK_ROLLOUTS: Final = 512
_LEAST_RIVAL: Final = 0.02  # probability of all other tokens; below it, rounding of the log-probability would dominate
_RUN: Final = bytes(32)  # replaces the ids of run and miner where seeds are derived, as there is no run


@dataclass(frozen=True)
class CalibrationTask:
    """The work of both sides, as a run would give it to them.

    Attributes:
        prompt: returns the prompt for a group's 32-byte seed.
        rewards: returns the rewards of completions of the prompt of a seed, in millionths; None if there are none.
        chat: how a prompt becomes a conversation; None for prompts as they are.
        seed: prompts, noise and projections are derived from it.
        lora: the adapters that the run trains; None for a run that trains all weights.
    """

    policy: Policy
    params: SamplingParams
    group_size: int
    prompt: Callable[[bytes], str]
    kind: sketch.SketchKind = "projection"
    seed: int = 0
    chat: ChatSpec | None = None
    lora: LoraSpec | None = None
    rewards: Callable[[bytes, Sequence[Sequence[int]]], tuple[int, ...]] | None = None

    @property
    def chunk(self) -> int:
        """Groups that are generated and checked together."""
        rollout = self.params.max_tokens * self.policy.vocabulary * 4
        return max(1, min(_CHUNK_ROLLOUTS, _CHUNK_BYTES // rollout) // self.group_size)


@dataclass(frozen=True)
class GroupMeasurement:
    """The measurements of a check on one group of N tokens, one rollout after another.

    Attributes:
        lengths: tokens of each rollout, N in sum.
        distances: uint8 [N], the largest of the four differences of the sketches at each position.
        sketch_errors: float32 [N], the same before rounding, and not on the circle.
        repeats: bool [N], positions with the state of an earlier rollout (protocol/judging/evidence.py): their
            distances do not count.
        margins: float32 [N], the sampling shortfall of each token.
        stops: bool [N], where a stop token is taken or drawn.
        differences: float32 [N], the checking side's log-probabilities minus those of the generating side.
        shifts: float32 [N], absolute difference of the two sides in a token's score relative to the average other
            token's, in units of logits / temperature: it causes a margin where two scores nearly tie.
        rivals: float32 [N], the probability of all other tokens, at least 0.02. The two best scores differ by less than
            a small d with a probability of about d times this.
        rewards: of each rollout, in millionths; empty if the prompts have no rewards.
    """

    lengths: tuple[int, ...]
    distances: np.ndarray
    sketch_errors: np.ndarray
    repeats: np.ndarray
    margins: np.ndarray
    shifts: np.ndarray
    stops: np.ndarray
    differences: np.ndarray
    rivals: np.ndarray
    rewards: tuple[int, ...] = ()

    @property
    def fresh(self) -> np.ndarray:
        """The distances that count: those of states that no earlier rollout had."""
        distances: np.ndarray = self.distances[~self.repeats]
        return distances

    def counts(self, thresholds: Thresholds) -> Counts:
        """Return what a validator counts of this group, its luck only if its rewards are known."""
        margins = whole_margins(self.margins, NOISE_UNIT)
        counts = count_group(self.distances, margins, self.stops, self.lengths, thresholds, self.repeats)
        if not self.rewards:
            return counts
        luck = count_luck(margins, self.lengths, self.rewards, thresholds.luck.beyond)
        return counts.model_copy(update={"luck": luck})


@dataclass(frozen=True)
class Submission:
    """A group of N tokens as a miner submits it, without the hidden states.

    Attributes:
        seed: of its prompt.
        requests, completions: one of each for every rollout.
        sketch: of the states behind all tokens before rounding, float32 [N, 4]; projection: the seed with which it was
            computed.
        logprobs: float32 [N], of the tokens.
    """

    seed: bytes
    requests: tuple[Request, ...]
    completions: tuple[tuple[int, ...], ...]
    sketch: Tensor
    projection: bytes
    logprobs: np.ndarray


async def generate_groups(
    work: CalibrationTask, generating: Engine, groups: int, *, first: int = 0
) -> AsyncIterator[list[Submission]]:
    """Generate groups, and yield what a miner submits of them, as many at a time as are computed together.

    Groups of the same numbers, of which `first` is the first, have the same prompts, noise and projections.
    """
    randomness, size = work.seed.to_bytes(32, "little"), work.group_size
    for begin in range(first, first + groups, work.chunk):
        numbers = range(begin, min(begin + work.chunk, first + groups))
        seeds = [challenge.group_seed(_RUN, 0, randomness, _RUN, number) for number in numbers]
        requests = [
            Request(prompt, challenge.rollout_seed(seed, index))
            for seed in seeds
            for prompt in [encode_prompt(work.policy.tokenizer, work.chat, work.prompt(seed))]
            for index in range(size)
        ]
        generations = await generating.generate(requests, work.params)
        projection = challenge.sketch_seed(_RUN, begin, randomness)
        yield [
            _submit(work, seed, requests[at : at + size], generations[at : at + size], projection)
            for seed, at in zip(seeds, range(0, len(requests), size), strict=True)
        ]


async def check_groups(
    work: CalibrationTask, checking: Engine, submissions: Sequence[Submission]
) -> list[GroupMeasurement]:
    """Check groups by a prefill of all of them, and return the measurements."""
    requests = [
        CheckRequest(request.prompt, completion, request.seed, SketchKey(work.kind, submission.projection))
        for submission in submissions
        for request, completion in zip(submission.requests, submission.completions, strict=True)
    ]
    checks = iter(await checking.check(requests, CheckRules(work.params)))
    return [
        _compare(work, submission, Check.join(list(islice(checks, len(submission.requests)))))
        for submission in submissions
    ]


def _submit(
    work: CalibrationTask,
    seed: bytes,
    requests: Sequence[Request],
    generations: Sequence[Generation],
    projection: bytes,
) -> Submission:
    return Submission(
        seed=seed,
        requests=tuple(requests),
        completions=tuple(item.tokens for item in generations),
        sketch=sketch.values_of(work.kind, torch.cat([item.hidden for item in generations]), projection),
        projection=projection,
        logprobs=np.array([value for item in generations for value in item.logprobs], dtype=np.float32),
    )


def _compare(work: CalibrationTask, submission: Submission, check: Check) -> GroupMeasurement:
    """Compare the two sides, as roles/validator/judge.py does."""
    completions, checked = submission.completions, check.logprobs.numpy()
    # A log-probability moves by (1 - p) times what the token's score moves relative to the average other token's.
    rivals = np.maximum(1.0 - np.exp(checked), np.float32(_LEAST_RIVAL))
    return GroupMeasurement(
        lengths=tuple(map(len, completions)),
        distances=sketch.distances(sketch.rounded(submission.sketch), sketch.rounded(check.sketch)),
        sketch_errors=(submission.sketch - check.sketch).abs().amax(dim=1).numpy(),
        repeats=repeated_positions(completions),
        margins=check.margins.numpy(),
        shifts=np.abs(checked - submission.logprobs) / rivals,
        rivals=rivals,
        stops=check.stops.numpy(),
        differences=checked - submission.logprobs,
        rewards=() if work.rewards is None else work.rewards(submission.seed, completions),
    )
