"""Margins, stops and log-probabilities of completions from a prefill, for the validator and the calibration.

With a vocabulary of 150,000 tokens, the logits of one group of long completions are gigabytes, and the results are a
few bytes a token. So logits are computed from the hidden states one piece at a time, and dropped.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from protocol import limits
from protocol.rollout import sampling
from protocol.rollout.sampling import SamplingParams
from roles.ports import Forward

_LOGITS_BYTES: Final = 32 * limits.MIB
"""Bytes of one piece of logits: 54 tokens with a vocabulary of 150,000. Filters need a few copies of it."""


@dataclass(frozen=True)
class Check:
    """What a prefill says of N tokens.

    Attributes:
        margins: the sampling shortfall of each, float32 [N].
        stops: where a stop token is taken or drawn, bool [N].
        logprobs: float32 [N].
    """

    margins: Tensor
    stops: Tensor
    logprobs: Tensor


def join_forwards(forwards: Sequence[Forward]) -> Forward:
    """Concatenate the completions of one call.

    Parts that are already adjacent in memory, as those of one batch are, are not copied.
    """
    parts = [forward.hidden for forward in forwards if len(forward.hidden)] or [forwards[0].hidden]
    first, address = parts[0], parts[0].data_ptr()
    storage = first.untyped_storage().data_ptr()
    for part in parts:
        if part.data_ptr() != address or part.untyped_storage().data_ptr() != storage or not part.is_contiguous():
            return Forward(torch.cat(parts), forwards[0].project)
        address += part.nbytes
    whole = first.as_strided((sum(map(len, parts)), first.shape[1]), first.stride())
    return Forward(whole, forwards[0].project)


def check_completions(
    forward: Forward,
    completions: Sequence[Sequence[int]],
    seeds: Sequence[bytes],
    params: SamplingParams,
    vocabulary: int,
    slack: float = 0.0,
    limit: float = 0.0,
    cap: float = 0.0,
) -> Check:
    """Check completions under the policy that computed a prefill (protocol/rollout/sampling.py).

    Args:
        forward: of all completions, concatenated: N tokens.
        slack, limit, cap: see `sampling.batch_margins`.
    """
    tokens = torch.tensor([token for completion in completions for token in completion], dtype=torch.int64)
    margins, logprobs = torch.empty(len(tokens)), torch.empty(len(tokens))
    stops = torch.empty(len(tokens), dtype=torch.bool)
    begin, rows = 0, max(1, _LOGITS_BYTES // (4 * vocabulary))
    for covered, lengths, first in _pieces(list(map(len, completions)), rows):
        piece = slice(begin, begin + sum(lengths))
        logits, piece_tokens = forward.project(forward.hidden[piece]), tokens[piece]
        parts = seeds[covered], lengths, params.temperature
        margins[piece] = sampling.batch_margins(
            logits, piece_tokens, *parts, params.filters, slack, limit, cap, first=first
        )
        stops[piece] = sampling.drawn_stops(logits, piece_tokens, margins[piece], *parts, params.stops, first=first)
        logprobs[piece] = sampling.log_probabilities(logits, piece_tokens, params.temperature, params.filters)
        begin = piece.stop
    return Check(margins, stops, logprobs)


def _pieces(lengths: Sequence[int], rows: int) -> Iterator[tuple[slice, list[int], int]]:
    """Split completions into pieces of at most `rows` tokens.

    Yields:
        Which completions the piece covers, how many tokens of each, and how many tokens of the first one belong to
        earlier pieces.
    """
    completion = offset = 0
    while completion < len(lengths):
        begin, first_offset, counts = completion, offset, list[int]()
        while completion < len(lengths) and sum(counts) < rows:
            counts.append(min(rows - sum(counts), lengths[completion] - offset))
            offset += counts[-1]
            if offset == lengths[completion]:
                completion, offset = completion + 1, 0
        yield slice(begin, begin + len(counts)), counts, first_offset
