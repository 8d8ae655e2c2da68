"""Table (d): what a sketch alone is worth, in bits a position, against somebody who did not compute the hidden states.

A forger's value agrees at a position with a probability q. A rollout of T positions may miss k of them, where k is the least
number that honest rollouts exceed with a probability below 1e-4, by the bound on the honest rate of misses. A position is worth
-log2(P(at least T - k of T agree)) / T; tolerance and k are those that make it worth most against the constant. Forgers: the best
constant under the window's own projection, and what bench/zoo/predictors.py learned from honest states.
"""

import math
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from torch import Tensor

from bench.proofs.published import Bucketed, Toploc
from bench.proofs.setting import BASE, Setting
from bench.zoo import predictors
from bench.zoo.model import PARAMS
from bench.zoo.stories import Stories
from grailnode.calibration.variants import DType, Variant
from protocol import challenge, sketch
from protocol.decision import binomial_tail, rate_bound
from roles.ports import Request

FALSE_REJECTION: Final = 1e-4
_CONSTANTS: Final = 64
_LARGEST: Final = 64


@dataclass(frozen=True)
class States:
    """Hidden states of the same tokens, float32 [N, D]: as generated, as a prefill gives them, and as two forgers guess."""

    lengths: tuple[int, ...]
    generated: Tensor
    due: Tensor
    ridge: Tensor
    network: Tensor


async def states(setting: Setting, dtype: DType, rollouts: int) -> States:
    """Rollouts of one engine read by another; forgers learned from as many others."""
    halves = [await _rollouts(setting, dtype, rollouts, part) for part in (0, 1)]
    inputs = [torch.cat(half[3]) for half in halves]
    lesson = predictors.Examples(inputs[0], halves[0][2])
    lengths, generated, due, _ = halves[1]
    return States(lengths, generated, due, predictors.ridge(lesson)(inputs[1]), predictors.network(lesson)(inputs[1]))


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
        inputs += [predictors.features(embedding, p, item.tokens) for p, item in zip(prompts, done, strict=True)]
    return tuple(lengths), torch.cat(generated), torch.cat(due), inputs


def spread(values: np.ndarray) -> np.ndarray:
    """How many distances are 0, 1, ..., _LARGEST: int64."""
    return np.bincount(np.minimum(values, _LARGEST + 1), minlength=_LARGEST + 2)[: _LARGEST + 1]


def worth(q: float, length: int, allowed: int) -> float:
    """Bits a position of a rollout of so many, of which so many may miss."""
    probability = binomial_tail(length - allowed, length, q)
    return -math.log2(probability) / length if probability > 0.0 else math.inf


def allowed(rate: float, length: int) -> int:
    """The misses that an honest rollout exceeds with a probability below FALSE_REJECTION."""
    return next(k for k in range(length + 1) if k == length or binomial_tail(k + 1, length, rate) < FALSE_REJECTION)


def ours(kind: sketch.SketchKind, found: States, windows: int) -> None:
    """Print the rows of one kind."""
    honest, forged = np.zeros(_LARGEST + 1), {name: np.zeros(_LARGEST + 1) for name in ("constant", "ridge", "network")}
    half = len(found.due) // 2
    for window in range(windows):
        seed = challenge.stream(window.to_bytes(32, "little"), "bench", 32)
        due = sketch.commit(kind, found.due, seed)
        honest += spread(sketch.distances(sketch.commit(kind, found.generated, seed), due))
        forged["ridge"] += spread(sketch.distances(sketch.commit(kind, found.ridge, seed), due))
        forged["network"] += spread(sketch.distances(sketch.commit(kind, found.network, seed), due))
        forged["constant"] += _constant(np.frombuffer(due, np.int8).reshape(-1, 4).astype(np.int16), half)
    positions, length = windows * len(found.due), round(float(np.mean(found.lengths)))
    best = max(range(_LARGEST + 1), key=lambda t: _at(t, honest, forged["constant"], positions, length)[2])
    misses = _at(best, honest, forged["constant"], positions, length)[0]
    for name, counts in forged.items():
        total = positions if name != "constant" else windows * (len(found.due) - half)
        passed = int(counts[: best + 1].sum())
        q = max(passed, 1) / total
        sign = "" if passed else ">="
        print(
            f"{kind:12} tolerance {best:2}, {misses} of {length} may miss   {name:9} agrees at {passed:8} of {total:8}   "
            f"{sign}{-math.log2(q):5.2f} bits, {sign}{worth(q, length, misses):5.2f} a position of a rollout",
            flush=True,
        )


def _at(
    tolerance: int, honest: np.ndarray, constant: np.ndarray, positions: int, length: int
) -> tuple[int, float, float]:
    """Misses that may be, the constant's q, and its worth."""
    outside = positions - int(honest[: tolerance + 1].sum())
    misses = allowed(rate_bound(outside, positions, 0.99), length)
    q = max(1.0, float(constant[: tolerance + 1].sum())) / (positions // 2)
    return misses, q, worth(min(q, 1.0), length, misses)


def _constant(due: np.ndarray, half: int) -> np.ndarray:
    """Distances of the best of some constants, chosen by one half of the positions for each tolerance, on the other half."""
    chosen, rest = due[:half], due[half:]
    tries = [*chosen[:: max(1, half // _CONSTANTS)], np.median(chosen, axis=0).round().astype(np.int16)]
    gains = np.array([spread(np.abs(chosen - value).max(axis=1)).cumsum() for value in tries])
    found = np.zeros(_LARGEST + 1)
    reached = 0
    for tolerance, index in enumerate(gains.argmax(axis=0)):
        within = int((np.abs(rest - tries[index]).max(axis=1) <= tolerance).sum())
        found[tolerance], reached = max(0, within - reached), max(within, reached)
    return found


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


async def table(setting: Setting, rollouts: int, windows: int) -> None:
    """Print it for an honest pair in float32 and for one that generates in bfloat16."""
    dtypes: tuple[DType, ...] = ("float32", "bfloat16")
    for dtype in dtypes:
        found = await states(setting, dtype, rollouts)
        explained = [
            1 - float((guess - found.due).square().sum() / (found.due - found.due.mean(0)).square().sum())
            for guess in (found.ridge, found.network)
        ]
        print(
            f"generated in {dtype}, checked in float32: {len(found.due)} positions, {windows} windows; ridge explains "
            f"{explained[0]:.3f} of the variance, the network {explained[1]:.3f}"
        )
        ours("projection", found, windows)
        ours("topk", found, windows)
        bucketed(found, windows)
        toploc(found)
        print(flush=True)
