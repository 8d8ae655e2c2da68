"""Draws the tokens of a batch's rows by seed-bound sampling, for both logits processors."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from grailnode.engine.vllm.inside.request_records import RequestArguments, RequestRecords, Step
from protocol.rollout.sampling import seed_words
from protocol.rollout.sketch import units_of, values_of
from protocol.rollout.token_choice import choose_with_log_probabilities


@dataclass(frozen=True)
class _Group:
    """Rows with the same settings but for seed and offset, which are drawn by one call of the kernel."""

    places: NDArray[np.int64]  # [B], of these rows among all drawn ones
    requests: list[str]
    arguments: RequestArguments  # of the first request
    offsets: NDArray[np.int64]  # [B], positions of the first tokens, for the noise
    index: Tensor  # int64 [B], the rows of the batch, on the device
    words: Tensor  # int64 [B, 4], their seeds, on the device; empty for the most likely tokens


class DrawnRows:
    """The rows of a batch that are ours to draw, grouped anew only when a request comes or goes: steps stay cheap."""

    def __init__(self, rows: Sequence[tuple[int, RequestArguments]], device: torch.device) -> None:
        # One call of the kernel draws all rows with the same settings.
        by_settings: dict[tuple[object, ...], list[int]] = {}
        for place, (_, item) in enumerate(rows):
            settings = item.seed is None, item.temperature, item.filters, item.states, item.sketch
            by_settings.setdefault(settings, []).append(place)
        self._groups = [_group([rows[place] for place in places], places, device) for places in by_settings.values()]

    def draw(self, logits: Tensor, positions: NDArray[np.int64], records: RequestRecords) -> Tensor:
        """Draw the tokens and record them; the drawn token becomes the most likely one in the logits [B, V]. Positions
        are those of the tokens of our rows in their completions; vLLM samples the other rows as it likes.
        """
        states = records.sampled_states
        if self._groups and (states is None or len(states) != len(logits)):
            raise RuntimeError("no hidden states of this step: the worker extension of grailnode is not loaded")
        for group in self._groups:
            assert states is not None
            own = positions[group.places]
            # A batch of one kind needs no copy of the logits.
            is_whole = len(own) == len(logits)
            tokens, log_probabilities = _draw_group(logits if is_whole else logits[group.index], group, own)
            recorded = _recorded(states if is_whole else states[group.index], group.arguments)
            step = Step(records.version, recorded, tokens, log_probabilities)
            # vLLM now takes the largest logit, which is that of our token.
            logits[group.index, tokens] = torch.inf
            records.write(step, group.requests, own.tolist())
        return logits


def _group(rows: Sequence[tuple[int, RequestArguments]], places: Sequence[int], device: torch.device) -> _Group:
    arguments = [item for _, item in rows]
    seeds = [item.seed for item in arguments if item.seed is not None]
    index, words = torch.tensor([row for row, _ in rows]), seed_words(seeds) if seeds else torch.empty(0, 4)
    return _Group(
        places=np.array(places, np.int64),
        requests=[item.request for item in arguments],
        arguments=arguments[0],
        offsets=np.array([item.offset for item in arguments], np.int64),
        index=_on_device(index, device),
        words=_on_device(words, device),
    )


def _on_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor to a device; nothing waits for it."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def _recorded(states: Tensor, arguments: RequestArguments) -> Tensor:
    """Return what is recorded of the states [B, D] from which tokens are drawn."""
    if arguments.sketch is not None:
        return units_of(values_of(arguments.sketch.kind, states, arguments.sketch.seed))
    return states if arguments.states else states[:, :0]


def _draw_group(logits: Tensor, group: _Group, positions: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
    """Draw the tokens of a group and their log-probabilities: int64 [B] and float32 [B]."""
    # The kernel's arithmetic is defined for float32 (docs/spec/sampling.md).
    logits, arguments = logits.to(torch.float32), group.arguments
    places = _on_device(torch.from_numpy(group.offsets + positions), logits.device)
    seeds = None if arguments.seed is None else group.words
    return choose_with_log_probabilities(logits, seeds, places, arguments.temperature, arguments.filters)


def probe_draws(device: torch.device) -> list[int]:
    """Draw a few tokens by this process's kernel, which it compiled: the node compares them with its own draws."""
    logits = torch.arange(4096, dtype=torch.float32).remainder(7.0).expand(4, -1).contiguous().to(device)
    words, places = seed_words([bytes(range(16))] * 4, device), torch.arange(4, device=device)
    return choose_with_log_probabilities(logits, words, places, 1.0)[0].tolist()
