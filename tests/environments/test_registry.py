"""The contract of every environment (protocol/environments/base.py)."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol import environments
from protocol.environments import Environment
from tests.support.builders.tasks import CODE, MATH, AcceptingSandbox

every = pytest.mark.parametrize("name", (*environments.names, "math", "code-3.11"))
PIECES = ["<think>", "</think>", "<solution>", "</solution>", "\\boxed{", "}", "\\frac", "{", "(", "1", "^", ","]
MARKUP = st.lists(st.sampled_from(PIECES)).map("".join)


def make(name: str) -> Environment:
    needs = environments.requirements(name)
    data = (CODE if needs.python else MATH) if needs.data else None
    return environments.get(name, data, AcceptingSandbox(needs.python) if needs.python else None)


def test_an_unknown_name_is_refused_with_a_list_of_all_names() -> None:
    with pytest.raises(ValueError, match=re.escape(", ".join(environments.names + environments.data_names))):
        environments.get("chess")


@every
def test_is_exact_agrees_with_the_environment(name: str) -> None:
    assert environments.is_exact(name) == make(name).exact == (not environments.requirements(name).python)


def test_missing_and_useless_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="'math' needs a data file"):
        environments.get("math")
    with pytest.raises(ValueError, match="'sat' takes no data file"):
        environments.get("sat", MATH)
    for sandbox in (None, AcceptingSandbox("3.12")):
        with pytest.raises(ValueError, match=r"needs a sandbox with Python 3\.11"):
            environments.get("code-3.11", CODE, sandbox)


@every
def test_an_environment_has_the_name_by_which_it_is_created(name: str) -> None:
    assert make(name).name == name


@every
@given(seed=st.binary(min_size=16, max_size=32))
def test_a_seed_determines_the_problem(name: str, seed: bytes) -> None:
    assert make(name).problem(seed) == make(name).problem(seed)


@every
def test_held_out_is_disjoint_from_training(name: str) -> None:
    environment = make(name)
    training = {environment.problem(index.to_bytes(16, "little")) for index in range(1000)}
    held_out = {environment.held_out_problem(index) for index in range(500)}
    assert not training & held_out
    least = 300 if name in environments.names else 2
    assert len(held_out) > min(least, (environment.held_out_size or 500) - 1)


@every
@given(completion=st.text() | MARKUP | st.text("0123456789+-*/() ="), seed=st.binary(min_size=16, max_size=16))
def test_the_reward_of_any_text_is_between_zero_and_one(name: str, completion: str, seed: bytes) -> None:
    environment = make(name)
    for text in (completion, f"<solution>{completion}</solution>"):
        reward = environment.reward(environment.problem(seed), text)
        assert 0.0 <= reward <= 1.0
        assert reward == environment.reward(environment.problem(seed), text)


@every
@pytest.mark.parametrize(
    "piece", ["<think>", "<solution>", "\\boxed{", "((", "{", "9^{", "\\frac", "\\text{", "1,", "\ud800", "\0"]
)
def test_long_texts_do_not_take_long(name: str, piece: str) -> None:
    """Quadratic or slower work on one of these would exceed the suite's time limit."""
    environment = make(name)
    text = piece * (1_000_000 // len(piece))
    for completion in (text, f"<solution>{text}</solution>", f"<think>a</think><solution>{piece * 200}</solution>"):
        assert 0.0 <= environment.reward(environment.held_out_problem(0), completion) <= 1.0
