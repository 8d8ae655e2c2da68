"""Sketches: honest noise passes, and sketches that were computed without the hidden states do not; and the check of all
logits piece by piece.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from protocol import limits
from protocol.errors import MalformedError
from protocol.rollout import checking, sampling, sketch
from protocol.rollout.challenge import stream
from protocol.rollout.checking import Check, CheckRules, DrawnTokens, check_completions
from protocol.rollout.filters import EVERY_TOKEN, Filters
from protocol.rollout.sampling import SamplingParams
from protocol.rollout.sketch import SketchKey, SketchKind, commit, distances
from tests.protocol import slow_sketch
from tests.support.builders.samples import digest, seeds

KINDS: tuple[SketchKind, ...] = ("projection", "topk")
SEED = digest("sketch seed")
T, D = 400, 128
kinds = pytest.mark.parametrize("kind", KINDS)


def states(seed: int = 0, tokens: int = T) -> torch.Tensor:
    return torch.randn(tokens, D, generator=torch.Generator().manual_seed(seed)) * 3


def noisy(relative: float) -> torch.Tensor:
    """Return the states with normal noise of a size relative to each value."""
    return states() * (1 + relative * torch.randn(T, D, generator=torch.Generator().manual_seed(9)))


@kinds
def test_honest_noise_passes(kind: SketchKind) -> None:
    differences = distances(commit(kind, noisy(1e-3), SEED), commit(kind, states(), SEED))
    assert (differences <= 3).mean() > (0.99 if kind == "projection" else 0.85)
    assert np.median(differences) <= 2


@kinds
def test_whoever_knows_the_states_roughly_fails(kind: SketchKind) -> None:
    """Values are known to a tenth only."""
    differences = distances(commit(kind, noisy(0.1), SEED), commit(kind, states(), SEED))
    assert (differences <= 32).mean() < 0.1
    assert np.median(differences) > 50


@kinds
def test_the_scale_of_a_state_does_not_matter(kind: SketchKind) -> None:
    """Both kinds normalize; powers of two are exact."""
    assert commit(kind, states() * 4, SEED) == commit(kind, states(), SEED)


@kinds
def test_the_size_of_a_batch_changes_only_the_rounding(kind: SketchKind) -> None:
    alone = b"".join(commit(kind, row, SEED) for row in states()[:, None])
    assert distances(alone, commit(kind, states(), SEED)).max() <= 1


@kinds
def test_cheap_imitations_fail(kind: SketchKind) -> None:
    """None of them is within 32 units more often than four random values on a circle of 256."""
    true = commit(kind, states(), SEED)
    imitations = {
        "zeros": bytes(4 * T),
        "random": np.random.default_rng(0).integers(0, 256, 4 * T).astype(np.uint8).tobytes(),
        "the position before": true[-4:] + true[:-4],
        "another state": commit(kind, states(1), SEED),
        "another seed": commit(kind, states(), digest("other seed")),
        # with coefficients by rank, the same values in other dimensions would give the same sketch
        "other dimensions": commit(kind, states().roll(1, dims=1), SEED),
    }
    for name, imitation in imitations.items():
        assert (distances(imitation, true) <= 32).mean() < 0.02, name


@kinds
def test_no_constant_is_near_to_many_values(kind: SketchKind) -> None:
    values = np.frombuffer(commit(kind, states(), SEED), dtype=np.uint8)
    assert np.abs(np.bincount(values // 32, minlength=8) - 4 * T / 8).max() < 0.25 * 4 * T / 8


@kinds
def test_the_opposite_state_has_the_opposite_sketch(kind: SketchKind) -> None:
    values = np.frombuffer(commit(kind, states(), SEED), dtype=np.uint8)
    assert (np.frombuffer(commit(kind, -states(), SEED), dtype=np.uint8) == np.uint8(0) - values).all()


@kinds
def test_the_slow_implementation_gives_the_same_values(kind: SketchKind) -> None:
    hidden = states(tokens=20)
    exact = slow_sketch.values(kind, hidden.double().numpy(), SEED)
    assert 384 < exact.std() < 640
    values = np.frombuffer(commit(kind, hidden, SEED), dtype=np.uint8).reshape(-1, 4)
    assert np.abs((values - exact + 128) % 256 - 128).max() < 0.51


def test_a_value_of_many_turns_is_on_the_circle() -> None:
    """A state in the direction of one projection's signs has the value 512 sqrt(D) = 5792.6 = 22 * 256 + 160.6."""
    signs = np.unpackbits(np.frombuffer(stream(SEED, "projection", 4 * D // 8), dtype=np.uint8)).reshape(D, 4)
    hidden = torch.from_numpy(signs[:, 0].astype(np.float32) * 2 - 1)[None]
    assert commit("projection", hidden, SEED)[0] == 161
    assert commit("projection", -hidden, SEED)[0] == 256 - 161


@kinds
@pytest.mark.parametrize("value", [0.0, float("nan"), float("inf"), 1e38, 1e-38])
def test_odd_states_have_a_sketch(kind: SketchKind, value: float) -> None:
    assert len(commit(kind, torch.full((2, D), value), SEED)) == 8


@kinds
def test_a_state_may_have_few_dimensions(kind: SketchKind) -> None:
    assert len(commit(kind, states()[:, :5], SEED)) == 4 * T
    assert commit(kind, states(tokens=0), SEED) == b""


@given(st.binary(min_size=16, max_size=16), st.binary(min_size=16, max_size=16))
def test_distances_are_on_the_circle(first: bytes, second: bytes) -> None:
    expected = [min((a - b) % 256, (b - a) % 256) for a, b in zip(first, second, strict=True)]
    assert distances(first, second).tolist() == [max(expected[at : at + 4]) for at in range(0, 16, 4)]
    assert distances(first, second).tolist() == distances(second, first).tolist()


@pytest.mark.parametrize("size", [0, 3, 5, 8])
def test_another_length_is_malformed(size: int) -> None:
    with pytest.raises(MalformedError):
        distances(bytes(size), bytes(4))


# Logits of a check one piece at a time give the same results in bounded memory


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
    places = sampling.token_places(seeds(len(lengths)), lengths)
    whole = sampling.batch_margins(logits, tokens, *places, 0.8, filters, 0.01)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checking, "_LOGITS_BYTES", rows * 4 * VOCABULARY)
        check = check_completions(states, project, items, CheckRules(params, 0.01), VOCABULARY)
    assert torch.equal(check.margins, whole)
    assert torch.equal(check.stops, sampling.drawn_stops(logits, tokens, whole, *places, 0.8, params.stops))
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


@pytest.mark.parametrize("filters", [EVERY_TOKEN, Filters(top_k=4), Filters(top_p=0.9), Filters(min_p=0.1)])
def test_a_token_leads_by_no_more_than_the_margin_of_every_other_one(filters: Filters) -> None:
    """Tokens are drawn without the filters, so some with the best score do not pass them."""
    count, vocabulary, cap = 500, 20, 0.06
    logits = torch.randn(count, vocabulary, generator=torch.Generator().manual_seed(8)) * 2.0
    tokens = sampling.choose(logits, sampling.seed_words(seeds(1)), torch.arange(count), 1.0)
    rules = CheckRules(SamplingParams(1.0, count, (1,), filters), slack=0.05, limit=0.5, cap=cap, rivals=True)
    places = sampling.token_places(seeds(1), [count])
    leads = check_completions(logits, lambda part: part, drawn(tokens, [count]), rules, vocabulary).rivals[:, 1]
    margins = [
        sampling.batch_margins(
            logits, torch.full((count,), token), *places, 1.0, filters, rules.slack, rules.limit, cap
        )
        for token in range(vocabulary)
    ]
    least = torch.stack(margins, dim=1).scatter(1, tokens[:, None], torch.inf).amin(dim=1)
    assert (leads.clamp(max=cap if filters.active else torch.inf) <= least + 1e-5).all()
    assert (leads > cap).any()
