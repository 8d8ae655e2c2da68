"""Table (k): how far a miner with any number of keys can shift what is trained on by withholding windows.

What earns nothing is not trained on, and each withheld group costs its key `shortfall` groups. So a key may withhold
only a part of its windows. The shift is that of the mean of the groups that are shown, in standard deviations of a
group.
"""

from bench.proofs.setting import SCORING
from protocol.judging.ledger import GROUP, SHARE
from tests.support.adversaries.planned_cheats import bias, free_bias, largest_share, worth
from tests.support.builders.proofs import packaged_thresholds, proof_of

_GROUPS = (1, 2, 4, 16, 64)
_PRICES = (1, 2, 4)
_SHARES = (0.05, 0.1, 0.2, 0.3, 0.4)
_KEYS = (2, 16, 1000)


def table() -> None:
    """Print the table."""
    proof = proof_of(packaged_thresholds())
    free = ", ".join(f"{free_bias(keys):.2f} with {keys} keys" for keys in _KEYS)
    print(f"if keys that earn nothing were trained on, windows of one group: {free}")
    print(f"deposit {SCORING.deposit / GROUP:g} groups, {SCORING.windows} windows, decay {SCORING.decay / SHARE:.4f}")
    print(f"{'groups of a window':30}" + "".join(f"{groups:9}" for groups in _GROUPS))
    for price in _PRICES:
        scoring = SCORING.model_copy(update={"shortfall": price * GROUP})
        limits = [largest_share(groups, scoring, proof) for groups in _GROUPS]
        print(f"{f'shortfall {price}: withheld at most':30}" + "".join(f"{limit:9.1%}" for limit in limits))
        shifts = [bias(limit, groups) for limit, groups in zip(limits, _GROUPS, strict=True)]
        print(f"{'  shift at that share':30}" + "".join(f"{shift:9.2f}" for shift in shifts))
    print("with the default shortfall: income of a key, and shift")
    for share in _SHARES:
        cells = [(worth(share, groups, SCORING, proof), bias(share, groups)) for groups in _GROUPS]
        row = [f"{key.income:.2f} {shift:.2f}" if key.used else "unused" for key, shift in cells]
        print(f"{f'  withheld {share:.0%}':30}" + "".join(f"{cell:>11}" for cell in row), flush=True)
