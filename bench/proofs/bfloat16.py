"""Table (i): cheats where miner and validator both compute in bfloat16, and where they round as GPUs do.

Each profile has a row of thresholds of its own, measured on its honest pairs. A cheat is judged twice: with the
sketches of its own computation, and as if it had sketched by one prefill with the right policy (*right sketches*),
where its tokens alone can show it; in the latter case also by a row with a headroom of 1, which allows no more than the
measured pairs need. The table has the tokens until a miner is refused if its groups are one window that grows, and if
each is a window of its own (*history*), as medians over shuffled orders. Last comes a miner with the right policy that
writes the right number where it falls short of the drawn one by little.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import torch

from bench.proofs.honest import refusals
from bench.proofs.profiles import PROFILES, Profile
from bench.proofs.roc import format_count, tokens_until_refusal
from bench.proofs.rounding import Int8CacheQwen3, to_fp8
from bench.proofs.setting import TEST_SEED, Setting
from bench.proofs.sides import Pair, Side
from bench.proofs.trading_task import TradingTask
from grailnode.calibration.copies import quantized
from grailnode.calibration.pairs import GroupMeasurement
from grailnode.engine.qwen3 import Qwen3Config
from protocol.environments import Problem
from protocol.proof import Step, Thresholds
from tests.support.adversaries.decisive_tokens import DecisiveEngine, Tokens
from tests.support.measuring.pair_measurements import measure

_ORDERS: Final = 20
_REACHES: Final = (0.0, 0.03, 0.1, 0.3, 1.0)
"""How close a miner's choice has to be to the right token; 0: it decides nothing."""


@dataclass(frozen=True)
class Cheats:
    """The cheats of a profile."""

    setting: Setting
    profile: Profile

    def sides(self) -> Iterator[tuple[str, Side]]:
        """Yield how cheats generate, with their names."""
        plain, setting = self.profile.plain, self.setting
        config = Qwen3Config.of(setting.policy.config)
        assert config is not None
        for bits in (4, 6, 8):
            yield f"{bits}-bit weights", replace(plain, weights=lambda weights, bits=bits: quantized(weights, bits))  # type: ignore[misc]
        yield "fp8 weights", replace(plain, weights=to_fp8)
        yield "int8 key-value cache", replace(plain, model=lambda _: Int8CacheQwen3(config))
        yield "temperature 0.9", replace(plain, temperature=0.9)
        for age in (1, 8, 50):
            older = setting.version(setting.newest - age)
            yield f"{age} versions old", replace(plain, weights=lambda _, older=older: older)  # type: ignore[misc]

    async def measure(self, groups: int) -> dict[str, list[GroupMeasurement]]:
        """Return measurements of so many groups of each cheat."""
        pairs = {name: Pair(side, self.profile.plain) for name, side in self.sides()}
        return await self.setting.measure(self.profile.name, pairs, dict.fromkeys(pairs, groups), TEST_SEED)

    async def decide(self, reach: float, groups: int) -> tuple[list[GroupMeasurement], float, float]:
        """Return measurements of a miner that decides accounts its way, its mean reward, and the share of its tokens
        that it decides.
        """
        problems = _Problems(self.setting)
        weights = {name: tensor.to(torch.bfloat16) for name, tensor in self.setting.weights.items()}
        miner = DecisiveEngine(self.setting.model(), weights, problems.due_number, reach)
        generating: Any = miner  # calls nothing but `generate`
        check = await self.profile.plain.serve(self.setting.policy, self.setting.weights, 1)
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


async def table(setting: Setting, groups: int, only: str) -> None:
    """Print the table for the profiles in bfloat16 whose names contain `only`.

    Args:
        groups: groups of each cheat, and twice as many of each honest pair.
    """
    for profile in [profile for profile in PROFILES if profile.dtype == "bfloat16" and only in profile.name]:
        row, narrow = await profile.thresholds(setting), await profile.thresholds(setting, 1.0)
        print(f"{profile.name}, from {row.positions} positions")
        print(f"  margin steps  {describe(row.margin_steps)}; none beyond {row.margin_limit:.3g}")
        print(f"  sketch steps  {describe(row.sketch_steps)}")
        pairs = profile.pairs(setting)
        counts = {name: min(count, 2 * groups) for name, count in profile.group_counts(pairs).items()}
        for name, measured in (await setting.measure(profile.name, pairs, counts, TEST_SEED)).items():
            _print_honest(name, measured, (row, narrow))
        for other in (other for other in PROFILES if other.errors not in {profile.errors, None}):
            same = {"same": other.pairs(setting)["same"]}
            measured = (await setting.measure(other.name, same, {"same": 2 * groups}, TEST_SEED))["same"]
            _print_honest(f"same of {other.name}", measured, (row, narrow))
        headings = ("own sketches", "history", "right sketches", "history", "headroom 1", "history")
        print(f"  {'cheat':24} {'margins':>9}{_columns(headings)}")
        cheats = Cheats(setting, profile)
        for name, measured in (await cheats.measure(groups)).items():
            _print_row(name, measured, row, narrow)
        if profile.errors is None:
            await _print_decisions(cheats, row, groups // 2)


def _print_honest(label: str, measured: Sequence[GroupMeasurement], rows: Sequence[Thresholds]) -> None:
    tokens = sum(len(group.margins) for group in measured)
    refused = ", with headroom 1 ".join(str(refusals(list(measured), row)) for row in rows)
    print(f"  honest, {label}: {tokens} tokens, refused groups, windows, histories: {refused}")


async def _print_decisions(cheats: Cheats, row: Thresholds, groups: int) -> None:
    print(f"  {'accounts decided within':24} {'reward':>9}  {'decided':>8} {'margins':>8} {'tokens':>7} {'history':>7}")
    for reach in _REACHES:
        measured, reward, decided = await cheats.decide(reach, groups)
        share = (np.concatenate([group.margins for group in measured]) > 0).mean()
        tokens, history = (
            format_count(tokens_until_refusal(measured, row, separate_windows=separate, orders=_ORDERS))
            for separate in (False, True)
        )
        print(f"  {reach:24g} {reward:9.3f}  {decided:8.5f} {share:8.5f} {tokens:>7} {history:>7}", flush=True)


def describe(steps: Sequence[Step]) -> str:
    """Return steps in a line: beyond, honest rate and points of each."""
    return ", ".join(f"{step.beyond:.3g}: {step.rate:.1e} ({step.points})" for step in steps)


def _print_row(label: str, measured: list[GroupMeasurement], row: Thresholds, narrow: Thresholds) -> None:
    margins = np.concatenate([group.margins for group in measured])
    right = [replace(group, distances=np.zeros_like(group.distances)) for group in measured]
    columns = [
        format_count(tokens_until_refusal(groups, thresholds, separate_windows=separate, orders=_ORDERS))
        for groups, thresholds in ((measured, row), (right, row), (right, narrow))
        for separate in (False, True)
    ]
    print(f"  {label:24} {(margins > 0).mean():9.5f}{_columns(columns)}", flush=True)


def _columns(texts: Sequence[str]) -> str:
    """Return texts in columns."""
    return "".join(f"  {text:>14}" for text in texts)
