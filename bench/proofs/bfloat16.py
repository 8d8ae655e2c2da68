"""Table (i): cheats where miner and validator both compute in bfloat16, and where they round as GPUs do.

Each profile has a row of thresholds of its own, measured on its honest pairs. A cheat is judged twice: with the
sketches of its own computation, and as if it had sketched by one prefill with the right policy (*right sketches*),
where its tokens alone can show it; in the latter case also by the misses alone, without points. The table has the
tokens until a miner is refused if its groups are one window that grows, and if each is a window of its own (*history*),
as medians over shuffled orders. Last comes a miner with the right policy that writes the right number where it falls
short of the drawn one by little.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from bench.proofs.honest import refusals
from bench.proofs.roc import format_count, tokens_until_refusal
from bench.proofs.rounding import Inaccurate, Int8CacheQwen3, RoundingErrors, to_fp8
from bench.proofs.setting import CALIBRATION_SEED, TEST_SEED, Setting
from grailnode.calibration.copies import quantized
from grailnode.calibration.padding import Padded
from grailnode.calibration.pairs import GroupMeasurement, measure
from grailnode.calibration.thresholds import ThresholdDemands, choose_thresholds
from grailnode.engine.causal_model import CausalModel
from grailnode.engine.qwen3 import Qwen3, Qwen3Config
from grailnode.engine.torch_engine import DEFAULT_BATCH_TOKENS, TorchEngine
from protocol.environments import Problem
from protocol.proof import Step, Thresholds
from protocol.rollout.sampling import SamplingParams
from roles.ports import Generation, Request
from tests.support.adversaries.decisive_tokens import DecisiveEngine, Tokens
from tests.support.adversaries.harness import inline
from tests.support.adversaries.trading_task import TradingTask
from tests.support.builders.proofs import LENIENT

BF16: Final = "torch-bfloat16", "torch-bfloat16"
PROFILES: Final = {
    "batches and padding": None,
    "attention by the formula": None,
    "errors of 0.02": RoundingErrors(hidden=2.0**-8, logits=0.02),
    "errors of 0.05": RoundingErrors(hidden=2.0**-8, logits=0.05),
}
_ORDERS: Final = 20
_REACHES: Final = (0.0, 0.03, 0.1, 0.3, 1.0)
"""How close a miner's choice has to be to the right token; 0: it decides nothing."""


@dataclass(frozen=True)
class _Side:
    """How a side computes: a change of the model, the weights, the batches and the temperature."""

    model: Callable[[CausalModel], CausalModel] = lambda model: model
    weights: Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]] = lambda weights: weights
    batch_tokens: int = DEFAULT_BATCH_TOKENS
    temperature: float = 1.0


@dataclass
class _OtherTemperature:
    """Generates at another temperature than the run's."""

    engine: TorchEngine
    temperature: float

    async def generate(self, requests: Sequence[Request], params: SamplingParams) -> list[Generation]:
        return await self.engine.generate(requests, replace(params, temperature=self.temperature))


@dataclass(frozen=True)
class Rounded:
    """A profile of the setting: measures and stores its honest pairs and its cheats."""

    setting: Setting
    name: str

    @property
    def errors(self) -> RoundingErrors | None:
        """The errors of both sides."""
        return PROFILES[self.name]

    def config(self) -> Qwen3Config:
        """Return the sizes of the model."""
        config = Qwen3Config.of(self.setting.policy.config)
        assert config is not None
        return config

    def honest_pairs(self) -> Iterator[tuple[str, _Side, _Side]]:
        """Yield the honest pairs: name, generating and checking side."""
        plain = _Side()
        yield "same", plain, plain
        if "batches" in self.name:
            yield "small-batches", _Side(batch_tokens=2048), plain
            yield "padded", plain, _Side(model=lambda model: Padded(model, "left", 16))
        if "formula" in self.name:
            eager = _Side(model=lambda _: Qwen3(self.config(), None, "eager"))
            yield "eager-generated", eager, plain
            yield "eager-checked", plain, eager

    def cheats(self) -> Iterator[tuple[str, _Side]]:
        """Yield the cheats with a name."""
        for bits in (4, 6, 8):
            yield f"{bits}-bit weights", _Side(weights=lambda weights, bits=bits: quantized(weights, bits))  # type: ignore[misc]
        yield "fp8 weights", _Side(weights=to_fp8)
        yield "int8 key-value cache", _Side(model=lambda _: Int8CacheQwen3(self.config()))
        yield "temperature 0.9", _Side(temperature=0.9)
        for age in (1, 8, 50):
            yield (
                f"{age} versions old",
                _Side(
                    weights=lambda _, age=age: self.setting.version(self.setting.newest - age)  # type: ignore[misc]
                ),
            )

    async def engine(self, side: _Side, seed: int) -> TorchEngine:
        """Return an engine that computes as a side; `seed` is of its errors."""
        model = side.model(self.setting.model())
        if self.errors is not None:
            model = Inaccurate(model, self.errors, seed)
        engine = TorchEngine(model, dtype=torch.bfloat16, run_sync=inline, max_batch_tokens=side.batch_tokens)
        await engine.stage(0, side.weights(self.setting.weights))
        await engine.commit()
        return engine

    async def measure(
        self, label: str, generating: _Side, checking: _Side, groups: int, seed: int
    ) -> list[GroupMeasurement]:
        """Return measurements of groups that one side generates and the other one checks."""

        async def part(first: int, count: int) -> list[GroupMeasurement]:
            task = self.setting.task(seed)
            engine: Any = await self.engine(generating, 2 * (seed + 2 * first))
            if generating.temperature != task.params.temperature:
                engine = _OtherTemperature(engine, generating.temperature)
            check = await self.engine(checking, 2 * (seed + 2 * first) + 1)
            return [group async for group in measure(task, engine, check, count, first=first)]

        return await self.setting.stored(f"{self.name}-{label}-{seed}", groups, part)

    async def thresholds(self, groups: int) -> Thresholds:
        """Return the row of the profile, measured on `groups` groups of each pair."""
        honest = {
            name: await self.measure(name, generating, checking, groups, CALIBRATION_SEED)
            for name, generating, checking in self.honest_pairs()
        }
        label, copy = next(self.cheats())
        copies = [await self.measure(label, copy, _Side(), 64, CALIBRATION_SEED)]
        return choose_thresholds(honest, copies, BF16, ThresholdDemands())

    async def decide(self, reach: float, groups: int) -> tuple[list[GroupMeasurement], float, float]:
        """Return measurements of a miner that decides accounts its way, its mean reward, and the share of its tokens
        that it decides.
        """
        problems = _Problems(self.setting)
        weights = {name: tensor.to(torch.bfloat16) for name, tensor in self.setting.weights.items()}
        miner = DecisiveEngine(self.setting.model(), weights, problems.due_number, reach)
        generating: Any = miner  # calls nothing but `generate`
        check = await self.engine(_Side(), 1)
        task = replace(self.setting.task(TEST_SEED), prompt=problems.draw)
        measurements = [group async for group in measure(task, generating, check, groups)]
        rewards = [
            problems.reward(request.prompt, task.params.without_stop(generation.tokens))
            for request, generation in miner.history
        ]
        return measurements, float(np.mean(rewards)), miner.decided / sum(len(group.margins) for group in measurements)


class _Problems:
    """The problems of the groups, by their prompts."""

    def __init__(self, setting: Setting) -> None:
        self._text = setting.policy.tokenizer
        self._problems: dict[str, Problem] = {}

    def draw(self, seed: bytes) -> str:
        """Return the prompt of a group."""
        problem = TradingTask().problem(seed)
        self._problems[self._text.decode(self._text.encode(problem.prompt))] = problem
        return problem.prompt

    def due_number(self, prompt: Tokens, completion: Tokens) -> int | None:
        """Return the token of the right number where an account is due."""
        problem = self._problems[self._text.decode(prompt)]
        number = TradingTask().due_account(problem, self._text.decode(completion))
        return None if number is None else self._text.encode(str(number))[0]

    def reward(self, prompt: Tokens, completion: Tokens) -> float:
        """Return the reward of a completion without its end token."""
        return TradingTask().reward(self._problems[self._text.decode(prompt)], self._text.decode(completion))


async def table(setting: Setting, groups: int, calibration: int, only: str) -> None:
    """Print the table for the profiles whose names contain `only`.

    Args:
        groups: groups of each cheat, and twice as many of each honest pair.
        calibration: groups of each honest pair for the thresholds.
    """
    for name in [name for name in PROFILES if only in name]:
        profile = Rounded(setting, name)
        spec = await profile.thresholds(calibration)
        print(f"{name}, from {spec.positions} positions")
        print(f"  margin steps  {describe(spec.margin_steps)}")
        print(f"  sketch steps  {describe(spec.sketch_steps)}")
        for label, generating, checking in profile.honest_pairs():
            _print_honest(label, await profile.measure(label, generating, checking, 2 * groups, TEST_SEED), spec)
        for other in {PROFILES[other]: other for other in PROFILES if PROFILES[other] != profile.errors}.values():
            measured = await Rounded(setting, other).measure("same", _Side(), _Side(), 2 * groups, TEST_SEED)
            _print_honest(f"same of {other}", measured, spec)
        headings = ("own sketches", "history", "right sketches", "history", "misses alone")
        print(f"  {'cheat':24} {'margins':>9}{_columns(headings)}")
        for label, side in profile.cheats():
            _print_row(label, await profile.measure(label, side, _Side(), groups, TEST_SEED), spec)
        if "batches" in name:
            await _print_decisions(profile, spec, groups // 2)


def _print_honest(label: str, measured: Sequence[GroupMeasurement], spec: Thresholds) -> None:
    tokens = sum(len(group.margins) for group in measured)
    print(f"  honest, {label}: {tokens} tokens, refused groups, windows, histories: {refusals(list(measured), spec)}")


async def _print_decisions(profile: Rounded, spec: Thresholds, groups: int) -> None:
    print(f"  {'accounts decided within':24} {'reward':>9}  {'decided':>8} {'margins':>8} {'tokens':>7} {'history':>7}")
    for reach in _REACHES:
        measured, reward, decided = await profile.decide(reach, groups)
        share = (np.concatenate([group.margins for group in measured]) > 0).mean()
        tokens, history = (
            format_count(tokens_until_refusal(measured, spec, separate_windows=separate, orders=_ORDERS))
            for separate in (False, True)
        )
        print(f"  {reach:24g} {reward:9.3f}  {decided:8.5f} {share:8.5f} {tokens:>7} {history:>7}", flush=True)


def describe(steps: Sequence[Step]) -> str:
    """Return steps in a line: beyond, honest rate and points of each."""
    return ", ".join(f"{step.beyond:.3g}: {step.rate:.1e} ({step.points})" for step in steps)


def _print_row(label: str, measured: list[GroupMeasurement], spec: Thresholds) -> None:
    margins = np.concatenate([group.margins for group in measured])
    right = [replace(group, distances=np.zeros_like(group.distances)) for group in measured]
    misses_alone = spec.model_copy(update={name: LENIENT[name] for name in ("sketch_steps", "margin_steps")})
    columns = [
        format_count(tokens_until_refusal(groups, thresholds, separate_windows=separate, orders=_ORDERS))
        for groups, thresholds, separate in (
            (measured, spec, False),
            (measured, spec, True),
            (right, spec, False),
            (right, spec, True),
            (right, misses_alone, False),
        )
    ]
    print(f"  {label:24} {(margins > 0).mean():9.5f}{_columns(columns)}", flush=True)


def _columns(texts: Sequence[str]) -> str:
    """Return texts in columns."""
    return "".join(f"  {text:>14}" for text in texts)
