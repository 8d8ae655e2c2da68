"""Rewards that are made of weighted parts: each part, the rounding, and how a run declares them."""

from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from grailnode.engine.policy import PACKAGED_POLICY, Policy
from protocol import environments
from protocol.environments.rubric import RubricPart, parse, reward
from roles.policy.assignment import Task
from tests.support.builders import samples
from tests.support.builders.policies import inline
from tests.support.builders.samples import run_manifest

GOOD = "<think>a</think><solution>b</solution>"


def of(rubric: str, score: float = 0.0, text: str = "", tokens: tuple[int, ...] = (), max_tokens: int = 100) -> int:
    return reward(parse(rubric), score, text, tokens, max_tokens)


@pytest.mark.parametrize(
    ("rubric", "text", "millionths"),
    [
        ("format=1", GOOD, 1_000_000),
        ("format=1", "<solution>b</solution>" + "x" * 50, 0),
        ("thinking=1", GOOD, 1_000_000),
        ("thinking=1", "<think> </think><solution>b</solution>", 0),
        ("brevity=1", GOOD + "x" * 50, 750_000),
        ("brevity=1", "no solution", 0),
        ("score=1/10,format=1/3,thinking=1/7", GOOD, round(Fraction(1_000_000) * (Fraction(1, 3) + Fraction(1, 7)))),
    ],
)
def test_parts_of_the_text(rubric: str, text: str, millionths: int) -> None:
    assert of(rubric, text=text) == millionths


@pytest.mark.parametrize(
    ("last", "length", "millionths"),
    [
        *((20, length, due) for length, due in ((0, 1_000_000), (80, 1_000_000), (81, 950_000), (90, 500_000))),
        *((20, 99, 50_000), (20, 100, 0), (500, 25, 750_000)),  # of more tokens than there are it begins with the first
    ],
)
def test_soft_overlong_punishment_grows_over_the_last_tokens(last: int, length: int, millionths: int) -> None:
    assert of(f"score=1,overlong:{last}=1", 1.0, tokens=(7,) * length) == millionths


@pytest.mark.parametrize(
    ("tokens", "millionths"),
    [((), 1_000_000), ((1, 2), 1_000_000), ((1, 2, 3, 4), 1_000_000), ((1, 1, 1, 1), 500_000), ((5,) * 102, 10_000)],
)
def test_repeated_n_grams_cost_their_share(tokens: tuple[int, ...], millionths: int) -> None:
    assert of("score=1,repetition:3=1", 1.0, tokens=tokens) == millionths


def test_the_sum_is_bounded_and_rounded_once_with_ties_to_the_even_millionth() -> None:
    assert of("score=3", 0.5) == 1_000_000
    assert of("overlong:10=1", tokens=(1,) * 100) == 0
    assert [of(f"score={odd}/1000000", 0.5) for odd in (1, 3, 5)] == [0, 2, 2]
    assert of("score=1/3,format=2/3", 1.0, GOOD) == 1_000_000


parts = st.sampled_from(("score", "format", "thinking", "brevity", "overlong:9", "repetition:2"))
weights = st.tuples(st.integers(1, 10**6), st.integers(1, 10**6))


@given(
    st.dictionaries(parts, weights, min_size=1),
    st.floats(0, 1),
    st.text(),
    st.lists(st.integers(0, 3), max_size=20).map(tuple),
)
def test_every_reward_is_a_whole_number_of_millionths_between_zero_and_one(
    rubric: dict[str, tuple[int, int]], score: float, text: str, tokens: tuple[int, ...]
) -> None:
    written = ",".join(f"{name}={top}/{bottom}" for name, (top, bottom) in rubric.items())
    assert parse(written)[0].kind == "rubric-part"
    assert 0 <= of(written, score, text, tokens, max_tokens=20) <= 1_000_000


@pytest.mark.parametrize(
    "text",
    [
        *("score", "score=", "score=0", "score=-1", "score=1/0", "luck=1", "score:2=1", "overlong=1", "score=1,"),
        *("score=1,score=1", "score=1,repetition:65=1"),  # a part counts once, and the memory of a reward is bounded
    ],
)
def test_what_is_no_rubric_is_refused(text: str) -> None:
    assert parse("repetition:64=1")
    with pytest.raises(ValueError, match=r"PART=WEIGHT|Input should be|tokens belong|twice|at most 64 tokens"):
        parse(text)


HOSTILE: list[dict[str, Any]] = [
    *({"numerator": value} for value in (0, -1, 10**6 + 1, 0.5, True)),
    *({"denominator": 0}, {"part": "luck"}, {"tokens": 3}, {"part": "overlong"}, {"part": "repetition", "tokens": -1}),
]


@pytest.mark.parametrize("change", HOSTILE, ids=str)
def test_a_hostile_part_is_refused(change: dict[str, Any]) -> None:
    fields: dict[str, Any] = {"part": "score", "tokens": 0, "numerator": 1, "denominator": 1}
    assert RubricPart(**fields)
    with pytest.raises(ValidationError):
        RubricPart(**(fields | change))


async def test_a_run_rewards_by_its_rubric_and_evaluates_by_the_score() -> None:
    policy = Policy.load(PACKAGED_POLICY)
    run = run_manifest(environment=samples.task(rubric=parse("score=1/2,repetition:1=1/4")))
    assert run.from_bytes(run.to_bytes()) == run
    task = Task(bytes(32), run, environments.get("addition"), policy.tokenizer, policy.vocabulary, inline)
    problem = environments.Problem("55+56=", "111")
    tokens = policy.tokenizer.encode("111", special=False)
    assert len(set(tokens)) == 1 < len(tokens)
    penalty = Fraction(1, 4) * (1 - Fraction(1, len(tokens)))
    assert await task.rewards(problem, [tokens]) == (round((Fraction(1, 2) - penalty) * 1_000_000),)
    assert await task.scores([(problem, tokens)]) == (1_000_000,)
    plain = replace(task, run=run_manifest())
    assert await plain.rewards(problem, [tokens]) == (1_000_000,)


def test_a_run_of_episodes_has_no_rubric() -> None:
    with pytest.raises(ValidationError, match="a rubric of episodes"):
        run_manifest(
            environment=samples.task(name="wordle", rubric=parse("score=1")),
            episode={"turns": 2, "turn_tokens": 3, "reply_tokens": 8, "tokens": 58},
        )
