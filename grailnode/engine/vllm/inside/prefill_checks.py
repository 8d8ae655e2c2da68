"""The check of prefills where their states are: only a few numbers of each token leave the GPU."""

from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor

from grailnode.engine.vllm.inside.request_records import GIVEN, CheckArguments
from protocol.rollout.checking import DrawnTokens, check_completions
from protocol.rollout.sketch import BYTES_PER_TOKEN

WIDTHS: Final = (BYTES_PER_TOKEN, 1, 1, 1)
"""Numbers of each token: the values of its sketch, its margin, whether a stop token is due, its log-probability; its
best rival may follow.
"""

Project = Callable[[Tensor], Tensor]


def checked(arguments: CheckArguments, begin: int, states: Tensor, project: Project, vocabulary: int) -> Tensor:
    """Check the tokens of a completion that one pass of its prefill covers: float32 [n, S], a row with the
    numbers of WIDTHS for each token that the policy drew.

    Args:
        begin: the position of the first of these tokens in the completion.
        states: [N, D], from which they are drawn.
        project: computes logits [n, V] of states [n, D]; all ranks call it alike, as all have the same batch.
    """
    tokens = arguments.tokens[begin : begin + len(states)]
    rows = [row for row, token in enumerate(tokens) if token != GIVEN]
    before = sum(token != GIVEN for token in arguments.tokens[:begin])
    drawn = DrawnTokens([tokens[row] for row in rows], arguments.seed, arguments.sketch)
    own = states if len(rows) == len(states) else states[rows]
    check = check_completions(
        own, lambda part: project(part).to(torch.float32), [drawn], arguments.rules, vocabulary, first=before
    )
    others = torch.stack([check.margins, check.stops.float(), check.logprobs], dim=1)
    return torch.cat([check.sketch, others, check.rivals], dim=1)
