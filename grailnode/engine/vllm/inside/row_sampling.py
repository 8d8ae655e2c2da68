"""Draws the tokens of a batch's rows by seed-bound sampling, for both logits processors."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from grailnode.engine.vllm.inside.request_records import RequestArguments, RequestRecords, Step
from protocol.rollout.sampling import seed_words
from protocol.rollout.token_choice import choose_with_log_probabilities, greedy_with_log_probabilities


@dataclass(frozen=True)
class SampledRow:
    """A row of a batch's logits whose token is ours to draw, with the position of that token in its completion."""

    row: int
    position: int
    arguments: RequestArguments


def draw(logits: Tensor, rows: Sequence[SampledRow], records: RequestRecords) -> Tensor:
    """Draw the tokens of rows and record them; the drawn token becomes the most likely one.

    Args:
        logits: [B, V], changed in place.
        rows: those whose token is drawn; vLLM samples the others as it likes.
        records: of this worker.

    Raises:
        RuntimeError: the states of this step were not recorded, because the worker extension is not in use.
    """
    states = records.sampled_states
    if not rows:
        return logits
    if states is None or len(states) != len(logits):
        raise RuntimeError("no hidden states of this step: the worker extension of grailnode is not loaded")
    # Rows with the same settings are drawn by one call of the kernel.
    groups: dict[tuple[object, ...], list[SampledRow]] = {}
    for row in rows:
        arguments = row.arguments
        kind = arguments.seed is None, arguments.temperature, arguments.filters, arguments.states
        groups.setdefault(kind, []).append(row)
    for group in groups.values():
        # The usual case is a batch of one kind, which needs no copy of the logits.
        whole = len(group) == len(logits) and all(item.row == place for place, item in enumerate(group))
        index = torch.tensor([item.row for item in group], device=logits.device)
        tokens, log_probabilities = _draw_group(logits if whole else logits[index], group)
        drawn_from = states if group[0].arguments.states else states[:, :0]
        # Cloned, because the next step of the model writes into the same memory.
        recorded = drawn_from.clone() if whole else drawn_from[index]
        step = Step(records.version, recorded, tokens, log_probabilities)
        # vLLM now takes the largest logit, which is that of our token.
        logits[index, tokens] = torch.inf
        for place, item in enumerate(group):
            records.write(item.arguments.request, item.position, step, place)
    return logits


def _draw_group(logits: Tensor, group: Sequence[SampledRow]) -> tuple[Tensor, Tensor]:
    """Draw the tokens of rows with the same temperature and filters: int64 [B] and float32 [B]."""
    arguments = group[0].arguments
    # The kernel's arithmetic is defined for float32 (docs/spec/sampling.md).
    logits = logits.to(torch.float32)
    if arguments.seed is None:
        return greedy_with_log_probabilities(logits)
    words = seed_words([item.arguments.seed or b"" for item in group], logits.device)
    positions = torch.tensor([item.position for item in group], device=logits.device)
    return choose_with_log_probabilities(logits, words, positions, arguments.temperature, arguments.filters)
