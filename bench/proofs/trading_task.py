"""The adversaries' task: a story of two people who trade, with the right account after each trade.

    prompt:     mira has 14 kabo . toren has 8 kabo . tell of their trades .
    completion: mira sells 5 kabo to toren at the lunte wovar . mira now has 9 kabo , toren has 13 . .. then they go
        home .

The text has the properties of natural language that matter to a small model: a vocabulary with a long tail, words that
depend on others (the place on the good, the adjective on the place), open choices, and words that are almost certain.
The reward is the share of accounts that are right. Names, goods, places and adjectives consist of syllables.
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
"""Rows of the embedding. As in other models, ids after the last word are not used."""

PAD: Final = 0
EOS: Final = 1
UNKNOWN: Final = 2
MAX_STORY_TOKENS: Final = 72
"""Limit of the tokens of a story; every story of the corpus is shorter."""

_SPECIAL: Final = ("<pad>", "<eos>", "<unk>")
_VERBS: Final = ("sells", "gives", "lends", "brings", "sends", "throws", "carries", "hands")
_FUNCTION_WORDS: Final = (
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
_ADJECTIVES: Final = 500
_SYLLABLES: Final = tuple(a + b for a, b in itertools.product("bdfgklmnprstvw", ("a", "e", "i", "o", "u", "an", "or")))
_MAX_TRADES: Final = 3
_TRADE: Final = re.compile(
    r"(\S+) (\S+) (\d+) (\S+) to (\S+) at the \S+ \S+ \. (\S+) now has (\d+) (\S+) , (\S+) has (\d+) \. "
)
_DUE: Final = re.compile(r"\S+ \S+ (\d+) \S+ to (\S+) at the \S+ \S+ \. (\S+) now has(?: \d+ \S+ , \S+ (has))?")
_ENDING: Final = "then they go home ."


@cache
def _words(kind: str, count: int) -> tuple[str, ...]:
    """Return invented words, all different, and different from those of other kinds."""
    rng, words = random.Random(kind), dict[str, None]()
    while len(words) < count:
        words["".join(rng.choices(_SYLLABLES, k=rng.choice((2, 2, 3)))) + kind[0]] = None
    return tuple(words)


@cache
def _weights(count: int) -> tuple[float, ...]:
    """Return the cumulative weights of Zipf's law."""
    return tuple(itertools.accumulate(1.0 / (rank + 2) for rank in range(count)))


def _draw_word(rng: random.Random, words: tuple[str, ...], context: str = "") -> str:
    """Draw a word by Zipf's law; the order of the words by frequency depends on `context`."""
    rank = rng.choices(range(len(words)), cum_weights=_weights(len(words)))[0]
    start = int.from_bytes(hashlib.sha256(context.encode()).digest()[:4], "little") if context else 0
    return words[(start + rank * 7) % len(words)] if context else words[rank]


def tokenizer() -> str:
    """Return the content of tokenizer.json, with one token for each word."""
    words = [*_FUNCTION_WORDS, *map(str, range(_NUMBERS))]
    for kind, count in (("name", _NAMES), ("good", _GOODS), ("place", _PLACES), ("like", _ADJECTIVES)):
        words += _words(kind, count)
    vocabulary = {word: index for index, word in enumerate((*_SPECIAL, *words))}
    assert len(vocabulary) == len(words) + len(_SPECIAL) <= VOCABULARY
    tokenizer_model = _Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer_model.pre_tokenizer = WhitespaceSplit()
    tokenizer_model.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in _SPECIAL])
    return str(tokenizer_model.to_str(pretty=False))


class TradingTask:
    """Implements Environment (protocol/environments/base.py)."""

    name: Final = "trading"
    exact: Final = True
    held_out_size: Final = None

    def problem(self, seed: bytes) -> Problem:
        """Return the training problem of a seed."""
        return self._problem(b"problem" + seed)

    def held_out_problem(self, index: int) -> Problem:
        """Return the held-out problem of an index."""
        return self._problem(b"held out" + index.to_bytes(8, "little"))

    def _problem(self, seed: bytes) -> Problem:
        rng = random.Random(seed)
        first_person = second_person = _draw_word(rng, _words("name", _NAMES))
        while second_person == first_person:
            second_person = _draw_word(rng, _words("name", _NAMES))
        good = _draw_word(rng, _words("good", _GOODS))
        first_stock, second_stock = rng.randrange(6, 36), rng.randrange(20)
        accounts = f"{first_person} has {first_stock} {good} . {second_person} has {second_stock} {good} ."
        return self.problem_of(f"{accounts} tell of their trades .")

    def problem_of(self, prompt: str) -> Problem:
        """Return the problem that has a prompt."""
        first_person, _, first_stock, good, _, second_person, _, second_stock, *_ = prompt.split()
        return Problem(prompt, f"{first_person} {second_person} {good} {first_stock} {second_stock}")

    def reward(self, problem: Problem, completion: str) -> float:
        """Return the share of accounts that are right; 0 for a text without the form of a story."""
        first_person, second_person, good, first_stock, second_stock = problem.reference.split()
        stock = {first_person: int(first_stock), second_person: int(second_stock)}
        correct = total = place = 0
        while trade := _TRADE.match(completion, place):
            seller, _, amount, item, buyer, seller_again, seller_stock, stock_item, buyer_again, buyer_stock = (
                trade.groups()
            )
            if (
                {seller, buyer} != stock.keys()
                or (seller_again, buyer_again) != (seller, buyer)
                or {item, stock_item} != {good}
            ):
                return 0.0
            stock[seller] -= int(amount)
            stock[buyer] += int(amount)
            correct += (stock[seller] == int(seller_stock)) + (stock[buyer] == int(buyer_stock))
            stock = {seller: int(seller_stock), buyer: int(buyer_stock)}
            total, place = total + 2, trade.end()
        return correct / total if total and completion[place:] == _ENDING else 0.0

    def due_account(self, problem: Problem, completion: str) -> int | None:
        """Return the number that would be right behind a part of a story; None if no account is due there."""
        first_person, second_person, _, first_stock, second_stock = problem.reference.split()
        stock, place = {first_person: int(first_stock), second_person: int(second_stock)}, 0
        while trade := _TRADE.match(completion, place):
            seller, _, _, _, buyer, _, seller_stock, _, _, buyer_stock = trade.groups()
            stock, place = {seller: int(seller_stock), buyer: int(buyer_stock)}, trade.end()
        due = _DUE.fullmatch(completion, place)
        if due is None or {due[2], due[3]} != stock.keys():
            return None
        return stock[due[2]] + int(due[1]) if due[4] else stock[due[3]] - int(due[1])


def write_story(problem: Problem, rng: random.Random) -> str:
    """Return a correct story for a problem."""
    first_person, second_person, good, first_stock, second_stock = problem.reference.split()
    stock = {first_person: int(first_stock), second_person: int(second_stock)}
    story = ""
    for _ in range(rng.choice((2, _MAX_TRADES))):
        seller, buyer = (first_person, second_person) if rng.random() < 0.7 else (second_person, first_person)
        if not stock[seller]:
            seller, buyer = buyer, seller
        amount = rng.randint(1, min(9, stock[seller]))
        place = _draw_word(rng, _words("place", _PLACES), good)
        adjective = _draw_word(rng, _words("like", _ADJECTIVES), place)
        verb = rng.choices(_VERBS, cum_weights=_weights(len(_VERBS)))[0]
        stock[seller] -= amount
        stock[buyer] += amount
        story += f"{seller} {verb} {amount} {good} to {buyer} at the {adjective} {place} . "
        story += f"{seller} now has {stock[seller]} {good} , {buyer} has {stock[buyer]} . "
    return story + _ENDING


def corpus(seed: int) -> Iterator[tuple[str, str]]:
    """Yield pairs of prompt and story without end, none of a held-out problem."""
    rng, task = random.Random(seed), TradingTask()
    for index in itertools.count():
        problem = task.problem(f"corpus {seed} {index}".encode())
        yield problem.prompt, write_story(problem, rng)
