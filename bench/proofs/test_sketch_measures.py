"""The published rules, the arithmetic and the task of these tables."""

import random

import numpy as np
import torch

from bench.proofs.published_sketches import BucketSketch, Toploc
from bench.proofs.trading_task import EOS, MAX_STORY_TOKENS, TradingTask, corpus, tokenizer, write_story
from grailnode.engine.policy import Tokenizer


def states(seed: int, tokens: int = 32) -> torch.Tensor:
    return torch.randn(tokens, 128, generator=torch.Generator().manual_seed(seed)) * 3


def test_a_toploc_proof_accepts_its_own_states_and_noise_but_no_other_states() -> None:
    rule, own = Toploc(), states(0)
    proof = rule.prove(own)
    assert len(proof) == 258
    exact = rule.check(proof, own)
    assert (exact.exponents, exact.mean, exact.median) == (0, 0.0, 0.0)
    assert rule.check(proof, own * 1.003).accepted
    assert not rule.check(proof, states(1)).accepted


def test_the_bucket_rule_accepts_any_constant() -> None:
    rule, sketch = BucketSketch(), BucketSketch().commit(states(0), seed=7)
    assert rule.within(sketch, sketch, np.arange(32)).all()
    assert rule.within(np.zeros_like(sketch), sketch, np.arange(32)).all()
    assert not rule.within(sketch + 7000, sketch, np.arange(32)).any()


def test_the_corpus_has_short_stories_of_known_words() -> None:
    text, source = Tokenizer(tokenizer()), corpus(seed=3)
    for _ in range(50):
        prompt, story = next(source)
        tokens = text.encode(story)
        assert 2 not in text.encode(prompt) + tokens  # no unknown word
        assert EOS not in tokens
        assert len(tokens) < MAX_STORY_TOKENS


def test_the_reward_of_a_story_is_the_share_of_right_accounts() -> None:
    task = TradingTask()
    problem = task.problem(b"one")
    story = write_story(problem, random.Random(0))
    assert task.reward(problem, story) == 1.0
    words = story.split()
    place = words.index("now") + 2
    false_story = " ".join([*words[:place], str(int(words[place]) + 1), *words[place + 1 :]])
    assert 0.0 < task.reward(problem, false_story) < 1.0
    assert task.reward(problem, story.removesuffix(" .")) == 0.0
    assert task.reward(problem, "") == 0.0
