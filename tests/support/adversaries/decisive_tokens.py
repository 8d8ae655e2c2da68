"""Miners with the right policy that decide near ties their way: for a token, for the end, or for a higher reward."""

import itertools
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from protocol.digest import Weights
from protocol.rollout import sampling
from protocol.rollout.sampling import SamplingParams
from roles.policy.causal_model import CausalModel
from roles.ports import Generation, Request

Tokens = tuple[int, ...]
Wish = Callable[[Tokens, Tokens], int | None]
"""Returns the token that the miner wishes for behind a prompt and a part of a completion; None if it does not care."""


@dataclass
class TieEngine(ABC):
    """Generates as an engine does, but chooses tokens in its own way.

    Attributes:
        weights: in the dtype in which the miner computes.
        decided: how often it decided otherwise than honest work does.
        history: what was generated.
    """

    model: CausalModel
    weights: Weights
    decided: int = field(default=0, init=False)
    history: list[tuple[Request, Generation]] = field(default_factory=list, init=False)

    @abstractmethod
    def choose(self, prompt: Tokens, seed: bytes, completion: list[int], scores: torch.Tensor) -> int:
        """Return the next token; scores are float32 [V], in units of logits / temperature."""

    async def generate(self, requests: Sequence[Request], params: SamplingParams) -> list[Generation]:
        """Sample one completion for each request, in order."""
        generations = self.sample(requests, params)
        self.history += zip(requests, generations, strict=True)
        return generations

    @torch.inference_mode()
    def sample(self, requests: Sequence[Request], params: SamplingParams) -> list[Generation]:
        generations: list[Generation] = []
        for prompt, group in itertools.groupby(requests, key=lambda request: request.prompt):
            generations += self._complete(prompt, [request.seed for request in group], params)
        return generations

    def _complete(self, prompt: Tokens, seeds: list[bytes], params: SamplingParams) -> list[Generation]:
        """Complete one prompt with each seed. Rows that have ended are computed on, and cut afterwards."""
        cache, words = self.model.cache(), sampling.seed_words(seeds)
        ids = torch.tensor([prompt] * len(seeds))
        mask = torch.ones_like(ids, dtype=torch.bool)
        rows: list[list[int]] = [[] for _ in seeds]
        states, logprobs = [], []
        for position in range(params.max_tokens):
            states.append(self.model.hidden(self.weights, ids, mask, cache)[:, -1])
            logits = self.model.logits(self.weights, states[-1])
            noise = sampling.noise(words, torch.full((len(seeds),), position), logits.shape[-1])
            scores = logits / params.temperature + noise
            tokens = [
                row[-1] if row and row[-1] in params.stops else self.choose(prompt, seed, row, row_scores)
                for seed, row, row_scores in zip(seeds, rows, scores, strict=True)
            ]
            for row, token in zip(rows, tokens, strict=True):
                row.append(token)
            logprobs.append(sampling.log_probabilities(logits, torch.tensor(tokens), params.temperature))
            ids, mask = torch.tensor(tokens)[:, None], torch.cat([mask, mask.new_ones(len(seeds), 1)], dim=1)
            if all(row[-1] in params.stops for row in rows):
                break
        hidden, likely = torch.stack(states, dim=1).to(torch.float32), torch.stack(logprobs, dim=1)
        ends = [next((i + 1 for i, token in enumerate(row) if token in params.stops), len(row)) for row in rows]
        return [
            Generation(tuple(row[:end]), states_of_row[:end], tuple(logprobs_of_row[:end].tolist()))
            for row, end, states_of_row, logprobs_of_row in zip(rows, ends, hidden, likely, strict=True)
        ]


@dataclass
class DecisiveEngine(TieEngine):
    """Takes a wished token whose score falls short of the best one by at most the reach."""

    wish: Wish
    reach: float

    def choose(self, prompt: Tokens, seed: bytes, completion: list[int], scores: torch.Tensor) -> int:
        token, wished = int(scores.argmax()), self.wish(prompt, tuple(completion))
        if wished is not None and 0.0 < float(scores[token] - scores[wished]) <= self.reach:
            self.decided += 1
            return wished
        return token


def stop_taker(model: CausalModel, weights: Weights, end: int, reach: float) -> DecisiveEngine:
    """Return a miner that takes the end token wherever it can: a group pays the same, however short it is."""
    return DecisiveEngine(model, weights, lambda prompt, completion: end, reach)


@dataclass
class LuckyEngine(TieEngine):
    """Decides one near tie in each rollout, and delivers what follows from it if its reward is higher.

    Attributes:
        reward: of a completion of a prompt.
        reach: largest shortfall of the second-best token where it is taken.
        gained: sum of what the rewards are higher.
    """

    reward: Callable[[Tokens, Tokens], float]
    reach: float
    gained: float = field(default=0.0, init=False)
    _ties: dict[bytes, list[int]] = field(default_factory=dict, init=False)
    _decisions: dict[bytes, int] = field(default_factory=dict, init=False)  # where the second-best token is taken

    async def generate(self, requests: Sequence[Request], params: SamplingParams) -> list[Generation]:
        self._ties, self._decisions = {}, {}
        generations = self.sample(requests, params)
        self._decisions = {seed: random.Random(seed).choice(places) for seed, places in self._ties.items()}
        places = [place for place, request in enumerate(requests) if request.seed in self._decisions]
        for place, other in zip(places, self.sample([requests[place] for place in places], params), strict=True):
            prompt = requests[place].prompt
            old, new = (self.reward(prompt, params.without_stop(item.tokens)) for item in (generations[place], other))
            if new > old:
                generations[place] = other
                self.decided += 1
                self.gained += new - old
        self.history += zip(requests, generations, strict=True)
        return generations

    def choose(self, prompt: Tokens, seed: bytes, completion: list[int], scores: torch.Tensor) -> int:
        best = scores.topk(2)
        if float(best.values[0] - best.values[1]) <= self.reach:
            self._ties.setdefault(seed, []).append(len(completion))
        return int(best.indices[int(self._decisions.get(seed) == len(completion))])
