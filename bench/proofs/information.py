"""Table (d): the bits of evidence in a sketch, for each position, against a miner without the hidden states.

A forged value agrees if it is within the distance that 99% of the honest positions are within. The four values of a
position have independent coefficients. So a position agrees with the fourth power of the share of single values that
agree, over many projections; a share of 0 counts as one agreement. The bits are the mean of -log2 of this probability:
those of a rollout, all of whose positions have to agree, divided by its length. The forged values are the sketch of one
fixed state, the best of some of other rollouts, and those of states that the predictors of
tests/support/adversaries/sketch_predictors.py have learned from honest ones.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from torch import Tensor

from bench.proofs.published_sketches import BucketSketch, Toploc
from bench.proofs.setting import Setting
from bench.proofs.trading_task import TradingTask
from bench.proofs.trained_policy import PARAMS
from grailnode.calibration.variants import DType, Variant
from protocol.rollout import challenge, sketch
from roles.ports import Request
from tests.support.adversaries import sketch_predictors

_CONSTANTS: Final = 40
_TRIALS: Final = 20  # projections by which the best constant and the honest distance are found
_ROLLOUTS: Final = 24  # of this project's sketches
_WINDOWS: Final = 20


@dataclass(frozen=True)
class States:
    """Hidden states of the same tokens, each float32 [N, D].

    Attributes:
        lengths: tokens of each rollout; their sum is N.
        generated_states: states of the generation.
        expected_states: states of the validator's prefill.
        ridge, network: predictions of a ridge regression and of a network.
    """

    lengths: tuple[int, ...]
    generated_states: Tensor
    expected_states: Tensor
    ridge: Tensor
    network: Tensor

    def sample(self, rollouts: int) -> "States":
        """Return the first rollouts."""
        end = sum(self.lengths[:rollouts])
        parts = (part[:end] for part in (self.generated_states, self.expected_states, self.ridge, self.network))
        return States(self.lengths[:rollouts], *parts)

    def constants(self, count: int, after: int) -> list[Tensor]:
        """Return candidates for the best constant: some `count` states at regular distances, and the mean state, of the
        rollouts after so many.
        """
        others = self.expected_states[sum(self.lengths[:after]) :]
        return [*others[:: max(1, len(others) // count)], others.mean(dim=0)]


async def measure_states(setting: Setting, dtype: DType, rollouts: int) -> States:
    """Return the states of rollouts that one engine has generated and another has checked.

    The predictors learn from as many other rollouts.
    """
    batches = [await _rollouts(setting, dtype, rollouts, part) for part in (0, 1)]
    inputs = [torch.cat(batch[3]) for batch in batches]
    examples = sketch_predictors.Examples(inputs[0], batches[0][2])
    lengths, generated_states, expected_states, _ = batches[1]
    return States(
        lengths,
        generated_states,
        expected_states,
        sketch_predictors.ridge(examples)(inputs[1]),
        sketch_predictors.network(examples)(inputs[1]),
    )


async def _rollouts(
    setting: Setting, dtype: DType, rollouts: int, part: int
) -> tuple[tuple[int, ...], Tensor, Tensor, list[Tensor]]:
    generating_engine = await Variant(dtype=dtype).serve(setting.policy, setting.weights)
    checking_engine = await Variant(dtype=dtype, attention="eager").serve(setting.policy, setting.weights)
    environment, tokenizer, embedding = (
        TradingTask(),
        setting.policy.tokenizer,
        setting.weights["model.embed_tokens.weight"],
    )
    generated_states, expected_states, inputs, lengths = [], [], [], []
    for begin in range(0, rollouts, 96):
        names = [f"information {part} {number}".encode() for number in range(begin, min(begin + 96, rollouts))]
        prompts = [tokenizer.encode(environment.problem(name).prompt) for name in names]
        seeds = [challenge.stream(name.ljust(32), "bench", 16) for name in names]
        generations = await generating_engine.generate(
            [Request(*pair) for pair in zip(prompts, seeds, strict=True)], PARAMS
        )
        forwards = await checking_engine.forward(prompts, [item.tokens for item in generations])
        generated_states += [item.hidden for item in generations]
        expected_states += [item.hidden for item in forwards]
        lengths += [len(item.tokens) for item in generations]
        inputs += [
            sketch_predictors.features(embedding, p, item.tokens) for p, item in zip(prompts, generations, strict=True)
        ]
    return tuple(lengths), torch.cat(generated_states), torch.cat(expected_states), inputs


def print_project_sketch(kind: sketch.SketchKind, states: States, projections: int) -> None:
    """Print the row of one kind of this project's sketches."""
    candidates = states.constants(_CONSTANTS, after=_ROLLOUTS)
    states = states.sample(_ROLLOUTS)
    expected = states.expected_states
    honest = _values(kind, [states.generated_states], expected, range(_TRIALS))[0]
    within = int(np.quantile(honest.max(axis=-1), 0.99, method="higher"))
    constants = [state.expand_as(expected) for state in candidates]
    trials = [(values <= within).sum() for values in _values(kind, constants, expected, range(_TRIALS))]
    claims = {"constant": constants[int(np.argmax(trials))], "ridge": states.ridge, "network": states.network}
    agreeing = np.zeros((len(claims), len(expected)))
    for number in range(_TRIALS, _TRIALS + projections):
        distances = _values(kind, list(claims.values()), expected, [number])
        agreeing += (distances <= within).sum(axis=2)
    shares = np.maximum(agreeing, 1.0) / (4 * projections)
    bits = -4 * np.log2(shares).mean(axis=1)
    cells = "".join(f"  {name} {value:5.2f}" for name, value in zip(claims, bits, strict=True))
    uniform = -4 * math.log2((2 * within + 1) / 256)
    print(f"{kind:10} honest within {within:2}: bits{cells}; any value as likely as another {uniform:5.2f}", flush=True)


def _values(kind: sketch.SketchKind, claims: list[Tensor], expected: Tensor, numbers: Sequence[int]) -> np.ndarray:
    """Return the distances of all values of claims, by some projections: uint8 [claims, projections * T, 4]."""
    parts = []
    for number in numbers:
        seed = challenge.stream(number.to_bytes(32, "little"), "bench", 32)
        sketches = [np.frombuffer(sketch.commit(kind, states, seed), np.uint8) for states in (expected, *claims)]
        parts.append(np.stack([np.minimum(values - sketches[0], sketches[0] - values) for values in sketches[1:]]))
    return np.concatenate(parts, axis=1).reshape(len(claims), -1, 4)


def print_bucketed_rule(states: States, windows: int) -> None:
    """Print the rows of grail's deployed rule, over some windows."""
    rule = BucketSketch()
    places = np.concatenate([np.arange(length) for length in states.lengths])
    agreement_counts = dict.fromkeys(("honest", "constant", "ridge", "network"), 0)
    max_distance = 0
    for window in range(windows):
        expected_sketch = rule.commit(states.expected_states, window)
        signed = np.where(expected_sketch > 1 << 30, expected_sketch - (2**31 - 1), expected_sketch)
        max_distance = max(max_distance, int(np.abs(signed).max()))
        claims = {
            "honest": rule.commit(states.generated_states, window),
            "constant": np.full_like(expected_sketch, int(np.median(signed)) % (2**31 - 1)),
            "ridge": rule.commit(states.ridge, window),
            "network": rule.commit(states.network, window),
        }
        for name, claim in claims.items():
            agreement_counts[name] += int(rule.within(claim, expected_sketch, places).sum())
    total = windows * len(places)
    for name, count in agreement_counts.items():
        bits = -math.log2(count / total) if count else math.inf
        print(f"published    tolerance 6000   {name:9} agrees at {count:8} of {total:8}   {abs(bits):5.2f} bits")
    print(f"published    no value further from 0 than {max_distance}, by construction none than 14224", flush=True)


def print_toploc(states: States) -> None:
    """Print the rows of TOPLOC: how many chunks of 32 tokens pass."""
    rule = Toploc()
    ends = np.cumsum(states.lengths)
    chunks = [
        slice(at, at + rule.tokens)
        for end, length in zip(ends, states.lengths, strict=True)
        for at in range(end - length, end - rule.tokens + 1, rule.tokens)
    ]
    constant = _toploc_constant(rule, [states.expected_states[chunk] for chunk in chunks[: len(chunks) // 2]])
    claims = {"honest": states.generated_states, "constant": None, "ridge": states.ridge, "network": states.network}
    for name, claim in claims.items():
        errors = [
            rule.check(constant if claim is None else rule.prove(claim[chunk]), states.expected_states[chunk])
            for chunk in chunks
        ]
        pass_count = sum(item.accepted for item in errors)
        bits = abs(math.log2(max(pass_count, 1) / len(chunks)) / rule.tokens)
        least = min(item.exponents for item in errors)
        print(
            f"TOPLOC       258 B per 32     {name:9} passes {pass_count:6} of {len(chunks):6} chunks   "
            f"{'' if pass_count else '>='}{bits:5.2f} bits a position   fewest wrong exponents {least} (38 may be)",
            flush=True,
        )


def _toploc_constant(rule: Toploc, chunks: list[Tensor]) -> bytes:
    """Return the proof of a typical chunk: the indices that are most often among the largest, with median values."""
    flat = torch.stack([chunk.to(torch.bfloat16).float().reshape(-1) for chunk in chunks])
    smallest_top_value = flat.abs().topk(rule.top, dim=1).values[:, -1:]
    frequency = (flat.abs() >= smallest_top_value).float().mean(dim=0)
    indices = frequency.topk(rule.top).indices
    typical_values = torch.stack([flat[flat[:, i].abs() >= smallest_top_value[:, 0], i].median() for i in indices]).to(
        torch.bfloat16
    )
    return rule.through(indices.numpy(), typical_values.view(torch.int16).numpy().astype(np.int64) & 0xFFFF)


async def table(setting: Setting, rollouts: int, projections: int) -> None:
    """Print the table for honest pairs in float32 and in bfloat16, which compute attention in two ways."""
    dtypes: tuple[DType, ...] = ("float32", "bfloat16")
    for dtype in dtypes:
        states = await measure_states(setting, dtype, rollouts)
        explained_variances = [
            1
            - float(
                (guess - states.expected_states).square().sum()
                / (states.expected_states - states.expected_states.mean(0)).square().sum()
            )
            for guess in (states.ridge, states.network)
        ]
        print(
            f"{dtype}: {len(states.expected_states)} positions; "
            f"the ridge regression explains {explained_variances[0]:.3f} of the variance, "
            f"the network {explained_variances[1]:.3f}"
        )
        print_project_sketch("projection", states, projections)
        print_project_sketch("topk", states, projections)
        print_bucketed_rule(states, _WINDOWS)
        print_toploc(states)
        print(flush=True)
