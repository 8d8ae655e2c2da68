"""A miner that decides near ties its way: where a token matters, it takes the one that it wishes for."""

import itertools
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
class DecisiveEngine:
    """Generates as an engine does, but takes a wished token whose score falls short of the best one by little.

    Attributes:
        weights: in the dtype in which the miner computes.
        reach: largest shortfall, in units of logits / temperature.
        decided: how many tokens are not those of honest work.
        history: what was generated.
    """

    model: CausalModel
    weights: Weights
    wish: Wish
    reach: float
    decided: int = 0
    history: list[tuple[Request, Generation]] = field(default_factory=list)

    @torch.inference_mode()
    async def generate(self, requests: Sequence[Request], params: SamplingParams) -> list[Generation]:
        """Sample one completion for each request, in order."""
        generations: list[Generation] = []
        for prompt, group in itertools.groupby(requests, key=lambda request: request.prompt):
            generations += self._complete(prompt, [request.seed for request in group], params)
        self.history += zip(requests, generations, strict=True)
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
            tokens = [
                self._choose(prompt, row, scores)
                for row, scores in zip(rows, logits / params.temperature + noise, strict=True)
            ]
            for row, token in zip(rows, tokens, strict=True):
                row.append(token)
            logprobs.append(sampling.log_probabilities(logits, torch.tensor(tokens), params.temperature))
            ids, mask = torch.tensor(tokens)[:, None], torch.cat([mask, mask.new_ones(len(seeds), 1)], dim=1)
            if all(any(stop in row for stop in params.stops) for row in rows):
                break
        hidden, likely = torch.stack(states, dim=1).to(torch.float32), torch.stack(logprobs, dim=1)
        ends = [next((i + 1 for i, token in enumerate(row) if token in params.stops), len(row)) for row in rows]
        return [
            Generation(tuple(row[:end]), states_of_row[:end], tuple(logprobs_of_row[:end].tolist()))
            for row, end, states_of_row, logprobs_of_row in zip(rows, ends, hidden, likely, strict=True)
        ]

    def _choose(self, prompt: Tokens, completion: list[int], scores: torch.Tensor) -> int:
        token, wished = int(scores.argmax()), self.wish(prompt, tuple(completion))
        if wished is not None and 0.0 < float(scores[token] - scores[wished]) <= self.reach:
            self.decided += 1
            return wished
        return token
