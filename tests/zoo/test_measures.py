"""What bench/proofs measures with: the published rules, and the arithmetic behind its tables."""

import math
import random

import numpy as np
import pytest
import torch

from bench.proofs.information import allowed, worth
from grailnode.engine.policy import Tokenizer
from protocol.judging.binomial import binomial_tail
from tests.support.adversaries.published_sketches import Bucketed, Toploc
from tests.support.adversaries.stories import EOS, LONGEST, Stories, corpus, tell, tokenizer


def states(seed: int, tokens: int = 32) -> torch.Tensor:
    return torch.randn(tokens, 128, generator=torch.Generator().manual_seed(seed)) * 3


def test_a_toploc_proof_holds_for_its_own_states_and_survives_noise_but_not_other_states() -> None:
    rule, own = Toploc(), states(0)
    proof = rule.prove(own)
    assert len(proof) == 258
    exact = rule.check(proof, own)
    assert (exact.exponents, exact.mean, exact.median) == (0, 0.0, 0.0)
    assert rule.check(proof, own * 1.003).accepted
    assert not rule.check(proof, states(1)).accepted


def test_the_bucketed_rule_takes_any_constant() -> None:
    rule, due = Bucketed(), Bucketed().commit(states(0), seed=7)
    assert rule.within(due, due, np.arange(32)).all()
    assert rule.within(np.zeros_like(due), due, np.arange(32)).all()
    assert not rule.within(due + 7000, due, np.arange(32)).any()


def test_the_worth_of_positions_that_are_alike_is_the_binomial_one() -> None:
    agreeing = np.full(20, 0.25)
    assert worth(agreeing, 0) == pytest.approx(2.0)
    assert worth(agreeing, 3) == pytest.approx(-math.log2(binomial_tail(17, 20, 0.25)) / 20)
    assert worth(np.array([1.0, 2.0**-10]), 0) == pytest.approx(5.0)


def test_honest_rollouts_rarely_exceed_what_is_allowed() -> None:
    for rate in (1e-6, 1e-3, 0.05):
        misses = allowed(rate, 60)
        assert binomial_tail(misses + 1, 60, rate) < 1e-4
        assert misses == 0 or binomial_tail(misses, 60, rate) >= 1e-4


def test_the_corpus_tells_stories_that_the_environment_pays_for() -> None:
    text, source = Tokenizer(tokenizer()), corpus(seed=3)
    for _ in range(50):
        prompt, story = next(source)
        tokens = text.encode(story)
        assert 2 not in text.encode(prompt) + tokens  # nothing is unknown
        assert EOS not in tokens
        assert len(tokens) < LONGEST


def test_a_story_earns_the_share_of_its_accounts_that_are_right() -> None:
    task = Stories()
    problem = task.problem(b"one")
    story = tell(problem, random.Random(0))
    assert task.reward(problem, story) == 1.0
    words = story.split()
    place = words.index("now") + 2
    wrong = " ".join([*words[:place], str(int(words[place]) + 1), *words[place + 1 :]])
    assert 0.0 < task.reward(problem, wrong) < 1.0
    assert task.reward(problem, story.removesuffix(" .")) == 0.0
    assert task.reward(problem, "") == 0.0
