"""Tests of roles/policy/prefill.py: logits one piece at a time give the same results in bounded memory."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from protocol import limits
from protocol.rollout import sampling
from protocol.rollout.filters import Filters
from protocol.rollout.sampling import SamplingParams
from roles.policy import prefill
from roles.ports import Forward
from tests.support.builders.samples import seeds

VOCABULARY = 50


def states_and_head(tokens: int, vocabulary: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    return torch.randn(tokens, 8, generator=generator), torch.randn(vocabulary, 8, generator=generator)


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
    completions = [tuple(part.tolist()) for part in torch.split(tokens, lengths)]
    whole = sampling.batch_margins(logits, tokens, seeds(len(lengths)), lengths, 0.8, filters, 0.01)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prefill, "_LOGITS_BYTES", rows * 4 * VOCABULARY)
        check = prefill.check_completions(
            Forward(states, project), completions, seeds(len(lengths)), params, VOCABULARY, 0.01
        )
    assert torch.equal(check.margins, whole)
    assert torch.equal(
        check.stops, sampling.drawn_stops(logits, tokens, whole, seeds(len(lengths)), lengths, 0.8, params.stops)
    )
    assert torch.equal(check.logprobs, sampling.log_probabilities(logits, tokens, 0.8, filters))
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

    completions = [tuple(range(100))] * 2
    params = SamplingParams(temperature=1.0, max_tokens=100, stops=(149_999,))
    check = prefill.check_completions(Forward(states, project), completions, seeds(2), params, 150_000)
    assert 0 < max_bytes <= 32 * limits.MIB
    assert len(check.margins) == 200


def test_adjacent_parts_are_joined_without_a_copy() -> None:
    states, _ = states_and_head(12, 1)
    parts = [Forward(part, torch.clone) for part in torch.split(states, [3, 0, 4, 5])]
    assert prefill.join_forwards(parts).hidden.data_ptr() == states.data_ptr()
    assert torch.equal(prefill.join_forwards(parts).hidden, states)
    assert torch.equal(prefill.join_forwards(parts[::-1]).hidden, torch.cat(torch.split(states, [3, 0, 4, 5])[::-1]))
    assert torch.equal(prefill.join_forwards(parts[2:]).hidden, states[3:])
    other = torch.ones(2, 8)
    assert torch.equal(prefill.join_forwards([*parts, Forward(other, torch.clone)]).hidden, torch.cat([states, other]))
