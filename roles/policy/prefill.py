"""What a prefill says of completions, a piece of their logits at a time: the validator's check and the calibration's.

The logits of one group of long completions are gigabytes where the vocabulary has 150,000 tokens. What is asked of them
takes a few bytes a token, so they are computed from the hidden states in pieces of one size and dropped.
"""

from collections.abc import Iterator, Sequence
from typing import Final

import torch
from torch import Tensor

from protocol import limits
from protocol.rollout import sampling
from protocol.rollout.sampling import SamplingParams
from roles.ports import Forward

_LOGITS_BYTES: Final = 32 * limits.MIB
"""Of one piece: 54 tokens with a vocabulary of 150,000. Filters hold a few copies of it."""


def joined(forwards: Sequence[Forward]) -> Forward:
    """Completions of one call, one behind another; without a copy where they lie so in memory, as those of one batch
    do.
    """
    parts = [forward.hidden for forward in forwards if len(forward.hidden)] or [forwards[0].hidden]
    first, place = parts[0], parts[0].data_ptr()
    storage = first.untyped_storage().data_ptr()
    for part in parts:
        if part.data_ptr() != place or part.untyped_storage().data_ptr() != storage or not part.is_contiguous():
            return Forward(torch.cat(parts), forwards[0].project)
        place += part.nbytes
    whole = first.as_strided((sum(map(len, parts)), first.shape[1]), first.stride())
    return Forward(whole, forwards[0].project)


def check(
    forward: Forward,
    completions: Sequence[Sequence[int]],
    seeds: Sequence[bytes],
    params: SamplingParams,
    vocabulary: int,
    slack: float = 0.0,
    limit: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Margins and log-probabilities of completions under the policy that computed a prefill
    (protocol/rollout/sampling.py).

    Args:
        forward: of all completions, one behind another: N tokens.
        seeds: 16 bytes for each completion.
        slack, limit: see `sampling.batch_margins`.

    Returns:
        float32 [N] twice.

    Raises:
        EngineError: the engine broke.
    """
    tokens = torch.tensor([token for completion in completions for token in completion], dtype=torch.int64)
    margins, logprobs = torch.empty(len(tokens)), torch.empty(len(tokens))
    begin, rows = 0, max(1, _LOGITS_BYTES // (4 * vocabulary))
    for at, lengths, first in _pieces(list(map(len, completions)), rows):
        piece = slice(begin, begin + sum(lengths))
        logits, own = forward.project(forward.hidden[piece]), tokens[piece]
        margins[piece] = sampling.batch_margins(
            logits, own, seeds[at], lengths, params.temperature, params.filters, slack, limit, first=first
        )
        logprobs[piece] = sampling.log_probabilities(logits, own, params.temperature, params.filters)
        begin = piece.stop
    return margins, logprobs


def _pieces(lengths: Sequence[int], rows: int) -> Iterator[tuple[slice, list[int], int]]:
    """At most so many tokens at a time: which completions, how many tokens of each, and how many of the first stand
    before.
    """
    completion = before = 0
    while completion < len(lengths):
        begin, first, own = completion, before, list[int]()
        while completion < len(lengths) and sum(own) < rows:
            own.append(min(rows - sum(own), lengths[completion] - before))
            before += own[-1]
            if before == lengths[completion]:
                completion, before = completion + 1, 0
        yield slice(begin, begin + len(own)), own, first
