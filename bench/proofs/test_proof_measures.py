"""The published rules, the arithmetic and the task of these tables."""

import random
from pathlib import Path

import numpy as np
import pytest
import torch

from bench.proofs.honest import false_alarms
from bench.proofs.published_sketches import BucketSketch, Toploc
from bench.proofs.runs_of_evidence import Additions, added_by_groups, cusum
from bench.proofs.setting import load, save
from bench.proofs.trading_task import EOS, MAX_STORY_TOKENS, TradingTask, corpus, tokenizer, write_story
from grailnode.calibration.pairs import GroupMeasurement
from grailnode.calibration.thresholds import table
from grailnode.engine.policy import Tokenizer
from protocol.judging.evidence import NO_EVIDENCE, advance
from protocol.proof import MEASURED
from tests.support.builders.proofs import packaged_thresholds


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
    assert task.problem_of(problem.prompt) == problem


def measured_group(rng: np.random.Generator) -> GroupMeasurement:
    lengths = tuple(rng.integers(1, 9, 4).tolist())
    tokens = sum(lengths)
    margins = (rng.exponential(0.5, tokens) * (rng.random(tokens) < 0.3)).astype(np.float32)
    return GroupMeasurement(
        lengths=lengths,
        distances=rng.integers(0, 20, tokens).astype(np.uint8),
        sketch_errors=margins,
        repeats=rng.random(tokens) < 0.2,
        margins=margins,
        shifts=margins,
        rivals=margins,
        stops=rng.random(tokens) < 0.2,
        differences=margins,
        rewards=tuple(rng.integers(0, 2, 4).tolist()),
        turns=lengths,
    )


def test_stored_measurements_count_as_before(tmp_path: Path) -> None:
    rng, row = np.random.default_rng(0), packaged_thresholds()
    groups = [measured_group(rng) for _ in range(5)]
    save(tmp_path / "measurements.npz", groups)
    assert [group.counts(row) for group in load(tmp_path / "measurements.npz")] == [item.counts(row) for item in groups]


def test_runs_of_evidence_are_those_of_a_validator() -> None:
    rng, row = np.random.default_rng(0), packaged_thresholds()
    groups = [measured_group(rng) for _ in range(50)]
    added = added_by_groups(groups, row)
    assert (Additions.of(groups, row).added.sum(axis=1) == added).all()
    evidence = NO_EVIDENCE
    for group, together in zip(groups, cusum(added), strict=True):
        evidence = advance(evidence, group.counts(row), row)
        assert [v for name, v in zip(row.alternatives, evidence, strict=True) if name in MEASURED] == together.tolist()


@pytest.mark.parametrize(("rate", "score"), [(0.001, 1.0), (0.1, 0.1)])
def test_groups_at_the_full_honest_rate_have_no_more_false_alarms_than_the_level(rate: float, score: float) -> None:
    alternative = table((0,), [rate], [[score]]).alternatives[0]
    misses = np.random.default_rng(0).binomial(100, rate, 10_000)[:, None]
    alarms = false_alarms(misses * alternative.scores[0] - 100 * alternative.growth, 1e-2)
    assert 0 < alarms <= 1e6 * 1e-2
