"""The compiled search for the best score gives the same bits as the one in torch, whatever the logits are."""

import math

import pytest
import torch
from torch import Tensor

from protocol.rollout import sampling
from tests.support.builders.seeds import seeds

LENGTHS = (13, 0, 1, 34)
ROWS = sum(LENGTHS)


def noise(vocabulary: int) -> Tensor:
    """Return the noise of every token at every position of the completions."""
    words = sampling.seed_words(seeds(len(LENGTHS))).repeat_interleave(torch.tensor(LENGTHS), dim=0)
    return sampling.noise(words, torch.cat([torch.arange(length) for length in LENGTHS]), vocabulary)


def best_of(logits: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the scores of the tokens, and the best scores by torch and by the compiled search."""
    words = sampling.seed_words(seeds(len(LENGTHS)))
    token_logits = logits.gather(-1, tokens[:, None]).squeeze(-1)
    own = (logits + noise(logits.shape[-1])).gather(-1, tokens[:, None]).squeeze(-1)
    results = [
        score(logits, tokens, token_logits, words, LENGTHS, 0) for score in (sampling._scores, sampling._scores_on_cpu)
    ]
    for scores, _ in results:
        assert torch.equal(scores.nan_to_num(nan=-1.0), own.nan_to_num(nan=-1.0))
    return own, results[0][1], results[1][1]


@pytest.mark.parametrize("vocabulary", [1, 7, 1024, 1025, 5000])
@pytest.mark.parametrize("sharpness", [0.1, 3.0, 30.0])
def test_both_give_the_same_scores(vocabulary: int, sharpness: float) -> None:
    generator = torch.Generator().manual_seed(vocabulary)
    logits = torch.randn(ROWS, vocabulary, generator=generator) * sharpness
    tokens = torch.randint(vocabulary, (ROWS,), generator=generator)
    tokens[::2] = logits[::2].argmax(dim=-1)
    own, slow, fast = best_of(logits, tokens)
    assert torch.equal(slow, fast)
    assert (fast >= own).all()


def test_both_consider_every_token() -> None:
    logits = torch.linspace(0.0, -0.01, 5000).expand(ROWS, -1).contiguous()
    tokens = torch.zeros(ROWS, dtype=torch.int64)
    _, slow, fast = best_of(logits, tokens)
    everywhere = (logits + noise(logits.shape[1])).max(dim=-1).values
    assert torch.equal(slow, everywhere)
    assert torch.equal(fast, everywhere)


def test_both_give_the_same_scores_for_nan_and_infinite_logits() -> None:
    logits = torch.randn(ROWS, 50, generator=torch.Generator().manual_seed(0))
    tokens = torch.arange(ROWS)
    logits[0, 5] = logits[1, 1] = math.nan
    logits[2] = logits[3, 3] = -math.inf
    logits[4, 9] = math.inf
    _, slow, fast = best_of(logits, tokens)
    assert torch.equal(slow.nan_to_num(nan=-1.0), fast.nan_to_num(nan=-1.0))


def test_no_token_with_the_best_score_is_excluded() -> None:
    """`contenders` bounds the noise of a word. Here each of 300,000 tokens has the best score by a minimal amount."""
    words = sampling.seed_words(seeds(1))
    vocabulary = 300_000
    noises = sampling.noise(words[0], torch.tensor(0), vocabulary)
    order = noises.argsort()[:: vocabulary // ROWS][:ROWS]
    order[-1] = noises.argmax()
    logits = torch.full((len(order), vocabulary), -math.inf)
    rows = torch.arange(len(order))
    logits[rows, order] = torch.nextafter(-noises[order], torch.tensor(math.inf)) + 1e-6
    logits[rows, 0] = -noises[0]
    for row in rows.tolist():
        token_logits = logits[row, :1]
        one = torch.zeros(1, dtype=torch.int64)
        own, best = sampling._scores_on_cpu(logits[row : row + 1], one, token_logits, words, [1], 0)
        assert best > own or order[row] == 0


@pytest.mark.parametrize("vocabulary", [1, 63, 64, 65, 2048, 150_001])
@pytest.mark.parametrize("sharpness", [0.0, 1.0, 30.0, 1e30])
def test_log_probabilities_are_as_exact_as_float32_allows(vocabulary: int, sharpness: float) -> None:
    generator = torch.Generator().manual_seed(vocabulary)
    logits = torch.randn(8, vocabulary, generator=generator) * sharpness
    logits[0, 0] = -math.inf if vocabulary > 1 else 0.0
    tokens = torch.randint(vocabulary, (8,), generator=generator)
    result = sampling.log_probabilities(logits, tokens, 1.0)
    exact = logits.double().log_softmax(dim=-1).gather(-1, tokens[:, None]).squeeze(-1)
    torch.testing.assert_close(result.double(), exact, rtol=2e-7, atol=2e-6)


def test_rows_with_nan_have_nan_as_log_probability() -> None:
    logits = torch.randn(4, 130, generator=torch.Generator().manual_seed(0))
    logits[0, 3] = logits[1, 129] = math.nan
    logits[2] = -math.inf
    result = sampling.log_probabilities(logits, torch.zeros(4, dtype=torch.int64), 1.0)
    assert result.isnan().tolist() == [True, True, True, False]
