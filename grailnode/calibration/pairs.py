"""One way to compute generates, another checks: what a validator sees of honest work, or of a copy's, group by group."""

from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch

from grailnode.calibration.variants import Pair
from grailnode.engine.policy import Policy
from protocol.digest import Weights
from protocol.judging.evidence import Evidence, compute_evidence, repeated_positions
from protocol.rollout import challenge, sketch
from protocol.rollout.sampling import SamplingParams
from protocol.run import ProofSpec
from roles.policy.prefill import check_completions, join_forwards
from roles.ports import Engine, Forward, Generation, Request

_CHUNK_BYTES: Final = 1 << 28
"""What the logits (float32) of the groups that are generated and checked together would take."""
_CHUNK_ROLLOUTS: Final = 512
_LEAST_RIVAL: Final = 0.1  # probability of all rivals; below it, rounding of the log-probability itself would show
_RUN: Final = bytes(32)  # no run: seeds are derived as a run derives them, from this in place of its id and its miners


@dataclass(frozen=True)
class CalibrationTask:
    """What is asked of both sides, as a run would ask it.

    Attributes:
        prompt: the prompt of a group's 32-byte seed.
        kind: of sketch.
        seed: other numbers give other prompts, noise and projections.
    """

    policy: Policy
    params: SamplingParams
    group_size: int
    prompt: Callable[[bytes], str]
    kind: sketch.SketchKind = "projection"
    seed: int = 0

    @property
    def chunk(self) -> int:
        """Groups that are generated and checked together."""
        rollout = self.params.max_tokens * self.policy.vocabulary * 4
        return max(1, min(_CHUNK_ROLLOUTS, _CHUNK_BYTES // rollout) // self.group_size)


@dataclass(frozen=True)
class GroupMeasurement:
    """What the check sees of one group, N tokens, rollout behind rollout.

    Attributes:
        lengths: tokens of each rollout, N in sum.
        distances: int16 [N], the largest of the four differences of the sketches at each position.
        repeats: bool [N], positions whose state an earlier rollout has had (protocol/judging/evidence.py): their
            distances do not count.
        margins: float32 [N], the sampling shortfall of each token.
        shifts: float32 [N], by how much the two sides differ in each token's score against its average rival's, in
            absolute value and units of logits / temperature: what makes a margin where two scores nearly tie.
    """

    lengths: tuple[int, ...]
    distances: np.ndarray
    repeats: np.ndarray
    margins: np.ndarray
    shifts: np.ndarray

    @property
    def fresh(self) -> np.ndarray:
        """The distances that count."""
        counted: np.ndarray = self.distances[~self.repeats]
        return counted

    def weigh(self, proof: ProofSpec) -> Evidence:
        """The evidence that a validator has of this group."""
        return compute_evidence(self.distances, self.margins, self.lengths, proof, self.repeats)


async def observe(
    work: CalibrationTask, pair: Pair, weights: Weights, groups: int, *, claimed: Weights | None = None, first: int = 0
) -> AsyncIterator[GroupMeasurement]:
    """Generate groups one way and check them the other way.

    Args:
        weights: of the policy.
        groups: how many.
        claimed: what the generating side computes with instead: a copy that passes for the policy.
        first: number of the first group; the same numbers get the same prompts, noise and projections.

    Raises:
        PolicyError, EngineError: one of the two cannot compute this policy.
    """
    generating = await pair.generating.serve(work.policy, weights if claimed is None else claimed)
    checking = await pair.checking.serve(work.policy, weights)
    for begin in range(first, first + groups, work.chunk):
        numbers = range(begin, min(begin + work.chunk, first + groups))
        for group in await _chunk(work, numbers, generating, checking):
            yield group


async def _chunk(work: CalibrationTask, numbers: range, generating: Engine, checking: Engine) -> list[GroupMeasurement]:
    randomness = work.seed.to_bytes(32, "little")
    seeds = [challenge.group_seed(_RUN, 0, randomness, _RUN, number) for number in numbers]
    requests = [
        Request(prompt, challenge.rollout_seed(seed, index))
        for seed in seeds
        for prompt in [work.policy.tokenizer.encode(work.prompt(seed))]
        for index in range(work.group_size)
    ]
    done = await generating.generate(requests, work.params)
    seen = await checking.forward([request.prompt for request in requests], [item.tokens for item in done])
    projection = challenge.sketch_seed(_RUN, numbers.start, randomness)
    size = work.group_size
    return [
        _compare(work, requests[at : at + size], done[at : at + size], seen[at : at + size], projection)
        for at in range(0, len(requests), size)
    ]


def _compare(
    work: CalibrationTask,
    requests: Sequence[Request],
    done: Sequence[Generation],
    seen: Sequence[Forward],
    projection: bytes,
) -> GroupMeasurement:
    """As roles/validator/judge.py does it."""
    claimed = sketch.commit(work.kind, torch.cat([item.hidden for item in done]), projection)
    whole = join_forwards(seen)
    due = sketch.commit(work.kind, whole.hidden, projection)
    completions, seeds = [item.tokens for item in done], [request.seed for request in requests]
    margins, logprobs = check_completions(whole, completions, seeds, work.params, work.policy.vocabulary)
    likely = logprobs.numpy()
    said = np.array([value for item in done for value in item.logprobs], dtype=np.float32)
    # A log-probability moves by (1 - p) times what the token's score moves against its average rival's.
    shifts = np.abs(likely - said) / np.maximum(1.0 - np.exp(likely), _LEAST_RIVAL)
    lengths = tuple(map(len, completions))
    return GroupMeasurement(
        lengths, sketch.distances(claimed, due), repeated_positions(completions), margins.numpy(), shifts
    )
