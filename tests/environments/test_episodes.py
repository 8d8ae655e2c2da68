"""The environments of episodes: wordle, and sums with a calculator."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol import environments
from protocol.environments.base import EpisodeEnvironment, Problem
from protocol.environments.calculator import Calculator
from protocol.environments.wordle import Wordle, feedback

NAMES = [name for name in environments.names if environments.requirements(name).turns > 1]
SEED = bytes(32)
SUM = Problem(prompt="57*68+12>", reference="3888")


@pytest.mark.parametrize(
    ("word", "guess", "signs"),
    [
        ("123", "123", "+++"),
        ("123", "321", "*+*"),
        ("123", "456", "---"),
        ("112", "211", "*+*"),
        ("112", "221", "*-*"),  # one 2 explains the first one alone
        ("122", "212", "**+"),
        ("121", "111", "+-+"),  # those in their own place come first
    ],
)
def test_feedback(word: str, guess: str, signs: str) -> None:
    assert feedback(word, guess) == signs


def test_an_episode_of_wordle() -> None:
    episode = Wordle().begin(Problem(prompt="**=", reference="12"), SEED)
    assert episode.step("21") == "**="
    assert episode.reward() == 0.0
    for text in ("", "1", "123", "07", "1a", "１２", "12 ", "\n"):
        assert episode.step(text) == "()="
    assert episode.step("17") == "+-="
    assert episode.step("88") == "--="
    assert episode.reward() == 0.25  # half of the share of places that the best guess has right
    assert episode.step("12") is None
    assert episode.reward() == 1.0


def test_other_words_make_another_wordle() -> None:
    words = ["".join(letters) for letters in itertools.product("abcdefgh", repeat=2)]
    wordle = Wordle(words)
    assert wordle.problem(SEED).prompt == "**="
    assert wordle.begin(Problem("**=", "ab"), SEED).step("ba") == "**="
    assert 0 < wordle.held_out_size < len(words) / 2


@pytest.mark.parametrize(
    ("question", "reply"),
    [
        ("57*68=", "3876>"),
        ("3876+12=", "3888>"),
        ("12-57=", "-45>"),
        ("(57+3)/12=", "5>"),
        ("57/68=", "()>"),
        ("57/0=", "()>"),
        ("=", "()>"),
        ("57*=", "()>"),
        ("057*2=", "()>"),
        ("999999999*1=", "999999999>"),
        ("999999999+1=", "()>"),
        ("9999999999=", "()>"),
        ("9**9=", "()>"),
        ("__import__('os').system('ls')=", "()>"),
        ("1+" * 15 + "11=", "26>"),
        ("1+" * 16 + "1=", "()>"),  # longer than a question may be
        ("(" * 100_000 + "=", "()>"),
    ],
)
def test_the_calculator(question: str, reply: str) -> None:
    assert Calculator().begin(SUM, SEED).step(question) == reply


@pytest.mark.parametrize(
    ("answer", "reward"),
    [("3888", 1.0), ("It is 3888.", 1.0), ("3888 3876", 0.0), ("03888", 0.0), ("", 0.0), ("3876", 0.0)],
)
def test_any_other_turn_is_the_answer(answer: str, reward: float) -> None:
    episode = Calculator().begin(SUM, SEED)
    assert episode.step("57*68=") == "3876>"
    assert episode.reward() == 0.0
    assert episode.step(answer) is None
    assert episode.reward() == reward


@pytest.mark.parametrize("name", NAMES)
@given(texts=st.lists(st.text() | st.text("0123456789+-*/()=", max_size=8), max_size=8), seed=st.binary(min_size=16))
def test_episodes_are_pure_and_their_replies_and_rewards_in_bounds(name: str, texts: list[str], seed: bytes) -> None:
    environment = environments.get(name)
    assert isinstance(environment, EpisodeEnvironment)
    problem = environment.problem(seed)
    replies: list[list[str | None]] = []
    for _ in range(2):
        episode = environment.begin(problem, seed)
        replies.append([episode.step(text) for text in texts])
        assert 0.0 <= episode.reward() <= 1.0
    assert replies[0] == replies[1]
    assert all(reply is None or len(reply) <= 16 for reply in replies[0])
    assert environment.turns == environments.requirements(name).turns
