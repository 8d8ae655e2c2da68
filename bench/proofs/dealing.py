"""Table (j): what dealing the groups to validators gives and costs.

- Throughput: groups that a trainer gets in a second of simulated time, where the validators' prefills are the
  bottleneck. Whole networks on a virtual clock; every prefill of a group takes a fixed time of it.
- Lies: how many false groups liars among the validators can have accepted, and how many true ones refused. Exact, and
  counted over deals.
- Evidence: after how many windows a cheat that no window shows is refused, by the evidence of its validators.
"""

import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence

import numpy as np

from bench.proofs.runs_of_evidence import cusum
from bench.proofs.timed_network import TimedNetwork
from grailnode.calibration import proof_file
from grailnode.engine.policy import PACKAGED_POLICY
from protocol.encoding import content_digest
from protocol.judging.roster import Roster
from protocol.limits import MAX_KEYS
from protocol.proof import Thresholds
from protocol.rollout.sampling import NOISE_UNIT
from tests.support.builders.recipes import demo_rules
from tests.support.simulation.network_runs import run_nodes
from tests.support.simulation.virtual_clock import simulate

_VALIDATORS = (1, 2, 4, 8)
_QUORUMS = (1, 2)
_MINERS, _MINER_GROUPS = 17, 8
_PREFILL_SECONDS = 0.12  # of a group: a validator judges sixteen in a window of two seconds
_WARM_WINDOWS = 3  # in which prefills take no time, so that all validators get to know the miners
_FIRST_WINDOW, _LAST_WINDOW = 4, 8
_RULES = demo_rules(groups=_MINER_GROUPS, group_size=2, max_tokens=4)

_DEALS = 20_000
_LIARS = ((4, 1), (4, 2), (8, 1), (8, 2), (8, 4), (16, 4))
_PANELS = ((1, 0), (1, 1), (2, 0), (2, 1), (3, 0), (3, 1))

_KEYS = 101
_MISS_RATES = (0.01, 0.003, 0.001)
_MARGIN = 0.1  # of a miss, in logits / temperature
_GROUP_TOKENS, _GROUPS = 64, 16
_MOST_WINDOWS = 200


def throughput(validators: int, quorum: int, spares: int) -> float:
    """Return how many groups a second a trainer gets from a network with more work than its validators can judge."""
    rates: list[float] = []

    async def scenario() -> None:
        network = TimedNetwork(_RULES.changed(spares=spares), validators, quorum)
        async with run_nodes(network, miners=_MINERS):
            await network.until_window(_WARM_WINDOWS)
            network.prefill_seconds = _PREFILL_SECONDS
            await network.until_window(_LAST_WINDOW + 3)
        used = sum(
            event["used"]
            for event in network.events("trainer/download", "collected")
            if _FIRST_WINDOW <= event["window"] < _LAST_WINDOW
        )
        schedule, period = network.run.schedule, network.run.beacon.period_ms / 1000
        rates.append(used / ((_LAST_WINDOW - _FIRST_WINDOW) * schedule.rounds * period))

    simulate(scenario)
    return rates[0]


def false_accepts(validators: int, liars: int, quorum: int, judges: int) -> float:
    """Return the probability that at least `quorum` of a group's judges are liars: the tail of a hypergeometric."""
    ways = sum(
        math.comb(liars, count) * math.comb(validators - liars, judges - count) for count in range(quorum, judges + 1)
    )
    return ways / math.comb(validators, judges)


def false_refusals(validators: int, liars: int, quorum: int, judges: int) -> float:
    """Return the probability that fewer than `quorum` of a group's judges are honest."""
    return 1.0 - false_accepts(validators, validators - liars, quorum, judges)


def counted(validators: int, liars: int, quorum: int, judges: int) -> tuple[float, float]:
    """Return the same two shares, counted over deals."""
    keys = tuple(sorted(content_digest(bytes([number])) for number in range(validators)))
    lying = frozenset(sorted(keys, key=content_digest)[:liars])
    roster = Roster(keys, judges)
    panels = [roster.judges_of(bytes(32), 0, bytes(32), bytes(32), group) for group in range(_DEALS)]
    lies = [len(panel & lying) for panel in panels]
    return (sum(count >= quorum for count in lies) / _DEALS, sum(judges - count < quorum for count in lies) / _DEALS)


def windows_until_refused(miss_rate: float, validators: int, judges: int, row: Thresholds, seed: int) -> int:
    """Return the number of windows after which the evidence of some validator refuses a cheat.

    Args:
        miss_rate: of the cheat's tokens, which then fall short by _MARGIN.
    """
    rng, windows = np.random.default_rng(seed), []
    misses = rng.binomial(_GROUP_TOKENS, miss_rate, size=(_MOST_WINDOWS, _GROUPS, 1))
    panels = np.argsort(rng.random((_MOST_WINDOWS, _GROUPS, validators)), axis=2)[:, :, :judges]
    step = bisect_left(row.margin.beyond, _MARGIN / NOISE_UNIT) - 1
    scores, growths = zip(*((item.scores[step], item.growth) for item in row.margin.alternatives), strict=True)
    added = misses * np.array(scores) - _GROUP_TOKENS * np.array(growths)
    for validator in range(validators):
        dealt = (panels == validator).any(axis=2)
        refused = np.flatnonzero((cusum(added[dealt]) > row.threshold).any(axis=1))
        windows.append(int(np.nonzero(dealt)[0][refused[0]]) + 1 if len(refused) else _MOST_WINDOWS)
    return min(windows)


def _throughput_rows(only: str) -> Iterator[str]:
    header = "".join(f"{count:>10}" for count in _VALIDATORS)
    yield f"{'validators':40}{header}"
    for quorum in _QUORUMS:
        for way, spares in (("all judge all", MAX_KEYS), ("dealt", 0)):
            name = f"quorum {quorum}, {way}: groups a second"
            if only not in name:
                continue
            cells = [
                f"{throughput(count, quorum, spares):10.2f}" if count >= quorum else f"{'-':>10}"
                for count in _VALIDATORS
            ]
            yield f"{name:40}" + "".join(cells)


def _lie_rows() -> Iterator[str]:
    yield f"{'quorum, spares':18}" + "".join(f"{f'{liars} of {count}':>16}" for count, liars in _LIARS)
    largest_difference = 0.0
    for quorum, spares in _PANELS:
        cells = []
        for count, liars in _LIARS:
            judges = min(count, quorum + spares)
            exact = [chance(count, liars, quorum, judges) for chance in (false_accepts, false_refusals)]
            both = zip(exact, counted(count, liars, quorum, judges), strict=True)
            largest_difference = max(largest_difference, *(abs(value - share) for value, share in both))
            cells.append(" / ".join(f"{value:.3f}" for value in exact))
        yield f"{f'{quorum}, {spares}':18}" + "".join(f"{cell:>16}" for cell in cells)
    yield f"largest difference from the same shares counted over {_DEALS:,} deals: {largest_difference:.3f}"


def _evidence_rows() -> Iterator[str]:
    thresholds = proof_file.read(PACKAGED_POLICY / proof_file.NAME).row("torch-bfloat16", "torch-bfloat16")
    yield f"{'tokens that miss the draw':34}" + "".join(f"{rate:>10.1%}" for rate in _MISS_RATES)
    for validators, judges in ((1, 1), (4, 2), (4, 1), (8, 2), (8, 1)):
        medians = []
        for rate in _MISS_RATES:
            counts = [windows_until_refused(rate, validators, judges, thresholds, seed) for seed in range(_KEYS)]
            medians.append(float(np.median(counts)))
        yield f"{f'{validators} validators, {judges} judges: windows':34}" + "".join(f"{m:>10g}" for m in medians)


def table(only: str) -> None:
    """Print the tables.

    Args:
        only: measure the throughput of rows whose names contain this, and nothing else; empty for all tables.
    """
    parts: Sequence[tuple[str, Iterator[str]]] = (
        (
            "lies: false groups that liars accept / true groups that they refuse or leave out, of all; exact",
            _lie_rows(),
        ),
        (
            f"evidence: median windows of {_GROUPS} groups of {_GROUP_TOKENS} tokens until the first validator's "
            f"evidence refuses, over {_KEYS} keys, at most {_MOST_WINDOWS}",
            _evidence_rows(),
        ),
        (
            f"throughput: {_MINERS} miners of {_MINER_GROUPS} groups in windows of 2 s; a group's prefill takes "
            f"{_PREFILL_SECONDS:g} s of simulated time; windows {_FIRST_WINDOW} to {_LAST_WINDOW - 1}",
            _throughput_rows(only),
        ),
    )
    for title, rows in parts[-1:] if only else parts:
        print(title)
        for row in rows:
            print(row, flush=True)
