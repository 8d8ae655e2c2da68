"""Pad token sequences of different lengths to one batch, for the validator's prefill and the trainer's loss.

Padding is on the right: under a causal mask no token sees a pad, so a sequence's values do not depend on its neighbours
(up to the rounding of differently shaped matrix products).
"""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

Tokens = tuple[int, ...]

_PASS_TOKENS: Final = 128
"""What a forward and backward pass costs beside its tokens, as so many tokens of it."""


@dataclass(frozen=True)
class PaddedBatch:
    """B prompts with their completions; N completion tokens in all, row after row. Of an episode only the tokens that
    the policy drew are completion tokens.
    """

    ids: Tensor  # int64 [B, S]
    mask: Tensor  # bool [B, S], False at pads
    # int64 [N], with `columns` the place of the state from which each completion token is drawn, one before it
    rows: Tensor
    columns: Tensor  # int64 [N]
    targets: Tensor  # int64 [N], the completion tokens
    lengths: tuple[int, ...]  # completion tokens of each row, N in sum


def check_ids(sequences: Iterable[Tokens], vocabulary: int) -> None:
    """Raise ValueError if a token id lies outside a vocabulary of so many tokens."""
    if any(not 0 <= token < vocabulary for sequence in sequences for token in sequence):
        raise ValueError(f"a token id outside the vocabulary of {vocabulary}")


def pad(
    prompts: Sequence[Tokens],
    completions: Sequence[Tokens],
    device: torch.device | None = None,
    drawn: Sequence[Sequence[bool]] | None = None,
) -> PaddedBatch:
    """Return prompts, none of them empty, with what follows each as one right-padded batch; else ValueError. `drawn`
    tells for each completion which of its tokens the policy drew; None for all.
    """
    if not all(prompts):
        raise ValueError("a prompt has at least one token")
    pairs = list(zip(prompts, completions, strict=True))
    drawn = [(True,) * len(completion) for completion in completions] if drawn is None else drawn
    places = [list(itertools.compress(range(len(mask)), mask)) for mask in drawn]
    width = max((len(prompt) + len(completion) for prompt, completion in pairs), default=0)
    ids = torch.zeros(len(pairs), width, dtype=torch.int64)
    mask = torch.zeros(len(pairs), width, dtype=torch.bool)
    rows: list[int] = []
    columns: list[int] = []
    for row, (prompt, completion) in enumerate(pairs):
        sequence = prompt + completion
        ids[row, : len(sequence)] = torch.tensor(sequence, dtype=torch.int64)
        mask[row, : len(sequence)] = True
        rows += [row] * len(places[row])
        columns += [len(prompt) - 1 + place for place in places[row]]
    targets = [pair[1][place] for pair, own in zip(pairs, places, strict=True) for place in own]
    return PaddedBatch(
        ids=ids.to(device),
        mask=mask.to(device),
        rows=torch.tensor(rows, dtype=torch.int64, device=device),
        columns=torch.tensor(columns, dtype=torch.int64, device=device),
        targets=torch.tensor(targets, dtype=torch.int64, device=device),
        lengths=tuple(map(len, places)),
    )


def split(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Split sequences into batches of at most `max_tokens` tokens with padding, or of one longer sequence; return the
    indices of each batch. They go from short to long, so that few tokens are pads.
    """
    batches: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda i: lengths[i]):
        if batches and (len(batches[-1]) + 1) * lengths[index] <= max_tokens:
            batches[-1].append(index)
        else:
            batches.append([index])
    return batches


def split_for_training(lengths: Sequence[int], max_tokens: int, ranks: int = 1) -> list[list[int]]:
    """Split sequences as `split` does, with smaller batches where these cost less, because fewer tokens are pads or
    all ranks have as much to compute; return the indices of each batch, from the fewest tokens to the most.

    Rank i takes batch i, then batch i + ranks, and so on. Each time the ranks wait for the largest of their batches.
    """

    def tokens(batch: list[int]) -> int:
        return len(batch) * lengths[batch[-1]]

    def cost(batches: list[list[int]]) -> int:
        largest = [batches[min(begin + ranks, len(batches)) - 1] for begin in range(0, len(batches), ranks)]
        return sum(tokens(batch) + _PASS_TOKENS for batch in largest)

    best = batches = sorted(split(lengths, max_tokens), key=tokens)
    while len(batches) < len(lengths):
        max_tokens -= max(1, max_tokens // 32)
        batches = sorted(split(lengths, max_tokens), key=tokens)
        best = min(best, batches, key=cost)
    return best
