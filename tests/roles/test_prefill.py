"""Logits a piece at a time: the same margins and log-probabilities, and never more of them in memory than a piece."""

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
from tests.protocol.test_sampling import seeds

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
def test_pieces_say_what_the_whole_says(lengths: list[int], rows: int, filters: Filters) -> None:
    count = sum(lengths)
    states, head = states_and_head(count, VOCABULARY)
    logits = torch.stack([head @ state for state in states]) if count else torch.empty(0, VOCABULARY)
    asked: list[int] = []

    def project(hidden: Tensor) -> Tensor:
        asked.append(len(hidden))
        begin = sum(asked[:-1])
        assert torch.equal(hidden, states[begin : begin + len(hidden)])
        return logits[begin : begin + len(hidden)]

    params = SamplingParams(temperature=0.8, max_tokens=12, eos=1, filters=filters)
    drawn = torch.randint(VOCABULARY, (count,), generator=torch.Generator().manual_seed(1))
    completions = [tuple(part.tolist()) for part in torch.split(drawn, lengths)]
    whole = sampling.batch_margins(logits, drawn, seeds(len(lengths)), lengths, 0.8, filters, 0.01)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prefill, "_LOGITS_BYTES", rows * 4 * VOCABULARY)
        margins, logprobs = prefill.check_completions(
            Forward(states, project), completions, seeds(len(lengths)), params, VOCABULARY, 0.01
        )
    assert torch.equal(margins, whole)
    assert torch.equal(logprobs, sampling.log_probabilities(logits, drawn, 0.8, filters))
    assert max(asked, default=0) <= rows
    assert sum(asked) == count


def test_a_vocabulary_of_150000_takes_no_more_than_a_piece() -> None:
    states, head = states_and_head(200, 150_000)
    most = 0

    def project(hidden: Tensor) -> Tensor:
        nonlocal most
        logits = hidden @ head.T
        most = max(most, logits.nbytes)
        return logits

    completions = [tuple(range(100))] * 2
    params = SamplingParams(temperature=1.0, max_tokens=100, eos=149_999)
    margins, _ = prefill.check_completions(Forward(states, project), completions, seeds(2), params, 150_000)
    assert 0 < most <= 32 * limits.MIB
    assert len(margins) == 200


def test_neighbours_in_memory_are_joined_without_a_copy() -> None:
    states, _ = states_and_head(12, 1)
    parts = [Forward(part, torch.clone) for part in torch.split(states, [3, 0, 4, 5])]
    assert prefill.join_forwards(parts).hidden.data_ptr() == states.data_ptr()
    assert torch.equal(prefill.join_forwards(parts).hidden, states)
    assert torch.equal(prefill.join_forwards(parts[::-1]).hidden, torch.cat(torch.split(states, [3, 0, 4, 5])[::-1]))
    assert torch.equal(prefill.join_forwards(parts[2:]).hidden, states[3:])
    other = torch.ones(2, 8)
    assert torch.equal(prefill.join_forwards([*parts, Forward(other, torch.clone)]).hidden, torch.cat([states, other]))
