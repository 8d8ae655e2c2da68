"""What every environment promises (protocol/environments/base.py)."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol import environments

every = pytest.mark.parametrize("name", environments.names)


def test_unknown_name_lists_the_known() -> None:
    with pytest.raises(ValueError, match="addition, countdown"):
        environments.get("chess")


@every
def test_name_is_its_own(name: str) -> None:
    assert environments.get(name).name == name


@every
@given(seed=st.binary(min_size=16, max_size=32))
def test_seed_fixes_the_problem(name: str, seed: bytes) -> None:
    assert environments.get(name).problem(seed) == environments.get(name).problem(seed)


@every
def test_held_out_is_disjoint_from_training(name: str) -> None:
    environment = environments.get(name)
    training = {environment.problem(index.to_bytes(16, "little")) for index in range(3000)}
    held_out = {environment.held_out(index) for index in range(500)}
    assert not training & held_out
    assert len(held_out) > 300


@every
@given(completion=st.text() | st.text("0123456789+-*/() ="), seed=st.binary(min_size=16, max_size=16))
def test_any_text_earns_between_zero_and_one(name: str, completion: str, seed: bytes) -> None:
    environment = environments.get(name)
    assert 0.0 <= environment.reward(environment.problem(seed), completion) <= 1.0
