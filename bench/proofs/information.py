"""Table (d): what a sketch alone is worth, in bits a position, against somebody who did not compute the hidden states.

Over many projections a forger's value agrees at a position with some probability: next to none at most places, more
where the state hardly depends on the text. A rollout of T positions may miss k of them, where k is the least number
that honest rollouts exceed with a probability below 1e-4. Its worth is -log2(P(at least T - k agree)) / T, positions
taken as independent; a probability below what was seen counts as once. Tolerance and k are those that are worth most
against the constant. Forgers: the sketch of one fixed state, the best of some, and what
tests/support/adversaries/sketch_predictors.py learned from honest states.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from torch import Tensor

from bench.proofs.setting import BASE, Setting
from grailnode.calibration.variants import DType, Variant
from protocol.judging.binomial import binomial_tail, rate_bound
from protocol.rollout import challenge, sketch
from roles.ports import Request
from tests.support.adversaries import sketch_predictors
from tests.support.adversaries.published_sketches import Bucketed, Toploc
from tests.support.adversaries.stories import Stories
from tests.support.adversaries.trained_policy import PARAMS

FALSE_REJECTION: Final = 1e-4
_CONSTANTS: Final = 40
_TOLERANCES: Final = 12
_ROLLOUTS: Final = 6
_WINDOWS: Final = 20


@dataclass(frozen=True)
class States:
    """Hidden states of the same tokens, float32 [N, D]: as generated, as a prefill gives them, and as two forgers
    guess.
    """

    lengths: tuple[int, ...]
    generated: Tensor
    due: Tensor
    ridge: Tensor
    network: Tensor

    def some(self, rollouts: int) -> "States":
        """The first few rollouts."""
        end = sum(self.lengths[:rollouts])
        parts = (part[:end] for part in (self.generated, self.due, self.ridge, self.network))
        return States(self.lengths[:rollouts], *parts)

    def constants(self, count: int) -> list[Tensor]:
        """Candidates for the best constant: states of the policy here and there, and their mean."""
        return [*self.due[:: max(1, len(self.due) // count)], self.due.mean(dim=0)]

    def mean(self, value: Callable[[np.ndarray], float], agreement: "Agreement", tolerance: int) -> float:
        """The mean over rollouts of something that their positions' probabilities give."""
        parts = np.split(agreement.bounded[tolerance], np.cumsum(self.lengths)[:-1])
        return float(np.mean([value(part) for part in parts]))


async def states(setting: Setting, dtype: DType, rollouts: int) -> States:
    """Rollouts of one engine read by another; forgers learned from as many others."""
    halves = [await _rollouts(setting, dtype, rollouts, part) for part in (0, 1)]
    inputs = [torch.cat(half[3]) for half in halves]
    lesson = sketch_predictors.Examples(inputs[0], halves[0][2])
    lengths, generated, due, _ = halves[1]
    return States(
        lengths,
        generated,
        due,
        sketch_predictors.ridge(lesson)(inputs[1]),
        sketch_predictors.network(lesson)(inputs[1]),
    )


async def _rollouts(
    setting: Setting, dtype: DType, rollouts: int, part: int
) -> tuple[tuple[int, ...], Tensor, Tensor, list[Tensor]]:
    generating = await Variant(dtype=dtype).serve(setting.policy, setting.weights)
    checking = await BASE.serve(setting.policy, setting.weights)
    stories, text, embedding = Stories(), setting.policy.tokenizer, setting.weights["model.embed_tokens.weight"]
    generated, due, inputs, lengths = [], [], [], []
    for begin in range(0, rollouts, 96):
        names = [f"information {part} {number}".encode() for number in range(begin, min(begin + 96, rollouts))]
        prompts = [text.encode(stories.problem(name).prompt) for name in names]
        seeds = [challenge.stream(name.ljust(32), "bench", 16) for name in names]
        done = await generating.generate([Request(*pair) for pair in zip(prompts, seeds, strict=True)], PARAMS)
        seen = await checking.forward(prompts, [item.tokens for item in done])
        generated += [item.hidden for item in done]
        due += [item.hidden for item in seen]
        lengths += [len(item.tokens) for item in done]
        inputs += [sketch_predictors.features(embedding, p, item.tokens) for p, item in zip(prompts, done, strict=True)]
    return tuple(lengths), torch.cat(generated), torch.cat(due), inputs


def allowed(rate: float, length: int) -> int:
    """The misses that an honest rollout exceeds with a probability below FALSE_REJECTION."""
    return next(k for k in range(length + 1) if k == length or binomial_tail(k + 1, length, rate) < FALSE_REJECTION)


def worth(agreeing: np.ndarray, misses: int) -> float:
    """Bits a position of one rollout.

    Args:
        agreeing: float64 [T], the probability that a forger's value agrees at each position.
        misses: how many positions may not.
    """
    ways = np.zeros(misses + 1)  # probability of so many misses among the positions so far
    ways[0] = 1.0
    for p in agreeing:
        ways = ways * p + np.concatenate([[0.0], ways[:-1]]) * (1.0 - p)
    return -math.log2(max(float(ways.sum()), 1e-300)) / len(agreeing)


@dataclass(frozen=True)
class Agreement:
    """Over many projections, how often a claim agreed with what was due: float64 [tolerances, positions]."""

    shares: np.ndarray
    projections: int

    @property
    def bounded(self) -> np.ndarray:
        """The shares, but never less than could be seen."""
        bounded: np.ndarray = np.maximum(self.shares, 1.0 / self.projections)
        return bounded


def ours(kind: sketch.SketchKind, found: States, projections: int) -> None:
    """Print the rows of one kind."""
    some = found.some(_ROLLOUTS)
    pilot = _agreements(
        kind, some.due, [value.expand_as(some.due) for value in some.constants(_CONSTANTS)], 100, 1 << 32
    )
    best = max(range(len(pilot)), key=lambda place: float(np.log(pilot[place].bounded).mean()))
    constant = some.constants(_CONSTANTS)[best].expand_as(some.due)
    claims = {"honest": some.generated, "constant": constant, "ridge": some.ridge, "network": some.network}
    agree = dict(zip(claims, _agreements(kind, some.due, list(claims.values()), projections, 0), strict=True))
    length = round(float(np.mean(some.lengths)))
    rates = [rate_bound(round((1 - share) * 1e6), 10**6, 0.99) for share in agree["honest"].shares.mean(axis=1)]
    rules = [(tolerance, allowed(rate, length)) for tolerance, rate in enumerate(rates)]
    tolerance, misses = max(rules, key=lambda rule: some.mean(lambda p: worth(p, rule[1]), agree["constant"], rule[0]))
    for name in ("constant", "ridge", "network"):
        shares = agree[name].shares[tolerance]
        bits = some.mean(lambda p: worth(p, misses), agree[name], tolerance)
        unseen = float((shares == 0.0).mean())
        print(
            f"{kind:10} tolerance {tolerance}, {misses} of {length} may miss   "
            f"{name:9} {bits:6.2f} bits a position; agrees at "
            f"{shares.mean():.2e} of the positions, never in {projections} projections at {unseen:.2f} of them",
            flush=True,
        )


def _agreements(
    kind: sketch.SketchKind, due: Tensor, claims: list[Tensor], projections: int, first: int
) -> list[Agreement]:
    """How often each claim's states agree with those that are due."""
    counts = np.zeros((len(claims), _TOLERANCES, len(due)))
    together = torch.cat([due, *claims])
    tolerances = np.arange(_TOLERANCES)[:, None]
    for number in range(first, first + projections):
        seed = challenge.stream(number.to_bytes(32, "little"), "bench", 32)
        values = np.frombuffer(sketch.commit(kind, together, seed), np.int8).reshape(len(claims) + 1, len(due), 4)
        apart = np.abs(values[1:].astype(np.int16) - values[0]).max(axis=2)
        counts += apart[:, None, :] <= tolerances
    return [Agreement(count / projections, projections) for count in counts]


def bucketed(found: States, windows: int) -> None:
    """Print the rows of grail's deployed rule."""
    rule = Bucketed()
    places = np.concatenate([np.arange(length) for length in found.lengths])
    agree = dict.fromkeys(("honest", "constant", "ridge", "network"), 0)
    spread_of = 0
    for window in range(windows):
        due = rule.commit(found.due, window)
        signed = np.where(due > 1 << 30, due - (2**31 - 1), due)
        spread_of = max(spread_of, int(np.abs(signed).max()))
        claims = {
            "honest": rule.commit(found.generated, window),
            "constant": np.full_like(due, int(np.median(signed)) % (2**31 - 1)),
            "ridge": rule.commit(found.ridge, window),
            "network": rule.commit(found.network, window),
        }
        for name, claim in claims.items():
            agree[name] += int(rule.within(claim, due, places).sum())
    total = windows * len(places)
    for name, count in agree.items():
        bits = -math.log2(count / total) if count else math.inf
        print(f"published    tolerance 6000   {name:9} agrees at {count:8} of {total:8}   {abs(bits):5.2f} bits")
    print(f"published    no value further from 0 than {spread_of}, by construction none than 14224", flush=True)


def toploc(found: States) -> None:
    """Print the rows of TOPLOC: chunks of 32 tokens that pass."""
    rule = Toploc()
    ends = np.cumsum(found.lengths)
    chunks = [
        slice(at, at + rule.tokens)
        for end, length in zip(ends, found.lengths, strict=True)
        for at in range(end - length, end - rule.tokens + 1, rule.tokens)
    ]
    constant = _toploc_constant(rule, [found.due[chunk] for chunk in chunks[: len(chunks) // 2]])
    claims = {"honest": found.generated, "constant": None, "ridge": found.ridge, "network": found.network}
    for name, claim in claims.items():
        errors = [
            rule.check(constant if claim is None else rule.prove(claim[chunk]), found.due[chunk]) for chunk in chunks
        ]
        passed = sum(item.accepted for item in errors)
        bits = -math.log2(max(passed, 1) / len(chunks)) / rule.tokens
        least = min(item.exponents for item in errors)
        print(
            f"TOPLOC       258 B per 32     {name:9} passes {passed:6} of {len(chunks):6} chunks   "
            f"{'' if passed else '>='}{abs(bits):5.2f} bits a position   fewest wrong exponents {least} (38 may be)",
            flush=True,
        )


def _toploc_constant(rule: Toploc, chunks: list[Tensor]) -> bytes:
    """The proof of a typical chunk: the indices that are most often among the largest, each with its usual value."""
    flat = torch.stack([chunk.to(torch.bfloat16).float().reshape(-1) for chunk in chunks])
    border = flat.abs().topk(rule.top, dim=1).values[:, -1:]
    often = (flat.abs() >= border).float().mean(dim=0)
    indices = often.topk(rule.top).indices
    usual = torch.stack([flat[flat[:, i].abs() >= border[:, 0], i].median() for i in indices]).to(torch.bfloat16)
    return rule.through(indices.numpy(), usual.view(torch.int16).numpy().astype(np.int64) & 0xFFFF)


async def table(setting: Setting, rollouts: int, projections: int) -> None:
    """Print it for an honest pair in float32 and for one that generates in bfloat16."""
    dtypes: tuple[DType, ...] = ("float32", "bfloat16")
    for dtype in dtypes:
        found = await states(setting, dtype, rollouts)
        explained = [
            1 - float((guess - found.due).square().sum() / (found.due - found.due.mean(0)).square().sum())
            for guess in (found.ridge, found.network)
        ]
        print(
            f"generated in {dtype}, checked in float32: {len(found.due)} positions; the ridge regression explains "
            f"{explained[0]:.3f} of the variance, the network {explained[1]:.3f}"
        )
        ours("projection", found, projections)
        ours("topk", found, projections // 5)
        bucketed(found, _WINDOWS)
        toploc(found)
        print(flush=True)
