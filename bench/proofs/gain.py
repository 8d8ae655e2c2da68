"""Table (h): what a planned cheat gains at every rate, in shares of an honest miner's balance; negative is a loss."""

from statistics import fmean

from grailnode.run.creation import SCORING
from tests.support.adversaries.harness import alter
from tests.support.adversaries.planned_cheats import PLANS, gain
from tests.support.builders.proofs import BFLOAT16, FLOAT32, packaged_thresholds

_RATES = (0.002, 0.01, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 1.0)


def table() -> None:
    """Print the table."""
    for name, arithmetics in (("float32", FLOAT32), ("bfloat16", BFLOAT16)):
        row = packaged_thresholds(*arithmetics)
        proof = alter(row, miner="torch-float32", validator="torch-float32")  # as the planned cheats' ledgers say
        print(f"{name}: margin rate {proof.margin_rate:.2g}, a miss beyond it costs {SCORING.miss_price:g} groups")
        print(f"{'share of the windows with a cheat':52}" + "".join(f"{rate:9.1%}" for rate in _RATES))
        for plan in PLANS:
            gains = [fmean(gain(plan, rate, SCORING, proof, 1.0, seed) for seed in range(8)) for rate in _RATES]
            print(f"{plan.name:52}" + "".join(f"{value:+9.3f}" for value in gains), flush=True)
