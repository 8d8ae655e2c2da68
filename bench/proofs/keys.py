"""Table (g): how many windows of one group an adversary gets accepted before its history refuses it, with each new key.

The policy is the packaged one; a window has one group of 8 rollouts of about 3 tokens, and therefore shows little. This
is the worst case. The table is printed for nodes that compute in float32, and for nodes in bfloat16. A key earns
nothing before its score exceeds the deposit, so an adversary that is refused earlier has worked for nothing, and so has
its next key.
"""

from collections import Counter

import numpy as np

from bench.proofs.power import describe
from bench.proofs.setting import SCORING
from protocol.judging.ledger import GROUP
from roles.miner.produce import Producer
from tests.support.adversaries.harness import TrialHarness, key
from tests.support.adversaries.key_histories import careless_producers, packaged_policy_harness
from tests.support.adversaries.miners import ADVERSARIES
from tests.support.builders.proofs import BFLOAT16, FLOAT32, packaged_thresholds

HONEST_WINDOWS = 400


async def table(keys: int) -> None:
    """Print the table.

    Args:
        keys: how many keys each adversary uses, one after another.
    """
    print(f"deposit: {SCORING.deposit / GROUP:g} groups; windows of one group")
    for profile, arithmetics in (("float32", FLOAT32), ("bfloat16", BFLOAT16)):
        print(f"{profile}: {describe(packaged_thresholds(*arithmetics))}")
        await _rows(packaged_policy_harness(arithmetics), keys)


async def _rows(harness: TrialHarness, keys: int) -> None:
    copies = {name: ADVERSARIES[name].producer(harness) for name in ("8-bit weights", "4-bit weights", "3-bit weights")}
    producers = copies | careless_producers(harness)
    honest = producers.pop("honest")
    print(f"{'miner':20} {'keys':>4}  {'accepted before: median':>23} {'most':>5}  reasons")
    for name, producer in producers.items():
        await _row(harness, name, producer, keys, 2 * SCORING.deposit // GROUP)
    await _row(harness, "honest", honest, max(1, keys // 8), HONEST_WINDOWS)


async def _row(harness: TrialHarness, name: str, producer: Producer, keys: int, max_windows: int) -> None:
    accepted_windows, reasons = [], Counter[str]()
    for number in range(keys):
        harness.miner = key(f"{name} {number}")
        windows, reasons_of_key = await harness.windows_until_refusal(producer, max_windows)
        accepted_windows.append(windows)
        reasons.update(reasons_of_key.keys())
    reasons_text = ", ".join(f"{reason} {count}" for reason, count in reasons.most_common())
    reasons_text = reasons_text or f"not refused in {max_windows} windows"
    median = np.median(accepted_windows)
    print(f"{name:20} {keys:4}  {median:23.0f} {max(accepted_windows):5}  {reasons_text}", flush=True)
