"""Table (f): how many tiny windows a cheat gets accepted before its history refuses it, against what its key must be
worth to earn.

The packaged policy, one group of 8 rollouts of about 3 tokens a window, so that a window alone shows little: the worst
case. By its own thresholds, and by those for nodes of which some compute in bfloat16. A key earns nothing before it is
worth the deposit, so a cheat that is refused earlier has worked for nothing, and so has the next key.
"""

import random
from collections import Counter
from collections.abc import Sequence

import numpy as np

from bench.proofs.honest import describe
from grailnode.calibration import proof_file
from grailnode.calibration.copies import quantized
from grailnode.calibration.pairs import CalibrationTask, measure_pair
from grailnode.calibration.thresholds import ThresholdDemands, choose_thresholds
from grailnode.calibration.variants import Variant, cross_pairs
from grailnode.engine.policy import PACKAGED_POLICY, Policy, load_weights
from grailnode.run.creation import SCORING
from protocol import environments
from protocol.rollout.batch import Group
from protocol.rollout.sampling import SamplingParams
from protocol.run import ProofSpec
from roles.miner.produce import MiningWindow, Producer
from tests.support.adversaries.harness import Field, Past, key
from tests.support.adversaries.miners import ANIMALS
from tests.support.adversaries.miners.registry import chance
from tests.support.adversaries.miners.tokens import edited

MAX_TOKENS = 8
HONEST_WINDOWS = 400
_OFF = 0.05  # of the tokens


class Careless:
    """Honest work, but one token in twenty is the runner-up, and what follows follows from it."""

    def __init__(self, field: Field) -> None:
        self._field = field

    async def produce(self, mining_window: MiningWindow, indices: Sequence[int]) -> list[Group]:
        """What it delivers."""
        tokens = sum(
            len(item.tokens) for group in await self._field.honest(mining_window, indices) for item in group.rollouts
        )
        count = _binomial(chance(mining_window), tokens)
        return await edited(self._field, mining_window, indices, min(count, self._field.group_size * len(indices)))


def _binomial(dice: random.Random, trials: int) -> int:
    return sum(dice.random() < _OFF for _ in range(trials))


class Honest:
    """Honest work."""

    def __init__(self, field: Field) -> None:
        self._field = field

    async def produce(self, mining_window: MiningWindow, indices: Sequence[int]) -> list[Group]:
        """What it delivers."""
        return await self._field.honest(mining_window, indices)


async def mixed(groups: int = 256) -> ProofSpec:
    """Thresholds that let bfloat16 pass: calibrated here, on few groups of each pair."""
    policy, weights = Policy.load(PACKAGED_POLICY), load_weights(PACKAGED_POLICY)
    params = SamplingParams(1.0, MAX_TOKENS, policy.eos)
    work = CalibrationTask(policy, params, 8, lambda seed: environments.get("addition").problem(seed).prompt)
    pairs = {pair.name: pair for pair in cross_pairs(Variant()) if pair.name.startswith("bfloat16")}
    honest = {name: [seen async for seen in measure_pair(work, pair, weights, groups)] for name, pair in pairs.items()}
    copy, pair = quantized(weights, 4), pairs["bfloat16-generated"]
    seen = [found async for found in measure_pair(work, pair, weights, groups // 4, copy=copy)]
    return choose_thresholds(honest, [seen], "projection", ThresholdDemands())


def packaged(proof: ProofSpec) -> Field:
    """A run on the packaged policy, windows of one group."""
    policy, weights = Policy.load(PACKAGED_POLICY), load_weights(PACKAGED_POLICY)
    return Field(Past(policy, 0, lambda _: weights), environments.get("addition"), proof, MAX_TOKENS, groups=1)


async def table(keys: int) -> None:
    """Print it.

    Args:
        keys: that each cheat tries, one after another.
    """
    print(f"deposit: {SCORING.deposit:g} groups; windows of one group")
    own = proof_file.read(PACKAGED_POLICY / proof_file.NAME).thresholds
    for profile, proof in (("float32", own), ("mixed", await mixed())):
        print(f"{profile}: {describe(proof)}")
        await _rows(packaged(proof), keys)


async def _rows(field: Field, keys: int) -> None:
    copies = {name: ANIMALS[name].at(field) for name in ("8-bit weights", "4-bit weights", "3-bit weights")}
    cheats: dict[str, Producer] = {**copies, "one token in twenty": Careless(field)}
    print(f"{'cheat':20} {'keys':>4}  {'accepted before: median':>23} {'most':>5}  reasons")
    for name, cheat in cheats.items():
        await _row(field, name, cheat, keys, round(2 * SCORING.deposit))
    await _row(field, "honest", Honest(field), max(1, keys // 8), HONEST_WINDOWS)


async def _row(field: Field, name: str, producer: Producer, keys: int, most: int) -> None:
    accepted, reasons = [], Counter[str]()
    for number in range(keys):
        field.miner = key(f"{name} {number}")
        windows, said = await field.windows_until_refused(producer, most)
        accepted.append(windows)
        reasons.update(said.keys())
    told = ", ".join(f"{reason} {count}" for reason, count in reasons.most_common()) or f"not refused in {most} windows"
    print(f"{name:20} {keys:4}  {np.median(accepted):23.0f} {max(accepted):5}  {told}", flush=True)
