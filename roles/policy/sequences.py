"""Bring token sequences of different lengths into one batch, for the validator's prefill and the trainer's loss.

Padding is on the right: under a causal mask no token sees a pad, so a sequence's values do not depend on its neighbours
(up to the rounding of differently shaped matrix products). Packed sequences lie one after another in one row.
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
class TokenBatch:
    """Prompts with their completions, in B rows; N completion tokens in all, sequence after sequence. Of an episode
    only the tokens that the policy drew are completion tokens.
    """

    ids: Tensor  # int64 [B, S]
    mask: Tensor  # bool [B, S], False at pads; of a packed row int64 [1, S], the number of each token's sequence
    # int64 [N], with `columns` the place of the state from which each completion token is drawn, one before it
    rows: Tensor
    columns: Tensor  # int64 [N]
    targets: Tensor  # int64 [N], the completion tokens
    owners: Tensor  # int64 [N], the index of the sequence of each
    lengths: tuple[int, ...]  # completion tokens of each sequence, N in sum


def check_ids(sequences: Iterable[Tokens], vocabulary: int) -> None:
    """Raise ValueError if a token id lies outside a vocabulary of so many tokens."""
    if any(not 0 <= token < vocabulary for sequence in sequences for token in sequence):
        raise ValueError(f"a token id outside the vocabulary of {vocabulary}")


def to_batch(
    prompts: Sequence[Tokens],
    completions: Sequence[Tokens],
    device: torch.device | None = None,
    drawn: Sequence[Sequence[bool]] | None = None,
    *,
    packed: bool = False,
) -> TokenBatch:
    """Return prompts, none of them empty, with what follows each; else ValueError. Each has a right-padded row, or all
    lie in one row, `packed`. `drawn` tells for each completion which of its tokens the policy drew; None for all.
    """
    if not all(prompts):
        raise ValueError("a prompt has at least one token")
    pairs = list(zip(prompts, completions, strict=True))
    drawn = [(True,) * len(completion) for completion in completions] if drawn is None else drawn
    places = [list(itertools.compress(range(len(mask)), mask)) for mask in drawn]
    sizes = tuple(len(prompt) + len(completion) for prompt, completion in pairs)
    begins = list(itertools.accumulate(sizes, initial=0))
    width = begins[-1] if packed else max(sizes, default=0)
    ids = torch.zeros(1 if packed else len(pairs), width, dtype=torch.int64)
    mask = torch.zeros(ids.shape, dtype=torch.int64 if packed else torch.bool)
    rows: list[int] = []
    columns: list[int] = []
    for index, (prompt, completion) in enumerate(pairs):
        row, begin = (0, begins[index]) if packed else (index, 0)
        ids[row, begin : begin + sizes[index]] = torch.tensor(prompt + completion, dtype=torch.int64)
        mask[row, begin : begin + sizes[index]] = index + 1
        rows += [row] * len(places[index])
        columns += [begin + len(prompt) - 1 + place for place in places[index]]
    targets = [pair[1][place] for pair, own in zip(pairs, places, strict=True) for place in own]
    owners = [index for index, own in enumerate(places) for _ in own]
    return TokenBatch(
        ids=ids.to(device),
        mask=mask.to(device),
        rows=torch.tensor(rows, dtype=torch.int64, device=device),
        columns=torch.tensor(columns, dtype=torch.int64, device=device),
        targets=torch.tensor(targets, dtype=torch.int64, device=device),
        owners=torch.tensor(owners, dtype=torch.int64, device=device),
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


def split_packed(lengths: Sequence[int], max_tokens: int, ranks: int = 1) -> list[list[int]]:
    """Split sequences into rows of at most `max_tokens` tokens, or of the longest sequence, about as many in each;
    return the indices of each row, from the fewest tokens to the most. All ranks have rows to compute, if there are
    enough sequences.
    """
    bound = max([max_tokens, *lengths])
    longest_first = sorted(range(len(lengths)), key=lambda index: -lengths[index])
    fewest = -(-sum(lengths) // (bound * ranks)) * ranks
    for count in range(fewest, len(lengths) + ranks, ranks):
        rows: list[list[int]] = [[] for _ in range(count)]
        sizes = [0] * count
        for index in longest_first:  # each goes where most room is
            row = sizes.index(min(sizes))
            rows[row].append(index)
            sizes[row] += lengths[index]
        if max(sizes) <= bound:
            break
    return [row for _, row in sorted(zip(sizes, rows, strict=True), key=lambda item: item[0]) if row]
