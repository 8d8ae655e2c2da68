"""Table (c): after how many tokens a changed policy is refused, and by what.

A line has the share of the cheat's tokens that miss the draw, its mean reward, and the tokens until its miner is
refused, as medians over 50 random orders of its groups: with the sketches of its own computation and with *right* ones,
as by one prefill with the right policy, where its tokens alone can show it; each by the profile's row, by one with a
headroom of 1, for nodes of one kind, and by the row that is shipped with the packaged policy. The last columns have the
same by one statistic of the profile's row alone, the others with right sketches. A dash means that the miner is not
refused within all its groups.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch

from bench.proofs.profiles import Profile, select
from bench.proofs.rounding import Int8CacheQwen3, to_fp8
from bench.proofs.runs_of_evidence import Additions
from bench.proofs.setting import Setting
from bench.proofs.sides import Pair, Side
from bench.proofs.trading_task import TradingTask
from grailnode.calibration.pairs import GroupMeasurement
from grailnode.calibration.procedure import quantized
from grailnode.engine.policy import Policy
from grailnode.engine.qwen3 import Qwen3Config
from protocol.digest import Weights
from protocol.proof import DECADE, MEASURED, RATE_UNIT, Thresholds
from protocol.rollout.filters import Filters
from protocol.rollout.sampling import NOISE_UNIT
from roles.policy.causal_model import CausalModel
from tests.support.adversaries.decisive_tokens import DecisiveEngine, LuckyEngine, TieEngine, Tokens, stop_taker
from tests.support.builders.proofs import packaged_thresholds

_HEADINGS = ("own", "headroom 1", "shipped", "right", "headroom 1", "shipped", *MEASURED)


def perturbed(weights: Weights, share: float, seed: int = 0) -> dict[str, torch.Tensor]:
    """Return weights of which each one is off by a normally distributed share of itself."""
    noise = torch.Generator().manual_seed(seed)
    return {
        name: (tensor * (1.0 + share * torch.randn(tensor.shape, generator=noise))).to(tensor.dtype)
        for name, tensor in weights.items()
    }


def cheats(setting: Setting, plain: Side) -> Iterator[tuple[str, Side]]:
    """Yield how cheats generate, with their names; `plain` is the honest way."""
    config = Qwen3Config.of(setting.policy.config)
    assert config is not None
    for bits in (8, 6, 4):
        yield f"{bits}-bit weights", replace(plain, weights=partial(quantized, bits=bits))
    yield "fp8 weights", replace(plain, weights=to_fp8)
    yield "int8 key-value cache", replace(plain, model=lambda _: Int8CacheQwen3(config))
    for temperature in (0.9, 0.97):
        yield f"temperature {temperature:g}", replace(plain, temperature=temperature)
    yield "top-1024", replace(plain, filters=Filters(top_k=1024))
    for age in (1, 8, 50):
        older = setting.version(setting.newest - age)
        yield f"{age} versions old", replace(plain, weights=lambda _, older=older: older)  # type: ignore[misc]
    for share in (0.0003, 0.003):
        yield f"weights off by {share:.2%}", replace(plain, weights=partial(perturbed, share=share))
    for reach in (0.3, 0.1):
        yield f"accounts decided within {reach:g}", replace(plain, decide=partial(_right_accounts, reach))
    yield "ends taken within 0.1", replace(plain, decide=partial(early_ends, 0.1))


def _right_accounts(reach: float, policy: Policy, model: CausalModel, weights: Weights) -> TieEngine:
    """Return a miner that writes the right account where it falls short of the drawn one by little."""
    text, task = policy.tokenizer, TradingTask()

    def wish(prompt: Tokens, completion: Tokens) -> int | None:
        number = task.due_account(task.problem_of(text.decode(prompt)), text.decode(completion))
        return None if number is None else text.encode(str(number))[0]

    return DecisiveEngine(model, weights, wish, reach)


def early_ends(reach: float, policy: Policy, model: CausalModel, weights: Weights) -> TieEngine:
    """Return a miner that ends wherever the end falls short by little."""
    return stop_taker(model, weights, policy.stops[0], reach)


def lucky_ties(reach: float, policy: Policy, model: CausalModel, weights: Weights) -> TieEngine:
    """Return a miner that decides one near tie of a rollout otherwise if that has a higher reward."""
    text, task = policy.tokenizer, TradingTask()

    def reward(prompt: Tokens, completion: Tokens) -> float:
        return task.reward(task.problem_of(text.decode(prompt)), text.decode(completion))

    return LuckyEngine(model, weights, reward, reach)


async def table(setting: Setting, groups: int, only: str) -> None:
    """Print the table for the profiles whose names contain `only`.

    Args:
        groups: groups of each cheat.
    """
    for profile in select(only):
        await _rows(setting, profile, groups)


async def _rows(setting: Setting, profile: Profile, groups: int) -> None:
    shipped = packaged_thresholds(*profile.arithmetics)
    rows = await profile.thresholds(setting), await profile.thresholds(setting, 1.0), shipped
    print(f"{profile.name}: {describe(rows[0])}")
    print(f"{'cheat':28}{'misses':>8} {'reward':>7}" + "".join(f"{heading:>11}" for heading in _HEADINGS))
    for name, side in (("none", profile.plain), *cheats(setting, profile.plain)):
        pair = Pair(side, profile.plain)
        measured = (await setting.measure(profile.name, {name: pair}, {name: groups}, setting.test_seed))[name]
        misses = np.concatenate([group.margins for group in measured]) > 0
        reward = np.mean([group.rewards for group in measured]) / 1e6
        cells = "".join(f"{cell:>11}" for cell in _cells(measured, rows))
        print(f"{name:28}{misses.mean():8.5f} {reward:7.3f}{cells}", flush=True)


def _cells(measured: Sequence[GroupMeasurement], rows: Sequence[Thresholds]) -> Iterator[str]:
    right = [replace(group, distances=np.zeros_like(group.distances)) for group in measured]
    additions = [Additions.of(groups, row) for groups in (measured, right) for row in rows]
    tokens = [item.tokens_until_refused() for item in additions]
    tokens += [additions[0].tokens_until_refused([name]) for name in MEASURED]
    return ("-" if count is None else f"{count:.0f}" for count in tokens)


def describe(row: Thresholds) -> str:
    """Return lines with the threshold and the tables of a row."""
    lines = [f"from {row.positions} positions, threshold {row.threshold / DECADE:.2f} decades"]
    for name in MEASURED:
        table, unit = row.table(name), 1 if name == "sketch" else NOISE_UNIT
        steps = zip(table.beyond, table.rates, strict=True)
        text = ", ".join(f"{step * unit:.3g}: {rate / RATE_UNIT:.1e}" for step, rate in steps)
        lines.append(f"  {name:7}{len(table.alternatives):2} alternatives; steps and rates {text}")
    return "\n".join(lines)
