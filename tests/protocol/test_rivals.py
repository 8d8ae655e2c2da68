"""The compiled search for the best score against the one in torch: the same bits, whatever the logits are."""

import math

import pytest
import torch
from torch import Tensor

from protocol import sampling
from tests.protocol.test_sampling import seeds

ROWS = 48


def best_of(logits: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The chosen tokens' scores, and the best ones as both find them."""
    words = sampling.seed_words(seeds(ROWS))
    positions = torch.arange(ROWS)
    own = logits.gather(-1, tokens[:, None]).squeeze(-1)
    own = own + sampling.noise(words, positions, logits.shape[-1]).gather(-1, tokens[:, None]).squeeze(-1)
    found = [search(logits, own, words, positions) for search in (sampling._best, sampling._best_on_cpu)]
    return own, found[0], found[1]


@pytest.mark.parametrize("vocabulary", [1, 7, sampling.RIVALS, sampling.RIVALS + 1, 5000])
@pytest.mark.parametrize("sharpness", [0.1, 3.0, 30.0])
def test_both_find_the_same(vocabulary: int, sharpness: float) -> None:
    generator = torch.Generator().manual_seed(vocabulary)
    logits = torch.randn(ROWS, vocabulary, generator=generator) * sharpness
    tokens = torch.randint(vocabulary, (ROWS,), generator=generator)
    tokens[::2] = logits[::2].argmax(dim=-1)
    own, slow, fast = best_of(logits, tokens)
    assert torch.equal(slow, fast)
    assert (fast >= own).all()


def test_a_winner_from_the_tail_is_overlooked_by_both() -> None:
    logits = torch.linspace(0.0, -0.01, 4 * sampling.RIVALS).expand(ROWS, -1).contiguous()
    tokens = torch.zeros(ROWS, dtype=torch.int64)
    _, slow, fast = best_of(logits, tokens)
    words = sampling.seed_words(seeds(ROWS))
    everywhere = (logits + sampling.noise(words, torch.arange(ROWS), logits.shape[1])).max(dim=-1).values
    assert torch.equal(slow, fast)
    assert (fast < everywhere).any()


def test_both_find_the_same_where_logits_are_no_numbers() -> None:
    logits = torch.randn(ROWS, 50, generator=torch.Generator().manual_seed(0))
    tokens = torch.arange(ROWS)
    logits[0, 5] = logits[1, 1] = math.nan
    logits[2] = logits[3, 3] = -math.inf
    logits[4, 9] = math.inf
    _, slow, fast = best_of(logits, tokens)
    assert torch.equal(slow.nan_to_num(nan=-1.0), fast.nan_to_num(nan=-1.0))


def test_no_word_has_more_noise_than_its_first_bits_allow() -> None:
    bounds = torch.from_numpy(sampling._coarse_bounds())
    words = torch.randint(0, 1 << 32, (1_000_000,), generator=torch.Generator().manual_seed(0))
    assert (sampling.gumbel(words) <= bounds[words >> 24]).all()
    assert bounds[-1] == sampling.gumbel(torch.tensor((1 << 32) - 1))
