"""Draws the tokens of a batch's rows by seed-bound sampling, for both logits processors."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from grailnode.engine.vllm.inside.request_records import RequestArguments, RequestRecords, Step
from protocol.rollout.sampling import seed_words
from protocol.rollout.sketch import units_of, values_of
from protocol.rollout.token_choice import choose_with_log_probabilities


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
        settings = arguments.seed is None, arguments.temperature, arguments.filters, arguments.states, arguments.sketch
        groups.setdefault(settings, []).append(row)
    for kind, group in groups.items():
        layout = _layout_of(kind, group, logits.device)
        # The usual case is a batch of one kind, which needs no copy of the logits.
        is_whole = layout.rows == list(range(len(logits)))
        tokens, log_probabilities = _draw_group(logits if is_whole else logits[layout.index], group, layout.words)
        recorded = _recorded(states if is_whole else states[layout.index], group[0].arguments)
        step = Step(records.version, recorded, tokens, log_probabilities)
        # vLLM now takes the largest logit, which is that of our token.
        logits[layout.index, tokens] = torch.inf
        for place, item in enumerate(group):
            records.write(item.arguments.request, item.position, step, place)
    return logits


@dataclass(frozen=True)
class _Layout:
    """Rows of a batch that are drawn together. It stays the same from step to step until a request comes or goes.

    Attributes:
        rows: in the batch; arguments: of their requests.
        index: int64 [B], the rows; words: int64 [B, 4], their seeds; on the device. Empty for the most likely tokens.
    """

    rows: list[int]
    arguments: list[RequestArguments]
    index: Tensor
    words: Tensor


_layouts: dict[tuple[object, ...], _Layout] = {}  # the last one of each kind
_MAX_KINDS: Final = 64


def _layout_of(kind: tuple[object, ...], group: Sequence[SampledRow], device: torch.device) -> _Layout:
    rows, arguments = [item.row for item in group], [item.arguments for item in group]
    layout = _layouts.get(kind)
    if layout is None or layout.rows != rows or layout.arguments != arguments:
        if len(_layouts) == _MAX_KINDS:
            _layouts.clear()
        words = seed_words([item.seed or b"" for item in arguments]) if arguments[0].seed else torch.empty(0, 4)
        index, words = (_on_device(tensor, device) for tensor in (torch.tensor(rows), words))
        layout = _layouts[kind] = _Layout(rows, arguments, index, words)
    return layout


def _on_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor to a device; nothing waits for it."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def _recorded(states: Tensor, arguments: RequestArguments) -> Tensor:
    """Return what is recorded of the states [B, D] from which tokens are drawn."""
    if arguments.sketch is not None:
        return units_of(values_of(arguments.sketch.kind, states, arguments.sketch.seed))
    return states if arguments.states else states[:, :0]


def _draw_group(logits: Tensor, group: Sequence[SampledRow], words: Tensor) -> tuple[Tensor, Tensor]:
    """Draw the tokens of rows with the same temperature and filters: int64 [B] and float32 [B]."""
    arguments = group[0].arguments
    # The kernel's arithmetic is defined for float32 (docs/spec/sampling.md).
    logits = logits.to(torch.float32)
    positions = _on_device(torch.tensor([item.arguments.offset + item.position for item in group]), logits.device)
    seeds = None if arguments.seed is None else words
    return choose_with_log_probabilities(logits, seeds, positions, arguments.temperature, arguments.filters)
