"""The check of prefills where their states are: only a few numbers of each token leave the GPU.

The scheduler may split a prefill into several passes, and batches those of many requests into one.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from grailnode.engine.vllm.inside.request_records import GIVEN, CheckArguments, RequestArguments
from protocol.rollout.checking import Check, DrawnTokens, check_completions
from protocol.rollout.sketch import BYTES_PER_TOKEN

STATISTICS: Final = BYTES_PER_TOKEN + 3
"""Numbers of each token: the values of its sketch, its margin, whether a stop token is due, its log-probability."""

Project = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Piece:
    """What one pass computes of a prefill.

    Attributes:
        position: of its first state in the request.
        states: [N, D], in memory that vLLM uses again in its next pass.
    """

    arguments: RequestArguments
    position: int
    states: Tensor


def recorded(pieces: Sequence[Piece], project: Project, vocabulary: int) -> Iterator[tuple[Piece, Tensor]]:
    """Yield what is recorded of each piece: its states [N, D], or float32 [n, STATISTICS] of those tokens that are
    checked.

    Args:
        project: computes logits [n, V] of states [n, D].
    """
    batch: list[_Checked] = []
    for piece in pieces:
        check = piece.arguments.check
        if check is None:
            yield piece, piece.states.clone()
            continue
        item = _Checked.of(piece, check)
        # Only the first completion of a batch may have begun in an earlier pass.
        if batch and (item.before or item.check.rules != batch[0].check.rules):
            yield from _check(batch, project, vocabulary)
            batch = []
        batch.append(item)
    if batch:
        yield from _check(batch, project, vocabulary)


@dataclass(frozen=True)
class _Checked:
    """A piece of a completion that is checked.

    Attributes:
        before: how many checked tokens of the completion earlier pieces have.
        drawn: those of this piece; states: from which they are drawn.
    """

    piece: Piece
    check: CheckArguments
    before: int
    drawn: DrawnTokens
    states: Tensor

    @classmethod
    def of(cls, piece: Piece, check: CheckArguments) -> "_Checked":
        arguments = piece.arguments
        assert arguments.begin is not None
        assert arguments.seed is not None
        assert arguments.sketch is not None
        begin = piece.position - arguments.begin
        tokens = check.tokens[begin : begin + len(piece.states)]
        rows = [row for row, token in enumerate(tokens) if token != GIVEN]
        drawn = DrawnTokens([tokens[row] for row in rows], arguments.seed, arguments.sketch)
        before = sum(token != GIVEN for token in check.tokens[:begin])
        states = piece.states if len(rows) == len(piece.states) else piece.states[rows]
        return cls(piece, check, before, drawn, states)


def _check(batch: Sequence[_Checked], project: Project, vocabulary: int) -> Iterator[tuple[Piece, Tensor]]:
    """Check pieces together: one product with the output projection for many of them."""
    states = torch.cat([item.states for item in batch])
    drawn, rules = [item.drawn for item in batch], batch[0].check.rules

    def logits(hidden: Tensor) -> Tensor:
        return project(hidden).to(torch.float32)

    check = check_completions(states, logits, drawn, rules, vocabulary, first=batch[0].before)
    for item, own in zip(batch, check.split([len(tokens.tokens) for tokens in drawn]), strict=True):
        yield item.piece, _row(own)


def _row(check: Check) -> Tensor:
    """Return the results of a check: float32 [n, STATISTICS]."""
    return torch.cat([check.sketch, torch.stack([check.margins, check.stops.float(), check.logprobs], dim=1)], dim=1)
