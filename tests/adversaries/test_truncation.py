"""Silent truncation: a miner samples among the most likely tokens only, and says nothing of it."""

import numpy as np
import torch

from protocol.judging.evidence import compute_evidence
from protocol.rollout import sampling
from protocol.rollout.filters import Filters
from tests.support.builders.proofs import packaged_thresholds
from tests.support.builders.seeds import seeds

_LENGTHS = [60, 60]
_VOCABULARY = 20_000


def _misses(count: int) -> tuple[int, bool]:
    """Return the margin misses of a group whose miner samples among `count` tokens, and whether it is rejected."""
    tokens = sum(_LENGTHS)
    logits = torch.randn(tokens, _VOCABULARY, generator=torch.Generator().manual_seed(1)) * 1.5
    words = sampling.seed_words(seeds(2)).repeat_interleave(torch.tensor(_LENGTHS), dim=0)
    positions = torch.cat([torch.arange(length) for length in _LENGTHS])
    choice = sampling.choose(logits, words, positions, 1.0, Filters(top_k=count))
    margins = sampling.batch_margins(logits, choice, seeds(2), _LENGTHS, 1.0).numpy()
    proof = packaged_thresholds()
    evidence = compute_evidence(np.zeros(tokens, np.int16), margins, _LENGTHS, proof)
    return evidence.margin_misses, evidence.wrong_sampling(proof)


def test_a_miner_that_samples_among_the_1024_most_likely_tokens_is_refused() -> None:
    misses, refused = _misses(1024)
    assert misses > 10
    assert refused


def test_a_miner_that_samples_among_all_tokens_is_not_refused() -> None:
    assert _misses(_VOCABULARY) == (0, False)
