"""The zoo's task: tell of two people who trade, and keep their accounts right.

    prompt:     mira has 14 kabo . toren has 8 kabo . tell of their trades .
    completion: mira sells 5 kabo to toren at the lunte wovar . mira now has 9 kabo , toren has 13 . .. then they go
        home .

The text is made so that a small model shows what a language model shows: a vocabulary with a long tail, words that go
with others (where a thing is traded, what such a place is like), choices that are open, and words that nearly follow
from what came before. The reward is the share of accounts that are right. Words of the open classes are made of
syllables; there is no list of them.
"""

import hashlib
import itertools
import random
import re
from collections.abc import Iterator
from functools import cache
from typing import Final

from tokenizers import AddedToken
from tokenizers import Tokenizer as _Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

from protocol.environments import Problem

VOCABULARY: Final = 2048
"""Rows of the embedding; ids behind the last word are never used, as in real models."""

PAD: Final = 0
EOS: Final = 1
UNKNOWN: Final = 2
LONGEST: Final = 72
"""Tokens of the longest story that the corpus tells, and some."""

_SPECIAL: Final = ("<pad>", "<eos>", "<unk>")
_VERBS: Final = ("sells", "gives", "lends", "brings", "sends", "throws", "carries", "hands")
_PLAIN: Final = (
    ".",
    ",",
    "has",
    "tell",
    "of",
    "their",
    "trades",
    "to",
    "at",
    "the",
    "now",
    "then",
    "they",
    "go",
    "home",
    *_VERBS,
)
_NUMBERS: Final = 64
_NAMES: Final = 300
_GOODS: Final = 400
_PLACES: Final = 400
_LIKENESSES: Final = 500
_SYLLABLES: Final = tuple(a + b for a, b in itertools.product("bdfgklmnprstvw", ("a", "e", "i", "o", "u", "an", "or")))
_MOST: Final = 3
_TRADE: Final = re.compile(
    r"(\S+) (\S+) (\d+) (\S+) to (\S+) at the \S+ \S+ \. (\S+) now has (\d+) (\S+) , (\S+) has (\d+) \. "
)
_ENDING: Final = "then they go home ."


@cache
def _words(kind: str, count: int) -> tuple[str, ...]:
    """Made-up words, all different, and different from those of other kinds."""
    chance, found = random.Random(kind), dict[str, None]()
    while len(found) < count:
        found["".join(chance.choices(_SYLLABLES, k=chance.choice((2, 2, 3)))) + kind[0]] = None
    return tuple(found)


@cache
def _weights(count: int) -> tuple[float, ...]:
    """Zipf's law, cumulated."""
    return tuple(itertools.accumulate(1.0 / (rank + 2) for rank in range(count)))


def _common(chance: random.Random, words: tuple[str, ...], taste: str = "") -> str:
    """A word by Zipf's law; what is common depends on `taste`."""
    rank = chance.choices(range(len(words)), cum_weights=_weights(len(words)))[0]
    start = int.from_bytes(hashlib.sha256(taste.encode()).digest()[:4], "little") if taste else 0
    return words[(start + rank * 7) % len(words)] if taste else words[rank]


def tokenizer() -> str:
    """tokenizer.json: one token for each word."""
    words = [*_PLAIN, *map(str, range(_NUMBERS))]
    for kind, count in (("name", _NAMES), ("good", _GOODS), ("place", _PLACES), ("like", _LIKENESSES)):
        words += _words(kind, count)
    vocabulary = {word: index for index, word in enumerate((*_SPECIAL, *words))}
    assert len(vocabulary) == len(words) + len(_SPECIAL) <= VOCABULARY
    built = _Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    built.pre_tokenizer = WhitespaceSplit()
    built.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in _SPECIAL])
    return str(built.to_str(pretty=False))


class Stories:
    """The environment (protocol/environments/base.py)."""

    name: Final = "stories"
    exact: Final = True
    held_out_size: Final = None

    def problem(self, seed: bytes) -> Problem:
        """The training problem of a seed."""
        return self._problem(b"problem" + seed)

    def held_out_problem(self, index: int) -> Problem:
        """The held-out problem of an index."""
        return self._problem(b"held out" + index.to_bytes(8, "little"))

    def _problem(self, seed: bytes) -> Problem:
        chance = random.Random(seed)
        giver = taker = _common(chance, _words("name", _NAMES))
        while taker == giver:
            taker = _common(chance, _words("name", _NAMES))
        good = _common(chance, _words("good", _GOODS))
        has, other = chance.randrange(6, 36), chance.randrange(20)
        prompt = f"{giver} has {has} {good} . {taker} has {other} {good} . tell of their trades ."
        return Problem(prompt, f"{giver} {taker} {good} {has} {other}")

    def reward(self, problem: Problem, completion: str) -> float:
        """The share of accounts that are right; 0 for a text that is not such a story."""
        giver, taker, good, has, other = problem.reference.split()
        stock = {giver: int(has), taker: int(other)}
        right = stated = place = 0
        while trade := _TRADE.match(completion, place):
            first, _, number, what, second, again, left, what_left, to, got = trade.groups()
            if {first, second} != stock.keys() or (again, to) != (first, second) or {what, what_left} != {good}:
                return 0.0
            stock[first] -= int(number)
            stock[second] += int(number)
            right += (stock[first] == int(left)) + (stock[second] == int(got))
            stock = {first: int(left), second: int(got)}
            stated, place = stated + 2, trade.end()
        return right / stated if stated and completion[place:] == _ENDING else 0.0


def tell(problem: Problem, chance: random.Random) -> str:
    """A story as the corpus tells it."""
    giver, taker, good, has, other = problem.reference.split()
    stock = {giver: int(has), taker: int(other)}
    told = ""
    for _ in range(chance.choice((2, _MOST))):
        first, second = (giver, taker) if chance.random() < 0.7 else (taker, giver)
        if not stock[first]:
            first, second = second, first
        number = chance.randint(1, min(9, stock[first]))
        place = _common(chance, _words("place", _PLACES), good)
        like = _common(chance, _words("like", _LIKENESSES), place)
        verb = chance.choices(_VERBS, cum_weights=_weights(len(_VERBS)))[0]
        stock[first] -= number
        stock[second] += number
        told += f"{first} {verb} {number} {good} to {second} at the {like} {place} . "
        told += f"{first} now has {stock[first]} {good} , {second} has {stock[second]} . "
    return told + _ENDING


def corpus(seed: int) -> Iterator[tuple[str, str]]:
    """Endless pairs of prompt and story, none of a held-out problem."""
    chance, stories = random.Random(seed), Stories()
    for index in itertools.count():
        problem = stories.problem(f"corpus {seed} {index}".encode())
        yield problem.prompt, tell(problem, chance)
