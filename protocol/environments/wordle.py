"""The wordle environment: guess a hidden word from what each guess reveals (docs/spec/environments.md).

The words are the numbers of two digits, so that the packaged policy can play. A reply has a sign for
each place of the guess: '+' for the right digit, '*' for one that stands elsewhere, '-' for one that the rest of the
word does not have.
"""

from collections import Counter
from collections.abc import Sequence
from fractions import Fraction
from typing import Final

from protocol.environments.base import Problem
from protocol.environments.seeded_rng import SeededRng, is_held_out

WORDS: Final = tuple(map(str, range(10, 100)))
_NO_WORD: Final = "()="
_MOST_PARTIAL: Final = Fraction(1, 2)


def feedback(word: str, guess: str) -> str:
    """Return the signs of a guess of the word's length. A character of the word explains one of the guess, first those
    in its own place, then others from the left.
    """
    rest = Counter(letter for letter, guessed in zip(word, guess, strict=True) if letter != guessed)
    signs = ""
    for letter, guessed in zip(word, guess, strict=True):
        if letter == guessed:
            signs += "+"
        elif rest[guessed]:
            rest[guessed] -= 1
            signs += "*"
        else:
            signs += "-"
    return signs


class WordleEpisode:
    """An episode with a hidden word."""

    def __init__(self, word: str, words: frozenset[str]) -> None:
        self._word = word
        self._words = words
        self._most_places = 0

    def step(self, text: str) -> str | None:
        if text not in self._words:
            return _NO_WORD
        signs = feedback(self._word, text)
        self._most_places = max(self._most_places, signs.count("+"))
        return None if text == self._word else f"{signs}="

    def reward(self) -> float:
        share = Fraction(self._most_places, len(self._word))
        return float(share if share == 1 else share * _MOST_PARTIAL)


class Wordle:
    """Wordle, of words of one length. The reward is 1.0 for the word, else half of the share of places that the best
    guess has right.
    """

    name = "wordle"
    exact = True
    turns = 6

    def __init__(self, words: Sequence[str] = WORDS) -> None:
        self._all = frozenset(words)
        self._training = [word for word in words if not is_held_out(f"wordle {word}")]
        self._held_out = [word for word in words if is_held_out(f"wordle {word}")]

    def problem(self, seed: bytes) -> Problem:
        return _problem(self._training[SeededRng("wordle", seed).below(len(self._training))])

    def held_out_problem(self, index: int) -> Problem:
        return _problem(self._held_out[index % len(self._held_out)])

    @property
    def held_out_size(self) -> int:
        return len(self._held_out)

    def begin(self, problem: Problem, seed: bytes) -> WordleEpisode:
        return WordleEpisode(problem.reference, self._all)

    def reward(self, problem: Problem, completion: str) -> float:
        episode = self.begin(problem, b"")
        episode.step(completion)
        return episode.reward()


def _problem(word: str) -> Problem:
    return Problem(prompt=f"{'*' * len(word)}=", reference=word)
