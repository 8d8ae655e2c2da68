"""Table (i): what a planned cheat gains at every rate, and what miners gain by the keys under which they work.

Gains of cheats are in shares of an honest miner's balance; negative ones are losses. Incomes are those of a group,
compared with the income of a group of an ordinary miner with 4 groups in a window and one key.
"""

from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean

from bench.proofs.setting import SCORING
from protocol.judging.accounts import Accounts
from protocol.judging.ledger import GROUP, Summary
from protocol.proof import RATE_UNIT
from tests.support.adversaries.harness import alter, key
from tests.support.adversaries.planned_cheats import PLANS, gain
from tests.support.builders.proofs import BFLOAT16, FLOAT32, packaged_thresholds, proof_of
from tests.support.builders.samples import counts, row

_RATES = (0.002, 0.01, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 1.0)
_ORDINARY = 4  # groups of an ordinary miner in a window
_PROOF = proof_of(packaged_thresholds())
_HONEST = counts(margin=(1,))

Deliveries = Mapping[str, int]
"""The groups of each key in one window."""


def table() -> None:
    """Print the tables."""
    for name, arithmetics in (("float32", FLOAT32), ("bfloat16", BFLOAT16)):
        proof = alter(packaged_thresholds(*arithmetics), miner="torch-float32", validator="torch-float32")
        rate, price = proof.margin.rates[0] / RATE_UNIT, SCORING.miss_price / GROUP
        print(f"{name}: {rate:.2g} of the tokens may miss, and a miss beyond it costs {price:g} groups")
        print(f"{'share of the windows with a cheat':52}" + "".join(f"{rate:9.1%}" for rate in _RATES))
        for plan in PLANS:
            gains = [fmean(gain(plan, rate, SCORING, proof, 1.0, seed) for seed in range(8)) for rate in _RATES]
            print(f"{plan.name:52}" + "".join(f"{value:+9.3f}" for value in gains), flush=True)
    print(f"income of a group, with a deposit of {SCORING.deposit / GROUP:g} groups")
    for name, windows in _ways():
        print(f"{name:62}{_income(windows):7.3f}", flush=True)


def _ways() -> Iterator[tuple[str, list[Deliveries]]]:
    """Yield ways to work, with the groups of their keys in each window."""
    windows = range(2 * SCORING.windows)
    yield "two miners under one key beside ten", [{"one": 2 * _ORDINARY} for _ in windows]
    yield "one with 16 groups beside ten", [{"one": 16} for _ in windows]
    for groups in (_ORDINARY, 16):
        yield f"ten keys, one after another, of a miner with {groups} groups", [{f"{w % 10}": groups} for w in windows]
    for length in (100, 50, 25):
        yield f"a new key every {length} windows", [{f"{window // length}": _ORDINARY} for window in windows]


def _income(windows: Sequence[Deliveries]) -> float:
    """Return the income of a group beside ten ordinary miners, over the last `SCORING.windows` windows."""
    ordinary = {f"ordinary {number}": _ORDINARY for number in range(10)}
    ledger = [_summary(window, {**ordinary, **groups}) for window, groups in enumerate(windows)]
    others, incomes, delivered = {key(name).public for name in ordinary}, [0, 0], [0, 0]
    for end in range(len(ledger) - SCORING.windows, len(ledger)):
        for miner, share in Accounts.of(ledger[end - SCORING.windows + 1 : end + 1], SCORING, _PROOF).scores():
            incomes[miner in others] += share
        delivered[False] += sum(windows[end].values())
        delivered[True] += sum(ordinary.values())
    return incomes[False] / delivered[False] / (incomes[True] / delivered[True])


def _summary(window: int, groups: Deliveries) -> Summary:
    rows = tuple(
        row(key(name), **dict.fromkeys(("pledged", "submitted", "dealt", "audited", "accepted"), count), counts=_HONEST)
        for name, count in groups.items()
    )
    return Summary.model_construct(
        window=window, arithmetic="torch-float32", roster=(bytes(32),), judges=1, rows=rows, amendments=()
    )
