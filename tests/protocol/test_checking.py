"""Logits of a check one piece at a time give the same results in bounded memory."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from protocol import limits
from protocol.rollout import checking, sampling, sketch
from protocol.rollout.checking import Check, CheckRules, DrawnTokens, check_completions
from protocol.rollout.filters import Filters
from protocol.rollout.sampling import SamplingParams
from protocol.rollout.sketch import SketchKey
from tests.support.builders.samples import seeds

VOCABULARY = 50
KEYS = [SketchKey("projection", bytes([number] * 32)) for number in range(2)]


def states_and_head(tokens: int, vocabulary: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    return torch.randn(tokens, 8, generator=generator), torch.randn(vocabulary, 8, generator=generator)


def drawn(tokens: Tensor, lengths: list[int]) -> list[DrawnTokens]:
    """Return completions of these lengths; neighbours may have the same sketch key, or others."""
    parts = enumerate(zip(torch.split(tokens, lengths), seeds(len(lengths)), strict=True))
    return [DrawnTokens(part.tolist(), seed, KEYS[place // 2 % 2]) for place, (part, seed) in parts]


@given(
    lengths=st.lists(st.integers(0, 12), max_size=6),
    rows=st.integers(1, 15),
    filters=st.sampled_from([Filters(), Filters(top_k=5), Filters(top_p=0.8)]),
)
@settings(deadline=None)
def test_pieces_give_the_same_results_as_all_logits_at_once(lengths: list[int], rows: int, filters: Filters) -> None:
    count = sum(lengths)
    states, head = states_and_head(count, VOCABULARY)
    logits = torch.stack([head @ state for state in states]) if count else torch.empty(0, VOCABULARY)
    piece_lengths: list[int] = []

    def project(hidden: Tensor) -> Tensor:
        piece_lengths.append(len(hidden))
        begin = sum(piece_lengths[:-1])
        assert torch.equal(hidden, states[begin : begin + len(hidden)])
        return logits[begin : begin + len(hidden)]

    params = SamplingParams(temperature=0.8, max_tokens=12, stops=(1,), filters=filters)
    tokens = torch.randint(VOCABULARY, (count,), generator=torch.Generator().manual_seed(1))
    items = drawn(tokens, lengths)
    whole = sampling.batch_margins(logits, tokens, seeds(len(lengths)), lengths, 0.8, filters, 0.01)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checking, "_LOGITS_BYTES", rows * 4 * VOCABULARY)
        check = check_completions(states, project, items, CheckRules(params, 0.01), VOCABULARY)
    assert torch.equal(check.margins, whole)
    assert torch.equal(
        check.stops, sampling.drawn_stops(logits, tokens, whole, seeds(len(lengths)), lengths, 0.8, params.stops)
    )
    assert torch.equal(check.logprobs, sampling.log_probabilities(logits, tokens, 0.8, filters))
    parts = zip(check.split(lengths), torch.split(states, lengths), items, strict=True)
    for part, hidden, item in parts:
        expected = sketch.commit(item.sketch.kind, hidden, item.sketch.seed) if len(hidden) else b""
        assert sketch.rounded(part.sketch) == expected
    assert max(piece_lengths, default=0) <= rows
    assert sum(piece_lengths) == count


def test_a_vocabulary_of_150000_needs_no_more_memory_than_a_piece() -> None:
    states, head = states_and_head(200, 150_000)
    max_bytes = 0

    def project(hidden: Tensor) -> Tensor:
        nonlocal max_bytes
        logits = hidden @ head.T
        max_bytes = max(max_bytes, logits.nbytes)
        return logits

    params = SamplingParams(temperature=1.0, max_tokens=100, stops=(149_999,))
    items = drawn(torch.arange(100).repeat(2), [100, 100])
    check = check_completions(states, project, items, CheckRules(params), 150_000)
    assert 0 < max_bytes <= 32 * limits.MIB
    assert len(check.margins) == 200


def test_a_completion_that_goes_on_is_checked_at_its_own_positions() -> None:
    """Its first tokens were checked before, as where a prefill comes in several passes."""
    states, head = states_and_head(20, VOCABULARY)
    tokens = torch.randint(VOCABULARY, (20,), generator=torch.Generator().manual_seed(2))
    rules = CheckRules(SamplingParams(temperature=1.0, max_tokens=20, stops=(1,)))

    def check(begin: int, end: int, lengths: list[int], first: int) -> Check:
        items = drawn(tokens, [14, 6])[2 - len(lengths) :]
        parts = torch.split(tokens[begin:end], lengths)
        items = [replace(item, tokens=part.tolist()) for item, part in zip(items, parts, strict=True)]
        return check_completions(
            states[begin:end], lambda hidden: hidden @ head.T, items, rules, VOCABULARY, first=first
        )

    whole = check(0, 20, [14, 6], 0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checking, "_LOGITS_BYTES", 3 * 4 * VOCABULARY)
        for begin in (1, 5, 13):
            rest = check(begin, 20, [14 - begin, 6], begin)
            torch.testing.assert_close(rest.margins, whole.margins[begin:])
            assert torch.equal(rest.stops, whole.stops[begin:])
