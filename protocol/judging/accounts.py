"""What a validator's ledger says of each miner: balance and score, clean windows, and the evidence against it
(docs/spec/ledger.md). Pure.

The rows of the windows that count are kept as columns of numbers, some 200 bytes of a row where a `LedgerRow` takes
4 KB. With N miners and W windows that count, a new window costs N steps of Python and W operations on arrays of N.
"""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final, Self

import numpy as np
from numpy.typing import NDArray

from protocol import limits
from protocol.judging.evidence import LUCK_BETS, NO_EVIDENCE, Evidence, weigh
from protocol.judging.ledger import GROUP, SHARE, Amendment, Summary, excess_misses, shares
from protocol.proof import MEASURED, STATISTICS, ProofSpec, StatisticName, Thresholds
from protocol.run import ScoringSpec

_ABSENT: Final = -(1 << 61)
"""In place of the evidence of an alternative that a row of thresholds does not have."""

_SAFE: Final = 1 << 62
"""Sums below this are computed in int64, larger ones with Python's integers."""

_GROUPS: Final = ("pledged", "submitted", "dealt", "audited", "accepted", "rejected")


class _Slots:
    """Numbers for names, from 0 on; a number whose last use was released is given to another name."""

    def __init__(self) -> None:
        self.numbers: dict[Any, int] = {}
        self._names: list[Hashable] = []
        self._uses: list[int] = []
        self._free: list[int] = []

    def __len__(self) -> int:
        return len(self._names)

    def use(self, names: Iterable[Hashable]) -> NDArray[np.intp]:
        """Return the number of each name, and count one more use of it."""
        result = []
        for name in names:
            number = self.numbers.get(name)
            if number is None:
                number = self._free.pop() if self._free else len(self._names)
                if number == len(self._names):
                    self._names.append(name)
                    self._uses.append(0)
                self._names[number], self.numbers[name] = name, number
            self._uses[number] += 1
            result.append(number)
        return np.array(result, np.intp)

    def release(self, numbers: NDArray[np.intp]) -> None:
        """Count one use less of each of these numbers."""
        for number in numbers.tolist():
            self._uses[number] -= 1
            if not self._uses[number]:
                del self.numbers[self._names[number]]
                self._free.append(number)


@dataclass(frozen=True)
class _Window:
    """The rows of one window, N of them: M with accepted groups, and C in which a statistic was computed."""

    window: int
    scale: tuple[int, int]
    miners: NDArray[np.intp]  # [N], numbers of the miners
    groups: NDArray[np.int32]  # int32 [6, N], by _GROUPS
    amendments: NDArray[np.int64]  # int64 [3, N]: how many, and the groups that they accept and reject
    clean: NDArray[np.bool_]  # bool [N], `LedgerRow.is_clean`
    priced: NDArray[np.intp]  # [M] numbers of (miner, arithmetic)
    excesses: NDArray[Any]  # [M, P] excess misses of `priced` in each statistic
    computed: NDArray[np.intp]  # [C] numbers of (miner, arithmetic)
    evidence: NDArray[np.int64]  # int64 [C, A], what `computed` add to each alternative
    thresholds: NDArray[np.int64]  # int64 [C, 1], that this evidence is compared with

    @property
    def is_unaudited(self) -> NDArray[np.bool_]:
        """Of each row, whether groups count that were not audited."""
        _, _, dealt, audited, _, rejected = self.groups
        result: NDArray[np.bool_] = (rejected == 0) & (audited > 0) & (audited < dealt) & (self.amendments[0] == 0)
        return result


class Accounts:
    """The accounts of all miners by the summaries of one validator that count, up to the newest one; the proof has the
    thresholds of each pair of arithmetics.
    """

    def __init__(self, scoring: ScoringSpec, proof: ProofSpec) -> None:
        self._scoring = scoring
        self._proof = proof
        self._windows: dict[int, _Window] = {}
        self._miners, self._pairs = _Slots(), _Slots()  # the latter of (miner, its arithmetic)
        self._thresholds: dict[int, Thresholds] = {}  # by pair, of its newest row in which a statistic was computed
        self._evidence: NDArray[np.int64] | None = None  # by pair, until the next window comes
        most = {name: max(len(_alternatives(row, name)) for row in proof.table) for name in (*STATISTICS, "replay")}
        ends = np.cumsum([0, *most.values()]).tolist()
        self._columns = dict(zip(most, pairwise(ends), strict=True))  # of each statistic's evidence
        self._width = ends[-1]

    @classmethod
    def of(cls, ledger: Iterable[Summary], scoring: ScoringSpec, proof: ProofSpec) -> Self:
        """Return the accounts after some summaries of one validator, ascending by window."""
        accounts = cls(scoring, proof)
        for summary in ledger:
            accounts.add(summary)
        return accounts

    def add(self, summary: Summary) -> None:
        """Add the newest summary; those that are too old to count beside it are dropped."""
        for window in [window for window in self._windows if window <= summary.window - self._scoring.windows]:
            old = self._windows.pop(window)
            self._miners.release(old.miners)
            self._pairs.release(np.concatenate((old.priced, old.computed)))
        for amendment in summary.amendments:
            self._amend(amendment)
        rows, scale = summary.rows, summary.dealing.scale
        priced = [row for row in rows if row.accepted]
        excesses = [
            [
                excess_misses(row, self._proof.row(row.arithmetic, summary.arithmetic), name) * scale[0] // scale[1]
                for name in MEASURED
            ]
            for row in priced
        ]
        computed = [row for row in rows if row.counts.computed]
        pairs = self._pairs.use((row.miner, row.arithmetic) for row in computed)
        evidence = np.full((len(computed), self._width), _ABSENT, np.int64)
        for place, (row, pair) in enumerate(zip(computed, pairs.tolist(), strict=True)):
            thresholds = self._thresholds[pair] = self._proof.row(row.arithmetic, summary.arithmetic)
            for name, values in weigh(row.counts, thresholds).items():
                begin = self._columns[name][0]
                evidence[place, begin : begin + len(values)] = [
                    min(max(value, _ABSENT + 1), -_ABSENT) for value in values
                ]
        self._windows[summary.window] = _Window(
            window=summary.window,
            scale=scale,
            miners=self._miners.use(row.miner for row in rows),
            groups=np.array([[getattr(row, name) for row in rows] for name in _GROUPS], np.int32),
            amendments=np.zeros((3, len(rows)), np.int64),
            clean=np.array([row.is_clean for row in rows], np.bool_),
            priced=self._pairs.use((row.miner, row.arithmetic) for row in priced),
            excesses=self._array(excesses).reshape(len(priced), len(MEASURED)),
            computed=pairs,
            evidence=evidence,
            thresholds=np.array([self._thresholds[pair].threshold for pair in pairs.tolist()], np.int64)[:, None],
        )
        self._evidence = None

    def _amend(self, amendment: Amendment) -> None:
        table, miner = self._windows.get(amendment.window), self._miners.numbers.get(amendment.miner)
        if table is not None and miner is not None:
            change = np.array([1, amendment.accepted, amendment.rejected])
            table.amendments[:, table.miners == miner] += change[:, None]

    def _array(self, values: Sequence[Any]) -> NDArray[Any]:
        """Return integers as an array in which the sum over all windows is exact."""
        array = np.array(values, object)
        largest = max((abs(value) for value in array.flat), default=0)
        return array if largest * self._scoring.windows >= _SAFE else array.astype(np.int64)

    def balances(self) -> dict[bytes, int]:
        """Return each miner's balance, in millionths of a group of the newest window; it is negative if penalties
        exceed the credit. All values are whole numbers, and divisions round down.

        A validator counts the groups that were dealt to it, each for as many as there are validators for each judge. So
        a balance is on average that of a validator to which all groups are dealt. Unaudited ones count as accepted if
        none of the miner's groups of that window was rejected and there is no amendment. What remains of a value after
        each window is `decay`. Misses in accepted groups have a price as far as they exceed what honest work may have
        over all windows that count: a cheat too small to be refused costs more than it saves. What honest work may have
        is decided in each window by its pair of arithmetics, and windows in which a miner declared one arithmetic do
        not make up for misses in those of another.
        """
        values = [(table, self._values(table)) for table in self._windows.values()]
        exact = np.result_type(np.int64, *(value for _, value in values))
        balances = np.zeros(len(self._miners), exact)
        excesses = np.zeros(
            (len(self._pairs), len(MEASURED)), np.result_type(np.int64, *(t.excesses for t in self._windows.values()))
        )
        decay, age, newest = SHARE, 0, max(self._windows, default=0)  # what remains of a value after so many windows
        for table, value in reversed(values):
            while age < newest - table.window:
                decay, age = decay * self._scoring.decay // SHARE, age + 1
            balances[table.miners] += _decayed(value, decay)
            excesses[table.priced] += _decayed(table.excesses, decay)
        result = {miner: int(balances[number]) for miner, number in self._miners.numbers.items()}
        for (miner, _), number in self._pairs.numbers.items():
            for excess in excesses[number].tolist():
                result[miner] -= self._scoring.miss_price * max(0, excess) // GROUP
        return result

    def _values(self, table: _Window) -> NDArray[Any]:
        """Return what each row of a window is worth, in millionths of a group."""
        scoring, (multiplier, divisor) = self._scoring, table.scale
        largest_groups = max(GROUP, scoring.penalty, scoring.shortfall) * int(table.groups.sum(0).max(initial=0))
        largest = (largest_groups + scoring.penalty * int(table.amendments.max(initial=0))) * multiplier
        exact = object if largest * scoring.windows >= _SAFE else np.int64
        pledged, submitted, dealt, audited, accepted, rejected = table.groups.astype(exact)
        amended, more_accepted, more_rejected = table.amendments.astype(exact)
        counting = dealt * (accepted + rejected) // np.maximum(1, audited) - rejected  # as `LedgerRow.counting`
        trusts_all = (amended == 0) & (rejected == 0)
        credit = np.where(trusts_all, counting, np.minimum(accepted + more_accepted, dealt))
        earned = credit * GROUP - scoring.penalty * (rejected + more_rejected)
        value = earned * multiplier // divisor - scoring.shortfall * (pledged - submitted)
        lapsed = (dealt > 0) & (audited == 0)
        result: NDArray[Any] = np.where(lapsed, 0, value)
        return result

    def scores(self) -> tuple[tuple[bytes, int], ...]:
        """Return the `scores` of the newest summary: (miner, share) of each miner that earns something, ascending by
        miner.

        If more than MAX_WINDOW_MINERS miners earn something, those with the largest shares are listed; of equal shares,
        the lower key comes first.
        """
        earners = [(miner, share) for miner, share in shares(self.balances(), self._scoring).items() if share]
        earners.sort(key=lambda item: (-item[1], item[0]))
        return tuple(sorted(earners[: limits.MAX_WINDOW_MINERS]))

    def clean_windows(self) -> dict[bytes, int]:
        """Return each miner's clean windows since its last rejection."""
        counts = np.zeros(len(self._miners), np.int64)
        for table in self._windows.values():
            counts[table.miners] = np.where(table.groups[-1] > 0, 0, counts[table.miners] + table.clean)
        return {miner: int(counts[number]) for miner, number in self._miners.numbers.items()}

    def rejections(self, until: int | None = None) -> dict[bytes, int]:
        """Return, for each miner with rejected groups, the newest such window (of those up to `until`)."""
        newest = np.full(len(self._miners), -1, np.int64)
        for window, table in self._windows.items():
            if until is None or window <= until:
                newest[table.miners[table.groups[-1] > 0]] = window
        return {miner: int(newest[number]) for miner, number in self._miners.numbers.items() if newest[number] >= 0}

    def unaudited(self, rejections: Mapping[bytes, int]) -> list[tuple[int, bytes]]:
        """Return each (window, miner) whose row has unaudited groups that count although the miner was rejected in a
        later window, ascending by window. The newest window of a rejection is given by miner.
        """
        ends = np.full(len(self._miners), -1, np.int64)
        names = {self._miners.numbers[miner]: miner for miner in rejections}
        ends[list(names)] = list(rejections.values())
        return [
            (window, names[number])
            for window, table in self._windows.items()
            for number in table.miners[table.is_unaudited & (window < ends[table.miners])].tolist()
        ]

    def evidence_of(self, miner: bytes, arithmetic: str) -> Evidence:
        """Return the evidence against a miner from the windows in which it declared an arithmetic.

        A rejection does not end it: a miner could otherwise sacrifice a group to be rid of its evidence. It is at most
        the threshold, so that a miner that is honest from now on is soon accepted. Each declaration has its own, so
        that clean windows under wide thresholds take nothing off the evidence under narrow ones.
        """
        if self._evidence is None:
            self._evidence = np.full((len(self._pairs), self._width), _ABSENT, np.int64)
            for table in self._windows.values():  # the CUSUM of protocol/judging/evidence.py, of all miners at once
                added = table.evidence
                sums = np.maximum(self._evidence[table.computed], 0) + added
                self._evidence[table.computed] = np.where(added == _ABSENT, _ABSENT, np.minimum(sums, table.thresholds))
        number = self._pairs.numbers.get((miner, arithmetic), -1)
        if number < 0 or (self._evidence[number] == _ABSENT).all():
            return NO_EVIDENCE
        values, thresholds = self._evidence[number].tolist(), self._thresholds[number]
        return {
            name: tuple(values[self._columns[name][0] :][: len(_alternatives(thresholds, name))])
            for name in thresholds.statistics
        }


def _alternatives(thresholds: Thresholds, name: StatisticName) -> Sequence[object]:
    if name == "luck":
        return LUCK_BETS
    return thresholds.table(name).alternatives if name in thresholds.statistics else ()


def _decayed(values: NDArray[Any], decay: int) -> NDArray[Any]:
    """Return values * decay // SHARE without a product that exceeds 64 bits."""
    result: NDArray[Any] = values // SHARE * decay + values % SHARE * decay // SHARE
    return result
