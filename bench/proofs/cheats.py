"""Table (j): what miners gain that have the right policy and decide its near ties, or edit its tokens.

The first lines of a profile are simulated by its row, over 100 windows of 16 groups of 8 rollouts
(tests/support/adversaries/careful_cheats.py). A cell has the gain of a *careful* miner, which knows its evidence and
decides only what neither refuses it nor has a price, then that of one that decides whatever it can, with its first
refused window. Pay is the balance for each generated token, as a multiple of honest work's; luck is the mean reward
beyond honest work's that is trained on. The last lines are of a real engine, whose groups are windows of their own for
a validator; the rewards of its honest groups are those of the validator's continuations.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import compress

import numpy as np
import torch

from bench.proofs.power import early_ends, lucky_ties
from bench.proofs.profiles import Profile, select
from bench.proofs.setting import GROUP_SIZE, Setting
from bench.proofs.sides import Pair
from grailnode.calibration.pairs import GroupMeasurement, generate_groups
from grailnode.run.creation import SCORING
from protocol.judging.evidence import NO_EVIDENCE, Counts, advance, count_luck, exceeded
from protocol.proof import RATE_UNIT, Thresholds
from roles.ports import Engine
from tests.support.adversaries.careful_cheats import Cheat, choose_lengths, choose_luck, edit_tokens, gain, take_stops
from tests.support.adversaries.decisive_tokens import TieEngine
from tests.support.adversaries.harness import alter

_REACHES = (0.5, 0.1, 0.02, 0.005)
_STOP_TOKENS = (59, 370, 1000, 4000)
_FORESEEN = 0.1  # standard deviation of what a miner foresees of the tokens that follow, as a share of them
_LUCK_TOKENS = (59, 512, 1024, 2048)
_WINDOW_TOKENS, _EDITED = 6000, (10, 1)
_TRIES = 100
_NEAR = 0.1  # the density of near ties is measured up to here
_COINS = tuple(tuple(float(number >> place & 1) for place in range(GROUP_SIZE)) for number in range(1 << GROUP_SIZE))
"""The rewards of all groups whose rollouts are right or wrong with equal probability: the best case of luck."""


@dataclass
class HonestEngine(TieEngine):
    """Takes the best token.

    Attributes:
        gaps: by how much the second-best one fell short.
    """

    gaps: list[float] = field(default_factory=list, init=False)

    def choose(self, prompt: tuple[int, ...], seed: bytes, completion: list[int], scores: torch.Tensor) -> int:
        best = scores.topk(2)
        self.gaps.append(float(best.values[0] - best.values[1]))
        return int(best.indices[0])


async def table(setting: Setting, groups: int, only: str) -> None:
    """Print the table for the profiles of this machine's kernels whose names contain `only`.

    Args:
        groups: that a real engine generates for each cheat.
    """
    for profile in (profile for profile in select(only) if profile.errors is None):
        row, gaps = await profile.thresholds(setting), await _gaps(setting, profile, groups)
        density = float(np.mean(np.array(gaps) <= _NEAR)) / _NEAR
        honest = await _real(setting, profile, groups)
        print(
            f"{profile.name}: rates of stops {row.stop.rates[0] / RATE_UNIT:.2g}, of margins "
            f"{row.margin.rates[0] / RATE_UNIT:.2g}; {density:.2g} near ties of a token for each unit"
        )
        rewards = [[reward / 1e6 for reward in group.rewards] for group in honest["honest"]]
        simulate(alter(row, miner="torch-float32", validator="torch-float32"), density, rewards, gaps)
        _print_real(honest, row)


def simulate(row: Thresholds, density: float, rewards: Sequence[Sequence[float]], gaps: Sequence[float]) -> None:
    """Print the simulated lines.

    Args:
        row: of float32, by name.
        density: near ties of a token for each unit of their margin.
        rewards: of honest groups.
        gaps: by how much second-best tokens fall short.
    """
    print(f"  {'':20} {'tokens':>6}" + "".join(f"{f'reach {reach}':>27}" for reach in _REACHES))
    for tokens in _STOP_TOKENS:
        _print_line("stops taken: pay", tokens, [take_stops(tokens, reach) for reach in _REACHES], row)
        shorter = [choose_lengths(tokens, reach, density, _FORESEEN) for reach in _REACHES]
        _print_line("lengths chosen: pay", tokens, shorter, row)
    for tokens in _LUCK_TOKENS:
        for name, known in (("coins", _COINS), ("stories", rewards)):
            chosen = [choose_luck(tokens, reach, density, known) for reach in _REACHES]
            _print_line(f"luck, {name}: reward", tokens, chosen, row)
    for edited in _EDITED:
        cheat = edit_tokens(_WINDOW_TOKENS, edited, gaps)
        tries = [gain(cheat, row, SCORING, careful=False, windows=4, seed=seed).refused for seed in range(_TRIES)]
        shares = (f"{sum((refused or 9) <= window for refused in tries)} by window {window}" for window in (1, 2, 4))
        print(f"  {edited} of {_WINDOW_TOKENS} tokens edited in each window: of {_TRIES}, refused {', '.join(shares)}")


def _print_line(name: str, tokens: int, cheats: Sequence[Cheat], row: Thresholds) -> None:
    is_pay, cells = name.endswith("pay"), []
    for cheat in cheats:
        results = [gain(cheat, row, SCORING, careful=careful) for careful in (True, False)]
        values = " ".join(f"{result.pay if is_pay else result.reward:.4f}" for result in results)
        cells.append(f"{values} {results[-1].refused or '-':>3}")
    print(f"  {name:20} {tokens:6}" + "".join(f"{cell:>27}" for cell in cells), flush=True)


async def _gaps(setting: Setting, profile: Profile, groups: int) -> list[float]:
    """Return by how much the second-best token falls short, at all positions of some groups."""
    weights = {name: tensor.to(getattr(torch, profile.dtype)) for name, tensor in setting.weights.items()}
    miner = HonestEngine(setting.model(), weights)
    engine: Engine = miner  # type: ignore[assignment]  # only `generate` is called
    async for _ in generate_groups(setting.task(setting.test_seed), engine, groups):
        pass
    return miner.gaps


async def _real(setting: Setting, profile: Profile, groups: int) -> dict[str, list[GroupMeasurement]]:
    """Return what a validator measures of an honest miner and of both cheats, on the same tasks."""
    sides = {"honest": profile.plain}
    for reach in _REACHES:
        sides[f"ends within {reach}"] = replace(profile.plain, decide=partial(early_ends, reach))
        sides[f"luck within {reach}"] = replace(profile.plain, decide=partial(lucky_ties, reach))
    pairs = {name: Pair(side, profile.plain) for name, side in sides.items()}
    return await setting.measure(profile.name, pairs, dict.fromkeys(pairs, groups), setting.test_seed)


def _print_real(measured: dict[str, list[GroupMeasurement]], row: Thresholds) -> None:
    tokens = {name: sum(sum(group.lengths) for group in groups) for name, groups in measured.items()}
    rewards = {name: float(np.mean([group.rewards for group in groups])) / 1e6 for name, groups in measured.items()}
    for name, groups in measured.items():
        evidence, refusal = NO_EVIDENCE, "not refused"
        for number, (group, honest) in enumerate(zip(groups, measured["honest"], strict=True), 1):
            missed = np.maximum.reduceat(group.margins, np.cumsum([0, *group.lengths[:-1]])) > 0
            luck = count_luck(compress(zip(group.rewards, honest.rewards, strict=True), missed))
            evidence = advance(evidence, group.counts(row) + Counts(luck=luck), row)
            if statistic := exceeded(evidence, row):
                refusal = f"refused at group {number} for its {statistic}"
                break
        print(f"  real, {name:18} {tokens[name]} tokens, reward {rewards[name] - rewards['honest']:+.4f}, {refusal}")
