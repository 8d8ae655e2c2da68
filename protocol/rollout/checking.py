"""The check of completions under a policy, from its hidden states: sketch, margins, stops and log-probabilities.

With a vocabulary of 150,000 tokens, the logits of one group of long completions are gigabytes, and the results are a
few bytes a token. So logits are computed from the hidden states one piece at a time, and dropped.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Final, NamedTuple

import torch
from torch import Tensor

from protocol import limits
from protocol.rollout import sampling, sketch
from protocol.rollout.sampling import SamplingParams
from protocol.rollout.sketch import SketchKey
from protocol.rollout.token_choice import best_rivals

_LOGITS_BYTES: Final = 32 * limits.MIB
"""Bytes of one piece of logits: 54 tokens with a vocabulary of 150,000. Filters need a few copies of it."""


@dataclass(frozen=True)
class CheckRules:
    """The rules of a check; `rivals` asks for the best other token at each position (see `sampling.batch_margins`)."""

    params: SamplingParams
    slack: float = 0.0
    limit: float = 0.0
    cap: float = 0.0
    rivals: bool = False


@dataclass(frozen=True)
class DrawnTokens:
    """The tokens of one completion that its policy drew."""

    tokens: Sequence[int]  # token ids
    seed: bytes  # 16 bytes, of their noise; token number n was drawn with the noise of position n
    sketch: SketchKey  # with which their sketch is computed


class Check(NamedTuple):
    """What a policy says of N tokens."""

    sketch: Tensor  # float32 [N, 4], the values of the sketch before they are rounded (`sketch.rounded`)
    margins: Tensor  # float32 [N], the sampling shortfall of each
    stops: Tensor  # bool [N], where a stop token is taken or drawn
    logprobs: Tensor  # float32 [N]
    # float32 [N, 2], the token with the best score of all others, and by how much this falls short of the score of the
    # own one, at most 0 where that may not pass the filters; [N, 0] if the rules do not ask for it
    rivals: Tensor

    def split(self, lengths: Sequence[int]) -> list["Check"]:
        """Return the checks of completions of these lengths, whose sum is N."""
        return [Check(*part) for part in zip(*(torch.split(column, list(lengths)) for column in self), strict=True)]

    @classmethod
    def join(cls, checks: Sequence["Check"]) -> "Check":
        """Return the check of several completions, one behind another."""
        if not checks:
            nothing = torch.empty(0)
            return cls(torch.empty(0, sketch.BYTES_PER_TOKEN), nothing, nothing.bool(), nothing, nothing)
        return cls(*map(torch.cat, zip(*checks, strict=True)))


def check_completions(
    hidden: Tensor,
    project: Callable[[Tensor], Tensor],
    completions: Sequence[DrawnTokens],
    rules: CheckRules,
    vocabulary: int,
    *,
    first: int = 0,
) -> Check:
    """Check completions, N tokens in all, under the policy that computed the hidden states [N, D] from which they are
    drawn, one completion behind another, on any device. `project` computes the logits float32 [n, V] of states [n, D],
    on whose device the results are; `first` tokens of the first completion come before these.
    """
    params = rules.params
    tokens = torch.tensor([token for item in completions for token in item.tokens], dtype=torch.int64)
    places = sampling.token_places(
        [item.seed for item in completions], [len(item.tokens) for item in completions], first=first
    )
    values, rows = _sketch_values(hidden, completions), max(1, _LOGITS_BYTES // (4 * vocabulary))
    parts = list[Check]()
    for begin in range(0, len(tokens), rows):
        piece = slice(begin, begin + rows)
        logits = project(hidden[piece])
        own, words, positions = (part[piece].to(logits.device) for part in (tokens, *places))
        drawn = words, positions, params.temperature
        bounds = rules.slack, rules.limit, rules.cap
        margins = sampling.batch_margins(logits, own, *drawn, params.filters, *bounds)
        stops = sampling.drawn_stops(logits, own, margins, *drawn, params.stops)
        likely = sampling.log_probabilities(logits, own, params.temperature, params.filters)
        rivals = logits.new_empty(len(logits), 0)  # no view, which would keep the logits
        if rules.rivals:
            rivals = best_rivals(logits, own, *drawn, params.filters, rules.slack)
        parts.append(Check(values[piece].to(logits.device), margins, stops, likely, rivals))
        del logits  # before the next piece is computed
    return Check.join(parts)


def _sketch_values(hidden: Tensor, completions: Sequence[DrawnTokens]) -> Tensor:
    """Return the values of the sketches: float32 [N, 4]."""
    values, begin = [hidden.new_empty(0, sketch.BYTES_PER_TOKEN, dtype=torch.float32)], 0
    for key, group in groupby(completions, lambda item: item.sketch):
        end = begin + sum(len(item.tokens) for item in group)
        if end > begin:
            values.append(sketch.values_of(key.kind, hidden[begin:end], key.seed))
        begin = end
    return torch.cat(values)
